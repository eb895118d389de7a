"""A trace is believed only if it is whole, and a broken rule in it carries its number."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvclaims.checker.audit import ClaimLife, Fold, audit, check_runs, read_runs, read_trace
from kvclaims.checker.rows import write_parquet
from kvclaims.reference.engine import ENGINE
from kvclaims.spec.interface import PoolConfig
from kvclaims.spec.operations import parse, perform
from kvclaims.spec.telemetry import Event, Recorder, TraceError
from kvclaims.spec.vocabulary import Outcome, Phase, Protection, Verdict

PREDICATE = {"kind": "leading_prefix_at_least", "start": 0, "n": 2}
HELD = {"holds": True, "leading": 2, "survivors": 2}
GONE = {"holds": False, "leading": 1, "survivors": 1}
REFUSAL: dict[str, Any] = {
    "outcome": "refused",
    "feasibility": "protected_resident_headroom_exhausted",
    "blocking_claim_ids": ["c"],
    "waits_on": [],
    "protected_resident_blocks": 2,
    "resident_plus_active_blocks": 5,
    "capacity_shortfall_blocks": 1,
    "missing_now": 1,
    "free_blocks_before_allocate": 2,
    "active_live_blocks_required": 3,
    "active_live_blocks_current": 0,
    "arbiter_action": None,
}


class Tale:
    """Writes a trace event by event; the shortest sensible values unless said."""

    def __init__(self, run_id: str = "run") -> None:
        ticks = itertools.count()
        self.recorder = Recorder(run_id, "test", 4, lambda: next(ticks))
        self.recorder.emit("trace_opened", engine="test", block_size=16, defer_limit=1)

    def claim(self, event: str, claim: str = "c", generation: int = 1, **data: Any) -> Tale:
        self.recorder.emit(event, claim_id=claim, generation=generation, **data)
        return self

    def request(self, event: str, request: str = "r", **data: Any) -> Tale:
        self.recorder.emit(event, request_id=request, **data)
        return self

    def submitted(
        self, protection: str = "hard_protected", generation: int = 1, duration: int | None = None
    ) -> Tale:
        return self.claim(
            "resident_claim_submitted",
            generation=generation,
            owner="o",
            protection=protection,
            predicate=PREDICATE,
            footprint=2,
            duration=duration,
        )

    def accepted(self, **changes: Any) -> Tale:
        data = {
            "decision": "accepted",
            "reason": "fits",
            "granted": PREDICATE,
            "cost_blocks": 2,
            "headroom_before": 4,
        }
        return self.claim("resident_claim_accepted", **{**data, **changes})

    def covered(self) -> Tale:
        for position in (0, 1):
            self.claim("resident_block_materialized", position=position, block_id=position + 1)
        return self

    def materialized(self, protection: str = "hard_protected") -> Tale:
        self.submitted(protection).accepted().covered()
        return self.claim("resident_claim_materialized", leading=2, survivors=2)

    def ended(self, how: str, phase_before: str) -> Tale:
        return self.claim(f"resident_claim_{how}", phase_before=phase_before, covered=2)

    def harmed(self, cause: str = "fault") -> Tale:
        return self.claim("resident_claim_harmed", cause=cause, before=HELD, after=GONE)

    def victim(self, block: int = 2, *, protected: bool = False) -> Tale:
        self.recorder.emit(
            "allocation_victim_selected",
            block_id=block,
            hash="h",
            ref_count=0,
            protected=protected,
            reason="cached_prefix_reuse",
        )
        return self

    def asked(self, *, admit_reuse: bool = True) -> Tale:
        return self.request(
            "active_request_submitted", admit_reuse=admit_reuse, active_live_blocks_required=3
        )

    def admitted(self) -> Tale:
        return self.request(
            "active_request_admitted", hit_blocks=0, new_blocks=3, free_blocks_before_allocate=4
        )

    def preempted(self) -> Tale:
        return self.request("active_request_preempted", blocks=3)

    def finished(self, outcome: str = "served") -> Tale:
        return self.request("active_request_finished", outcome=outcome, blocks=3)

    def deferred(self, **changes: Any) -> Tale:
        return self.request("active_request_deferred", **{**REFUSAL, **changes})

    def refused(self, **changes: Any) -> Tale:
        return self.request("active_request_refused", **{**REFUSAL, **changes})

    def close(self) -> tuple[Event, ...]:
        self.recorder.emit("trace_closed", events=len(self.recorder.events))
        return tuple(self.recorder.events)

    def lines(self) -> list[str]:
        return [event.to_json() for event in self.close()]


def good() -> Tale:
    return Tale().materialized().asked().deferred().refused().ended("released", "materialized")


def test_a_sound_trace_tells_phases_outcomes_and_blame() -> None:
    fold = Fold(good().close())
    assert fold.violations == []
    assert fold.claims["c"].phase is Phase.RELEASED
    request = fold.requests["r"]
    assert (request.outcome, request.shortfall) == (Outcome.REFUSED, 1)
    assert (request.blocking_claims, request.free) == (("c",), 2)


def test_what_was_under_way_may_end_a_request_that_gave_way() -> None:
    late = Tale().asked().admitted().preempted().finished()
    fold = Fold(late.request("future_reuse_admitted", blocks=0).close())
    assert fold.violations == []
    assert fold.requests["r"].outcome is Outcome.SERVED
    for tale in (Tale().asked().finished(), Tale().asked().admitted().finished().finished()):
        messages = [violation.message for violation in Fold(tale.close()).violations]
        assert messages[0].startswith("active_request_finished for ")


def test_every_dropped_line_is_detected() -> None:
    lines = good().lines()
    read_runs(lines)
    for index in range(len(lines)):
        with pytest.raises(TraceError):
            read_runs(lines[:index] + lines[index + 1 :])


def test_several_runs_in_a_file_stay_apart(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    again = [edit(line, run_id="again") for line in good().lines()]
    path.write_text("".join(f"{line}\n" for line in good().lines() + again))
    report = audit([path])
    assert [run.events for run in report.runs] == [11, 11]
    assert report.verdict is Verdict.HOLDS
    assert "  request r: refused, 1 blocks short because of c" in list(report.lines())


def test_a_run_is_in_a_file_once(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("".join(f"{line}\n" for line in good().lines() * 2))
    with pytest.raises(TraceError, match=r"t.jsonl: line 12: run 'run' is in the file already"):
        audit([path])


@pytest.mark.parametrize("change", [{"usable_blocks": 5}, {"policy": "another"}])
def test_the_pool_does_not_change_within_a_run(change: dict[str, Any]) -> None:
    lines = good().lines()
    lines[3] = edit(lines[3], **change)
    with pytest.raises(TraceError, match="line 4: policy or usable blocks change within a run"):
        read_runs(lines)


def edit(line: str, **changes: Any) -> str:
    return json.dumps({**json.loads(line), **changes})


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda x: [], "an empty trace (T3)"),
        (lambda x: x[1:], "line 1: a run starts with trace_opened at seq 0"),
        (lambda x: x[:-1], "line 10: the trace ends without trace_closed (T3)"),
        (lambda x: [*x[:-1], x[-1][:20]], "line 11: not JSON"),
        (lambda x: x[:3] + x[4:], "line 4: seq 4 follows 2: events are missing (T1)"),
        (lambda x: [*x[:3], x[3].replace("}", ',"more":1}'), *x[4:]], "line 4: resident_block"),
        (lambda x: [x[0], edit(x[1], timestamp_ns=-5), *x[2:]], "line 2: time runs back (T1)"),
        (lambda x: [x[0], edit(x[1], run_id="b"), *x[2:]], "line 2: run 'b' begins before"),
        (lambda x: [x[0], edit(x[0], seq=1), *x[2:]], "line 2: a second trace_opened"),
        (lambda x: [*x[:-1], edit(x[-1], events=3)], "line 11: trace_closed counts 3 events"),
        (lambda x: [x[0], edit(x[1], claim_id=None), *x[2:]], "line 2: resident_claim_submitted"),
        (lambda x: [x[0], edit(x[1], generation="1"), *x[2:]], "line 2: resident_claim_submitted"),
        (lambda x: [x[0], edit(x[1], protection="iron"), *x[2:]], "line 2: resident_claim_submit"),
        (lambda x: [x[0], edit(x[1], footprint="2"), *x[2:]], "line 2: resident_claim_submitted"),
        (lambda x: [x[0], edit(x[1], predicate=[]), *x[2:]], "line 2: resident_claim_submitted"),
        (lambda x: [x[0], edit(x[1], predicate={}), *x[2:]], "line 2: resident_claim_submitted"),
        (
            lambda x: [x[0], edit(x[1], predicate={**PREDICATE, "fidelity": "fine"}), *x[2:]],
            "line 2: resident_claim_submitted",
        ),
        (
            lambda x: [x[0], edit(x[1], predicate={**PREDICATE, "bound": 0.5}), *x[2:]],
            "line 2: resident_claim_submitted",
        ),
        (lambda x: [edit(x[0], run_id=7), *x[1:]], "line 1: run_id is not a text (T3)"),
        (lambda x: [edit(x[0], event=[]), *x[1:]], "line 1: unknown event []"),
        (lambda x: ["[]", *x[1:]], "line 1: not a JSON object"),
        (lambda x: ["{}", *x[1:]], "line 1: lacks "),
    ],
)
def test_a_trace_that_is_not_whole_is_rejected(
    tmp_path: Path, spoil: Callable[[list[str]], list[str]], message: str
) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(spoil(good().lines())))
    with pytest.raises(TraceError) as error:
        read_trace(path)
    assert str(error.value).startswith(f"t.jsonl: {message}")


def test_an_opening_may_tell_the_version_of_its_engine_and_must_not(tmp_path: Path) -> None:
    """What was recorded before that was told stays readable."""
    path = tmp_path / "t.jsonl"
    plain = good().lines()
    for lines in (plain, [edit(plain[0], engine_version="0.32.1"), *plain[1:]]):
        path.write_text("\n".join(lines))
        (run,) = read_trace(path)
        assert run[0].data.get("engine_version") == (None if lines is plain else "0.32.1")
        assert [event.to_json() for event in run] == [
            json.dumps(json.loads(x), separators=(",", ":")) for x in lines
        ]
        assert check_runs(run) == (run,)
        written = tmp_path / "t.parquet"
        write_parquet(run, written)
        assert read_trace(written) == (run,)
        written.unlink()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda x: [edit(x[0], engine_version=32), *x[1:]],
        lambda x: [x[0], edit(x[1], engine_version="0.32"), *x[2:]],
        lambda x: [edit(x[0], engine_versions="0.32"), *x[1:]],
    ],
)
def test_a_version_is_a_text_of_an_opening(
    tmp_path: Path, spoil: Callable[[list[str]], list[str]]
) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(spoil(good().lines())))
    with pytest.raises(TraceError, match="engine_version"):
        read_trace(path)


def test_a_cut_last_line_is_called_so(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(good().lines())[:-5])
    with pytest.raises(TraceError, match="the last line is cut short"):
        read_trace(path)


BROKEN: list[tuple[str, str, Tale]] = [
    ("L1", "submitted anew while materialized", Tale().materialized().submitted(generation=2)),
    (
        "L1",
        "without a higher generation",
        Tale().materialized().ended("released", "materialized").submitted(),
    ),
    ("L1", "from released to demoted", good().ended("demoted", "released")),
    ("L2", "without a reason", Tale().submitted().accepted(reason="")),
    (
        "L2",
        "conditionally_accepted",
        Tale().submitted().accepted(decision="conditionally_accepted"),
    ),
    ("L2", "protects a block while submitted", Tale().submitted().covered()),
    (
        "L3",
        "did not stop",
        Tale()
        .materialized()
        .claim("resident_claim_harmed", cause="fault", before=GONE, after=GONE),
    ),
    ("L4", "harmed without acceptance", Tale().submitted().harmed()),
    ("L4", "harmed after it was released", good().harmed()),
    (
        "L4",
        "not ended",
        Tale()
        .materialized()
        .claim("block_lost_after_release", position=0, block_id=1, phase="released"),
    ),
    ("L5", "harmed by own_choice", Tale().materialized().harmed("own_choice")),
    ("L6", "expired without a duration", Tale().materialized().ended("expired", "materialized")),
    ("L6", "renewed while released", good().claim("resident_claim_renewed", duration=5)),
    (
        "L7",
        "position 0 was not",
        Tale().submitted().accepted().claim("resident_claim_materialized", leading=2, survivors=2),
    ),
    ("F2", "with headroom 1", Tale().submitted().accepted(headroom_before=1)),
    ("F4", "no claim named", Tale().asked().refused(blocking_claim_ids=[])),
    ("F4", "which is unknown", Tale().asked().refused()),
    (
        "F4",
        "which is released",
        good()
        .request("active_request_submitted", "q", admit_reuse=True, active_live_blocks_required=1)
        .request("active_request_refused", "q", **REFUSAL),
    ),
    ("F4", "soft_priority", Tale().materialized("soft_priority").asked().refused()),
    ("F4", "no shortfall", Tale().materialized().asked().refused(capacity_shortfall_blocks=0)),
    ("F4", "yet claims blamed", Tale().materialized().asked().refused(outcome="capacity_required")),
    ("F4", "with outcome served", Tale().materialized().asked().refused(outcome="served")),
    ("F4", "told to wait", Tale().materialized().asked().refused(waits_on=["q"])),
    ("F4", "the limit is 1", Tale().materialized().asked().deferred().deferred()),
    ("F4", "deferred by", Tale().asked().deferred(blocking_claim_ids=[])),
    ("P1", "was given away", Tale().materialized().victim()),
    ("P1", "protected block", Tale().victim(protected=True)),
    ("P3", "nothing was told", Tale().materialized("soft_priority").victim()),
    ("P4", "ended served,", Tale().asked(admit_reuse=False).admitted().finished()),
    (
        "P4",
        "registered content",
        Tale().asked(admit_reuse=False).admitted().request("future_reuse_admitted", blocks=1),
    ),
    (
        "P4",
        "0 times, not 1",
        Tale().asked(admit_reuse=False).admitted().finished("served_no_admit"),
    ),
    ("V1", "never decided", Tale().submitted()),
    ("T2", "never submitted", Tale().harmed()),
    ("T2", "never submitted", Tale().admitted()),
    ("T2", "submitted twice", Tale().asked().asked()),
    ("T2", "for waiting request", Tale().asked().finished()),
    ("T2", "not accepted", Tale().materialized().ended("demoted", "accepted")),
]


@pytest.mark.parametrize(("rule", "message", "tale"), BROKEN)
def test_a_broken_rule_carries_its_number(rule: str, message: str, tale: Tale) -> None:
    (events,) = read_runs(tale.lines())
    broken = Fold(events).violations
    assert any(v.rule == rule and message in v.message for v in broken), broken


def test_a_soft_claim_that_is_told_of_its_loss_is_in_order() -> None:
    harmed = Tale().materialized("soft_priority").victim().harmed("own_choice")
    demoted = Tale().materialized("demotable").ended("demoted", "materialized").victim()
    for tale in (harmed, demoted):
        assert Fold(tale.close()).violations == []


def test_a_run_under_a_weaker_promise_breaks_the_stronger_one() -> None:
    events = Tale().materialized("soft_priority").victim().harmed("own_choice").close()
    assert Fold(events).violations == []
    assert {v.rule for v in Fold(events, Protection.HARD).violations} >= {"L5", "P1"}


def test_no_such_trace(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no such file"):
        audit([tmp_path / "none.jsonl"])


def test_a_refusal_costs_what_is_in_force_not_what_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A hundred thousand events may hold thousands of claims that ended long ago."""
    asked = 0

    def counts(wanted: property) -> property:
        def counted(self: ClaimLife) -> bool:
            nonlocal asked
            asked += 1
            return bool(wanted.__get__(self))

        return property(counted)

    def cost(ended: int) -> int:
        nonlocal asked
        runtime = ENGINE.open(PoolConfig(6), "many")
        for number in range(ended):
            perform(runtime, parse({**ROOM, "claim": f"c{number}"}))
            perform(runtime, parse({"op": "release", "claim": f"c{number}"}))
        perform(runtime, parse({**ROOM, "claim": "last"}))
        perform(runtime, parse({"op": "submit", "request": "r", "content": [["B", 5]]}))
        perform(runtime, parse({"op": "drain"}))
        runtime.close()
        *before, refused, _ = runtime.events()
        assert refused.event == "active_request_refused"
        fold = Fold(before)
        asked = 0
        fold.take(refused)
        assert fold.violations == []
        return asked

    monkeypatch.setattr(ClaimLife, "hard", counts(ClaimLife.hard))
    monkeypatch.setattr(ClaimLife, "responsible", counts(ClaimLife.responsible))
    assert cost(50) == cost(0)


ROOM: dict[str, Any] = {"op": "declare", "content": [["A", 2]], "n": 2}
