"""Properties that follow from others, as obligations: no machine breaks such a one alone.

`checker/mustfail.toml` names what a property follows from.  Where all of these and the property
itself speak of single states, it is asked of any state; else of any two, whatever step leads from
one to the other: the later one is told by rigid symbols of its own, and an invariant may be taken
to hold in the earlier one.  What is given is the guard of an action that does nothing, so these
are obligations like all others: kept, confirmed by a second solver, written as files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from kvclaims.checker.mustfail import TABLE, entries, watched
from kvclaims.spec.interface import BadOperation
from kvclaims.spec.language import (
    Action,
    App,
    Bind,
    Guard,
    Machine,
    New,
    Partition,
    Property,
    Symbol,
    Term,
    Var,
    children,
    rebuild,
)

SUFFIX: Final = "follows"

_Copies = Mapping[Symbol, Symbol]


def consequences(machine: Machine) -> Machine | None:
    """A machine whose properties say what the table says of this one; None if it says nothing.

    Raises BadOperation where the table names what the property is not told from (`watched`).
    """
    asked: list[tuple[Action, Property]] = []
    copies = {
        symbol: replace(symbol, name=f"later_{symbol.name}", rigid=True)
        for symbol in machine.symbols
        if not symbol.rigid
    }
    for prop in machine.properties:
        entry = entries().get((machine.name, prop.name))
        if entry and entry.follows is not None:
            asked += _questions(machine, prop, _named(machine, prop, entry.follows), copies)
    if not asked:
        return None
    later = (
        Partition(_later_sum(p.whole, copies), tuple(_later_sum(q, copies) for q in p.parts))
        for p in machine.partitions
    )
    return Machine(
        f"{machine.name}/{SUFFIX}",
        f"what follows from other properties of {machine.name}",
        (*machine.symbols, *copies.values()),
        machine.init,
        tuple(action for action, _ in asked),
        tuple(prop for _, prop in asked),
        (*machine.partitions, *later),
        machine.axioms,
        derived=True,
    )


def _named(machine: Machine, prop: Property, names: Sequence[str]) -> list[Property]:
    others = {machine.properties[i].name: machine.properties[i] for i in watched(machine, prop)}
    del others[prop.name]
    if unknown := sorted(set(names) - others.keys()):
        what = f"{prop.name!r} of {machine.name} is to follow from {unknown[0]!r}"
        raise BadOperation(f"{TABLE.name}: {what}, which it is not told from")
    return [others[name] for name in names]


def _questions(
    machine: Machine, prop: Property, others: Sequence[Property], copies: _Copies
) -> list[tuple[Action, Property]]:
    if not any(each.of_steps for each in (prop, *others)):
        return [_question(prop, prop.name, (), [other.formula for other in others], prop.formula)]
    found: dict[tuple[Term, ...], tuple[Action, Property]] = {}
    for action in machine.actions:
        if prop.speaks_of(action.name):
            given = list(_given(prop, [o for o in others if o.speaks_of(action.name)], copies))
            wanted = _told(prop.formula, copies) if prop.of_steps else _later(prop.formula, copies)
            name = f"{prop.name}, {action.name}"
            params = action.params if any(term.free for term in (*given, wanted)) else ()
            # Most speak of no action in particular, and are asked once.
            found.setdefault((*given, *params), _question(prop, name, params, given, wanted))
    return list(found.values())


def _question(
    prop: Property, name: str, params: tuple[Var, ...], given: Sequence[Term], wanted: Term
) -> tuple[Action, Property]:
    guards = tuple(Guard((), term, "what it follows from") for term in given)
    return (
        Action(name, params, guards, (), prop.meaning),
        replace(prop, formula=wanted, on=name, but=None),
    )


def _given(prop: Property, others: Sequence[Property], copies: _Copies) -> Iterator[Term]:
    if not prop.of_steps:
        yield prop.formula
    for other in others:
        if other.of_steps:
            yield _told(other.formula, copies)
        else:
            yield from (other.formula, _later(other.formula, copies))


def _told(term: Term, copies: _Copies) -> Term:
    """A term of a step, its new state told by the copies."""
    if isinstance(term, New):
        return _later(term.body, copies)
    return rebuild(term, tuple(_told(child, copies) for child in children(term)))


def _later(term: Term, copies: _Copies) -> Term:
    parts = tuple(_later(child, copies) for child in children(term))
    match term:
        case App(symbol, _) if symbol in copies:
            return App(copies[symbol], parts)
        case New():
            return parts[0]
    return rebuild(term, parts)


def _later_sum(term: Bind, copies: _Copies) -> Bind:
    return replace(term, body=_later(term.body, copies))
