"""A timeline shows the pool as it was: against the runtime's own observations and the contract's
numbers, never against itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvclaims.checker.drawing import CODE, Drawer
from kvclaims.checker.reporttimeline import Counts, Door, Operation, Timeline, Use, timeline
from kvclaims.checker.verdicts import Violation
from kvclaims.reference.engine import ENGINE
from kvclaims.spec.interface import BadOperation, PoolConfig
from kvclaims.spec.operations import Operation as Program
from kvclaims.spec.operations import parse, perform

OPERATIONS: dict[str, list[dict[str, Any]]] = {
    "L3": [
        {"op": "submit", "request": "resident", "content": [["A", 60]]},
        {"op": "drain"},
        {"op": "declare", "claim": "keep", "content": [["A", 60]], "n": 60},
        {"op": "submit", "request": "active", "content": [["B", 70]]},
        {"op": "drain"},
    ],
    "L1": [
        {"op": "submit", "request": "resident", "content": [["A", 60]]},
        {"op": "drain"},
        {"op": "submit", "request": "active", "content": [["B", 70]]},
        {"op": "drain"},
    ],
}


def ran(usable: int, operations: list[dict[str, Any]], *, close: bool = True) -> Timeline:
    """The reference's run as a timeline, from its events alone."""
    runtime = ENGINE.open(PoolConfig(usable), "run")
    for raw in operations:
        perform(runtime, parse(raw))
    if close:
        runtime.close()
    return timeline(runtime.events())


def texts(line: Timeline) -> list[str]:
    return [line.text(step) for step in range(len(line.steps))]


def test_the_founding_conflict_is_told_in_twelve_steps() -> None:
    line = ran(80, OPERATIONS["L3"])
    assert texts(line) == [
        "the pool opens with 80 blocks of 16 tokens on reference",
        "request resident arrives and wants 60 blocks",
        "request resident is admitted: 0 blocks are there already, 60 are taken",
        "request resident is served and returns 60 blocks; 60 new ones stay for reuse",
        "owner submits claim keep: keep 60 blocks, hard protected",
        "claim keep is accepted: it costs 60 blocks, headroom is 80",
        "claim keep covers 60 blocks",
        "claim keep is materialized: 60 blocks are there",
        "request active arrives and wants 70 blocks",
        "request active has to wait for claim keep: 50 blocks are missing",
        "request active is refused because of claim keep: 50 blocks short",
        "the trace closes",
    ]
    counts = list(line.counts())
    assert counts[2] == Counts(60, 0, 0, 0, 20, 80)
    assert counts[3] == Counts(0, 0, 0, 60, 20, 80)
    assert counts[5] == Counts(0, 0, 60, 20, 0, 80)  # promised first out of blank blocks
    assert counts[10] == Counts(0, 60, 0, 0, 20, 80)
    assert [c.headroom for c in counts] == [80, 80, 20, 80, 80, 20, 20, 20, 20, 20, 20, 20]
    assert line.steps[6].blocks == [(1, 60, Use.PROTECTED)]


def test_the_refusal_comes_with_its_arithmetic() -> None:
    door = ran(80, OPERATIONS["L3"]).doors[-1]
    assert (door.request, door.outcome, door.blockers) == ("active", "refused", ("keep",))
    assert (door.need, door.headroom, door.missing, door.shortfall) == (70, 20, 50, 50)
    assert door.sums == [
        "active wants 70 blocks",
        "70 wanted − 20 headroom = 50 missing at this moment",
        "60 protected + 70 wanted = 130 > 80 usable: 50 short, even once others have finished",
    ]


def test_a_request_larger_than_the_pool_blames_nobody() -> None:
    line = ran(80, [{"op": "submit", "request": "r", "content": [["B", 90]]}, {"op": "drain"}])
    assert line.doors[-1].sums[-1] == "90 wanted > 80 usable: 10 short, whatever else ends"
    assert "request r exceeds the pool by itself: 10 blocks short" in texts(line)


def test_without_a_claim_fifty_blocks_are_evicted() -> None:
    line = ran(80, OPERATIONS["L1"])
    assert "50 blocks are evicted" in texts(line)
    assert list(line.counts())[-1] == Counts(0, 0, 0, 80, 0, 80)
    assert line.doors == ()


def test_a_claim_of_a_running_request_counts_its_blocks_once() -> None:
    """F1: a block both protected and held counts once."""
    operations = [
        {"op": "submit", "request": "r", "content": [["A", 4]]},
        {"op": "drain"},
        {"op": "declare", "claim": "c", "content": [["A", 4]], "n": 4},
        {"op": "submit", "request": "owner", "content": [["A", 4], ["B", 1]], "max_new_tokens": 9},
        {"op": "step"},
    ]
    line = ran(10, operations, close=False)
    last = list(line.counts())[-1]
    assert (last.active, last.protected, last.headroom) == (5, 0, 5)
    assert any(use == Use.BOTH for step in line.steps for _, _, use in step.blocks)


def test_lives_are_spans_of_phases() -> None:
    line = ran(80, OPERATIONS["L3"])
    (claim,) = line.claims
    assert claim.spans == [(4, "submitted"), (5, "accepted"), (7, "materialized")]
    assert claim.told["owner"] == "owner"
    active = next(bar for bar in line.requests if bar.name == "active")
    assert active.spans == [(8, "waiting"), (9, "deferred"), (10, "refused")]


def test_a_violation_stands_at_its_event_or_operation() -> None:
    runtime = ENGINE.open(PoolConfig(80), "run")
    told = [Operation("open", len(runtime.events()))]
    for raw in OPERATIONS["L3"]:
        perform(runtime, parse(raw))
        told.append(Operation(raw["op"], len(runtime.events())))
    found = [
        Violation("F4", "by event", seq=40),
        Violation("F4", "by operation", operation=3),
        Violation("F4", "at the end"),
    ]
    line = timeline(runtime.events(), told, found)
    at = {violation.message: step for step, violation in line.broken}
    assert line.text(at["by event"]) == "claim keep covers 60 blocks"
    assert line.text(at["by operation"]) == "claim keep is materialized: 60 blocks are there"
    assert at["at the end"] == len(line.steps) - 1
    assert [step.operation for step in line.steps] == [0, 1, 2, 2, 3, 3, 3, 3, 4, 5, 5]


def test_the_same_message_at_two_events_stands_at_both_and_the_first_comes_first() -> None:
    """Put off and then refused because of a claim that nobody knows: each event says so."""
    runtime = ENGINE.open(PoolConfig(80), "run")
    for raw in OPERATIONS["L3"]:
        perform(runtime, parse(raw))
    runtime.close()
    events = [
        replace(event, data={**event.data, "blocking_claim_ids": ["other"]})
        if "blocking_claim_ids" in event.data
        else event
        for event in runtime.events()
    ]
    line = timeline(events)
    assert [(step, v.rule, v.seq) for step, v in line.broken] == [
        (9, "T2", 71),
        (9, "F4", 71),
        (10, "T2", 73),
        (10, "F4", 73),
    ]
    told = [Violation("F4", v.message) for _, v in line.broken if v.rule == "F4"]
    assert timeline(events, found=told).broken == line.broken  # the fold knows where


def test_an_operation_that_tells_nothing_has_a_step_of_its_own() -> None:
    runtime = ENGINE.open(PoolConfig(8), "run")
    first = len(runtime.events())
    perform(runtime, Program("step", {}))
    told = [Operation("open", first), Operation("step", len(runtime.events()))]
    assert texts(timeline(runtime.events(), told))[1:] == ["step: no event"]


@settings(max_examples=25, deadline=None)
@example(  # a block that was lent and then covered is lost to a fault: no loan is left of it
    4,
    [
        bytes([0, 0, 1, 0, 1, *[0] * 9]),
        bytes([115, 0, 0, 3, *[0] * 9]),
        bytes([6, *[0] * 13]),
        bytes([231, 0, 1, *[0] * 11]),
    ],
)
@given(
    st.integers(4, 14),
    st.lists(st.binary(min_size=CODE, max_size=CODE), min_size=1, max_size=40),
)
def test_after_every_operation_the_timeline_is_what_the_runtime_shows(
    usable: int, codes: list[bytes]
) -> None:
    config = PoolConfig(usable, 4)
    runtime = ENGINE.open(config, "run")
    drawer = Drawer(config, frozenset())
    seen = [runtime.observe()]
    told = [Operation("open", len(runtime.events()))]
    for code in codes:
        operation = parse(drawer.draw(code, seen[-1]))
        try:
            perform(runtime, operation)
        except BadOperation:
            continue
        seen.append(runtime.observe())
        resident = frozenset(seen[-1].resident.values())
        told.append(Operation(str(operation), len(runtime.events()), resident))
    line = timeline(runtime.events(), told)
    ends: dict[int, Counts] = {}
    for step, counts in zip(line.steps, line.counts(), strict=True):
        ends[step.operation] = counts
    for number, observed in enumerate(seen):
        counts = ends[number]
        assert counts.headroom == observed.headroom
        assert counts.usable - counts.active - counts.protected == observed.free
        held = {block for view in observed.requests.values() for block in view.blocks}
        assert counts.active == len(held)
        total = counts.active + counts.protected + counts.reserved + counts.cached + counts.free
        assert total == usable


@pytest.mark.parametrize("text", ["</script><b>", "a & b"])
def test_names_cannot_break_out_of_the_page(text: str) -> None:
    line = ran(80, [{"op": "submit", "request": text, "content": [["A", 1]]}, {"op": "drain"}])
    assert text not in line.data()
    assert "<" not in line.data()


def test_a_door_with_other_requests_and_promises_sums_up_too() -> None:
    door = Door(0, "r", "refused", 9, 7, 1, 3, 2, 3, 3, 1, ("c",), (), 12)
    assert door.sums == [
        "r wants 9 blocks, 2 of them are there: 7 to find",
        "7 wanted − 1 on the reserve of claims − 3 headroom = 3 missing at this moment",
        "13 with all promises kept − 12 usable = 1 short, even once other requests have finished",
    ]
