"""Whether a property says anything: a reachable state, or step, in which its premise holds.

`∀ x. p(x) → q(x)` is true of a machine in which no x ever has p, and then says nothing.  The
premises of a formula are the conditions each of which must hold somewhere for the formula not
to be true for that reason: the left sides of its implications, either side of an equivalence
and its opposite, the first of what it denies together, one element of what it speaks of.  Each
is looked for in the pinned instances.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from kvclaims.checker.altered import Known, instances_of, pinned_for
from kvclaims.checker.columns import Columns
from kvclaims.spec.language import (
    BOOL,
    FALSE,
    TRUE,
    Bind,
    Lit,
    Machine,
    New,
    Op,
    Property,
    Term,
    show,
    some,
)

# --- premises ----------------------------------------------------------------------------


def premises(formula: Term) -> tuple[Term, ...]:
    """Conditions that must each hold somewhere, free variables being parameters of an action.

    A formula that is true by its text has the premise false: nothing can hold of it.
    """
    return tuple(dict.fromkeys(_premises(formula)))


def _premises(formula: Term) -> Iterator[Term]:
    match formula:
        case Lit(True, _):
            yield FALSE
        case Bind("every", var, body):
            yield from (some(var, premise) for premise in _premises(body))
        case Op("and", args):
            for part in args:
                yield from _premises(part)
        case Op("implies", (a, b)):
            yield from (_and(a, premise) for premise in _premises(b))
        case Op("or", _):
            yield from _of_choice(_flat("or", formula))
        case Op("not", (denied,)):
            yield from _of_denial(denied)
        case Op("eq", (a, b)) if a.sort == BOOL:
            yield from (a, ~a)
        case New(body):
            yield from (p if p == TRUE else New(p) for p in _premises(body))
        case _:
            yield TRUE


def _of_choice(parts: list[Term]) -> Iterator[Term]:
    """`¬p ∨ q` is `p → q`; a choice without a denial asks for nothing first."""
    given: Term = TRUE
    rest = []
    for part in parts:
        match part:
            case Op("not", (denied,)):
                given = _and(given, denied)
            case _:
                rest.append(part)
    if len(rest) == 1:
        yield from (_and(given, premise) for premise in _premises(rest[0]))
    else:
        yield given


def _of_denial(denied: Term) -> Iterator[Term]:
    match denied:
        case Lit(False, _):
            yield FALSE
        case Op("or", args):
            for part in args:
                yield from _premises(~part)
        case Op("and", _):  # ¬(p ∧ q) is p → ¬q
            yield _flat("and", denied)[0]
        case Op("implies", (a, b)):
            yield from _premises(a)
            yield from _premises(~b)
        case Op("not", (a,)):
            yield from _premises(a)
        case Bind("some", var, body):
            yield from (some(var, premise) for premise in _premises(~body))
        case _:
            yield TRUE


def _flat(kind: str, term: Term) -> list[Term]:
    if isinstance(term, Op) and term.kind == kind:
        return [part for child in term.args for part in _flat(kind, child)]
    return [term]


def _and(a: Term, b: Term) -> Term:
    if a == TRUE:
        return b
    return a if b == TRUE else a & b


# --- witnesses ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Witness:
    """Where a premise holds: an instance, and how many of its states or steps show it.

    Without an instance it holds in none of those that are pinned.
    """

    premise: str
    instance: str = ""
    seen: int = 0

    def to_json(self) -> dict[str, Any]:
        return {"premise": self.premise, "instance": self.instance or None, "seen": self.seen}


def witnesses(machine: Machine, prop: Property) -> tuple[Witness, ...]:
    """For each premise of the property the first pinned instance in which it holds."""
    return tuple(_witness(machine, prop, premise) for premise in premises(prop.formula))


def _witness(machine: Machine, prop: Property, premise: Term) -> Witness:
    for name in instances_of(machine.name):
        if seen := _seen(pinned_for(name, machine), prop, premise):
            return Witness(show(premise), name, seen)
    return Witness(show(premise))


def _seen(known: Known, prop: Property, premise: Term) -> int:
    """In how many reachable states, or of how many steps, the premise holds."""
    if not prop.of_steps:
        return int(known.columns.mask(premise, {}).sum())
    if prop.of_all:
        return int(_steps(known, -1).mask(premise, {}).sum())
    found = 0
    for action in known.instance.machine.actions:
        if not prop.speaks_of(action.name):
            continue
        for move in known.world.moves(action):
            steps = _steps(known, move.number)
            if steps.count:
                ground = move.ground if prop.on else {}
                found += int(steps.mask(premise, ground).sum())
    return found


@lru_cache(maxsize=128)
def _steps(known: Known, ground: int) -> Columns:
    """The steps of a ground action, or of all, as columns with the state after each."""
    chosen = slice(None) if ground < 0 else np.flatnonzero(known.ground == ground)
    before = known.columns.states[:, known.source[chosen]]
    after = known.columns.states[:, known.target[chosen]]
    return Columns(known.world, before, Columns(known.world, after))


def never_fired(machine: Machine) -> tuple[str, ...]:
    """Actions that are taken in no pinned instance of the machine."""
    left = dict.fromkeys(action.name for action in machine.actions)
    for name in instances_of(machine.name):
        known = pinned_for(name, machine)
        for ground, times in known.found.fired.items():
            if times:
                left.pop(known.compiled.actions[ground].name, None)
        if not left:
            break
    return tuple(left)
