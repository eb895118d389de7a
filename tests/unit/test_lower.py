"""Lowering is fail-closed: what is not shown is unknown, and what claims more is rejected."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvclaims.checker import engines, lower, obligations, profiles
from kvclaims.checker.lower import ProbeResult
from kvclaims.checker.obligations import read_lines, shown_by
from kvclaims.checker.profiles import Document, Evidence, Mode, Probe, Profile, Refutation
from kvclaims.spec.interface import BadOperation, EngineInfo, EngineMissing
from kvclaims.spec.lowering import OWED, Depth, Lowering, Obligation, Way
from kvclaims.spec.vocabulary import Protection, Verdict

Trace = list[dict[str, Any]]


def holds(probe: Probe) -> ProbeResult:
    return ProbeResult(Verdict.HOLDS, f"{probe.program} holds")


def fails(probe: Probe) -> ProbeResult:
    return ProbeResult(Verdict.VIOLATED, f"{probe.program} is violated")


def good_trace() -> Trace:
    """A connector that offloads two claims, restores one and fails the other's restore."""
    moved = {"tier": "host", "object_id": "o-1", "cache_identity": "model/16", "token_map": [0, 64]}
    other = {**moved, "object_id": "o-2"}
    events: Trace = [
        {"event": "resident_claim_submitted", "claim_id": "a", "predicate": {"n": 4}},
        {"event": "resident_claim_accepted", "claim_id": "a"},
        {"event": "resident_claim_materialized", "claim_id": "a", "leading": 4},
        {"event": "resident_claim_submitted", "claim_id": "b", "predicate": {"n": 4}},
        {"event": "resident_claim_accepted", "claim_id": "b"},
        {"event": "resident_claim_materialized", "claim_id": "b", "leading": 4},
        {"event": "resident_claim_offloaded", "claim_id": "a", **moved},
        {"event": "resident_claim_offloaded", "claim_id": "b", **other},
        {"event": "resident_claim_restore_required", "claim_id": "a"},
        {"event": "resident_claim_restored", "claim_id": "a", "source": "tier", **moved},
        {"event": "resident_claim_reuse_after_restore", "claim_id": "a"},
        {"event": "resident_claim_restore_required", "claim_id": "b"},
        {"event": "resident_claim_restoration_failed", "claim_id": "b"},
        {"event": "resident_claim_harmed", "claim_id": "b"},
    ]
    return [{"seq": number, **event} for number, event in enumerate(events)]


def without(trace: Trace, *names: str) -> Trace:
    return [event for event in trace if event["event"] not in names]


def swapped(trace: Trace, one: str, other: str) -> Trace:
    names = [event["event"] for event in trace]
    i, j = names.index(one), names.index(other)
    body = [{k: v for k, v in event.items() if k != "seq"} for event in trace]
    body[i], body[j] = body[j], body[i]
    return [{"seq": number, **event} for number, event in enumerate(body)]


def changed(trace: Trace, name: str, **fields: Any) -> Trace:
    return [{**event, **fields} if event["event"] == name else event for event in trace]


BAD: dict[str, tuple[Callable[[Trace], Trace], Obligation, str]] = {
    "no hook": (lambda t: [], Obligation.IDENTITY, "the trace is empty: nothing is hooked"),
    "emission off": (
        lambda t: without(t, "resident_claim_accepted"),
        Obligation.ACCEPTANCE,
        "a was never answered",
    ),
    "transfer counters only": (
        lambda t: [{"seq": 0, "event": "transfer", "bytes": 4096}],
        Obligation.IDENTITY,
        "no event names a claim: only counters",
    ),
    "offload without restore": (
        lambda t: without(
            t,
            "resident_claim_restored",
            "resident_claim_restore_required",
            "resident_claim_reuse_after_restore",
        ),
        Obligation.RESTORE,
        "a was offloaded and never restored",
    ),
    "restore after reuse": (
        lambda t: swapped(t, "resident_claim_restored", "resident_claim_reuse_after_restore"),
        Obligation.RESTORE,
        "a was reused before it was restored",
    ),
    "failure blamed on another claim": (
        lambda t: changed(t, "resident_claim_restoration_failed", blamed_claim_id="a"),
        Obligation.RESTORE_FAILURE,
        "a failed restore of b is blamed on a",
    ),
    "recompute passed as restore": (
        lambda t: changed(t, "resident_claim_restored", source="recompute"),
        Obligation.RESTORE,
        "a was recomputed, and that was called a restore",
    ),
    "claim named afterwards": (
        lambda t: swapped(t, "resident_claim_submitted", "resident_claim_offloaded"),
        Obligation.IDENTITY,
        "a is named only afterwards, by resident_claim_offloaded",
    ),
    "missing identity": (
        lambda t: changed(t, "resident_claim_restored", cache_identity=None),
        Obligation.CACHE_IDENTITY,
        "a moves without cache_identity",
    ),
    "missing object": (
        lambda t: changed(t, "resident_claim_restored", object_id="o-9"),
        Obligation.OBJECT,
        "object_id of a changes on the way",
    ),
    "missing order": (
        lambda t: [{k: v for k, v in event.items() if k != "seq"} for event in t],
        Obligation.ORDER,
        "events carry no sequence number",
    ),
    "missing event": (
        lambda t: without(t, "resident_claim_harmed", "resident_claim_restored"),
        Obligation.ORDER,
        "sequence numbers are not dense: events are missing or out of order",
    ),
    "missing predicate": (
        lambda t: changed(t, "resident_claim_submitted", predicate=None),
        Obligation.PREDICATE,
        "a has no predicate",
    ),
    "failure without outcome": (
        lambda t: without(t, "resident_claim_harmed"),
        Obligation.RESTORE_FAILURE,
        "the failed restore of b has no outcome",
    ),
}


def offloadable(folder: Path, trace: Trace) -> Profile:
    """A patched connector that anchors every obligation in one trace."""
    path = folder / "trace.jsonl"
    path.write_text("".join(json.dumps(event) + "\n" for event in trace), encoding="utf-8")
    evidence = {
        owed: Evidence(Way.JOINED, "the trace says so", trace=path)
        for owed in OWED[Protection.OFFLOADABLE]
    }
    mode = Mode(Protection.OFFLOADABLE, Depth.TELEMETRY, Lowering.OBSERVATIONAL, evidence)
    return Profile("connector", "a patched connector", "1", (mode,))


def test_a_trace_that_shows_every_obligation_supports_the_mode(tmp_path: Path) -> None:
    report = lower.lower(offloadable(tmp_path, good_trace()), holds)
    assert report.modes[0].lowering is Lowering.OBSERVATIONAL
    assert report.verdict is Verdict.HOLDS


@pytest.mark.parametrize("name", BAD)
def test_a_bad_lowering_is_rejected_for_its_own_reason(tmp_path: Path, name: str) -> None:
    spoil, obligation, reason = BAD[name]
    report = lower.lower(offloadable(tmp_path, spoil(good_trace())), holds)
    assert report.modes[0].lowering is Lowering.REJECTED
    assert f"{obligation}: {reason}" in report.modes[0].reasons
    assert report.verdict is Verdict.VIOLATED


def again(trace: Trace, **fields: Any) -> Trace:
    """Claim a goes to the tier a second time and comes back with these fields."""
    moved = {"claim_id": "a", "tier": "host", "object_id": "o-1", "cache_identity": "model/16"}
    more: Trace = [
        {"event": "resident_claim_offloaded", **moved, "token_map": [0, 64]},
        {"event": "resident_claim_restore_required", "claim_id": "a"},
        {
            "event": "resident_claim_restored",
            **moved,
            "token_map": [0, 64],
            "source": "tier",
            **fields,
        },
    ]
    return [*trace, *({"seq": len(trace) + i, **event} for i, event in enumerate(more))]


def numbered(trace: Trace) -> Trace:
    return [{**event, "seq": number} for number, event in enumerate(trace)]


def put(trace: Trace, at: int, *events: dict[str, Any]) -> Trace:
    """The trace with these events before its event `at`."""
    return numbered([*trace[:at], *events, *trace[at:]])


def told_of(trace: Trace, claim: str, name: str, **fields: Any) -> Trace:
    """The trace with other fields where this befalls the claim; None leaves a field out."""
    return [
        {k: v for k, v in {**event, **fields}.items() if k not in fields or v is not None}
        if (event["claim_id"], event["event"]) == (claim, name)
        else event
        for event in trace
    ]


def opened(trace: Trace, engine: Any = "connector", version: Any = None, **fields: Any) -> Trace:
    """The trace from its opening to its close."""
    opening = {"event": "trace_opened", "engine": engine, "engine_version": version}
    whole: Trace = [{k: v for k, v in opening.items() if v is not None}, *trace]
    return numbered([*whole, {"event": "trace_closed", "events": len(whole), **fields}])


def ranged(trace: Trace, *written: int) -> Trace:
    """The claims ask for blocks 2 to 5, of which these positions of the first are written."""
    asked = {"kind": "contiguous_range", "start": 2, "n": 4}
    trace = changed(trace, "resident_claim_submitted", predicate=asked)
    trace = changed(trace, "resident_claim_materialized", leading=0)
    trace = told_of(trace, "b", "resident_claim_materialized", leading=6)
    event = {"event": "resident_block_materialized", "claim_id": "a"}
    return put(trace, 2, *({**event, "position": position} for position in written))


SUBMITTED = {"event": "resident_claim_submitted", "predicate": {"n": 4}}
COUNT = {"kind": "survivors_at_least", "start": 0, "n": 4}
FAILED = "resident_claim_restoration_failed"
HARMED = "resident_claim_harmed"
OFF = "resident_claim_offloaded"
REQUIRED = "resident_claim_restore_required"
RELEASED = "resident_claim_released"

BROKEN: dict[str, tuple[Callable[[Trace], Trace], Obligation, str]] = {
    "the second restore is a recompute": (
        lambda t: again(t, source="recompute"),
        Obligation.RESTORE,
        "a was recomputed, and that was called a restore",
    ),
    "offloaded again and never restored": (
        lambda t: again(t)[:-1],
        Obligation.RESTORE,
        "a was offloaded and never restored",
    ),
    "materialized though refused": (
        lambda t: [
            {**e, "event": "resident_claim_refused"}
            if e["event"] == "resident_claim_accepted" and e["claim_id"] == "a"
            else e
            for e in t
        ],
        Obligation.ACCEPTANCE,
        "a materialized though it was not accepted",
    ),
    "materialized with less than it asks for": (
        lambda t: changed(t, "resident_claim_materialized", leading=3),
        Obligation.PREDICATE,
        "a materialized though its predicate is not met",
    ),
    "claims named by numbers": (
        lambda t: [{**e, "claim_id": 5} for e in t],
        Obligation.IDENTITY,
        "line 1: 5 is no id of a claim",
    ),
    "a claim's event without its name": (
        lambda t: [{k: v for k, v in t[0].items() if k != "claim_id"}, *t[1:]],
        Obligation.IDENTITY,
        "line 1: resident_claim_submitted names no claim",
    ),
    "an event that is no word": (
        lambda t: [*t, {"seq": len(t), "event": ["x"], "claim_id": "a"}],
        Obligation.RESTORE_FAILURE,
        f"line {len(good_trace()) + 1} names no event",
    ),
    "an empty predicate": (
        lambda t: changed(t, "resident_claim_submitted", predicate={}),
        Obligation.PREDICATE,
        "a: {} is no predicate",
    ),
    "a count of survivors": (
        lambda t: changed(t, "resident_claim_submitted", predicate=COUNT),
        Obligation.PREDICATE,
        f"a: {COUNT!r} is no predicate",
    ),
    "a predicate of no blocks": (
        lambda t: changed(t, "resident_claim_submitted", predicate={"n": 0}),
        Obligation.PREDICATE,
        "a: {'n': 0} is no predicate",
    ),
    "a range that starts nowhere": (
        lambda t: changed(
            t, "resident_claim_submitted", predicate={"kind": "contiguous_range", "n": 4}
        ),
        Obligation.PREDICATE,
        "a: {'kind': 'contiguous_range', 'n': 4} is no predicate",
    ),
    "something granted that is no predicate": (
        lambda t: changed(t, "resident_claim_accepted", granted=4),
        Obligation.PREDICATE,
        "a: 4 is no predicate",
    ),
    "a range that nothing looked at": (
        ranged,
        Obligation.PREDICATE,
        "a materialized though its predicate is not met",
    ),
    "a range with a hole": (
        lambda t: ranged(t, 2, 3, 5),
        Obligation.PREDICATE,
        "a materialized though its predicate is not met",
    ),
    "a range of which a block was lost": (
        lambda t: put(
            ranged(t, 2, 3, 4, 5),
            6,
            {"event": "resident_block_lost", "claim_id": "a", "position": 3},
        ),
        Obligation.PREDICATE,
        "a materialized though its predicate is not met",
    ),
    "a restore without its source": (
        lambda t: told_of(t, "a", "resident_claim_restored", source=None),
        Obligation.RESTORE,
        "the restore of a does not say whether it was recomputed",
    ),
    "restored from another tier": (
        lambda t: told_of(t, "a", "resident_claim_restored", tier="disk"),
        Obligation.RESTORE,
        "a was restored from another tier than it was offloaded to",
    ),
    "reused and never restored": (
        lambda t: put(t, 6, {"event": "resident_claim_reuse_after_restore", "claim_id": "a"}),
        Obligation.RESTORE,
        "a was reused before it was restored",
    ),
    "moved after release": (
        lambda t: put(t, 6, {"event": RELEASED, "claim_id": "a"}),
        Obligation.RESTORE,
        "a moved after it had ended",
    ),
    "out of turn after release": (
        lambda t: put(t, 6, {"event": RELEASED, "claim_id": "a"}),
        Obligation.ORDER,
        f"a: {OFF} after {RELEASED}",
    ),
    "accepted as the outcome of a failed restore": (
        lambda t: told_of(t, "b", HARMED, event="resident_claim_accepted"),
        Obligation.RESTORE_FAILURE,
        "the failed restore of b has no outcome",
    ),
    "released as the outcome of a failed restore": (
        lambda t: told_of(t, "b", HARMED, event=RELEASED),
        Obligation.RESTORE_FAILURE,
        "the failed restore of b has no outcome",
    ),
    "required again after a failed restore": (
        lambda t: put(t, 13, {"event": REQUIRED, "claim_id": "b"}),
        Obligation.RESTORE_FAILURE,
        "the failed restore of b has no outcome",
    ),
    "materialized after a failed restore": (
        lambda t: put(
            t, 13, {"event": "resident_claim_materialized", "claim_id": "b", "leading": 4}
        ),
        Obligation.RESTORE_FAILURE,
        "b was served though its restore failed",
    ),
    "a failed restore of what was never offloaded": (
        lambda t: numbered([e for e in t if (e["claim_id"], e["event"]) != ("b", OFF)]),
        Obligation.RESTORE_FAILURE,
        "a restore of b failed though it was never offloaded",
    ),
    "a failed restore that was never required": (
        lambda t: numbered([e for e in t if (e["claim_id"], e["event"]) != ("b", REQUIRED)]),
        Obligation.RESTORE_FAILURE,
        "a restore of b failed though no restore was required",
    ),
    "a failed restore of what is back": (
        lambda t: put(t, 11, {"event": FAILED, "claim_id": "a"}),
        Obligation.RESTORE_FAILURE,
        "a restore of a failed though no restore was required",
    ),
    "a failure blamed on several": (
        lambda t: told_of(t, "b", FAILED, blamed_claim_ids=["a"]),
        Obligation.RESTORE_FAILURE,
        "a failed restore of b is blamed on ['a']",
    ),
    "an outcome blamed on another": (
        lambda t: told_of(t, "b", HARMED, blamed_claim_id="a"),
        Obligation.RESTORE_FAILURE,
        "a failed restore of b is blamed on a",
    ),
    "time that runs back": (
        lambda t: [{**e, "timestamp_ns": 100 - e["seq"]} for e in t],
        Obligation.ORDER,
        "time runs back",
    ),
    "times that are none": (
        lambda t: [{**e, "timestamp_ns": float("nan")} for e in t],
        Obligation.ORDER,
        "not every event carries a time",
    ),
    "times of some events": (
        lambda t: told_of(t, "b", HARMED, timestamp_ns=5),
        Obligation.ORDER,
        "not every event carries a time",
    ),
    "events of two runs": (
        lambda t: [{**e, "run_id": f"r{e['seq'] % 2}"} for e in t],
        Obligation.ORDER,
        "events are of more than one run",
    ),
    "accepted after refusal": (
        lambda t: put(t, 1, {"event": "resident_claim_refused", "claim_id": "a"}),
        Obligation.ACCEPTANCE,
        "a was answered more than once",
    ),
    "granted in silence less than asked": (
        lambda t: told_of(t, "a", "resident_claim_accepted", granted={"n": 2}, decision="accepted"),
        Obligation.ACCEPTANCE,
        "a was granted something else than it asked for, and told it was accepted",
    ),
    "back without a generation": (
        lambda t: put(t, 14, {**SUBMITTED, "claim_id": "b"}),
        Obligation.IDENTITY,
        "b came back without a generation",
    ),
    "back with the same generation": (
        lambda t: put(
            told_of(t, "b", "resident_claim_submitted", generation=1),
            14,
            {**SUBMITTED, "claim_id": "b", "generation": 1},
        ),
        Obligation.IDENTITY,
        "b came back without a higher generation",
    ),
    "an event of another generation": (
        lambda t: told_of(t, "b", HARMED, generation=2),
        Obligation.IDENTITY,
        "an event of b is of another generation than its submission",
    ),
    "a trace without its end": (
        lambda t: opened(t)[:-1],
        Obligation.IDENTITY,
        "the trace goes not from trace_opened to trace_closed: events are missing",
    ),
    "a trace without its beginning": (
        lambda t: numbered(opened(t)[1:]),
        Obligation.IDENTITY,
        "the trace goes not from trace_opened to trace_closed: events are missing",
    ),
    "a trace that closes after more": (
        lambda t: opened(t, events=99),
        Obligation.PREDICATE,
        f"the trace closes after 99 events, and has {len(good_trace()) + 1}: some are missing",
    ),
    "an event that is missing of a whole trace": (
        lambda t: opened([*t[:3], *t[4:]])[:-1] + opened(t)[-1:],
        Obligation.PREDICATE,
        f"the trace closes after {len(good_trace()) + 1} events, and has {len(good_trace())}: "
        "some are missing",
    ),
    "two runs in one trace": (
        lambda t: opened([{"event": "trace_opened", "engine": "x"}, *t]),
        Obligation.IDENTITY,
        "the trace is of more than one run",
    ),
    "a whole trace out of order": (
        lambda t: [*opened(t)[:4], opened(t)[5], opened(t)[4], *opened(t)[6:]],
        Obligation.IDENTITY,
        "sequence numbers are not dense: events are missing or out of order",
    ),
    "a claim that writes lines of its own": (
        lambda t: [{**e, "claim_id": "a\nHOLDS"} for e in t],
        Obligation.IDENTITY,
        "line 1: 'a\\nHOLDS' is no id of a claim",
    ),
    "another map of tokens": (
        lambda t: changed(t, "resident_claim_restored", token_map=[0, 32]),
        Obligation.CACHE_IDENTITY,
        "token_map of a changes on the way",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_trace_that_breaks_its_word_shows_nothing(name: str) -> None:
    spoil, obligation, reason = BROKEN[name]
    shown = shown_by(spoil(good_trace()))[obligation]
    assert (shown.holds, shown.reason) == (False, reason)


def test_a_claim_may_go_and_come_back_more_than_once() -> None:
    shown = shown_by(again(good_trace()))
    assert shown[Obligation.RESTORE].holds
    assert shown[Obligation.ORDER].holds


def reborn(trace: Trace) -> Trace:
    """Claim b comes back as a new generation, and is materialized."""
    events = [
        {**SUBMITTED, "generation": 2},
        {"event": "resident_claim_accepted", "granted": {"n": 2}, "generation": 2},
        {"event": "resident_claim_materialized", "leading": 2, "generation": 2},
    ]
    first = told_of(trace, "b", "resident_claim_submitted", generation=1)
    return put(first, 14, *({**event, "claim_id": "b"} for event in events))


GOOD: dict[str, Callable[[Trace], Trace]] = {
    "as it is": lambda t: t,
    "from its opening to its close": opened,
    "with times and a run": lambda t: [
        {**e, "timestamp_ns": e["seq"] // 2, "run_id": "r"} for e in t
    ],
    "a range that was written": lambda t: ranged(t, 2, 3, 4, 5),
    "a claim that comes back as a new generation": reborn,
    "a failed restore that ends in a refusal": lambda t: told_of(
        t, "b", HARMED, event="resident_claim_refused"
    ),
    "a failure blamed on its own claim": lambda t: told_of(
        t, "b", FAILED, blamed_claim_id="b", blamed_claim_ids=["b"]
    ),
    "clipped, and said so": lambda t: told_of(
        t, "a", "resident_claim_accepted", granted={"n": 2}, decision="conditionally_accepted"
    ),
}


@pytest.mark.parametrize("name", GOOD)
def test_a_trace_that_keeps_its_word_shows_every_obligation(name: str) -> None:
    broken = {o: s.reason for o, s in shown_by(GOOD[name](good_trace())).items() if not s.holds}
    assert broken == {}


def of_engine(tmp_path: Path, engine: str | None, trace: Trace) -> lower.ModeVerdict:
    profile = replace(offloadable(tmp_path, trace), engine=engine)
    return lower.lower(profile, holds).modes[0]


@pytest.mark.parametrize(
    ("engine", "traced", "version"),
    [
        ("vllm", "vllm", "1"),
        ("vllm", "vllm", "1.0.7"),
        ("mine", "mine", "1"),
        (None, "connector", "1.2"),
        (None, "connector", None),
        (None, "a patched connector", None),
    ],
)
def test_a_trace_of_the_engine_itself_supports_the_mode(
    tmp_path: Path, engine: str | None, traced: str, version: str | None
) -> None:
    verdict = of_engine(tmp_path, engine, opened(good_trace(), traced, version))
    assert verdict.reasons == ()
    assert verdict.lowering is Lowering.OBSERVATIONAL


@pytest.mark.parametrize(
    ("engine", "trace", "says"),
    [
        ("vllm", opened(good_trace(), "reference"), "a trace of reference says nothing of vllm"),
        (None, opened(good_trace(), "reference"), "of reference says nothing of this runtime"),
        ("vllm", good_trace(), "a trace of no engine by name says nothing of vllm"),
        ("vllm", opened(good_trace(), "\x1b[31m"), r"a trace of '\x1b[31m' says nothing of vllm"),
        (None, opened(good_trace(), "mooncake"), "of mooncake says nothing of this runtime"),
        (
            "vllm",
            opened(good_trace(), "vllm"),
            "a trace of no version by name says nothing of vllm 1",
        ),
        ("vllm", opened(good_trace(), "vllm", "0.9"), "a trace of 0.9 says nothing of vllm 1"),
        ("vllm", opened(good_trace(), "vllm", "10"), "a trace of 10 says nothing of vllm 1"),
        (
            None,
            opened(good_trace(), ["connector"]),
            "a trace of ['connector'] says nothing of this runtime",
        ),
        ("vllm", opened(good_trace(), "vllm", 1), "a trace of 1 says nothing of vllm 1"),
        (None, opened(good_trace(), "connector", "2.1"), "of 2.1 says nothing of this runtime 1"),
    ],
)
def test_a_trace_of_another_engine_says_nothing(
    tmp_path: Path, engine: str | None, trace: Trace, says: str
) -> None:
    verdict = of_engine(tmp_path, engine, trace)
    assert verdict.lowering is Lowering.REJECTED
    assert all(reason.endswith(says) for reason in verdict.reasons)
    assert len(verdict.reasons) == len(OWED[Protection.OFFLOADABLE])


def test_what_may_never_end_is_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (Path("/dev/zero"), tmp_path, tmp_path / "pipe"):
        with pytest.raises(BadOperation, match=r"JSON lines .not a regular file"):
            read_lines(path)
    monkeypatch.setattr(obligations, "MOST_BYTES", 8)
    (tmp_path / "large").write_text('{"a": 1}\n')
    with pytest.raises(BadOperation, match="larger than 8 bytes"):
        read_lines(tmp_path / "large")
    (tmp_path / "small").write_text('{"a": 1}')
    assert read_lines(tmp_path / "small") == [{"a": 1}]


def test_the_order_after_a_failure_is_that_of_the_lines() -> None:
    told = [{**event, "seq": str(event["seq"])} for event in good_trace()]
    assert shown_by(told)[Obligation.RESTORE_FAILURE].holds
    assert not shown_by(told)[Obligation.ORDER].holds


@pytest.mark.parametrize("text", ['{"seq": ' + "9" * 5000 + "}", "[" * 100_000, "[]", "\xff"])
def test_a_trace_that_cannot_be_read_is_one_clear_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(BadOperation, match=r"trace\.jsonl: not a trace of JSON lines"):
        read_lines(path)


def test_a_trace_whose_name_is_no_name_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(BadOperation, match="not a trace of JSON lines"):
        read_lines(tmp_path / "a\0b")


def test_only_the_obligation_that_is_broken_is_blamed() -> None:
    spoil, obligation, _ = BAD["recompute passed as restore"]
    broken = {o for o, shown in shown_by(spoil(good_trace())).items() if not shown.holds}
    assert broken == {obligation}


# --- profiles ----------------------------------------------------------------------------

PUBLISHED = {
    ("tensorrt-llm", Protection.SOFT): Lowering.POLICY,
    ("sglang", Protection.BEST_EFFORT): Lowering.OBSERVATIONAL,
    **{
        ("dynamo", mode): Lowering.UNKNOWN
        for mode in (
            Protection.BEST_EFFORT,
            Protection.SOFT,
            Protection.HARD,
            Protection.OFFLOADABLE,
        )
    },
}
"""The verdicts published for three runtimes (arXiv 2606.01387): by adapter, by adapter, none."""


@pytest.mark.parametrize(("name", "protection"), PUBLISHED)
def test_published_verdicts_come_out_the_same(name: str, protection: Protection) -> None:
    report = lower.lower(profiles.load(name), holds)
    (mode,) = (m for m in report.modes if m.mode.protection is protection)
    assert mode.lowering is PUBLISHED[name, protection]


def test_a_line_says_what_follows_and_what_more_was_claimed() -> None:
    profile = profiles.load("vllm-claims")
    (hard,) = (mode for mode in profile.modes if mode.protection is Protection.HARD)
    alone = replace(profile, modes=(hard,))
    assert list(lower.lower(alone, holds).lines())[1] == "  hard_protected  adapter (policy)"
    more = replace(profile, modes=(replace(hard, claims=Lowering.NATIVE),))
    (_, line, *_) = lower.lower(more, holds).lines()
    told = "adapter (policy); the profile claims native: VIOLATED"
    assert line == f"  hard_protected  {told}"


def test_a_profile_that_supports_nothing_shows_nothing() -> None:
    assert lower.lower(profiles.load("dynamo"), holds).verdict is Verdict.UNKNOWN


@pytest.mark.parametrize(
    ("here", "version", "lowering"),
    [
        ("7.1.2", "7.1", Lowering.POLICY),
        ("7.1.2", "7", Lowering.POLICY),
        ("7.1.2", "7.10", Lowering.REJECTED),
        ("0.32.1", "0.32", Lowering.POLICY),
        ("0.32.1", "0", Lowering.REJECTED),
        ("0.0.7", "0.0", Lowering.REJECTED),
        ("0.0.7", "0.0.7", Lowering.POLICY),
        ("0", "0", Lowering.POLICY),
    ],
)
def test_a_run_of_another_version_shows_nothing(
    monkeypatch: pytest.MonkeyPatch, here: str, version: str, lowering: Lowering
) -> None:
    """Before 1.0 every minor version may be another runtime: 0 alone names none of them."""
    info = EngineInfo("reference", here, "here")
    monkeypatch.setattr(lower.engines, "ready", lambda name: (None, info))
    monkeypatch.setattr(lower, "probe", holds)
    (hard,) = (m for m in profiles.load("vllm-claims").modes if m.protection is Protection.HARD)
    profile = Profile("p", "a runtime", version, (hard,), "vllm")
    report = lower.lower(profile)
    assert next(report.lines()).startswith(f"p: a runtime ({version}; here is vllm {here}): ")
    assert (report.to_json()["engine"], report.to_json()["here"]) == ("vllm", here)
    (mode,) = report.modes
    assert mode.lowering is lowering
    if lowering is Lowering.REJECTED:
        assert mode.reasons == (f"the profile speaks of vllm {version}, here is {here}",)


@pytest.mark.parametrize("name", profiles.names())
def test_every_profile_claims_no_more_than_its_evidence(name: str) -> None:
    report = lower.lower(profiles.load(name), holds)
    assert all(mode.verdict is Verdict.HOLDS for mode in report.modes)
    assert all(mode.lowering is mode.mode.claims for mode in report.modes)


@pytest.mark.parametrize("name", profiles.names())
def test_each_verdict_falls_when_a_piece_of_evidence_is_removed(name: str) -> None:
    for mode in profiles.load(name).modes:
        for obligation in OWED[mode.protection] & mode.evidence.keys():
            rest = {o: e for o, e in mode.evidence.items() if o is not obligation}
            verdict = lower.judge(replace(mode, evidence=rest), holds, ENGINES[name])
            assert verdict.lowering in (Lowering.REJECTED, Lowering.UNKNOWN)
            if mode.claims not in (Lowering.REJECTED, Lowering.UNKNOWN):
                assert verdict.lowering is Lowering.REJECTED
                assert f"nothing shows {obligation}" in verdict.reasons


ROWS = [(name, mode) for name in profiles.names() for mode in profiles.load(name).modes]
ENGINES = {name: profiles.load(name).engine for name in profiles.names()}
"""One row of the page of systems each."""


def shown_to_the_full(mode: Mode) -> Mode:
    """The mode with a document for every obligation that nothing shows, and none against it."""
    read = Evidence(Way.NEARLY, "so", document=Document("so", "1", "there"))
    given = {owed: mode.evidence.get(owed, read) for owed in OWED[mode.protection]}
    return replace(mode, evidence=given, depth=Depth.PATCH, lowers_to=None, refuted=())


@pytest.mark.parametrize(("name", "mode"), ROWS, ids=[f"{n}-{m.protection}" for n, m in ROWS])
def test_the_verdict_of_each_row_flips_with_what_it_rests_on(name: str, mode: Mode) -> None:
    """What is supported rests on each piece of its evidence, what is rejected on the run that
    refutes it, and what is unknown on the lack of evidence."""
    engine = ENGINES[name]
    verdict = lower.judge(mode, holds, engine).lowering
    match verdict:
        case Lowering.UNKNOWN:
            assert OWED[mode.protection] - mode.evidence.keys()
            assert (
                lower.judge(shown_to_the_full(mode), holds, engine).lowering is Lowering.APPROXIMATE
            )
        case Lowering.REJECTED:
            assert mode.refuted or mode.lowers_to
            assert (
                lower.judge(replace(mode, refuted=()), fails, engine).lowering is Lowering.UNKNOWN
            )
        case _:
            for obligation in OWED[mode.protection]:
                rest = {o: e for o, e in mode.evidence.items() if o is not obligation}
                less = lower.judge(replace(mode, evidence=rest), holds, engine)
                assert less.lowering is Lowering.REJECTED
                assert f"nothing shows {obligation}" in less.reasons
                honest = replace(mode, evidence=rest, claims=Lowering.UNKNOWN)
                assert lower.judge(honest, holds, engine).lowering is Lowering.UNKNOWN
            for wanted in {e.probe for e in mode.evidence.values() if e.probe is not None}:
                broken = lower.judge(mode, lambda p, w=wanted: (holds, fails)[p == w](p), engine)
                assert broken.lowering is Lowering.REJECTED
                assert any(f"{wanted.program} is violated" in reason for reason in broken.reasons)


def test_what_hicache_keeps_on_the_host_it_promises_to_nobody() -> None:
    (tier,) = (m for m in profiles.load("sglang").modes if m.protection is Protection.OFFLOADABLE)
    judged = lower.judge(tier, holds)
    assert judged.lowering is Lowering.UNKNOWN
    assert "restorability, restoration_failure_outcome" in judged.reasons[0]


def test_without_the_run_that_refutes_it_a_weaker_mode_is_only_not_shown() -> None:
    (hard,) = (m for m in profiles.load("sglang").modes if m.protection is Protection.HARD)
    assert lower.judge(hard, holds).lowering is Lowering.REJECTED
    unrun = lower.judge(hard, fails)
    assert unrun.lowering is Lowering.UNKNOWN
    assert unrun.reasons[0].startswith("nothing shows")


def test_a_probe_that_does_not_hold_shows_nothing() -> None:
    report = lower.lower(profiles.load("vllm-claims"), fails)
    assert {mode.lowering for mode in report.modes} == {Lowering.REJECTED}
    assert report.verdict is Verdict.VIOLATED


def test_hard_lowered_to_soft_is_refuted_by_a_run() -> None:
    (hard,) = (m for m in profiles.load("sglang").modes if m.protection is Protection.HARD)
    verdict = lower.judge(replace(hard, claims=Lowering.POLICY), lower.probe)
    assert verdict.lowering is Lowering.REJECTED
    assert verdict.verdict is Verdict.VIOLATED
    assert "soft_priority cannot stand in for hard_protected" in verdict.reasons[0]
    assert "victims 50" in verdict.reasons[0]


def mode_with(way: Way, depth: Depth, **anchor: Any) -> Mode:
    evidence = {o: Evidence(way, "so", **anchor) for o in OWED[Protection.BEST_EFFORT]}
    return Mode(Protection.BEST_EFFORT, depth, Lowering.OBSERVATIONAL, evidence)


def test_evidence_without_an_anchor_is_rejected() -> None:
    verdict = lower.judge(mode_with(Way.JOINED, Depth.TELEMETRY), holds)
    assert verdict.lowering is Lowering.REJECTED
    assert "claim_identity: no anchor" in verdict.reasons


def test_evidence_of_a_deeper_adapter_than_the_mode_has_is_rejected() -> None:
    mode = mode_with(Way.STEERED, Depth.TELEMETRY, probe=Probe("reference", "L6"))
    verdict = lower.judge(mode, holds)
    assert verdict.lowering is Lowering.REJECTED
    assert (
        "claim_identity: steered needs an adapter of depth policy, the mode has telemetry"
        in verdict.reasons
    )


@pytest.mark.parametrize(
    ("way", "lowering"),
    [
        (Way.OWN, Lowering.NATIVE),
        (Way.JOINED, Lowering.OBSERVATIONAL),
        (Way.STEERED, Lowering.POLICY),
        (Way.PATCHED, Lowering.POLICY),
        (Way.NEARLY, Lowering.APPROXIMATE),
    ],
)
def test_the_verdict_is_that_of_the_weakest_way(way: Way, lowering: Lowering) -> None:
    mode = mode_with(way, Depth.PATCH, probe=Probe("reference", "L6"))
    assert lower.judge(mode, holds, "reference").lowering is lowering


def test_a_run_that_goes_well_shows_only_what_it_speaks_of() -> None:
    mode = mode_with(Way.JOINED, Depth.TELEMETRY, probe=Probe("reference", "L1"))
    verdict = lower.judge(mode, holds, "reference")
    assert verdict.lowering is Lowering.REJECTED
    assert "claim_identity: litmus L1 does not show it" in verdict.reasons


@pytest.mark.parametrize(("engine", "of"), [("vllm", "vllm"), (None, "this runtime")])
def test_a_run_on_another_engine_says_nothing(engine: str | None, of: str) -> None:
    mode = mode_with(Way.JOINED, Depth.TELEMETRY, probe=Probe("reference", "L6"))
    verdict = lower.judge(mode, holds, engine)
    assert verdict.lowering is Lowering.REJECTED
    assert f"claim_identity: a run on reference says nothing of {of}" in verdict.reasons


def cannot_run(probe: Probe) -> ProbeResult:
    return ProbeResult(Verdict.UNKNOWN, f"{probe.program} cannot run here")


def test_a_run_that_cannot_be_done_here_has_shown_nothing() -> None:
    mode = mode_with(Way.JOINED, Depth.TELEMETRY, probe=Probe("reference", "L6"))
    assert lower.judge(mode, cannot_run, "reference").lowering is Lowering.REJECTED
    honest = replace(mode, claims=Lowering.UNKNOWN)
    verdict = lower.judge(honest, cannot_run, "reference")
    assert (verdict.lowering, verdict.reasons) == (Lowering.UNKNOWN, ("L6 cannot run here",))


def hard_by_documents(**change: Any) -> Mode:
    read = Evidence(Way.STEERED, "so", document=Document("so", "1", "there"))
    evidence = dict.fromkeys(OWED[Protection.HARD], read)
    return replace(Mode(Protection.HARD, Depth.POLICY, Lowering.POLICY, evidence), **change)


@pytest.mark.parametrize("weaker", [Protection.SOFT, Protection.EXPIRING, Protection.DEMOTABLE])
def test_a_mode_that_stands_in_for_another_is_never_taken_on_trust(weaker: Protection) -> None:
    assert lower.judge(hard_by_documents(), cannot_run).lowering is Lowering.POLICY
    verdict = lower.judge(hard_by_documents(lowers_to=weaker), cannot_run)
    assert verdict.lowering is Lowering.REJECTED
    assert f"nothing shows that {weaker} can stand in for hard_protected" in verdict.reasons


def test_a_run_that_might_refute_and_cannot_be_done_leaves_nothing_shown() -> None:
    against = Refutation(Probe("vllm", "L1"), "it evicts")
    verdict = lower.judge(hard_by_documents(refuted=(against,)), cannot_run, "vllm")
    assert verdict.reasons == ("it may be refuted: L1 cannot run here",)
    assert (
        lower.judge(hard_by_documents(refuted=(against,)), fails, "vllm").lowering
        is Lowering.POLICY
    )


def test_best_effort_for_soft_priority_is_not_refuted_by_a_run_of_something_else() -> None:
    read = Evidence(Way.STEERED, "so", document=Document("so", "1", "there"))
    soft = Mode(
        Protection.SOFT,
        Depth.POLICY,
        Lowering.UNKNOWN,
        dict.fromkeys(OWED[Protection.SOFT], read),
        lowers_to=Protection.BEST_EFFORT,
    )
    verdict = lower.judge(soft, holds)
    assert verdict.lowering is Lowering.UNKNOWN
    assert verdict.reasons == ("nothing shows that best_effort can stand in for soft_priority",)


@pytest.mark.parametrize(("name", "engine"), [("vllm-claims", "vllm"), ("sglang-claims", "sglang")])
def test_that_soft_content_goes_later_rests_on_a_run_that_shows_it(name: str, engine: str) -> None:
    """With 30 blocks of a soft claim and 30 of nobody's, it is the others that go."""
    (soft,) = (m for m in profiles.load(name).modes if m.protection is Protection.SOFT)
    assert lower.judge(soft, holds, engine).lowering is Lowering.POLICY

    def in_its_own_order(wanted: Probe) -> lower.ProbeResult:
        verdict = Verdict.VIOLATED if wanted.program == "soft-order" else Verdict.HOLDS
        return lower.ProbeResult(verdict, f"{wanted.program}: {verdict}")

    judged = lower.judge(soft, in_its_own_order, engine)
    assert judged.lowering is Lowering.REJECTED
    assert judged.reasons == ("eviction_order: soft-order: VIOLATED",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "profile lacks id, mode, title, version"),
        ("id = 1\ntitle = 'x'\nversion = '1'\nmode = [{}]", "id of profile must be a text"),
        ("id = 'x'\ntitle = 'x'\nversion = '1'\nmode = []", "needs at least one"),
        (
            "id = 'x'\ntitle = 'x'\nversion = '1'\n"
            + "[[mode]]\nprotection = 'soft_priority'\ndepth = 'none'\nclaims = 'unknown'\n" * 2,
            "x.toml: soft_priority at depth none is given 2 times",
        ),
        (
            "id = 'x'\ntitle = 'x'\nversion = '1'\n[[mode]]\nprotection = 'strong'\n"
            "depth = 'none'\nclaims = 'native'",
            "'strong' is none of hard_protected",
        ),
        (
            "id = 'x'\ntitle = 'x'\nversion = '1'\n[[mode]]\nprotection = 'best_effort'\n"
            "depth = 'deep'\nclaims = 'native'",
            "depth 'deep' is none of none, telemetry, policy, patch",
        ),
        (
            "id = 'x'\ntitle = 'x'\nversion = '1'\n[[mode]]\nprotection = 'best_effort'\n"
            "depth = 'none'\nclaims = 'native'\n[mode.evidence.magic]\nway = 'own'\nsays = 'x'",
            "unknown magic",
        ),
        (
            'id = "x\\u001b[2J"\ntitle = "x"\nversion = "1"\nmode = [{}]',
            r"id of profile has characters that do not print: 'x\\x1b\[2J'",
        ),
        ('"a\\nHOLDS" = 1', r"profile has unknown 'a\\nHOLDS'"),
        ("[[", "x.toml: "),
        ("id = " + "9" * 5000, "x.toml: not TOML: Exceeds the limit"),
        ("id = " + "[" * 5000, "x.toml: not TOML: maximum recursion depth"),
        (
            "id = 'x'\ntitle = 'x'\nversion = '1'\n[[mode]]\nprotection = 'best_effort'\n"
            "depth = ['none']\nclaims = 'native'",
            "depth \\['none'\\] is none of none",
        ),
        (
            "id = 'x'\ntitle = 'x'\nversion = '1'\n[[mode]]\nprotection = 'best_effort'\n"
            "depth = 'none'\nclaims = 'native'\nrefuted = 5",
            "refuted must be a list of tables",
        ),
    ],
)
def test_a_profile_that_makes_no_sense_is_one_clear_line(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "x.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(BadOperation, match=message):
        profiles.load(str(path))


@pytest.mark.parametrize(
    ("name", "engine", "fits"),
    [
        ("tensorrt-llm", "reference", False),
        ("vllmish", "vllm", False),
        ("vllm", "vllm", True),
        ("vllm-of-mine", "vllm", True),
    ],
)
def test_the_runs_of_an_engine_speak_of_no_runtime_of_another_name(
    tmp_path: Path, name: str, engine: str, fits: bool
) -> None:
    path = tmp_path / "x.toml"
    path.write_text(
        f"id = '{name}'\ntitle = 'x'\nversion = '1'\nengine = '{engine}'\n[[mode]]\n"
        "protection = 'best_effort'\ndepth = 'none'\nclaims = 'unknown'\n",
        encoding="utf-8",
    )
    if fits:
        assert profiles.load(str(path)).engine == engine
        return
    says = f"x.toml: runs of {engine} say nothing of {name!r}: its id is {engine}, or {engine}-"
    with pytest.raises(BadOperation, match=says):
        profiles.load(str(path))


def test_an_unknown_profile_names_those_there_are() -> None:
    with pytest.raises(BadOperation, match="no profile 'nonsense' \\(known: dynamo, "):
        profiles.load("nonsense")


# --- what a run shows, and of whom -----------------------------------------------------------


def test_what_an_adapter_does_is_not_the_engines_own() -> None:
    """Every run with a claim in force on an engine of others runs the adapter's policy."""
    profile = profiles.load("vllm-claims")
    modes = tuple(
        replace(
            mode,
            depth=Depth.NONE,
            claims=Lowering.NATIVE,
            evidence={o: replace(one, way=Way.OWN) for o, one in mode.evidence.items()},
        )
        for mode in profile.modes
    )
    for judged in lower.lower(replace(profile, modes=modes), holds).modes:
        assert judged.lowering is Lowering.REJECTED
        assert len(judged.reasons) == len(judged.mode.evidence)
        assert "runs an adapter of depth policy, and shows nothing that is own" in judged.reasons[0]


@pytest.mark.parametrize(
    ("engine", "program", "depth"),
    [
        ("reference", "L3", Depth.NONE),
        ("vllm", "L1", Depth.TELEMETRY),
        ("vllm", "observed", Depth.TELEMETRY),
        ("vllm", "L3", Depth.POLICY),
        ("vllm", "L7", Depth.POLICY),
        ("sglang", "soft-order", Depth.POLICY),
    ],
)
def test_how_deep_the_adapter_of_a_run_reaches(engine: str, program: str, depth: Depth) -> None:
    assert lower.depth_of_run(Probe(engine, program)) is depth


def test_an_engine_is_not_believed_that_it_knows_claims_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It says that it is no package of others, as only the reference is none."""
    own = replace(engines.find("vllm"), package=None)
    monkeypatch.setattr(engines, "find", lambda name: own)
    assert own.package is None
    assert lower.depth_of_run(Probe("mine", "L3")) is Depth.POLICY
    assert lower.depth_of_run(Probe("reference", "L3")) is Depth.NONE


def test_an_engine_that_is_none_is_one_clear_line() -> None:
    with pytest.raises(BadOperation, match="unknown engine 'nope'"):
        lower.depth_of_run(Probe("nope", "L3"))


def test_a_hard_mode_is_not_shown_by_the_run_of_an_expiring_claim() -> None:
    (hard,) = (m for m in profiles.load("vllm-claims").modes if m.protection is Protection.HARD)
    evidence = dict(hard.evidence)
    wrong = replace(evidence[Obligation.PROTECTION], probe=Probe("vllm", "lease-read"))
    evidence[Obligation.PROTECTION] = wrong
    judged = lower.judge(replace(hard, evidence=evidence), holds, "vllm")
    assert judged.reasons == (
        "no_loss_by_own_choice: litmus lease-read does not show it of hard_protected",
    )


def test_a_document_shows_no_mode_of_the_runtimes_own() -> None:
    read = Evidence(Way.OWN, "it says so", document=Document("d", "1", "somewhere"))
    mode = Mode(
        Protection.HARD,
        Depth.NONE,
        Lowering.NATIVE,
        dict.fromkeys(OWED[Protection.HARD], read),
    )
    judged = lower.judge(mode, holds)
    assert judged.lowering is Lowering.REJECTED
    assert judged.reasons[0].startswith("a document shows no mode of the runtime's own")


def test_a_run_on_another_engine_refutes_nothing() -> None:
    refuted = (Refutation(Probe("reference", "L3"), "it evicts"),)
    mode = Mode(Protection.HARD, Depth.NONE, Lowering.REJECTED, {}, refuted=refuted)
    judged = lower.judge(mode, holds)
    assert judged.lowering is Lowering.UNKNOWN
    assert "a run on reference refutes nothing of this runtime" in judged.reasons


@pytest.mark.parametrize("program", ["L3", "L7", "observed"])
def test_a_run_in_which_nothing_is_lost_refutes_nothing(program: str) -> None:
    refuted = (Refutation(Probe("vllm", program), "it evicts"),)
    mode = Mode(Protection.HARD, Depth.NONE, Lowering.REJECTED, {}, refuted=refuted)
    judged = lower.judge(mode, holds, "vllm")
    assert judged.lowering is Lowering.UNKNOWN
    assert f"litmus {program} shows no loss that hard_protected forbids" in judged.reasons


def test_a_run_without_a_claim_refutes_nothing_that_allows_a_loss() -> None:
    refuted = (Refutation(Probe("vllm", "L1"), "it evicts"),)
    mode = Mode(Protection.SOFT, Depth.NONE, Lowering.REJECTED, {}, refuted=refuted)
    judged = lower.judge(mode, holds, "vllm")
    assert judged.lowering is Lowering.UNKNOWN
    assert "litmus L1 shows no loss that soft_priority forbids" in judged.reasons


@pytest.mark.parametrize("told", ["0.31", "0.3", "7"])
def test_a_document_of_another_version_of_what_runs_here_shows_nothing(told: str) -> None:
    profile = profiles.load("vllm-claims")
    hard = next(m for m in profile.modes if m.protection is Protection.HARD)

    def read(version: str) -> Mode:
        other = Evidence(Way.STEERED, "so", document=Document("d", version, "there"))
        return replace(hard, evidence={**hard.evidence, Obligation.PROTECTION: other})

    judged = lower.judge(read(told), holds, "vllm", profile)
    assert judged.lowering is Lowering.REJECTED
    assert judged.reasons == (
        f"no_loss_by_own_choice: a document of {told} says nothing of vllm 0.32",
    )
    assert lower.judge(read("0.32.0"), holds, "vllm", profile).lowering is Lowering.POLICY


@pytest.mark.parametrize(
    ("told", "lowering"),
    [("1.4.0rc4", Lowering.POLICY), ("1.4.0rc3", Lowering.REJECTED), ("1", Lowering.REJECTED)],
)
def test_a_document_of_another_version_than_the_profile_speaks_of_shows_nothing(
    told: str, lowering: Lowering
) -> None:
    """Also where the runtime is not run here: its documents are all that there is."""
    profile = profiles.load("tensorrt-llm")
    (soft,) = (m for m in profile.modes if m.protection is Protection.SOFT)
    read = soft.evidence[Obligation.EVICTION_ORDER].document
    assert read is not None
    other = Evidence(Way.STEERED, "so", document=replace(read, version=told))
    mode = replace(soft, evidence={**soft.evidence, Obligation.EVICTION_ORDER: other})
    judged = lower.judge(mode, holds, None, profile)
    assert judged.lowering is lowering
    says = f"eviction_order: a document of {told} says nothing of tensorrt-llm 1.4.0rc4"
    assert judged.reasons == (() if lowering is Lowering.POLICY else (says,))
    honest = lower.judge(replace(mode, claims=Lowering.UNKNOWN), holds, None, profile)
    assert honest.lowering is (Lowering.POLICY if lowering is Lowering.POLICY else Lowering.UNKNOWN)


@pytest.mark.parametrize("name", profiles.names())
def test_what_is_read_and_not_run_says_so(name: str) -> None:
    report = lower.lower(profiles.load(name), holds)
    for mode, told in zip(report.modes, report.to_json()["modes"], strict=True):
        supported = mode.lowering not in (Lowering.REJECTED, Lowering.UNKNOWN)
        runs = [e for e in mode.mode.evidence.values() if e.probe or e.trace]
        assert mode.is_only_read == told["only_read"] == (supported and not runs)
        line = next(x for x in report.lines() if x.startswith(f"  {mode.mode.protection}"))
        assert line.endswith("by documents alone, read and not run") == mode.is_only_read
    only_read = {m.mode.protection for m in report.modes if m.is_only_read}
    assert only_read == ({Protection.SOFT} if name == "tensorrt-llm" else set())


def test_what_sglang_has_by_itself_is_run() -> None:
    profile = profiles.load("sglang")
    assert profile.engine == "sglang"
    (mode,) = (m for m in profile.modes if m.protection is Protection.BEST_EFFORT)
    assert {e.probe for e in mode.evidence.values()} == {Probe("sglang", "observed")}
    judged = lower.judge(mode, cannot_run, "sglang", profile)
    assert (judged.lowering, judged.reasons) == (Lowering.REJECTED, ("observed cannot run here",))


def test_an_engine_that_cannot_be_imported_has_shown_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def breaks(*_: object) -> None:
        raise EngineMissing("it cannot be imported")

    monkeypatch.setattr(lower.litmus, "litmus", breaks)
    result = lower.probe.__wrapped__(Probe("reference", "L1"))
    assert result.verdict is Verdict.UNKNOWN
    assert result.says == "litmus L1 on reference cannot run here (it cannot be imported)"


@pytest.mark.parametrize(
    ("engine", "way", "protection", "lowering"),
    [
        ("vllm", Way.OWN, "best_effort", Lowering.REJECTED),
        ("vllm", Way.JOINED, "best_effort", Lowering.OBSERVATIONAL),
        ("vllm", Way.JOINED, "hard_protected", Lowering.REJECTED),
        ("vllm", Way.STEERED, "hard_protected", Lowering.POLICY),
        ("vllm", Way.NEARLY, "hard_protected", Lowering.APPROXIMATE),
        ("reference", Way.OWN, "hard_protected", Lowering.NATIVE),
        (None, Way.OWN, "best_effort", Lowering.REJECTED),
        (None, Way.JOINED, "offloadable", Lowering.OBSERVATIONAL),
        ("vllm", Way.OWN, ["hard_protected"], Lowering.REJECTED),
    ],
)
def test_a_trace_that_an_adapter_wrote_shows_nothing_of_the_engines_own(
    tmp_path: Path, engine: str | None, way: Way, protection: Any, lowering: Lowering
) -> None:
    trace = changed(good_trace(), "resident_claim_submitted", protection=protection)
    profile = offloadable(tmp_path, opened(trace, engine or "connector", "1"))
    (mode,) = profile.modes
    evidence = {o: replace(one, way=way) for o, one in mode.evidence.items()}
    more = replace(mode, evidence=evidence, depth=Depth.POLICY, claims=Lowering.APPROXIMATE)
    (judged,) = lower.lower(replace(profile, engine=engine, modes=(more,)), holds).modes
    assert judged.lowering is lowering
    if lowering is Lowering.REJECTED:
        assert all(reason.endswith(f"and shows nothing that is {way}") for reason in judged.reasons)


def test_what_a_verdict_rests_on_is_called_what_it_is(tmp_path: Path) -> None:
    """Neither a trace nor a document is taken for a run, whatever it is called."""
    (mode,) = lower.lower(offloadable(tmp_path, good_trace()), holds).modes
    assert mode.places == ["trace trace.jsonl"]
    read = Document("kvclaims litmus L3 --engine vllm", "1", "there")
    judged = lower.judge(mode_with(Way.JOINED, Depth.TELEMETRY, document=read), holds)
    assert judged.places == ["document: kvclaims litmus L3 --engine vllm 1, there"]


def test_a_verdict_says_what_it_owes_and_rests_on() -> None:
    lines = list(lower.lower(profiles.load("tensorrt-llm"), holds).lines())
    at = next(i for i, line in enumerate(lines) if line.startswith("  soft_priority"))
    assert lines[at + 1].strip().startswith("owes claim_identity, eviction_order")
    assert lines[at + 2].strip().startswith("rests on document: KV Cache System 1.4.0rc4")
