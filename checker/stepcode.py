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
    free_vars,
)

Element = Any
Place = tuple[Element, ...]
Env = Mapping[Var, Element]
Reader = Callable[[Env], Any]
Change = tuple["Table", Place, Any]


class Table:
    """A symbol's places whose value is not the default (false, zero, first value).

    `index[i]` finds the places by their element at `i`; `total` is the sum of all values.
    """

    __slots__ = ("index", "symbol", "total", "values")

    def __init__(self, symbol: Symbol) -> None:
        self.symbol = symbol
        self.values: dict[Place, Any] = {}
        self.index: tuple[dict[Element, set[Place]], ...] = tuple(
            defaultdict(set) for _ in symbol.domain
        )
        self.total = 0

    def set(self, place: Place, value: Any) -> None:
        old = self.values.get(place, 0)
        if old == value:
            return
        self.total += int(value) - int(old)
        if value:
            self.values[place] = value
            if not old:
                for index, element in zip(self.index, place, strict=True):
                    index[element].add(place)
            return
        del self.values[place]
        for index, element in zip(self.index, place, strict=True):
            places = index[element]
            places.discard(place)
            if not places:
                del index[element]


class Shadow:
    """A sparse state.  `values` and `index` look into its tables."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.tables: dict[Symbol, Table] = {}
        self.values: dict[Symbol, dict[Place, Any]] = {}
        self.index: dict[tuple[Symbol, int], dict[Element, set[Place]]] = {}
        for symbol in machine.symbols:
            self.adopt(symbol, Table(symbol))
        self.known: dict[Sort, dict[Element, None]] = {s: {} for s in machine.sorts}

    def adopt(self, symbol: Symbol, table: Table) -> None:
        """Let the symbol be this table, which may be another shadow's too."""
        self.tables[symbol] = table
        self.values[symbol] = table.values
        for i, index in enumerate(table.index):
            self.index[symbol, i] = index

    def get(self, symbol: Symbol, place: Place) -> Any:
        return self.tables[symbol].values.get(place, 0)

    def set(self, symbol: Symbol, place: Place, value: Any) -> None:
        self.tables[symbol].set(place, value)

    def meet(self, sort: Sort, element: Element) -> None:
        """Make an element known: quantifiers without a better source range over these."""
        if sort in self.known:
            self.known[sort].setdefault(element)


@dataclass(frozen=True)
class Step:
    """An action over a shadow; both functions take the parameters in order."""

    action: Action
    broken: Callable[..., tuple[int, ...]]
    """The numbers of the guards that do not hold."""
    changes: Callable[..., list[Change]]
    """What the step writes, read in the state before it."""


class Compiler:
    """Functions over a shadow for the terms of its machine."""

    def __init__(self, shadow: Shadow) -> None:
        self.shadow = shadow

    def action(self, action: Action) -> Step:
        """The guards and updates of an action."""
        broken, changes = self._made(_of_action(action))
        return Step(action, broken, changes)

    def term(self, term: Term) -> Reader:
        """A term whose free variables are read from an environment."""
        free = free_vars(term)
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
        return table.index[int(self.what)]


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
        writer = _Writer()
        params = ", ".join(writer.name(p) for p in action.params)
        lines = [f"def broken({params}):", " found = ()"]
        for number, guard in enumerate(action.guards):
            lines += [f" if not {writer.term(guard.condition)}:", f"  found += ({number},)"]
        lines += [" return found", f"def changes({params}):", " out = []"]
        for update in action.updates:
            lines += writer.update(update)
        lines.append(" return out")
        _TEXTS[id(action)] = writer.text(action, lines, "broken, changes")
    return _TEXTS[id(action)]


def _of_term(term: Term, free: Sequence[Var]) -> _Text:
    writer = _Writer()
    params = ", ".join(map(writer.name, free))
    return writer.text(term, [f"def value({params}):", f" return {writer.term(term)}"], "value,")


class _Writer:
    """Writes terms as Python expressions, and notes what they take hold of."""

    def __init__(self) -> None:
        self._grips: dict[_Grip, str] = {}
        self._names: dict[Var, str] = {}

    def text(self, source: Any, lines: Sequence[str], result: str) -> _Text:
        whole = [f"def make({', '.join(self._grips.values())}):"]
        whole += [f" {line}" for line in lines] + [f" return {result}"]
        code = compile("\n".join(whole), "<machine>", "exec")
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
                return f"any({self._each(var, body, self.term(body))})"
            case Bind("every", var, body):
                wrong = negation(body)
                return f"(not any({self._each(var, wrong, self.term(wrong))}))"
            case Bind("total", var, body):
                return self._total(var, body)
        raise TypeError(f"cannot be monitored: {term!r}")

    def _place(self, args: Sequence[Term]) -> str:
        return "(" + "".join(f"{self.term(a)}, " for a in args) + ")"

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
        match condition:
            case App(symbol, (argument,)) if argument == var:
                return f"{self.grip('table', symbol)}.total"
            case Op("not", (App(symbol, (argument,)),)) if argument == var and not var.sort.values:
                known = self.grip("known", var.sort)
                return f"(len({known}) - {self.grip('table', symbol)}.total)"
        wrong, counted = negation(condition), condition
        rest = ""
        if not self._narrow(var, condition) and not var.sort.values and self._narrow(var, wrong):
            counted, rest = wrong, f"len({self.grip('known', var.sort)}) - "
        holds = self.term(counted)
        name = self.name(var)
        return f"({rest}sum(1 for {name} in {self.source(var, counted)} if {holds}))"

    def update(self, update: Update) -> Iterator[str]:
        table, place = self.grip("table", update.target.symbol), self._place(update.target.args)
        if not update.over:
            yield f" out.append(({table}, {place}, {self.term(update.value)}))"
            return
        (var,) = update.over
        value = self.term(update.value)
        yield f" for {self.name(var)} in {self.source(var, _where(update))}:"
        yield f"  out.append(({table}, {place}, {value}))"

    # -- where to look

    def source(self, var: Var, condition: Term) -> str:
        """Where to look for values of `var` that can satisfy the condition: an index of a
        relation that the condition asserts, or everything known of the sort."""
        found = self._narrow(var, condition)
        if len(found) > 1:
            return "{" + ", ".join(f"*{one.text}" for one in found) + "}"
        if found:
            return found[0].text
        if var.sort == BOOL or var.sort.values:
            return f"range({len(var.sort.values) or 2})"
        return f"tuple({self.grip('known', var.sort)})"

    def _narrow(
        self, var: Var, condition: Term, hidden: tuple[Var, ...] = ()
    ) -> tuple[_Source, ...]:
        """Places to look, all of which together hold every value that satisfies the condition;
        none where only everything will do.  `hidden` variables have no value there."""
        asserted = (self._asserted(var, part, hidden) for part in conjuncts(condition))
        options = [option for option in asserted if option]
        return min(options, key=lambda option: sum(1 + one.cost for one in option), default=())

    def _asserted(self, var: Var, part: Term, hidden: tuple[Var, ...]) -> tuple[_Source, ...]:
        match part:
            case Op("lt", (Lit(0, _), App(symbol, (argument,)))) if argument == var:
                return (_Source(f"[p[0] for p in {self.grip('values', symbol)}]", 2),)
            case Op("or", (one, other)):
                both = self._narrow(var, one, hidden), self._narrow(var, other, hidden)
                return both[0] + both[1] if all(both) else ()
            case Bind("some", bound, body):
                return self._narrow(var, body, (*hidden, bound))
            case App(symbol, args) if var in args and symbol.range == BOOL:
                return (self._placed(var, part, hidden),)
        return ()

    def _placed(self, var: Var, part: App, hidden: tuple[Var, ...]) -> _Source:
        mine = part.args.index(var)
        for i, other in enumerate(part.args):
            if isinstance(other, Var) and other != var and other not in hidden:
                index = self.grip(str(i), part.symbol)
                found = f"p[{mine}] for p in {index}.get({self.name(other)}, ())"
                return _Source(f"[{found}]" if len(part.args) == 2 else f"{{{found}}}", 0)
        return _Source(f"tuple({self.grip(str(mine), part.symbol)})", 1)


@dataclass(frozen=True)
class _Source:
    """An expression for values of a variable; the `cost` of one that another element finds is 0."""

    text: str
    cost: int


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
        case Lit(literal, of) if of == BOOL and not literal:
            return update.target
        case Op("and", _) if update.target in conjuncts(update.value):
            return update.target
    return Lit(True, BOOL)
