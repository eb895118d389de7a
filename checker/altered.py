"""A machine altered in one place, searched from what is known of the whole one.

The whole machine's instance is explored once.  An altered action is compared with the original
in every reachable state at once: where nothing differs, the reachable graph is the same and
there is nothing to search.  Where it differs, the search follows known steps by number and
checks only the steps that are new, so what it says of reachable states, steps and broken
properties is exact, at a fraction of the cost of a search from nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Final

import numpy as np

from kvclaims.checker.columns import Array, Columns, Move, World, changes, enabled, table, take
from kvclaims.checker.explore import Search, search
from kvclaims.checker.finite import Instance, State, compile_instance
from kvclaims.checker.instances import PINNED
from kvclaims.spec.interface import BadOperation
from kvclaims.spec.language import Action, Machine

MOST_NEW: Final = 60_000
"""States beyond those of the whole machine after which a search is given up as unfinished."""

_NOTHING: Final = np.empty(0, np.int64)


class Known:
    """The reachable states of an instance by number, and the steps between them.

    Raises BadOperation where the machine as declared breaks a property.
    """

    def __init__(self, instance: Instance, name: str) -> None:
        self.name = name
        self.instance = instance
        self.compiled = compile_instance(instance)
        self.found: Search = search(self.compiled)
        if self.found.broken:
            raise BadOperation(f"{name} breaks a rule as declared: explore it first")
        self.number = {state: i for i, state in enumerate(self.found.order)}
        self.world = World(self.compiled)
        self.columns = Columns(self.world, table(self.found.order, len(self.compiled.slots)))
        steps = [
            (source, ground, self.number[after])
            for state, source in self.number.items()
            for ground, after in self.compiled.successors(state)
        ]
        rows = np.array(steps, np.int32).reshape(len(steps), 3)
        self.source, self.ground, self.target = (rows[:, i].copy() for i in range(3))

    @property
    def states(self) -> int:
        return len(self.found.order)

    @property
    def transitions(self) -> int:
        return self.found.transitions

    def state(self, number: int) -> State:
        return self.found.order[number]


@lru_cache(maxsize=64)
def pinned(name: str) -> Known:
    """A pinned instance, explored once in this process."""
    return Known(PINNED[name](), name)


def pinned_for(name: str, machine: Machine) -> Known:
    """The same, of a version of its machine that is not the declared one."""
    known = pinned(name)
    return known if known.instance.machine is machine else _version(name, machine)


@lru_cache(maxsize=8)
def _version(name: str, machine: Machine) -> Known:
    return Known(replace(PINNED[name](), machine=machine), name)


def declared(machine: Machine) -> Machine:
    """The machine itself where it is a copy of one that has pinned instances, as a process gets
    it from another."""
    for name in instances_of(machine.name):
        whole = PINNED[name]().machine
        return whole if whole == machine else machine
    return machine


def instances_of(machine: str) -> list[str]:
    """The pinned instances of a machine by name, those with the fewest places for values first:
    they are quickly explored."""
    names = [name for name in PINNED if name.split("/")[0] == machine]
    return sorted(names, key=lambda name: _places(PINNED[name]()))


def _places(instance: Instance) -> int:
    return sum(
        prod(len(instance.domain(sort)) for sort in symbol.domain)
        for symbol in instance.machine.symbols
    )


# --- comparing ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Changed:
    """One ground action of the altered machine: in which known states it does as before, and in
    which others it is enabled."""

    move: Move
    same: Array
    otherwise: Array
    what: str
    """What is different, empty where nothing is."""


def compare(known: Known, machine: Machine, action: str) -> Iterator[Changed]:
    """The altered action against the original, in every state that the whole machine reaches.

    Steps that change nothing count: a runtime that follows the machine must take them too.
    """
    altered = known.world.moves(machine.action(action))
    originals = known.world.moves(known.instance.machine.action(action))
    for original, move in zip(originals, altered, strict=True):
        was, now = enabled(known.columns, original), enabled(known.columns, move)
        other, where = _other_values(known.columns, original, move)
        what = ""
        if (now & ~was).any():
            what = "enabled where it was not"
        elif (was & ~now).any():
            what = "disabled where it was enabled"
        elif (other & was).any():
            what = f"another value of {where}"
        yield Changed(move, was & now & ~other, now & (other | ~was), what)


def _other_values(columns: Columns, original: Move, move: Move) -> tuple[Array, str]:
    """In which states the two leave another value in some slot, and the first such slot."""
    other, where = np.zeros(columns.count, np.bool_), ""
    if move.action.updates == original.action.updates:
        return other, where
    old, new = changes(columns, original), changes(columns, move)
    for slot in {**old, **new}:
        stay = columns.row(slot)
        differs = np.broadcast_to(old.get(slot, stay) != new.get(slot, stay), other.shape)
        if differs.any():
            other |= differs
            where = where or slot_name(columns, slot)
    return other, where


def slot_name(columns: Columns, slot: int) -> str:
    """A symbol at its arguments, as in a counterexample."""
    (symbol, args), instance = columns.world.slots[slot], columns.world.instance
    names = (instance.element(s, a) for s, a in zip(symbol.domain, args, strict=True))
    return f"{symbol.name}({', '.join(names)})" if args else symbol.name


@dataclass(frozen=True)
class Difference:
    """The first step in which an altered machine is seen to do something else."""

    instance: str
    step: str
    what: str

    def __str__(self) -> str:
        return f"{self.step} in {self.instance}: {self.what}"


def difference(known: Known, machine: Machine, action: str | None) -> Difference | None:
    """Where the altered machine parts from the whole one, in the states that this reaches.

    `action` is the one that was altered, None for the initial state.  Without a difference the
    reachable graphs are the same.
    """
    if action is None:
        same = initial(known, machine) == known.compiled.initial
        return None if same else Difference(known.name, "the start", "another initial state")
    for changed in compare(known, machine, action):
        if changed.what:
            return Difference(known.name, changed.move.label, changed.what)
    return None


def initial(known: Known, machine: Machine) -> tuple[State, ...]:
    """The initial states of the altered machine over the same rigid symbols."""
    start = Columns(known.world, table(known.compiled.initial, len(known.compiled.slots)))
    states = start.states.copy()
    for slot, value in changes(start, Move(Action("start", (), (), machine.init, ""), {})).items():
        states[slot] = value
    return tuple(map(tuple, states.T.tolist()))


def digest(known: Known) -> str:
    """A short name of the reachable graph: of its states, its steps and the steps that change
    nothing.  Two graphs share it only if they are the same."""
    whole = hashlib.sha256()
    for state in sorted(known.found.order):
        steps = sorted(known.compiled.successors(state))
        whole.update(repr((state, known.compiled.enabled(state), steps)).encode())
    return whole.hexdigest()[:16]


# --- searching ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What the search of an altered machine found: properties broken by some run, by number;
    a run goes on only from states and steps that break nothing.  Exact where `finished`."""

    broken: frozenset[int]
    states: int
    transitions: int
    finished: bool


def search_altered(
    known: Known,
    machine: Machine,
    action: str | None,
    watched: Sequence[int] | None = None,
    *,
    first_only: bool = False,
    most_new: int = MOST_NEW,
) -> Outcome:
    """Search the instance of `machine`, which differs from the whole one in `action` alone.

    `watched` are the properties to check by their numbers, all if None.  With `first_only` the
    search ends at the first broken property.
    """
    return _Search(known, machine, action, watched, first_only, most_new).run()


_Step = tuple[State, int | None, bool]
"""Where a step that the whole machine does not take leads: the state, its number if the whole
machine reaches it, and whether the step breaks nothing."""


class _Search:
    def __init__(
        self,
        known: Known,
        machine: Machine,
        action: str | None,
        watched: Sequence[int] | None,
        first_only: bool,
        most_new: int,
    ) -> None:
        self.known = known
        self.action = action
        self.watched = None if watched is None else frozenset(watched)
        self.first_only = first_only
        self.most_new = most_new
        self.broken: set[int] = set()
        self.transitions = 0
        self.reached = np.zeros(known.states, np.bool_)
        self.new: set[State] = set()
        kept = np.ones(len(known.source), np.bool_)
        self.different: list[Changed] = []
        for changed in compare(known, machine, action) if action else ():
            kept &= (known.ground != changed.move.number) | changed.same[known.source]
            if changed.otherwise.any():
                self.different.append(changed)
        self.moves = known.world.moves(machine.action(action)) if action else []
        self.source, self.target = known.source[kept], known.target[kept]
        self.initial = known.compiled.initial
        if action is None:
            self.initial = initial(known, machine)

    def run(self) -> Outcome:
        old, front = self._enter(
            _NOTHING, [(s, self.known.number.get(s), self._judge(s)) for s in self.initial]
        )
        while (len(old) or front) and not (self.first_only and self.broken):
            if len(self.new) > self.most_new:
                return self._outcome(finished=False)
            old, front = self._level(old, front)
        return self._outcome(finished=not (len(old) or front))

    def _outcome(self, finished: bool) -> Outcome:
        states = int(self.reached.sum()) + len(self.new)
        return Outcome(frozenset(self.broken), states, self.transitions, finished)

    # -- one level

    def _level(self, old: Array, front: list[State]) -> tuple[Array, list[State]]:
        """One level further, from known states by number and from new ones by value."""
        now = np.zeros(self.known.states, np.bool_)
        now[old] = True
        taken = now[self.source]
        self.transitions += int(taken.sum())
        numbers = self.target[taken]
        steps = [*self._different(now), *self._onward(front)]
        self.transitions += len(steps)
        return self._enter(numbers, steps)

    def _different(self, now: Array) -> Iterator[_Step]:
        """Steps of the altered action from known states in which it does otherwise."""
        for changed in self.different:
            yield from self._taken(self.known.columns, changed.move, changed.otherwise & now)

    def _onward(self, front: list[State]) -> Iterator[_Step]:
        """Every step from states that the whole machine does not reach."""
        if not front:
            return
        compiled = self.known.compiled
        for state in front:
            idle = ((g, n) for g, n in compiled.idle(state) if self._is_kept(g))
            self.broken.update(self._watched([number for _, number in idle]))
            for ground, after in compiled.successors(state):
                if self._is_kept(ground):
                    yield self._step(ground, state, after)
        columns = Columns(self.known.world, table(front, len(compiled.slots)))
        for move in self.moves:
            yield from self._taken(columns, move, enabled(columns, move))

    def _taken(self, columns: Columns, move: Move, where: Array) -> Iterator[_Step]:
        if not where.any():
            return
        taken = take(columns, move, where)
        before = columns.states[:, taken.before].T.tolist()
        for was, after in zip(map(tuple, before), map(tuple, taken.after.T.tolist()), strict=True):
            if was != after:
                yield self._step(move.number, was, after)
            else:  # no transition, yet judged like one
                bad = self.known.compiled.misstep(move.number, was, after)
                self.broken.update(self._watched(bad))

    def _is_kept(self, ground: int) -> bool:
        return self.known.compiled.actions[ground].name != self.action

    def _step(self, ground: int, before: State, after: State) -> _Step:
        bad = self._watched(self.known.compiled.misstep(ground, before, after))
        self.broken.update(bad)
        return after, self.known.number.get(after), self._judge(after) and not bad

    def _judge(self, state: State) -> bool:
        """Whether the state breaks no invariant; states that were met before do not."""
        if state in self.known.number or state in self.new:
            return True
        bad = self._watched(self.known.compiled.broken(state))
        self.broken.update(bad)
        return not bad

    def _watched(self, bad: list[int]) -> list[int]:
        return bad if self.watched is None else [n for n in bad if n in self.watched]

    def _enter(self, numbers: Array, steps: Sequence[_Step]) -> tuple[Array, list[State]]:
        """Those that were not reached before."""
        found = [target for _, target, sound in steps if sound and target is not None]
        old = np.unique(np.concatenate([numbers, np.array(found, np.int64)]))
        old = old[~self.reached[old]]
        self.reached[old] = True
        states = (state for state, target, sound in steps if sound and target is None)
        front = [state for state in dict.fromkeys(states) if state not in self.new]
        self.new.update(front)
        return old, front
