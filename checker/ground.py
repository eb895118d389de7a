"""Counterexamples to induction as concrete states: obligations grounded over a small instance.

Over a few elements of each sort quantifiers are finite and totals are plain sums, so the solver
either finds two whole states with a step between them, or shows that there are none of that
size.  A counterexample found here refutes the obligation for good: no fact about sums is assumed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, Final

import z3

from kvclaims.spec.language import (
    BOOL,
    NAT,
    NUMERIC,
    Action,
    App,
    Bind,
    Lit,
    Machine,
    New,
    Op,
    Property,
    Sort,
    Symbol,
    Term,
    Update,
    Var,
)

SIZES: Final[Mapping[str, int]] = {"Block": 3, "Claim": 2, "Request": 2, "Key": 2}
"""Elements of each sort: enough for two of everything to meet, and a null block."""

DEFAULT_SIZE: Final = 2
TIMEOUT_MS: Final = 10_000

Slot = tuple[Symbol, tuple[int, ...]]
State = Mapping[Slot, Any]


@dataclass(frozen=True)
class Gap:
    """A counterexample to induction: a state that satisfies every invariant, and a step from
    it that breaks one.  The first state need not be reachable."""

    action: str
    before: Mapping[str, str]
    after: Mapping[str, str]

    def lines(self) -> Iterator[str]:
        yield f"    before: {', '.join(f'{k} = {v}' for k, v in self.before.items())}"
        names = {**self.before, **self.after}
        changed = (
            f"{name}: {self.before.get(name, '0')} → {self.after.get(name, '0')}"
            for name in names
            if self.before.get(name) != self.after.get(name)
        )
        yield f"    after {self.action}: {', '.join(changed)}"


def find_gap(machine: Machine, prop: Property, action: Action | None) -> Gap | None:
    """A small counterexample to the obligation, None if there is none of this size or in time.

    `action` None asks for an initial state that breaks the property.
    """
    return _Ground(machine).search(prop, action)


class Places:
    """Where a condition holds in small states of a machine: each satisfies its axioms and, where
    `kept`, its invariants, but need not be reachable.  What is asked shares what is built once."""

    def __init__(self, machine: Machine, *, kept: bool = True) -> None:
        self._ground = _Ground(machine)
        ground = self._ground
        self._solver = z3.Solver(ctx=ground.context)
        self._solver.set("timeout", TIMEOUT_MS)
        self._solver.add(*ground.limits)
        invariants = machine.invariants if kept else ()
        given = (*machine.axioms, *(prop.formula for prop in invariants))
        self._solver.add(*(ground.term(term, {}, ground.state) for term in given))

    def of_state(self, condition: Term) -> bool | None:
        """Whether some state has it, a condition without free variables; None: not in time."""
        return self._ask(condition, {}, self._ground.state)

    def of_step(self, action: Action, condition: Term) -> bool | None:
        """Whether some step of the action has it, a condition of its parameters and both states."""
        ground = self._ground
        before = len(ground.limits)
        choices = list(ground.choices(action.params))
        limits = ground.limits[before:]

        def taken(env: Mapping[Var, Any]) -> bool | None:
            after = ground.after(action.updates, env)
            enabled = ground.term(action.enabled, env, ground.state)
            return self._ask(condition, env, after, *limits, enabled)

        return _some(map(taken, choices))

    def of_pair(self, condition: Term, params: tuple[Var, ...] = ()) -> bool | None:
        """Whether some two states have it, of which the second owes nothing to the first."""
        ground = self._ground
        before = len(ground.limits)
        after = {
            slot: ground.unknown(f"later {unknown}", slot[0].range)
            if not slot[0].rigid
            else unknown
            for slot, unknown in ground.state.items()
        }
        choices = list(ground.choices(params))
        limits = ground.limits[before:]
        return _some(self._ask(condition, env, after, *limits) for env in choices)

    def _ask(
        self, condition: Term, env: Mapping[Var, Any], after: State, *more: Any
    ) -> bool | None:
        self._solver.push()
        self._solver.add(*more, self._ground.term(condition, env, self._ground.state, after))
        answer = self._solver.check()
        self._solver.pop()
        return None if answer == z3.unknown else bool(answer == z3.sat)


def _some(answers: Iterable[bool | None]) -> bool | None:
    """Whether one is true; None if it may be."""
    late = False
    for answer in answers:
        if answer:
            return True
        late |= answer is None
    return None if late else False


class _Ground:
    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.context = z3.Context()
        self.state: dict[Slot, Any] = {}
        self.limits: list[Any] = []
        for symbol in machine.symbols:
            for place in product(*(self.domain(sort) for sort in symbol.domain)):
                name = f"{symbol.name}({', '.join(map(str, place))})"
                self.state[symbol, place] = self.unknown(name, symbol.range)

    def search(self, prop: Property, action: Action | None) -> Gap | None:
        for env in self.choices(action.params if action else ()):
            if gap := self._search(prop, action, env):
                return gap
        return None

    def _search(self, prop: Property, action: Action | None, env: Mapping[Var, Any]) -> Gap | None:
        solver = z3.Solver(ctx=self.context)
        solver.set("timeout", TIMEOUT_MS)
        solver.add(*(self.term(axiom, {}, self.state) for axiom in self.machine.axioms))
        updates = action.updates if action else self.machine.init
        after = self.after(updates, env)
        solver.add(*self.limits)
        if action:
            solver.add(*(self.term(i.formula, {}, self.state) for i in self.machine.invariants))
            solver.add(self.term(action.enabled, env, self.state))
        wanted = (
            self.term(prop.formula, env, self.state, after)
            if prop.of_steps
            else self.term(prop.formula, env, after)
        )
        solver.add(z3.Not(wanted))
        if solver.check() != z3.sat:
            return None
        model = solver.model()
        label = self._label(model, action, env) if action else "the start"
        before = self._show(model, self.state) if action else {}
        return Gap(label, before, self._show(model, after))

    def domain(self, sort: Sort) -> range:
        return range(SIZES.get(sort.name, DEFAULT_SIZE))

    def unknown(self, name: str, sort: Sort) -> Any:
        if sort == BOOL:
            return z3.Bool(name, self.context)
        unknown = z3.Int(name, self.context)
        if sort.values:
            self.limits += [unknown >= 0, unknown < len(sort.values)]
        elif sort == NAT and name.startswith("?"):
            self.limits.append(unknown >= 0)
        return unknown

    def choices(self, params: tuple[Var, ...]) -> Iterator[dict[Var, Any]]:
        """Values of parameters.  Of those over one uninterpreted sort each is an element that one
        before it is, or the next: any other choice is a renaming.  The rest are unknown."""
        told = {p: self.unknown("?" + p.name, p.sort) for p in params if _is_finite(p.sort)}
        places = [param for param in params if param not in told]
        for values in product(*(self.domain(param.sort) for param in places)):
            met: dict[Sort, int] = {}
            for param, value in zip(places, values, strict=True):
                if value > met.get(param.sort, 0):
                    break
                met[param.sort] = max(met.get(param.sort, 0), value + 1)
            else:
                yield {**told, **dict(zip(places, values, strict=True))}

    def after(self, updates: tuple[Update, ...], env: Mapping[Var, Any]) -> dict[Slot, Any]:
        after = dict(self.state)
        for update in updates:
            for values in product(*(self.domain(v.sort) for v in update.over)):
                here = {**env, **dict(zip(update.over, values, strict=True))}
                place = tuple(here[a] for a in update.target.args)  # type: ignore[index]
                after[update.target.symbol, place] = self.term(update.value, here, self.state)
        return after

    def term(
        self, term: Term, env: Mapping[Var, Any], state: State, after: State | None = None
    ) -> Any:
        def go(t: Term, e: Mapping[Var, Any] = env) -> Any:
            return self.term(t, e, state, after)

        match term:
            case Var():
                return env[term]
            case Lit(literal, of):
                return z3.BoolVal(bool(literal), self.context) if of == BOOL else literal
            case New(body):
                assert after is not None, "only step properties speak of the new state"
                return self.term(body, env, after, after)
            case App(symbol, args):
                return state[symbol, tuple(go(a) for a in args)]
            case Op(kind, args):
                return self._operate(kind, [go(a) for a in args])
            case Bind(kind, var, body):
                parts = [go(body, {**env, var: v}) for v in self.domain(var.sort)]
                if kind == "total":
                    return z3.Sum([self._integer(p) for p in parts])
                join = z3.And if kind == "every" else z3.Or
                return join(*parts, self.context)
        raise TypeError(f"not a term: {term!r}")

    def _integer(self, value: Any) -> Any:
        return z3.IntVal(value, self.context) if isinstance(value, int) else value

    def _operate(self, kind: str, args: list[Any]) -> Any:
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
                return z3.If(args[0], *(self._integer(a) for a in args[1:]))
            case "eq" if all(isinstance(a, int) for a in args):
                return z3.BoolVal(args[0] == args[1], self.context)
        a, b = (self._integer(x) for x in args)
        match kind:
            case "eq":
                return a == b
            case "le":
                return a <= b
            case "lt":
                return a < b
            case "add":
                return a + b
            case "sub":
                return a - b
        raise TypeError(f"unknown operator {kind!r}")

    # -- showing

    def _label(self, model: z3.ModelRef, action: Action, env: Mapping[Var, Any]) -> str:
        shown = [self._element(model, p.sort, value) for p, value in env.items()]
        return f"{action.name}({', '.join(shown)})"

    def _show(self, model: z3.ModelRef, state: State) -> dict[str, str]:
        """What is true, or not zero."""
        shown = {}
        for (symbol, place), unknown in state.items():
            value = self._element(model, symbol.range, unknown)
            if value not in ("False", "0"):
                places = zip(symbol.domain, place, strict=True)
                names = ", ".join(self._element(model, sort, p) for sort, p in places)
                shown[f"{symbol.name}({names})" if place else symbol.name] = value
        return shown | self._viewed(model, state)

    def _viewed(self, model: z3.ModelRef, state: State) -> dict[str, str]:
        """What the views of the machine make of the state."""
        shown = {}
        for view in self.machine.views:
            for place in product(*(self.domain(v.sort) for v in view.places)):
                at = dict(zip(view.places, place, strict=True))
                value = self._element(model, view.term.sort, self.term(view.term, at, state))
                names = ", ".join(self._element(model, v.sort, p) for v, p in at.items())
                shown[f"{view.name}({names})" if names else view.name] = value
        return shown

    def _element(self, model: z3.ModelRef, sort: Sort, value: Any) -> str:
        if not isinstance(value, int):
            value = model.eval(value, model_completion=True)
        if sort == BOOL or sort in NUMERIC:
            return str(value)
        number = value if isinstance(value, int) else value.as_long()
        return sort.values[number] if sort.values else f"{sort.name.lower()}{number}"


def _is_finite(sort: Sort) -> bool:
    """Whether values of the sort are told by themselves, and not by a number of elements."""
    return sort == BOOL or sort in NUMERIC or bool(sort.values)
