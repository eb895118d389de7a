"""How large an instance is once its terms are unrolled, judged before anything is built of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import Final

from kvclaims.checker.finite import Instance
from kvclaims.spec.interface import BadOperation
from kvclaims.spec.language import Action, App, Bind, New, Op, Term, Update, Var

MOST_PARTS: Final = 4_000_000
"""Of terms that are unrolled: some twenty times the largest pinned instance."""

MOST_NUMBERS: Final = 1_000_000
"""What the numbers that an instance is built of may multiply to."""


def judge_numbers(name: str, settings: Mapping[str, int | tuple[int, ...]]) -> None:
    """Raises BadOperation where the instance could not even be written down."""
    largest = {
        key: max(given, default=0) if isinstance(given, tuple) else given
        for key, given in settings.items()
    }
    if prod(max(1, number) for number in largest.values()) > MOST_NUMBERS:
        told = " × ".join(f"{key} {number:,}" for key, number in largest.items())
        raise BadOperation(f"{name}: {told} is too large: {MOST_NUMBERS:,} is the most")


def judge(name: str, instance: Instance) -> None:
    """Raises BadOperation where more would have to be unrolled than any engine can explore."""
    if (parts := unrolled(instance)) > MOST_PARTS:
        raise BadOperation(
            f"{name}: {parts:,} parts to unroll, {MOST_PARTS:,} are the most: make the instance "
            "smaller"
        )


def unrolled(instance: Instance) -> int:
    """Slots of a state, and parts of all terms with parameters and quantifiers filled in."""
    machine = instance.machine
    slots = sum(
        prod(len(instance.domain(sort)) for sort in symbol.domain) for symbol in machine.symbols
    )
    actions = sum(_action(instance, action) for action in machine.actions)
    kept = (p.formula for p in machine.properties if not p.of_steps)
    return slots + actions + _all(instance, kept)


def _action(instance: Instance, action: Action) -> int:
    """In every ground action: guard, updates, and the properties of steps."""
    kept = (
        p.formula for p in instance.machine.properties if p.of_steps and p.speaks_of(action.name)
    )
    updates = sum(_update(instance, update) for update in action.updates)
    each = _term(instance, action.enabled) + updates + _all(instance, kept)
    return prod(len(instance.choice(param)) for param in action.params) * each


def _update(instance: Instance, update: Update) -> int:
    return _places(instance, update.over) * _term(instance, update.value)


def _places(instance: Instance, over: Iterable[Var]) -> int:
    return prod(len(instance.domain(var.sort)) for var in over)


def _all(instance: Instance, terms: Iterable[Term]) -> int:
    return sum(_term(instance, term) for term in terms)


def _term(instance: Instance, term: Term) -> int:
    match term:
        case App(_, args) | Op(_, args):
            return 1 + _all(instance, args)
        case Bind(_, var, body):
            return 1 + _places(instance, (var,)) * _term(instance, body)
        case New(body):
            return _term(instance, body)
    return 1
