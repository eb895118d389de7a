"""Reads a trace back: is it whole (T1, T3), what does it say (T2), and was the contract kept.

A trace that is not whole is rejected with a `TraceError`, never repaired.  A whole trace is
folded event by event into the phase of every claim and the outcome of every request; on the
way each event is judged by the rules that events alone can decide (L1 to L6, F2, F4, P1, P3,
P4, V1, V3).  What needs the pool's own data (B1 to B3) is the monitor's business.

A file may hold several runs one after the other, each from `trace_opened` to `trace_closed`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from kvclaims.checker.accounts import Held, Tables, recount
from kvclaims.checker.rows import PARQUET, Row, rows_of
from kvclaims.checker.verdicts import Violation, counted
from kvclaims.spec.claims import TABLE
from kvclaims.spec.fidelity import Fidelity
from kvclaims.spec.telemetry import EVENTS, Event, TraceError, odd_fields, parse_event
from kvclaims.spec.vocabulary import (
    RESPONSIBLE,
    TERMINAL,
    Cause,
    Decision,
    Outcome,
    Phase,
    Protection,
    Verdict,
)

# --- reading (T1, T3) --------------------------------------------------------------------

_COUNT: Final = "a whole number"
_TEXT: Final = "a text"
_FLAG: Final = "true or false"
_NAMES: Final = "a list of names"
_NUMBERS: Final = "a list of whole numbers"
_PAIRS: Final = "a list of pairs of a name and a number"
_PREDICATE: Final = "a record of kind, start and n, and of fidelity and bound if not exact"
_STANDING: Final = "a record of holds, leading and survivors"
_LESS_THAN_EXACT: Final = frozenset(Fidelity) - {Fidelity.EXACT}


def _is_pair(value: object) -> bool:
    """A name and a number."""
    if not isinstance(value, list) or len(value) != 2:
        return False
    return isinstance(value[0], str) and type(value[1]) is int


def _is_predicate(value: object) -> bool:
    bounded = _is_record(value, kind=str, start=int, n=int, fidelity=str, bound=float)
    if bounded or _is_record(value, kind=str, start=int, n=int, fidelity=str):
        return value["fidelity"] in _LESS_THAN_EXACT  # type: ignore[index]
    return _is_record(value, kind=str, start=int, n=int)


def _is_record(value: object, **fields: type) -> bool:
    return isinstance(value, dict) and {k: type(v) for k, v in value.items()} == fields


_IS: Final[dict[str, Callable[[object], bool]]] = {
    _COUNT: lambda v: type(v) is int,
    _TEXT: lambda v: isinstance(v, str),
    _FLAG: lambda v: type(v) is bool,
    _NAMES: lambda v: isinstance(v, list) and all(isinstance(n, str) for n in v),
    _NUMBERS: lambda v: isinstance(v, list) and all(type(n) is int for n in v),
    _PAIRS: lambda v: isinstance(v, list) and all(map(_is_pair, v)),
    _PREDICATE: _is_predicate,
    _STANDING: lambda v: _is_record(v, holds=bool, leading=int, survivors=int),
}

_VALUES: Final[dict[str, str]] = {
    **dict.fromkeys(
        (
            "block_size",
            "defer_limit",
            "events",
            "footprint",
            "cost_blocks",
            "headroom_before",
            "position",
            "block_id",
            "leading",
            "survivors",
            "covered",
            "ref_count",
            "hit_blocks",
            "new_blocks",
            "blocks",
            "protected_resident_blocks",
            "resident_plus_active_blocks",
            "capacity_shortfall_blocks",
            "missing_now",
            "free_blocks_before_allocate",
            "active_live_blocks_required",
            "active_live_blocks_current",
            "loaded",
        ),
        _COUNT,
    ),
    **dict.fromkeys(
        ("engine", "engine_version", "owner", "reason", "feasibility", "tier", "hash"), _TEXT
    ),
    **dict.fromkeys(("protected", "admit_reuse", "succeeded"), _FLAG),
    **dict.fromkeys(("blocking_claim_ids", "waits_on"), _NAMES),
    "hits": _NUMBERS,
    **dict.fromkeys(("lent", "draws"), _PAIRS),
    **dict.fromkeys(("predicate", "granted"), _PREDICATE),
    **dict.fromkeys(("before", "after"), _STANDING),
}
"""What the value of a field must be (fields with a fixed set of words: `_WORDS`)."""

_WORDS: Final[dict[str, frozenset[str]]] = {
    "protection": frozenset(Protection),
    "decision": frozenset(Decision),
    "outcome": frozenset(Outcome),
    "phase": frozenset(Phase),
    "phase_before": frozenset(Phase),
    "cause": frozenset(Cause),
}

_TABLE: Final = ("active_request_blocks", "blocks")
"""Elsewhere `blocks` is a count; here it is the blocks themselves."""

_NEEDS_CLAIM: Final = (
    "resident_claim_",
    "resident_block_materialized",
    "block_lost_after",
    "restoration_",
)
_NEEDS_REQUEST: Final = ("active_request_", "future_reuse_", "external_load_")


def read_trace(path: Path) -> tuple[tuple[Event, ...], ...]:
    """The runs in a file; raises `TraceError` that names the file and the line."""
    numbered, parse, unit = _opened(path)
    with _named(path):
        return tuple(runs_of(numbered, parse, unit))


def _opened(path: Path) -> tuple[Numbered, Callable[[Any], Event], str]:
    """The events of a file as they come: lines of JSON, or rows of Parquet."""
    if path.suffix == PARQUET:
        return enumerate(rows_of(path), 1), event_of, "row"
    return enumerate(_lines(path), 1), _parse, "line"


def event_of(row: Row) -> Event:
    """A row whose columns were checked as a whole; its fields are read as those of a line."""
    seq, time, run, event, policy, usable, request, claim, generation, prefix = row.base
    data = fields_of(event, row.data)
    return Event(seq, time, run, event, policy, usable, request, claim, generation, prefix, data)


@lru_cache(maxsize=65536)
def fields_of(event: str, text: str) -> dict[str, Any]:
    """The fields of one event, once for each text: the same text means the same."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        raise TraceError("not JSON in the column data (T3)") from None
    if not isinstance(data, dict) or odd_fields(event, data):
        raise TraceError(f"{event} has the wrong fields (T3)")
    _check_fields(event, data)
    return data


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8") as file:
            any_line = False
            for line in file:
                any_line = True
                yield line.rstrip("\n")
    except FileNotFoundError:
        raise TraceError(f"{path}: no such file") from None
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise TraceError(f"{path.name}: not UTF-8 text") from None
    if not any_line:
        raise TraceError("an empty trace (T3)")


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Errors name the file."""
    try:
        yield
    except TraceError as error:
        said = str(error)
        raise TraceError(said if said.startswith(str(path)) else f"{path.name}: {said}") from None


def read_runs(lines: Sequence[str]) -> tuple[tuple[Event, ...], ...]:
    """Split lines into whole runs; raises `TraceError` at the first line that does not conform."""
    if not lines:
        raise TraceError("an empty trace (T3)")
    return tuple(runs_of(enumerate(lines, 1), _parse, "line"))


Numbered = Iterable[tuple[int, Any]]


def runs_of(
    numbered: Numbered, parse: Callable[[Any], Event], unit: str
) -> Iterator[tuple[Event, ...]]:
    """Whole runs, one after the other; `TraceError` names the `unit` (line, event) and its number.

    A run id stands for one run of a file (T1).
    """
    current: list[Event] = []
    for event, closes in _framed(numbered, parse, unit):
        current.append(event)
        if closes:
            yield tuple(current)
            current = []


def _framed(
    numbered: Numbered, parse: Callable[[Any], Event], unit: str
) -> Iterator[tuple[Event, bool]]:
    """Each event, and whether it closes its run; nothing is kept of the events before it."""
    frame = Frame()
    number = 0
    for number, given in numbered:
        try:
            event = parse(given)
            closes = frame.follow(event)
        except TraceError as error:
            raise TraceError(f"{unit} {number}: {error}{_cut_short(numbered, error)}") from None
        yield event, closes
    frame.end(f"{unit} {number}")


class Frame:
    """Where in a file one is: the run that goes on, and those that have closed (T1, T3)."""

    def __init__(self) -> None:
        self.last: Event | None = None
        """The last event of the run that goes on."""
        self._seen: set[str] = set()

    def follow(self, event: Event) -> bool:
        """Take the next event; whether it closes its run.  `TraceError` if it cannot be next."""
        _follows(self.last, event)
        if self.last is None and event.run_id in self._seen:
            raise TraceError(f"run {event.run_id!r} is in the file already (T1)")
        closes = event.event == "trace_closed"
        if closes:
            self._seen.add(event.run_id)
        self.last = None if closes else event
        return closes

    def end(self, where: str) -> None:
        """The file ends here: no run may still go on."""
        if self.last is not None:
            raise TraceError(f"{where}: the trace ends without trace_closed (T3)")


def _cut_short(rest: Numbered, error: TraceError) -> str:
    """Whether a line that is not JSON is the last one, and so was cut while it was written."""
    is_last = str(error).startswith("not JSON") and next(iter(rest), None) is None
    return "; the last line is cut short" if is_last else ""


def check_runs(events: Sequence[Event]) -> tuple[tuple[Event, ...], ...]:
    """The same for events at hand: split into whole runs, or `TraceError` with the number of the
    first event that does not conform."""
    return tuple(runs_of(enumerate(events, 1), _conforming, "event"))


def _conforming(event: Event) -> Event:
    if event.event not in EVENTS or odd_fields(event.event, event.data):
        raise TraceError(f"{event.event} has the wrong fields (T3)")
    return _checked(event)


def parse_line(line: str) -> Event:
    """One line of a trace, every field of it checked; `TraceError` where it does not conform."""
    return _parse(line)


def _parse(line: str) -> Event:
    return _checked(parse_event(line))


def _checked(event: Event) -> Event:
    for name in ("run_id", "policy"):
        if not isinstance(getattr(event, name), str):
            raise TraceError(f"{name} is not a text (T3)")
    _subject(event, _NEEDS_CLAIM, "claim_id")
    _subject(event, _NEEDS_REQUEST, "request_id")
    if event.claim_id is not None and type(event.generation) is not int:
        raise TraceError(f"{event.event}: generation must be {_COUNT} (T3)")
    _check_fields(event.event, event.data)
    return event


def _check_fields(event: str, data: Mapping[str, Any]) -> None:
    for name, value in data.items():
        kind = _NUMBERS if (event, name) == _TABLE else _VALUES.get(name)
        if kind is not None and not _IS[kind](value):
            raise TraceError(f"{event}: {name} must be {kind} (T3)")
        if name in _WORDS and not (isinstance(value, str) and value in _WORDS[name]):
            raise TraceError(f"{event}: {name} is no known word: {value!r} (T3)")


def _subject(event: Event, kinds: tuple[str, ...], name: str) -> None:
    value = getattr(event, name)
    if not (isinstance(value, str) or (value is None and not event.event.startswith(kinds))):
        raise TraceError(f"{event.event}: {name} must be {_TEXT} (T3)")


def _follows(last: Event | None, event: Event) -> None:
    """Whether the event continues the run (T1)."""
    if last is None:
        if event.event != "trace_opened" or event.seq != 0:
            raise TraceError(f"a run starts with trace_opened at seq 0, not {event.event} (T3)")
        return
    if event.run_id != last.run_id:
        raise TraceError(f"run {event.run_id!r} begins before run {last.run_id!r} has closed (T1)")
    if event.event == "trace_opened":
        raise TraceError("a second trace_opened in one run (T1)")
    if event.seq != last.seq + 1:
        raise TraceError(f"seq {event.seq} follows {last.seq}: events are missing (T1)")
    if (event.policy, event.usable_blocks) != (last.policy, last.usable_blocks):
        raise TraceError("policy or usable blocks change within a run (T1)")
    if event.timestamp_ns < last.timestamp_ns:
        raise TraceError("time runs back (T1)")
    if event.event == "trace_closed" and event.data["events"] != event.seq:
        raise TraceError(
            f"trace_closed counts {event.data['events']} events before it, found {event.seq} (T3)"
        )


# --- folding (T2) ------------------------------------------------------------------------


@dataclass
class ClaimLife:
    """One generation of a claim as the trace tells it; `blocks` maps positions to block ids."""

    claim_id: str
    generation: int
    protection: Protection
    asked: dict[str, Any]
    timed: bool
    phase: Phase = Phase.SUBMITTED
    granted: dict[str, Any] | None = None
    was_accepted: bool = False
    was_materialized: bool = False
    blocks: dict[int, int] = field(default_factory=dict)
    contents: dict[int, str | None] = field(default_factory=dict)
    """Of a claim that a tier may keep: what each position stands for, as far as it was told."""
    tier: str | None = None
    """Where it was last offloaded to."""
    loads: int = 0
    """Blocks that were loaded, for whichever request, when it was last required back."""
    failed: bool = False
    """A load for it has failed."""
    lost_by: set[str] = field(default_factory=set)
    """Why content was lost that a tier was to keep and did not yet, as far as it was told."""

    @property
    def responsible(self) -> bool:
        return self.phase in RESPONSIBLE

    @property
    def hard(self) -> bool:
        return self.protection is Protection.HARD

    def to_json(self) -> dict[str, Any]:
        return {
            "phase": self.phase,
            "generation": self.generation,
            "protection": self.protection,
            "accepted": self.was_accepted,
            "materialized": self.was_materialized,
        }


@dataclass(slots=True)
class RequestLife:
    """A request as the trace tells it; `state` is waiting, running or finished."""

    request_id: str
    admit_reuse: bool
    state: str = "waiting"
    outcome: Outcome = Outcome.PENDING
    shortfall: int = 0
    free: int | None = None
    hit_blocks: int = 0
    deferrals: int = 0
    structural_deferrals: int = 0
    denials: int = 0
    admissions: int = 0
    """How often its content was left for reuse."""
    blocking_claims: tuple[str, ...] = ()
    waited_on: tuple[str, ...] = ()
    is_short: bool = False
    """Not all of what was last loaded for it is right."""
    failed: str | None = None
    """The content that was the first not to be."""
    gave_way: bool = False
    """It was preempted, and was not admitted since: what was under way for it may still end it."""

    def to_json(self) -> dict[str, Any]:
        return {
            "state": self.state,
            "outcome": self.outcome,
            "shortfall": self.shortfall,
            "blocking_claims": list(self.blocking_claims),
            "deferrals": self.deferrals,
        }


class Fold:
    """The state that the events of one run add up to, and the rules they broke.

    `promised` puts another protection in the place of the one each claim was submitted with:
    a run under a weaker mechanism, judged by the stronger promise.
    """

    def __init__(self, events: Iterable[Event], promised: Protection | None = None) -> None:
        self.claims: dict[str, ClaimLife] = {}
        self.requests: dict[str, RequestLife] = {}
        self.violations: list[Violation] = []
        self.counts: dict[str, int] = {}
        self.defer_limit = 0
        self.usable = 0
        self.tables = Tables()
        self._covers: dict[int, dict[str, None]] = {}
        """Block → claims that it was covered by, in this generation or an earlier one."""
        self._promised = promised
        self._in_force: dict[str, ClaimLife] = {}
        """Claims that the runtime is responsible for, by id."""
        self._taken: dict[str, Event] = {}
        self._loaded_blocks = 0
        self.failed_restores: list[str] = []
        """Claims for which a load failed, in this order."""
        self.unsaved: dict[str, int] = {}
        """Blocks that a tier could not keep, by claim."""
        for event in events:
            self.take(event)

    @property
    def covered_ever(self) -> Iterable[int]:
        """Blocks that any claim was told to cover."""
        return self._covers

    def take(self, event: Event) -> None:
        """Fold one event more."""
        self._now = event
        self.counts[event.event] = self.counts.get(event.event, 0) + 1
        handler = _HANDLERS.get(event.event)
        if handler is not None:
            handler(self, event)

    # -- helpers

    def _break(self, rule: str, message: str) -> None:
        self.violations.append(Violation(rule, message, run_id=self._now.run_id, seq=self._now.seq))

    def _claim(self, event: Event) -> ClaimLife | None:
        """The claim that the event speaks of, None (and told) if there is no such generation."""
        assert event.claim_id is not None
        claim = self.claims.get(event.claim_id)
        if claim is None:
            self._break("T2", f"{event.event} for claim {event.claim_id}, never submitted")
            return None
        if claim.generation != event.generation:
            self._break(
                "T2",
                f"{event.event} for generation {event.generation} of claim {claim.claim_id}, "
                f"which is at generation {claim.generation}",
            )
            return None
        return claim

    def _request(self, event: Event, *states: str) -> RequestLife | None:
        assert event.request_id is not None
        request = self.requests.get(event.request_id)
        if request is None:
            self._break("T2", f"{event.event} for request {event.request_id}, never submitted")
            return None
        if request.state not in states:
            self._break("T2", f"{event.event} for {request.state} request {request.request_id}")
        return request

    def _goes(self, claim: ClaimLife, to: Phase) -> None:
        if to not in TABLE.get(claim.phase, ()):
            self._break("L1", f"claim {claim.claim_id} went from {claim.phase} to {to}")
        self._comes_to(claim, to)

    def _comes_to(self, claim: ClaimLife, phase: Phase) -> None:
        """Set the phase, and keep the claims in force at hand: a long run has many that ended."""
        claim.phase = phase
        if claim.responsible:
            self._in_force[claim.claim_id] = claim
        else:
            self._in_force.pop(claim.claim_id, None)

    # -- the life of claims

    def _submitted(self, event: Event) -> None:
        assert event.claim_id is not None
        assert event.generation is not None
        last = self.claims.get(event.claim_id)
        if last is not None and last.phase not in TERMINAL:
            self._break("L1", f"claim {event.claim_id} submitted anew while {last.phase}")
        if last is not None and event.generation <= last.generation:
            self._break("L1", f"claim {event.claim_id} came back without a higher generation")
        self.tables.born(event.claim_id)
        self._in_force.pop(event.claim_id, None)
        self.claims[event.claim_id] = ClaimLife(
            event.claim_id,
            event.generation,
            self._promised or Protection(event.data["protection"]),
            event.data["predicate"],
            event.data["duration"] is not None,
        )

    def _accepted(self, event: Event) -> None:
        claim = self._claim(event)
        if claim is None:
            return
        decision, granted = event.data["decision"], event.data["granted"]
        self._goes(claim, Phase.ACCEPTED)
        claim.granted = granted
        claim.was_accepted = True
        if not event.data["reason"]:
            self._break("L2", f"claim {claim.claim_id} accepted without a reason")
        if decision not in (Decision.ACCEPTED, Decision.CLIPPED):
            self._break("L2", f"claim {claim.claim_id} accepted with decision {decision}")
        if (decision == Decision.CLIPPED) != (granted != claim.asked):
            self._break(
                "L2", f"claim {claim.claim_id}: {decision}, asked {claim.asked}, granted {granted}"
            )
        cost, headroom = event.data["cost_blocks"], event.data["headroom_before"]
        if claim.hard and cost > headroom:
            self._break(
                "F2", f"claim {claim.claim_id} accepted for {cost} blocks with headroom {headroom}"
            )

    def _refused_claim(self, event: Event) -> None:
        claim = self._claim(event)
        if claim is None:
            return
        self._goes(claim, Phase.REFUSED)
        if not event.data["reason"] or event.data["decision"] != Decision.REFUSED:
            self._break("L2", f"claim {claim.claim_id} refused without a reason")

    def _covered(self, event: Event) -> None:
        claim = self._claim(event)
        if claim is None:
            return
        if not claim.responsible:
            self._break("L2", f"claim {claim.claim_id} protects a block while {claim.phase}")
        claim.blocks[event.data["position"]] = event.data["block_id"]
        if claim.protection is Protection.OFFLOADABLE:
            claim.contents[event.data["position"]] = event.prefix_id
        self._covers.setdefault(event.data["block_id"], {})[claim.claim_id] = None
        self.tables.covered(claim.claim_id, event.data["block_id"])
        self._taken.pop(claim.claim_id, None)

    def _materialized(self, event: Event) -> None:
        claim = self._claim(event)
        if claim is None:
            return
        self._goes(claim, Phase.MATERIALIZED)
        claim.was_materialized = True
        granted = claim.granted or claim.asked
        wanted = range(granted["start"], granted["start"] + granted["n"])
        missing = [position for position in wanted if position not in claim.blocks]
        if missing:
            self._break(
                "L7", f"claim {claim.claim_id} materialized, but position {missing[0]} was not"
            )

    def _ended(self, event: Event) -> None:
        claim = self._claim(event)
        if claim is None:
            return
        to = _ENDINGS[event.event]
        if event.data["phase_before"] != claim.phase:
            self._break(
                "T2", f"claim {claim.claim_id} was {claim.phase}, not {event.data['phase_before']}"
            )
        if to is Phase.EXPIRED and not claim.timed:
            self._break("L6", f"claim {claim.claim_id} expired without a duration")
        self._goes(claim, to)
        self._taken.pop(claim.claim_id, None)

    def _renewed(self, event: Event) -> None:
        claim = self._claim(event)
        if claim is None:
            return
        if not claim.responsible:
            self._break("L6", f"claim {claim.claim_id} renewed while {claim.phase}")
        claim.timed = True

    def _harmed(self, event: Event) -> None:
        claim = self._claim(event)
        if claim is None:
            return
        before, after = event.data["before"], event.data["after"]
        if not claim.was_accepted:
            self._break("L4", f"claim {claim.claim_id} harmed without acceptance")
        elif not claim.responsible:
            self._break("L4", f"claim {claim.claim_id} harmed after it was {claim.phase}")
        elif not before["holds"] or after["holds"]:
            self._break("L3", f"claim {claim.claim_id} harmed, but its predicate did not stop")
        early = claim.protection is Protection.OFFLOADABLE and claim.phase is Phase.ACCEPTED
        if early and event.data["cause"] not in claim.lost_by:
            self._break(
                "O2",
                f"claim {claim.claim_id} is harmed by {event.data['cause']} before a tier kept it, "
                "and no such loss of it was told",
            )
        if claim.hard and event.data["cause"] != Cause.FAULT:
            self._break("L5", f"hard claim {claim.claim_id} harmed by {event.data['cause']}")
        self._comes_to(claim, Phase.HARMED)
        self._taken.pop(claim.claim_id, None)

    def _lost_later(self, event: Event) -> None:
        claim = self._claim(event)
        if claim is not None and claim.phase not in TERMINAL:
            self._break("L4", f"claim {claim.claim_id} is {claim.phase}, not ended, at this loss")

    # -- claims in a tier

    def _offloaded(self, event: Event) -> None:
        claim = self._claim(event)
        if claim is None:
            return
        if claim.protection is not Protection.OFFLOADABLE:
            self._break("O1", f"claim {claim.claim_id} was offloaded, it is {claim.protection}")
        self._names_tier(claim, event)
        self._goes(claim, Phase.OFFLOADED)
        claim.tier = event.data["tier"]
        claim.blocks.clear()

    def _required(self, event: Event) -> None:
        claim = self._claim(event)
        if claim is None:
            return
        self._goes(claim, Phase.RESTORING)
        self._names_tier(claim, event)
        claim.loads = self._loaded_blocks

    def _restored(self, event: Event) -> None:
        claim = self._claim(event)
        if claim is None:
            return
        if claim.failed:
            self._break("O2", f"claim {claim.claim_id} was restored though a load for it failed")
        if claim.phase is not Phase.RESTORING:
            self._break("O1", f"claim {claim.claim_id} was restored while {claim.phase}")
        elif not 0 < event.data["blocks"] <= self._loaded_blocks - claim.loads:
            self._break(
                "O3",
                f"claim {claim.claim_id} is called restored, {event.data['blocks']} blocks of it, "
                f"and {self._loaded_blocks - claim.loads} were loaded since it was required",
            )
        self._names_tier(claim, event)
        self._goes(claim, Phase.MATERIALIZED)

    def _restore_failed(self, event: Event) -> None:
        claim = self._claim(event)
        if claim is None:
            return
        self.failed_restores.append(claim.claim_id)
        if claim.phase is not Phase.RESTORING:
            self._break(
                "O2", f"a restore of claim {claim.claim_id} failed, and it was {claim.phase}"
            )
        request = self.requests.get(event.request_id or "")
        if request is None or not request.is_short:
            self._break(
                "O2",
                f"a failed restore is blamed on claim {claim.claim_id}, and no load fell short "
                f"for request {event.request_id}",
            )
        elif event.prefix_id != request.failed or request.failed not in claim.contents.values():
            self._break(
                "O2",
                f"a failed restore of content {request.failed} is blamed on claim "
                f"{claim.claim_id}, which has no such content",
            )
        self._names_tier(claim, event)
        claim.failed = True

    def _unsaved(self, event: Event) -> None:
        claim = self._claim(event)
        if claim is None:
            return
        if not claim.responsible or claim.protection is not Protection.OFFLOADABLE:
            self._break(
                "O2",
                f"blocks of claim {claim.claim_id} are told not to be kept in a tier, and it is "
                f"{claim.phase}, {claim.protection}",
            )
        owed = (claim.granted or claim.asked)["n"]
        if not 0 < event.data["blocks"] <= owed:
            self._break(
                "O2",
                f"{event.data['blocks']} blocks of claim {claim.claim_id} are not kept, of {owed}",
            )
        self._names_tier(claim, event)
        claim.lost_by.add(Cause.FAULT)
        self.unsaved[claim.claim_id] = self.unsaved.get(claim.claim_id, 0) + event.data["blocks"]

    def _names_tier(self, claim: ClaimLife, event: Event) -> None:
        """A tier is named, and it is the one that the claim was offloaded to."""
        tier = event.data["tier"]
        if not tier or tier != (claim.tier or tier):
            self._break("O1", f"claim {claim.claim_id} is in tier {claim.tier}, not in {tier!r}")

    # -- blocks

    def _victim(self, event: Event) -> None:
        block = event.data["block_id"]
        if event.data["protected"]:
            self._break("P1", f"protected block {block} was chosen as a victim")
        for claim in self._covering(block):
            if claim.hard:
                self._break("P1", f"block {block} of hard claim {claim.claim_id} was given away")
            elif claim.phase is Phase.MATERIALIZED:
                self._taken.setdefault(claim.claim_id, event)

    def _block_lost(self, event: Event) -> None:
        self._lost_before_kept(event)
        for claim in list(self._covering(event.data["block_id"])):
            for position, block in list(claim.blocks.items()):
                if block == event.data["block_id"]:
                    del claim.blocks[position]

    def _lost_before_kept(self, event: Event) -> None:
        """A block of an accepted claim that no tier keeps yet: the claim was whole, and ends."""
        claim = self.claims.get(event.claim_id or "")
        if claim is None or claim.protection is not Protection.OFFLOADABLE:
            return
        if claim.phase is Phase.ACCEPTED and event.data["position"] not in claim.blocks:
            claim.lost_by.add(event.data["cause"])
            self._taken.setdefault(claim.claim_id, event)

    def _covering(self, block: int) -> Iterator[ClaimLife]:
        """Claims in force that cover the block."""
        names = self._covers.get(block, ())
        claims = (self.claims[name] for name in tuple(names))
        return (c for c in claims if c.responsible and block in c.blocks.values())

    # -- requests

    def _request_submitted(self, event: Event) -> None:
        assert event.request_id is not None
        if event.request_id in self.requests:
            self._break("T2", f"request {event.request_id} submitted twice")
        self.requests[event.request_id] = RequestLife(event.request_id, event.data["admit_reuse"])

    def _admitted(self, event: Event) -> None:
        request = self._request(event, "waiting")
        if request is not None:
            request.state, request.gave_way = "running", False
            request.hit_blocks = event.data["hit_blocks"]

    def _deferred(self, event: Event) -> None:
        request = self._request(event, "waiting", "running")
        if request is None:
            return
        blockers, waits_on = event.data["blocking_claim_ids"], event.data["waits_on"]
        if bool(blockers) == bool(waits_on):
            self._break("F4", f"request {request.request_id} deferred by {blockers} and {waits_on}")
        self._recount(event, request)
        request.deferrals += 1
        request.waited_on = request.waited_on or tuple(waits_on)
        if blockers:
            self._blame(request, blockers)
            request.structural_deferrals += 1
            if request.structural_deferrals > self.defer_limit:
                self._break(
                    "F4",
                    f"request {request.request_id} deferred {request.structural_deferrals} times "
                    f"for claims, the limit is {self.defer_limit}",
                )

    def _refused(self, event: Event) -> None:
        request = self._request(event, "waiting", "running")
        if request is None:
            return
        self._recount(event, request)
        request.state = "finished"
        request.outcome = Outcome(event.data["outcome"])
        request.shortfall = event.data["capacity_shortfall_blocks"]
        request.free = event.data["free_blocks_before_allocate"]
        request.blocking_claims = tuple(event.data["blocking_claim_ids"])
        if request.shortfall <= 0:
            self._break("F4", f"request {request.request_id} refused with no shortfall")
        if event.data["waits_on"]:
            self._break("F4", f"request {request.request_id} refused, yet told to wait")
        match request.outcome:
            case Outcome.CAPACITY_REQUIRED:
                if request.blocking_claims:
                    self._break(
                        "F4", f"request {request.request_id} exceeds the pool, yet claims blamed"
                    )
            case Outcome.REFUSED:
                if not request.blocking_claims:
                    self._break("F4", f"request {request.request_id} refused, no claim named")
                self._blame(request, request.blocking_claims)
            case other:
                self._break("F4", f"request {request.request_id} refused with outcome {other}")

    def _recount(self, event: Event, request: RequestLife) -> None:
        """Whether the numbers of the answer are those of the fold (T2)."""
        claims = {
            claim.claim_id: Held(
                frozenset(claim.blocks.values()), (claim.granted or claim.asked)["n"]
            )
            for claim in self._in_force.values()
            if claim.hard
        }
        if self._promised is None:
            for message in recount(
                event.data, request.request_id, self.usable, claims, self.tables
            ):
                self._break("T2", message)

    def _grew(self, event: Event) -> None:
        request = self._request(event, "running", "loading")
        if request is not None:
            self.tables.grew(request.request_id, event.data)

    def _found(self, event: Event) -> None:
        request = self._request(event, "waiting")
        if request is not None:
            self.tables.asked(request.request_id, event.data)

    def _loading(self, event: Event) -> None:
        request = self._request(event, "running")
        if request is not None:
            request.state = "loading"

    def _loaded(self, event: Event) -> None:
        request = self._request(event, "loading")
        if request is None:
            return
        if event.data["loaded"] > event.data["blocks"]:
            self._break("O2", f"request {request.request_id} loaded more than it asked for")
        request.state = "running"
        request.is_short = event.data["loaded"] < event.data["blocks"]
        request.failed = event.prefix_id if request.is_short else None
        self._loaded_blocks += event.data["loaded"]

    def _blame(self, request: RequestLife, blockers: Iterable[str]) -> None:
        for name in blockers:
            claim = self.claims.get(name)
            if claim is None or not claim.responsible or not claim.hard:
                what = "unknown" if claim is None else f"{claim.phase}, {claim.protection}"
                self._break(
                    "F4", f"request {request.request_id} blames claim {name}, which is {what}"
                )

    def _preempted(self, event: Event) -> None:
        request = self._request(event, "running")
        if request is not None:
            request.state, request.gave_way = "waiting", True
            self.tables.left(request.request_id)

    def _finished(self, event: Event) -> None:
        life = self.requests.get(event.request_id or "")
        late = ("waiting",) if life is not None and life.gave_way else ()
        request = self._request(event, "running", *late)
        if request is None:
            return
        request.state, request.gave_way = "finished", False
        self.tables.left(request.request_id)
        request.outcome = Outcome(event.data["outcome"])
        expected = Outcome.SERVED if request.admit_reuse else Outcome.SERVED_NO_ADMIT
        if request.outcome is not expected:
            self._break(
                "P4", f"request {request.request_id} ended {request.outcome}, not {expected}"
            )

    def _aborted(self, event: Event) -> None:
        request = self._request(event, "waiting", "running", "loading")
        if request is not None:
            request.state, request.gave_way = "finished", False
            self.tables.left(request.request_id)
            request.outcome = Outcome.ABORTED

    def _reuse_admitted(self, event: Event) -> None:
        request = self._request(event, "waiting", "running", "finished")
        if request is None:
            return
        request.admissions += 1
        if not request.admit_reuse:
            self._break("P4", f"no-admit request {request.request_id} registered content")

    def _reuse_denied(self, event: Event) -> None:
        request = self._request(event, "waiting", "running", "finished")
        if request is not None:
            request.denials += 1

    # -- the frame

    def _opened(self, event: Event) -> None:
        self.defer_limit = event.data["defer_limit"]
        self.usable = event.usable_blocks

    def _closed(self, event: Event) -> None:
        for claim in self.claims.values():
            if claim.phase is Phase.SUBMITTED:
                self._break("V1", f"claim {claim.claim_id} was never decided")
            if claim.failed and claim.responsible:
                self._break("O2", f"claim {claim.claim_id} goes on though its restore has failed")
        for name, victim in self._taken.items():
            self._now = victim
            self._break(
                "P3", f"claim {name} lost block {victim.data['block_id']} and nothing was told"
            )
        self._now = event
        for request in self.requests.values():
            denied = int(request.outcome is Outcome.SERVED_NO_ADMIT)
            if request.denials != denied:
                self._break(
                    "P4",
                    f"request {request.request_id}, {request.outcome}, was denied reuse "
                    f"{request.denials} times, not {denied}",
                )
            admitted = int(request.outcome is Outcome.SERVED)
            if request.admissions != admitted:
                self._break(
                    "P4",
                    f"request {request.request_id}, {request.outcome}, left its content for reuse "
                    f"{request.admissions} times, not {admitted}",
                )


_ENDINGS: Final = {
    "resident_claim_demoted": Phase.DEMOTED,
    "resident_claim_expired": Phase.EXPIRED,
    "resident_claim_released": Phase.RELEASED,
}

_HANDLERS: Final[dict[str, Callable[[Fold, Event], None]]] = {
    "trace_opened": Fold._opened,
    "trace_closed": Fold._closed,
    "resident_claim_submitted": Fold._submitted,
    "resident_claim_accepted": Fold._accepted,
    "resident_claim_refused": Fold._refused_claim,
    "resident_block_materialized": Fold._covered,
    "resident_claim_materialized": Fold._materialized,
    **dict.fromkeys(_ENDINGS, Fold._ended),
    "resident_claim_renewed": Fold._renewed,
    "resident_claim_harmed": Fold._harmed,
    "resident_claim_offloaded": Fold._offloaded,
    "restoration_required": Fold._required,
    "resident_claim_restored": Fold._restored,
    "restoration_failed": Fold._restore_failed,
    "resident_claim_unsaved": Fold._unsaved,
    "resident_block_lost": Fold._block_lost,
    "block_lost_after_release": Fold._lost_later,
    "allocation_victim_selected": Fold._victim,
    "active_request_submitted": Fold._request_submitted,
    "active_request_admitted": Fold._admitted,
    "active_request_deferred": Fold._deferred,
    "active_request_refused": Fold._refused,
    "active_request_blocks": Fold._grew,
    "active_request_found": Fold._found,
    "external_load_started": Fold._loading,
    "external_load_finished": Fold._loaded,
    "active_request_preempted": Fold._preempted,
    "active_request_finished": Fold._finished,
    "active_request_aborted": Fold._aborted,
    "future_reuse_admitted": Fold._reuse_admitted,
    "future_reuse_denied": Fold._reuse_denied,
}


# --- the command -------------------------------------------------------------------------


@dataclass(frozen=True)
class AuditedRun:
    """One run of one file, folded."""

    file: str
    run_id: str
    events: int
    fold: Fold


@dataclass(frozen=True)
class AuditReport:
    runs: tuple[AuditedRun, ...]

    @property
    def verdict(self) -> Verdict:
        broken = any(run.fold.violations for run in self.runs)
        return Verdict.VIOLATED if broken else Verdict.HOLDS

    @property
    def violations(self) -> list[Violation]:
        return [violation for run in self.runs for violation in run.fold.violations]

    def to_json(self) -> dict[str, Any]:
        return {
            "events": sum(run.events for run in self.runs),
            "runs": [
                {
                    "file": run.file,
                    "run_id": run.run_id,
                    "events": run.events,
                    "claims": {name: life.to_json() for name, life in run.fold.claims.items()},
                    "requests": {name: life.to_json() for name, life in run.fold.requests.items()},
                    "violations": [violation.to_json() for violation in run.fold.violations],
                }
                for run in self.runs
            ],
            "violations": [violation.to_json() for violation in self.violations],
        }

    def lines(self) -> Iterator[str]:
        for run in self.runs:
            claims, requests = len(run.fold.claims), len(run.fold.requests)
            yield (
                f"{run.file} {run.run_id}: {counted(run.events, 'event')}, "
                f"{counted(claims, 'claim')}, {counted(requests, 'request')}"
            )
            for name, claim in run.fold.claims.items():
                yield f"  claim {name}: {claim.phase}"
            for name, request in run.fold.requests.items():
                blame = ", ".join(request.blocking_claims)
                shown = f", {request.shortfall} blocks short" if request.shortfall else ""
                shown += f" because of {blame}" if blame else ""
                yield f"  request {name}: {request.outcome}{shown}"
            for violation in run.fold.violations:
                yield f"  VIOLATED {violation}"
        yield f"{counted(len(self.runs), 'run')}: {self.verdict}"


def audit(paths: Sequence[Path]) -> AuditReport:
    """Audit every run of every file; raises `TraceError` if one of them is not whole.

    Files are read as they are folded: a trace need not fit the memory.
    """
    return AuditReport(tuple(run for path in paths for run in _audited(path)))


def _audited(path: Path) -> Iterator[AuditedRun]:
    if path.suffix == PARQUET:
        from kvclaims.checker.bulk import runs_in

        with _named(path):
            for run_id, count, fold in runs_in(path):
                yield AuditedRun(path.name, run_id, count, fold)
        return
    fold, count = Fold(()), 0
    numbered, parse, unit = _opened(path)
    with _named(path):
        for event, closes in _framed(numbered, parse, unit):
            fold.take(event)
            count += 1
            if closes:
                yield AuditedRun(path.name, event.run_id, count, fold)
                fold, count = Fold(()), 0
