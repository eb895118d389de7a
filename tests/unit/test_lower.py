"""Lowering is fail-closed: what is not shown is unknown, and what claims more is rejected."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvclaims.checker import lower, profiles
from kvclaims.checker.lower import ProbeResult
from kvclaims.checker.obligations import shown_by
from kvclaims.checker.profiles import Evidence, Mode, Probe, Profile
from kvclaims.spec.interface import BadOperation
from kvclaims.spec.lowering import OWED, Depth, Lowering, Obligation, Way
from kvclaims.spec.vocabulary import Protection, Verdict

Trace = list[dict[str, Any]]


def holds(probe: Probe) -> ProbeResult:
    return ProbeResult(Verdict.HOLDS, f"{probe.program} holds")


def fails(probe: Probe) -> ProbeResult:
    return ProbeResult(Verdict.VIOLATED, f"{probe.program} is violated")


def good_trace() -> Trace:
    """A connector that offloads two claims, restores one and fails the other's restore."""
    moved = {"tier": "host", "object_id": "o-1", "cache_identity": "model/16"}
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


def test_a_profile_that_supports_nothing_shows_nothing() -> None:
    assert lower.lower(profiles.load("dynamo"), holds).verdict is Verdict.UNKNOWN


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
            verdict = lower.judge(replace(mode, evidence=rest), holds)
            assert verdict.lowering in (Lowering.REJECTED, Lowering.UNKNOWN)
            if mode.claims not in (Lowering.REJECTED, Lowering.UNKNOWN):
                assert verdict.lowering is Lowering.REJECTED
                assert f"nothing shows {obligation}" in verdict.reasons


ROWS = [(name, mode) for name in profiles.names() for mode in profiles.load(name).modes]
"""One row of the page of systems each."""


def shown_to_the_full(mode: Mode) -> Mode:
    """The mode with a run for every obligation that nothing shows, and none against it."""
    run = Evidence(Way.NEARLY, "so", probe=Probe("reference", "L1"))
    given = {owed: mode.evidence.get(owed, run) for owed in OWED[mode.protection]}
    return replace(mode, evidence=given, depth=Depth.PATCH, lowers_to=None, refuted=())


@pytest.mark.parametrize(("name", "mode"), ROWS, ids=[f"{n}-{m.protection}" for n, m in ROWS])
def test_the_verdict_of_each_row_flips_with_what_it_rests_on(name: str, mode: Mode) -> None:
    """What is supported rests on each piece of its evidence, what is rejected on the run that
    refutes it, and what is unknown on the lack of evidence."""
    verdict = lower.judge(mode, holds).lowering
    match verdict:
        case Lowering.UNKNOWN:
            assert OWED[mode.protection] - mode.evidence.keys()
            assert lower.judge(shown_to_the_full(mode), holds).lowering is Lowering.APPROXIMATE
        case Lowering.REJECTED:
            assert mode.refuted or mode.lowers_to
            assert lower.judge(replace(mode, refuted=()), fails).lowering is Lowering.UNKNOWN
        case _:
            for obligation in OWED[mode.protection]:
                rest = {o: e for o, e in mode.evidence.items() if o is not obligation}
                less = lower.judge(replace(mode, evidence=rest), holds)
                assert less.lowering is Lowering.REJECTED
                assert f"nothing shows {obligation}" in less.reasons
                honest = replace(mode, evidence=rest, claims=Lowering.UNKNOWN)
                assert lower.judge(honest, holds).lowering is Lowering.UNKNOWN


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
    mode = mode_with(Way.STEERED, Depth.TELEMETRY, probe=Probe("reference", "L1"))
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
    mode = mode_with(way, Depth.PATCH, probe=Probe("reference", "L1"))
    assert lower.judge(mode, holds).lowering is lowering


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "profile lacks id, mode, title, version"),
        ("id = 1\ntitle = 'x'\nversion = '1'\nmode = [{}]", "id of profile must be a text"),
        ("id = 'x'\ntitle = 'x'\nversion = '1'\nmode = []", "needs at least one"),
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
        ("[[", "x.toml: "),
    ],
)
def test_a_profile_that_makes_no_sense_is_one_clear_line(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "x.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(BadOperation, match=message):
        profiles.load(str(path))


def test_an_unknown_profile_names_those_there_are() -> None:
    with pytest.raises(BadOperation, match="no profile 'nonsense' \\(known: dynamo, "):
        profiles.load("nonsense")
