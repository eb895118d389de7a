"""Conformance of the reference with the pool machine, in both directions.

Every reachable state of a bounded instance is set up in the reference by the steps that lead
there.  From it every step of the machine is taken on the reference and the whole states are
compared; every step whose guards do not hold must be refused and change nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from kvclaims.checker.engines import find
from kvclaims.checker.finite import Compiled, Instance, State, compile_instance
from kvclaims.checker.instances import PINNED
from kvclaims.checker.verdicts import Progress, worst
from kvclaims.checker.workers import processes
from kvclaims.spec import claims, pool
from kvclaims.spec.interface import NotExposed, Stepper
from kvclaims.spec.language import BOOL, NUMERIC, Sort, Symbol
from kvclaims.spec.vocabulary import Outcome, Phase, Verdict

INSTANCES: Final = tuple(name for name in PINNED if name.split("/")[0] == "pool")
COMPARED: Final = tuple(symbol for symbol in pool.POOL.symbols if not symbol.rigid)


class Steppable(Protocol):
    """An engine whose parts can be driven one machine action at a time."""

    def stepper(
        self,
        blocks: tuple[int, ...],
        claims: Mapping[str, bool],
        requests: Mapping[str, bool],
        null: tuple[int, ...],
    ) -> Stepper: ...


@dataclass(frozen=True)
class Difference:
    """Where runtime and machine part: the steps that lead there, and what each says."""

    instance: str
    path: tuple[str, ...]
    step: str
    message: str

    def lines(self) -> Iterator[str]:
        yield f"{self.instance}: {self.step}: {self.message}"
        for number, label in enumerate(self.path, 1):
            yield f"  {number}. {label}"

    def to_json(self) -> dict[str, Any]:
        return {
            "instance": self.instance,
            "path": list(self.path),
            "step": self.step,
            "message": self.message,
        }


@dataclass(frozen=True)
class Conformance:
    """What was replayed of one instance; at most one difference, the shortest."""

    instance: str
    states: int
    edges: int
    refused: int
    seconds: float
    difference: Difference | None = None

    @property
    def verdict(self) -> Verdict:
        if self.difference:
            return Verdict.VIOLATED
        return Verdict.HOLDS if self.edges and self.refused else Verdict.VACUOUS

    def to_json(self) -> dict[str, Any]:
        return {
            "instance": self.instance,
            "verdict": self.verdict,
            "states": self.states,
            "edges": self.edges,
            "refused": self.refused,
            "seconds": round(self.seconds, 3),
            "difference": self.difference.to_json() if self.difference else None,
        }


@dataclass(frozen=True)
class ConformReport:
    parts: tuple[Conformance, ...]
    seconds: float
    engine: str

    @property
    def verdict(self) -> Verdict:
        return worst(part.verdict for part in self.parts)

    def to_json(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "engine": self.engine,
            "seconds": round(self.seconds, 3),
            "states": sum(part.states for part in self.parts),
            "edges": sum(part.edges for part in self.parts),
            "refused": sum(part.refused for part in self.parts),
            "instances": [part.to_json() for part in self.parts],
        }

    def lines(self) -> Iterator[str]:
        for part in self.parts:
            yield (
                f"{part.instance}: {part.verdict}: {part.states:,} states set up in "
                f"{self.engine}, {part.edges:,} steps replayed, {part.refused:,} disabled steps "
                f"refused, {part.seconds:.1f} s"
            )
            if part.difference:
                yield from part.difference.lines()


def conform(
    engine: str = "reference", progress: Progress | None = None, workers: int = 2
) -> ConformReport:
    """Replay every pinned instance of the pool on the engine's stepper, on `workers` processes.

    Raises NotExposed where the engine cannot be driven by single steps.
    """
    if not hasattr(find(engine), "stepper"):
        raise NotExposed(f"{engine} cannot be driven one step at a time")
    start = time.perf_counter()
    parts = []
    with processes(workers, fresh=False) as pool:
        for part in pool.map(conform_instance, INSTANCES, [engine] * len(INSTANCES)):
            parts.append(part)
            if progress:
                progress(f"{part.instance}: {part.verdict}, {part.edges:,} steps replayed")
    return ConformReport(tuple(parts), time.perf_counter() - start, engine)


def conform_instance(name: str, engine: str = "reference") -> Conformance:
    """Replay one pinned instance on an engine found by name."""
    steppable: Steppable = find(engine)  # type: ignore[assignment]
    return replay_instance(PINNED[name](), name, steppable)


def replay_instance(instance: Instance, name: str, engine: Steppable) -> Conformance:
    """Set up every reachable state of the instance and compare every step from it."""
    start = time.perf_counter()
    replay = _Replay(name, compile_instance(instance))
    difference = replay.run(engine)
    return Conformance(
        name, replay.states, replay.edges, replay.refused, time.perf_counter() - start, difference
    )


class _Replay:
    def __init__(self, name: str, compiled: Compiled) -> None:
        self.name = name
        self.compiled = compiled
        self.instance = compiled.instance
        self.states = self.edges = self.refused = 0
        self.parent: dict[State, tuple[State, int] | None] = {}
        self._args = [self._arguments(number) for number in range(len(compiled.actions))]
        self._slots = [self._slot(symbol, args) for symbol, args in compiled.slots]
        self._forms = [(symbol.name, symbol.range == BOOL) for symbol in COMPARED]

    def run(self, engine: Steppable) -> Difference | None:
        (initial,) = self.compiled.initial
        self.parent[initial] = None
        frontier = [(initial, self._open(engine))]
        if found := self._compare(initial, frontier[0][1], "the initial state"):
            return found
        while frontier:
            following: list[tuple[State, Stepper]] = []
            for state, stepper in frontier:
                self.states += 1
                found = self._steps(state, stepper, following) or self._refusals(state, stepper)
                if found:
                    return found
            frontier = following
        return None

    def _steps(
        self, state: State, stepper: Stepper, following: list[tuple[State, Stepper]]
    ) -> Difference | None:
        """Take every enabled step on a copy and compare where it leads."""
        moved = dict(self.compiled.successors(state))
        for number in self.compiled.enabled(state):
            after = moved.get(number, state)
            action = self.compiled.actions[number]
            copy = stepper.clone()
            if copy.apply(action.name, self._args[number]) is not True:
                return self._differ(state, action.label, "enabled in the machine, refused here")
            self.edges += 1
            if found := self._compare(after, copy, action.label, state):
                return found
            if after not in self.parent:
                self.parent[after] = (state, number)
                following.append((after, copy))
        return None

    def _refusals(self, state: State, stepper: Stepper) -> Difference | None:
        """Try every disabled step; the state must be as before when all were refused."""
        enabled = set(self.compiled.enabled(state))
        for number, action in enumerate(self.compiled.actions):
            if number in enabled:
                continue
            if stepper.apply(action.name, self._args[number]) is not False:
                return self._differ(state, action.label, "disabled in the machine, taken here")
            self.refused += 1
        return self._compare(state, stepper, "after every refusal")

    def _compare(
        self, state: State, stepper: Stepper, step: str, before: State | None = None
    ) -> Difference | None:
        expected, found = self._expected(state), dict(stepper.state())
        for name in {**expected, **found}:
            if expected.get(name) != found.get(name):
                return self._differ(
                    state if before is None else before,
                    step,
                    f"{name}: the machine says {expected.get(name)}, the runtime {found.get(name)}",
                )
        return None

    def _expected(self, state: State) -> dict[str, Any]:
        """The machine's state in the form of `Stepper.state`: relations as sets of places,
        functions as dictionaries, the free counter as a number."""
        whole: dict[str, Any] = {name: set() if sets else {} for name, sets in self._forms}
        for (name, place, values), number in zip(self._slots, state, strict=True):
            if values is None:
                if number:
                    whole[name].add(place)
            elif place == ():
                whole[name] = number
            else:
                whole[name][place] = values[number] if values else number
        return whole

    def _slot(self, symbol: Symbol, args: tuple[int, ...]) -> tuple[str, Any, Any]:
        """Name, place and values of a slot: None for a relation, empty for a counter."""
        names = tuple(map(self._name, symbol.domain, args))
        meant = {claims.PHASE: Phase, pool.OUTCOME: Outcome}.get(symbol.range)
        values: Any = None if symbol.range == BOOL else ()
        if meant:
            values = tuple(meant(value) for value in symbol.range.values)
        return symbol.name, names[0] if len(names) == 1 else names, values

    def _open(self, engine: Steppable) -> Stepper:
        rigid, sizes = self.instance.rigid, self.instance.sizes
        null = tuple(place[0] for place, flag in rigid["null"].items() if flag)
        return engine.stepper(
            tuple(b for b in range(sizes["Block"]) if b not in null),
            {self._name(claims.CLAIM, i): bool(flag) for (i,), flag in rigid["hard"].items()},
            {
                self._name(pool.REQUEST, i): bool(flag)
                for (i,), flag in rigid["admit_reuse"].items()
            },
            null,
        )

    def _name(self, sort: Sort, index: int) -> Any:
        return index if sort == pool.BLOCK else self.instance.element(sort, index)

    def _arguments(self, number: int) -> dict[str, Any]:
        action = self.compiled.actions[number]
        params = self.instance.machine.action(action.name).params
        return {
            p.name: bool(v) if p.sort == BOOL else v if p.sort in NUMERIC else self._name(p.sort, v)
            for p, v in zip(params, action.args, strict=True)
        }

    def _differ(self, state: State, step: str, message: str) -> Difference:
        path = []
        while (link := self.parent[state]) is not None:
            path.append(self.compiled.actions[link[1]].label)
            state = link[0]
        return Difference(self.name, tuple(reversed(path)), step, message)
