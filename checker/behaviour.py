"""Whether a run is a behaviour of the composed machine, as far as it can be heard.

Two things are heard of a runtime: the steps of its allocator and the events of its trace.  Each
step that changes the life of a claim, or answers a request, is a move of the composed machine in
which the pool, the claims and the trace step together; so it needs an event, of the right kind,
about the same claim or request, in the order in which the steps were taken, and the guards of the
claims and of the trace hold for it: an expired claim had a duration and it has passed, the time of
an event is not before that of the last.  An event that should come with a step and has none is no
move either.

The monitor (`checker.monitor`) steps the pool; here only what the other parts add is compiled,
over a shadow that shares the pool's state with it.  Steps that concern the pool alone cost nothing.
Written KV, owners, tiers and elastic memory are not heard of; what couples them is left out
(`Composition.only`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any, Final

from kvclaims.checker.monitor import Monitor
from kvclaims.checker.stepcode import Compiler, Shadow, Step
from kvclaims.checker.verdicts import Violation
from kvclaims.spec import claims, trace
from kvclaims.spec.claims import CLAIM, PHASE
from kvclaims.spec.composed import CLAIMS, POOL, RUNTIME, TRACE, answers, speaks
from kvclaims.spec.composition import Composition
from kvclaims.spec.interface import PoolStep
from kvclaims.spec.language import Action, Symbol
from kvclaims.spec.pool import REQUEST, active
from kvclaims.spec.telemetry import Event
from kvclaims.spec.vocabulary import Decision, Phase

_OF_THE_FILE: Final = (
    *(trace.fact, trace.about, trace.says, trace.after, trace.seq, trace.time),
    *(trace.kept, trace.closing, trace.folded, trace.awaits, trace.times),
    *(trace.spoiled, trace.accepted),
)
"""What the trace machine knows beside the clock: who reads the file back judges that (`audit`)."""

HEARD: Final[Composition] = RUNTIME.only("pool", "claims", "trace").seen_without(*_OF_THE_FILE)
"""The composed machine as far as it can be heard."""

ABORTED: Final = "active_request_aborted"
FINISHED: Final = "active_request_finished"
PREEMPTED: Final = "active_request_preempted"

EVENTS: Final[Mapping[str, tuple[str, ...]]] = {
    "submit": ("resident_claim_submitted",),
    "accept": ("resident_claim_accepted",),
    "clip": ("resident_claim_accepted",),
    "refuse": ("resident_claim_refused",),
    "materialize": ("resident_claim_materialized",),
    "release": ("resident_claim_released",),
    "demote": ("resident_claim_demoted",),
    "expire": ("resident_claim_expired",),
    "admit": ("active_request_admitted",),
    "retire": (
        FINISHED,
        ABORTED,
        PREEMPTED,
    ),
    "defer": ("active_request_deferred",),
    "turn_away": ("active_request_refused",),
    "overflow": ("active_request_refused",),
}
"""Move → the kinds of event that may tell of it."""

HARMED: Final = "resident_claim_harmed"
RENEWED: Final = "resident_claim_renewed"
_ENDS: Final = {
    Phase.RELEASED.value: "release",
    Phase.DEMOTED.value: "demote",
    Phase.EXPIRED.value: "expire",
}
_LOSSES: Final = ("evict", "lose")
_KINDS: Final = frozenset(kind for kinds in EVENTS.values() for kind in kinds)
_phase: Final = CLAIMS.symbol(claims.phase)
_active: Final = POOL.symbol(active)
_clock: Final = TRACE.symbol(trace.clock)
_harmed: Final = PHASE.values.index(Phase.HARMED)


class Behaviour:
    """Judges one run.  `violations` collects what is no move of the composed machine.

    Called with each allocator step before the monitor hears it; `begin` and `end` stand around
    the steps of one operation.
    """

    def __init__(self, monitor: Monitor) -> None:
        machine = HEARD.machine
        self.violations: list[Violation] = []
        self.moves = 0
        self.shadow = _beside(monitor.shadow, Shadow(machine))
        self._phases = self.shadow.tables[_phase]
        self._compiler = Compiler(self.shadow)
        self._moves: dict[str, Step] = {}
        self._of_claims: deque[Event] = deque()
        self._of_requests: deque[Event] = deque()
        self._renewals: list[Event] = []
        self._told_harmed: dict[str, Event] = {}
        self._gave_way: set[str] = set()
        """Requests that hold nothing since they were preempted: what was under way for one may
        still end it, and the pool takes no step for that."""
        self._number = 0

    def begin(self, ticks: int, events: Iterable[Event]) -> None:
        """An operation in which so much time passed and these events were told."""
        for _ in range(ticks):
            self._take(self._move("tick"), {"n": self.shadow.get(_clock, ())}, "advance")
        for event in events:
            if event.event == HARMED:
                self._told_harmed[_subject(event)] = event
            elif event.event == RENEWED:
                self._renewals.append(event)
            elif event.event == FINISHED and _subject(event) in self._gave_way:
                self._gave_way.discard(_subject(event))
            elif event.event in _KINDS:
                if event.event == PREEMPTED:
                    self._gave_way.add(_subject(event))
                elif event.event in (*EVENTS["admit"], ABORTED):
                    self._gave_way.discard(_subject(event))
                heard = self._of_claims if event.claim_id is not None else self._of_requests
                heard.append(event)

    def __call__(self, step: PoolStep) -> None:
        """One allocator step, before it changes the pool."""
        name = self._name(step)
        if name in _LOSSES:
            self._lose(name, step)
        elif name in EVENTS:
            self._with_event(name, step)

    def end(self) -> None:
        """The operation is over: what was told beyond its steps has to be a move by itself."""
        for event in self._renewals:
            args = {"c": _subject(event), "d": event.data["duration"], **self._of(event)}
            self._take(self._move("renew"), args, f"{event.event} of {_subject(event)}")
        for event in (*self._of_claims, *self._of_requests, *self._told_harmed.values()):
            if event.event == ABORTED:
                continue  # a request that held nothing
            what = f"{event.event} of {_subject(event)} is told, and the pool took no such step"
            rule = "L3" if event.event == HARMED else "T1"
            self.violations.append(Violation(rule, what, f"event {event.seq}"))
        for told in (self._of_claims, self._of_requests, self._renewals, self._told_harmed):
            told.clear()

    # -- moves

    def _name(self, step: PoolStep) -> str:
        """Which move of the whole the pool's step belongs to."""
        match step.action:
            case "finish":
                return _ENDS[step.args["how"]]
            case "admit" if self.shadow.get(_active, (step.args["r"],)):
                return "grow"
            case "accept" if self._of_claims and _is_clipped(self._of_claims[0]):
                return "clip"
        return step.action

    def _with_event(self, name: str, step: PoolStep) -> None:
        """A move that an event tells of: the next one about claims, or about requests."""
        told = self._of_claims if "c" in step.args else self._of_requests
        where = _show(step)
        if not told:
            self._report("T1", f"no event tells of {where}", where)
            return
        event = told.popleft()
        if event.event not in EVENTS[name]:
            self._report("T1", f"{event.event} is told of {where}", where)
        said = {"d": event.data.get("duration") or 0, "size": _granted(event)}
        args = {**step.args, **said, **self._of(event)}
        self._take(self._move(name), args, where)

    def _lose(self, name: str, step: PoolStep) -> None:
        """A block loses its content: each claim that this harms is told so in the operation."""
        self._number += 1
        loss = f"loss {self._number}"
        for claim in self._told_harmed:
            self.shadow.set(speaks, (loss, claim), True)
        args = {**step.args, "x": loss, "e": loss}
        for claim in self._take(self._move(name), args, _show(step)):
            self._told_harmed.pop(claim, None)
        for place in tuple(self.shadow.index[speaks, 0].get(loss, ())):
            self.shadow.set(speaks, place, False)

    def _of(self, event: Event) -> dict[str, Any]:
        """The event as the trace machine has it; the clock shows its time."""
        subject = _subject(event)
        about = speaks if event.claim_id is not None else answers
        self.shadow.set(about, (subject, subject), True)
        self.shadow.set(_clock, (), event.timestamp_ns)
        return {"x": subject, "e": event.seq}

    def _move(self, name: str) -> Step:
        """The move, compiled when it is first made."""
        if name not in self._moves:
            self._moves[name] = self._compiler.action(_own(name))
        return self._moves[name]

    def _take(self, move: Step, args: Mapping[str, Any], where: str) -> list[str]:
        """Judge a move and take it; the claims that it harmed."""
        self.moves += 1
        values = [args.get(param.name) for param in move.action.params]
        for number in move.broken(*values):
            guard = move.action.guards[number]
            self._report(guard.protects[0], f"not so: {guard.why}", where)
        harmed = []
        for table, place, value in move.changes(*values):
            if table is self._phases and value == _harmed != table.values.get(place, 0):
                harmed.append(place[0])
            table.set(place, value)
        return harmed

    def _report(self, rule: str, message: str, where: str) -> None:
        self.violations.append(Violation(rule, message, where))


@cache
def _own(name: str) -> Action:
    """The move without what the monitor does by itself: the pool's guards and updates."""
    action = HEARD.machine.action(name)
    return replace(
        action,
        guards=tuple(guard for guard in action.guards if guard.part != POOL.name),
        updates=tuple(u for u in action.updates if not _is_of_pool(u.target.symbol)),
    )


def _is_of_pool(symbol: Symbol) -> bool:
    return symbol.name.startswith(f"{POOL.name}_")


def _beside(pool: Shadow, whole: Shadow) -> Shadow:
    """The larger shadow, with the pool's state being that of the smaller one."""
    for symbol in pool.machine.symbols:
        whole.adopt(POOL.symbol(symbol), pool.tables[symbol])
    for sort in (CLAIM, REQUEST):
        whole.known[sort] = pool.known[sort]
    return whole


def _subject(event: Event) -> str:
    """Whom an event tells of, as the pool's steps call it."""
    if event.claim_id is not None:
        return f"{event.claim_id}#{event.generation}"
    return event.request_id or ""


def _is_clipped(event: Event) -> bool:
    return bool(event.data.get("decision") == Decision.CLIPPED.value)


def _granted(event: Event) -> int:
    """For how many blocks a claim was accepted."""
    granted = event.data.get("granted")
    return int(granted["n"]) if granted else 0


def _show(step: PoolStep) -> str:
    return f"{step.action}({', '.join(str(value) for value in step.args.values())})"
