"""Mutants of machines: one small change to one guard, one update or the initial state.

A mutant is named by where it is, by the operator, and by the text before and after, which are
unique within a machine; the same name means the same mutant as long as the text is the same.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from kvclaims.spec.language import (
    BOOL,
    FALSE,
    NUMERIC,
    TRUE,
    Action,
    App,
    Bind,
    Guard,
    Lit,
    Machine,
    Op,
    Term,
    Update,
    Var,
    children,
    rebuild,
    show,
)

INIT: Final = "init"

T = TypeVar("T")

OPERATORS: Final[dict[str, str]] = {
    "drop a guard": "the condition is left out",
    "close a guard": "the condition is false: the action never happens",
    "skip an update": "the value stays as it was",
    "drop a conjunct": "a ∧ b becomes a, or b",
    "drop a disjunct": "a ∨ b becomes a, or b",
    "swap a connective": "∧ becomes ∨, ∀ becomes ∃, and back",
    "drop a premise": "a → b becomes b",
    "drop a conclusion": "a → b becomes ¬a",
    "negate a condition": "p becomes ¬p",
    "flip a comparison": "≤ becomes <, < becomes ≤, and both the other way round",
    "swap an operation": "+ becomes −, − becomes +",
    "off by one": "a number becomes one more, or one less",
    "another value": "a value becomes the next one of its sort",
    "swap the branches": "if p then a else b becomes if p then b else a",
    "drop a branch": "if p then a else b becomes a, or b",
    "another argument": "an argument becomes another variable of its sort",
    "spread an update": "a value set in one place is set everywhere",
    "touch what is left alone": "a value that the action does not change is changed",
}


@dataclass(frozen=True)
class Mutant:
    """One changed machine.  `before` and `after` are texts, of the smallest part that changed."""

    machine: Machine
    action: str
    place: str
    operator: str
    before: str
    after: str
    nth: int = 1
    """Which of those of the same text in the same place."""

    @property
    def name(self) -> str:
        again = f" #{self.nth}" if self.nth > 1 else ""
        return (
            f"{self.machine.name}.{self.action}, {self.place}: {self.operator}: "
            f"{self.before} ⇒ {self.after}{again}"
        )

    @property
    def changed(self) -> Action | None:
        """The altered action, None where the initial state was altered."""
        return None if self.action == INIT else self.machine.action(self.action)


def mutants(machine: Machine) -> Iterator[Mutant]:
    """Every mutant of a machine, in the order of its text; no two have the same effect by
    their text."""
    names: dict[str, int] = {}
    for raw in _all(machine):
        nth = names[raw.name] = names.get(raw.name, 0) + 1
        yield replace(raw, nth=nth)


def _all(machine: Machine) -> Iterator[Mutant]:
    for i, update in enumerate(machine.init):
        for value, operator, before, after in _values(update, ()):
            init = _put(machine.init, i, replace(update, value=value))
            place = f"{show(update.target)} at the start"
            yield Mutant(_version(machine, init=init), INIT, place, operator, before, after)
    for action in machine.actions:
        for changed, place, operator, before, after in (
            *_of_action(action),
            *_touched(machine, action),
        ):
            actions = tuple(changed if a is action else a for a in machine.actions)
            version = _version(machine, actions=actions)
            yield Mutant(version, action.name, place, operator, before, after)


def _version(machine: Machine, **changes: object) -> Machine:
    """The machine with other parts.  Its declaration is not checked again: that takes longer
    than all the rest, and a change keeps to the parameters of its action."""
    version = copy.copy(machine)
    for name, value in changes.items():
        object.__setattr__(version, name, value)
    return version


_Change = tuple[Action, str, str, str, str]


def _of_action(action: Action) -> Iterator[_Change]:
    if action.guards:
        first = action.guards[0]
        closed = replace(action, guards=_put(action.guards, 0, replace(first, condition=FALSE)))
        yield closed, _of_guard(first), "close a guard", show(first.condition), "false"
    for i, guard in enumerate(action.guards):
        yield from _of_one_guard(action, i, guard)
    for i, update in enumerate(action.updates):
        place = f"{show(update.target)} after the step"
        rest = action.updates[:i] + action.updates[i + 1 :]
        whole = show(update.value)
        yield replace(action, updates=rest), place, "skip an update", whole, show(update.target)
        for wide in _spread(update):
            new = _put(action.updates, i, wide)
            yield replace(action, updates=new), place, "spread an update", whole, show(wide.target)
        for value, operator, before, after in _values(update, action.params):
            if value != update.target:
                new = _put(action.updates, i, replace(update, value=value))
                yield replace(action, updates=new), place, operator, before, after


def _of_one_guard(action: Action, i: int, guard: Guard) -> Iterator[_Change]:
    place, whole = _of_guard(guard), show(guard.condition)
    rest = action.guards[:i] + action.guards[i + 1 :]
    yield replace(action, guards=rest), place, "drop a guard", whole, "true"
    for term, operator, before, after in _distinct(guard.condition, action.params):
        if term not in (TRUE, FALSE):
            new = _put(action.guards, i, replace(guard, condition=term))
            yield replace(action, guards=new), place, operator, before, after


def _touched(machine: Machine, action: Action) -> Iterator[_Change]:
    """Of each symbol that the action leaves alone the value where its parameters point, and
    everywhere else in what they do not name."""
    updated = {update.target.symbol for update in action.updates}
    for symbol in machine.symbols:
        if symbol.rigid or symbol in updated:
            continue
        by_sort = {param.sort: param for param in reversed(action.params)}
        args = tuple(
            by_sort.get(sort, Var(f"any{i}", sort)) for i, sort in enumerate(symbol.domain)
        )
        target = symbol(*args)
        over = tuple(arg for arg in args if arg not in action.params)
        update = Update(target, _other(target), over)
        new = replace(action, updates=(*action.updates, update))
        place = f"{show(target)} after the step"
        yield new, place, "touch what is left alone", show(target), show(update.value)


def _spread(update: Update) -> Iterator[Update]:
    """The update with one argument of its target running over all its sort."""
    for i, arg in enumerate(update.target.args):
        if arg not in update.over:
            every = Var(f"any{i}", arg.sort)
            target = replace(update.target, args=_put(update.target.args, i, every))
            yield replace(update, target=target, over=(*update.over, every))


def _other(term: App) -> Term:
    if term.sort == BOOL:
        return ~term
    return term + 1 if term.sort in NUMERIC else Lit(len(term.sort.values) - 1, term.sort)


def _of_guard(guard: Guard) -> str:
    return f"guard “{guard.why}”"


def _values(update: Update, params: tuple[Var, ...]) -> Iterator[tuple[Term, str, str, str]]:
    scope = (*params, *update.over)
    yield from _distinct(update.value, scope)
    value = update.value
    has_number = isinstance(value, Op) and any(isinstance(part, Lit) for part in value.args)
    if value.sort in NUMERIC and not isinstance(value, Lit) and not has_number:
        yield value + 1, "off by one", show(value), show(value + 1)


def _put(items: tuple[T, ...], at: int, item: T) -> tuple[T, ...]:
    return (*items[:at], item, *items[at + 1 :])


def _distinct(term: Term, scope: tuple[Var, ...]) -> Iterator[tuple[Term, str, str, str]]:
    seen = {term}
    for changed, operator, before, after in _inside(term, scope):
        if changed not in seen:
            seen.add(changed)
            yield changed, operator, show(before), show(after)


def _inside(term: Term, scope: tuple[Var, ...]) -> Iterator[tuple[Term, str, Term, Term]]:
    """Every term that differs from `term` in one place, with the part that changed."""
    for operator, after in _here(term, scope):
        yield after, operator, term, after
    parts = children(term)
    inner = (*scope, term.var) if isinstance(term, Bind) else scope
    for i, part in enumerate(parts):
        for changed, operator, before, after in _inside(part, inner):
            yield rebuild(term, _put(parts, i, changed)), operator, before, after


def _here(term: Term, scope: tuple[Var, ...]) -> Iterator[tuple[str, Term]]:
    match term:
        case Lit():
            yield from _literal(term)
        case App(symbol, args):
            for i, arg in enumerate(args):
                for other in scope:
                    if other.sort == arg.sort and other != arg:
                        yield "another argument", App(symbol, _put(args, i, other))
            if term.sort == BOOL:
                yield "negate a condition", ~term
        case Bind("every" | "some" as kind, var, body):
            yield "swap a connective", Bind("some" if kind == "every" else "every", var, body)
        case Op(kind, args):
            yield from _operation(kind, args, term)


def _literal(term: Lit) -> Iterator[tuple[str, Term]]:
    number = int(term.value)
    if term.of == BOOL:
        yield "negate a condition", Lit(not term.value, BOOL)
    elif term.of in NUMERIC:
        yield "off by one", Lit(number + 1, term.of)
        yield "off by one", Lit(number - 1, term.of)
    elif len(term.of.values) > 1:
        yield "another value", Lit((number + 1) % len(term.of.values), term.of)


def _operation(kind: str, args: tuple[Term, ...], term: Op) -> Iterator[tuple[str, Term]]:
    match kind:
        case "not":
            yield "negate a condition", args[0]
        case "and" | "or":
            word = "drop a conjunct" if kind == "and" else "drop a disjunct"
            yield from ((word, part) for part in args)
            yield "swap a connective", Op("or" if kind == "and" else "and", args)
        case "implies":
            yield "drop a premise", args[1]
            yield "drop a conclusion", ~args[0]
        case "eq":
            yield "negate a condition", ~term
        case "le" | "lt":
            a, b = args
            yield "flip a comparison", Op("lt" if kind == "le" else "le", args)
            yield "flip a comparison", Op(kind, (b, a))
        case "add" | "sub":
            yield "swap an operation", Op("sub" if kind == "add" else "add", args)
        case "ite":
            condition, then, otherwise = args
            yield "swap the branches", Op("ite", (condition, otherwise, then))
            yield "drop a branch", then
            yield "drop a branch", otherwise
