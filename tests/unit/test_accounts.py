"""A refusal's numbers are counted again from the trace alone (T2)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvclaims.checker.audit import Fold, audit, check_runs, read_trace
from kvclaims.checker.rows import write_parquet
from kvclaims.reference.engine import ENGINE
from kvclaims.spec.interface import PoolConfig
from kvclaims.spec.operations import parse, perform
from kvclaims.spec.telemetry import Event, TraceError
from kvclaims.spec.vocabulary import Verdict

PROGRAM = [
    {"op": "submit", "request": "r1", "content": [["A", 3]], "max_new_tokens": 6},
    {"op": "step"},
    {"op": "declare", "claim": "c", "content": [["B", 2]], "n": 2},
    {"op": "submit", "request": "r2", "content": [["C", 4]]},
    {"op": "step"},
    {"op": "submit", "request": "r3", "content": [["A", 3], ["C", 4]]},
    {"op": "drain"},
]
"""r2 waits for r1, r3 is refused because of c."""


def trace() -> tuple[Event, ...]:
    runtime = ENGINE.open(PoolConfig(7, 4, 0), "run")
    for operation in PROGRAM:
        perform(runtime, parse(operation))
    runtime.close()
    return runtime.events()


def answers(events: tuple[Event, ...]) -> list[Event]:
    return [e for e in events if e.event in ("active_request_deferred", "active_request_refused")]


def test_the_trace_tells_what_the_numbers_come_from() -> None:
    events = trace()
    assert [e.event for e in answers(events)] == [
        "active_request_deferred",
        "active_request_refused",
    ]
    assert Fold(events).violations == []


@pytest.mark.parametrize("event", ["active_request_deferred", "active_request_refused"])
@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("protected_resident_blocks", 1),
        ("resident_plus_active_blocks", 3),
        ("capacity_shortfall_blocks", 5),
        ("missing_now", 17),
        ("free_blocks_before_allocate", 0),
        ("active_live_blocks_current", 1),
        ("waits_on", ["r9"]),
        ("blocking_claim_ids", ["c", "d"]),
    ],
)
def test_every_number_is_counted_again(event: str, name: str, wrong: Any) -> None:
    spoiled = [replace(e, data={**e.data, name: wrong}) if e.event == event else e for e in trace()]
    assert "T2" in [violation.rule for violation in Fold(spoiled).violations]


def test_an_answer_without_what_it_rests_on_is_told() -> None:
    events = [e for e in trace() if e.event != "active_request_found"]
    messages = [v.message for v in Fold(events).violations]
    assert "request r2 was answered, and nothing says what it found" in messages


# --- Parquet -----------------------------------------------------------------------------


def test_parquet_says_the_same_as_lines(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    events = trace()
    rows, lines = tmp_path / "t.parquet", tmp_path / "t.jsonl"
    assert write_parquet(events, rows) == len(events)
    lines.write_text("".join(f"{event.to_json()}\n" for event in events))
    assert read_trace(rows) == read_trace(lines) == (events,)
    told = [audit([path]).to_json() for path in (rows, lines)]
    assert told[0]["runs"][0]["requests"] == told[1]["runs"][0]["requests"]
    assert audit([rows]).verdict is Verdict.HOLDS
    assert list(audit([rows]).lines())[-1] == "1 run: HOLDS"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda e: e[:-1], "row .*: the trace ends without trace_closed"),
        (lambda e: (*e[:2], *e[3:]), "row 3: seq 3 follows 1: events are missing"),
        (lambda e: (*e[:1], replace(e[1], usable_blocks=9), *e[2:]), "row 2: policy or usable"),
        (
            lambda e: (*e[:1], replace(e[1], request_id=None), *e[2:]),
            "an event active_request_… lacks request_id",
        ),
        (lambda e: (*e[:1], replace(e[1], event="odd"), *e[2:]), "unknown event 'odd'"),
        (
            lambda e: (*e[:1], replace(e[1], data={"x": 1}), *e[2:]),
            "row 2: .* has the wrong fields",
        ),
        (lambda e: (), "an empty trace"),
    ],
)
def test_rows_that_do_not_conform(tmp_path: Path, spoil: Any, message: str) -> None:
    pytest.importorskip("pyarrow")
    path = tmp_path / "t.parquet"
    write_parquet(spoil(trace()), path)
    with pytest.raises(TraceError, match=rf"t\.parquet: {message}"):
        audit([path])


def test_events_at_hand_are_checked_like_lines() -> None:
    events = trace()
    assert check_runs(events) == (events,)
    with pytest.raises(TraceError, match="event 2: "):
        check_runs((events[0], replace(events[1], data={}), *events[2:]))
