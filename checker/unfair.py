"""Must-fail twins of progress: what it rests on is left out, and a lasso shows what then happens.

Two tables in one.  Each assumption of a response, fairness or that some steps cease, is dropped
in turn: exactly the responses that make it break, or it was not needed.  And guards and updates
that progress rests on are altered, where no assumption could make up for them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final

from kvclaims.checker.instances import MACHINES, PINNED
from kvclaims.checker.lasso import Graph, Lasso
from kvclaims.checker.progress import check, watched
from kvclaims.checker.ranking import RESPONSES
from kvclaims.checker.verdicts import Progress
from kvclaims.spec import elastic, ends
from kvclaims.spec.language import (
    FALSE,
    Guard,
    Machine,
    MachineError,
    Update,
    becomes,
    without_guard,
)
from kvclaims.spec.progress import Response, Steps
from kvclaims.spec.vocabulary import Verdict

SHOWN_ON: Final = (
    "claims",
    "admission",
    "admission/claims",
    "admission/congestion",
    "elastic",
    "elastic/blocks",
    "elastic/claims",
    "events",
    "events/tiers",
    "ends",
    "ends/blocks",
)
"""The pinned instances on which faults are looked at: every response is put to the test on each
of its machine's, and a fault shows on one at least."""


def _as_declared(machine: Machine) -> Machine:
    return machine


@dataclass(frozen=True)
class Fault:
    """Something that progress rests on, left out; `breaks` are the names of the responses that
    must fail then, and no others."""

    machine: str
    what: str
    breaks: tuple[str, ...]
    alter: Callable[[Machine], Machine] = _as_declared
    drop: Steps | None = None
    on: str = ""
    """The one instance to look at, where one shows it and others are much larger by the fault."""


def _without(action: str, why: str) -> Callable[[Machine], Machine]:
    """The guard of those words left out."""

    def alter(machine: Machine) -> Machine:
        guards = machine.action(action).guards
        found = [i for i, guard in enumerate(guards) if guard.why == why]
        if len(found) != 1:
            raise MachineError(f"{machine.name}.{action} has no one guard {why!r}")
        return without_guard(machine, action, found[0])

    return alter


def _forgets(action: str, symbol: str) -> Callable[[Machine], Machine]:
    """The updates of a symbol left out of an action."""

    def alter(machine: Machine) -> Machine:
        whole = machine.action(action)
        kept = tuple(u for u in whole.updates if u.target.symbol.name != symbol)
        if kept == whole.updates:
            raise MachineError(f"{machine.name}.{action} does not update {symbol}")
        return machine.with_action(replace(whole, updates=kept))

    return alter


def _never(action: str) -> Callable[[Machine], Machine]:
    """An action that is never possible."""

    def alter(machine: Machine) -> Machine:
        whole = machine.action(action)
        guards = (*whole.guards, Guard(("V1",), FALSE, "never"))
        return machine.with_action(replace(whole, guards=guards))

    return alter


def _instead(action: str, update: Update) -> Callable[[Machine], Machine]:
    """Another update of a symbol in an action."""

    def alter(machine: Machine) -> Machine:
        machine = _forgets(action, update.target.symbol.name)(machine)
        whole = machine.action(action)
        return machine.with_action(replace(whole, updates=(*whole.updates, update)))

    return alter


_DECIDED: Final = "every submitted claim is decided"
_RUNS_OUT: Final = "every claim with a duration ends"
_RETURN: Final = "a return completes"
_UNDONE: Final = "a return that was turned back is undone"
_ANSWERED: Final = "every reset is answered"
_ENDS: Final = "every deferred request ends"

BY_HAND: Final = (
    Fault(
        "claims",
        "time passes, and no claim's clock runs",
        (_RUNS_OUT,),
        _forgets("tick", "left"),
    ),
    Fault(
        "claims",
        "time passes over a claim that waits for its decision",
        (_DECIDED,),
        _without("tick", "no claim waits for its decision"),
    ),
    Fault(
        "claims",
        "a claim that was submitted is neither accepted nor refused: time stops",
        (_DECIDED, _RUNS_OUT),
        lambda machine: _never("refuse")(_never("clip")(_never("accept")(machine))),
    ),
    Fault(
        "claims",
        "an answer that is not noted: time stops",
        (_DECIDED, _RUNS_OUT),
        lambda machine: _forgets("refuse", "phase")(
            _forgets("clip", "phase")(_forgets("accept", "phase")(machine))
        ),
    ),
    Fault(
        "admission",
        "deferrals by claims are not counted",
        (_ENDS, "the pool is not idle while a request waits"),
        _forgets("defer", "deferrals"),
    ),
    Fault(
        "admission",
        "smaller requests overtake one that waits",
        (_ENDS,),
        _without("admit", "nobody who came before it waits"),
    ),
    Fault(
        "admission",
        "the growth that pushed another out is lost",
        (_ENDS,),
        lambda machine: _forgets("push_out", "need")(_forgets("push_out", "todo")(machine)),
    ),
    Fault(
        "elastic",
        "what is let go of behind the fence is handed out again",
        (_RETURN,),
        _instead("leave", becomes(elastic.free(elastic.b), True)),
        on="elastic",
    ),
    Fault(
        "elastic",
        "a new reader delays the return for ever",
        (_RETURN,),
        _without("touch", "a request holds the block"),
    ),
    Fault(
        "elastic",
        "a drained block is still found",
        (_RETURN,),
        _forgets("drain", "hashed"),
    ),
    Fault(
        "events",
        "what is in a tier that was cleared is still found",
        (_ANSWERED,),
        _forgets("clear", "visible"),
    ),
    Fault(
        "events",
        "what was put back is to be put back for ever",
        (_ANSWERED,),
        _forgets("put_back", "evicted"),
    ),
    Fault(
        "ends",
        "steps go on being sent for a request that has ended",
        ("every end gives everything back",),
        _instead(
            "dispatch",
            becomes(
                ends.touches(ends.j, ends.r, ends.b),
                ends.touches(ends.j, ends.r, ends.b) | ends.held(ends.r, ends.b),
                over=(ends.r, ends.b),
            ),
        ),
    ),
)


def faults() -> Iterator[Fault]:
    """Every assumption left out, then what was chosen by hand."""
    for machine, responses in RESPONSES.items():
        for steps in dict.fromkeys(s for r in responses for s in (*r.fair, *r.ceasing)):
            names = tuple(r.name for r in responses if steps in (*r.fair, *r.ceasing))
            ceasing = any(steps in r.ceasing for r in responses)
            what = f"for ever: {steps.name}" if ceasing else f"never: {steps.name}"
            yield Fault(machine, what, names, drop=steps)
    yield from BY_HAND


@dataclass(frozen=True)
class Fate:
    """What became of a fault: the responses that it broke, and the shortest lasso of the first
    that it must break."""

    fault: Fault
    broken: tuple[str, ...]
    rules: tuple[str, ...]
    lasso: Lasso | None
    seconds: float

    @property
    def killed(self) -> bool:
        return bool(self.broken) and set(self.broken) == set(self.fault.breaks)

    def to_json(self) -> dict[str, Any]:
        return {
            "machine": self.fault.machine,
            "fault": self.fault.what,
            "rules": list(self.rules),
            "breaks": list(self.fault.breaks),
            "broken": list(self.broken),
            "killed": self.killed,
            "lasso": self.lasso.to_json() if self.lasso else None,
            "seconds": round(self.seconds, 3),
        }

    def __str__(self) -> str:
        fate = f"breaks {' '.join(self.rules)}"
        if not self.killed:
            wanted, got = (
                ", ".join(names) or "nothing" for names in (self.fault.breaks, self.broken)
            )
            fate = f"SURVIVES: expected {wanted}, got {got}"
        how = ""
        if self.lasso is not None and self.lasso.never:
            how = (
                f" by {len(self.lasso.stem)} steps, after which it is over that {self.lasso.never}"
            )
        elif self.lasso is not None:
            how = f" by {len(self.lasso.stem)} steps and a cycle of {len(self.lasso.cycle)}"
        return f"{self.fault.machine}: “{self.fault.what}” {fate}{how}"


@dataclass(frozen=True)
class FateReport:
    twins: tuple[Fate, ...]
    seconds: float

    @property
    def verdict(self) -> Verdict:
        if not self.twins:
            return Verdict.VACUOUS
        return Verdict.HOLDS if all(fate.killed for fate in self.twins) else Verdict.VIOLATED

    def to_json(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "seconds": round(self.seconds, 3),
            "killed": sum(fate.killed for fate in self.twins),
            "twins": [fate.to_json() for fate in self.twins],
        }

    def lines(self) -> Iterator[str]:
        yield from map(str, self.twins)
        killed = sum(fate.killed for fate in self.twins)
        yield (
            f"{self.verdict}: {killed} of {len(self.twins)} things that progress rests on break "
            f"exactly it when left out, {self.seconds:.1f} s"
        )


def fate(fault: Fault) -> Fate:
    """The fault on the instances of its machine."""
    start = time.perf_counter()
    declared = MACHINES[fault.machine]
    responses = [_dropping(r, fault.drop) for r in RESPONSES[fault.machine]]
    shortest: dict[str, Lasso] = {}
    rules: dict[str, None] = {}
    for name in SHOWN_ON:
        instance = PINNED[name]()
        if instance.machine is not declared or fault.on not in ("", name):
            continue
        if fault.drop is None:
            altered = replace(instance, machine=fault.alter(declared))
            graph = Graph(watched(altered, RESPONSES[fault.machine]))
        else:
            graph = _whole(name)
        for each in check(graph, responses, name):
            if each.lasso is None:
                continue
            rules[each.response.rule] = None
            known = shortest.get(each.response.name)
            if known is None or len(each.lasso) < len(known):
                shortest[each.response.name] = each.lasso
    return Fate(
        fault,
        tuple(sorted(shortest)),
        tuple(sorted(rules)),
        shortest.get(fault.breaks[0]),
        time.perf_counter() - start,
    )


@lru_cache
def _whole(name: str) -> Graph:
    """The graph of a pinned instance, which assumptions left out do not change."""
    instance = PINNED[name]()
    return Graph(watched(instance, RESPONSES[instance.machine.name]))


def _dropping(response: Response, steps: Steps | None) -> Response:
    return replace(
        response,
        fair=tuple(f for f in response.fair if f != steps),
        ceasing=tuple(s for s in response.ceasing if s != steps),
    )


def run_unfair(progress: Progress | None = None, chosen: Sequence[Fault] = ()) -> FateReport:
    """Every fault, or those chosen."""
    start = time.perf_counter()
    done = []
    for fault in chosen or tuple(faults()):
        done.append(fate(fault))
        if progress:
            progress(str(done[-1]))
    return FateReport(tuple(done), time.perf_counter() - start)
