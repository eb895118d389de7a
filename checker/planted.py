"""One wrong result of one step, planted by hand: a twin that breaks a single property.

Where each small change to the text of a machine breaks several properties at once, they are told
apart by a machine that is as declared but for one step: from one reachable state it leaves a few
places otherwise.  Such a twin is found by going from the right result to wrong ones, by one place
at a time.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvclaims.checker.altered import Known, slot_name
from kvclaims.checker.finite import State
from kvclaims.spec.language import BOOL, NUMERIC, Symbol

MOST_PLACES: Final = 9
MOST_LOOKS: Final = 120
"""How many wrong results of one step are taken further."""
MOST_STATES: Final = 300
"""From how many reachable states a step is tried."""


@dataclass(frozen=True)
class Planted:
    """In the pinned `instance`, from its state number `state` in the order of the search, `step`
    leaves each place of `leaves` with another value than it would, or than it was before if the
    step is not possible there."""

    instance: str
    state: int
    step: str
    leaves: Mapping[str, str]

    def __str__(self) -> str:
        wrong = ", ".join(f"{place} = {value}" for place, value in self.leaves.items())
        return f"{self.step} in state {self.state} of {self.instance} leaves {wrong}"

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "leaves": dict(self.leaves)}


def broken_by(planted: Planted, known: Known, watched: Collection[int]) -> frozenset[int] | str:
    """Which of the watched properties the step breaks, by number, or why it cannot be taken."""
    labels = [action.label for action in known.compiled.actions]
    if planted.step not in labels:
        return f"there is no step {planted.step!r} any more"
    if not 0 <= planted.state < known.states:
        return f"there is no state {planted.state} any more"
    step, before = labels.index(planted.step), known.state(planted.state)
    after = list(_result(known, step, before))
    for place, value in planted.leaves.items():
        slot = next((i for i in range(len(after)) if slot_name(known.columns, i) == place), None)
        number = None if slot is None else _number(known, slot, value)
        if slot is None or number is None:
            return f"there is no {place} = {value} any more"
        if after[slot] == number:
            return f"{place} = {value} is what the step leaves as declared"
        after[slot] = number
    return _broken(known, step, before, tuple(after), watched)


def find(
    known: Known, number: int, on: Collection[str], watched: Collection[int]
) -> Planted | None:
    """A step of one of the actions `on` that breaks property `number`, and no other watched one.
    Deterministic."""
    chance = random.Random(0)
    steps = [i for i, action in enumerate(known.compiled.actions) if action.name in on]
    states = [0, *chance.sample(range(known.states), min(known.states, MOST_STATES))]
    for state in states:
        before = known.state(state)
        for step in chance.sample(steps, min(len(steps), 6)):
            if after := _search(known, number, step, before, watched):
                return _planted(known, state, step, after)
    return None


def _search(
    known: Known, number: int, step: int, before: State, watched: Collection[int]
) -> State | None:
    """The result that breaks the property alone, from the right one on: at each point the result
    with the fewest properties broken beside it, and then with the fewest places changed."""
    right = _result(known, step, before)
    seen = {right}
    front: list[tuple[int, int, int, State]] = [(0, 0, 0, right)]
    for _ in range(MOST_LOOKS):
        if not front:
            return None
        _, changed, _, state = heapq.heappop(front)
        if changed == MOST_PLACES:
            continue
        for wrong in _neighbours(known, state):
            if wrong in seen or wrong == before:
                continue
            seen.add(wrong)
            broken = _broken(known, step, before, wrong, watched)
            if broken == {number}:
                return wrong
            if number in broken:
                heapq.heappush(front, (len(broken), changed + 1, len(seen), wrong))
    return None


def _neighbours(known: Known, state: State) -> Iterator[State]:
    for slot, (symbol, _) in enumerate(known.compiled.slots):
        for value in () if symbol.rigid else _others(symbol, state[slot]):
            yield (*state[:slot], value, *state[slot + 1 :])


def _others(symbol: Symbol, value: int) -> list[int]:
    if symbol.range == BOOL:
        return [1 - value]
    if symbol.range in NUMERIC:
        return [value - 1, value + 1]
    return [v for v in range(len(symbol.range.values)) if v != value]


def _result(known: Known, step: int, before: State) -> State:
    return dict(known.compiled.successors(before)).get(step, before)


def _broken(
    known: Known, step: int, before: State, after: State, watched: Collection[int]
) -> frozenset[int]:
    compiled = known.compiled
    bad = (*compiled.misstep(step, before, after), *compiled.broken(after))
    return frozenset(number for number in bad if number in watched)


def _planted(known: Known, state: int, step: int, after: State) -> Planted:
    right = _result(known, step, known.state(state))
    leaves = {
        slot_name(known.columns, slot): known.instance.element(symbol.range, after[slot])
        for slot, (symbol, _) in enumerate(known.compiled.slots)
        if after[slot] != right[slot]
    }
    return Planted(known.name, state, known.compiled.actions[step].label, leaves)


def _number(known: Known, slot: int, value: str) -> int | None:
    """The value of that name in a slot; None where there is none."""
    of = known.compiled.slots[slot][0].range
    if of in NUMERIC:
        return int(value) if value.lstrip("-").isdecimal() else None
    named = {known.instance.element(of, i): i for i in range(2 if of == BOOL else len(of.values))}
    return named.get(value)
