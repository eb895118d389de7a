"""The desk beside vLLM's own scheduler and allocator, in process."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm_world import NEEDS_VLLM

from kvclaims.spec.content import Segment, tokens_of
from kvclaims.spec.vocabulary import Protection, Verdict

pytestmark = NEEDS_VLLM

SIZE = 4
USABLE = 20


def tokens(label: str, blocks: int) -> list[int]:
    return list(tokens_of((Segment(label, blocks),), SIZE))


def Shop(usable: int = USABLE, **given: Any) -> Any:
    """A served pool with a clock that is set by hand."""
    from kvclaims.bridge.serving.settings import Settings
    from kvclaims.bridge.vllm.serving_bench import ServedPool

    return ServedPool(usable, SIZE, Settings(**given))


def test_a_claim_with_a_request_is_decided_before_its_first_block() -> None:
    shop = Shop()
    shop.ask("r", tokens("A", 6), kvclaims=json.dumps({"claim_id": "c"}))
    shop.run()
    told = shop.outputs["r"].kv_transfer_params["kvclaims"]["claim"]
    assert (told["decision"], told["cost_blocks"], told["headroom_blocks"]) == ("accepted", 6, 20)
    order = [e.event for e in shop.serving.recorder.events]
    assert order.index("resident_claim_accepted") < order.index("active_request_admitted")
    assert shop.do("inspect", claim_id="c", owner="anonymous").body["phase"] == "materialized"


def test_a_claim_that_is_no_good_leaves_its_request_alone() -> None:
    shop = Shop()
    shop.ask("r", tokens("A", 6), kvclaims='{"claim_id": "c", "duration": -1}')
    shop.run()
    answer = shop.outputs["r"]
    assert str(answer.finish_reason) == "length"
    assert answer.kv_transfer_params["kvclaims"]["claim"]["decision"] == "rejected"
    assert shop.enforcer.book.claims == {}


def test_blame_is_full_for_the_owner_and_opaque_for_others() -> None:
    shop = Shop()
    shop.declare("keep", "A", 15)
    shop.ask("mine", tokens("B", 10), kvclaims_owner="a")
    shop.ask("theirs", tokens("C", 10), kvclaims_owner="b")
    shop.run()
    mine, theirs = (
        shop.outputs[r].kv_transfer_params["kvclaims"]["blocking_claims"]
        for r in ("mine", "theirs")
    )
    assert mine == [{"claim": "keep", "owner": "a", "blocks": 15}]
    assert theirs == [{"claim": shop.desk.opaque("a/keep"), "blocks": 15}]
    told = shop.desk.operate({"op": "verdict", "operator": True, "request": "x"})
    assert told.status == 404


def test_a_pooling_request_that_is_refused_ends_alone() -> None:
    """vLLM takes an answer without a pooled tensor for one with text: where it makes answers, that
    would end the server.  It gets the one failure that it knows of such a request."""
    from vllm.pooling_params import PoolingParams
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.output_processor import OutputProcessor

    from kvclaims.bridge.vllm import setup

    shop, prompt = Shop(), tokens("B", 10)
    shop.declare("keep", "A", 15)
    hasher = setup.block_hasher(SIZE)
    shop.driver.add(setup.make_request("embd-r-0", tuple(prompt), 1, hasher, pools=True))
    shop.run()
    assert shop.do("verdict", request="r").body["shortfall"] == 5
    processor = OutputProcessor(None, log_stats=False)
    params = PoolingParams(task="embed")
    asked = EngineCoreRequest(
        *("embd-r-0", prompt, None, None, params, 0.0, None, None, None), external_req_id="embd-r-0"
    )
    processor.add_request(asked, None)
    (told,) = processor.process_outputs([shop.outputs["embd-r-0"]]).request_outputs
    assert told.finished
    assert told.error.retryable


def test_a_full_disk_ends_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the trace lacks is told in the numbers behind `/metrics`, and made up for."""

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    from kvclaims.checker.audit import audit

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        shop = Shop(trace=str(tmp_path / "t.jsonl"))  # whose thread may write at once
        shop.ask("r", tokens("A", 6), kvclaims=json.dumps({"claim_id": "c"}))
        shop.run()
        assert not shop.serving.flush(wait=0.1)
        stats = shop.desk.stats()
    assert (stats["trace_waiting"], stats["trace_lost"]) == (shop.serving.recorder.count, 0)
    shop.close()
    assert audit([tmp_path / "t.jsonl"]).verdict is Verdict.HOLDS


def test_where_owners_have_keys_a_name_alone_is_nobodys() -> None:
    """A request that came past the check of keys can neither claim nor read in another's name."""
    keys = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("a", "b")}
    shop = Shop(owners=keys)
    shop.declare("keep", "A", 15)
    voucher = shop.desk.settings.voucher("a")
    claim = json.dumps({"claim_id": "c", "owner": "a"})
    shop.ask("posed", tokens("B", 2), kvclaims=claim, kvclaims_owner="a")
    shop.ask("wrong", tokens("B", 2), kvclaims=claim, kvclaims_owner="b", kvclaims_voucher=voucher)
    shop.ask("right", tokens("B", 2), kvclaims=claim, kvclaims_owner="a", kvclaims_voucher=voucher)
    shop.ask("spying", tokens("C", 10), kvclaims_owner="a")
    shop.run()
    told = {
        r: shop.outputs[r].kv_transfer_params["kvclaims"]["claim"]["decision"]
        for r in ("posed", "wrong", "right")
    }
    assert told == {"posed": "rejected", "wrong": "rejected", "right": "accepted"}
    blamed = shop.outputs["spying"].kv_transfer_params["kvclaims"]["blocking_claims"]
    assert "owner" not in blamed[0]


def test_a_verdict_is_found_by_the_id_the_client_knows() -> None:
    shop = Shop()
    shop.declare("keep", "A", 15, duration=90)
    shop.ask("cmpl-abc-0-12345678", tokens("B", 10))
    shop.ask("cmpl-zabc-0-12345678", tokens("B", 21))
    shop.run()
    found = shop.do("verdict", request="abc").body
    assert (found["outcome"], found["shortfall"], found["retry_after"]) == ("refused", 5, 90)
    other = shop.do("verdict", request="zabc").body
    assert (other["outcome"], other["fits_tokens"]) == ("capacity_required", 80)
    assert shop.do("verdict", request=".*").status == 404


@pytest.mark.parametrize(
    ("engines", "clients"),
    [
        ("resp_abc_0-12345678", "resp_abc"),
        ("generate-tokens-abc-0-12345678", "abc"),
        ("chatcmpl-abc-12345678", "abc"),
        ("1_cmpl-abc-0-12345678", "abc"),
        ("chatcmpl-abc_0-12345678", "abc"),
        ("cmpl-abc-fa15c7fd7584b5f0-beam-0-12345678", "abc"),
        ("embd-abc-prompt-0-chunk-1-12345678", "abc"),
        ("generative-scoring-abc-1-12345678", "abc"),
    ],
)
def test_whatever_route_it_came_by(engines: str, clients: str) -> None:
    shop = Shop()
    shop.declare("keep", "A", 15)
    shop.ask(engines, tokens("B", 10), kvclaims='{"claim_id": "c"}')
    shop.run()
    for other in ("ab", "c", "0", "c-0", "esp_abc"):
        assert shop.do("verdict", request=other).status == 404
    assert shop.do("verdict", request=clients).body["shortfall"] == 5
    assert shop.do("decision", request=clients).body["decision"] == "refused"
    assert shop.do("decision", request=clients).status == 404


@pytest.mark.parametrize(
    ("claim", "told", "status"),
    [
        ({"predicate": {"n": 21}}, None, 413),
        ({"predicate": {"n": 3, "start": 18}}, None, 413),
        ({"predicate": {"n": 4}}, 4 * SIZE - 1, 400),
        ({}, SIZE - 1, 400),
        ({"predicate": {"n": 4}}, 4 * SIZE, 200),
        ({"predicate": {"n": 4}}, None, 200),
        ({}, None, 200),
    ],
)
def test_what_a_request_cannot_claim_is_known_before_it_runs(
    claim: dict[str, Any], told: int | None, status: int
) -> None:
    """More than the pool has, or more than its prompt, where that is given as token ids."""
    shop = Shop()
    answer = shop.do("check", claim={"claim_id": "c", **claim}, tokens=told)
    assert answer.status == status, answer


@pytest.mark.parametrize("protection", [p.value for p in Protection])
@pytest.mark.parametrize("more", [{}, {"min_blocks": 1}, {"predicate": {"n": 1, "start": 20}}])
def test_a_claim_on_more_than_the_pool_holds_is_no_claim(
    protection: str, more: dict[str, Any]
) -> None:
    """No request could ever compute its content (F4), whatever the protection."""
    shop = Shop()
    told = shop.declare("big", "A", 21, protection=protection, **more)
    assert (told.status, told.body["error"]) == (
        413,
        "the claim speaks of 21 blocks, and the pool has 20",
    )
    assert (shop.enforcer.book.claims, shop.enforcer.book.owed) == ({}, 0)


def test_of_the_content_only_what_a_claim_speaks_of_is_looked_at() -> None:
    """A step must not wait while a million tokens are hashed that nothing depends on."""
    shop = Shop()
    told = shop.do("declare", claim={"claim_id": "c", "tokens": [7] * 10**6, "predicate": {"n": 2}})
    assert (told.status, told.body["granted_blocks"]) == (201, 2)
    assert len(shop.enforcer.book.claims["a/c"].spec.tokens) == 2 * SIZE


@pytest.mark.parametrize("field", ["salt", "adapter"])
def test_text_that_cannot_be_written_is_no_text(field: str) -> None:
    shop = Shop()
    told = shop.declare("c", "A", 2, **{field: "\ud800"})
    assert told.status == 400
    assert shop.enforcer.book.claims == {}


def test_a_verdict_is_told_once() -> None:
    """Who reuses a request's id and fails of something else is not told what became of that one."""
    shop = Shop()
    shop.declare("keep", "A", 15)
    shop.ask("cmpl-abc-0-12345678", tokens("B", 10))
    shop.ask("cmpl-abc-1-12345679", tokens("C", 11))
    shop.run()
    assert shop.do("verdict", request="abc", owner="b").body["needed_blocks"] == 11
    assert shop.do("verdict", request="abc", owner="c").status == 404


def test_but_one_of_a_background_response_until_its_id_returns() -> None:
    """Its client asks for it whenever it likes."""
    shop = Shop()
    shop.declare("keep", "A", 15)
    shop.ask("resp_abc_0-12345678", tokens("B", 10))
    shop.run()
    for _ in range(2):
        assert shop.do("verdict", request="resp_abc", keep=True).body["needed_blocks"] == 10
    assert shop.do("verdict", request="resp_abc", keep=False).status == 200
    assert shop.do("verdict", request="resp_abc", keep=True).status == 404


def test_a_verdict_may_be_asked_for_before_the_request_is_answered() -> None:
    """With steps in flight the engine core's door opens between the two."""
    shop = Shop()
    shop.declare("keep", "A", 15)
    shop.ask("cmpl-abc-0-12345678", tokens("B", 10))
    answers = shop.enforcer.answers

    def asked_first(outputs: Any) -> Any:
        shop.do("verdict", request="abc")
        return answers(outputs)

    shop.enforcer.answers = asked_first
    shop.run()
    told = shop.outputs["cmpl-abc-0-12345678"].kv_transfer_params["kvclaims"]
    assert (told["outcome"], told["shortfall"]) == ("refused", 5)


def test_of_many_claims_the_page_has_the_largest_and_names_no_others() -> None:
    """What is not shown costs the step that it is asked between nothing."""
    shop = Shop()
    named: list[str] = []
    opaque = shop.desk.opaque
    shop.desk.opaque = lambda name: named.append(name) or opaque(name)
    for i in range(1100):
        shop.declare(f"c{i}", "A", 1 + (i == 1090), protection="best_effort")
    claims = shop.desk.stats()["claims"]
    assert (len(claims), claims[0]["footprint"], claims[1]["footprint"]) == (1000, 2, 1)
    assert len(named) == 2000


def test_quotas_and_the_cap_hold_at_every_step() -> None:
    shop = Shop(quotas={"a": 8}, default_quota=6, hard_share=0.6)
    assert shop.declare("one", "A", 8).status == 201
    refused = shop.declare("two", "B", 1)
    assert (refused.status, refused.body["reason"]) == (
        409,
        "exceeds the owner's quota of 8 blocks",
    )
    assert shop.declare("soft", "B", 1, protection="soft_priority").status == 201
    clipped = shop.declare("three", "C", 6, owner="b", min_blocks=1)
    assert clipped.body["granted_blocks"] == 4  # 12 blocks for all, 8 of them taken
    assert "12 blocks that hard claims may have" in clipped.body["reason"]
    shop.do("release", claim_id="one")
    assert shop.declare("four", "D", 6, owner="c").status == 201
    assert shop.enforcer.book.share.total == 10


def test_what_was_granted_to_a_request_in_chunks_is_promised_to_no_claim() -> None:
    """16 blocks were granted to the request and it has taken 4: of the 16 that are free, 4 may be
    promised (F2), and the request, which fits, is served."""
    shop = Shop()
    shop.scheduler.max_num_scheduled_tokens = 4 * SIZE
    shop.ask("r", tokens("A", 16))
    shop.step()
    refused = shop.declare("c", "B", 5)
    assert (refused.status, refused.body["reason"]) == (409, "exceeds the headroom")
    assert (refused.body["cost_blocks"], refused.body["headroom_blocks"]) == (5, 4)
    clipped = shop.declare("d", "B", 12, min_blocks=1).body
    assert (clipped["decision"], clipped["granted_blocks"]) == ("conditionally_accepted", 4)
    shop.run()
    assert str(shop.outputs["r"].finish_reason) == "length"
    assert shop.declare("e", "A", 16).body["phase"] == "materialized"


@pytest.mark.parametrize(
    ("blocks", "least", "granted"), [(16, None, 16), (18, None, 18), (19, None, 0), (20, 1, 18)]
)
def test_what_such_a_request_will_draw_on_the_claim_counts_once(
    blocks: int, least: int | None, granted: int
) -> None:
    """A claim on what the request computes meets the request's own need (F3): of 20 blocks another
    claim was promised 2, and 18 may be claimed though the request was granted 16 of them."""
    shop = Shop()
    shop.scheduler.max_num_scheduled_tokens = 4 * SIZE
    shop.declare("other", "B", 2)
    shop.ask("r", tokens("A", 16))
    shop.step()
    told = shop.declare("c", "A", blocks, min_blocks=least)
    assert told.body["granted_blocks"] == granted
    shop.run()
    assert str(shop.outputs["r"].finish_reason) == "length"
    assert shop.do("inspect", claim_id="c").body["covered_blocks"] == min(granted, 16)


@pytest.mark.parametrize("free", [7, 8, 9])
def test_room_for_drafts_is_room_that_a_request_needs(free: int) -> None:
    """With tokens that a draft model writes ahead, vLLM wants a block more than the prompt has:
    a request that lacks just that one is refused, and does not wait for ever (V3)."""
    shop = Shop()
    shop.scheduler.num_lookahead_tokens = 3
    shop.declare("c", "B", USABLE - free)
    shop.ask("r", tokens("A", 8))
    shop.run()
    answer = shop.outputs["r"]
    if free == 9:
        assert str(answer.finish_reason) == "length"
        return
    told = answer.kv_transfer_params["kvclaims"]
    assert (told["outcome"], told["needed_blocks"], told["shortfall"]) == ("refused", 9, 9 - free)


@pytest.mark.parametrize("promised", [0, 12])
@pytest.mark.parametrize(
    ("whole", "drafts", "blocks"), [(False, 0, 21), (True, 3, 20), (True, 3, 8)]
)
def test_what_cannot_end_does_not_begin_again_and_again(
    promised: int, whole: bool, drafts: int, blocks: int
) -> None:
    """vLLM may look at the next chunk alone, and never counts room for drafts before a request
    begins: one that lacks it in the end would give way to itself for ever (V3, B11)."""
    shop = Shop()
    shop.scheduler.max_num_scheduled_tokens = 4 * SIZE
    shop.scheduler.scheduler_reserve_full_isl = whole
    shop.scheduler.num_lookahead_tokens = drafts
    if promised:
        shop.declare("c", "B", promised)
    shop.ask("r", tokens("A", blocks), kvclaims_admit_reuse=False)
    shop.run()
    needed = blocks + bool(drafts)
    if needed <= USABLE - promised:
        assert str(shop.outputs["r"].finish_reason) == "length"
        return
    told = shop.outputs["r"].kv_transfer_params["kvclaims"]
    outcome = "capacity_required" if needed > USABLE else "refused"
    assert (told["outcome"], told["needed_blocks"]) == (outcome, needed)


def test_time_passes_between_steps_and_ends_claims_once() -> None:
    shop = Shop()
    shop.declare("c", "A", 4, duration=2)
    shop.now = 1.9
    assert shop.do("renew", claim_id="c", renewal={"duration": 3}).status == 200
    shop.now = 4.8
    assert shop.do("inspect", claim_id="c").body["phase"] == "accepted"
    shop.now = 4.9
    late = shop.do("renew", claim_id="c", renewal={"duration": 3})
    assert (late.status, late.body["error"]) == (409, "the claim is expired already")
    ended = [e for e in shop.serving.recorder.events if e.event == "resident_claim_expired"]
    assert len(ended) == 1


def test_owners_end_and_see_only_their_own() -> None:
    shop = Shop()
    shop.declare("c", "A", 4)
    for op in ("inspect", "release", "demote"):
        assert shop.do(op, owner="b", claim_id="c").status == 404
    assert shop.do("renew", owner="b", claim_id="c", renewal={"duration": 1}).status == 404
    assert shop.do("list", owner="b").body["claims"] == []
    assert shop.declare("c", "B", 2, owner="b").status == 201  # its own namespace
    assert shop.do("list", owner="x", operator=True).body["claims"][0]["owner"] == "a"


def test_an_ended_claim_returns_only_with_a_higher_generation() -> None:
    shop = Shop(remember=0)
    shop.declare("c", "A", 4)
    assert shop.declare("c", "A", 4, generation=2).status == 409  # in force
    shop.do("release", claim_id="c")
    shop.do("list")
    assert shop.enforcer.book.claims == {}
    again = shop.declare("c", "A", 4)
    assert again.status == 409
    assert "a generation of 2 or more" in again.body["error"]
    assert shop.declare("c", "A", 4, generation=2).status == 201


def test_ended_requests_and_claims_are_forgotten() -> None:
    shop = Shop(remember=3)
    for i in range(40):
        shop.ask(f"r{i}", tokens("ABCD"[i % 4], 3), kvclaims=json.dumps({"claim_id": f"c{i}"}))
        shop.run()
        shop.do("release", owner="anonymous", claim_id=f"c{i}")
    assert shop.enforcer.requests.records == {}
    assert len(shop.enforcer.book.claims) <= 4
    assert not shop.desk.has_answers
    assert shop.enforcer.queue_length() == USABLE
    assert len(shop.serving.recorder.events) <= 1000


def test_the_trace_is_written_and_closed(tmp_path: Path) -> None:
    from kvclaims.checker.audit import audit

    path = tmp_path / "t.jsonl"
    shop = Shop(trace=str(path))
    shop.declare("keep", "A", 15)
    shop.ask("r", tokens("B", 10))
    shop.run()
    shop.scheduler.shutdown()
    report = audit([path])
    assert report.verdict is Verdict.HOLDS, report


def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Two engines of one data-parallel server, with the same settings."""
    from kvclaims.bridge.vllm import setup

    plain, shops = setup.scheduler_config, []
    for rank in range(2):

        def ranked(*args: Any, rank: int = rank, **more: Any) -> Any:
            config = plain(*args, **more)
            config.parallel_config.data_parallel_index = rank
            return config

        monkeypatch.setattr(setup, "scheduler_config", ranked)
        told = {"trace": str(tmp_path / "trace.jsonl"), "trace_bytes": 1024, "trace_files": 0}
        shops.append(Shop(**told, trace_tables=True))
    return shops


def test_without_a_prefix_cache_nothing_can_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claims would be accepted, hold room, and never be materialized."""
    from kvclaims.bridge.serving.settings import BadSettings
    from kvclaims.bridge.vllm import setup

    plain = setup.scheduler_config

    def uncached(*args: Any, **more: Any) -> Any:
        config = plain(*args, **more)
        config.cache_config.enable_prefix_caching = False
        return config

    monkeypatch.setattr(setup, "scheduler_config", uncached)
    with pytest.raises(BadSettings, match="prefix cach"):
        Shop()


def test_each_rank_writes_a_trace_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one folder, both rotated: each is whole under the guide's command for its name, and both
    are, one after the other, in one file (T1, T3)."""
    from kvclaims.checker.audit import audit

    shops = ranks(tmp_path, monkeypatch)
    for i in range(6):
        for rank, shop in enumerate(shops):
            shop.declare(f"c{i}", "ABC"[i % 3], 15)
            shop.ask(f"r{i}", tokens("DE"[rank], 10 - rank))
            shop.run()
            shop.do("release", claim_id=f"c{i}")
    for shop in shops:
        shop.scheduler.shutdown()
    wholes = []
    for rank, (name, run) in enumerate([("trace", "server"), ("dp1-trace", "server-dp1")]):
        files = sorted(tmp_path.glob(f"{name}*.jsonl"))
        assert len(files) > 3
        wholes.append(tmp_path / f"whole{rank}")
        wholes[-1].write_bytes(b"".join(file.read_bytes() for file in files))
        report = audit([wholes[-1]])
        assert report.verdict is Verdict.HOLDS
        assert [told.run_id for told in report.runs] == [run]
        lives = report.runs[0].fold.requests.values()
        assert [(str(life.outcome), life.shortfall) for life in lives] == [
            ("refused", 5 - rank)
        ] * 6
    both = tmp_path / "both"
    both.write_bytes(b"".join(whole.read_bytes() for whole in wholes))
    assert [told.run_id for told in audit([both]).runs] == ["server", "server-dp1"]
    assert len(audit(wholes).runs) == 2


def state(shop: Any) -> Any:
    book = shop.enforcer.book
    claims = {c: (x.phase, x.spec, dict(x.cover), x.end) for c, x in book.claims.items()}
    queue = [b.block_id for b in shop.enforcer.pool.free_block_queue.get_all_free_blocks()]
    return shop.desk.stats(), claims, queue, shop.serving.recorder.count


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
FIELDS = ["claim_id", "tokens", "duration", "predicate", "protection", "generation", "min_blocks"]
GOOD: dict[str, Any] = {"claim_id": "good", "tokens": tokens("G", 3)}


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    op=st.sampled_from(["declare", "renew", "release", "demote", "check", "inspect", "nonsense"]),
    spoiled=st.dictionaries(
        st.sampled_from([*FIELDS, "owner", "salt", "extra"]), JSON, min_size=1, max_size=3
    ),
    who=st.sampled_from(["a", "b"]),
)
def test_whatever_is_refused_has_changed_nothing(op: str, spoiled: Any, who: str) -> None:
    shop = _shared_shop()
    before = state(shop)
    answer = shop.do(
        op,
        who,
        claim={**GOOD, **spoiled},
        claim_id=spoiled.get("claim_id", "held"),
        renewal=spoiled,
    )
    if answer.status >= 400 and "error" in answer.body:
        assert len(str(answer.body["error"]).splitlines()) == 1
        assert state(shop) == before
    elif op in ("declare", "release", "demote"):
        _shops.clear()  # it did something: the next example starts afresh


_shops: list[Any] = []


def _shared_shop() -> Any:
    if not _shops:
        shop = Shop()
        shop.declare("held", "H", 4, duration=100)
        shop.declare("good", "G", 3)
        shop.do("release", claim_id="good")
        _shops.append(shop)
    return _shops[0]
