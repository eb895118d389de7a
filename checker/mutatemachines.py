"""Mutants of the machines, and what kills them.

A mutant is killed by the first of these that sees it: a property that some run of a pinned
instance breaks; else the reference, which takes every step of the pool's reachable graph and no
other (`checker.conform`); else the pinned counts of states and transitions; else the pinned
digest of the reachable graph.  One that none of them sees has the same reachable graph in every
pinned instance: it is proved to be the same action for any sizes, or it lives.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from typing import Final

from kvclaims.checker.altered import Difference, difference, instances_of, pinned, search_altered
from kvclaims.checker.equivalence import Equivalence
from kvclaims.checker.fates import Fate, Judged
from kvclaims.checker.instances import MACHINES
from kvclaims.checker.mutants import INIT, Mutant, mutants

CONFORMING: Final = "pool"
"""The machine whose reachable graph a runtime is compared with, step by step."""


def count_mutants(machine: str) -> int:
    return len(_mutants(machine))


@lru_cache(maxsize=16)
def _mutants(machine: str) -> tuple[Mutant, ...]:
    return tuple(mutants(MACHINES[machine]))


def judge(machine: str, start: int, stop: int) -> list[Judged]:
    """The fates of the mutants from `start` to before `stop`."""
    return [_judged(mutant) for mutant in islice(_mutants(machine), start, stop)]


def _judged(mutant: Mutant) -> Judged:
    begun = time.perf_counter()
    fate, by, detail = _fate(mutant)
    return Judged(
        mutant.machine.name,
        mutant.name,
        mutant.operator,
        mutant.before,
        mutant.after,
        fate,
        by,
        detail,
        time.perf_counter() - begun,
    )


def _fate(mutant: Mutant) -> tuple[Fate, str, str]:
    seen = dict(differences(mutant))
    if not seen:
        changed = mutant.changed
        if changed is not None and _equivalence(mutant.machine.name).proved(changed):
            return Fate.PROVED, "", "the same guard and the same values, by Z3 for any sizes"
        return Fate.LIVES, "", "no step of a pinned instance shows a difference"
    by, detail = _killer(mutant, seen)
    return Fate.KILLED, by, detail


def differences(mutant: Mutant) -> Iterator[tuple[str, Difference]]:
    """The pinned instances in which the mutant does something else, smallest first."""
    action = None if mutant.action == INIT else mutant.action
    for name in instances_of(mutant.machine.name):
        if found := difference(pinned(name), mutant.machine, action):
            yield name, found


def _killer(mutant: Mutant, seen: dict[str, Difference]) -> tuple[str, str]:
    machine = mutant.machine
    action = None if mutant.action == INIT else mutant.action
    by_counts = ""
    for name in seen:
        known = pinned(name)
        outcome = search_altered(known, machine, action, first_only=True, most_new=0)
        if outcome.broken:
            prop = machine.properties[min(outcome.broken)]
            return "a property", f"{prop.rule} {prop.name}, in {name}"
        if (outcome.states, outcome.transitions) != (known.states, known.transitions):
            by_counts = by_counts or name
    first = next(iter(seen.values()))
    if machine.name == CONFORMING:
        return "conformance", str(first)
    if by_counts:
        return "counts", f"states or transitions of {by_counts}"
    return "the graph", str(first)


@lru_cache(maxsize=16)
def _equivalence(machine: str) -> Equivalence:
    return Equivalence(MACHINES[machine])
