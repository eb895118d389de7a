"""Breadth-first exploration of a finite instance: exact counts, shortest counterexamples.

States past a broken rule are not entered, so every counterexample is a shortest path to the
first step that breaks its rule.  Steps that change nothing are no transitions, but properties
of steps are checked on them too.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvclaims.checker import instances
from kvclaims.checker.finite import Compiled, Instance, State, compile_instance
from kvclaims.checker.symmetry import Symmetry, symmetry
from kvclaims.checker.verdicts import Progress
from kvclaims.spec.language import Property
from kvclaims.spec.vocabulary import Verdict


@dataclass(frozen=True)
class Counterexample:
    """A shortest run that breaks a rule: the initial state, then (step, state) pairs."""

    prop: Property
    start: Mapping[str, str]
    steps: tuple[tuple[str, Mapping[str, str]], ...]

    def lines(self) -> Iterator[str]:
        """The run, each step with the values that it changed."""
        yield f"{self.prop.rule} {self.prop.name}: {self.prop.meaning}"
        before = self.start
        for number, (label, after) in enumerate(self.steps, 1):
            changes = (
                f"{name}: {before[name]} → {value}"
                for name, value in after.items()
                if before[name] != value
            )
            yield f"  {number}. {label:32} {'; '.join(changes)}"
            before = after

    def to_json(self) -> dict[str, Any]:
        return {
            "rule": self.prop.rule,
            "property": self.prop.name,
            "meaning": self.prop.meaning,
            "steps": [label for label, _ in self.steps],
            "before": dict(self.steps[-2][1] if len(self.steps) > 1 else self.start),
            "after": dict(self.steps[-1][1] if self.steps else self.start),
        }


@dataclass
class ExploreReport:
    """What one exploration covered.  `fired` counts the transitions of each action."""

    machine: str
    states: int
    transitions: int
    depth: int
    seconds: float
    fired: Mapping[str, int]
    counterexamples: tuple[Counterexample, ...] = ()
    engine: str = "explicit, compiled Python"
    settings: Mapping[str, str] = field(default_factory=dict)
    representatives: int | None = None
    """How many states were expanded for all of them, where symmetry was used."""
    memory: Mapping[str, int | str] = field(default_factory=dict)
    """The set of visited states, bytes taken, bytes needed at most and allowed; where known."""

    @property
    def never_fired(self) -> tuple[str, ...]:
        return tuple(name for name, times in self.fired.items() if not times)

    @property
    def verdict(self) -> Verdict:
        if self.counterexamples:
            return Verdict.VIOLATED
        return Verdict.HOLDS if self.transitions else Verdict.VACUOUS

    def to_json(self) -> dict[str, Any]:
        return {
            "machine": self.machine,
            "settings": dict(self.settings),
            "verdict": self.verdict,
            "states": self.states,
            "transitions": self.transitions,
            "depth": self.depth,
            "engine": self.engine,
            "seconds": round(self.seconds, 3),
            "fired": dict(self.fired),
            "never_fired": list(self.never_fired),
            "counterexamples": [c.to_json() for c in self.counterexamples],
            **({"representatives": self.representatives} if self.representatives else {}),
            **({"memory": dict(self.memory)} if self.memory else {}),
        }

    def lines(self) -> Iterator[str]:
        rate = int((self.representatives or self.states) / self.seconds) if self.seconds else 0
        yield (
            f"{self.machine}: {self.verdict}: {self.states:,} states, {self.transitions:,} "
            f"transitions, depth {self.depth}, {self.seconds:.2f} s ({rate:,} states/s)"
        )
        if self.representatives:
            yield (
                f"  by symmetry {self.representatives:,} representatives stand for them "
                f"({self.states / self.representatives:.1f} states each)"
            )
        if "taken" in self.memory and "allowed" in self.memory:
            taken, allowed = self.memory["taken"], self.memory["allowed"]
            yield f"  {self.engine}: {taken:,} of {allowed:,} bytes taken"
        if self.never_fired:
            yield f"  never fired here: {', '.join(self.never_fired)}"
        for counterexample in self.counterexamples:
            yield from counterexample.lines()


@dataclass
class Search:
    """The states in the order found, how each was reached, and what was broken first."""

    order: list[State]
    parent: dict[State, tuple[State, int] | None]
    broken: dict[int, tuple[State, int, State] | State]
    fired: Counter[int]
    transitions: int
    depth: int


@dataclass(frozen=True)
class Trusted:
    """What a search may take as checked: in these states every step keeps every rule, except
    steps of the action `altered`.  A machine that differs in one action only inherits this from
    the complete search of the other."""

    states: Mapping[State, Any]
    altered: str


def search(
    compiled: Compiled,
    trusted: Trusted | None = None,
    same: Symmetry | None = None,
    until: frozenset[int] = frozenset(),
) -> Search:
    """Cover the instance breadth first, or up to the level that breaks a property of `until`; of
    states that are the `same` one representative, whose steps count for all that it stands for.
    """
    found = Search([], {}, {}, Counter(), 0, 0)
    frontier: list[State] = []
    for state in compiled.initial:
        if same and state != same.representative(state):
            continue
        found.parent[state] = None
        bad = compiled.broken(state)
        for number in bad:
            found.broken.setdefault(number, state)
        if not bad:
            frontier.append(state)
    while frontier and not until & found.broken.keys():
        found.order += frontier
        found.depth += 1
        frontier = _next_level(compiled, found, frontier, trusted, same)
    return found


def _next_level(
    compiled: Compiled,
    found: Search,
    frontier: list[State],
    trusted: Trusted | None,
    same: Symmetry | None,
) -> list[State]:
    following: list[State] = []
    parent, fired = found.parent, found.fired
    for state in frontier:
        safe = trusted is not None and state in trusted.states
        for action, number in compiled.idle(state):
            if not (safe and trusted and compiled.actions[action].name != trusted.altered):
                found.broken.setdefault(number, (state, action, state))
        weight = same.orbit(state) if same else 1
        for action, after in compiled.successors(state):
            fired[action] += weight
            if same:
                _judge(compiled, found, state, action, after)
                after = same.representative(after)  # noqa: PLW2901
                if after not in parent and not compiled.broken(after):
                    parent[after] = (state, action)
                    following.append(after)
                continue
            if safe and trusted and compiled.actions[action].name != trusted.altered:
                if after not in parent:
                    parent[after] = (state, action)
                    following.append(after)
                continue
            bad = compiled.misstep(action, state, after)
            if after not in parent:
                bad += compiled.broken(after)
                if not bad:
                    parent[after] = (state, action)
                    following.append(after)
            for number in bad:
                found.broken.setdefault(number, (state, action, after))
    found.transitions = fired.total()
    return following


def _judge(compiled: Compiled, found: Search, state: State, action: int, after: State) -> None:
    for number in (*compiled.misstep(action, state, after), *compiled.broken(after)):
        found.broken.setdefault(number, (state, action, after))


def explore(
    machine: str,
    settings: Mapping[str, str] | None = None,
    progress: Progress | None = None,
    symmetric: bool = False,
) -> ExploreReport:
    """Explore a pinned instance, or one with other settings.  Raises BadOperation."""
    settings = settings or {}
    report = explore_instance(instances.instance(machine, settings), machine, symmetric)
    report.settings = settings
    if progress:
        progress(next(report.lines()))
    return report


def explore_instance(instance: Instance, name: str, symmetric: bool = False) -> ExploreReport:
    """The report of an instance; `symmetric` expands one of all states that differ in names
    only.  What is broken is shown by a run of states as they are."""
    start = time.perf_counter()
    compiled = compile_instance(instance)
    same = symmetry(instance, compiled.slots) if symmetric else None
    found = search(compiled, same=same)
    fired = {action.name: 0 for action in instance.machine.actions}
    for number, times in found.fired.items():
        fired[compiled.actions[number].name] += times
    return ExploreReport(
        machine=name,
        states=sum(map(same.orbit, found.order)) if same else len(found.order),
        transitions=found.transitions,
        depth=found.depth - 1,
        seconds=time.perf_counter() - start,
        fired=fired,
        counterexamples=tuple(
            counterexamples(compiled, search(compiled) if same and found.broken else found)
        ),
        representatives=len(found.order) if same else None,
    )


def counterexamples(compiled: Compiled, found: Search) -> Iterator[Counterexample]:
    """One shortest run for each property that was broken."""
    for number, where in sorted(found.broken.items()):
        prop = compiled.instance.machine.properties[number]
        if len(where) == 3 and isinstance(where[0], tuple):
            before, action, after = where
            path = [*_path(found, before), (action, after)]
            start = _start(found, before)
        else:
            path, start = [], where
        steps = tuple((compiled.actions[a].label, compiled.show(s)) for a, s in path)
        yield Counterexample(prop, compiled.show(start), steps)


def _path(found: Search, state: State) -> list[tuple[int, State]]:
    steps = []
    while (link := found.parent[state]) is not None:
        steps.append((link[1], state))
        state = link[0]
    return steps[::-1]


def _start(found: Search, state: State) -> State:
    while (link := found.parent[state]) is not None:
        state = link[0]
    return state
