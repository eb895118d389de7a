"""The code that judges steps held against a plain reading of the same declarations.

`checker.stepcode` writes text that looks only where something can be; here every term is read
element by element, in states that are drawn at random and mostly unreachable.  What differs is a
fault of the text: which guards fail, what a step writes, what becomes known, what a term is.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from typing import Any, Final

from kvclaims.checker import behaviour, lending
from kvclaims.checker.stepcode import Compiler, Shadow, Step
from kvclaims.checker.stepterms import FORMS, TermDrawer
from kvclaims.spec import elastic, pool
from kvclaims.spec.language import (
    BOOL,
    NUMERIC,
    Action,
    App,
    Bind,
    Lit,
    Machine,
    Op,
    Sort,
    Symbol,
    Term,
    Var,
    new,
    show,
    subterms,
)

Env = Mapping[Var, Any]
Places = dict[tuple[Any, ...], Any]

MACHINES: Final = (pool.POOL, behaviour.HEARD.machine, lending.HEARD.machine, elastic.ELASTIC)
"""What runs are judged by."""

ELEMENTS: Final = 3
"""Of each sort; the last may not be known yet."""

NUMBERS: Final = range(4)
SEED: Final = 1
DRAWN: Final = 200
"""Terms of each machine that nobody declared."""

_MEANS: Final[Mapping[str, Callable[..., Any]]] = {
    "not": operator.not_,
    "and": lambda a, b: a and b,
    "or": lambda a, b: a or b,
    "implies": lambda a, b: not a or b,
    "eq": operator.eq,
    "le": operator.le,
    "lt": operator.lt,
    "add": operator.add,
    "sub": operator.sub,
    "ite": lambda condition, then, otherwise: then if condition else otherwise,
}

_BINDS: Final[Mapping[str, Callable[[Iterable[Any]], Any]]] = {
    "total": sum,
    "some": any,
    "every": all,
}


@dataclass(frozen=True)
class Drawn:
    """A state: what is known of each sort, and every place with another value than the default."""

    known: Mapping[Sort, Sequence[Any]]
    values: Mapping[Symbol, Places]

    def read(self, term: Term, env: Env) -> Any:
        """What the term is in this state."""
        match term:
            case Var():
                return env[term]
            case Lit(literal, _):
                return literal
            case App(symbol, args):
                return self.values[symbol].get(tuple(self.read(a, env) for a in args), 0)
            case Op(kind, args):
                return _MEANS[kind](*(self.read(a, env) for a in args))
            case Bind(kind, var, body):
                all_of_them = (self.read(body, {**env, var: e}) for e in self.elements(var.sort))
                return _BINDS[kind](all_of_them)
        raise TypeError(f"not a term of states: {term!r}")

    def elements(self, sort: Sort) -> Sequence[Any]:
        if sort == BOOL:
            return (False, True)
        return range(len(sort.values)) if sort.values else self.known[sort]

    def meeting(self, env: Env) -> Drawn:
        """The same state, in which these arguments are known."""
        known = {sort: dict.fromkeys(elements) for sort, elements in self.known.items()}
        for param, value in env.items():
            if param.sort in known:
                known[param.sort].setdefault(value)
        return Drawn({sort: [*elements] for sort, elements in known.items()}, self.values)

    def after(self, action: Action, env: Env) -> Mapping[Symbol, Places]:
        """The places after the action: all updates at once, read in this state."""
        values = {symbol: dict(places) for symbol, places in self.values.items()}
        for update in action.updates:
            for over in product(*(self.elements(v.sort) for v in update.over)):
                here = {**env, **dict(zip(update.over, over, strict=True))}
                place = tuple(self.read(a, here) for a in update.target.args)
                values[update.target.symbol][place] = self.read(update.value, here)
        return _other_than_default(values)

    def shadow(self, machine: Machine) -> Shadow:
        shadow = Shadow(machine)
        for sort, elements in self.known.items():
            for element in elements:
                shadow.meet(sort, element)
        for symbol, places in self.values.items():
            for place, value in places.items():
                shadow.set(symbol, place, value)
        return shadow


def _other_than_default(values: Mapping[Symbol, Places]) -> dict[Symbol, Places]:
    return {
        symbol: {place: value for place, value in places.items() if value}
        for symbol, places in values.items()
    }


def named(sort: Sort) -> list[str]:
    return [f"{sort.name.lower()}{i}" for i in range(ELEMENTS)]


def drawn(machine: Machine, rng: random.Random) -> Drawn:
    """A state of the machine, mostly one that it never reaches."""
    known = {sort: named(sort)[: rng.choice((ELEMENTS - 1, ELEMENTS))] for sort in machine.sorts}
    empty = Drawn(known, {})
    values = {
        symbol: {
            place: any_value(rng, symbol)
            for place in product(*(empty.elements(sort) for sort in symbol.domain))
        }
        for symbol in machine.symbols
    }
    return Drawn(known, _other_than_default(values))


def any_value(rng: random.Random, symbol: Symbol) -> int:
    """A value of the symbol, mostly the default: then there is something to tell apart."""
    if symbol.range == BOOL:
        return rng.choice((False, False, True))
    most = len(symbol.range.values) - 1 if symbol.range.values else NUMBERS[-1]
    return rng.choice((0, 0, rng.randint(0, most)))


def _arguments(action: Action, rng: random.Random) -> dict[Var, Any]:
    return {param: _argument(param.sort, rng) for param in action.params}


def _argument(sort: Sort, rng: random.Random) -> Any:
    if sort == BOOL:
        return rng.choice((False, True))
    if sort in NUMERIC:
        return rng.choice(NUMBERS)
    return rng.randrange(len(sort.values)) if sort.values else rng.choice(named(sort))


# --- steps -------------------------------------------------------------------------------


def check_steps(rounds: int) -> str | None:
    """What the text of some action does wrongly, None if nothing."""
    return next(filter(None, (_check_steps(machine, rounds) for machine in MACHINES)), None)


def _check_steps(machine: Machine, rounds: int) -> str | None:
    rng = random.Random(SEED)
    for _ in range(rounds):
        state = drawn(machine, rng)
        shadow = state.shadow(machine)
        compiler = Compiler(shadow)
        for action in rng.sample(machine.actions, len(machine.actions)):
            env = _arguments(action, rng)
            met = state.meeting(env)
            after = Drawn(met.known, met.after(action, env))
            step = compiler.action(action)
            wrong = _wrong_parts(step, state, env) or _wrong_whole(step, shadow, met, env, after)
            if wrong:
                return f"{machine.name}: {action.name}: {wrong}"
            state = after
    return None


def _broken(action: Action, state: Drawn, env: Env) -> tuple[int, ...]:
    return tuple(i for i, g in enumerate(action.guards) if not state.read(g.condition, env))


def _wrong_parts(step: Step, state: Drawn, env: Env) -> str | None:
    """What is said of a step before it is taken."""
    values = [env[param] for param in step.action.params]
    if (found := step.broken(*values)) != (broken := _broken(step.action, state, env)):
        return f"guards {found} fail, not {broken}"
    changed = {symbol: dict(places) for symbol, places in state.values.items()}
    for table, place, value in step.changes(*values):
        changed[table.symbol][place] = value
    if _other_than_default(changed) != state.after(step.action, env):
        return "tells of other changes"
    return None


def _wrong_whole(step: Step, shadow: Shadow, met: Drawn, env: Env, after: Drawn) -> str | None:
    """What taking it leaves behind; `met` is the state before it, in which its arguments are
    known."""
    told: list[tuple[int, ...]] = []
    step.take({p.name: _as_told(p.sort, value) for p, value in env.items()}, told.append)
    broken = _broken(step.action, met, env)
    if told != ([broken] if broken else []):
        return f"guards {told} are reported, not {broken}"
    if shadow.values != after.values:
        return "writes something else"
    if {sort: [*elements] for sort, elements in shadow.known.items()} != after.known:
        return "something else is known after it"
    return _wrong_table(shadow)


def _wrong_table(shadow: Shadow) -> str | None:
    """Sums and indexes against the values that they are of."""
    for symbol, table in shadow.tables.items():
        if table.total != sum(table.values.values()):
            return f"the total of {symbol} is {table.total}"
        for i in range(len(symbol.domain)):
            index: dict[Any, set[Any]] = {}
            for place in table.values:
                index.setdefault(place[i], set()).add(place)
            if table.by(i) != index:
                return f"index {i} of {symbol} is {table.by(i)}"
        having: dict[Any, set[Any]] = {}
        for place, value in table.values.items():
            having.setdefault(value, set()).add(place)
        if table.having != having:
            return f"index of the values of {symbol} is {table.having}"
    return None


def _as_told(sort: Sort, value: Any) -> Any:
    return sort.values[value] if sort.values else value


# --- terms -------------------------------------------------------------------------------


def check_terms(rounds: int) -> str | None:
    """Which term of a machine means something else as text, None if none does."""
    machines = (*MACHINES, FORMS)
    return next(filter(None, (_check_terms(machine, rounds) for machine in machines)), None)


def _check_terms(machine: Machine, rounds: int) -> str | None:
    rng = random.Random(SEED)
    terms = [*TermDrawer(machine, rng).draw(DRAWN), *terms_of(machine)]
    for _ in range(rounds):
        state = drawn(machine, rng)
        compiler = Compiler(state.shadow(machine))
        for term in terms:
            env = {var: _argument(var.sort, rng) for var in term.free}
            if (found := compiler.term(term)(env)) != (value := state.read(term, env)):
                return f"{machine.name}: {show(term)} is {found}, not {value}"
    return None


UNTOLD: Final[tuple[Term, ...]] = (
    new(pool.free()),
    Op("xor", (Lit(True, BOOL), Lit(True, BOOL))),
)
"""What a shadow, which is one state, cannot tell, and what means nothing."""


def check_refused() -> str | None:
    """A term that is told though it has no meaning, None if all are refused."""
    compiler = Compiler(Shadow(pool.POOL))
    for term in UNTOLD:
        with suppress(TypeError):
            compiler.term(term)
            return f"{term!r} is told"
    return None


def terms_of(machine: Machine) -> list[Term]:
    """Every condition and count that the machine speaks of, and the denial of each condition."""
    whole = [guard.condition for action in machine.actions for guard in action.guards]
    whole += [update.value for action in machine.actions for update in action.updates]
    whole += [p.formula for p in machine.properties if not p.of_steps]
    parts = dict.fromkeys(part for term in whole for part in subterms(term))
    said = [part for part in parts if not isinstance(part, Var | Lit)]
    return [*said, *(~part for part in said if part.sort == BOOL)]
