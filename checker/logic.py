"""A machine as first-order logic over uninterpreted sorts, for Z3.

The state before a step is a set of uninterpreted functions; the state after it is not a second
set with frame axioms but the same functions seen through the updates (`f′(x) = if x is the
updated place then value else f(x)`), so obligations stay small.

Sums over all elements of a sort (`total`, `count`) are not first-order.  Each becomes a ghost
integer that a step moves by what the step changes at the places it names, after the solver has
shown that it changes the summand nowhere else.  Of its value only facts that are true of every
finite sum are used: `_Ghosts.facts` says them.  Exact values are checked by exploration.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, Final

import z3

from kvclaims.spec.language import (
    BOOL,
    INT,
    NAT,
    NUMERIC,
    Action,
    App,
    Bind,
    Lit,
    Machine,
    MachineError,
    New,
    Op,
    Sort,
    Symbol,
    Term,
    Update,
    Var,
    substitute,
    subterms,
)

Env = Mapping[Var, z3.ExprRef]


@dataclass(frozen=True)
class Side:
    """Which state a term is read in: before a step, or after the updates of one."""

    name: str
    updates: tuple[Update, ...] = ()
    params: tuple[tuple[Var, z3.ExprRef], ...] = ()

    @property
    def label(self) -> str:
        """The name as part of an identifier."""
        return self.name.replace(" ", "_")


BEFORE = Side("before")

_OWN_NAMES: Final = re.compile(r"(total|negative|nonzero|grows|falls|apart)\d.*|(at|x|y)_.*|.*!.*")
"""What sums, their facts and bound variables are called here, so nothing of a machine is."""


class Logic:
    """The vocabulary of one machine in one Z3 context."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.context = z3.Context()
        self.sorts: dict[Sort, z3.SortRef] = {}
        self.declared: dict[str, z3.FuncDeclRef] = {}
        """Every function and free constant by its name, parameters of actions excepted."""
        self._values: dict[Sort, list[z3.ExprRef]] = {}
        for symbol in machine.symbols:
            self.function(symbol)
        params = [param.name for action in machine.actions for param in action.params]
        for name in (*self.declared, *params):
            if _OWN_NAMES.fullmatch(name):
                raise MachineError(f"{machine.name}: {name} is a name that proofs use themselves")
        self.ghosts = _Ghosts(self)

    def sort(self, sort: Sort) -> z3.SortRef:
        if sort == BOOL:
            return z3.BoolSort(self.context)
        if sort in NUMERIC:
            return z3.IntSort(self.context)
        if sort not in self.sorts:
            if sort.values:
                names = [f"{sort.name}.{value}" for value in sort.values]
                self.sorts[sort], self._values[sort] = z3.EnumSort(sort.name, names, self.context)
            else:
                self.sorts[sort] = z3.DeclareSort(sort.name, self.context)
        return self.sorts[sort]

    def function(self, symbol: Symbol) -> z3.FuncDeclRef:
        return self.declare(symbol.name, symbol.domain, symbol.range)

    def declare(self, name: str, domain: tuple[Sort, ...], result: Sort) -> z3.FuncDeclRef:
        """The function of that name, made when it is first asked for."""
        if name not in self.declared:
            sorts = [self.sort(s) for s in domain]
            self.declared[name] = z3.Function(name, *sorts, self.sort(result))
        return self.declared[name]

    def constant(self, name: str, sort: Sort) -> z3.ExprRef:
        return z3.Const(name, self.sort(sort))

    def constants(self, variables: tuple[Var, ...], prefix: str = "") -> dict[Var, z3.ExprRef]:
        return {v: self.constant(prefix + v.name, v.sort) for v in variables}

    # -- terms

    def term(self, term: Term, env: Env, side: Side = BEFORE, after: Side = BEFORE) -> z3.ExprRef:
        """`term` read on `side`; parts under `new` are read on `after`."""

        def go(t: Term) -> z3.ExprRef:
            return self.term(t, env, side, after)

        match term:
            case Var():
                return env[term]
            case Lit(literal, of):
                return self._literal(literal, of)
            case New(body):
                return self.term(body, env, after, after)
            case App(symbol, args):
                return self.read(symbol, tuple(go(a) for a in args), side)
            case Op(kind, args):
                return self._operate(kind, [go(a) for a in args])
            case Bind("total", var, body):
                return self.ghosts.read(var, body, env, side)
            case Bind(kind, var, body):
                bound = self._apart(var, body, env)
                inner = self.term(body, {**env, var: bound}, side, after)
                if kind == "every":
                    return z3.ForAll([bound], _given(self.typed({var: bound}), inner))
                return z3.Exists([bound], _all([*self.typed({var: bound}), inner]))
        raise TypeError(f"not a term: {term!r}")

    def _apart(self, var: Var, body: Term, env: Env) -> z3.ExprRef:
        """A constant for a bound variable, found in no value that its body is told with: an
        update may be read at a place that another binder of that name names."""
        name = var.name + "!"
        values = [env[free] for free in body.free if free != var]
        while any(_occurs(name, value) for value in values):
            name += "!"
        return self.constant(name, var.sort)

    def read(self, symbol: Symbol, args: tuple[z3.ExprRef, ...], side: Side) -> z3.ExprRef:
        """A symbol at a place, seen through the updates of the side."""
        current: z3.ExprRef = self.function(symbol)(*args)
        params = dict(side.params)
        for update in side.updates:
            if update.target.symbol != symbol:
                continue
            env, here = dict(params), []
            for target, arg in zip(update.target.args, args, strict=True):
                if target in update.over:
                    env[target] = arg
                else:
                    here.append(params[target] == arg)  # type: ignore[index]
            value = self.term(update.value, env)
            current = z3.If(_all(here), value, current) if here else value
        return current

    def _literal(self, literal: bool | int, of: Sort) -> z3.ExprRef:
        if of == BOOL:
            return z3.BoolVal(bool(literal), self.context)
        if of in NUMERIC:
            return z3.IntVal(int(literal), self.context)
        self.sort(of)
        return self._values[of][literal]

    @staticmethod
    def _operate(kind: str, args: list[Any]) -> z3.ExprRef:
        match kind:
            case "not":
                return z3.Not(args[0])
            case "and":
                return z3.And(*args)
            case "or":
                return z3.Or(*args)
            case "implies":
                return z3.Implies(*args)
            case "ite":
                return z3.If(*args)
            case "eq":
                return args[0] == args[1]
            case "le":
                return args[0] <= args[1]
            case "lt":
                return args[0] < args[1]
            case "add":
                return args[0] + args[1]
            case "sub":
                return args[0] - args[1]
        raise TypeError(f"unknown operator {kind!r}")

    def typed(self, env: Env) -> list[z3.ExprRef]:
        """What the sorts of variables say: a natural number is not negative."""
        return [e >= 0 for v, e in env.items() if v.sort == NAT]

    def after(self, action: Action) -> tuple[dict[Var, z3.ExprRef], Side]:
        """Fresh parameters of an action, and the state after it."""
        env = self.constants(action.params)
        return env, Side(f"after {action.name}", action.updates, tuple(env.items()))

    def initially(self) -> Side:
        """The initial state, as updates of everything that is not rigid."""
        return Side("initially", self.machine.init)


@dataclass(frozen=True)
class _Ghost:
    """A total: its bound variable, its body over canonical free variables, and its function."""

    var: Var
    body: Term
    free: tuple[Var, ...]
    function: z3.FuncDeclRef
    number: int


class _Ghosts:
    """The totals of a machine as ghost integers."""

    def __init__(self, logic: Logic) -> None:
        self.logic = logic
        self._by_key: dict[tuple[Var, Term], _Ghost] = {}
        self._settled: dict[tuple[int, str], bool] = {}
        self.relied: set[int] = set()
        """Totals whose lemma was used since the set was last cleared (`lemma`)."""
        for term in totals(logic.machine):
            self._ghost(term.var, term.body)

    def _ghost(self, var: Var, body: Term) -> _Ghost:
        found = tuple(v for v in body.free if v != var)
        names = {v: Var(f"free{i}", v.sort) for i, v in enumerate(found)}
        bound = Var("bound", var.sort)
        key = (bound, substitute(body, {**names, var: bound}))
        if key not in self._by_key:
            number = len(self._by_key)
            domain = tuple(v.sort for v in found)
            function = self.logic.declare(f"total{number}", domain, INT)
            self._by_key[key] = _Ghost(bound, key[1], tuple(names.values()), function, number)
        return self._by_key[key]

    def read(self, var: Var, body: Term, env: Env, side: Side) -> z3.ExprRef:
        ghost = self._ghost(var, body)
        places = tuple(env[v] for v in body.free if v != var)
        return self._value(ghost, places, side)

    def _value(self, ghost: _Ghost, places: tuple[z3.ExprRef, ...], side: Side) -> z3.ExprRef:
        if side == BEFORE:
            return ghost.function(*places)
        if not self._moves_only_at_points(ghost, side):
            return self._fresh(ghost, side)(*places)
        env = dict(zip(ghost.free, places, strict=True))
        value, points = ghost.function(*places), self._points(ghost, side)
        for i, point in enumerate(points):
            here = {**env, ghost.var: point}
            moved = self.logic.term(ghost.body, here, side) - self.logic.term(ghost.body, here)
            seen = [point == earlier for earlier in points[:i]]
            value = value + (z3.If(_any(seen), 0, moved) if seen else moved)
        return value

    @staticmethod
    def _points(ghost: _Ghost, side: Side) -> list[z3.ExprRef]:
        return [e for v, e in side.params if v.sort == ghost.var.sort]

    def _fresh(self, ghost: _Ghost, side: Side) -> z3.FuncDeclRef:
        domain = tuple(v.sort for v in ghost.free)
        return self.logic.declare(f"total{ghost.number}_{side.label}", domain, INT)

    def _moves_only_at_points(self, ghost: _Ghost, side: Side) -> bool:
        """Whether the step leaves the summand alone away from the places it names.

        Proved once for each total and step, from the updates alone; where that fails, the
        total after the step is any number that satisfies the facts.
        """
        key = (ghost.number, side.name)
        if key not in self._settled:
            solver = z3.Solver(ctx=self.logic.context)
            solver.set("timeout", 2000)
            solver.add(*self.lemma(ghost.number, side)[1])
            self._settled[key] = solver.check() == z3.unsat
        if self._settled[key]:
            self.relied.add(ghost.number)
        return self._settled[key]

    def lemma(self, number: int, side: Side) -> tuple[list[z3.ExprRef], list[z3.ExprRef]]:
        """The constants and assertions that say: the step changes the summand of a total at a
        place it does not name.  Where they are unsatisfiable the total moves with the step."""
        ghost = self._numbered[number]
        env = self.logic.constants((*ghost.free, ghost.var), "at_")
        away = [env[ghost.var] != point for point in self._points(ghost, side)]
        before = self.logic.term(ghost.body, env)
        changed = before != self.logic.term(ghost.body, env, side)
        return list(env.values()), [*away, changed]

    def body(self, number: int) -> Term:
        """What a total adds up."""
        return self._numbered[number].body

    @property
    def _numbered(self) -> tuple[_Ghost, ...]:
        return tuple(self._by_key.values())

    @property
    def groups(self) -> int:
        """How many groups of facts there are: one for each partition, then one for each total."""
        return len(self.logic.machine.partitions) + len(self._by_key)

    def about(self, group: int) -> frozenset[int]:
        """The totals that a group of facts speaks of."""
        partitions = self.logic.machine.partitions
        if group >= len(partitions):
            return frozenset({group - len(partitions)})
        totals = (partitions[group].whole, *partitions[group].parts)
        return frozenset(self._ghost(t.var, t.body).number for t in totals)

    def facts(self, side: Side, group: int) -> Iterator[z3.ExprRef]:
        """What is true of every finite sum, said of one partition of the machine: where one
        summand is pointwise the sum of others, so are the totals.  Or said of one total:

        - with no negative summand (witness `w`), a sum is at least zero, at least each summand,
          and at least the sum of two summands of different elements;
        - a sum that is not zero has a summand that is not zero;
        - a sum that a step makes larger (smaller) has a summand that it makes larger (smaller).
        """
        partitions = self.logic.machine.partitions
        if group >= len(partitions):
            yield from self._sum_facts(self._numbered[group - len(partitions)], side)
            return
        partition = partitions[group]
        totals = (partition.whole, *partition.parts)
        values = [self.logic.term(t, {}, side) for t in totals]
        w = self.logic.declare(f"apart{group}_{side.label}", (), partition.whole.var.sort)()
        at = [self.logic.term(t.body, {t.var: w}, side) for t in totals]
        yield z3.Or(values[0] == _sum(values[1:]), at[0] != _sum(at[1:]))

    def _sum_facts(self, ghost: _Ghost, side: Side) -> Iterator[z3.ExprRef]:
        logic = self.logic
        env = logic.constants(ghost.free, "at_")
        places = tuple(env.values())
        x, y = logic.constants((ghost.var,), "x_"), logic.constants((ghost.var,), "y_")
        (first,), (second,) = x.values(), y.values()
        value = self._value(ghost, places, side)
        domain = tuple(v.sort for v in ghost.free)

        def body(at: z3.ExprRef) -> z3.ExprRef:
            return logic.term(ghost.body, {**env, ghost.var: at}, side)

        def skolem(kind: str) -> z3.ExprRef:
            name = f"{kind}{ghost.number}_{side.label}"
            return logic.declare(name, domain, ghost.var.sort)(*places)

        negative = z3.BoolVal(False, logic.context)
        if not _is_count(ghost.body):
            negative = body(skolem("negative")) < 0
        nonzero = body(skolem("nonzero")) != 0
        yield _forall(places, z3.Or(value >= 0, negative))
        yield _forall((*places, first), z3.Or(value >= body(first), negative))
        yield _forall(
            (*places, first, second),
            z3.Or(first == second, value >= body(first) + body(second), negative),
        )
        yield _forall(places, z3.Or(value == 0, nonzero))
        yield from self._compared(ghost, side, env, value)

    def _compared(
        self, ghost: _Ghost, side: Side, env: Env, value: z3.ExprRef
    ) -> Iterator[z3.ExprRef]:
        """A sum that a step moves at places it does not name grows only if some summand does,
        and falls only if some summand does."""
        places = tuple(env.values())
        if side == BEFORE or side.name == "initially" or self._moves_only_at_points(ghost, side):
            return
        before = self._value(ghost, places, BEFORE)
        domain = tuple(v.sort for v in ghost.free)
        for kind, sign in (("grows", 1), ("falls", -1)):
            name = f"{kind}{ghost.number}_{side.label}"
            witness = self.logic.declare(name, domain, ghost.var.sort)(*places)
            here = {**env, ghost.var: witness}
            old, now = (self.logic.term(ghost.body, here, s) for s in (BEFORE, side))
            moved = sign * (now - old) > 0
            yield _forall(places, z3.Or(sign * (value - before) <= 0, moved))


def totals(machine: Machine) -> Iterator[Bind]:
    """Every sum that the machine speaks of, as often as it does.  Properties come first: what
    an action says of them too does not change the order of first occurrence."""
    sources = [p.formula for p in machine.properties]
    for partition in machine.partitions:
        sources += [partition.whole, *partition.parts]
    sources += [u.value for u in machine.init]
    for action in machine.actions:
        sources += [action.enabled, *(u.value for u in action.updates)]
    for source in sources:
        for term in subterms(source):
            if isinstance(term, Bind) and term.kind == "total":
                yield term


def _is_count(body: Term) -> bool:
    match body:
        case Op("ite", (_, Lit(1, _), Lit(0, _))):
            return True
    return False


def _occurs(name: str, term: z3.ExprRef) -> bool:
    """Whether a constant of that name is part of the term."""
    if z3.is_const(term):
        return bool(term.decl().name() == name)
    return any(_occurs(name, part) for part in term.children())


# A connective of one argument is no SMT-LIB: solvers other than Z3 refuse it.


def _all(parts: list[z3.ExprRef]) -> z3.ExprRef:
    return parts[0] if len(parts) == 1 else z3.And(*parts)


def _given(premises: list[z3.ExprRef], then: z3.ExprRef) -> z3.ExprRef:
    return z3.Implies(_all(premises), then) if premises else then


def _any(parts: list[z3.ExprRef]) -> z3.ExprRef:
    return parts[0] if len(parts) == 1 else z3.Or(*parts)


def _sum(parts: list[z3.ExprRef]) -> z3.ExprRef:
    return reduce(lambda a, b: a + b, parts)


def _forall(bound: tuple[z3.ExprRef, ...], body: z3.ExprRef) -> z3.ExprRef:
    return z3.ForAll(list(bound), body) if bound else body
