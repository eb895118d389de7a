"""Breadth-first exploration of a finite instance: exact counts, shortest counterexamples.

States past a broken rule are not entered, so every counterexample is a shortest path to the
first step that breaks its rule.  Steps that change nothing are no transitions.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import networkx as nx

from kvclaims.checker import instances
from kvclaims.checker.finite import Compiled, Instance, State, compile_instance
from kvclaims.checker.verdicts import Progress
from kvclaims.spec.interface import BadOperation
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
        }

    def lines(self) -> Iterator[str]:
        rate = int(self.states / self.seconds) if self.seconds else 0
        yield (
            f"{self.machine}: {self.verdict}: {self.states:,} states, {self.transitions:,} "
            f"transitions, depth {self.depth}, {self.seconds:.2f} s ({rate:,} states/s)"
        )
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


def search(compiled: Compiled, trusted: Trusted | None = None) -> Search:
    """Cover the instance breadth first."""
    found = Search([], {}, {}, Counter(), 0, 0)
    frontier: list[State] = []
    for state in compiled.initial:
        found.parent[state] = None
        bad = compiled.broken(state)
        for number in bad:
            found.broken.setdefault(number, state)
        if not bad:
            frontier.append(state)
    while frontier:
        found.order += frontier
        found.depth += 1
        frontier = _next_level(compiled, found, frontier, trusted)
    return found


def _next_level(
    compiled: Compiled, found: Search, frontier: list[State], trusted: Trusted | None
) -> list[State]:
    following: list[State] = []
    parent, fired = found.parent, found.fired
    for state in frontier:
        safe = trusted is not None and state in trusted.states
        for action, after in compiled.successors(state):
            fired[action] += 1
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


def explore(
    machine: str, settings: Mapping[str, str] | None = None, progress: Progress | None = None
) -> ExploreReport:
    """Explore a pinned instance, or one with other settings.  Raises BadOperation."""
    settings = settings or {}
    report = explore_instance(instances.instance(machine, settings), machine)
    report.settings = settings
    if progress:
        progress(next(report.lines()))
    return report


def explore_instance(instance: Instance, name: str) -> ExploreReport:
    start = time.perf_counter()
    compiled = compile_instance(instance)
    found = search(compiled)
    fired = {action.name: 0 for action in instance.machine.actions}
    for number, times in found.fired.items():
        fired[compiled.actions[number].name] += times
    return ExploreReport(
        machine=name,
        states=len(found.order),
        transitions=found.transitions,
        depth=found.depth - 1,
        seconds=time.perf_counter() - start,
        fired=fired,
        counterexamples=tuple(counterexamples(compiled, found)),
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


def transition_graph(compiled: Compiled, limit: int = 20_000) -> nx.MultiDiGraph:
    """The reachable states as nodes (attributes: the state's values), steps as labelled edges.

    Raises BadOperation past `limit` states: such a graph is for counting, not for looking at.
    """
    found = search(compiled)
    if len(found.order) > limit:
        raise BadOperation(
            f"{len(found.order):,} states are too many for a graph (limit {limit:,})"
        )
    number = {state: i for i, state in enumerate(found.order)}
    graph = nx.MultiDiGraph(machine=compiled.instance.machine.name)
    for state, i in number.items():
        graph.add_node(i, initial=found.parent[state] is None, **compiled.show(state))
    for state, i in number.items():
        for action, after in compiled.successors(state):
            if after in number:
                graph.add_edge(
                    i,
                    number[after],
                    label=compiled.actions[action].label,
                    action=compiled.actions[action].name,
                )
    return graph


def export(machine: str, settings: Mapping[str, str], path: Path) -> None:
    """Write the transition graph of an instance as GraphML or DOT, by the file's ending.

    Raises BadOperation for another ending, a graph too large to look at, or a path that cannot
    be written.
    """
    if path.suffix not in (".graphml", ".dot"):
        raise BadOperation(f"cannot export {path.name!r} (known: .graphml, .dot)")
    graph = transition_graph(compile_instance(instances.instance(machine, settings)))
    try:
        if path.suffix == ".graphml":
            nx.write_graphml(graph, path)
        else:
            path.write_text(_dot(graph), encoding="utf-8")
    except OSError as error:
        raise BadOperation(f"cannot write {path}: {error.strerror}") from None


def _dot(graph: nx.MultiDiGraph) -> str:
    """States by number and steps by name; pydot wants labels quoted."""
    bare = nx.MultiDiGraph()
    bare.add_nodes_from(graph)
    for before, after, label in graph.edges(data="label"):
        bare.add_edge(before, after, label=f'"{label}"')
    text: str = nx.nx_pydot.to_pydot(bare).to_string()
    return text
