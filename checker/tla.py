"""A machine as a TLA+ module, and an instance of it as TLC's configuration.

Every uninterpreted sort is a constant set, every symbol a variable that holds a function (a
rigid symbol that the instance fixes is a constant), every action an operator, every property an
invariant or an action property under the name of its rule.  TLC, where a `tla2tools.jar` is
there, must count as many distinct states as this checker: steps that would pass a limit of the
instance are not taken in either, and steps that change nothing lead to no new state.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Final

from kvclaims.checker.finite import Instance
from kvclaims.checker.notation import Notation, conjuncts, is_simple, laid_out
from kvclaims.spec.interface import BadOperation
from kvclaims.spec.language import (
    BOOL,
    NUMERIC,
    Action,
    App,
    Bind,
    Lit,
    New,
    Op,
    Property,
    Sort,
    Symbol,
    Term,
    Update,
    Var,
    both,
    children,
    eq,
    ite,
    membership,
    rebuild,
    substitute,
)

KEYWORDS: Final = frozenset(
    {
        *("ASSUME", "ASSUMPTION", "AXIOM", "BOOLEAN", "CASE", "CHOOSE", "CONSTANT", "CONSTANTS"),
        *("DOMAIN", "ELSE", "ENABLED", "EXCEPT", "EXTENDS", "FALSE", "IF", "IN", "INSTANCE"),
        *("LAMBDA", "LET", "LOCAL", "MODULE", "OTHER", "PROOF", "RECURSIVE", "STRING", "SUBSET"),
        *("THEN", "THEOREM", "TRUE", "UNCHANGED", "UNION", "VARIABLE", "VARIABLES", "WITH"),
    }
)
STANDARD: Final = frozenset(
    {"Int", "Nat", "Cardinality", "IsFiniteSet", "Sum", "Numbers", "Init", "Next", "Spec"}
)
JAR: Final = "tla2tools.jar"


@dataclass(frozen=True)
class Module:
    """The text of `NAME.tla` and of `NAME.cfg`."""

    name: str
    text: str
    config: str


def tla(instance: Instance, name: str = "") -> Module:
    """The machine as a module called `name` (or as the machine), the instance as its `.cfg`.

    Raises BadOperation where `name` cannot name a module.
    """
    name = name or _identifier(instance.machine.name)
    if not is_module_name(name):
        raise BadOperation(
            f"{name!r} cannot name a TLA+ module (letters, digits and underscores, a letter first)"
        )
    return _Writer(instance, name).module()


def is_module_name(name: str) -> bool:
    """Whether a module, and so its file, can be called that."""
    return re.fullmatch(r"[A-Za-z]\w*", name, re.ASCII) is not None and name not in KEYWORDS


@dataclass(frozen=True)
class TlcCount:
    """What TLC found.  `seconds` is everything, the start of Java included."""

    states: int
    errors: bool
    seconds: float
    version: str


def tla2tools() -> Path | None:
    """TLC's jar, if it and Java are there: `$TLA2TOOLS`, `~/tla2tools.jar`, or in this folder."""
    if shutil.which("java") is None:
        return None
    told = os.environ.get("TLA2TOOLS")
    places = [Path(told)] if told else [Path.home() / JAR, Path(JAR)]
    return next((place for place in places if place.is_file()), None)


def count_with_tlc(instance: Instance, *, workers: int = 1) -> TlcCount:
    """Have TLC cover the instance and check every property.

    Raises BadOperation without Java and `tla2tools.jar`, and where TLC did not finish.
    """
    jar = tla2tools()
    if jar is None:
        raise BadOperation(f"needs Java and {JAR} (its path in TLA2TOOLS, or in the home folder)")
    module = tla(instance)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as place:
        Path(place, f"{module.name}.tla").write_text(module.text, encoding="utf-8")
        Path(place, f"{module.name}.cfg").write_text(module.config, encoding="utf-8")
        command = ["java", "-XX:+UseParallelGC", "-cp", str(jar.resolve()), "tlc2.TLC"]
        command += ["-deadlock", "-workers", str(workers), "-metadir", place, f"{module.name}.tla"]
        said = subprocess.run(command, cwd=place, capture_output=True, text=True, check=False)
    # The last count: while it goes on, TLC tells how far it has come in the same words.
    found = re.findall(r"([\d,]+) distinct states found", said.stdout)
    version = re.search(r"TLC2 Version (\S+)", said.stdout)
    if not found or version is None:
        raise BadOperation(f"TLC did not finish: {(said.stderr or said.stdout).strip()[-500:]}")
    return TlcCount(
        states=int(found[-1].replace(",", "")),
        errors="No error has been found" not in said.stdout,
        seconds=time.perf_counter() - start,
        version=version[1],
    )


# --- names -------------------------------------------------------------------------------


def property_name(prop: Property) -> str:
    """`F2_headroom`: an operator's name from the rule and the property's name."""
    return f"{prop.rule}_{re.sub(r'[^A-Za-z0-9]+', '_', prop.name).strip('_')}"


def _identifier(name: str) -> str:
    """The name as TLA+ can have it: names of the composed machine may hold spaces, say."""
    return re.sub(r"\W+", "_", name, flags=re.ASCII)


def _distinct(wanted: str, taken: set[str]) -> str:
    wanted = _identifier(wanted)
    while wanted in taken or wanted in KEYWORDS:
        wanted += "_"
    taken.add(wanted)
    return wanted


def _primed(term: Term, inside: bool = False) -> Term:
    """The term with `new` moved inwards to the symbols that change."""
    match term:
        case New(body):
            return _primed(body, inside=True)
        case App(symbol, args):
            whole = App(symbol, tuple(_primed(arg, inside) for arg in args))
            return New(whole) if inside and not symbol.rigid else whole
    return rebuild(term, tuple(_primed(child, inside) for child in children(term)))


def _renamed(term: Term, taken: frozenset[str]) -> Term:
    """The term with bound variables that have no name of the module, nor of an outer variable."""
    if isinstance(term, Bind):
        name = _identifier(term.var.name)
        while name in taken or name in KEYWORDS:
            name += "_"
        var = Var(name, term.var.sort)
        body = term.body if var == term.var else substitute(term.body, {term.var: var})
        return Bind(term.kind, var, _renamed(body, taken | {name}))
    return rebuild(term, tuple(_renamed(child, taken) for child in children(term)))


# --- the module --------------------------------------------------------------------------


class _Writer:
    def __init__(self, instance: Instance, name: str) -> None:
        self.instance = instance
        self.machine = instance.machine
        self.name = name
        taken = set(STANDARD)
        machine = self.machine
        self.sorts = {
            sort: _distinct(sort.name, taken) for sort in _sorts(instance) if sort not in NUMERIC
        }
        self.symbols = {symbol: _distinct(symbol.name, taken) for symbol in machine.symbols}
        self.actions = {a.name: _distinct(a.name, taken) for a in machine.actions}
        self.properties = {p: _distinct(property_name(p), taken) for p in machine.properties}
        self.sort_of = {p.name: p.sort for a in machine.actions for p in a.params}
        self.choices = {
            param: _distinct(f"Choices_{param}", taken)
            for param in instance.choices
            if param in self.sort_of  # a slice may lack the actions that have it
        }
        self.constants = tuple(s for s in machine.symbols if s.rigid and self._is_fixed(s))
        self.variables = tuple(s for s in machine.symbols if s not in self.constants)
        self.here = {s: _distinct(f"{self.symbols[s]}_here", taken) for s in self.constants}
        self.vars = _distinct("vars", taken)
        self.within = _distinct("Within", taken)
        self.taken = frozenset(taken)
        self.notation = Notation(self.flat, self._binder, "/\\", "\\/", "=>")

    def module(self) -> Module:
        return Module(self.name, "\n".join(self._module()) + "\n", "\n".join(self._config()) + "\n")

    def _places(self, symbol: Symbol) -> Iterator[tuple[int, ...]]:
        yield from product(*(self.instance.domain(sort) for sort in symbol.domain))

    def _is_fixed(self, symbol: Symbol) -> bool:
        fixed = self.instance.rigid.get(symbol.name, {})
        return all(place in fixed for place in self._places(symbol))

    def _module(self) -> Iterator[str]:
        machine = self.machine
        yield f"{'-' * 30} MODULE {self.name} {'-' * 30}"
        yield f"(* {machine.meaning}.  Written by kvclaims from its own declaration. *)"
        yield "EXTENDS Integers, FiniteSets"
        yield ""
        yield from self._declarations()
        yield from self._sum()
        yield from self._initial()
        for action in machine.actions:
            yield from self._action(action)
        yield from self._next()
        for prop in machine.properties:
            yield from self._property(prop)
        if self.constants:
            yield "(* The instance of the configuration *)"
            yield ""
            for symbol in self.constants:
                yield from self._fixed(symbol)
        yield "=" * 78

    def _declarations(self) -> Iterator[str]:
        plain = [name for sort, name in self.sorts.items() if not sort.values and sort != BOOL]
        constants = [*plain, *(self.symbols[s] for s in self.constants), *self.choices.values()]
        yield f"CONSTANTS {', '.join([*constants, 'Numbers'])}"
        for symbol in self.constants:
            yield f"\\* {self.symbols[symbol]}: {symbol.meaning}"
        yield ""
        for sort, name in self.sorts.items():
            if sort.values:
                yield f"{name} =="
                yield from textwrap.wrap(
                    f"{{{', '.join(map(_quoted, sort.values))}}}",
                    96,
                    initial_indent="  ",
                    subsequent_indent="   ",
                )
        yield ""
        yield "VARIABLES"
        for i, symbol in enumerate(self.variables):
            comma = "," if i < len(self.variables) - 1 else ""
            yield f"  {self.symbols[symbol]}{comma}  \\* {symbol.meaning}"
        yield ""
        yield from _wide(f"{self.vars} == ", [self.symbols[s] for s in self.variables])
        yield ""

    def _sum(self) -> Iterator[str]:
        yield "RECURSIVE Sum(_, _)"
        yield "Sum(f, S) =="
        yield "  IF S = {} THEN 0"
        yield "  ELSE LET x == CHOOSE y \\in S : TRUE IN f[x] + Sum(f, S \\ {x})"
        yield ""

    # -- states and steps

    def _initial(self) -> Iterator[str]:
        machine = self.machine
        about_constants = [a for a in machine.axioms if self._rigid_symbols(a) <= {*self.constants}]
        for axiom in about_constants:
            yield from self._define("ASSUME ", axiom, "")
        parts: list[list[str]] = []
        for symbol in self.variables:
            if symbol.rigid:
                parts.append([f"{self.symbols[symbol]} \\in {self._functions(symbol)}"])
                fixed = self.instance.rigid.get(symbol.name, {})
                for place, number in fixed.items():
                    parts.append([f"{self._at(symbol, place)} = {self._element(symbol, number)}"])
        parts += [self._lines(axiom) for axiom in machine.axioms if axiom not in about_constants]
        parts += [self._assigned(update.target.symbol, (update,), "") for update in machine.init]
        yield "Init =="
        yield from _list("/\\", parts)
        yield ""

    @staticmethod
    def _rigid_symbols(term: Term) -> set[Symbol]:
        found = {term.symbol} if isinstance(term, App) else set()
        return found.union(*(_Writer._rigid_symbols(child) for child in children(term)))

    def _functions(self, symbol: Symbol) -> str:
        values = self._set(symbol.range)
        if not symbol.domain:
            return values
        domain = " \\X ".join(map(self._set, symbol.domain))
        return f"[{domain} -> {values}]"

    def _at(self, symbol: Symbol, place: tuple[int, ...]) -> str:
        name = self.symbols[symbol]
        if not place:
            return name
        elements = (self._named(s, i) for s, i in zip(symbol.domain, place, strict=True))
        return f"{name}[{', '.join(elements)}]"

    def _action(self, action: Action) -> Iterator[str]:
        params = self._params(action)
        yield f"(* {action.meaning} *)"
        head = self.actions[action.name]
        yield f"{head}({', '.join(v.name for v in params.values())}) ==" if params else f"{head} =="
        parts: list[list[str]] = []
        for guard in action.guards:
            lines = self._lines(substitute(guard.condition, params), params)
            parts.append([*lines[:-1], f"{lines[-1]}  \\* {guard.protects[0]}: {guard.why}"])
        for symbol in dict.fromkeys(update.target.symbol for update in action.updates):
            updates = tuple(
                _with(update, params) for update in action.updates if update.target.symbol == symbol
            )
            parts.append(self._assigned(symbol, updates, "'", params))
        changed = {update.target.symbol for update in action.updates}
        rest = [self.symbols[s] for s in self.variables if s not in changed]
        if rest:
            parts.append(_wide("UNCHANGED ", rest))
        yield from _list("/\\", parts)
        yield ""

    def _params(self, action: Action) -> dict[Var, Var]:
        """Parameters under names that no operator of the module has."""
        renamed: dict[Var, Var] = {}
        taken = set(self.taken)
        for param in action.params:
            renamed[param] = Var(_distinct(param.name, taken), param.sort)
        return renamed

    def _assigned(
        self,
        symbol: Symbol,
        updates: Sequence[Update],
        prime: str,
        params: Mapping[Var, Term] | None = None,
    ) -> list[str]:
        """`f' = …`: by EXCEPT where single places change, as a whole function elsewhere."""
        name, scope = self.symbols[symbol], dict(params or {})
        if not symbol.domain:
            value = self._lines(updates[-1].value, scope)
            if updates[-1].target.sort == BOOL and not is_simple(updates[-1].value):
                value = _after("(", value)  # `=` binds more tightly than `/\\` and `\\/`
                value[-1] += ")"
            return _after(f"{name}{prime} = ", value)
        if not any(update.over for update in updates):
            places = [
                f"![{', '.join(map(self.flat, u.target.args))}] = "
                f"{self.flat(self._clean(u.value, scope))}"
                for u in updates
            ]
            return [f"{name}{prime} = [{name} EXCEPT {', '.join(places)}]"]
        bound = self._bound(symbol, updates, scope)
        old = symbol(*bound)
        whole: Term = old
        for update in updates:
            over = {
                arg: bound[i]
                for i, arg in enumerate(update.target.args)
                if isinstance(arg, Var) and arg in update.over
            }
            here = [
                eq(bound[i], arg) for i, arg in enumerate(update.target.args) if arg not in over
            ]
            written = substitute(update.value, over)
            whole = ite(both(*here), written, whole) if here else written
        inner = {**scope, **{v: v for v in bound}}
        head = ", ".join(f"{v.name} \\in {self._set(v.sort)}" for v in bound)
        body = self._lines(whole, inner)
        body[-1] += "]"
        if len(body) == 1:
            return [f"{name}{prime} = [{head} |-> {body[0]}"]
        return [f"{name}{prime} = [{head} |->", *_after("  ", body)]

    def _bound(
        self, symbol: Symbol, updates: Sequence[Update], scope: Mapping[Var, Term]
    ) -> tuple[Var, ...]:
        """A variable for each place of the symbol, called as in the first update if possible."""
        taken = set(self.taken) | {self.flat(term) for term in scope.values()}
        names: list[Var] = []
        for i, sort in enumerate(symbol.domain):
            arg = updates[0].target.args[i]
            wanted = arg.name if isinstance(arg, Var) else f"x{i}"
            names.append(Var(_distinct(wanted, taken), sort))
        return tuple(names)

    def _next(self) -> Iterator[str]:
        limits = self.instance.limits
        limited = [s for s in self.variables if s.name in limits]
        if limited:
            yield f"{self.within} =="
            parts = []
            for symbol in limited:
                bound = tuple(Var(f"x{i}", s) for i, s in enumerate(symbol.domain))
                head = ", ".join(f"{v.name} \\in {self._set(v.sort)}" for v in bound)
                body = f"{self.flat(symbol(*bound))} <= {limits[symbol.name]}"
                parts.append([f"\\A {head} : {body}" if bound else body])
            yield from _list("/\\", parts)
            yield ""
        steps = [[self._some(action)] for action in self.machine.actions]
        yield "Next =="
        if limited:
            yield from _after("  /\\ ", _list("\\/", steps, ""))
            yield f"  /\\ {self.within}'"
        else:
            yield from _list("\\/", steps)
        yield ""
        yield f"Spec == Init /\\ [][Next]_{self.vars}"
        yield ""

    def _some(self, action: Action) -> str:
        if not action.params:
            return self.actions[action.name]
        return f"\\E {self._ranges(action)} : {self._call(action)}"

    def _ranges(self, action: Action) -> str:
        return ", ".join(
            f"{new.name} \\in {self.choices.get(old.name) or self._set(old.sort)}"
            for old, new in self._params(action).items()
        )

    def _call(self, action: Action) -> str:
        names = (self.flat(term) for term in self._params(action).values())
        return f"{self.actions[action.name]}({', '.join(names)})"

    def _property(self, prop: Property) -> Iterator[str]:
        name = self.properties[prop]
        yield f"(* {prop.rule}.  {prop.meaning} *)"
        if not prop.of_steps:
            yield from self._define(f"{name} ==", prop.formula, "")
            return
        if prop.but:
            steps = [[self._some(a)] for a in self.machine.actions if prop.speaks_of(a.name)]
            lines = _after("[][(", _list("\\/", steps, ""))
            lines += _after(") => (", self._lines(prop.formula))
            lines[-1] += ")"
        elif prop.on is None:
            lines = _after("[][", self._lines(prop.formula))
        else:
            action = self.machine.action(prop.on)
            params = self._params(action)
            body = self._lines(substitute(prop.formula, params), params)
            if params:
                wrapped = _after("  (", body)
                wrapped[-1] += ")"
                lines = [f"[][\\A {self._ranges(action)} : {self._call(action)} =>", *wrapped]
            else:
                lines = [f"[][{self.actions[prop.on]} =>", *_after("  (", body)]
                lines[-1] += ")"
        lines[-1] += f"]_{self.vars}"
        yield f"{name} =="
        yield from _after("  ", lines)
        yield ""

    def _define(self, head: str, term: Term, end: str) -> Iterator[str]:
        yield head
        lines = _after("  ", self._lines(term))
        lines[-1] += end
        yield from lines
        yield ""

    # -- the instance

    def _fixed(self, symbol: Symbol) -> Iterator[str]:
        fixed = self.instance.rigid.get(symbol.name, {})
        name = self.here[symbol]
        if not symbol.domain:
            yield f"{name} == {self._element(symbol, fixed[()])}"
            yield ""
            return
        bound = tuple(f"x{i}" for i in range(len(symbol.domain)))
        head = ", ".join(
            f"{x} \\in {self._set(s)}" for x, s in zip(bound, symbol.domain, strict=True)
        )
        values = {place: fixed[place] for place in self._places(symbol)}
        yield f"{name} =="
        if symbol.range == BOOL:
            places = ", ".join(self._tuple(symbol, p) for p, flag in values.items() if flag)
            yield f"  [{head} |-> <<{', '.join(bound)}>> \\in {{{places}}}]"
        elif not values:
            yield f"  [{head} |-> 0]"
        else:
            cases = " [] ".join(
                f"<<{', '.join(bound)}>> = {self._tuple(symbol, place)} -> "
                f"{self._element(symbol, number)}"
                for place, number in values.items()
            )
            yield f"  [{head} |-> CASE {cases}]"
        yield ""

    def _tuple(self, symbol: Symbol, place: tuple[int, ...]) -> str:
        elements = (self._named(s, i) for s, i in zip(symbol.domain, place, strict=True))
        return f"<<{', '.join(elements)}>>"

    def _config(self) -> Iterator[str]:
        yield "SPECIFICATION Spec"
        yield "CONSTANTS"
        for sort, name in self.sorts.items():
            if not sort.values and sort != BOOL:
                elements = ", ".join(self._named(sort, i) for i in self.instance.domain(sort))
                yield f"  {name} = {{{elements}}}"
        yield f"  Numbers = {{{', '.join(map(str, self.instance.numbers))}}}"
        for param, name in self.choices.items():
            sort = self.sort_of[param]
            elements = ", ".join(self._named(sort, i) for i in self.instance.choices[param])
            yield f"  {name} = {{{elements}}}"
        for symbol in self.constants:
            yield f"  {self.symbols[symbol]} <- {self.here[symbol]}"
        for kind, props in (
            ("INVARIANTS", [p for p in self.machine.properties if not p.of_steps]),
            ("PROPERTIES", self.machine.step_properties),
        ):
            if props:
                yield kind
                yield from (f"  {self.properties[prop]}" for prop in props)

    def _element(self, symbol: Symbol, number: int) -> str:
        return self._named(symbol.range, number)

    def _named(self, sort: Sort, index: int) -> str:
        if sort == BOOL:
            return "TRUE" if index else "FALSE"
        if sort in NUMERIC:
            return str(index)
        return _quoted(self.instance.element(sort, index))

    def _set(self, sort: Sort) -> str:
        if sort == BOOL:
            return "BOOLEAN"
        return "Numbers" if sort in NUMERIC else self.sorts[sort]

    # -- terms

    def _clean(self, term: Term, scope: Mapping[Var, Term]) -> Term:
        used = {v.name for t in scope.values() for v in t.free}
        return _renamed(_primed(term), self.taken | used)

    def _lines(self, term: Term, scope: Mapping[Var, Term] | None = None) -> list[str]:
        return laid_out(self._clean(term, scope or {}), self.notation)

    def _binder(self, bind: Bind) -> str:
        sign = "\\A" if bind.kind == "every" else "\\E"
        return f"{sign} {bind.var.name} \\in {self._set(bind.var.sort)} :"

    def flat(self, term: Term) -> str:
        """The term in one line."""
        match term:
            case Var(name, _):
                return name
            case Lit(number, of):
                if of == BOOL:
                    return "TRUE" if number else "FALSE"
                return _quoted(of.values[number]) if of.values else str(number)
            case App(symbol, args):
                return self._applied(self.symbols[symbol], args)
            case New(App(symbol, args)):
                return self._applied(f"{self.symbols[symbol]}'", args)
            case Op():
                return self._operation(term)
            case Bind("total", var, Op("ite", (a, Lit(1, _), Lit(0, _)))):
                return f"Cardinality({{{var.name} \\in {self._set(var.sort)} : {self.flat(a)}}})"
            case Bind("total", var, body):
                domain = self._set(var.sort)
                return f"Sum([{var.name} \\in {domain} |-> {self.flat(body)}], {domain})"
            case Bind():
                return f"{self._binder(term)} {self.flat(term.body)}"
        raise TypeError(f"not a term: {term!r}")

    def _applied(self, name: str, args: tuple[Term, ...]) -> str:
        return f"{name}[{', '.join(map(self.flat, args))}]" if args else name

    def _operation(self, term: Op) -> str:
        match term:
            case Op("not", (Op("eq", (a, b)),)):
                return f"{self._inner(a)} # {self._inner(b)}"
            case Op("not", (a,)):
                return f"~{self._inner(a)}"
            case Op("ite", (a, b, c)):
                return f"IF {self.flat(a)} THEN {self.flat(b)} ELSE {self.flat(c)}"
            case Op("or", _) if among := membership(term):
                values = ", ".join(map(self.flat, among[1]))
                return f"{self._inner(among[0])} \\in {{{values}}}"
            case Op("and" | "or" as kind, _):
                sign = " /\\ " if kind == "and" else " \\/ "
                return sign.join(self._inner(part) for part in conjuncts(kind, term))
            case Op("eq", (a, b)) if a.sort == BOOL:
                return f"{self._inner(a)} <=> {self._inner(b)}"
            case Op(kind, (a, b)):
                return f"{self._inner(a)} {_SIGNS[kind]} {self._inner(b)}"
        raise TypeError(f"not an operation: {term!r}")

    def _inner(self, term: Term) -> str:
        simple = is_simple(term) or isinstance(term, New)
        return self.flat(term) if simple else f"({self.flat(term)})"


_SIGNS: Final = {"eq": "=", "le": "<=", "lt": "<", "add": "+", "sub": "-", "implies": "=>"}


def _wide(head: str, names: Sequence[str]) -> list[str]:
    """A tuple of many names, in as many lines as it needs."""
    further = " " * (len(head) + 2)
    return textwrap.wrap(f"{head}<<{', '.join(names)}>>", 96, subsequent_indent=further)


def _quoted(text: str) -> str:
    return f'"{text}"'


def _sorts(instance: Instance) -> list[Sort]:
    """Every sort of the machine, in order of first use."""
    machine = instance.machine
    found: dict[Sort, None] = {}
    for symbol in machine.symbols:
        found.update(dict.fromkeys((*symbol.domain, symbol.range)))
    for action in machine.actions:
        found.update(dict.fromkeys(param.sort for param in action.params))
    return [sort for sort in found if sort != BOOL]


def _with(update: Update, params: Mapping[Var, Term]) -> Update:
    """The update with parameters renamed; its own variables keep their names."""
    target = substitute(update.target, params)
    assert isinstance(target, App)
    return replace(update, target=target, value=substitute(update.value, params))


def _list(sign: str, parts: Sequence[list[str]], indent: str = "  ") -> list[str]:
    """A bulleted list; TRUE where it is empty."""
    lines = []
    for part in parts or [["TRUE"]]:
        lines += _after(f"{indent}{sign} ", part)
    return lines


def _after(prefix: str, lines: Sequence[str]) -> list[str]:
    return [prefix + lines[0], *(" " * len(prefix) + line for line in lines[1:])]
