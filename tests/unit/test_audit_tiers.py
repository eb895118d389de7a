"""What a trace may tell of claims in a tier (O1 to O3): one tale that holds, and its twins."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from kvclaims.checker.audit import Fold, check_runs
from kvclaims.spec.telemetry import Event, Recorder

PREDICATE = {"kind": "leading_prefix_at_least", "start": 0, "n": 2}
STOOD, GONE = (
    {"holds": True, "leading": 2, "survivors": 2},
    {"holds": False, "leading": 0, "survivors": 0},
)

Line = tuple[str, dict[str, Any]]


def claim(event: str, name: str = "c", **data: Any) -> Line:
    return f"{'' if event.startswith('restoration') else 'resident_claim_'}{event}", {
        "claim_id": name,
        "generation": 1,
        **data,
    }


def request(event: str, name: str = "r", **data: Any) -> Line:
    return event, {"request_id": name, **data}


def begins(name: str = "c", protection: str = "offloadable") -> list[Line]:
    """Up to the claim's being materialized."""
    return [
        claim(
            "submitted",
            name,
            owner="o",
            protection=protection,
            predicate=PREDICATE,
            footprint=2,
            duration=None,
        ),
        claim(
            "accepted",
            name,
            decision="accepted",
            reason="fits the tier",
            granted=PREDICATE,
            cost_blocks=0,
            headroom_before=4,
        ),
        *(
            (
                "resident_block_materialized",
                {**claim("", name)[1], "position": p, "block_id": p + 1, "prefix_id": f"{name}{p}"},
            )
            for p in (0, 1)
        ),
        claim("materialized", name, leading=2, survivors=2),
    ]


OFFLOADED = claim("offloaded", tier="files", blocks=2)
ASKED = [
    request("active_request_submitted", admit_reuse=True, active_live_blocks_required=2),
    request("active_request_admitted", hit_blocks=0, new_blocks=2, free_blocks_before_allocate=4),
]
REQUIRED = claim("restoration_required", tier="files", blocks=2, request_id="r")
STARTED = request("external_load_started", blocks=2)
LOADED = request("external_load_finished", blocks=2, loaded=2)
SHORT = request("external_load_finished", blocks=2, loaded=1, prefix_id="c1")
RESTORED = claim("restored", tier="files", blocks=2)
FAILED = claim(
    "restoration_failed", tier="files", reason="checksum", request_id="r", prefix_id="c1"
)
HARMED = claim("harmed", cause="fault", before=STOOD, after=GONE)
SERVED = [
    request("active_request_finished", outcome="served", blocks=2),
    request("future_reuse_admitted", blocks=0),
]

RESTORE = [*begins(), OFFLOADED, *ASKED, REQUIRED, STARTED, LOADED, RESTORED, *SERVED]
REFUSE = [*begins(), OFFLOADED, *ASKED, REQUIRED, STARTED, SHORT, FAILED, HARMED, *SERVED]


def events(lines: list[Line]) -> tuple[Event, ...]:
    ticks = itertools.count()
    recorder = Recorder("run", "test", 8, lambda: next(ticks))
    recorder.emit("trace_opened", engine="test", block_size=16, defer_limit=1)
    for event, fields in lines:
        recorder.emit(event, **fields)
    recorder.emit("trace_closed", events=recorder.count)
    return tuple(recorder.events)


def fold(lines: list[Line]) -> Fold:
    (run,) = check_runs(events(lines))
    return Fold(run)


def rules(lines: list[Line]) -> list[str]:
    return sorted({violation.rule for violation in fold(lines).violations})


def without(lines: list[Line], *dropped: Line) -> list[Line]:
    return [line for line in lines if line not in dropped]


def instead(lines: list[Line], old: Line, *new: Line) -> list[Line]:
    assert old in lines
    return list(itertools.chain.from_iterable(new if line is old else (line,) for line in lines))


def test_a_restore_and_a_refusal_hold() -> None:
    assert fold(RESTORE).violations == []
    assert str(fold(RESTORE).claims["c"].phase) == "materialized"
    assert fold(REFUSE).violations == []
    assert str(fold(REFUSE).claims["c"].phase) == "harmed"
    assert fold(REFUSE).failed_restores == ["c"]
    twice = [*RESTORE, OFFLOADED]
    assert fold(twice).violations == []


def twins() -> Iterator[tuple[str, list[Line], str]]:
    hard = begins(protection="hard_protected")
    yield "a hard claim is offloaded", [*hard, OFFLOADED], "O1"
    yield "offloaded before it was materialized", [*begins()[:2], OFFLOADED], "L1"
    yield "restored without being required", without(RESTORE, REQUIRED), "O1"
    yield "no tier is named", instead(RESTORE, RESTORED, claim("restored", tier="", blocks=2)), "O1"
    other = claim("restored", tier="elsewhere", blocks=2)
    yield "another tier is named", instead(RESTORE, RESTORED, other), "O1"
    yield "restored though nothing was loaded", without(RESTORE, STARTED, LOADED), "O3"
    yield "restored though less was loaded", instead(RESTORE, LOADED, SHORT), "O3"
    early = [*begins(), *ASKED, STARTED, LOADED, OFFLOADED, REQUIRED, RESTORED, *SERVED]
    yield "restored by a load of before", early, "O3"
    yield (
        "nothing of it was restored",
        instead(RESTORE, RESTORED, claim("restored", tier="files", blocks=0)),
        "O3",
    )
    yield "it goes on after a failure", without(REFUSE, HARMED), "O2"
    yield "restored after a failure", instead(REFUSE, HARMED, LOADED, RESTORED), "O2"
    yield "blamed though no load fell short", instead(REFUSE, SHORT, LOADED), "O2"
    yield "blamed though nothing was loaded", without(REFUSE, STARTED, SHORT), "O2"
    nobody = (FAILED[0], {**FAILED[1], "request_id": None})
    yield "blamed for nobody's load", instead(REFUSE, FAILED, nobody), "O2"
    wrong = (FAILED[0], {**FAILED[1], "claim_id": "other"})
    blamed = [*begins("other"), *instead(REFUSE, FAILED, wrong)]
    yield "blamed on another claim, which is on the device", blamed, "O2"
    away = [*begins("other"), (OFFLOADED[0], {**OFFLOADED[1], "claim_id": "other"})]
    awaited = (REQUIRED[0], {**REQUIRED[1], "claim_id": "other"})
    both = [*away, *instead(instead(REFUSE, REQUIRED, REQUIRED, awaited), FAILED, FAILED, wrong)]
    yield "blamed on another claim too, which is required as well", both, "O2"
    elsewhere = (FAILED[0], {**FAILED[1], "prefix_id": "c0"})
    yield "blamed for a content that did not fail", instead(REFUSE, FAILED, elsewhere), "O2"
    yield "another's failure, never submitted", instead(REFUSE, FAILED, wrong), "T2"


@pytest.mark.parametrize(
    ("lines", "rule"), [(lines, rule) for _, lines, rule in twins()], ids=[n for n, *_ in twins()]
)
def test_a_twin_breaks_its_rule(lines: list[Line], rule: str) -> None:
    assert rule in rules(lines)


# -- what is lost before a tier keeps it

UNSAVED = claim("unsaved", tier="files", blocks=2, reason="full", prefix_id="c0")
TAKEN = (
    "resident_block_lost",
    {**claim("")[1], "position": 1, "block_id": 7, "cause": "own_choice", "prefix_id": "c1"},
)
EVICTED = claim("harmed", cause="own_choice", before=STOOD, after=GONE)
ENDED = claim("released", phase_before="accepted", covered=0)


def test_what_is_lost_before_it_is_kept_holds_if_it_is_told() -> None:
    for lines in ([UNSAVED, HARMED], [UNSAVED, TAKEN, EVICTED], [TAKEN, EVICTED], [UNSAVED]):
        assert fold([*begins()[:2], *lines]).violations == []
    again = fold([*begins()[:2], UNSAVED, UNSAVED, HARMED])
    assert (again.unsaved, str(again.claims["c"].phase)) == ({"c": 4}, "harmed")
    assert rules([*begins(), UNSAVED]) == []  # a second copy of it


def early_twins() -> Iterator[tuple[str, list[Line], str]]:
    starts = begins()[:2]
    yield "harmed by a fault, and no copy failed", [*starts, HARMED], "O2"
    yield "harmed by a fault, and a block was taken", [*starts, TAKEN, HARMED], "O2"
    yield "harmed by an eviction, and a copy failed", [*starts, UNSAVED, EVICTED], "O2"
    yield "a block is lost, and the claim goes on", [*starts, TAKEN], "P3"
    yield "told when it had ended", [*starts, ENDED, UNSAVED], "O2"
    yield "told of a hard claim", [*begins(protection="hard_protected"), UNSAVED], "O2"
    none = claim("unsaved", tier="files", blocks=0, reason="full", prefix_id="c0")
    yield "of nothing", [*starts, none], "O2"
    more = claim("unsaved", tier="files", blocks=3, reason="full", prefix_id="c0")
    yield "of more than it has", [*starts, more], "O2"
    other = claim("unsaved", tier="elsewhere", blocks=1, reason="full", prefix_id="c0")
    yield "in a tier that it is not in", [*begins(), OFFLOADED, other], "O1"
    yield "of another claim", [*starts, (UNSAVED[0], {**UNSAVED[1], "claim_id": "d"})], "T2"


@pytest.mark.parametrize(
    ("lines", "rule"),
    [(lines, rule) for _, lines, rule in early_twins()],
    ids=[n for n, *_ in early_twins()],
)
def test_a_twin_of_an_early_loss_breaks_its_rule(lines: list[Line], rule: str) -> None:
    assert rule in rules(lines)


def test_a_restoration_names_its_claim() -> None:
    from kvclaims.spec.telemetry import TraceError

    bare = (REQUIRED[0], {**REQUIRED[1], "claim_id": None, "generation": None})
    with pytest.raises(TraceError, match="claim_id"):
        fold(instead(RESTORE, REQUIRED, bare))


def test_each_event_that_is_left_out_is_missed() -> None:
    from kvclaims.spec.telemetry import TraceError

    whole = events(REFUSE)
    for left_out in range(1, len(whole) - 1):
        with pytest.raises(TraceError):
            check_runs([*whole[:left_out], *whole[left_out + 1 :]])
