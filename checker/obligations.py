"""What a trace of a runtime or an adapter shows of each obligation of a lowering.

The trace is JSON lines in the vocabulary of `spec.telemetry`, possibly of a foreign adapter: so it
is read loosely, and what it lacks is simply not shown.  A bad lowering is caught here by what its
own trace says (arXiv 2606.01387): restore after reuse, a failure blamed on another claim, a
recomputation passed off as a restore, a claim named only afterwards.  What a trace says of itself
binds it: one that opens must close (T3), and events that carry times, runs or generations keep to
them (T1, L1).
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any, Final

from kvclaims.spec.interface import BadOperation, Predicate, PredicateKind
from kvclaims.spec.lowering import Obligation
from kvclaims.spec.vocabulary import Decision

MOST_BYTES: Final = 64 * 2**20
"""The largest trace that is read."""

_OPENED: Final = "trace_opened"
_CLOSED: Final = "trace_closed"
_SUBMITTED: Final = "resident_claim_submitted"
_ACCEPTED: Final = "resident_claim_accepted"
_REFUSED: Final = ("resident_claim_refused", "resident_claim_rejected")
_ANSWERS: Final = (_ACCEPTED, *_REFUSED)
_MATERIALIZED: Final = "resident_claim_materialized"
_OFFLOADED: Final = "resident_claim_offloaded"
_REQUIRED: Final = ("resident_claim_restore_required", "restoration_required")
_RESTORED: Final = "resident_claim_restored"
_REUSED: Final = "resident_claim_reuse_after_restore"
_FAILED: Final = ("resident_claim_restoration_failed", "restoration_failed")
_ENDS: Final = tuple(f"resident_claim_{end}" for end in ("demoted", "expired", "released"))
_HARMED: Final = "resident_claim_harmed"
_OUTCOMES: Final = (*_REFUSED, "resident_claim_demoted", "resident_claim_expired", _HARMED)
"""What may become of a claim whose restore failed (O2)."""
_WRITTEN: Final = "resident_block_materialized"
_LOST: Final = "resident_block_lost"
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


_GOING: Final = (*_ENDS, _HARMED)
_NEXT: Final[Mapping[str, tuple[str, ...]]] = {
    _SUBMITTED: _ANSWERS,
    _ACCEPTED: (_MATERIALIZED, *_GOING),
    _MATERIALIZED: (_OFFLOADED, *_GOING),
    _OFFLOADED: (*_REQUIRED, *_GOING),
    **dict.fromkeys(_REQUIRED, (_RESTORED, *_FAILED, *_GOING)),
    _RESTORED: (_REUSED, _OFFLOADED, *_GOING),
    _REUSED: (_REUSED, _OFFLOADED, *_GOING),
    **dict.fromkeys(_FAILED, _OUTCOMES),
    **dict.fromkeys((*_REFUSED, *_GOING), ()),
}
"""What may befall a claim after what (L1, O1, O2): the transition table by its events.  After the
last of a life only a submission, of a higher generation."""


@dataclass(frozen=True)
class _Told:
    """The events of a trace, in order, by claim, and by claim and generation."""

    lines: Sequence[Line]
    of_claim: Mapping[str, Sequence[Line]]
    lives: Sequence[tuple[str, Sequence[Line]]]

    def events(self, *names: str) -> list[Line]:
        return [line for line in self.lines if line.get("event") in names]


def read_lines(path: Path) -> list[Line]:
    """Raises BadOperation for what is no file of JSON lines, or one larger than MOST_BYTES."""
    try:
        text = _text(path)
        lines = [json.loads(line) for line in text.splitlines() if line.strip()]
    except (OSError, ValueError, RecursionError) as error:
        raise BadOperation(f"{path}: not a trace of JSON lines ({error})") from None
    if not all(isinstance(line, dict) for line in lines):
        raise BadOperation(f"{path}: not a trace of JSON lines (a line is no object)")
    return lines


def opening(lines: Sequence[Line]) -> Line:
    """The event that opens the trace; nothing of one that is not opened."""
    return lines[0] if lines and lines[0].get("event") == _OPENED else {}


def _text(path: Path) -> str:
    """ValueError for what may never end, such as a pipe or a device."""
    if path.exists() and not path.is_file():
        raise ValueError("not a regular file")
    with path.open("rb") as file:
        raw = file.read(MOST_BYTES + 1)
    if len(raw) > MOST_BYTES:
        raise ValueError(f"larger than {MOST_BYTES:,} bytes")
    return raw.decode()


def shown_by(lines: Iterable[Line]) -> dict[Obligation, Shown]:
    """Each obligation that a trace can speak of, judged from the trace alone."""
    whole = list(lines)
    if reason := _unusable(whole):
        return dict.fromkeys(_QUESTIONS, Shown(False, reason))
    of_claim: dict[str, list[Line]] = defaultdict(list)
    for line in whole:
        if line.get("claim_id") is not None:
            of_claim[line["claim_id"]].append(line)
    lives = [(claim, life) for claim, own in of_claim.items() for life in _lives(own)]
    told = _Told(whole, of_claim, lives)
    return {obligation: question(told) for obligation, question in _QUESTIONS.items()}


def _lives(lines: Sequence[Line]) -> list[list[Line]]:
    """What befell a claim, generation by generation."""
    lives: list[list[Line]] = []
    for line in lines:
        if line["event"] == _SUBMITTED or not lives:
            lives.append([])
        lives[-1].append(line)
    return lives


def _unusable(lines: Sequence[Line]) -> str:
    """Why a trace shows nothing at all, empty if it may show something."""
    if not lines:
        return "the trace is empty: nothing is hooked"
    if not any(line.get("claim_id") for line in lines):
        return "no event names a claim: only counters"
    for number, line in enumerate(lines, 1):
        event, claim = line.get("event"), line.get("claim_id")
        if not _is_word(event):
            return f"line {number} names no event"
        if claim is not None and not _is_word(claim):
            return f"line {number}: {claim!r} is no id of a claim"
        if claim is None and event in _OF_A_CLAIM:
            return f"line {number}: {event} names no claim"
    return _cut(lines)


def _is_word(value: object) -> bool:
    """A text that can be told as it stands, without lines and colours of its own."""
    return isinstance(value, str) and value != "" and value.isprintable()


def _cut(lines: Sequence[Line]) -> str:
    """What is missing of a trace that opens or closes (T3), empty if nothing is."""
    events = [line["event"] for line in lines]
    if not {_OPENED, _CLOSED} & set(events):
        return ""
    if events[0] != _OPENED or events[-1] != _CLOSED:
        return "the trace goes not from trace_opened to trace_closed: events are missing"
    if events.count(_OPENED) > 1 or events.count(_CLOSED) > 1:
        return "the trace is of more than one run"
    told = lines[-1].get("events")
    if type(told) is not int or told != len(lines) - 1:
        return f"the trace closes after {told!r} events, and has {len(lines) - 1}: some are missing"
    return _misnumbered(lines)


def _misnumbered(lines: Sequence[Line]) -> str:
    """How the numbers of a trace break T1, empty if they do not."""
    numbers = [number for line in lines if type(number := line.get("seq")) is int]
    if len(numbers) < len(lines):
        return "events carry no sequence number"
    if numbers != list(range(numbers[0], numbers[0] + len(numbers))):
        return "sequence numbers are not dense: events are missing or out of order"
    return ""


def _timeless(lines: Sequence[Line]) -> str:
    """How the times and runs of a trace break T1, empty if they do not or none are told."""
    times: list[Any] = [line.get("timestamp_ns") for line in lines]
    if any(time is not None for time in times):
        if not all(type(time) in (int, float) and math.isfinite(time) for time in times):
            return "not every event carries a time"
        if any(later < earlier for earlier, later in pairwise(times)):
            return "time runs back"
    runs = [line.get("run_id") for line in lines]
    return "events are of more than one run" if any(run != runs[0] for run in runs) else ""


def _identity(told: _Told) -> Shown:
    for claim, lines in told.of_claim.items():
        if lines[0].get("event") != _SUBMITTED:
            return Shown(False, f"{claim} is named only afterwards, by {lines[0].get('event')}")
        if wrong := _mixed(claim, _lives(lines)):
            return Shown(False, wrong)
    return Shown(True, f"{len(told.of_claim)} claims, each named before anything befalls it")


def _mixed(claim: str, lives: Sequence[Sequence[Line]]) -> str:
    """How the generations of a claim are mixed up, empty if they are not (L1)."""
    generations: list[Any] = [life[0].get("generation") for life in lives]
    if len(lives) > 1 and not all(type(generation) is int for generation in generations):
        return f"{claim} came back without a generation"
    if any(later <= earlier for earlier, later in pairwise(generations)):
        return f"{claim} came back without a higher generation"
    for life, generation in zip(lives, generations, strict=True):
        if any(line.get("generation") not in (None, generation) for line in life):
            return f"an event of {claim} is of another generation than its submission"
    return ""


def _acceptance(told: _Told) -> Shown:
    for claim, life in told.lives:
        if wrong := _misanswered(claim, life):
            return Shown(False, wrong)
    return Shown(True, "each claim is answered before it materializes")


def _misanswered(claim: str, life: Sequence[Line]) -> str:
    """What is wrong with the answer to a claim, empty if nothing is (L2)."""
    until = list(takewhile(lambda line: line["event"] not in _FAILED, life))
    answers = [line for line in until if line["event"] in _ANSWERS]
    if not answers:
        return f"{claim} was never answered"
    if len(answers) > 1:
        return f"{claim} was answered more than once"
    before = list(takewhile(lambda line: line is not answers[0], life))
    if any(line["event"] == _MATERIALIZED for line in before):
        return f"{claim} materialized before it was answered"
    if answers[0]["event"] != _ACCEPTED and any(e["event"] == _MATERIALIZED for e in life):
        return f"{claim} materialized though it was not accepted"
    asked, granted = life[0].get("predicate"), answers[0].get("granted")
    if granted not in (None, asked) and answers[0].get("decision") == Decision.ACCEPTED:
        return f"{claim} was granted something else than it asked for, and told it was accepted"
    return ""


def _predicate(told: _Told) -> Shown:
    count = 0
    for claim, life in told.lives:
        for line in life:
            if line["event"] == _SUBMITTED and not isinstance(line.get("predicate"), dict):
                return Shown(False, f"{claim} has no predicate")
            for field in ("predicate", "granted"):
                if line.get(field) is not None and _positions(line[field]) is None:
                    return Shown(False, f"{claim}: {line[field]!r} is no predicate")
            if line["event"] == _MATERIALIZED:
                count += 1
                if wrong := _unmet(claim, life, line):
                    return Shown(False, wrong)
    if not count:
        return Shown(False, "no claim ever materialized")
    return Shown(True, f"{count} claims materialized, their predicate on record")


def _positions(told: object) -> range | None:
    """The logical positions that a predicate asks for, None for what is none: a count of survivors,
    say."""
    if not isinstance(told, dict) or type(told.get("n")) is not int:
        return None
    kind = told.get("kind", PredicateKind.LEADING)
    start = told.get("start", 0 if kind == PredicateKind.LEADING else None)
    if kind not in tuple(PredicateKind) or type(start) is not int:
        return None
    try:
        return Predicate(PredicateKind(kind), told["n"], start).positions
    except BadOperation:
        return None


def _unmet(claim: str, life: Sequence[Line], materialized: Line) -> str:
    """Why what is on record does not show that the predicate held, empty if it does (L7): the
    leading blocks, or for a range also each block of it as it was written."""
    leading = materialized.get("leading")
    if type(leading) is not int:
        return f"{claim} materialized without a look at its predicate"
    wanted: range | None = None
    written: set[Any] = set()
    for line in takewhile(lambda line: line is not materialized, life):
        for field in ("predicate", "granted"):
            wanted = _positions(line.get(field)) or wanted
        if line["event"] == _WRITTEN:
            written.add(_position(line))
        elif line["event"] == _LOST:
            written.discard(_position(line))
    if wanted is None:
        return f"{claim} materialized and had asked for nothing"
    is_there = leading >= wanted.stop or (wanted.start > 0 and written.issuperset(wanted))
    return "" if is_there else f"{claim} materialized though its predicate is not met"


def _position(line: Line) -> int | None:
    return line["position"] if type(line.get("position")) is int else None


def _order(told: _Told) -> Shown:
    if wrong := _misnumbered(told.lines) or _timeless(told.lines):
        return Shown(False, wrong)
    for claim, life in told.lives:
        if wrong := _out_of_turn(claim, life):
            return Shown(False, wrong)
    return Shown(True, f"{len(told.lines)} events numbered without a gap")


def _out_of_turn(claim: str, life: Sequence[Line]) -> str:
    """What befell a claim that may not have after what came before, empty if nothing (L1)."""
    events = [line["event"] for line in life if line["event"] in _NEXT]
    for earlier, later in pairwise(events):
        if later not in _NEXT[earlier]:
            return f"{claim}: {later} after {earlier}"
    return ""


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
    walks = []
    for claim, life in told.lives:
        walk = _Tiers(claim)
        if wrong := walk.follow(life):
            return Shown(False, wrong)
        walks.append(walk)
    restored = sum(walk.restored for walk in walks)
    return Shown(restored > 0, f"{restored} restores, each in order" if restored else "no restore")


@dataclass
class _Tiers:
    """One claim on its way between tiers, each time that it goes."""

    claim: str
    away: bool = False
    required: bool = False
    ended: bool = False
    tier: Any = None
    restored: int = 0

    def follow(self, lines: Sequence[Line]) -> str:
        """What is wrong with its way, empty if nothing is."""
        for line in lines:
            event = line["event"]
            if self.ended and event in (_OFFLOADED, *_REQUIRED, _RESTORED, _REUSED):
                return f"{self.claim} moved after it had ended"
            if event == _OFFLOADED:
                self.away, self.required, self.tier = True, False, line.get("tier")
            elif event in (*_REFUSED, *_GOING):
                self.ended = True
            elif event in _REQUIRED:
                self.required = True
            elif event in _FAILED:
                self.away = False
            elif event == _REUSED and (self.away or not self.restored):
                return f"{self.claim} was reused before it was restored"
            elif event == _RESTORED and (wrong := self._back(line)):
                return wrong
        return f"{self.claim} was offloaded and never restored" if self.away else ""

    def _back(self, line: Line) -> str:
        if line.get("source") is None:
            return f"the restore of {self.claim} does not say whether it was recomputed"
        if line["source"] != "tier":
            return f"{self.claim} was recomputed, and that was called a restore"
        if not line.get("tier"):
            return f"the restore of {self.claim} names no tier"
        if line["tier"] != (self.tier or line["tier"]):
            return f"{self.claim} was restored from another tier than it was offloaded to"
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
    for claim, life in told.lives:
        for at, line in enumerate(life):
            if line["event"] in _FAILED and (wrong := _unresolved(claim, life[:at], life[at:])):
                return Shown(False, wrong)
    return Shown(True, f"{len(failed)} failed restores, each with an outcome of its own claim")


def _unresolved(claim: str, before: Sequence[Line], since: Sequence[Line]) -> str:
    """What is wrong with a failed restore, the first of `since`, empty if nothing is (O2)."""
    moves = [e["event"] for e in before if e["event"] in (_OFFLOADED, *_REQUIRED, _RESTORED)]
    if _OFFLOADED not in moves:
        return f"a restore of {claim} failed though it was never offloaded"
    if moves[-1] not in _REQUIRED:
        return f"a restore of {claim} failed though no restore was required"
    names = [line["event"] for line in since[1:] if line["event"] in _OF_A_CLAIM]
    if {_REUSED, _RESTORED, _MATERIALIZED} & set(names):
        return f"{claim} was served though its restore failed"
    if not names or names[0] not in _OUTCOMES:
        return f"the failed restore of {claim} has no outcome"
    for line in since:
        if line["event"] in (*_FAILED, *_OUTCOMES) and (blamed := _blamed(claim, line)):
            return f"a failed restore of {claim} is blamed on {blamed}"
    return ""


def _blamed(claim: str, line: Line) -> str:
    """Whom a failed restore is blamed on, empty for its own claim."""
    blamed = line.get("blamed_claim_id", claim)
    if blamed != claim:
        return blamed if _is_word(blamed) else repr(blamed)
    several = line.get("blamed_claim_ids", [claim])
    return "" if several == [claim] else repr(several)


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
