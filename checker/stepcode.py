"""Guards and updates of a machine as Python functions over a sparse shadow state.

Each action becomes the text of two functions, compiled once in a process: which guards fail, and
what the step writes.  Bound variables range over an index of a relation that their condition
asserts, so that a step costs what it touches; a count of what satisfies no relation counts the
others and subtracts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any, Final

from kvclaims.spec.language import (
    BOOL,
    NUMERIC,
    TRUE,
    Action,
    App,
    Bind,
    Lit,
    Machine,
    Op,
    Sort,
    Symbol,
    Term,
    Update,
    Var,
)

Element = Any
Place = tuple[Element, ...]
Env = Mapping[Var, Element]
Reader = Callable[[Env], Any]
Change = tuple["Table", Place, Any]

ORIGIN: Final = "<machine>"
"""Where the text says that it comes from."""


class Table:
    """A symbol's places whose value is not the default (false, zero, first value).

    `total` is the sum of all values; `by(i)` finds the places by their element at `i`, and
    `having` by their value.
    """

    __slots__ = ("_having", "_indexes", "symbol", "total", "values")

    def __init__(self, symbol: Symbol) -> None:
        self.symbol = symbol
        self.values: dict[Place, Any] = {}
        self.total = 0
        self._indexes: dict[int, dict[Element, set[Place]]] = {}
        self._having: dict[Any, set[Place]] | None = None

    @property
    def having(self) -> dict[Any, set[Place]]:
        """The places of each value but the default: made when first asked for, and kept."""
        if self._having is None:
            self._having = defaultdict(set)
            for place, value in self.values.items():
                self._having[value].add(place)
        return self._having

    def by(self, i: int) -> dict[Element, set[Place]]:
        """An index: made when it is first asked for, and kept from then on."""
        if i not in self._indexes:
            index = self._indexes[i] = defaultdict(set)
            for place in self.values:
                index[place[i]].add(place)
        return self._indexes[i]

    def set(self, place: Place, value: Any) -> None:
        values = self.values
        old = values.get(place, 0)
        if old == value:
            return
        self.total += value - old
        if self._having is not None:
            _moved(self._having, place, old, value)
        if value:
            values[place] = value
            for i, index in self._indexes.items():
                index[place[i]].add(place)
            return
        del values[place]
        for i, index in self._indexes.items():
            places = index[place[i]]
            places.discard(place)
            if not places:
                del index[place[i]]


def _moved(having: dict[Any, set[Place]], place: Place, old: Any, value: Any) -> None:
    """A place is found by its new value instead of its old one; no entry is left empty."""
    if old:
        having[old].discard(place)
        if not having[old]:
            del having[old]
    if value:
        having[value].add(place)


class Shadow:
    """A sparse state.  `values` and `index` look into its tables."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.tables: dict[Symbol, Table] = {}
        self.values: dict[Symbol, dict[Place, Any]] = {}
        for symbol in machine.symbols:
            self.adopt(symbol, Table(symbol))
        self.index = _Indexes(self.tables)
        self.known: dict[Sort, dict[Element, None]] = {s: {} for s in machine.sorts}

    def adopt(self, symbol: Symbol, table: Table) -> None:
        """Let the symbol be this table, which may be another shadow's too."""
        self.tables[symbol] = table
        self.values[symbol] = table.values

    def get(self, symbol: Symbol, place: Place) -> Any:
        return self.tables[symbol].values.get(place, 0)

    def set(self, symbol: Symbol, place: Place, value: Any) -> None:
        self.tables[symbol].set(place, value)

    def meet(self, sort: Sort, element: Element) -> None:
        """Make an element known: quantifiers without a better source range over these."""
        if sort in self.known:
            self.known[sort].setdefault(element)


@dataclass(frozen=True)
class _Indexes:
    """Every index of a shadow's tables, by symbol and position."""

    tables: Mapping[Symbol, Table]

    def __getitem__(self, of: tuple[Symbol, int]) -> dict[Element, set[Place]]:
        symbol, i = of
        return self.tables[symbol].by(i)


@dataclass(frozen=True)
class Step:
    """An action over a shadow."""

    action: Action
    broken: Callable[..., tuple[int, ...]]
    """The numbers of the guards that do not hold; takes the parameters in order."""
    changes: Callable[..., list[Change]]
    """What the step writes, read in the state before it; takes the parameters in order."""
    take: Callable[[Mapping[str, Any], Callable[[tuple[int, ...]], None]], None]
    """The whole step: takes arguments by name as they are told, meets them, says which guards do
    not hold if any does not, and writes."""


class Compiler:
    """Functions over a shadow for the terms of its machine."""

    def __init__(self, shadow: Shadow) -> None:
        self.shadow = shadow

    def action(self, action: Action) -> Step:
        """The guards and updates of an action."""
        return Step(action, *self._made(_of_action(action)))

    def term(self, term: Term) -> Reader:
        """A term whose free variables are read from an environment."""
        free = term.free
        (value,) = self._made(_of_term(term, free))
        return lambda env: value(*[env[var] for var in free])

    def _made(self, text: _Text) -> Any:
        space: dict[str, Any] = {}
        exec(text.code, space)  # text that this module wrote from declarations, nothing read in
        return space["make"](*(grip.of(self.shadow) for grip in text.grips))


# --- text ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Grip:
    """What the text takes hold of in a shadow: a symbol's part, or what is known of a sort."""

    what: str
    of_what: Symbol | Sort

    def of(self, shadow: Shadow) -> Any:
        if isinstance(self.of_what, Sort):
            return shadow.known[self.of_what]
        table = shadow.tables[self.of_what]
        match self.what:
            case "get":
                return table.values.get
            case "values":
                return table.values
            case "table":
                return table
            case "set":
                return table.set
            case "having":
                return table.having
        return table.by(int(self.what))


@dataclass(frozen=True)
class _Text:
    source: Any
    """Whose text it is: kept, so that no other object gets its identity."""
    code: CodeType
    grips: tuple[_Grip, ...]


_TEXTS: Final[dict[int, _Text]] = {}
"""Text by the identity of its action: to hash a declaration costs more than to compile it."""


def _of_action(action: Action) -> _Text:
    if id(action) not in _TEXTS:
        writer = _Writer(action.params)
        params = ", ".join(writer.name(p) for p in action.params)
        guards, changes = list(writer.guards(action)), list(writer.changes(action))
        writes, meets = list(writer.writes(action)), list(writer.meets(action))
        places = writer.places()
        lines = [f"def broken({params}):", *places, *guards, " return found"]
        lines += [f"def changes({params}):", *places, " out = []", *changes, " return out"]
        lines += ["def take(args, report):", *meets, *places, *guards]
        lines += [" if found:", "  report(found)", *writes]
        _TEXTS[id(action)] = writer.text(action, lines, "broken, changes, take")
    return _TEXTS[id(action)]


def _of_term(term: Term, free: Sequence[Var]) -> _Text:
    writer = _Writer()
    params = ", ".join(map(writer.name, free))
    return writer.text(term, [f"def value({params}):", f" return {writer.term(term)}"], "value,")


class _Writer:
    """Writes terms as Python expressions, and notes what they take hold of.

    A place of parameters alone is made once, at the beginning.
    """

    def __init__(self, params: Sequence[Var] = ()) -> None:
        self._params = frozenset(params)
        self._grips: dict[_Grip, str] = {}
        self._names: dict[Var, str] = {}
        self._places: dict[tuple[Term, ...], str] = {}

    def text(self, source: Any, lines: Sequence[str], result: str) -> _Text:
        whole = [f"def make({', '.join(self._grips.values())}):"]
        whole += [f" {line}" for line in lines] + [f" return {result}"]
        code = compile("\n".join(whole), ORIGIN, "exec")
        return _Text(source, code, tuple(self._grips))

    def name(self, var: Var) -> str:
        return self._names.setdefault(var, f"v{len(self._names)}")

    def grip(self, what: str, of_what: Symbol | Sort) -> str:
        return self._grips.setdefault(_Grip(what, of_what), f"g{len(self._grips)}")

    def term(self, term: Term) -> str:
        match term:
            case Var():
                return self.name(term)
            case Lit(literal, _):
                return repr(literal)
            case App(symbol, args):
                return f"{self.grip('get', symbol)}({self._place(args)}, 0)"
            case Op(kind, args):
                return _operation(kind, [self.term(a) for a in args])
            case Bind("some", var, body):
                return self._some(var, body)
            case Bind("every", var, body):
                return f"(not {self._some(var, negation(body))})"
            case Bind("total", var, body):
                return self._total(var, body)
        raise TypeError(f"cannot be monitored: {term!r}")

    def _place(self, args: tuple[Term, ...]) -> str:
        if args and all(a in self._params for a in args):
            return self._places.setdefault(args, f"p{len(self._places)}")
        return "(" + "".join(f"{self.term(a)}, " for a in args) + ")"

    def places(self) -> list[str]:
        return [
            f" {name} = ({''.join(f'{self.term(a)}, ' for a in args)})"
            for args, name in self._places.items()
        ]

    def guards(self, action: Action) -> Iterator[str]:
        yield " found = ()"
        for number, guard in enumerate(action.guards):
            yield f" if not {self.term(guard.condition)}:"
            yield f"  found += ({number},)"

    def meets(self, action: Action) -> Iterator[str]:
        """Arguments as they are told become elements of the machine."""
        for param in action.params:
            told, name, sort = f"args[{param.name!r}]", self.name(param), param.sort
            if sort.values:
                told = f"{ ({value: i for i, value in enumerate(map(str, sort.values))})!r}[{told}]"
            yield f" {name} = {told}"
            if not sort.values and sort != BOOL and sort not in NUMERIC:
                yield f" {self.grip('known', sort)}.setdefault({name})"

    def _some(self, var: Var, body: Term) -> str:
        """Most often there is nothing to look at, or nothing more to ask of what is there."""
        found = self._narrow(var, body)
        if len(found) != 1 or not found[0].index:
            return f"any({self._each(var, body, self.term(body))})"
        there = f"({found[0].index} in {found[0].of})"
        if isinstance(body, App) and len(body.args) == 2:
            return there
        return f"({there} and any({self._each(var, body, self.term(body))}))"

    def _each(self, var: Var, condition: Term, value: str) -> str:
        return f"{value} for {self.name(var)} in {self.source(var, condition)}"

    def _total(self, var: Var, body: Term) -> str:
        match body:
            case App(symbol, (argument,)) if argument == var:
                return f"{self.grip('table', symbol)}.total"
            case Op("ite", (condition, Lit(1, _), Lit(0, _))):
                return self._count(var, condition)
        return f"sum({self._each(var, Lit(True, BOOL), self.term(body))})"

    def _count(self, var: Var, condition: Term) -> str:
        wrong, counted, rest = negation(condition), condition, ""
        if self._narrow(var, wrong):
            counted, rest = wrong, f"len({self._everything(var.sort)}) - "
        holds = self.term(counted)
        name = self.name(var)
        return f"({rest}sum(1 for {name} in {self.source(var, counted)} if {holds}))"

    def changes(self, action: Action) -> Iterator[str]:
        for update in action.updates:
            table = self.grip("table", update.target.symbol)
            place, value = self._place(update.target.args), self.term(update.value)
            written = f"out.append(({table}, {place}, {value}))"
            if update.over:
                (var,) = update.over
                yield f" for {self.name(var)} in {self.source(var, _where(update))}:"
                yield f"  {written}"
            else:
                yield f" {written}"

    def writes(self, action: Action) -> Iterator[str]:
        """The same at once: everything is read before anything is written."""
        last = []
        for number, update in enumerate(action.updates):
            write = self.grip("set", update.target.symbol)
            place, value = self._place(update.target.args), self.term(update.value)
            if update.over:
                (var,) = update.over
                each = f"for {self.name(var)} in {self.source(var, _where(update))}"
                yield f" w{number} = [({place}, {value}) {each}]"
                last.append(f" for one in w{number}: {write}(*one)")
            elif isinstance(update.value, Lit):
                last.append(f" {write}({place}, {value})")
            else:
                yield f" w{number} = {value}"
                last.append(f" {write}({place}, w{number})")
        yield from last

    # -- where to look

    def source(self, var: Var, condition: Term) -> str:
        """Where to look for values of `var` that can satisfy the condition: an index of a
        relation that the condition asserts, or everything known of the sort."""
        found = self._narrow(var, condition)
        if len(found) > 1:
            return "{" + ", ".join(f"*{one.text}" for one in found) + "}"
        if found:
            return found[0].text
        return self._everything(var.sort)

    def _everything(self, sort: Sort) -> str:
        if sort == BOOL or sort.values:
            return f"range({len(sort.values) or 2})"
        return self.grip("known", sort)

    def _narrow(
        self, var: Var, condition: Term, hidden: tuple[Var, ...] = ()
    ) -> tuple[_Source, ...]:
        """Places to look, all of which together hold every value that satisfies the condition;
        none where only everything will do.  `hidden` variables have no value there."""
        asserted = (self._asserted(var, part, hidden) for part in conjuncts(condition))
        options = [option for option in asserted if option]
        return min(options, key=lambda option: sum(not one.index for one in option), default=())

    def _asserted(self, var: Var, part: Term, hidden: tuple[Var, ...]) -> tuple[_Source, ...]:
        match part:
            case Op("lt", (Lit(0, _), App(symbol, (argument,)))) if argument == var:
                return (self._all_of(symbol),)
            case Op("eq", (App(symbol, (argument,)), Lit(value, _))) if argument == var and value:
                return (self._having(symbol, value),)
            case Op("or", (one, other)):
                both = self._narrow(var, one, hidden), self._narrow(var, other, hidden)
                return both[0] + both[1] if all(both) else ()
            case Bind("some", bound, body):
                return self._narrow(var, body, (*hidden, bound))
            case App(_, args) if var in args:
                return (self._placed(var, part, hidden),)
        return ()

    def _placed(self, var: Var, part: App, hidden: tuple[Var, ...]) -> _Source:
        mine = part.args.index(var)
        if len(part.args) == 1:
            return self._all_of(part.symbol)
        for i, other in enumerate(part.args):
            if isinstance(other, Var) and other != var and other not in hidden:
                index, name = self.grip(str(i), part.symbol), self.name(other)
                found = f"p[{mine}] for p in {index}.get({name}, ())"
                text = f"[{found}]" if len(part.args) == 2 else f"{{{found}}}"
                return _Source(text, name, index)
        return _Source(self.grip(str(mine), part.symbol))

    def _having(self, symbol: Symbol, value: Any) -> _Source:
        there = self.grip("having", symbol)
        return _Source(f"[p[0] for p in {there}.get({value!r}, ())]")

    def _all_of(self, symbol: Symbol) -> _Source:
        return _Source(f"[p[0] for p in {self.grip('values', symbol)}]")


@dataclass(frozen=True)
class _Source:
    """An expression for values of a variable; best is one that another element finds: it looks
    for `index` in `of`, which has no empty entries."""

    text: str
    index: str = ""
    of: str = ""


_INFIX: Final = {
    "and": "and",
    "or": "or",
    "eq": "==",
    "le": "<=",
    "lt": "<",
    "add": "+",
    "sub": "-",
}


def _operation(kind: str, args: Sequence[str]) -> str:
    match kind:
        case "not":
            return f"(not {args[0]})"
        case "implies":
            return f"(not {args[0]} or {args[1]})"
        case "ite":
            return f"({args[1]} if {args[0]} else {args[2]})"
    if kind not in _INFIX:
        raise TypeError(f"unknown operator {kind!r}")
    return f"({args[0]} {_INFIX[kind]} {args[1]})"


def conjuncts(term: Term) -> Iterator[Term]:
    if isinstance(term, Op) and term.kind == "and":
        for part in term.args:
            yield from conjuncts(part)
    else:
        yield term


def negation(term: Term) -> Term:
    """¬term with the negation pushed inwards, so that sources can be found in it."""
    match term:
        case Op("not", (a,)):
            return a
        case Op("implies", (a, b)):
            return a & negation(b)
        case Op("or", (a, b)):
            return negation(a) & negation(b)
        case Op("and", (a, b)):
            return negation(a) | negation(b)
        case Bind("every", var, body):
            return Bind("some", var, negation(body))
    return ~term


def _where(update: Update) -> Term:
    """A condition without which a bulk update changes nothing at a place."""
    match update.value:
        case Op("ite", (condition, _, otherwise)) if otherwise == update.target:
            return condition
        case Op("ite", (Op("lt", (Lit(0, _), counter)) as condition, _, Lit(0, _))) if (
            counter == update.target
        ):
            return condition
        case Lit(literal, _) if not literal:
            return update.target
        case Op("and", _) if update.target in conjuncts(update.value):
            return update.target
    return TRUE
