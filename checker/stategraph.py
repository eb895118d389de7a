"""The graph of an instance's states and steps, for people and for other tools.

A state is labelled by the values that differ from the initial state, a step by its action and
arguments.  States that break a rule are in the graph, marked with what they break, and nothing
leads on from them; steps that break a rule are marked too.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import networkx as nx
import pydot

from kvclaims.checker.explore import Search, search
from kvclaims.checker.finite import Compiled, Instance, State, compile_instance
from kvclaims.spec.interface import BadOperation
from kvclaims.spec.language import Symbol

LIMIT: Final = 20_000
"""States past which a graph is for counting, not for looking at."""


@dataclass(frozen=True)
class StateNode:
    """`depth` is the length of a shortest run that leads here; `broken` are rules with names."""

    depth: int
    initial: bool
    values: Mapping[str, str]
    label: str
    group: str
    broken: tuple[str, ...]


@dataclass(frozen=True)
class StepEdge:
    before: int
    after: int
    label: str
    action: str
    broken: tuple[str, ...]


@dataclass(frozen=True)
class StateGraph:
    machine: str
    meaning: str
    nodes: tuple[StateNode, ...]
    edges: tuple[StepEdge, ...]


def state_graph(instance: Instance, limit: int = LIMIT) -> StateGraph:
    """Every reachable state and step.  Raises BadOperation past `limit` states."""
    return _Drawing(compile_instance(instance)).graph(limit)


class _Drawing:
    def __init__(self, compiled: Compiled) -> None:
        self.compiled = compiled
        self.properties = compiled.instance.machine.properties
        self.start = compiled.initial[0] if compiled.initial else ()
        self.grouping = grouping(compiled.instance)

    def graph(self, limit: int) -> StateGraph:
        compiled = self.compiled
        found = search(compiled)
        if len(found.order) > limit:
            raise BadOperation(
                f"{len(found.order):,} states are too many for this form of graph (limit "
                f"{limit:,}): choose a smaller instance with --set, or export promela or tla"
            )
        numbers = {state: i for i, state in enumerate(found.order)}
        for state in compiled.initial:
            numbers.setdefault(state, len(numbers))
        edges: list[StepEdge] = []
        for state in found.order:
            for action, after in compiled.successors(state):
                number = numbers.setdefault(after, len(numbers))
                edges.append(self._edge(numbers[state], number, action, state, after))
        depths = self._depths(len(numbers), numbers, edges)
        nodes = tuple(self._node(state, depths[i], found) for state, i in numbers.items())
        machine = compiled.instance.machine
        return StateGraph(machine.name, machine.meaning, nodes, tuple(edges))

    def _depths(self, count: int, numbers: Mapping[State, int], edges: list[StepEdge]) -> list[int]:
        """Breadth first over the edges, which stand in the order of their first ends."""
        depths = [-1] * count
        for state in self.compiled.initial:
            depths[numbers[state]] = 0
        for edge in edges:
            if depths[edge.after] < 0:
                depths[edge.after] = depths[edge.before] + 1
        return depths

    def _node(self, state: State, depth: int, found: Search) -> StateNode:
        values = self.compiled.show(state)
        normal = self.compiled.show(self.start)
        changed = [f"{name} = {v}" for name, v in values.items() if v != normal[name]]
        initial = found.parent.get(state, 0) is None
        return StateNode(
            depth=depth,
            initial=initial,
            values=values,
            label="\n".join(changed) or "initial",
            group=self._group(values, depth),
            broken=self._names(self.compiled.broken(state)),
        )

    def _edge(self, before: int, after: int, action: int, old: State, new: State) -> StepEdge:
        step = self.compiled.actions[action]
        broken = self._names(self.compiled.misstep(action, old, new))
        return StepEdge(before, after, step.label, step.name, broken)

    def _names(self, broken: list[int]) -> tuple[str, ...]:
        return tuple(f"{self.properties[i].rule} {self.properties[i].name}" for i in broken)

    def _group(self, values: Mapping[str, str], depth: int) -> str:
        if self.grouping is None:
            return f"{depth} steps"
        head = f"{self.grouping.name}("
        parts = [
            f"{name.removeprefix(head).removesuffix(')')} {value}"
            for name, value in values.items()
            if name.startswith(head)
        ]
        return ", ".join(parts) or values.get(self.grouping.name, "all")


def grouping(instance: Instance) -> Symbol | None:
    """By what states are grouped: the phases of claims where a machine has claims, else the
    first symbol of an enumerated sort; None where there is none."""
    named = [s for s in instance.machine.symbols if s.range.values and not s.rigid]
    of_claims = [s for s in named if "Claim" in (sort.name for sort in s.domain)]
    return next(iter(of_claims or named), None)


def as_networkx(graph: StateGraph) -> nx.MultiDiGraph:
    """Values of states and of steps are attributes; `broken` is empty where nothing is."""
    whole = nx.MultiDiGraph(machine=graph.machine)
    for i, node in enumerate(graph.nodes):
        whole.add_node(
            i,
            initial=node.initial,
            depth=node.depth,
            label=node.label,
            group=node.group,
            broken="; ".join(node.broken),
            **node.values,
        )
    for edge in graph.edges:
        whole.add_edge(
            edge.before,
            edge.after,
            label=edge.label,
            action=edge.action,
            broken="; ".join(edge.broken),
        )
    return whole


def graphml(graph: StateGraph) -> str:
    text = io.BytesIO()
    nx.write_graphml(as_networkx(graph), text)
    return text.getvalue().decode()


def dot(graph: StateGraph) -> str:
    """For Graphviz: initial states in bold, what breaks a rule in red."""
    whole = pydot.Dot(graph.machine, graph_type="digraph", rankdir="LR")
    whole.set_node_defaults(shape="box", fontname="sans-serif", fontsize="10")
    whole.set_edge_defaults(fontname="sans-serif", fontsize="9")
    for i, node in enumerate(graph.nodes):
        whole.add_node(pydot.Node(str(i), **dict(_look(node))))
    for edge in graph.edges:
        look = {"label": _quoted("\n".join((edge.label, *edge.broken)))}
        if edge.broken:
            look |= {"color": "red", "fontcolor": "red"}
        whole.add_edge(pydot.Edge(str(edge.before), str(edge.after), **look))
    text: str = whole.to_string()
    return text


def _look(node: StateNode) -> Iterator[tuple[str, str]]:
    yield "label", _quoted("\n".join((node.label, *node.broken)))
    if node.initial:
        yield "style", "bold"
    if node.broken:
        yield "color", "red"
        yield "fontcolor", "red"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
