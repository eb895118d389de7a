"""Random operations on the reference keep the pool consistent: rules B1 to B3, B7, B9 and F2."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kvclaims.reference.engine import ENGINE
from kvclaims.spec.interface import BadOperation, PoolConfig, Runtime
from kvclaims.spec.operations import drain, parse, perform
from kvclaims.spec.vocabulary import RESPONSIBLE, Phase, Protection

LABELS = st.sampled_from("AB")
NAMES = st.sampled_from(["c1", "c2", "c3"])
CONTENTS = st.one_of(
    st.tuples(st.tuples(LABELS, st.integers(0, 5), st.integers(0, 2))),
    st.tuples(st.tuples(LABELS, st.integers(1, 3)), st.tuples(st.just("C"), st.integers(1, 2))),
).map(lambda parts: [list(part) for part in parts])


def operation(op: str, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({"op": st.just(op), **fields})


OPERATIONS = st.one_of(
    operation(
        "declare",
        claim=NAMES,
        content=CONTENTS,
        n=st.integers(1, 5),
        protection=st.sampled_from([Protection.HARD, Protection.HARD, *Protection]),
        generation=st.integers(1, 4),
        min_blocks=st.integers(1, 3),
        duration=st.integers(1, 4),
    ),
    operation("release", claim=NAMES),
    operation("demote", claim=NAMES),
    operation("renew", claim=NAMES, duration=st.integers(1, 3)),
    operation(
        "submit",
        request=st.sampled_from([f"r{i}" for i in range(8)]),
        content=CONTENTS,
        max_new_tokens=st.integers(1, 6),
        admit_reuse=st.booleans(),
    ),
    operation("abort", request=st.sampled_from(["r0", "r1", "r2"])),
    operation("step", times=st.integers(1, 3)),
    operation("advance", ticks=st.integers(1, 2)),
    operation("reset"),
    operation("lose", content=CONTENTS, position=st.integers(0, 2)),
)


def check_consistent(runtime: Runtime) -> None:
    pool, seen = runtime.snapshot(), runtime.observe()
    assert len(set(pool.queue)) == len(pool.queue) == pool.counter == seen.free
    named = [b for held in (pool.holders, pool.pins) for blocks in held.values() for b in blocks]
    for block, facts in pool.facts.items():
        assert facts.ref == named.count(block)
        assert facts.queued == (block in pool.queue) == (facts.ref == 0)
        assert all(block in pool.lookup[key] for key in facts.keys)
    for key, blocks in pool.lookup.items():
        assert blocks
        assert all(key in pool.facts[block].keys for block in blocks)
    assert seen.headroom == seen.free - sum(c.reserve for c in seen.claims.values()) >= 0
    for claim in seen.claims.values():
        assert (claim.survivors == claim.footprint) >= (claim.phase is Phase.MATERIALIZED)
        if claim.protection is Protection.HARD and claim.phase in RESPONSIBLE:
            assert claim.covered + claim.reserve == claim.footprint
    for request in seen.requests.values():
        assert request.state == "running" or request.blocks == ()


@settings(max_examples=150, deadline=None)
@given(
    usable=st.integers(1, 7),
    block_size=st.integers(1, 3),
    operations=st.lists(OPERATIONS, max_size=30),
)
def test_random_operations_keep_the_pool_consistent(
    usable: int, block_size: int, operations: list[dict[str, Any]]
) -> None:
    runtime = ENGINE.open(PoolConfig(usable, block_size), "random")
    for raw in operations:
        before = runtime.snapshot(), runtime.observe(), runtime.events()
        try:
            perform(runtime, parse(raw))
        except BadOperation:
            assert (runtime.snapshot(), runtime.observe(), runtime.events()) == before
        check_consistent(runtime)
    drain(runtime)
    check_consistent(runtime)
    assert not runtime.snapshot().holders
    runtime.close()
    assert [e.seq for e in runtime.events()] == list(range(len(runtime.events())))
