"""Progress on finite instances: that what must happen does, and a lasso where it does not.

The declarations (`spec.progress`) stand beside their machines; here they are listed, run on
instances, and broken on purpose: each assumption of fairness left out in turn, and guards and
updates that progress rests on, must give a lasso, and break exactly the rules named.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from kvclaims.checker import instances
from kvclaims.checker.explore import Search, search
from kvclaims.checker.finite import Compiled, Instance, State, compile_instance, evaluator
from kvclaims.checker.lasso import Graph, Lasso, seek
from kvclaims.checker.ranking import RESPONSES
from kvclaims.checker.verdicts import Progress, Report, counted, worst
from kvclaims.spec import arbitration, pool
from kvclaims.spec.language import (
    FALSE,
    App,
    Machine,
    Symbol,
    Term,
    subterms,
)
from kvclaims.spec.progress import Response
from kvclaims.spec.vocabulary import RULES, Verdict

REST: Final[Mapping[str, Term]] = {
    pool.POOL.name: pool.AT_REST,
    arbitration.ARBITRATION.name: arbitration.AT_REST,
}
"""Where a machine may stop, by name; the others never may."""

MOST_STATES: Final = 50_000
"""Larger instances are not searched for lassos: their steps are held in memory."""


# --- instances -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Checked:
    """One response on one instance.  `pending` counts states in which its goal is yet to come."""

    instance: str
    response: Response
    pending: int
    lasso: Lasso | None
    values: Mapping[str, str]
    seconds: float

    @property
    def verdict(self) -> Verdict:
        """A premise that no state fulfils is no test."""
        if self.lasso is not None:
            return Verdict.VIOLATED
        return Verdict.HOLDS if self.pending else Verdict.VACUOUS

    def to_json(self) -> dict[str, Any]:
        return {
            "instance": self.instance,
            "rule": self.response.rule,
            "name": self.response.name,
            "meaning": self.response.meaning,
            "unless": self.response.unless,
            "fairness": [fair.name for fair in self.response.fair],
            "ranked": self.response.ranking is not None,
            "verdict": self.verdict,
            "pending": self.pending,
            "lasso": self.lasso.to_json() if self.lasso else None,
            "values": dict(self.values),
            "seconds": round(self.seconds, 3),
        }

    def lines(self) -> Iterator[str]:
        response = self.response
        yield (
            f"  {response.rule} {response.name}: {self.verdict}: pending in "
            f"{counted(self.pending, 'state')}, {self.seconds:.2f} s"
        )
        if self.lasso is not None:
            yield f"  {RULES[response.rule].meaning}; but here, for {_named(self.values)}:"
            yield from self.lasso.lines()


def _named(values: Mapping[str, str]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in values.items()) or "ever"


@dataclass(frozen=True)
class Deadlock:
    """States from which no step leads on: `rest` of them as declared, a shortest run to another
    one if there is any."""

    rest: int
    lasso: Lasso | None

    @property
    def verdict(self) -> Verdict:
        return Verdict.HOLDS if self.lasso is None else Verdict.VIOLATED

    def to_json(self) -> dict[str, Any]:
        told = self.lasso.to_json() if self.lasso else None
        return {"verdict": self.verdict, "at_rest": self.rest, "lasso": told}

    def lines(self) -> Iterator[str]:
        where = f", {counted(self.rest, 'state')} at rest" if self.rest else ""
        yield f"  no deadlock: {self.verdict}{where}"
        if self.lasso is not None:
            yield from self.lasso.lines()


@dataclass(frozen=True)
class WithProgress:
    """The exploration of an instance, whether it can stop, and what its machine says must
    happen.  Without a deadlock to tell of, neither was checked, and `note` says why."""

    explored: Report
    deadlock: Deadlock | None
    checked: tuple[Checked, ...]
    note: str = ""

    @property
    def verdict(self) -> Verdict:
        parts = [self.deadlock] if self.deadlock else []
        return worst(part.verdict for part in (self.explored, *parts, *self.checked))

    def to_json(self) -> dict[str, Any]:
        violations = [
            {
                "rule": each.response.rule,
                "message": f"{each.response.name}: not on {each.instance}",
                "operations": [*told["stem"], *told["cycle"]],
            }
            for each in self.checked
            if each.lasso is not None and (told := each.lasso.to_json())
        ]
        if self.deadlock and self.deadlock.lasso:
            told = self.deadlock.lasso.to_json()
            message = "deadlock: no step is possible, and it is no state of rest"
            violations.append({"rule": "B11", "message": message, "operations": told["stem"]})
        return {
            **self.explored.to_json(),
            **({"deadlock": self.deadlock.to_json()} if self.deadlock else {}),
            "progress": [each.to_json() for each in self.checked],
            **({"progress_note": self.note} if self.note else {}),
            **({"violations": violations} if violations else {}),
        }

    def lines(self) -> Iterator[str]:
        yield from self.explored.lines()
        if self.deadlock:
            yield from self.deadlock.lines()
        for each in self.checked:
            yield from each.lines()
        if self.note:
            yield f"  {self.note}"
        if self.verdict is not self.explored.verdict:
            yield str(self.verdict)


def with_progress(
    explored: Report, name: str, sizes: Mapping[str, str], progress: Progress | None = None
) -> Report:
    """The report, with whether the instance has a deadlock, and with its machine's responses.

    Where the exploration counted more than `MOST_STATES` a note says that progress was not
    checked.
    """
    if explored.to_json().get("states", 0) > MOST_STATES:
        note = f"progress is not checked past {MOST_STATES:,} states"
        return WithProgress(explored, None, (), note)
    instance = instances.instance(name, sizes)
    stopped = deadlock(instance)
    responses, found = RESPONSES.get(instance.machine.name, ()), []
    graph = Graph(watched(instance, responses)) if responses else None
    for each in check(graph, responses, name) if graph else ():
        found.append(each)
        if progress:
            progress(f"{name}: {next(each.lines()).strip()}")
    return WithProgress(explored, stopped, tuple(found))


def deadlock(instance: Instance) -> Deadlock:
    """Every reachable state leads on, or is one of rest.  A step that a limit of the instance
    cuts off leads on."""
    bare = replace(instance, machine=replace(instance.machine, properties=(), partitions=()))
    compiled = compile_instance(bare)
    onward = compile_instance(replace(bare, limits={})).successors
    found = search(compiled)
    stopped = [state for state in found.order if not onward(state)]
    resting = evaluator(bare, [(REST.get(instance.machine.name, FALSE), {})])
    stuck = [state for state in stopped if not resting(state)[0]]
    lasso = _way_to(compiled, found, stuck[0]) if stuck else None
    return Deadlock(len(stopped) - len(stuck), lasso)


def _way_to(compiled: Compiled, found: Search, state: State) -> Lasso:
    steps = []
    while (link := found.parent[state]) is not None:
        steps.append((compiled.actions[link[1]].label, compiled.show(state)))
        state = link[0]
    return Lasso(compiled.show(state), tuple(steps[::-1]), (), dead=True)


def check(graph: Graph, responses: Sequence[Response], name: str) -> Iterator[Checked]:
    """Every response on an instance, given its graph."""
    start = time.perf_counter()
    for response in responses:
        answer = seek(graph, response)
        sorts = {v.name: v.sort for v in response.over}
        values = {n: graph.instance.element(sorts[n], i) for n, i in answer.values.items()}
        seconds, start = time.perf_counter() - start, time.perf_counter()
        yield Checked(name, response, answer.pending, answer.lasso, values, seconds)


def watched(instance: Instance, responses: Sequence[Response]) -> Instance:
    """The instance as progress needs it: without properties, and without limits on what only
    counts, which would end every run: symbols that no guard, no other symbol and no response
    reads are left out instead."""
    machine, limits = instance.machine, dict(instance.limits)
    for symbol in instance.machine.symbols:
        if symbol.name in limits and not _reads(machine, responses, symbol):
            machine = _forgetting(machine, symbol)
            del limits[symbol.name]
    return replace(instance, machine=replace(machine, properties=(), partitions=()), limits=limits)


def _mentions(terms: Sequence[Term], symbol: Symbol) -> bool:
    return any(isinstance(t, App) and t.symbol is symbol for term in terms for t in subterms(term))


def _reads(machine: Machine, responses: Sequence[Response], symbol: Symbol) -> bool:
    terms = [t for r in responses for t in (r.premise, r.goal)]
    for action in machine.actions:
        terms.append(action.enabled)
        terms += [u.value for u in action.updates if u.target.symbol is not symbol]
    return _mentions(terms, symbol)


def _forgetting(machine: Machine, symbol: Symbol) -> Machine:
    """The machine without a symbol that nothing reads."""
    return replace(
        machine,
        symbols=tuple(s for s in machine.symbols if s is not symbol),
        init=tuple(u for u in machine.init if u.target.symbol is not symbol),
        actions=tuple(
            replace(a, updates=tuple(u for u in a.updates if u.target.symbol is not symbol))
            for a in machine.actions
        ),
        properties=tuple(p for p in machine.properties if not _mentions([p.formula], symbol)),
    )
