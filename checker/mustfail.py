"""For each property a machine that breaks it: a must-fail twin with its exact effect.

A property that no change to its machine can break says nothing.  The table
`checker/mustfail.toml` names for each property of each machine one mutant (`checker.mutants`),
the instance that shows it, and everything that breaks there.  Where several properties break
together, the table says what tells this one from the others: one wrong result of one step that
breaks it alone (`checker.planted`), or that nothing does, since it follows from properties that it
names, which is proved (`checker.consequences`).
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from kvclaims.checker import planted
from kvclaims.checker.altered import (
    Known,
    Outcome,
    difference,
    instances_of,
    pinned,
    pinned_for,
    search_altered,
)
from kvclaims.checker.instances import MACHINES
from kvclaims.checker.mutants import INIT, OPERATORS, Mutant, mutants
from kvclaims.checker.planted import Planted
from kvclaims.spec.interface import BadOperation
from kvclaims.spec.language import Machine, Property

TABLE: Final = Path(__file__).with_name("mustfail.toml")

MOST_NEW: Final = 4_000
"""A twin that needs more states of its own than these is too large to run every time."""


@dataclass(frozen=True)
class Entry:
    """What the table says of one property.

    `breaks` are the names of all that the twin breaks on the instance: of the goals where the
    property is a goal, else of all properties.  A property that nothing breaks has a `reason`
    instead of a twin.  Where it does not break alone, either `alone` breaks it so, or `follows`
    names properties from which it follows.
    """

    machine: str
    property: str
    twin: str = ""
    instance: str = ""
    breaks: tuple[str, ...] = ()
    reason: str = ""
    alone: Planted | None = None
    follows: tuple[str, ...] | None = None


@lru_cache(maxsize=1)
def entries() -> dict[tuple[str, str], Entry]:
    """The table, by machine and property.  Raises BadOperation where it cannot be read."""
    try:
        raw = tomllib.loads(TABLE.read_text(encoding="utf-8"))
        found = [_entry(table) for table in raw["property"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadOperation(f"{TABLE.name}: {error}") from None
    by_name = {(entry.machine, entry.property): entry for entry in found}
    if len(by_name) != len(found):
        raise BadOperation(f"{TABLE.name}: a property stands there twice")
    return by_name


def _entry(table: Mapping[str, Any]) -> Entry:
    told = {**table, "breaks": tuple(table.get("breaks", ()))}
    if "alone" in told:
        told["alone"] = Planted(**told["alone"])
    if "follows" in told:
        told["follows"] = tuple(told["follows"])
    entry = Entry(**told)
    what = f"{entry.property!r} of {entry.machine}"
    if bool(entry.twin) == bool(entry.reason):
        raise ValueError(f"{what} needs a twin, or a reason")
    ways = [entry.alone is not None, entry.follows is not None]
    if sum(ways) != (len(entry.breaks) != 1):
        raise ValueError(f"{what} needs one thing that tells it from what breaks with it")
    return entry


def watched(machine: Machine, prop: Property) -> list[int]:
    """By number: a goal is told from the other goals; a strengthening from everything."""
    return [i for i, other in enumerate(machine.properties) if other.goal or not prop.goal]


def mutant_of(machine: Machine, name: str) -> Mutant | None:
    """The mutant of that name, None where the machine's text has none any more."""
    return _by_name(machine).get(name)


@lru_cache(maxsize=32)
def _by_name(machine: Machine) -> dict[str, Mutant]:
    return {mutant.name: mutant for mutant in mutants(machine)}


def run_twin(mutant: Mutant, known: Known, watched: Sequence[int]) -> Outcome:
    action = None if mutant.action == INIT else mutant.action
    return search_altered(known, mutant.machine, action, watched, most_new=MOST_NEW)


def broken_by(entry: Entry, machine: Machine, prop: Property) -> tuple[str, ...] | str:
    """The names of what the twin of an entry breaks now, or why it cannot be run."""
    mutant = mutant_of(machine, entry.twin)
    if mutant is None:
        return f"there is no mutant {entry.twin!r} any more"
    if entry.instance not in instances_of(machine.name):
        return f"there is no instance {entry.instance!r} any more"
    outcome = run_twin(mutant, pinned_for(entry.instance, machine), watched(machine, prop))
    if not outcome.finished:
        return "the twin has too many states of its own"
    return names_of(machine, outcome.broken)


def broken_alone(wrong: Planted, machine: Machine, prop: Property) -> tuple[str, ...] | str:
    """The same of a step that is to break the property alone."""
    if wrong.instance not in instances_of(machine.name):
        return f"there is no instance {wrong.instance!r} any more"
    found = planted.broken_by(wrong, pinned_for(wrong.instance, machine), watched(machine, prop))
    return found if isinstance(found, str) else names_of(machine, found)


def is_in_order(machine: Machine, prop: Property) -> bool:
    """Whether the property has an entry, and what it names does what the entry says.  What
    follows from others is shown by `kvclaims prove`."""
    entry = entries().get((machine.name, prop.name))
    if entry is None:
        return False
    if entry.alone and broken_alone(entry.alone, machine, prop) != (prop.name,):
        return False
    return bool(entry.reason) or broken_by(entry, machine, prop) == tuple(sorted(entry.breaks))


@dataclass(frozen=True)
class Proposal:
    """A mutant that breaks a property on an instance, and the names of all that it breaks; where
    that is not the property alone, a step that breaks it so."""

    mutant: str
    instance: str
    breaks: tuple[str, ...]
    alone: Planted | None = None


def propose(machine: Machine, prop: Property) -> Proposal | None:
    """A mutant that breaks the property, and the least beside it; None if none breaks it.

    Plain changes come before subtle ones, small instances before large ones.
    """
    number, seen = machine.properties.index(prop), watched(machine, prop)
    order = list(OPERATORS)
    candidates = sorted(mutants(machine), key=lambda mutant: order.index(mutant.operator))
    best: Proposal | None = None
    for name in instances_of(machine.name):
        for mutant in candidates:
            action = None if mutant.action == INIT else mutant.action
            if not difference(pinned(name), mutant.machine, action):
                continue
            outcome = run_twin(mutant, pinned(name), seen)
            if not outcome.finished or number not in outcome.broken:
                continue
            if best is None or len(outcome.broken) < len(best.breaks):
                best = Proposal(mutant.name, name, names_of(machine, outcome.broken))
            if len(outcome.broken) == 1:
                return best
        if best:
            return replace(best, alone=_alone(machine, prop))
    return None


def _alone(machine: Machine, prop: Property) -> Planted | None:
    number, seen = machine.properties.index(prop), watched(machine, prop)
    on = [action.name for action in machine.actions if prop.speaks_of(action.name)]
    found = (planted.find(pinned(name), number, on, seen) for name in instances_of(machine.name))
    return next(filter(None, found), None)


def names_of(machine: Machine, numbers: Iterable[int]) -> tuple[str, ...]:
    return tuple(sorted(machine.properties[i].name for i in numbers))


def as_toml(machine: str, prop: str, found: Proposal | None) -> str:
    """An entry of the table."""
    lines = ["[[property]]", f"machine = {_text(machine)}", f"property = {_text(prop)}"]
    if found is None:
        lines.append('reason = ""  # no single change breaks it: say why')
        lines.append("follows = []  # and from which properties")
    else:
        breaks = ", ".join(map(_text, found.breaks))
        lines += [f"twin = {_text(found.mutant)}", f"instance = {_text(found.instance)}"]
        lines.append(f"breaks = [{breaks}]")
        if found.alone:
            lines += _planted_as_toml(found.alone)
        elif len(found.breaks) > 1:
            lines.append("follows = []  # nothing breaks it alone: say from which properties")
    return "\n".join([*lines, ""])


def _planted_as_toml(wrong: Planted) -> Iterator[str]:
    yield "[property.alone]"
    yield f"instance = {_text(wrong.instance)}"
    yield f"state = {wrong.state}"
    yield f"step = {_text(wrong.step)}"
    leaves = (f"{_text(place)} = {_text(value)}" for place, value in wrong.leaves.items())
    yield f"leaves = {{ {', '.join(leaves)} }}"


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)


def missing() -> Iterator[str]:
    """Properties without an entry, and entries without a property, in words."""
    table = entries()
    stated = {(m.name, p.name) for m in MACHINES.values() for p in m.properties}
    for machine, prop in sorted(stated - table.keys()):
        yield f"{machine}: {prop!r} has no must-fail twin in {TABLE.name}"
    for machine, prop in sorted(table.keys() - stated):
        yield f"{machine}: {TABLE.name} speaks of {prop!r}, which is no property any more"
