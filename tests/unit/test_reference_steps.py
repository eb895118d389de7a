"""What the reference does in steps: chunks, ranks, steps under way, transfers, guesses, sleep."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvclaims.reference.engine import ENGINE
from kvclaims.spec.content import cache_domain, content_ids, fingerprint, partial_content
from kvclaims.spec.interface import (
    BadOperation,
    KvEvent,
    NotExposed,
    PoolConfig,
    RequestView,
    Runtime,
)
from kvclaims.spec.operations import parse, perform
from kvclaims.spec.vocabulary import Outcome

POOL = PoolConfig(usable=8, block_size=4, defer_limit=0)


def opened(**config: Any) -> Runtime:
    return ENGINE.open(replace(POOL, **config), "test")


def do(runtime: Runtime, op: str, **fields: Any) -> Any:
    return perform(runtime, parse({"op": op, **fields}))


def ask(runtime: Runtime, request: str, *content: Any, **more: Any) -> None:
    do(runtime, "submit", request=request, content=[list(part) for part in content], **more)


def view(runtime: Runtime, request: str) -> RequestView:
    return runtime.observe().requests[request]


def test_a_long_prompt_is_computed_in_chunks() -> None:
    runtime = opened(token_budget=6)
    ask(runtime, "r", ("A", 4))
    seen = []
    while view(runtime, "r").state != "finished":
        runtime.step()
        seen.append((view(runtime, "r").computed, len(view(runtime, "r").blocks)))
    assert seen == [(6, 2), (12, 3), (0, 0)]
    assert view(runtime, "r").outcome is Outcome.SERVED


def test_a_request_of_less_rank_gives_way() -> None:
    runtime = opened(usable=3, policy="priority")
    ask(runtime, "low", ("A", 1, 3), max_new_tokens=9, priority=5)
    runtime.step()
    ask(runtime, "high", ("B", 1), max_new_tokens=9, priority=0)
    runtime.step()
    runtime.step()
    assert [view(runtime, r).state for r in ("low", "high")] == ["waiting", "running"]


def test_the_higher_rank_is_looked_at_first() -> None:
    runtime = opened(usable=2, policy="priority")
    ask(runtime, "low", ("A", 2), max_new_tokens=2, priority=5)
    ask(runtime, "high", ("B", 2), max_new_tokens=2, priority=0)
    runtime.dispatch()
    assert [view(runtime, r).state for r in ("low", "high")] == ["waiting", "running"]


def test_what_a_step_under_way_writes_is_not_served_before_it_ends() -> None:
    runtime = opened()
    ask(runtime, "r", ("A", 1, 1))
    runtime.dispatch()
    assert len(runtime.observe().resident) == 1
    assert runtime.fingerprint(view(runtime, "r").blocks) == (0, 0)
    do(runtime, "declare", claim="c", content=[["A", 1]], n=1)
    assert runtime.observe().claims["c"].covered == 0
    runtime.complete()
    assert runtime.observe().claims["c"].phase == "materialized"


def test_an_abort_under_way_leaves_what_the_step_writes() -> None:
    runtime = opened()
    ask(runtime, "r", ("A", 1, 1))
    runtime.dispatch()
    do(runtime, "abort", request="r")
    assert runtime.observe().free == 8
    runtime.complete()
    ((key, block),) = runtime.observe().resident.items()
    assert runtime.fingerprint((block,)) == (fingerprint(key),)


def test_only_so_many_steps_are_under_way() -> None:
    runtime = opened(in_flight=2)
    with pytest.raises(BadOperation, match="no step is under way"):
        runtime.complete()
    runtime.dispatch()
    runtime.dispatch()
    with pytest.raises(BadOperation, match="2 steps are under way"):
        runtime.dispatch()


def test_asynchronous_steps_end_a_request_on_time() -> None:
    runtime = opened(in_flight=2)
    ask(runtime, "r", ("A", 1), max_new_tokens=2)
    for _ in range(2):
        runtime.dispatch()
    runtime.complete()
    runtime.dispatch()
    runtime.complete()
    assert view(runtime, "r").outcome is Outcome.SERVED


@pytest.mark.parametrize(("loaded", "computed"), [(2, 8), (1, 4), (0, 0)])
def test_a_transfer_brings_what_it_brings_and_the_rest_is_computed(
    loaded: int, computed: int
) -> None:
    runtime = opened()
    ask(runtime, "r", ("A", 3), external=2)
    runtime.step()
    assert (view(runtime, "r").state, view(runtime, "r").computed) == ("loading", 0)
    assert runtime.observe().resident == {}
    do(runtime, "load", request="r", blocks=loaded)
    assert view(runtime, "r").computed == computed
    assert len(runtime.observe().resident) == loaded
    runtime.step()
    assert view(runtime, "r").outcome is Outcome.SERVED
    keys = content_ids(tuple(parse_tokens("A", 3)), 4)
    assert {k: runtime.fingerprint((b,)) for k, b in runtime.observe().resident.items()} == {
        key: (fingerprint(key),) for key in keys
    }


def parse_tokens(label: str, blocks: int) -> tuple[int, ...]:
    from kvclaims.spec.content import Segment, tokens_of

    return tokens_of((Segment(label, blocks),), 4)


def test_blocks_stay_where_a_transfer_writes_until_it_is_told() -> None:
    runtime = opened()
    ask(runtime, "r", ("A", 3), external=2)
    runtime.step()
    do(runtime, "abort", request="r")
    assert (view(runtime, "r").state, runtime.observe().free) == ("ending", 5)
    with pytest.raises(BadOperation):
        do(runtime, "abort", request="r")
    do(runtime, "load", request="r", blocks=1)
    assert (view(runtime, "r").outcome, runtime.observe().free) == (Outcome.ABORTED, 8)


def test_wrong_guesses_are_taken_back() -> None:
    runtime = opened(drafts=2)
    ask(runtime, "r", ("A", 1), max_new_tokens=6, accepts=1)
    computed = []
    while view(runtime, "r").state != "finished":
        runtime.step()
        computed.append(view(runtime, "r").computed)
    assert computed == [4, 6, 8, 0]


def test_the_key_has_parts() -> None:
    runtime = opened()
    ask(runtime, "r1", ("A", 2))
    runtime.step()
    for number, part in enumerate(({"adapter": "x"}, {"modality": "y"}, {"salt": "z"}, {})):
        ask(runtime, f"other{number}", ("A", 2), **part)
        runtime.step()
        assert view(runtime, f"other{number}").hit_blocks == (0 if part else 1)
    domains = [cache_domain(), cache_domain("a"), cache_domain("", "a"), cache_domain("", "", "a")]
    domains += [cache_domain(domain) for domain in domains[2:]]
    assert len(set(domains)) == 6


def test_asleep_nothing_is_kept_and_nothing_runs() -> None:
    runtime = opened()
    ask(runtime, "r1", ("A", 2))
    runtime.step()
    (block, *_) = runtime.observe().resident.values()
    assert runtime.sleep()
    assert runtime.observe().resident == {}
    with pytest.raises(BadOperation, match="asleep"):
        runtime.step()
    runtime.wake()
    assert runtime.fingerprint((block,)) == (0,)
    with pytest.raises(BadOperation, match="awake"):
        runtime.wake()


def test_nobody_sleeps_over_a_block_in_use() -> None:
    runtime = opened()
    ask(runtime, "r1", ("A", 1), max_new_tokens=3)
    runtime.step()
    assert not runtime.sleep()
    assert len(runtime.observe().resident) == 1


def test_routers_hear_of_the_first_copy_and_of_the_last() -> None:
    runtime = opened()
    for name in ("r1", "r2"):
        ask(runtime, name, ("A", 1))
        runtime.step()
    (key,) = runtime.observe().resident
    assert runtime.kv_events() == (KvEvent("stored", (key,)),)
    do(runtime, "lose", content=[["A", 1]], position=0)
    assert runtime.kv_events() == (KvEvent("removed", (key,)),)


def test_a_part_of_a_block_has_a_name_of_its_own() -> None:
    runtime = opened()
    ask(runtime, "r", ("A", 0, 3), max_new_tokens=3)
    runtime.step()
    tokens = parse_tokens("A", 1)[:3]
    assert runtime.fingerprint(view(runtime, "r").blocks) == (
        fingerprint(partial_content("", tokens)),
    )


@pytest.mark.parametrize("config", [{"windows": (4,)}, {"drafts": 1, "in_flight": 2}])
def test_what_the_reference_lacks_it_says(config: dict[str, Any]) -> None:
    with pytest.raises(NotExposed):
        opened(**config)
