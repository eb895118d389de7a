"""Traces in Parquet are folded by batches; what is found is what folding each event finds."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kvclaims.checker import bulk, rows
from kvclaims.checker.audit import AuditedRun, AuditReport, Fold, Frame, audit, event_of
from kvclaims.checker.drawing import CODE, Drawer, draw_config
from kvclaims.checker.engines import find
from kvclaims.checker.rows import rows_of, write_parquet
from kvclaims.checker.supervise import features_of
from kvclaims.spec.interface import BadOperation, NotExposed, PoolConfig
from kvclaims.spec.operations import NoProgress, parse, perform
from kvclaims.spec.telemetry import Event, Recorder, TraceError
from kvclaims.spec.vocabulary import Verdict

Trace = tuple[Event, ...]
pytest.importorskip("pyarrow")


@cache
def lived(seed: int, operations: int = 60) -> Trace:
    """The trace of a random run of the reference."""
    engine, rng = find("reference"), random.Random(seed)
    features = features_of(engine)
    config = draw_config(rng.randbytes(CODE), 4, features)
    runtime, drawer = engine.open(config, f"run {seed}"), Drawer(config, features)
    for _ in range(operations):
        try:
            perform(runtime, parse(drawer.draw(rng.randbytes(CODE), runtime.observe())))
        except (BadOperation, NotExposed, NoProgress):
            continue
    runtime.close()
    return tuple(runtime.events())


def one_by_one(path: Path) -> AuditReport:
    """The same by the handlers of each event, in order."""
    runs, frame, fold, count = [], Frame(), Fold(()), 0
    number = 0
    try:
        for number, row in enumerate(rows_of(path), 1):
            try:
                event = event_of(row)
                closes = frame.follow(event)
            except TraceError as error:
                raise TraceError(f"row {number}: {error}") from None
            fold.take(event)
            count += 1
            if closes:
                runs.append(AuditedRun(path.name, event.run_id, count, fold))
                fold, count = Fold(()), 0
        frame.end(f"row {number}")
    except TraceError as error:
        raise TraceError(f"{path.name}: {error}") from None
    return AuditReport(tuple(runs))


def told(read: Callable[[], AuditReport]) -> Any:
    """Everything a reading comes to: what is reported, in which order, and what was kept."""
    try:
        report = read()
    except (TraceError, AssertionError) as error:
        return type(error).__name__, str(error)
    kept = [
        (
            list(run.fold.requests.items()),
            list(run.fold.claims.items()),
            run.fold.counts,
            list(run.fold.tables.blocks.items()),
            run.fold.tables.lent,
            run.fold.tables.found,
            run.fold.tables.exact,
        )
        for run in report.runs
    ]
    return json.dumps(report.to_json(), default=str), list(report.lines()), kept


def same(path: Path) -> Any:
    ours, theirs = told(lambda: audit([path])), told(lambda: one_by_one(path))
    assert ours == theirs
    return ours


# --- what goes wrong with a trace --------------------------------------------------------


def renumbered(events: list[Event]) -> list[Event]:
    found = [replace(event, seq=seq) for seq, event in enumerate(events)]
    if found and found[-1].event == "trace_closed":
        found[-1] = replace(found[-1], data={"events": len(found) - 1})
    return found


def _changed(rng: random.Random, value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice((value + 1, -value, -1, 10**17, "7", None, True))
    if isinstance(value, str):
        return rng.choice(("served", "served_no_admit", "é", 'a "quoted" one', 3, ""))
    if isinstance(value, list):
        return rng.choice(([], [*value, *value], [1, 2, 3], ["x"], [["c", 1]], 5))
    return rng.choice((None, 1, {}))


def drop(rng: random.Random, events: list[Event]) -> list[Event]:
    del events[rng.randrange(len(events))]
    return renumbered(events)


def repeat(rng: random.Random, events: list[Event]) -> list[Event]:
    at = rng.randrange(1, len(events))
    events.insert(at, events[rng.randrange(len(events))])
    return renumbered(events)


def swap(rng: random.Random, events: list[Event]) -> list[Event]:
    i, j = (rng.randrange(1, len(events) - 1) for _ in range(2))
    times = [event.timestamp_ns for event in events]
    events[i], events[j] = events[j], events[i]
    events = [replace(e, timestamp_ns=t) for e, t in zip(events, times, strict=True)]
    return renumbered(events)


def lose_number(rng: random.Random, events: list[Event]) -> list[Event]:
    del events[rng.randrange(len(events))]
    return events


def alter(rng: random.Random, events: list[Event]) -> list[Event]:
    able = [i for i, event in enumerate(events) if event.data]
    at = rng.choice(able)
    name = rng.choice(list(events[at].data))
    data = {**events[at].data, name: _changed(rng, events[at].data[name])}
    events[at] = replace(events[at], data=data)
    return events


def protect(_rng: random.Random, events: list[Event]) -> list[Event]:
    for i, event in enumerate(events):
        if event.event == "allocation_victim_selected":
            events[i] = replace(event, data={**event.data, "protected": True})
            break
    return events


def give_away(rng: random.Random, events: list[Event]) -> list[Event]:
    """A block that a claim covers is told to be a victim, somewhere after that."""
    covered = [i for i, e in enumerate(events) if e.event == "resident_block_materialized"]
    if covered:
        at = rng.choice(covered)
        block = events[at].data["block_id"]
        fields = {"hash": "x", "ref_count": 0, "protected": False, "reason": "r"}
        victim = replace(
            events[at],
            event="allocation_victim_selected",
            request_id="r1",
            claim_id=None,
            generation=None,
            data={"block_id": block, **fields},
        )
        events.insert(at + rng.randint(1, 5), victim)
        events.sort(key=lambda event: event.timestamp_ns)
    return renumbered(events)


def rename(rng: random.Random, events: list[Event]) -> list[Event]:
    at = rng.randrange(len(events))
    field = rng.choice(("run_id", "policy", "request_id", "claim_id"))
    events[at] = replace(events[at], **{field: rng.choice(("r1", "r2", "a", "other"))})
    return events


def shift(rng: random.Random, events: list[Event]) -> list[Event]:
    at, by = rng.randrange(len(events)), rng.choice((-(10**12), -1, 1))
    field = rng.choice(("timestamp_ns", "usable_blocks", "seq"))
    events[at] = replace(events[at], **{field: getattr(events[at], field) + by})
    return events


def retell(rng: random.Random, events: list[Event]) -> list[Event]:
    """Another kind of event in the place of one, with its own fields."""
    at, other = rng.randrange(len(events)), rng.choice(events)
    here = events[at]
    events[at] = replace(other, seq=here.seq, timestamp_ns=here.timestamp_ns)
    return events


def unnamed(rng: random.Random, events: list[Event]) -> list[Event]:
    able = [i for i, e in enumerate(events) if e.event.startswith("future_")]
    if able:
        at = rng.choice(able)
        events[at] = replace(events[at], request_id=None)
    return events


LEAST = {alter: 2, give_away: 5, retell: 5, rename: 5}
"""Of 30 traces, as many at least are wrong with this fault; of others 10."""

FAULTS = (
    drop,
    repeat,
    swap,
    lose_number,
    alter,
    protect,
    give_away,
    rename,
    shift,
    retell,
    unnamed,
)


@pytest.mark.parametrize("batch", [5, 23, 65_536])
def test_whole_traces_are_folded_as_one_by_one(
    batch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "BATCH", batch)
    path = tmp_path / "t.parquet"
    for seed in range(10):
        events = [*lived(3 * seed), *lived(3 * seed + 1), *lived(3 * seed + 2)]
        write_parquet(events, path)
        same(path)
        assert audit([path]).verdict is Verdict.HOLDS


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("batch", [11, 65_536])
def test_a_fault_is_told_as_one_by_one(
    fault: Callable[[random.Random, list[Event]], list[Event]],
    batch: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rows, "BATCH", batch)
    path, wrong = tmp_path / "t.parquet", 0
    for seed in range(30):
        write_parquet(fault(random.Random(seed), list(lived(seed))), path)
        outcome = same(path)
        wrong += len(outcome) == 2 or '"violations": []}' not in outcome[0][-20:]
    assert wrong >= LEAST.get(fault, 10), "too few of the traces were wrong"


@pytest.mark.parametrize("batch", [1, 65_536])
@pytest.mark.parametrize("again", [False, True])
def test_what_was_under_way_may_end_a_request_that_gave_way(
    batch: int, again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "BATCH", batch)
    ticks = itertools.count()
    recorder = Recorder("run", "test", 4, lambda: next(ticks))
    recorder.emit("trace_opened", engine="test", block_size=16, defer_limit=1)

    def told(event: str, **data: Any) -> None:
        recorder.emit(event, request_id="r", **data)

    told("active_request_submitted", admit_reuse=True, active_live_blocks_required=1)
    told("active_request_admitted", hit_blocks=0, new_blocks=1, free_blocks_before_allocate=4)
    told("active_request_preempted", blocks=1)
    for _ in range(1 + again):
        told("active_request_finished", outcome="served", blocks=0)
    told("future_reuse_admitted", blocks=0)
    recorder.emit("trace_closed", events=len(recorder.events))
    path = tmp_path / "t.parquet"
    write_parquet(recorder.events, path)
    assert ('"violations": []}' in same(path)[0][-20:]) is not again


def test_most_events_are_not_folded_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or nothing would be gained, and the tests above would compare one path with itself."""
    path = tmp_path / "t.parquet"
    runtime = find("reference").open(PoolConfig(20, 4), "plain")
    for i in range(40):
        content = [["A", 1 + i % 4], ["BC"[i % 2], 2]]
        perform(runtime, parse({"op": "submit", "request": f"r{i}", "content": content}))
        runtime.step()
        runtime.step()
    runtime.close()
    events = runtime.events()
    write_parquet(events, path)
    taken = 0
    take = Fold.take

    def counted(self: Fold, event: Event) -> None:
        nonlocal taken
        taken += 1
        take(self, event)

    monkeypatch.setattr(bulk.Fold, "take", counted)
    (run,) = audit([path]).runs
    assert run.events == len(events)
    assert len(events) > 200
    assert taken == 2  # how it opens and how it closes
    assert same(path)
