"""Claims enforced on vLLM's own scheduler and allocator, with a pretended model."""

from __future__ import annotations

import pytest
from vllm_world import NEEDS_VLLM, World

from kvclaims.bridge.vllm.engine import IN_PROCESS
from kvclaims.checker.litmus import litmus
from kvclaims.checker.programs import select
from kvclaims.checker.supervise import Program, supervise
from kvclaims.spec.fidelity import Fidelity
from kvclaims.spec.interface import BadOperation, PoolConfig, Predicate, PredicateKind
from kvclaims.spec.operations import parse
from kvclaims.spec.vocabulary import Decision, Outcome, Phase, Protection

pytestmark = NEEDS_VLLM


def world(usable: int = 80, **more: int) -> World:
    return World(IN_PROCESS, usable, **more)


def test_its_trace_tells_its_version() -> None:
    opening = world().runtime.events()[0]
    info = IN_PROCESS.info()
    assert (opening.data["engine"], opening.data["engine_version"]) == (info.name, info.version)


def test_native_reuse_is_lost_in_silence() -> None:
    w = world()
    blocks = w.cache("A60")
    before = w.runtime.fingerprint(blocks)
    w.ask("run", "B70")
    w.drain()
    after = w.runtime.fingerprint(blocks)
    assert w.asked("run").outcome is Outcome.SERVED
    assert w.counts()["allocation_victim_selected"] == 50
    assert sum(a != b for a, b in zip(before, after, strict=True)) == 50


def test_no_admit_evicts_the_same_and_leaves_nothing() -> None:
    w = world()
    w.cache("A60")
    w.ask("run", "B70", admit_reuse=False)
    w.drain()
    assert w.asked("run").outcome is Outcome.SERVED_NO_ADMIT
    assert w.counts()["allocation_victim_selected"] == 50
    (denied,) = w.events("future_reuse_denied")
    assert denied.data["blocks"] == 70
    assert not set(w.keys("B70")) & set(w.runtime.observe().resident)


def test_hard_claim_refuses_and_nothing_moves() -> None:
    w = world()
    blocks = w.cache("A60")
    before = w.runtime.fingerprint(blocks)
    answer = w.claim("keep", "A60")
    w.ask("run", "B70")
    w.drain()
    run = w.asked("run")
    assert (answer.decision, answer.cost, answer.headroom) == (Decision.ACCEPTED, 60, 80)
    assert (run.outcome, run.shortfall, run.blocking_claims) == (Outcome.REFUSED, 50, ("keep",))
    assert w.runtime.observe().free == 20
    assert w.counts()["allocation_victim_selected"] == 0
    assert w.counts()["active_request_deferred"] == 1
    assert w.runtime.fingerprint(blocks) == before
    assert w.view("keep").phase is Phase.MATERIALIZED


@pytest.mark.parametrize("how", ["demote", "release", "expire"])
def test_an_ended_claim_lets_the_request_run(how: str) -> None:
    w = world()
    w.cache("A60")
    w.claim("keep", "A60", duration=5 if how == "expire" else None)
    if how == "expire":
        w.runtime.advance(5)
    else:
        getattr(w.runtime, how)("keep")
    w.ask("run", "B70")
    w.drain()
    counts = w.counts()
    assert w.asked("run").outcome is Outcome.SERVED
    assert counts["resident_claim_harmed"] == 0
    assert counts["block_lost_after_release"] == 50
    ended = {"demote": "demoted", "release": "released", "expire": "expired"}[how]
    assert w.view("keep").phase == ended
    assert counts[f"resident_claim_{ended}"] == 1


def test_a_count_of_survivors_is_no_predicate() -> None:
    w = world()
    w.cache("A60")
    assert w.runtime.lose(w.tokens("A60"), 0)
    w.claim("keep", "A60")
    view = w.view("keep")
    assert (view.survivors, view.leading, view.phase) == (59, 0, Phase.ACCEPTED)
    assert (view.covered, view.reserve) == (59, 1)


def test_a_reserve_is_left_alone_and_its_owner_draws_on_it() -> None:
    w = world(20)
    assert w.claim("later", "A10").cost == 10
    w.ask("grows", "B10", max_new_tokens=40)  # its eleventh block would come from the reserve
    w.runtime.step()
    assert w.runtime.observe().headroom == 0
    for _ in range(3):
        w.runtime.step()
    assert w.asked("grows").outcome is Outcome.REFUSED
    assert w.asked("grows").blocking_claims == ("later",)
    w.ask("owner", "A10")
    w.drain()
    view = w.view("later")
    assert w.asked("owner").outcome is Outcome.SERVED
    assert (view.phase, view.covered, view.reserve) == (Phase.MATERIALIZED, 10, 0)
    assert {"draw", "give_back"} <= {step.action for step in w.steps}


def test_the_owner_reuses_its_claim_under_a_full_pool() -> None:
    w = world(20)
    w.cache("A16")
    w.claim("keep", "A16")
    w.ask("owner", "A16+B4")
    w.drain()
    owner = w.asked("owner")
    assert (owner.outcome, owner.hit_blocks) == (Outcome.SERVED, 16)


def test_two_claims_share_a_prefix_and_one_is_released() -> None:
    w = world(20)
    blocks = w.cache("A10")
    w.claim("one", "A10")
    w.claim("two", "A10", n=6)
    refs = w.runtime.snapshot().facts
    assert [refs[b].ref for b in blocks] == [2] * 6 + [1] * 4
    w.runtime.release("one")
    refs = w.runtime.snapshot().facts
    assert [refs[b].ref for b in blocks] == [1] * 6 + [0] * 4
    assert w.runtime.observe().free == 14


def test_preemption_leaves_claims_alone() -> None:
    w = world(20)
    w.cache("A6")
    w.claim("keep", "A6")
    before = w.runtime.fingerprint(w.blocks("A6"))
    for name in ("x", "y"):
        w.ask(name, f"{name.upper()}6", max_new_tokens=33)
    w.drain()
    assert w.counts()["active_request_preempted"] == 1
    assert {w.asked(r).outcome for r in "xy"} == {Outcome.SERVED}
    assert w.view("keep").phase is Phase.MATERIALIZED
    assert w.runtime.fingerprint(w.blocks("A6")) == before


def test_congestion_names_whom_it_waits_for_once() -> None:
    w = world(20)
    w.ask("first", "A15", max_new_tokens=5)
    w.ask("second", "B10")
    w.runtime.step()
    w.runtime.step()
    assert w.asked("second").outcome is Outcome.DEFERRED
    (told,) = w.events("active_request_deferred")
    assert (told.data["waits_on"], told.data["blocking_claim_ids"]) == (["first"], [])
    w.drain()
    assert w.asked("second").outcome is Outcome.SERVED


def test_a_request_that_can_never_fit_does_not_block_the_others() -> None:
    w = world(20)
    w.ask("huge", "A25")
    w.ask("small", "B5")
    w.drain()
    huge = w.asked("huge")
    assert (huge.outcome, huge.blocking_claims) == (Outcome.CAPACITY_REQUIRED, ())
    assert huge.shortfall == 5
    assert w.asked("small").outcome is Outcome.SERVED


@pytest.mark.parametrize(
    ("protection", "phase"),
    [(Protection.SOFT, Phase.HARMED), (Protection.DEMOTABLE, Phase.DEMOTED)],
)
def test_a_soft_claim_never_loses_in_silence(protection: Protection, phase: Phase) -> None:
    w = world(20)
    w.cache("A15")
    assert w.claim("keep", "A15", protection).cost == 0
    w.ask("run", "B10")
    w.drain()
    counts = w.counts()
    assert w.asked("run").outcome is Outcome.SERVED
    assert w.view("keep").phase is phase
    assert counts["resident_claim_harmed"] == (phase is Phase.HARMED)
    assert counts["block_lost_after_release"] == (5 if phase is Phase.DEMOTED else 0)


def test_a_fault_harms_and_says_so() -> None:
    w = world(20)
    w.cache("A10")
    w.claim("keep", "A10")
    assert w.runtime.lose(w.tokens("A10"), 4)
    (harm,) = w.events("resident_claim_harmed")
    assert harm.data["cause"] == "fault"
    assert (harm.data["before"]["leading"], harm.data["after"]["leading"]) == (10, 4)
    assert w.runtime.observe().free == 20


def test_a_fault_before_materialization_is_made_good() -> None:
    w = world(20)
    w.cache("A5")
    w.claim("keep", "A10")
    w.runtime.lose(w.tokens("A5"), 2)
    view = w.view("keep")
    assert (view.phase, view.covered, view.reserve) == (Phase.ACCEPTED, 4, 6)
    assert w.runtime.observe().headroom == 10


def test_claims_are_clipped_or_refused() -> None:
    w = world(20)
    w.claim("big", "A15")
    clipped = w.claim("clip", "B10", min_blocks=3)
    assert clipped.decision is Decision.CLIPPED
    assert clipped.granted == Predicate(PredicateKind.LEADING, 5)
    refused = w.claim("more", "C10")
    assert (refused.decision, refused.cost, refused.headroom) == (Decision.REFUSED, 10, 0)
    assert w.claim("tier", "D1", Protection.OFFLOADABLE).reason == "no tier"
    whole = w.claim("whole", "E1", fidelity=Fidelity.STATE)
    assert (whole.decision, whole.reason) == (Decision.REFUSED, "state is asked, exact survives")


def test_reset_succeeds_only_when_nothing_is_in_use() -> None:
    w = world(20)
    w.cache("A10")
    w.claim("keep", "A10", n=5)
    assert not w.runtime.reset()
    assert len(w.runtime.observe().resident) == 10
    w.runtime.release("keep")
    assert w.runtime.reset()
    assert not w.runtime.observe().resident
    assert [e.data["succeeded"] for e in w.events("pool_reset")] == [False, True]


def test_wrong_operations_change_nothing() -> None:
    w = world(20)
    w.cache("A4")
    w.claim("keep", "A4")
    before, events = w.runtime.observe(), len(w.runtime.events())
    wrong = (
        lambda: w.claim("keep", "A4"),
        lambda: w.claim("long", "A4", n=5),
        lambda: w.ask("cache A4", "B1"),
        lambda: w.runtime.abort("nobody"),
        lambda: w.runtime.release("nobody"),
        lambda: w.runtime.renew("keep", 0),
        lambda: w.runtime.advance(0),
        lambda: w.runtime.fingerprint((0,)),
        lambda: w.runtime.lose(w.tokens("A4"), 4),
    )
    for operation in wrong:
        with pytest.raises(BadOperation):
            operation()
    assert (w.runtime.observe(), len(w.runtime.events())) == (before, events)


def test_a_closed_runtime_takes_no_operation() -> None:
    w = world(20)
    w.runtime.close()
    with pytest.raises(BadOperation, match="closed"):
        w.runtime.step()
    assert w.runtime.events()[-1].event == "trace_closed"


def test_a_request_preempted_in_flight_is_longer_when_it_comes_back() -> None:
    """Its token arrives after it has given way: what it finds then is more than before (P5, T2)."""
    operations = [
        {"op": "submit", "request": "r1", "content": [["B", 5], ["C", 3]], "max_new_tokens": 2},
        {"op": "submit", "request": "r2", "content": [["B", 1]], "max_new_tokens": 2},
        {"op": "dispatch"},
        {"op": "dispatch"},
        {"op": "step"},
    ]
    config = PoolConfig(usable=10, block_size=4, defer_limit=0, in_flight=2)
    program = Program(config, tuple(map(parse, operations)))
    assert supervise(IN_PROCESS, None, program) == ()


def test_without_a_word_of_ours_the_queue_gives_what_a_soft_claim_covers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvclaims.bridge.vllm.claims.ClaimBook.has_preferred", False)
    report = litmus(IN_PROCESS, IN_PROCESS.info(), select(["soft-order"]), lambda _: None)
    assert "harmed is 1, expected 0" in [p.message for _, p in report.programs[0].problems]


def test_preferred_blocks_that_stand_in_the_way_go_to_the_tail_in_their_order() -> None:
    from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock

    from kvclaims.bridge.vllm.eviction import spare

    def after(count: int, preferred: set[int]) -> list[int]:
        queue = FreeKVCacheBlockQueue([KVCacheBlock(number) for number in range(6)])
        spare(queue, count, preferred.__contains__)
        return [block.block_id for block in queue.get_all_free_blocks()]

    assert after(2, {0, 2, 5}) == [1, 3, 4, 5, 0, 2]
    assert after(3, {0, 2, 5}) == [1, 3, 4, 5, 0, 2]
    assert after(4, {0, 2, 5}) == [1, 3, 4, 0, 2, 5]
    assert after(1, {2}) == [0, 1, 2, 3, 4, 5]
    assert after(0, {0}) == [0, 1, 2, 3, 4, 5]
