"""Offloadable claims beside vLLM's own scheduler and allocator, in process: the whole life (O1 to
O3), judged by the monitor at every step and by an audit of the trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from vllm_world import NEEDS_VLLM

from kvclaims.spec.claims import CLAIM, PHASE, phase
from kvclaims.spec.content import Segment, content_ids, fingerprint, tokens_of
from kvclaims.spec.interface import RequestSpec
from kvclaims.spec.pool import REQUEST
from kvclaims.spec.vocabulary import Verdict

pytestmark = NEEDS_VLLM

SIZE = 4
USABLE = 20


class Shop:
    """A served pool of 20 blocks with a tier, watched by a monitor."""

    def __init__(
        self,
        folder: Path,
        *,
        tier: int = 40,
        in_flight: int = 1,
        load_failure_policy: str = "recompute",
        **chosen: Any,
    ) -> None:
        from kvclaims.bridge.serving.settings import Settings
        from kvclaims.bridge.vllm.serving_bench import ServedPool
        from kvclaims.checker.monitor import Monitor

        self.trace = folder / "trace.jsonl"
        settings = Settings(trace=str(self.trace), trace_tables=True, **chosen)
        self.pool = ServedPool(
            *(USABLE, SIZE, settings),
            tier=tier,
            in_flight=in_flight,
            load_failure_policy=load_failure_policy,
        )
        snapshot = self.pool.enforcer.observer.snapshot({})
        self.monitor = Monitor(snapshot.facts, snapshot.null_block)
        self.pool.enforcer.observer.listen(self.monitor)
        self.files = self.pool.driver.tier.files

    def claim(self, claim: str, label: str, blocks: int, **more: Any) -> dict[str, Any]:
        protection = more.setdefault("protection", "offloadable")
        self.monitor.introduce(CLAIM, f"a/{claim}#1", protection == "hard_protected")
        return self.pool.declare(claim, label, blocks, **more).body

    def ask(
        self,
        request: str,
        label: str,
        blocks: int,
        more: int = 1,
        answer: int = 1,
        **extra: Any,
    ) -> None:
        extra = {"kvclaims_owner": "a", **extra}
        tokens = list(tokens_of((Segment(label, blocks), Segment("z", 0, more)), SIZE))
        name = self.pool.ask(request, tokens, answer, **extra)
        self.monitor.introduce(REQUEST, name, bool(extra.get("kvclaims_admit_reuse", True)))

    def serve(self, request: str, label: str, blocks: int, **more: Any) -> None:
        self.ask(request, label, blocks, **more)
        self.pool.run()

    def phase(self, claim: str) -> str:
        return str(self.pool.do("inspect", claim_id=claim).body["phase"])

    def told(self, *names: str) -> list[str]:
        seen = [e.event for e in self.pool.serving.recorder.events]
        return [event for event in seen if not names or event in names]

    def holds(self, label: str, blocks: int) -> bool:
        """Whether each block of this content reads in memory as what it is."""
        keys = content_ids(tokens_of((Segment(label, blocks),), SIZE), SIZE)
        where = [self.pool.enforcer.observer.lookup(key) for key in keys]
        read = self.pool.driver.fingerprint(tuple(b for b in where if b is not None))
        return tuple(read) == tuple(map(fingerprint, keys))

    def close(self) -> Any:
        """End the run; what the audit makes of it, nothing broken anywhere."""
        from kvclaims.checker.audit import audit

        self.pool.run()
        self.monitor.audit(self.pool.enforcer.observer.snapshot(self.pool.enforcer.book.pins()))
        assert self.monitor.violations == []
        self.pool.close()
        report = audit([self.trace])
        assert report.verdict is Verdict.HOLDS, list(report.lines())
        return report.runs[0].fold


def away(shop: Shop, claim: str = "c", label: str = "A", blocks: int = 8) -> None:
    """A claim that was materialized, and is offloaded."""
    shop.claim(claim, label, blocks)
    shop.serve(f"cache {claim}", label, blocks)
    assert shop.phase(claim) == "materialized"
    shop.serve(f"press {claim}", "P", 18)
    assert shop.phase(claim) == "offloaded"


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path)


def test_pressure_offloads_and_a_request_restores(shop: Shop) -> None:
    away(shop)
    assert not shop.holds("A", 8)
    shop.serve("again", "A", 8)
    assert shop.phase("c") == "materialized"
    assert shop.holds("A", 8)
    fold = shop.close()
    order = [
        "resident_claim_offloaded",
        "restoration_required",
        "external_load_started",
        "external_load_finished",
        "resident_claim_restored",
    ]
    assert shop.told(*order) == order
    assert fold.failed_restores == []


def test_it_owes_no_room_on_the_device(shop: Shop) -> None:
    """The whole pool can be promised or used beside it, while it is away and while it is not."""
    told = shop.claim("c", "A", 18)
    assert (told["decision"], told["reserved_blocks"]) == ("accepted", 0)
    shop.serve("cache", "A", 18)
    assert shop.claim("hard", "B", 20, protection="hard_protected")["decision"] == "accepted"
    shop.serve("fill", "B", 20, more=0)
    assert (shop.phase("c"), shop.phase("hard")) == ("offloaded", "materialized")
    shop.serve("again", "A", 18)  # what hard claims hold is not taken for a restore
    told = shop.pool.outputs["again"].kv_transfer_params["kvclaims"]
    assert (told["outcome"], told["shortfall"]) == ("refused", 19)
    assert shop.phase("c") == "offloaded"
    shop.close()


def test_a_claim_counts_as_kept_only_once_it_is_in_the_tier(shop: Shop) -> None:
    shop.files.is_full = True
    shop.claim("c", "A", 8)
    shop.serve("cache", "A", 8)
    assert shop.phase("c") == "accepted"
    assert not shop.pool.scheduler.has_requests()  # an engine with nothing to do does not insist
    shop.serve("more", "P", 3)
    assert shop.phase("c") == "accepted"
    shop.files.is_full = False
    shop.serve("still more", "P", 6, answer=9)
    assert shop.phase("c") == "materialized"
    shop.close()


def step_until(shop: Shop, request: str) -> None:
    """Step until the request has its answer, whatever the tier still has to do."""
    for _ in range(60):
        if request in shop.pool.outputs:
            return
        shop.pool.step()
    raise AssertionError(f"{request} has no answer")


def gone_early(shop: Shop, label: str = "A", blocks: int = 8) -> None:
    """A claim was computed whole, and its blocks were taken while its copies were being written."""
    shop.pool.driver.tier.patience = lambda: 0
    shop.claim("c", label, blocks)
    shop.ask("cache", label, blocks)
    step_until(shop, "cache")
    shop.ask("press", "P", 18)
    step_until(shop, "press")
    shop.pool.driver.tier.patience = None


def harm(shop: Shop) -> dict[str, Any]:
    """What was told of the one harm."""
    events = shop.pool.serving.recorder.events
    (told,) = [e for e in events if e.event == "resident_claim_harmed"]
    return {"claim": told.claim_id, **told.data}


def test_what_is_evicted_before_it_has_a_copy_is_harmed(shop: Shop) -> None:
    """It was whole on the device, and no place has it now: that is told (L3, P3)."""
    shop.files.is_full = True
    shop.claim("c", "A", 8)
    shop.serve("cache", "A", 8)
    assert shop.phase("c") == "accepted"
    shop.serve("press", "P", 18)
    told = harm(shop)
    assert (told["claim"], told["cause"]) == ("a/c", "own_choice")
    assert told["before"] == {"holds": True, "leading": 8, "survivors": 8}
    assert (told["after"]["holds"], told["after"]["survivors"] < 8) == (False, True)
    body = shop.pool.do("inspect", claim_id="c").body
    assert (body["phase"], body["harmed_by"]) == ("harmed", "own_choice")
    assert body["unsaved_reason"] == "no space"
    assert shop.monitor.shadow.get(phase, ("a/c#1",)) == PHASE.values.index("demoted")  # gone there
    order = ["resident_claim_unsaved", "resident_block_lost", "resident_claim_harmed"]
    assert list(dict.fromkeys(shop.told(*order))) == order
    assert shop.pool.do("pool").body["tier_promised_blocks"] == 0
    fold = shop.close()
    assert fold.unsaved == {"a/c": 8}


def test_what_has_no_copy_yet_is_evicted_last(shop: Shop) -> None:
    shop.files.is_full = True
    shop.claim("c", "A", 6)
    shop.serve("cache", "A", 6)
    shop.serve("later", "B", 6)
    shop.serve("press", "P", 9)  # there is room without the claim's blocks, which are older
    assert (shop.phase("c"), shop.holds("A", 6), shop.holds("B", 6)) == ("accepted", True, False)
    shop.files.is_full = False
    shop.serve("more", "P", 9, answer=9)
    assert shop.phase("c") == "materialized"
    shop.serve("press again", "Q", 9)  # what has a copy is evicted as anything else
    assert shop.phase("c") == "offloaded"
    shop.close()


def test_what_goes_while_its_copies_are_written_is_offloaded_once_they_are(shop: Shop) -> None:
    gone_early(shop)
    assert (shop.phase("c"), shop.holds("A", 8)) == ("accepted", False)
    shop.pool.run()
    assert shop.phase("c") == "offloaded"
    order = ["resident_claim_materialized", "resident_claim_offloaded"]
    assert shop.told(*order, "resident_claim_harmed") == order
    shop.serve("again", "A", 8)
    assert (shop.phase("c"), shop.holds("A", 8)) == ("materialized", True)
    shop.close()


def test_a_restore_of_it_that_fails_is_blamed_on_it(shop: Shop) -> None:
    gone_early(shop)
    shop.pool.run()
    shop.files.broken.add(sorted_names(shop, "A", 8)[2])
    shop.serve("again", "A", 8)
    told = shop.pool.outputs["again"].kv_transfer_params["kvclaims"]["restoration_failed"]
    assert told == [{"claim": "c", "owner": "a", "blocks": 8}]
    assert shop.phase("c") == "harmed"
    assert shop.close().failed_restores == ["a/c"]


def test_a_copy_that_fails_after_its_block_is_gone_harms_its_claim(shop: Shop) -> None:
    gone_early(shop)
    shop.files.is_full = True
    shop.pool.run()
    told = harm(shop)
    assert (told["claim"], told["cause"]) == ("a/c", "fault")
    events = shop.pool.serving.recorder.events
    (why,) = [e for e in events if e.event == "resident_claim_unsaved"]
    keys = content_ids(tokens_of((Segment("A", 8),), SIZE), SIZE)
    assert (why.claim_id, why.prefix_id) == ("a/c", keys[0])
    assert dict(why.data) == {"tier": "files", "blocks": 8, "reason": "no space"}
    body = shop.pool.do("inspect", claim_id="c").body
    assert (body["harmed_by"], body["unsaved_reason"]) == ("fault", "no space")
    stats = shop.pool.do("stats").body
    assert [(u["claim"], u["count"]) for u in stats["unsaved"]] == [(stats["harms"][0]["claim"], 8)]
    shop.close()


def test_two_claims_on_one_copy_are_both_told_of_its_failure(shop: Shop) -> None:
    shop.claim("short", "A", 3)
    shop.claim("later", "A", 12)  # never whole: nothing of it is lost that it had
    gone_early(shop)
    shop.files.is_full = True
    shop.pool.run()
    assert [shop.phase(c) for c in ("short", "c", "later")] == ["harmed", "harmed", "accepted"]
    assert shop.told().count("resident_claim_unsaved") == 3
    assert shop.close().unsaved == {"a/short": 3, "a/c": 8, "a/later": 8}


@pytest.mark.parametrize("how", ["release", "demote", "expire"])
def test_a_claim_that_ends_while_its_copies_are_written_is_not_harmed(shop: Shop, how: str) -> None:
    gone_early(shop)
    if how == "expire":
        shop.pool.do("renew", claim_id="c", renewal={"duration": 5})
        shop.pool.now += 6
    else:
        shop.pool.do(how, claim_id="c")
    shop.files.is_full = True
    shop.pool.run()
    assert shop.phase("c") == {"release": "released", "demote": "demoted", "expire": "expired"}[how]
    assert shop.told("resident_claim_unsaved", "resident_claim_harmed") == []
    shop.close()


def test_a_claim_that_was_never_whole_loses_nothing(shop: Shop) -> None:
    shop.files.is_full = True
    shop.claim("c", "A", 8)
    shop.serve("cache", "A", 4)
    shop.serve("press", "P", 18)
    assert shop.phase("c") == "accepted"
    shop.files.is_full = False
    shop.serve("whole", "A", 8)
    shop.pool.run()
    shop.serve("more", "P", 8, answer=30)  # time enough to try again
    assert shop.phase("c") in ("materialized", "offloaded")
    shop.close()


def test_what_the_tier_keeps_already_is_kept_for_a_new_claim_too(shop: Shop) -> None:
    away(shop)
    shop.pool.do("release", claim_id="c")
    assert shop.claim("next", "A", 8)["phase"] == "offloaded"
    shop.serve("again", "A", 8)
    assert (shop.phase("next"), shop.holds("A", 8)) == ("materialized", True)
    shop.close()


def test_content_that_is_there_already_is_copied_at_once(shop: Shop) -> None:
    shop.serve("cache", "A", 8)
    shop.claim("c", "A", 8)
    assert shop.phase("c") == "accepted"
    assert shop.pool.scheduler.has_requests()  # a step without a request makes the copies
    shop.pool.step()
    assert shop.phase("c") == "materialized"
    assert not shop.pool.scheduler.has_requests()
    shop.close()


@pytest.mark.parametrize("wrong", [0, 3, 7])
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_copy_that_is_not_right_is_not_served(tmp_path: Path, policy: str, wrong: int) -> None:
    shop = Shop(tmp_path, load_failure_policy=policy)
    away(shop)
    away(shop, "other", "B")
    shop.files.broken.add(sorted_names(shop, "A", 8)[wrong])
    shop.serve("again", "A", 8)
    answer = shop.pool.outputs["again"]
    told = answer.kv_transfer_params["kvclaims"]["restoration_failed"]
    assert told == [{"claim": "c", "owner": "a", "blocks": 8}]
    assert str(answer.finish_reason) == {"recompute": "length", "fail": "error"}[policy]
    assert (shop.phase("c"), shop.phase("other")) == ("harmed", "offloaded")
    if policy == "recompute":
        assert shop.holds("A", 8)
    else:
        assert shop.pool.enforcer.queue_length() == USABLE
    shop.serve("other again", "B", 8)  # the other claim is none the worse
    assert shop.phase("other") == "materialized"
    shop.serve("once more", "A", 8)  # and neither is the content
    assert shop.holds("A", 8)
    assert shop.close().failed_restores == ["a/c"]


def sorted_names(shop: Shop, label: str, blocks: int) -> list[str]:
    """The names of the copies of this content, in order."""
    keys = content_ids(tokens_of((Segment(label, blocks),), SIZE), SIZE)
    return [shop.pool.enforcer.offloading.tier.copies[key] for key in keys]


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_half_a_restore_of_two_claims_on_one_prefix(tmp_path: Path, policy: str) -> None:
    """What the load brought before it failed is the other's, which is none the worse."""
    shop = Shop(tmp_path, load_failure_policy=policy)
    shop.claim("short", "A", 4)
    away(shop)
    assert shop.phase("short") == "offloaded"
    shop.files.broken.add(sorted_names(shop, "A", 8)[5])
    shop.serve("again", "A", 8)
    told = shop.pool.outputs["again"].kv_transfer_params["kvclaims"]["restoration_failed"]
    assert [t["claim"] for t in told] == ["c"]
    assert shop.phase("c") == "harmed"
    assert shop.phase("short") == {"recompute": "materialized", "fail": "restoring"}[policy]
    shop.serve("once more", "A", 4)
    assert (shop.phase("short"), shop.holds("A", 4)) == ("materialized", True)
    assert shop.close().failed_restores == ["a/c"]


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_restore_that_fails_in_what_two_claims_share_ends_both(
    tmp_path: Path, policy: str
) -> None:
    shop = Shop(tmp_path, load_failure_policy=policy)
    shop.claim("short", "A", 4)
    away(shop)
    shop.files.broken.add(sorted_names(shop, "A", 8)[2])
    shop.serve("again", "A", 8)
    told = shop.pool.outputs["again"].kv_transfer_params["kvclaims"]["restoration_failed"]
    assert [t["claim"] for t in told] == ["short", "c"]
    assert shop.close().failed_restores == ["a/short", "a/c"]


def loading(shop: Shop) -> Any:
    """The claim is away, and a request that needs it waits for the load of it."""
    away(shop)
    shop.ask("again", "A", 8)
    shop.pool.driver.dispatch()
    assert shop.phase("c") == "restoring"
    return shop.pool.driver


@pytest.mark.parametrize("is_right", [True, False])
@pytest.mark.parametrize("how", ["release", "demote", "expire"])
def test_a_claim_that_ends_while_it_is_restored(shop: Shop, how: str, is_right: bool) -> None:
    driver = loading(shop)
    if how == "expire":
        shop.pool.do("renew", claim_id="c", renewal={"duration": 5})
        shop.pool.now += 6
        shop.pool.desk.tick()
    else:
        shop.pool.do(how, claim_id="c")
    if not is_right:
        shop.files.broken.add(sorted_names(shop, "A", 8)[2])
    driver.complete()
    shop.pool.run()
    assert shop.holds("A", 8)
    assert shop.phase("c") == {"release": "released", "demote": "demoted", "expire": "expired"}[how]
    assert shop.told("restoration_failed", "resident_claim_harmed", "resident_claim_unsaved") == []
    assert shop.close().failed_restores == []


def test_a_claim_made_while_another_is_restored_is_restored_by_its_own_load(shop: Shop) -> None:
    """What was on its way before is no restore of it, and is not counted as one (O3)."""
    driver = loading(shop)
    shop.claim("next", "A", 8)
    assert shop.phase("next") == "offloaded"
    driver.complete()
    shop.pool.run()
    assert (shop.phase("c"), shop.phase("next")) == ("materialized", "offloaded")
    shop.serve("press again", "Q", 18)
    shop.serve("once more", "A", 8)
    assert (shop.phase("c"), shop.phase("next")) == ("materialized", "materialized")
    assert shop.holds("A", 8)
    shop.close()


def test_the_next_generation_of_a_claim_has_nothing_of_the_load_of_the_last(shop: Shop) -> None:
    driver = loading(shop)
    shop.pool.do("release", claim_id="c")
    shop.monitor.introduce(CLAIM, "a/c#2", False)
    shop.pool.declare("c", "A", 8, protection="offloadable", generation=2)
    shop.files.broken.add(sorted_names(shop, "A", 8)[2])
    driver.complete()
    shop.pool.run()
    assert (shop.phase("c"), harm(shop)["cause"]) == ("harmed", "fault")
    assert shop.close().failed_restores == []  # none was required for it


@pytest.mark.parametrize("is_right", [True, False])
def test_who_waits_for_the_load_of_one_that_is_aborted_loads_itself(
    tmp_path: Path, is_right: bool
) -> None:
    from vllm.v1.request import RequestStatus

    shop = Shop(tmp_path, in_flight=2)
    driver = loading(shop)
    shop.ask("waits", "A", 8, more=2)
    driver.dispatch()
    shop.pool.scheduler.finish_requests("again", RequestStatus.FINISHED_ABORTED)
    if not is_right:
        shop.files.broken.add(sorted_names(shop, "A", 8)[2])
    driver.complete()
    driver.complete()
    shop.pool.run()
    assert str(shop.pool.outputs["waits"].finish_reason) == "length"
    assert shop.holds("A", 8)
    assert shop.phase("c") == ("materialized" if is_right else "harmed")
    assert shop.pool.enforcer.offloading.unrestored == {}
    fold = shop.close()
    assert fold.failed_restores == ([] if is_right else ["a/c"])


def test_a_failed_load_that_nobody_claims_is_blamed_on_nobody(shop: Shop) -> None:
    away(shop)
    names = sorted_names(shop, "A", 8)
    shop.pool.do("release", claim_id="c")
    shop.files.broken.add(names[2])
    shop.serve("again", "A", 8)
    assert shop.holds("A", 8)
    assert "external_load_finished" in shop.told()
    assert shop.close().failed_restores == []


def compute(shop: Shop, request: str, label: str, blocks: int) -> None:
    """A request that reads no cache: it computes what the tier has."""
    arrive(shop, request, label, blocks)
    shop.pool.run()


def arrive(shop: Shop, request: str, label: str, blocks: int) -> None:
    tokens = tokens_of((Segment(label, blocks), Segment("z", 0, 1)), SIZE)
    made = shop.pool.driver.request(RequestSpec(request, tokens), {})
    made.skip_reading_prefix_cache = True
    shop.monitor.introduce(REQUEST, request, True)
    shop.pool.driver.add(made)


def test_content_that_is_computed_again_is_not_restored(shop: Shop) -> None:
    away(shop)
    compute(shop, "anew", "A", 8)
    assert shop.holds("A", 8)
    assert shop.phase("c") == "offloaded"
    assert shop.told("restoration_required", "resident_claim_restored") == []
    shop.close()


def test_nor_is_a_claim_of_which_a_part_was_loaded_and_the_rest_computed(shop: Shop) -> None:
    away(shop)
    shop.serve("part", "A", 3)
    compute(shop, "anew", "A", 8)
    assert shop.holds("A", 8)
    assert shop.phase("c") == "restoring"
    shop.serve("press again", "Q", 18)
    shop.serve("whole", "A", 8)
    assert shop.phase("c") == "materialized"
    shop.close()


def test_a_request_for_a_part_leaves_the_claim_on_its_way(shop: Shop) -> None:
    away(shop)
    shop.serve("part", "A", 3)
    assert shop.phase("c") == "restoring"
    assert shop.holds("A", 3)
    shop.serve("whole", "A", 8)
    assert shop.phase("c") == "materialized"
    shop.close()


def test_what_leaves_again_before_all_is_back_is_loaded_again(shop: Shop) -> None:
    away(shop)
    shop.serve("part", "A", 3)
    shop.serve("press again", "Q", 18)
    assert shop.phase("c") == "restoring"
    shop.serve("whole", "A", 8)
    assert shop.phase("c") == "materialized"
    shop.close()


def test_two_requests_for_the_same_load_it_once(shop: Shop) -> None:
    away(shop)
    shop.ask("one", "A", 8)
    shop.ask("two", "A", 8, more=2)
    shop.pool.run()
    assert shop.told("external_load_started") == ["external_load_started"]
    assert shop.phase("c") == "materialized"
    shop.close()


def test_a_request_that_is_aborted_while_it_loads_leaves_nothing(shop: Shop) -> None:
    from vllm.v1.request import RequestStatus

    away(shop)
    shop.ask("gone", "A", 8)
    driver = shop.pool.driver
    driver.dispatch()
    shop.pool.scheduler.finish_requests("gone", RequestStatus.FINISHED_ABORTED)
    driver.complete()
    assert shop.phase("c") == "restoring"
    assert shop.pool.enforcer.queue_length() == USABLE
    shop.serve("again", "A", 8)
    assert shop.phase("c") == "materialized"
    shop.close()


def test_a_request_that_leaves_nothing_behind_loads_nothing(shop: Shop) -> None:
    away(shop)
    shop.serve("quiet", "A", 8, kvclaims_admit_reuse=0)
    assert shop.told("external_load_started") == []
    assert shop.phase("c") == "offloaded"
    shop.close()


def test_the_tier_promises_no_more_than_it_has(tmp_path: Path) -> None:
    shop = Shop(tmp_path, tier=10)
    assert shop.claim("one", "A", 8)["decision"] == "accepted"
    assert shop.claim("same", "A", 8)["decision"] == "accepted"  # the same copies
    refused = shop.claim("two", "B", 8)
    assert (refused["decision"], refused["reason"]) == (
        "refused",
        "needs 8 blocks, and the tier has room for 2 of 10",
    )
    clipped = shop.claim("three", "C", 8, min_blocks=1)
    assert (clipped["decision"], clipped["granted_blocks"]) == ("conditionally_accepted", 2)
    shop.close()


def test_an_owner_gets_no_more_of_the_tier_than_its_quota(tmp_path: Path) -> None:
    shop = Shop(tmp_path, tier_quotas={"a": 10}, default_tier_quota=0)
    assert shop.claim("one", "A", 8)["decision"] == "accepted"
    refused = shop.claim("two", "B", 8)
    assert (refused["decision"], refused["reason"]) == (
        "refused",
        "exceeds the owner's quota of 10 blocks in the tier: 8 are asked and 2 left",
    )
    clipped = shop.claim("three", "C", 8, min_blocks=1)
    assert (clipped["decision"], clipped["granted_blocks"]) == ("conditionally_accepted", 2)
    assert shop.claim("soft", "D", 8, protection="soft_priority")["decision"] == "accepted"
    other = shop.pool.declare("x", "A", 1, owner="b", protection="offloadable")
    assert (other.status, other.body["reason"]) == (
        409,
        "exceeds the owner's quota of 0 blocks in the tier: 1 are asked and 0 left",
    )
    body = shop.pool.do("pool").body
    assert (body["tier_own_blocks"], body["tier_quota"]) == (10, 10)
    shop.pool.do("release", claim_id="one")
    assert shop.pool.do("pool").body["tier_own_blocks"] == 2
    assert shop.claim("four", "B", 8)["decision"] == "accepted"
    shop.close()


def test_a_claim_is_told_why_it_has_no_copies(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    shop.files.is_full = True
    shop.claim("c", "A", 8)
    shop.serve("cache", "A", 8)
    told = shop.pool.do("inspect", claim_id="c").body
    assert (told["phase"], told["unsaved_blocks"], told["unsaved_reason"]) == (
        *("accepted", 8),
        "no space",
    )
    assert caplog.messages[-1] == "8 blocks were not kept in the tier: no space; they wait: a/c"
    assert shop.pool.do("pool").body["tier_unsaved_blocks"] == 8
    shop.files.is_full = False
    shop.serve("later", "P", 6, answer=9)
    told = shop.pool.do("inspect", claim_id="c").body
    assert told["phase"] == "materialized"
    assert "unsaved_blocks" not in told
    shop.close()


def test_copies_and_loads_take_their_time(shop: Shop) -> None:
    """Nothing is said to be kept before it is, and nothing runs before its load has ended."""
    shop.pool.driver.tier.patience = lambda: 1
    shop.claim("c", "A", 8)
    shop.ask("cache", "A", 8)
    phases = []
    for _ in range(3):
        shop.pool.step()
        phases.append(shop.phase("c"))
    assert phases == ["accepted"] * 3
    shop.pool.run()  # an engine goes on until what it owes is written
    assert shop.phase("c") == "materialized"
    shop.serve("press", "P", 18)
    shop.ask("again", "A", 8)
    steps = 0
    while "again" not in shop.pool.outputs:
        assert shop.phase("c") in ("offloaded", "restoring")
        shop.pool.step()
        steps += 1
    assert steps == 8  # seven blocks, of which one is loaded in a step, and what it computes
    assert shop.phase("c") == "materialized"
    assert shop.holds("A", 8)
    shop.close()


@pytest.mark.parametrize("pace", [0, 1])
def test_a_reset_while_copies_are_written(shop: Shop, pace: int) -> None:
    shop.pool.driver.tier.patience = lambda: pace
    shop.claim("c", "A", 8)
    shop.ask("cache", "A", 8)
    for _ in range(3):
        shop.pool.step()
    assert shop.pool.scheduler.reset_prefix_cache()
    assert (shop.phase("c"), harm(shop)["cause"]) == ("harmed", "fault")
    shop.pool.driver.tier.patience = None
    shop.pool.run()
    assert shop.files.copies == {}
    shop.claim("next", "A", 8)
    shop.serve("again", "A", 8)
    assert shop.phase("next") == "materialized"
    shop.close()


def test_the_tiers_numbers_are_shown(shop: Shop) -> None:
    from kvclaims.bridge.metrics import exposition

    away(shop)
    assert (
        shop.pool.do("pool").body.items()
        >= {
            "tier_blocks": 40,
            "tier_promised_blocks": 8,
            "tier_kept_blocks": 8,
        }.items()
    )
    shop.pool.do("release", claim_id="c")
    page = exposition(shop.pool.do("stats").body).decode()
    assert "kvclaims_tier_promised_blocks 0.0" in page
    assert "kvclaims_tier_kept_blocks 8.0" in page
    shop.close()


def test_without_a_tier_there_is_nothing_to_promise(tmp_path: Path) -> None:
    from kvclaims.bridge.serving.settings import Settings
    from kvclaims.bridge.vllm.serving_bench import ServedPool

    pool = ServedPool(USABLE, SIZE, Settings())
    told = pool.declare("c", "A", 4, protection="offloadable")
    assert (told.status, told.body["reason"]) == (409, "no tier")


def test_copies_of_ended_claims_stay_until_their_room_is_needed(tmp_path: Path) -> None:
    """An end deletes nothing (L6); a later loss is told (L4)."""
    shop = Shop(tmp_path, tier=10)
    away(shop)
    shop.pool.do("release", claim_id="c")
    shop.serve("again", "A", 8)
    assert shop.told("external_load_started") == ["external_load_started"]
    shop.serve("press again", "P", 18)
    assert shop.told("block_lost_after_release") == []
    shop.claim("next", "B", 6)
    shop.serve("cache next", "B", 6)
    assert shop.phase("next") == "materialized"
    assert len(shop.told("block_lost_after_release")) == 4
    assert len(shop.files.copies) <= 10
    shop.close()


def test_what_was_promised_room_is_kept_before_what_was_not(tmp_path: Path) -> None:
    shop = Shop(tmp_path, tier=10)
    away(shop, "kept", "A", 4)
    away(shop, "ended", "B", 4)
    shop.pool.do("release", claim_id="ended")
    away(shop, "next", "C", 6)
    shop.serve("again", "A", 4)
    assert shop.phase("kept") == "materialized"
    shop.close()


def test_a_reset_empties_the_tier(shop: Shop) -> None:
    away(shop)
    shop.claim("here", "P", 5)
    shop.pool.step()
    assert shop.phase("here") == "materialized"
    assert shop.pool.scheduler.reset_prefix_cache()
    assert (shop.phase("c"), shop.phase("here")) == ("harmed", "harmed")
    shop.serve("again", "A", 8)
    assert shop.told("external_load_started") == []
    assert shop.files.copies == {}
    shop.close()


def test_a_fault_on_the_device_leaves_what_the_tier_has(shop: Shop) -> None:
    shop.claim("c", "A", 8)
    shop.serve("cache", "A", 8)
    keys = content_ids(tokens_of((Segment("A", 8),), SIZE), SIZE)
    assert shop.pool.enforcer.lose(keys[5], 5)
    assert shop.phase("c") == "offloaded"
    shop.serve("again", "A", 8)
    assert shop.phase("c") == "materialized"
    assert shop.holds("A", 8)
    shop.close()


def test_who_was_aborted_first_lets_go_first(tmp_path: Path) -> None:
    """Blocks of two requests come back when steps under way have ended, shared ones twice."""
    from vllm.v1.request import RequestStatus

    shop = Shop(tmp_path, in_flight=2)
    driver, held = shop.pool.driver, shop.pool.enforcer.observer.held
    for request, more in (("one", 1), ("two", 2)):
        shop.ask(request, "A", 4, more=more, answer=9)
        driver.dispatch()
    shop.pool.scheduler.finish_requests("one", RequestStatus.FINISHED_ABORTED)
    driver.complete()
    driver.dispatch()
    shop.pool.scheduler.finish_requests("two", RequestStatus.FINISHED_ABORTED)
    driver.complete()
    assert {name: len(blocks) for name, blocks in held.items() if blocks} == {"two": 5}
    assert shop.told("active_request_aborted") == ["active_request_aborted"]
    driver.complete()
    shop.close()


def test_a_second_copy_is_written_when_its_own_step_has_ended(tmp_path: Path) -> None:
    """Two steps under way write the same: the end of the first says nothing of the other."""
    shop = Shop(tmp_path, in_flight=2)
    driver, enforcer = shop.pool.driver, shop.pool.enforcer
    shop.ask("one", "A", 3)
    driver.dispatch()
    arrive(shop, "two", "A", 3)
    driver.dispatch()
    for written in (3, 6):
        driver.complete()
        found = enforcer.observer.where.items()
        blocks = [(block, fingerprint(key)) for key, blocks in found for block in blocks]
        assert len(blocks) == 6
        right = [block for block, digest in blocks if driver.fingerprint((block,)) == (digest,)]
        assert [block for block, _ in blocks if enforcer.is_written(block)] == right
        assert len(right) == written
    shop.close()


def test_two_steps_in_flight(tmp_path: Path) -> None:
    shop = Shop(tmp_path, in_flight=2)
    driver = shop.pool.driver

    def run() -> None:
        for _ in range(200):
            if not shop.pool.scheduler.has_requests():
                return
            driver.dispatch()
            if len(driver.flying) == 2:
                driver.complete()
        raise AssertionError("it does not end")

    shop.claim("c", "A", 8)
    for request, label, blocks in (("cache", "A", 8), ("press", "P", 17), ("again", "A", 8)):
        shop.ask(request, label, blocks)
        run()
        while driver.flying:
            driver.complete()
    assert shop.phase("c") == "materialized"
    assert shop.holds("A", 8)
    shop.close()


def test_claims_that_come_with_requests_are_told(shop: Shop) -> None:
    claim = {"claim_id": "c", "protection": "offloadable"}
    shop.monitor.introduce(CLAIM, "a/c#1", False)
    shop.serve("r", "A", 6, kvclaims=json.dumps(claim))
    told = shop.pool.outputs["r"].kv_transfer_params["kvclaims"]["claim"]
    assert (told["decision"], told["reason"]) == ("accepted", "fits the tier")
    assert shop.phase("c") == "materialized"
    shop.close()


def opened(monkeypatch: pytest.MonkeyPatch, **room: Any) -> Any:
    """The connector of a pool whose tier was given this."""
    from kvclaims.bridge.serving.settings import Settings
    from kvclaims.bridge.vllm import setup
    from kvclaims.bridge.vllm.serving_bench import ServedPool

    plain = setup.tier_config

    def given(folder: str, blocks: int, policy: str) -> dict[str, Any]:
        return {**plain(folder, blocks, policy), "kv_connector_extra_config": room}

    monkeypatch.setattr(setup, "tier_config", given)
    return ServedPool(USABLE, SIZE, Settings(), tier=1)


def test_a_tier_may_be_given_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvclaims.bridge.serving.tierfiles import OVERHEAD

    block = 2 * SIZE * 4  # keys and values of a token each, in single precision
    pool = opened(monkeypatch, folder="x", bytes=10 * (block + OVERHEAD) + 1)
    told = pool.do("pool").body
    assert (told["tier_blocks"], told["tier_copy_bytes"]) == (10, block + OVERHEAD)
    pool.close()


@pytest.mark.parametrize(
    ("room", "says"),
    [
        ({"folder": "x"}, "a folder, and blocks or bytes"),
        ({"folder": "x", "blocks": 3, "bytes": 3}, "a folder, and blocks or bytes"),
        ({"folder": "x", "blocks": 3, "floor": 1}, "a folder, and blocks or bytes"),
        ({"folder": "", "blocks": 3}, "has a folder"),
        ({"folder": "x", "blocks": 0}, "room for at least one block"),
        ({"folder": "x", "blocks": True}, "room for at least one block"),
        ({"folder": "x", "bytes": 2.5}, "room for at least one block"),
        ({"folder": "x", "bytes": 99}, "room for no block: 1 workers need 560 bytes each for one"),
    ],
)
def test_a_tier_that_cannot_be_meant_is_none(
    room: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=says):
        opened(monkeypatch, **room)
