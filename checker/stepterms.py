"""Terms drawn at random over the symbols of a machine: every form that the language has."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Final

from kvclaims.spec.language import (
    BOOL,
    INT,
    NUMERIC,
    App,
    Bind,
    Lit,
    Machine,
    Op,
    Property,
    Sort,
    Symbol,
    Term,
    Var,
    count,
    eq,
    every,
)

DEPTH: Final = 4

_ONE: Final = Sort("One")
_OTHER: Final = Sort("Other")
_COLOUR: Final = Sort("Colour", ("red", "green", "blue"))

_between: Final = Symbol("between", (_ONE, _ONE, _OTHER), rigid=True)
_x, _y, _z = Var("x", _ONE), Var("y", _ONE), Var("z", _OTHER)

FORMS: Final = Machine(
    "forms",
    "What no machine has that runs are judged by, and the language does.",
    (
        _between,
        Symbol("painted", (_ONE, _COLOUR), rigid=True),
        Symbol("mixed", (_COLOUR, _COLOUR, _OTHER), rigid=True),
        Symbol("shade", (_OTHER,), _COLOUR, rigid=True),
        Symbol("weight", (_ONE, _OTHER), INT, rigid=True),
    ),
    init=(),
    actions=(),
    properties=(
        Property(
            "B1",
            "each is counted once",
            every(_y, every(_z, count(_x, _between(_x, _y, _z)) <= count(_x, eq(_x, _x)))),
            "Of all that stand between two, each counts once, whoever else it stands between.",
        ),
    ),
)

_CONDITIONS: Final = (
    *("not", "and", "or", "implies", "eq", "le", "lt", "positive", "some", "every", "symbol"),
)
_NUMBERS: Final = ("add", "sub", "ite", "total", "count", "symbol", "literal")


class TermDrawer:
    """Draws closed terms.  Bound variables have names of their own, as in a machine."""

    def __init__(self, machine: Machine, rng: random.Random) -> None:
        self._rng = rng
        self._symbols = [s for s in machine.symbols if all(_is_plain(d) for d in s.domain)]
        self._numeric = [s for s in self._symbols if s.range in NUMERIC]
        sorts = dict.fromkeys(sort for s in self._symbols for sort in (*s.domain, s.range))
        enumerated = [sort for sort in sorts if sort.values]
        self._sorts: Sequence[Sort] = (*machine.sorts, *enumerated, BOOL)
        self._bound = 0

    def draw(self, so_many: int) -> Iterator[Term]:
        """So many terms, conditions and numbers by turns."""
        for number in range(so_many):
            yield self._condition(DEPTH, ()) if number % 2 else self._number(DEPTH, ())

    def _condition(self, depth: int, scope: tuple[Var, ...]) -> Term:
        kind = self._rng.choice(_CONDITIONS if depth else ("symbol", "eq"))
        match kind:
            case "not":
                return ~self._condition(depth - 1, scope)
            case "and" | "or" | "implies":
                parts = self._condition(depth - 1, scope), self._condition(depth - 1, scope)
                return Op(kind, parts)
            case "le" | "lt":
                return Op(kind, (self._number(depth - 1, scope), self._number(depth - 1, scope)))
            case "positive":
                number, loose = self._applied(scope, self._numeric)
                return self._around(Lit(0, INT) < number, loose)
            case "eq":
                return self._equal(scope)
            case "some" | "every":
                var = self._var()
                return Bind(kind, var, self._condition(depth - 1, (*scope, var)))
        return self._around(*self._applied(scope, [s for s in self._symbols if s.range == BOOL]))

    def _equal(self, scope: tuple[Var, ...]) -> Term:
        """Two variables of a sort, or a value that a symbol or variable has."""
        some = [var for var in scope if not var.sort.values]
        if some and self._rng.randrange(2):
            one = self._rng.choice(some)
            other = self._rng.choice([var for var in some if var.sort == one.sort])
            return Op("eq", (one, other))
        value, loose = self._applied(scope, [s for s in self._symbols if s.range.values])
        named = [var for var in scope if var.sort == value.sort]
        literal = Lit(self._rng.randrange(len(value.sort.values)), value.sort)
        return self._around(Op("eq", (value, self._rng.choice((literal, *named)))), loose)

    def _number(self, depth: int, scope: tuple[Var, ...]) -> Term:
        kind = self._rng.choice(_NUMBERS if depth else ("symbol", "literal"))
        match kind:
            case "add" | "sub":
                return Op(kind, (self._number(depth - 1, scope), self._number(depth - 1, scope)))
            case "ite":
                then, other = self._number(depth - 1, scope), self._number(depth - 1, scope)
                return Op("ite", (self._condition(depth - 1, scope), then, other))
            case "total" | "count":
                var = self._var()
                inner = (*scope, var)
                if kind == "total":
                    return Bind("total", var, self._number(depth - 1, inner))
                body = self._condition(depth - 1, inner)
                return Bind("total", var, Op("ite", (body, Lit(1, INT), Lit(0, INT))))
            case "literal":
                return Lit(self._rng.randrange(3), INT)
        return self._around(*self._applied(scope, self._numeric))

    def _applied(self, scope: tuple[Var, ...], symbols: list[Symbol]) -> tuple[App, Sequence[Var]]:
        """A symbol at variables that are bound, and what is still to be bound."""
        fitting = [s for s in symbols if s.domain and {*s.domain} <= {var.sort for var in scope}]
        symbol = self._rng.choice(fitting or symbols)
        args: list[Term] = []
        loose: list[Var] = []
        for sort in symbol.domain:
            if sort.values and self._rng.randrange(2):
                args.append(Lit(self._rng.randrange(len(sort.values)), sort))
                continue
            there = [var for var in (*scope, *loose) if var.sort == sort]
            if not there:
                loose.append(self._var(sort))
                there = loose[-1:]
            args.append(self._rng.choice(there))
        return App(symbol, tuple(args)), loose

    def _around(self, term: Term, loose: Sequence[Var]) -> Term:
        """The term, and around it what binds the variables."""
        for var in loose:
            kind = self._rng.choice(("some", "every")) if term.sort == BOOL else "total"
            term = Bind(kind, var, term)
        return term

    def _var(self, sort: Sort | None = None) -> Var:
        self._bound += 1
        return Var(f"x{self._bound}", sort or self._rng.choice(self._sorts))


def _is_plain(sort: Sort) -> bool:
    return sort != BOOL and sort not in NUMERIC
