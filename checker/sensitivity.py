"""Whether the pinned bounds are large enough: what one more of something shows.

For each machine and each setting one instance goes one further than every pinned instance does.
Against all pinned instances together it is asked: which actions does it take that they do not,
which elements does it have in a situation that none of theirs is ever in, and which mutants
does it tell from the machine that they do not.  A bound that leaves such a mutant alive is too
small.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Final

import numpy as np

from kvclaims.checker.altered import Known, difference, instances_of, pinned
from kvclaims.checker.finite import Instance
from kvclaims.checker.instances import (
    admission,
    arbitration,
    blockclaims,
    claims,
    elastic,
    ends,
    events,
    feasible,
    groups,
    owners,
    pool,
    tiers,
    trace,
    written,
)
from kvclaims.checker.mutants import INIT, Mutant
from kvclaims.spec.language import Sort

ONE_MORE: Final[dict[str, dict[str, Callable[[], Instance]]]] = {
    "claims": {
        "generations 3": lambda: claims(generations=3),
        "duration 3": lambda: claims(duration=3),
    },
    "pool": {
        "blocks 3": lambda: pool(blocks=3, hard=(1,)),
        "claims 3": lambda: pool(blocks=1, hard=(1, 1, 0)),
        "requests 3": lambda: pool(blocks=1, hard=(1,), admit_reuse=(1, 0, 1)),
        "keys 3": lambda: pool(blocks=1, hard=(1,), keys=3),
    },
    "admission": {
        "requests 4": lambda: admission(requests=4, sizes=(), needs=(1,), growth=(0,)),
        "claims 3": lambda: admission(requests=1, sizes=(1, 1, 2), usable=3, needs=(1, 2)),
        "usable 4": lambda: admission(requests=2, sizes=(1,), usable=4, needs=(1, 3)),
        "defer_limit 3": lambda: admission(requests=1, defer_limit=3),
    },
    "written": {
        "blocks 3": lambda: written(blocks=3, soft=(0,), claims=0),
        "keys 3": lambda: written(keys=3, soft=(0,)),
        "jobs 3": lambda: written(soft=(1, 0, 0)),
        "claims 3": lambda: written(soft=(0,), claims=3),
    },
    "owners": {
        "owners 4": lambda: owners(owners=4, cap=1, versions=1),
        "claims 3": lambda: owners(owners=1, owned_by=(0, 0, 0), hard=(1, 1, 0), cap=1, versions=1),
        "versions 3": lambda: owners(owners=2, versions=3),
        "blocks 3": lambda: owners(
            owners=1, owned_by=(0, 0), hard=(1, 1), cap=3, blocks=3, versions=1
        ),
    },
    "tiers": {
        "tiers 3": lambda: tiers(tiers=3),
        "claims 3": lambda: tiers(claims=3, tiers=0),
    },
    "elastic": {
        "layers 4": lambda: elastic(layers=4),
        "lent 3": lambda: elastic(layers=1, lent=(1, 1, 1)),
        "jobs 3": lambda: elastic(layers=1, lent=(1,), jobs=3),
        "claims 3": lambda: elastic(layers=0, lent=(0,), jobs=0, claims=3),
    },
    "trace": {
        "facts 3": lambda: trace(facts=3, events=2, meetings=1),
        "events 4": lambda: trace(events=4, meetings=1),
        "meetings 3": lambda: trace(events=2, meetings=3),
        "clock 2": lambda: trace(events=2, meetings=1, clock=2),
        "foreign 2": lambda: trace(events=1, foreign=2),
    },
    "events": {
        "blocks 3": lambda: events(tiers=(0, 0, 1)),
        "tiers 3": lambda: events(tiers=(0, 2)),
        "keys 3": lambda: events(tiers=(0,), keys=3),
    },
    "ends": {
        "requests 3": lambda: ends(requests=3, ways=(0,)),
        "blocks 3": lambda: ends(blocks=3, ways=(0,)),
        "jobs 3": lambda: ends(jobs=3, ways=(0,)),
        "depth 3": lambda: ends(depth=3),
    },
    "groups": {
        "tokens 3": lambda: groups(blocks=3, sizes=(1,), windows=(1,), tokens=3),
        "groups 3": lambda: groups(blocks=3, sizes=(1, 1, 1), windows=(0, 1, 1), tokens=1),
        "claims 3": lambda: groups(blocks=1, sizes=(1,), windows=(0,), tokens=1, hard=(1, 1, 0)),
        "prompts 3": lambda: groups(
            blocks=2, sizes=(1,), windows=(0,), tokens=1, requests=1, prompts=3
        ),
    },
    "arbitration": {
        "claims 3": lambda: arbitration(covers=(1, 1, 2), spare=(0, 1, 1), loans=(1, 0, 1)),
        "loans 2": lambda: arbitration(usable=7, loans=(2, 1)),
    },
    "feasible": {
        "usable 4": lambda: feasible(usable=4),
    },
    "blockclaims": {
        "claims 4": lambda: blockclaims(sizes=(1, 1, 2, 2), requests=1),
        "requests 3": lambda: blockclaims(sizes=(1, 2), requests=3, growth=2),
        "growth 4": lambda: blockclaims(growth=4),
        "pool 7": lambda: blockclaims(pool=7),
    },
}
"""For each machine a setting that no pinned instance reaches, and the instance with that many;
other settings are as small as the count of its states asks for."""

Situation = tuple[str, tuple[int, ...]]
"""Of one element: its sort, the values of what is said of it alone, and in how many places each
relation holds of it."""


@dataclass(frozen=True)
class Sensitivity:
    """What one more shows that the pinned instances do not."""

    machine: str
    setting: str
    states: int
    transitions: int
    fired: tuple[str, ...]
    situations: int
    known_situations: int
    caught: tuple[str, ...]
    """Mutants that live in the pinned instances and are told from the machine here."""

    @property
    def holds(self) -> bool:
        return not self.caught and not self.fired

    def to_json(self) -> dict[str, Any]:
        return {
            "machine": self.machine,
            "setting": self.setting,
            "states": self.states,
            "transitions": self.transitions,
            "fired": list(self.fired),
            "new_situations": self.situations,
            "known_situations": self.known_situations,
            "caught": list(self.caught),
        }

    def __str__(self) -> str:
        more = f", also takes {', '.join(self.fired)}" if self.fired else ""
        return (
            f"{self.machine:12} {self.setting:18} {self.states:7,} states, {self.situations:3} "
            f"situations beside {self.known_situations}, {len(self.caught)} more mutants{more}"
        )


def sensitivity(machine: str, alive: Sequence[Mutant]) -> Iterator[Sensitivity]:
    """Every row of the machine; `alive` are the mutants that no pinned instance shows."""
    base = [pinned(name) for name in instances_of(machine)]
    taken = {name for known in base for name in _taken(known)}
    seen = {situation for known in base for situation in situations(known)}
    for setting, build in ONE_MORE.get(machine, {}).items():
        known = Known(build(), f"{machine} with {setting}")
        yield Sensitivity(
            machine,
            setting,
            known.states,
            known.transitions,
            tuple(sorted(_taken(known) - taken)),
            len(situations(known) - seen),
            len(seen),
            tuple(mutant.name for mutant in alive if _shows(known, mutant)),
        )


def _shows(known: Known, mutant: Mutant) -> bool:
    action = None if mutant.action == INIT else mutant.action
    return difference(known, mutant.machine, action) is not None


def _taken(known: Known) -> set[str]:
    return {known.compiled.actions[number].name for number, n in known.found.fired.items() if n}


def situations(known: Known) -> set[Situation]:
    """Every situation that some element of some sort is in, in some reachable state."""
    found: set[Situation] = set()
    for sort in known.instance.machine.sorts:
        for element in known.instance.domain(sort):
            rows = np.array(list(_said_of(known, sort, element)))
            if rows.size:
                found |= {
                    (sort.name, tuple(column)) for column in np.unique(rows, axis=1).T.tolist()
                }
    return found


def _said_of(known: Known, sort: Sort, element: int) -> Iterator[Any]:
    """A row for each symbol that speaks of the sort: the value of what is said of one element
    alone, and the sum over all places else."""
    for symbol in known.instance.machine.symbols:
        if symbol.domain.count(sort) != 1:
            continue
        domains = [[element] if s == sort else known.instance.domain(s) for s in symbol.domain]
        row = np.zeros(known.states, np.int64)
        for place in product(*domains):
            slot = known.world.index.get((symbol, place))
            fixed = known.world.known.get((symbol, place), 0)
            row += known.columns.states[slot] if slot is not None else fixed
        yield row
