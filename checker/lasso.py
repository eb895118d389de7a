"""Fair runs that never reach a goal: a way into a cycle, and the cycle.

A finite instance that fails a `Response` has a run of this shape.  Its steps that keep the goal
pending form a graph; a run that stays in it for ever ends up in one strongly connected component,
and is fair if it can meet there what fairness asks: of each kind of fair step one that is taken,
or a state in which none is enabled.  A strong kind asks for one taken, or none enabled anywhere;
where that fails, the states that enable it are taken out and the rest is decomposed again.  A
recurring kind asks for one taken, whatever is enabled; there a step that changes nothing counts.

A run may also stay where it is, where no fair step is enabled and none has to recur: its cycle has
no steps.

Where a kind recurs by assumption, each reachable state must have a fair run from it.  One that has
none would be passed over in silence: whatever must happen there would be said to happen.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any, Final

import networkx as nx

from kvclaims.checker.explore import Search, search
from kvclaims.checker.finite import Compiled, Instance, compile_instance, evaluator
from kvclaims.spec.interface import BadOperation
from kvclaims.spec.language import Var
from kvclaims.spec.progress import Recurring, Response, Steps

ENTRIES: Final = 64
"""States of a component from which a short cycle is sought."""

Step = tuple[int, int]
"""A ground action and the state that it leads to, by their numbers."""

Run = tuple[int, list[Step]]
"""The state in which a cycle begins, and the cycle."""


@dataclass(frozen=True)
class Lasso:
    """A run that goes on for ever: the initial state, the way in, and what is then repeated.

    With no cycle nothing happens any more; `dead` says that no step is enabled at all there, and
    `never` what is not done without end from there, on any fair run.
    """

    start: Mapping[str, str]
    stem: tuple[tuple[str, Mapping[str, str]], ...]
    cycle: tuple[tuple[str, Mapping[str, str]], ...]
    dead: bool = False
    never: str = ""

    def __len__(self) -> int:
        return len(self.stem) + len(self.cycle)

    @property
    def ending(self) -> str:
        if self.never:
            return f"and from here no run is fair: none in which {self.never} without end:"
        if self.cycle:
            return "then for ever:"
        return "and no step is possible:" if self.dead else "and nothing happens any more:"

    def lines(self) -> Iterator[str]:
        """The run, each step with the values that it changed."""
        before, number = self.start, 0
        for part, heading in ((self.stem, ""), (self.cycle, self.ending)):
            if heading:
                yield f"  {heading}" if part else f"  {heading} {_what_is(before)}"
            for label, after in part:
                number += 1
                changes = "; ".join(
                    f"{name}: {before[name]} → {value}"
                    for name, value in after.items()
                    if before[name] != value
                )
                yield f"  {number:3}. {label:32} {changes or 'nothing changes'}"
                before = after

    def to_json(self) -> dict[str, Any]:
        before = self.stem[-1][1] if self.stem else self.start
        return {
            "stem": [label for label, _ in self.stem],
            "cycle": [label for label, _ in self.cycle],
            "deadlock": self.dead,
            "stopped": self.never,
            "before": dict(before),
            "changes": [
                {name: value for name, value in after.items() if earlier[name] != value}
                for (_, after), earlier in zip(
                    self.cycle, [before, *(s for _, s in self.cycle)], strict=False
                )
            ],
        }


def _what_is(state: Mapping[str, str]) -> str:
    return ", ".join(f"{k} = {v}" for k, v in state.items() if v not in ("false", "0"))


class Graph:
    """The reachable states of an instance by number, and every step between them.

    Raises BadOperation where a limit cuts a step off: it would look like one not enabled.
    """

    def __init__(self, instance: Instance) -> None:
        self.compiled: Compiled = compile_instance(instance)
        self.found: Search = search(self.compiled)
        self.states = self.found.order
        number = {state: i for i, state in enumerate(self.states)}
        boundless = compile_instance(replace(instance, limits={}))
        self.steps: list[list[Step]] = []
        for state in self.states:
            steps = boundless.successors(state)
            if any(after not in number for _, after in steps):
                cut = next(a for a, after in steps if after not in number)
                raise BadOperation(
                    f"{self.compiled.actions[cut].label} passes a limit of the instance: "
                    f"progress cannot be told ({', '.join(instance.limits)})"
                )
            self.steps.append([(action, number[after]) for action, after in steps])
        self.came: list[tuple[int, ...]] = []
        """How each state was reached first: from where, by which ground action; nothing at the
        start."""
        self.depth: list[int] = []
        for state in self.states:
            link = self.found.parent[state]
            self.came.append((number[link[0]], link[1]) if link else ())
            self.depth.append(self.depth[number[link[0]]] + 1 if link else 0)

    @cached_property
    def idle(self) -> list[tuple[int, ...]]:
        """For each state the ground actions that are possible there and change nothing."""
        found = []
        for state, steps in zip(self.states, self.steps, strict=True):
            moving = {action for action, _ in steps}
            found.append(tuple(a for a in self.compiled.enabled(state) if a not in moving))
        return found

    def way_to(self, state: int) -> tuple[Mapping[str, str], list[Step]]:
        """The initial state, and a shortest run from it."""
        way = list[Step]()
        while link := self.came[state]:
            way.append((link[1], state))
            state = link[0]
        return self.compiled.show(self.states[state]), way[::-1]

    @property
    def instance(self) -> Instance:
        return self.compiled.instance

    def kinds(self, steps: Steps, bound: Mapping[str, int] | None = None) -> Iterator[set[int]]:
        """The ground actions of each kind; names in `bound` have that value only."""
        domains, found = {}, dict[tuple[int, ...], set[int]]()
        for name in steps.actions:
            for param in self.instance.machine.action(name).params:
                domains[param.name] = self.instance.choice(param)
        chosen = [[bound[n]] if bound and n in bound else domains[n] for n in steps.by]
        for values in product(*chosen):
            found[values] = set()
        for number, ground in enumerate(self.compiled.actions):
            if ground.name in steps.actions:
                params = self.instance.machine.action(ground.name).params
                named = dict(zip((p.name for p in params), ground.args, strict=True))
                at = tuple(named[n] for n in steps.by)
                if at in found:
                    found[at].add(number)
        yield from found.values()

    def told(self, steps: Iterable[Step]) -> tuple[tuple[str, Mapping[str, str]], ...]:
        return tuple(
            (self.compiled.actions[action].label, self.compiled.show(self.states[at]))
            for action, at in steps
        )


@dataclass(frozen=True)
class _Demand:
    """One kind of fair step, as fairness asks for it."""

    actions: frozenset[int]
    strong: bool
    recurring: bool


@dataclass
class Answer:
    """What the search for a lasso found.  `pending` counts the states, over all values of the
    response's variables, in which the goal is yet to come; none means that it was no test."""

    pending: int = 0
    lasso: Lasso | None = None
    values: Mapping[str, int] = field(default_factory=dict)


def seek(graph: Graph, response: Response) -> Answer:
    """A shortest lasso of those found, over every value of the response's variables; where there is
    none, a shortest way to a state from which no run is fair, if steps recur by assumption."""
    best = Answer()
    for values in product(*(graph.instance.domain(v.sort) for v in response.over)):
        ground = dict(zip(response.over, values, strict=True))
        one = _Seeker(graph, response, ground)
        best.pending += len(one.reach)
        run = min(one.runs(), key=one.length, default=None)
        if run and (best.lasso is None or one.length(run) < len(best.lasso)):
            best.lasso, best.values = one.told(*run), {v.name: i for v, i in ground.items()}
    if best.lasso is None:
        best.lasso = _stopped(graph, response)
    return best


def _stopped(graph: Graph, response: Response) -> Lasso | None:
    """A shortest way to a state from which steps that recur by assumption cannot do so on a fair
    run; None where there is no such state."""
    recurring = [fair.name for fair in response.fair if isinstance(fair, Recurring)]
    if not recurring:
        return None
    fair = _Fairness(graph, response)
    everywhere = range(len(graph.states))
    lively = {state for component in fair.components(everywhere) for state in component}
    going = _leading_to(graph, lively)
    stopped = [state for state in everywhere if state not in going]
    if not stopped:
        return None
    first = min(stopped, key=graph.depth.__getitem__)
    start, way = graph.way_to(first)
    return Lasso(start, graph.told(way), (), never=" and ".join(recurring))


def _leading_to(graph: Graph, goals: Collection[int]) -> set[int]:
    """The states from which one of these can be reached."""
    back: list[list[int]] = [[] for _ in graph.states]
    for before, steps in enumerate(graph.steps):
        for _, after in steps:
            back[after].append(before)
    found, front = set(goals), list(goals)
    while front:
        for before in back[front.pop()]:
            if before not in found:
                found.add(before)
                front.append(before)
    return found


class _Fairness:
    """What fairness asks of a run, for one choice of the response's variables or for all."""

    def __init__(
        self, graph: Graph, response: Response, bound: Mapping[str, int] | None = None
    ) -> None:
        self.graph = graph
        self.demands = [
            _Demand(frozenset(actions), fair.strong, isinstance(fair, Recurring))
            for fair in response.fair
            for actions in graph.kinds(fair)
        ]
        self.ceasing = {
            number
            for steps in response.ceasing
            for actions in graph.kinds(steps, bound)
            for number in actions
        }
        self._recurring = {n for d in self.demands if d.recurring for n in d.actions}
        self._recurring -= self.ceasing

    def steps(self, state: int, within: Collection[int]) -> Iterator[Step]:
        """Steps that may be repeated for ever and stay within."""
        for action, after in self.graph.steps[state]:
            if after in within and action not in self.ceasing:
                yield action, after
        if self._recurring:
            for action in self.graph.idle[state]:
                if action in self._recurring:
                    yield action, state

    def idle(self, state: int, demand: _Demand) -> bool:
        return not any(action in demand.actions for action, _ in self.graph.steps[state])

    def rests(self, state: int, demand: _Demand) -> bool:
        """Whether being in the state again and again meets the demand."""
        return not demand.strong and self.may_stay(state, demand)

    def may_stay(self, state: int, demand: _Demand) -> bool:
        """Whether a run that does nothing more in the state meets the demand."""
        return not demand.recurring and self.idle(state, demand)

    def components(self, states: Collection[int]) -> Iterator[set[int]]:
        """Sets of states in each of which a fair run can stay, and see all of it."""
        graph = nx.DiGraph()
        graph.add_nodes_from(states)
        within = set(states)
        graph.add_edges_from((s, after) for s in states for _, after in self.steps(s, within))
        for component in nx.strongly_connected_components(graph):
            yield from self._examine(component)

    def _examine(self, component: set[int]) -> Iterator[set[int]]:
        taken = {action for s in component for action, _ in self.steps(s, component)}
        for demand in self.demands:
            if taken & demand.actions:
                continue
            if demand.recurring:
                return
            idle = {s for s in component if self.idle(s, demand)}
            if not idle:
                return
            if demand.strong and idle != component:
                yield from self.components(idle)
                return
        yield component


class _Seeker:
    """One response for one choice of its variables."""

    def __init__(self, graph: Graph, response: Response, ground: Mapping[Var, int]) -> None:
        self.graph = graph
        bound = {v.name: value for v, value in ground.items()}
        self.fair = _Fairness(graph, response, bound)
        values = evaluator(graph.instance, [(response.premise, ground), (response.goal, ground)])
        judged = [values(state) for state in graph.states]
        self.reached = [bool(goal) for _, goal in judged]
        starts = [i for i, (premise, goal) in enumerate(judged) if premise and not goal]
        self.came: dict[int, tuple[int, ...]] = {}
        """How each state in which the goal is pending is reached from a premise: from where, by
        which action; nothing where the premise holds."""
        self.reach = self._pending(starts)

    def _pending(self, starts: Sequence[int]) -> dict[int, int]:
        """Each such state with the length of a shortest run through a premise to it."""
        reach: dict[int, int] = {}
        front: list[tuple[int, int, tuple[int, ...]]]
        front = [(self.graph.depth[i], i, ()) for i in starts]
        heapq.heapify(front)
        while front:
            cost, state, link = heapq.heappop(front)
            if state in reach:
                continue
            reach[state], self.came[state] = cost, link
            for action, after in self.graph.steps[state]:
                if not self.reached[after] and after not in reach:
                    heapq.heappush(front, (cost + 1, after, (state, action)))
        return reach

    def runs(self) -> Iterator[Run]:
        """A short run for each fair component."""
        for component in self.fair.components(self.reach):
            yield self._shortest(component)

    def length(self, run: Run) -> int:
        return self.reach[run[0]] + len(run[1])

    # -- the run

    def _shortest(self, component: set[int]) -> Run:
        entries = heapq.nsmallest(ENTRIES, component, key=self.reach.__getitem__)
        fair = self.fair
        still = [s for s in entries if all(fair.may_stay(s, d) for d in fair.demands)]
        if still:
            return still[0], []
        return min(((entry, self._cycle(entry, component)) for entry in entries), key=self.length)

    def told(self, entry: int, cycle: list[Step]) -> Lasso:
        """The run from the start, past a premise, into the cycle."""
        stem, state = list[Step](), entry
        while link := self.came[state]:
            stem.append((link[1], state))
            state = link[0]
        start, way = self.graph.way_to(state)
        told = self.graph.told
        dead = not cycle and not self.graph.steps[entry]
        return Lasso(start, told([*way, *stem[::-1]]), told(cycle), dead)

    def _cycle(self, entry: int, component: set[int]) -> list[Step]:
        """Back to the entry past a witness for each demand, always the nearest next.

        A strong demand is met by a step alone, unless nothing in the component enables it.
        """
        fair = self.fair
        unmet = [
            d
            for d in fair.demands
            if not fair.rests(entry, d)
            and not (d.strong and all(fair.idle(s, d) for s in component))
        ]
        cycle, here = list[Step](), entry
        while unmet:
            way = self._nearest(here, component, unmet, entry)
            for action, here in way:
                cycle.append((action, here))
                unmet = [d for d in unmet if action not in d.actions and not fair.rests(here, d)]
        if here != entry:
            cycle += self._nearest(here, component, [], entry)
        return cycle

    def _nearest(
        self, start: int, component: set[int], unmet: list[_Demand], entry: int
    ) -> list[Step]:
        """A shortest way to a step or state that meets a demand; to the entry if none is left."""
        came: dict[int, tuple[int, int]] = {}
        queue = deque([start])
        while queue:
            state = queue.popleft()
            for action, after in self.fair.steps(state, component):
                met = any(action in d.actions or self.fair.rests(after, d) for d in unmet)
                if met or (not unmet and after == entry):
                    return [*self._way(came, start, state), (action, after)]
                if after not in came and after != start:
                    came[after] = (state, action)
                    queue.append(after)
        raise AssertionError("a fair component has a witness for each demand")

    @staticmethod
    def _way(came: Mapping[int, tuple[int, int]], start: int, state: int) -> list[Step]:
        way = []
        while state != start:
            before, action = came[state]
            way.append((action, state))
            state = before
        return way[::-1]
