"""All states of an instance at once: terms evaluated over NumPy columns, one for each slot.

A search of one machine after another that differs in a single action (mutants, must-fail
twins) would spend its time on what did not change.  Here a term costs a few array operations
for all states together, and what it came to is kept, so that a changed action costs what was
changed in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import product
from typing import Any, Final

import numpy as np

from kvclaims.checker.finite import Compiled, State
from kvclaims.spec.language import (
    BOOL,
    Action,
    App,
    Bind,
    Lit,
    New,
    Op,
    Symbol,
    Term,
    Var,
)

Array = np.ndarray[Any, np.dtype[Any]]
Value = Any
"""A number or truth value where it is the same in every state, else an array of them."""

Ground = Mapping[Var, int]
Slot = tuple[Symbol, tuple[int, ...]]

NUMBER: Final = np.dtype(np.int16)


@dataclass(frozen=True)
class Move:
    """An action with its parameters filled in."""

    action: Action
    ground: Ground
    number: int = -1
    """Of the ground action in the compiled instance."""
    label: str = ""


class World:
    """Where the values of an instance lie: slot i is row i of every table of states."""

    def __init__(self, compiled: Compiled) -> None:
        self.compiled = compiled
        self.instance = compiled.instance
        self.machine = self.instance.machine
        self.slots = compiled.slots
        self.index: dict[Slot, int] = {slot: i for i, slot in enumerate(compiled.slots)}
        self.known: dict[Slot, int] = {
            (symbol, args): value
            for symbol in self.machine.symbols
            for args, value in self.instance.rigid.get(symbol.name, {}).items()
        }

    def moves(self, action: Action) -> list[Move]:
        """The ground actions of an action of this name, whatever its guards and updates."""
        return [
            Move(action, dict(zip(action.params, ground.args, strict=True)), number, ground.label)
            for number, ground in enumerate(self.compiled.actions)
            if ground.name == action.name
        ]


def table(states: Sequence[State], slots: int) -> Array:
    """States as columns of a table with a row for each slot."""
    return np.array(states, NUMBER).reshape(len(states), slots).T.copy()


class Columns:
    """A table of states, and what terms come to in each of them.

    `after` are the states in which terms under `new` are read, column by column.
    """

    def __init__(self, world: World, states: Array, after: Columns | None = None) -> None:
        self.world = world
        self.states = states
        self.after = after
        self.count = states.shape[1]
        self._memo: dict[tuple[int, ...], tuple[Term, Value]] = {}
        self._rows: dict[int, Array] = {}

    def row(self, slot: int) -> Array:
        found = self._rows.get(slot)
        if found is None:
            found = self.states[slot]
            if self.world.slots[slot][0].range == BOOL:
                found = found.astype(np.bool_)
            self._rows[slot] = found
        return found

    def value(self, term: Term, ground: Ground) -> Value:
        match term:
            case Var():
                return ground[term]
            case Lit(literal, of):
                return bool(literal) if of == BOOL else int(literal)
        key = (id(term), *(ground[v] for v in term.free))
        known = self._memo.get(key)
        if known is None:  # the term is kept with it: its identity is not given away meanwhile
            known = self._memo[key] = (term, self._compute(term, ground))
        return known[1]

    def mask(self, term: Term, ground: Ground) -> Array:
        """A Boolean term as an array."""
        return self.spread(self.value(term, ground), np.dtype(np.bool_))

    def spread(self, value: Value, kind: np.dtype[Any] = NUMBER) -> Array:
        if isinstance(value, np.ndarray):
            return value.astype(kind, copy=False)
        return np.full(self.count, value, kind)

    def _compute(self, term: Term, ground: Ground) -> Value:
        match term:
            case New(body):
                if self.after is None:
                    raise TypeError("only step properties speak of the new state")
                return self.after.value(body, ground)
            case App(symbol, args):
                slot = (symbol, tuple(self._element(a, ground) for a in args))
                known = self.world.known.get(slot)
                if known is None:
                    return self.row(self.world.index[slot])
                return bool(known) if symbol.range == BOOL else known
            case Op(kind, args):
                return self._operate(kind, args, ground)
            case Bind(kind, var, body):
                domain = self.world.instance.domain(var.sort)
                parts = (self.value(body, {**ground, var: v}) for v in domain)
                if kind == "total":
                    return reduce(_add, parts, 0)
                return _join(kind == "every", parts)
        raise TypeError(f"not a term: {term!r}")

    def _element(self, term: Term, ground: Ground) -> int:
        return int(self.value(term, ground))

    def _operate(self, kind: str, args: tuple[Term, ...], ground: Ground) -> Value:
        if kind in ("and", "or"):
            return _join(kind == "and", (self.value(a, ground) for a in args))
        values = [self.value(a, ground) for a in args]
        a = values[0]
        match kind:
            case "not":
                return _not(a)
            case "implies":
                return _join(False, iter((_not(a), values[1])))
            case "ite":
                return _choose(a, values[1], values[2])
            case "eq":
                return a == values[1]
            case "le":
                return a <= values[1]
            case "lt":
                return a < values[1]
            case "add":
                return _add(a, values[1])
            case "sub":
                return _number(a) - _number(values[1])
        raise TypeError(f"unknown operator {kind!r}")


def _number(value: Value) -> Value:
    """Differences of small unsigned or truth values must not wrap around."""
    return value.astype(NUMBER, copy=False) if isinstance(value, np.ndarray) else int(value)


def _add(a: Value, b: Value) -> Value:
    return _number(a) + _number(b)


def _not(value: Value) -> Value:
    return ~value if isinstance(value, np.ndarray) else not value


def _choose(condition: Value, then: Value, otherwise: Value) -> Value:
    if not isinstance(condition, np.ndarray):
        return then if condition else otherwise
    return np.where(condition, then, otherwise)


def _join(conjunction: bool, parts: Iterator[Value]) -> Value:
    """Conjunction or disjunction; stops at the first part that decides it for all states."""
    found: Value = conjunction
    for part in parts:
        if not isinstance(part, np.ndarray):
            if bool(part) is not conjunction:
                return not conjunction
        elif not isinstance(found, np.ndarray):
            found = part
        else:
            found = found & part if conjunction else found | part
    return found


# --- steps -------------------------------------------------------------------------------


def changes(columns: Columns, move: Move) -> dict[int, Value]:
    """Slot → its value after the move, in every state, whether the move is enabled or not."""
    world = columns.world
    found: dict[int, Value] = {}
    for update in move.action.updates:
        for values in product(*(world.instance.domain(v.sort) for v in update.over)):
            here = {**move.ground, **dict(zip(update.over, values, strict=True))}
            args = tuple(here[a] for a in update.target.args)  # type: ignore[index]
            slot = world.index[update.target.symbol, args]
            found[slot] = columns.value(update.value, here)
    return found


def enabled(columns: Columns, move: Move) -> Array:
    """In which states every guard of the move holds."""
    return columns.spread(
        _join(True, (columns.value(g.condition, move.ground) for g in move.action.guards)),
        np.dtype(np.bool_),
    )


@dataclass(frozen=True)
class Taken:
    """Steps of one move: from which columns, and the states they lead to."""

    move: Move
    before: Array
    after: Array


def take(columns: Columns, move: Move, where: Array) -> Taken:
    """The move taken in the columns of the mask `where`; steps past a limit of the instance are
    not taken.  Steps that change nothing are among them."""
    world = columns.world
    at = np.flatnonzero(where)
    after = columns.states[:, at].copy()
    for slot, value in changes(columns, move).items():
        after[slot] = value[at] if isinstance(value, np.ndarray) else value
    limits = world.instance.limits
    bounded = {u.target.symbol for u in move.action.updates if u.target.symbol.name in limits}
    kept = np.ones(len(at), np.bool_)
    for (symbol, _), row in zip(world.slots, after, strict=True):
        if symbol in bounded:
            kept &= row <= limits[symbol.name]
    return Taken(move, at[kept], after[:, kept])
