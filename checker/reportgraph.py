"""The transition graph beside a report: states grouped by claim phases, a run's path lit.

The drawing is `kvclaims.checker.statepage`; here the path is found.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from kvclaims.checker import instances, statepage
from kvclaims.checker.reporttimeline import Bar, Timeline
from kvclaims.checker.stategraph import StateGraph, state_graph
from kvclaims.spec.interface import BadOperation
from kvclaims.spec.vocabulary import Phase, Protection


@dataclass(frozen=True)
class Lit:
    """A page with a graph, and in words what is lit in it."""

    page: str
    said: str


def life_of_a_claim(line: Timeline | None) -> Lit:
    """The life of one claim, and in it the way of the claim that the run's story is about."""
    bar = _protagonist(line) if line is not None else None
    is_hard = bar is None or bar.told["protection"] == Protection.HARD
    graph = _one_claim(is_hard)
    if bar is None:
        return Lit(statepage.page(graph), "Every state that one claim can be in, and every step.")
    phases = [phase for _, phase in bar.spans]
    edges, left_at = walk(graph, phases)
    said = f"Lit: the way of claim {bar.name}, " + " → ".join([str(Phase.ABSENT), *phases]) + "."
    if left_at is not None:
        said += f" The machine has no step to {left_at}: there the run left the contract."
    return Lit(statepage.page(graph, edges), said)


@lru_cache
def _one_claim(is_hard: bool) -> StateGraph:
    return state_graph(instances.claims(generations=1, duration=1, hard=(int(is_hard),)))


def of_exploration(machine: str, settings: Mapping[str, str], steps: Sequence[str]) -> Lit:
    """An explored instance with a counterexample's steps lit; `BadOperation` if it is too large."""
    graph = state_graph(instances.instance(machine, settings), statepage.LIMIT)
    edges = follow(graph, steps)
    return Lit(statepage.page(graph, edges), f"Lit: the {len(edges)} steps of the counterexample.")


def _protagonist(line: Timeline) -> Bar | None:
    """The claim of the step that broke a rule, else the first that is blamed, else that is
    harmed, else the first."""
    for step, _ in line.broken:
        own = [bar for bar in line.claims if bar.told["claim"] == line.steps[step].subject]
        if own:
            return own[-1]
    blamed = [name for door in line.doors[::-1] for name in door.blockers]
    claims = {bar.told["claim"]: bar for bar in line.claims}
    for name in blamed:
        if name in claims:
            return claims[name]
    harmed = [bar for bar in line.claims if bar.spans and bar.spans[-1][1] == Phase.HARMED]
    return next(iter([*harmed, *line.claims]), None)


def walk(graph: StateGraph, phases: Sequence[str]) -> tuple[list[int], str | None]:
    """Edges of a shortest way through groups whose names end in these phases, one after the
    other; and the first phase that no step leads to, None where all were reached."""
    onward = _onward(graph)
    at = next(i for i, node in enumerate(graph.nodes) if node.initial)
    edges: list[int] = []
    for phase in phases:
        home = graph.nodes[at].group
        found = _reach(graph, onward, at, home, phase)
        if found is None:
            return edges, phase
        edges += found
        at = graph.edges[found[-1]].after if found else at
    return edges, None


def _reach(
    graph: StateGraph, onward: Sequence[Sequence[int]], at: int, home: str, phase: str
) -> list[int] | None:
    """A shortest way from a state, inside its group, to the next group."""
    if graph.nodes[at].group.endswith(f" {phase}"):
        return []
    ways: dict[int, list[int]] = {at: []}
    queue = deque([at])
    while queue:
        state = queue.popleft()
        for edge in onward[state]:
            after = graph.edges[edge].after
            if after in ways or graph.nodes[after].broken:
                continue
            way = ways[after] = [*ways[state], edge]
            if graph.nodes[after].group.endswith(f" {phase}"):
                return way
            if graph.nodes[after].group == home:
                queue.append(after)
    return None


def follow(graph: StateGraph, steps: Sequence[str]) -> list[int]:
    """The edges with these labels, one after the other from an initial state; they end where a
    label has no edge."""
    onward = _onward(graph)
    ends = [(i, ()) for i, node in enumerate(graph.nodes) if node.initial]
    ways: list[tuple[int, tuple[int, ...]]] = list(ends)
    for label in steps:
        further = [
            (graph.edges[edge].after, (*way, edge))
            for at, way in ways
            for edge in onward[at]
            if graph.edges[edge].label == label
        ]
        if not further:
            break
        ways = further
    return list(ways[0][1]) if ways else []


def _onward(graph: StateGraph) -> list[list[int]]:
    onward: list[list[int]] = [[] for _ in graph.nodes]
    for i, edge in enumerate(graph.edges):
        onward[edge.before].append(i)
    return onward


def graph_for(exploration: Mapping[str, object] | None, line: Timeline | None) -> Lit:
    """The graph that fits: of a broken exploration where there is one, else a claim's life."""
    if exploration is not None:
        try:
            return of_exploration(
                str(exploration["machine"]),
                {str(k): str(v) for k, v in dict(exploration["settings"]).items()},  # type: ignore[call-overload]
                [str(step) for step in list(exploration["steps"])],  # type: ignore[call-overload]
            )
        except BadOperation as error:
            other = life_of_a_claim(line)
            return Lit(other.page, f"{other.said} (The explored instance is not drawn: {error}.)")
    return life_of_a_claim(line)
