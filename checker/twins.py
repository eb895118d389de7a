"""Must-fail twins of the machines: each guard left out in turn breaks exactly its rules.

A check that stays green when its guard is gone shows nothing.  Every twin is searched in all
pinned instances of its machine, from what is known of the whole one (`checker.altered`); the rules
that break are held against what the guard is declared to protect, and a shortest run that breaks
the first of them is kept.  Of the composed
machine the guards that couple its parts have twins here; the others have theirs in the part.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from kvclaims.checker.altered import Known, instances_of, pinned, search_altered
from kvclaims.checker.explore import Counterexample, Trusted, counterexamples, search
from kvclaims.checker.finite import compile_instance
from kvclaims.checker.instances import MACHINES
from kvclaims.checker.slices import SLICES
from kvclaims.checker.verdicts import Progress
from kvclaims.checker.workers import processes
from kvclaims.spec.composed import RUNTIME
from kvclaims.spec.language import Guard, Machine, MachineError, without_guard
from kvclaims.spec.vocabulary import Verdict


@dataclass(frozen=True)
class Twin:
    """One guard left out.  `broken` are the rules that some run of the twin breaks."""

    machine: str
    action: str
    guard: str
    protects: tuple[str, ...]
    broken: tuple[str, ...]
    shortest: Counterexample | None
    seconds: float

    @property
    def killed(self) -> bool:
        return bool(self.broken) and set(self.broken) == set(self.protects)

    def to_json(self) -> dict[str, Any]:
        return {
            "machine": self.machine,
            "action": self.action,
            "guard": self.guard,
            "rule": self.protects[0],
            "protects": list(self.protects),
            "broken": list(self.broken),
            "killed": self.killed,
            "steps": len(self.shortest.steps) if self.shortest else None,
            "counterexample": self.shortest.to_json() if self.shortest else None,
            "seconds": round(self.seconds, 3),
        }

    def __str__(self) -> str:
        fate = (
            "breaks" if self.killed else "SURVIVES: expected " + " ".join(self.protects) + ", got"
        )
        steps = f" in {len(self.shortest.steps)} steps" if self.shortest else ""
        return (
            f"{self.machine}.{self.action} without “{self.guard}” {fate} "
            f"{' '.join(self.broken) or 'nothing'}{steps}"
        )


@dataclass(frozen=True)
class TwinReport:
    twins: tuple[Twin, ...]
    seconds: float

    @property
    def verdict(self) -> Verdict:
        if not self.twins:
            return Verdict.VACUOUS
        return Verdict.HOLDS if all(twin.killed for twin in self.twins) else Verdict.VIOLATED

    def to_json(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "seconds": round(self.seconds, 3),
            "killed": sum(twin.killed for twin in self.twins),
            "twins": [twin.to_json() for twin in self.twins],
        }

    def lines(self) -> Iterator[str]:
        yield from map(str, self.twins)
        killed = sum(twin.killed for twin in self.twins)
        yield (
            f"{self.verdict}: {killed} of {len(self.twins)} guards break exactly their rules "
            f"when left out, {self.seconds:.1f} s"
        )


def guards() -> Iterator[tuple[str, str, int]]:
    """Every guard, by machine, action and position, where it was declared."""
    for machine in (*MACHINES.values(), RUNTIME.machine):
        for action in machine.actions:
            for index, guard in enumerate(action.guards):
                if not guard.part:
                    yield machine.name, action.name, index


def twin(machine: str, action: str, index: int) -> Twin:
    """What breaks without the guard, in all pinned instances, and a shortest run in the smallest
    instance that breaks the first of its rules."""
    start = time.perf_counter()
    declared = RUNTIME.machine if machine == RUNTIME.name else MACHINES[machine]
    guard = declared.action(action).guards[index]
    broken: set[str] = set()
    shortest: Counterexample | None = None
    for known, altered in _without(machine, action, guard):
        found = search_altered(known, altered, action)
        rules = {altered.properties[number].rule for number in found.broken}
        if not found.finished:
            raise MachineError(f"{known.name} without {guard.why!r} has too many states")
        broken |= rules
        if shortest is None and guard.protects[0] in rules:
            shortest = _shortest(known, altered, action, guard.protects[0])
    return Twin(
        machine,
        action,
        guard.why,
        guard.protects,
        tuple(sorted(broken)),
        shortest,
        time.perf_counter() - start,
    )


def _without(machine: str, action: str, guard: Guard) -> Iterator[tuple[Known, Machine]]:
    """The instances in which the action has the guard, and what remains of each without it."""
    composed = machine == RUNTIME.name
    for name in SLICES if composed else instances_of(machine):
        known = _slice(name) if composed else pinned(name)
        actions = known.instance.machine.actions
        guards = next((a.guards for a in actions if a.name == action), ())
        if guard in guards:
            at = guards.index(guard)
            yield known, without_guard(known.instance.machine, action, at)


@lru_cache
def _slice(name: str) -> Known:
    return Known(SLICES[name](), name)


def _shortest(known: Known, altered: Machine, action: str, rule: str) -> Counterexample:
    """A shortest run of the altered machine that breaks the rule, which some run does."""
    numbers = frozenset(i for i, prop in enumerate(altered.properties) if prop.rule == rule)
    compiled = compile_instance(replace(known.instance, machine=altered))
    found = search(compiled, Trusted(known.number, action), until=numbers)
    return min(
        (c for c in counterexamples(compiled, found) if c.prop.rule == rule),
        key=lambda counterexample: len(counterexample.steps),
    )


def run_twins(progress: Progress | None = None, workers: int = 2) -> TwinReport:
    """Explore every twin, on `workers` processes."""
    start = time.perf_counter()
    done = []
    with processes(workers, fresh=False) as pool:
        for found in pool.map(twin, *zip(*guards(), strict=True)):
            done.append(found)
            if progress:
                progress(str(found))
    return TwinReport(tuple(done), time.perf_counter() - start)
