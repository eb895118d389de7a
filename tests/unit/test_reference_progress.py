"""What must end does end on the reference, in the steps that the ranking says: V3 and B7.

Random operations first; then nothing new arrives, the running requests finish, and every request
that was ever told to wait has to have ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvclaims.reference import requests
from kvclaims.reference.engine import ENGINE
from kvclaims.spec.interface import BadOperation, PoolConfig, Runtime
from kvclaims.spec.operations import parse, perform
from kvclaims.spec.telemetry import Event
from kvclaims.spec.vocabulary import Outcome

NAMES = st.sampled_from(["c1", "c2", "c3"])
ASKERS = st.sampled_from([f"r{i}" for i in range(7)])
CONTENTS = st.tuples(st.sampled_from("ABC"), st.integers(1, 5)).map(lambda part: [list(part)])
PROMPTS = st.tuples(st.sampled_from("ABCD"), st.integers(0, 5), st.integers(1, 2)).map(
    lambda part: [list(part)]
)


def operation(op: str, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({"op": st.just(op), **fields})


OPERATIONS = st.one_of(
    operation(
        "declare",
        claim=NAMES,
        content=CONTENTS,
        n=st.integers(1, 4),
        generation=st.integers(1, 3),
        duration=st.integers(1, 4),
    ),
    operation("release", claim=NAMES),
    operation("submit", request=ASKERS, content=PROMPTS, max_new_tokens=st.integers(1, 6)),
    operation("submit", request=ASKERS, content=PROMPTS, max_new_tokens=st.integers(1, 6)),
    operation("abort", request=ASKERS),
    operation("step", times=st.integers(1, 2)),
    operation("advance", ticks=st.integers(1, 2)),
)


def started(usable: int, limit: int, operations: Sequence[dict[str, Any]]) -> Runtime:
    """A runtime after those of the operations that it accepts."""
    runtime = ENGINE.open(PoolConfig(usable, block_size=2, defer_limit=limit), "progress")
    for raw in operations:
        try:
            perform(runtime, parse(raw))
        except BadOperation:
            continue
        check_ends(runtime)
    return runtime


def check_ends(runtime: Runtime) -> None:
    """B7: what has ended, by whichever end, holds nothing once the operation is over."""
    seen, pool = runtime.observe(), runtime.snapshot()
    ended = {name for name, view in seen.requests.items() if view.state == "finished"}
    assert not ended & {name for name, blocks in pool.holders.items() if blocks}
    assert all(seen.requests[name].blocks == () for name in ended)


def told(events: Sequence[Event], event: str) -> list[Event]:
    return [e for e in events if e.event == event]


def rank(operations: Sequence[dict[str, Any]], limit: int) -> int:
    """As many steps as there can be: tokens that may be produced, and for each token the request
    may be sent back and admitted once more; deferrals by claims; the answer."""
    submitted = [raw for raw in operations if raw["op"] == "submit"]
    return sum(2 * raw["max_new_tokens"] + limit + 2 for raw in submitted)


def finish(runtime: Runtime, most: int) -> int:
    """Step until nobody waits or runs; fails past `most` steps."""
    steps = 0
    while any(view.state != "finished" for view in runtime.observe().requests.values()):
        assert steps < most, "a request neither ends nor comes nearer to its end"
        runtime.step()
        check_ends(runtime)
        steps += 1
    return steps


def check_deferrals(events: Sequence[Event], limit: int) -> None:
    """Claims deferred no request more often than the limit says, and whoever they refused was
    deferred as often as that."""
    structural: dict[str, int] = {}
    for event in told(events, "active_request_deferred"):
        if event.data["blocking_claim_ids"]:
            name = str(event.request_id)
            structural[name] = structural.get(name, 0) + 1
    assert all(times <= limit for times in structural.values())
    for event in told(events, "active_request_refused"):
        if event.data["outcome"] == Outcome.REFUSED:
            assert structural.get(str(event.request_id), 0) == limit


@settings(max_examples=120, deadline=None)
@given(
    usable=st.integers(1, 6),
    limit=st.integers(0, 3),
    operations=st.lists(OPERATIONS, max_size=30),
)
def test_V3_every_deferred_request_ends(
    usable: int, limit: int, operations: list[dict[str, Any]]
) -> None:
    runtime = started(usable, limit, operations)
    finish(runtime, rank(operations, limit))
    check_deferrals(runtime.events(), limit)
    seen = runtime.observe()
    deferred = {e.request_id for e in told(runtime.events(), "active_request_deferred")}
    for name in deferred:
        assert seen.requests[str(name)].outcome not in (Outcome.PENDING, Outcome.DEFERRED)
    assert not any(runtime.snapshot().holders.values())


def test_V3_congestion_ends_once_the_others_have_finished() -> None:
    """Whom the deferred request waits on is told; once they are gone its turn comes next."""
    runtime = ENGINE.open(PoolConfig(usable=4, block_size=2, defer_limit=0), "congestion")
    for name, label in (("first", "A"), ("second", "B")):
        submit = {"op": "submit", "request": name, "content": [[label, 3]], "max_new_tokens": 2}
        perform(runtime, parse(submit))
    runtime.step()
    (deferred,) = told(runtime.events(), "active_request_deferred")
    assert (deferred.request_id, deferred.data["waits_on"]) == ("second", ["first"])
    while runtime.observe().requests["first"].state != "finished":
        assert runtime.observe().requests["second"].state == "waiting"
        runtime.step()
    runtime.step()
    assert runtime.observe().requests["second"].state == "running"


# --- must fail -----------------------------------------------------------------------------

BLOCKED = [
    {"op": "declare", "claim": "c1", "content": [["A", 3]], "n": 3},
    {"op": "submit", "request": "r0", "content": [["B", 2]], "max_new_tokens": 1},
]


def test_a_blocked_request_ends_in_as_many_steps_as_it_may_be_deferred() -> None:
    assert [finish(started(4, limit, BLOCKED), rank(BLOCKED, limit)) for limit in range(3)] == [
        *(1, 2, 3)
    ]


def test_a_runtime_that_does_not_count_its_deferrals_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    uncounted = property(lambda self: 0, lambda self, value: None)
    monkeypatch.setattr(requests.Request, "deferrals", uncounted)
    with pytest.raises(AssertionError, match="neither ends nor comes nearer"):
        finish(started(4, 1, BLOCKED), rank(BLOCKED, 1))


def test_a_runtime_that_refuses_at_once_is_found() -> None:
    runtime = started(4, 0, BLOCKED)
    finish(runtime, rank(BLOCKED, 0))
    with pytest.raises(AssertionError):
        check_deferrals(runtime.events(), limit=1)
