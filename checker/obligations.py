"""What a trace of a runtime or an adapter shows of each obligation of a lowering.

The trace is JSON lines in the vocabulary of `spec.telemetry`, possibly of a foreign adapter: so it
is read loosely, and what it lacks is simply not shown.  A bad lowering is caught here by what its
own trace says (arXiv 2606.01387): restore after reuse, a failure blamed on another claim, a
recomputation passed off as a restore, a claim named only afterwards.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

from kvclaims.spec.interface import BadOperation, PredicateKind
from kvclaims.spec.lowering import Obligation

_SUBMITTED: Final = "resident_claim_submitted"
_ANSWERS: Final = ("resident_claim_accepted", "resident_claim_refused", "resident_claim_rejected")
_MATERIALIZED: Final = "resident_claim_materialized"
_OFFLOADED: Final = "resident_claim_offloaded"
_REQUIRED: Final = ("resident_claim_restore_required", "restoration_required")
_RESTORED: Final = "resident_claim_restored"
_REUSED: Final = "resident_claim_reuse_after_restore"
_FAILED: Final = ("resident_claim_restoration_failed", "restoration_failed")
_ENDS: Final = tuple(f"resident_claim_{end}" for end in ("demoted", "expired", "released"))
_HARMED: Final = "resident_claim_harmed"
_OF_A_CLAIM: Final = frozenset(
    {_SUBMITTED, *_ANSWERS, _MATERIALIZED, _OFFLOADED, *_REQUIRED, _RESTORED, _REUSED, *_FAILED}
    | {*_ENDS, _HARMED}
)


@dataclass(frozen=True)
class Shown:
    """Whether a trace shows an obligation, and the reason in words."""

    holds: bool
    reason: str


Line = Mapping[str, Any]


@dataclass(frozen=True)
class _Told:
    """The events of a trace, in order and by claim."""

    lines: Sequence[Line]
    of_claim: Mapping[str, Sequence[Line]]

    def events(self, *names: str) -> list[Line]:
        return [line for line in self.lines if line.get("event") in names]


def read_lines(path: Path) -> list[Line]:
    """Raises BadOperation for a file that is not JSON lines."""
    try:
        text = path.read_text(encoding="utf-8")
        lines = [json.loads(line) for line in text.splitlines() if line.strip()]
    except (OSError, ValueError, RecursionError) as error:
        raise BadOperation(f"{path}: not a trace of JSON lines ({error})") from None
    if not all(isinstance(line, dict) for line in lines):
        raise BadOperation(f"{path}: not a trace of JSON lines (a line is no object)")
    return lines


def shown_by(lines: Iterable[Line]) -> dict[Obligation, Shown]:
    """Each obligation that a trace can speak of, judged from the trace alone."""
    whole = list(lines)
    if reason := _unusable(whole):
        return dict.fromkeys(_QUESTIONS, Shown(False, reason))
    of_claim: dict[str, list[Line]] = defaultdict(list)
    for line in whole:
        if line.get("claim_id") is not None:
            of_claim[line["claim_id"]].append(line)
    told = _Told(whole, of_claim)
    return {obligation: question(told) for obligation, question in _QUESTIONS.items()}


def _unusable(lines: Sequence[Line]) -> str:
    """Why a trace shows nothing at all, empty if it may show something."""
    if not lines:
        return "the trace is empty: nothing is hooked"
    if not any(line.get("claim_id") for line in lines):
        return "no event names a claim: only counters"
    for number, line in enumerate(lines, 1):
        event, claim = line.get("event"), line.get("claim_id")
        if not isinstance(event, str):
            return f"line {number} names no event"
        if claim is not None and (not isinstance(claim, str) or not claim):
            return f"line {number}: {claim!r} is no id of a claim"
        if claim is None and event in _OF_A_CLAIM:
            return f"line {number}: {event} names no claim"
    return ""


def _identity(told: _Told) -> Shown:
    for claim, lines in told.of_claim.items():
        if lines[0].get("event") != _SUBMITTED:
            return Shown(False, f"{claim} is named only afterwards, by {lines[0].get('event')}")
    return Shown(True, f"{len(told.of_claim)} claims, each named before anything befalls it")


def _acceptance(told: _Told) -> Shown:
    for claim, lines in told.of_claim.items():
        if not any(line["event"] in _ANSWERS for line in lines):
            return Shown(False, f"{claim} was never answered")
        answer = None
        for line in lines:
            if line["event"] in _ANSWERS:
                answer = line["event"]
            elif line["event"] == _MATERIALIZED and answer is None:
                return Shown(False, f"{claim} materialized before it was answered")
            elif line["event"] == _MATERIALIZED and answer != _ANSWERS[0]:
                return Shown(False, f"{claim} materialized though it was not accepted")
    return Shown(True, "each claim is answered before it materializes")


def _predicate(told: _Told) -> Shown:
    for line in told.events(_SUBMITTED):
        if not isinstance(line.get("predicate"), dict):
            return Shown(False, f"{line['claim_id']} has no predicate")
    materialized = told.events(_MATERIALIZED)
    for line in materialized:
        if type(line.get("leading")) is not int:
            return Shown(False, f"{line['claim_id']} materialized without a look at its predicate")
        if line["leading"] < _asked(told.of_claim[line["claim_id"]], line):
            return Shown(False, f"{line['claim_id']} materialized though its predicate is not met")
    if not materialized:
        return Shown(False, "no claim ever materialized")
    return Shown(True, f"{len(materialized)} claims materialized, their predicate on record")


def _asked(lines: Sequence[Line], until: Line) -> int:
    """How many leading blocks a claim was last granted, or asks for; a range elsewhere asks for
    none of them."""
    wanted: Any = {}
    for line in takewhile(lambda line: line is not until, lines):
        for field in ("predicate", "granted"):
            if isinstance(line.get(field), dict):
                wanted = line[field]
    leading = wanted.get("kind", PredicateKind.LEADING) == PredicateKind.LEADING
    return wanted["n"] if leading and type(wanted.get("n")) is int else 0


def _order(told: _Told) -> Shown:
    numbers = [number for line in told.lines if type(number := line.get("seq")) is int]
    if len(numbers) < len(told.lines):
        return Shown(False, "events carry no sequence number")
    if numbers != list(range(numbers[0], numbers[0] + len(numbers))):
        return Shown(False, "sequence numbers are not dense: events are missing or out of order")
    return Shown(True, f"{len(numbers)} events numbered without a gap")


def _registered(told: _Told) -> Shown:
    moved = told.events(_OFFLOADED, _RESTORED, *_REQUIRED)
    for line in moved:
        own = told.of_claim.get(str(line.get("claim_id")), [])
        if not own or own[0].get("event") != _SUBMITTED:
            return Shown(False, f"{line.get('claim_id')} moved between tiers before it was known")
    return Shown(bool(moved), "each claim is known before it moves" if moved else "nothing moved")


def _object(told: _Told) -> Shown:
    return _constant(told, "object_id")


def _cache_identity(told: _Told) -> Shown:
    identity = _constant(told, "cache_identity")
    return _constant(told, "token_map") if identity.holds else identity


def _constant(told: _Told, field: str) -> Shown:
    """The field is there and the same whenever a claim moves between tiers."""
    for claim, lines in told.of_claim.items():
        moved = [line for line in lines if line.get("event") in (_OFFLOADED, _RESTORED)]
        values = [line.get(field) for line in moved]
        if any(value in (None, "", [], {}) for value in values):
            return Shown(False, f"{claim} moves without {field}")
        if any(value != values[0] for value in values):
            return Shown(False, f"{field} of {claim} changes on the way")
    moves = told.events(_OFFLOADED)
    return Shown(bool(moves), f"{field} stays the same" if moves else "nothing was offloaded")


def _restore(told: _Told) -> Shown:
    walks = [_Tiers(claim) for claim in told.of_claim]
    for walk in walks:
        if wrong := walk.follow(told.of_claim[walk.claim]):
            return Shown(False, wrong)
    restored = sum(walk.restored for walk in walks)
    return Shown(restored > 0, f"{restored} restores, each in order" if restored else "no restore")


@dataclass
class _Tiers:
    """One claim on its way between tiers, each time that it goes."""

    claim: str
    away: bool = False
    required: bool = False
    restored: int = 0

    def follow(self, lines: Sequence[Line]) -> str:
        """What is wrong with its way, empty if nothing is."""
        for line in lines:
            event = line["event"]
            if event == _OFFLOADED:
                self.away, self.required = True, False
            elif event in _REQUIRED:
                self.required = True
            elif event in _FAILED:
                self.away = False
            elif event == _REUSED and self.away:
                return f"{self.claim} was reused before it was restored"
            elif event == _RESTORED and (wrong := self._back(line)):
                return wrong
        return f"{self.claim} was offloaded and never restored" if self.away else ""

    def _back(self, line: Line) -> str:
        if line.get("source", "tier") != "tier":
            return f"{self.claim} was recomputed, and that was called a restore"
        if not line.get("tier"):
            return f"the restore of {self.claim} names no tier"
        if not self.away:
            return f"{self.claim} was restored though it was not offloaded"
        if not self.required:
            return f"{self.claim} was restored though no restore was required"
        self.away = False
        self.restored += 1
        return ""


def _restore_failure(told: _Told) -> Shown:
    failed = told.events(*_FAILED)
    if not failed:
        return Shown(False, "no failed restore is on record")
    for line in failed:
        claim = line["claim_id"]
        blamed = line.get("blamed_claim_id", claim)
        if blamed != claim:
            return Shown(False, f"a failed restore of {claim} is blamed on {blamed}")
        own = told.of_claim[claim]
        at = next(i for i, other in enumerate(own) if other is line)
        names = {other["event"] for other in own[at + 1 :]}
        if names & {_REUSED, _RESTORED}:
            return Shown(False, f"{claim} was served though its restore failed")
        if not names & {_HARMED, *_ENDS, *_ANSWERS}:
            return Shown(False, f"the failed restore of {claim} has no outcome")
    return Shown(True, f"{len(failed)} failed restores, each with an outcome of its own claim")


_QUESTIONS: Final[Mapping[Obligation, Callable[[_Told], Shown]]] = {
    Obligation.IDENTITY: _identity,
    Obligation.ACCEPTANCE: _acceptance,
    Obligation.PREDICATE: _predicate,
    Obligation.ORDER: _order,
    Obligation.REGISTERED: _registered,
    Obligation.OBJECT: _object,
    Obligation.CACHE_IDENTITY: _cache_identity,
    Obligation.RESTORE: _restore,
    Obligation.RESTORE_FAILURE: _restore_failure,
}
