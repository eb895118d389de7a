"""Breadth-first exploration in machine code: the counts of `checker.explore`, millions a second.

`plan` says beforehand how a state is numbered, how large the product of all domains is, which
set of visited states will be used and how much memory that takes.  `explore_native` counts
states, transitions of every action and levels exactly, and checks every invariant and property
of steps on the way; what the machine code finds suspicious is judged by `checker.finite`, so
that both engines mean the same.  No parents are stored: the run that breaks a rule is found by
a second search that keeps its levels.

A value that leaves its slot's domain without breaking a rule stops the search with an error.
An interrupt leaves a checkpoint where one was asked for, and `resume` goes on from there.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvclaims.checker.explore import Counterexample, ExploreReport
from kvclaims.checker.finite import Compiled, Instance, State, compile_instance
from kvclaims.checker.grounded import Grounded, Slot, ground, inside
from kvclaims.checker.machinecode import CONTROL, EMPTY, Kernel, Layout, batch, layout
from kvclaims.checker.verdicts import Progress
from kvclaims.spec.interface import BadOperation

ENGINE: Final = "explicit, native (LLVM)"
BUDGET: Final = 8 << 30
"""Bytes that a search may take unless told otherwise."""

_DENSE: Final = 1 << 27
"""Up to this many bytes the bitmap of the whole product is preferred to a hash table."""

_CHUNK: Final = 1 << 17
"""States expanded by one call: between two calls an interrupt is heard."""

_FIRST_TABLE: Final = 1 << 15
_FOUND, _LIMIT, _MASK, _SHIFT, _EVENTS, _BROKEN = range(len(CONTROL))

Array = np.ndarray[Any, np.dtype[Any]]


class LeftDomain(BadOperation):
    """A step led to a state that no domain holds and no rule forbids."""


class TooLarge(BadOperation):
    """The search would need more memory than it was given."""


@dataclass(frozen=True)
class Plan:
    """What an exploration will need.

    `visited` is `bitmap` (one bit for each state of the product space, `visited_bytes` in all)
    or `hash` (64 bits for each state found, at most 5/8 full; `visited_bytes` at the start).
    `state_bytes` is what one state in a level takes.
    """

    machine: str
    slots: tuple[Slot, ...]
    space: int
    bits: int
    visited: str
    visited_bytes: int
    state_bytes: int
    budget: int

    @property
    def capacity(self) -> int:
        """States that fit into the budget at least, two levels and the visited set together."""
        each = 2 * self.state_bytes
        if self.visited == "bitmap":
            return min(self.space, (self.budget - self.visited_bytes) // each)
        return self.budget // (each + 8 * 4)

    def lines(self) -> Iterator[str]:
        yield (
            f"{self.machine}: {len(self.slots)} slots, {self.space:,} states in the product of "
            f"their domains ({self.bits} bits)"
        )
        yield (
            f"  visited: {self.visited}, {self.visited_bytes:,} bytes at the start; "
            f"{self.state_bytes} bytes for each state of a level; "
            f"{self.capacity:,} states fit into {self.budget:,} bytes"
        )
        for slot in self.slots:
            yield f"  {slot.name}: {slot.lo} … {slot.hi}"


def plan(
    instance: Instance, *, budget: int = BUDGET, bounds: Mapping[str, tuple[int, int]] | None = None
) -> Plan:
    """How the instance would be explored.

    Raises BadOperation where a counter has no bounds and TooLarge where states do not fit into
    63 bits.
    """
    return _plan(instance, layout(ground(instance, bounds).slots), budget)


def _plan(instance: Instance, where: Layout, budget: int) -> Plan:
    bits = (where.space - 1).bit_length()
    if bits > 63:
        raise TooLarge(f"{instance.machine.name}: a state takes {bits} bits, 63 are the most")
    bitmap = _words(where) * (8 if where.wide else 4)
    dense = bitmap <= min(_DENSE, budget // 2)
    return Plan(
        instance.machine.name,
        where.slots,
        where.space,
        bits,
        "bitmap" if dense else "hash",
        bitmap if dense else 8 * _FIRST_TABLE,
        8 if where.wide else 4,
        budget,
    )


def _words(where: Layout) -> int:
    return where.space // (64 if where.wide else 32) + 1


def explore_native(
    instance: Instance,
    name: str,
    progress: Progress | None = None,
    *,
    check: bool = True,
    budget: int = BUDGET,
    bounds: Mapping[str, tuple[int, int]] | None = None,
    checkpoint: Path | None = None,
) -> ExploreReport:
    """Explore the instance; `check=False` only counts.

    Raises BadOperation (no bounds), LeftDomain and TooLarge.  KeyboardInterrupt is passed on
    after the checkpoint was written.
    """
    start = time.perf_counter()
    search = _Search(instance, name, check, budget, bounds)
    return search.report(progress, checkpoint, start)


def resume(
    checkpoint: Path,
    instance: Instance,
    name: str,
    progress: Progress | None = None,
    *,
    check: bool = True,
    budget: int = BUDGET,
    bounds: Mapping[str, tuple[int, int]] | None = None,
) -> ExploreReport:
    """Go on from a checkpoint of the same instance.  Raises BadOperation for another one's."""
    start = time.perf_counter()
    search = _Search(instance, name, check, budget, bounds)
    search.load(checkpoint)
    return search.report(progress, checkpoint, start)


def searching(instance: Instance, check: bool = True) -> tuple[int, int, float, float]:
    """States, transitions, seconds of everything and of the search alone: for benchmarks."""
    start = time.perf_counter()
    search = _Search(instance, instance.machine.name, check, BUDGET, None)
    begun = time.perf_counter()
    search.run(None, None, 1 << 62)
    end = time.perf_counter()
    return search.totals.states, int(search.totals.fired.sum()), end - start, end - begun


@dataclass
class _Level:
    """How far a search has come: states of this level, and of the next as far as found."""

    front: Array
    at: int = 0
    depth: int = 0
    found: int = 0
    sound: int = 0
    """States of this level that break no invariant."""


@dataclass
class _Totals:
    states: int = 0
    depth: int = 0
    fired: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    broken: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    """For each broken property the first occasion: level, state, and step or −1."""


class _Search:
    def __init__(
        self,
        instance: Instance,
        name: str,
        check: bool,
        budget: int,
        bounds: Mapping[str, tuple[int, int]] | None,
    ) -> None:
        self.instance = instance
        self.name = name
        self.check = check
        self.budget = budget
        self.grounded: Grounded = ground(instance, bounds)
        self.where = layout(self.grounded.slots)
        self.plan = _plan(instance, self.where, budget)
        self.dense = self.plan.visited == "bitmap"
        self.kernel = Kernel(self.grounded, self.where, self.dense, check)
        self.kind = np.dtype(np.int64 if self.where.wide else np.int32)
        self.width = batch(self.grounded) * max(len(self.grounded.steps), 1)
        self.compiled: Compiled = compile_instance(instance)
        self._restart()

    def _restart(self) -> None:
        self.totals = _Totals(fired=np.zeros(len(self.instance.machine.actions), np.int64))
        self.control = np.zeros(len(CONTROL), np.int64)
        self.events = np.empty(_CHUNK, self.kind)
        self.broken = np.empty(_CHUNK, self.kind)
        self.next = np.empty(max(4 * self.width, 1 << 12), self.kind)
        self.used = 0
        if self.dense:
            self.seen: Array = np.zeros(_words(self.where), self.kind)
        else:
            self.seen = np.full(_FIRST_TABLE, EMPTY, np.int64)
        codes = list(dict.fromkeys(self._initial()))
        self.level = _Level(np.array(codes, self.kind))
        while not self.dense and self.used + len(codes) > self._most():
            self._grow_table()
        for code in codes:
            self._mark(code)
        self._allow(0)

    def _initial(self) -> Iterator[int]:
        for state in self.compiled.initial:
            if inside(self.where.slots, state):
                yield self.where.encode(state)
            elif not (self.check and self.compiled.broken(state)):
                raise self._left(state, "initially")
            else:
                # It breaks a rule and is not entered; there is no number for it.
                for prop in self.compiled.broken(state):
                    self.totals.broken.setdefault(prop, (-1, self.compiled.initial.index(state), 0))

    def _mark(self, code: int) -> None:
        if self.dense:
            shift = 6 if self.where.wide else 5
            words = self.seen.view(np.uint64 if self.where.wide else np.uint32)
            bit = 1 << (code & ((1 << shift) - 1))
            words[code >> shift] = int(words[code >> shift]) | bit
            return
        single = np.array([code], np.int64)
        self.kernel.rehash(_at(single), 1, _at(self.seen), len(self.seen) - 1, self._shift())
        self.used += 1

    # -- memory

    def _most(self) -> int:
        return len(self.seen) * 5 // 8

    def _shift(self) -> int:
        return 65 - len(self.seen).bit_length()

    def _grow_table(self) -> None:
        larger = len(self.seen) * 2
        self._allow(8 * larger)
        table: Array = np.full(larger, EMPTY, np.int64)
        old, self.seen = self.seen, table
        self.kernel.rehash(_at(old), len(old), _at(table), larger - 1, self._shift())

    def _grow_next(self) -> None:
        self._allow(2 * self.next.nbytes)
        larger: Array = np.empty(2 * len(self.next), self.kind)
        larger[: self.level.found] = self.next[: self.level.found]
        self.next = larger

    def _allow(self, more: int) -> None:
        taken = self.seen.nbytes + self.next.nbytes + self.level.front.nbytes
        if taken + more > self.budget:
            raise TooLarge(
                f"{self.name}: more than {self.budget:,} bytes needed after "
                f"{self.totals.states:,} states at depth {self.level.depth}"
            )

    # -- searching

    def run(self, progress: Progress | None, levels: list[Array] | None, until: int) -> None:
        """Cover the levels up to `until`; `levels` receives the states of each."""
        begun = last = time.perf_counter()
        before = self.totals.states
        level = self.level
        while len(level.front) and level.depth <= until:
            if levels is not None:
                levels.append(level.front)
            while level.at < len(level.front):
                self._expand()
            if level.sound:
                self.totals.depth = level.depth
            self._advance()
            now = time.perf_counter()
            if progress and now - last > 0.5:
                last = now
                rate = (self.totals.states - before) / (now - begun)
                progress(
                    f"{self.name}: level {level.depth}, {self.totals.states:,} states, "
                    f"{rate / 1e6:.2f} million states/s"
                )

    def _advance(self) -> None:
        level = self.level
        level.front = self.next[: level.found].copy()
        level.at = level.found = level.sound = 0
        level.depth += 1

    def _expand(self) -> None:
        """One call of the machine code; more room first where the last call ran out of it."""
        level, control = self.level, self.control
        room = len(self.next) - self.width - 1
        if not self.dense:
            while self.used + self.width > self._most():
                self._grow_table()
            room = min(room, level.found + self._most() - self.used - self.width)
        if level.found > room:
            self._grow_next()
            return
        control[:] = (level.found, room, len(self.seen) - 1, self._shift(), 0, 0)
        to = min(level.at + _CHUNK, len(level.front))
        fired = self.totals.fired
        stopped = self.kernel.expand(
            _at(level.front), level.at, to, _at(self.seen), _at(self.next), _at(control),
            _at(fired), _at(self.events), _at(self.broken),
        )  # fmt: skip
        unsound = int(control[_BROKEN])
        done = stopped - level.at - unsound
        self.used += int(control[_FOUND]) - level.found
        level.at, level.found = stopped, int(control[_FOUND])
        level.sound += done
        self.totals.states += done
        for code in self.broken[:unsound].tolist():
            self._judge_state(code)
        for code in self.events[: int(control[_EVENTS])].tolist():
            self._judge_steps(code)

    def _judge_state(self, code: int) -> None:
        for prop in self.compiled.broken(self.where.decode(code)):
            self.totals.broken.setdefault(prop, (self.level.depth, code, -1))

    def _judge_steps(self, code: int) -> None:
        state = self.where.decode(code)
        for action, after in self.compiled.successors(state):
            bad = self.compiled.misstep(action, state, after) if self.check else []
            within = inside(self.where.slots, after)
            if bad or not within:
                # The step is not followed, so its state is judged here.
                bad = bad + (self.compiled.broken(after) if self.check else [])
                if not bad and not within:
                    raise self._left(after, f"by {self.compiled.actions[action].label}")
            for prop in bad:
                self.totals.broken.setdefault(prop, (self.level.depth, code, action))

    def _left(self, state: State, how: str) -> LeftDomain:
        for slot, value in zip(self.where.slots, state, strict=True):
            if not slot.lo <= value <= slot.hi:
                break
        return LeftDomain(
            f"{self.name}: {slot.name} becomes {value} {how}, outside its domain "
            f"{slot.lo} … {slot.hi}; the counts so far are not the whole"
        )

    # -- what was found

    def report(
        self, progress: Progress | None, checkpoint: Path | None, start: float
    ) -> ExploreReport:
        try:
            self.run(progress, None, 1 << 62)
        except KeyboardInterrupt:
            if checkpoint is not None:
                self._save(checkpoint)
                if progress:
                    progress(f"{self.name}: interrupted, goes on from {checkpoint}")
            raise
        totals = self.totals
        names = (action.name for action in self.instance.machine.actions)
        fired = dict(zip(names, map(int, totals.fired), strict=True))
        return ExploreReport(
            machine=self.name,
            states=totals.states,
            transitions=sum(fired.values()),
            depth=totals.depth,
            fired=fired,
            counterexamples=tuple(self._counterexamples()),
            seconds=time.perf_counter() - start,
            engine=ENGINE,
        )

    def _counterexamples(self) -> Iterator[Counterexample]:
        broken = sorted(self.totals.broken.items())
        if not broken:
            return
        levels: list[Array] = []
        self._restart()
        self.run(None, levels, max(depth for _, (depth, _, _) in broken))
        for prop, (depth, code, action) in broken:
            rule = self.instance.machine.properties[prop]
            if depth < 0:
                yield Counterexample(rule, self.compiled.show(self.compiled.initial[code]), ())
                continue
            states = self._path(levels, depth, code)
            steps = [self._step(a, b) for a, b in pairwise(states)]
            if action >= 0:
                after = dict(self.compiled.successors(states[-1]))[action]
                steps.append((action, after))
            yield Counterexample(
                rule,
                self.compiled.show(states[0]),
                tuple((self.compiled.actions[a].label, self.compiled.show(s)) for a, s in steps),
            )

    def _path(self, levels: Sequence[Array], depth: int, code: int) -> list[State]:
        """A shortest run to the state: backwards, one level at a time."""
        codes = [code]
        for level in reversed(levels[:depth]):
            at = self.kernel.find(_at(level), 0, len(level), codes[-1])
            codes.append(int(level[at]))
        return [self.where.decode(c) for c in reversed(codes)]

    def _step(self, before: State, after: State) -> tuple[int, State]:
        return next(
            (action, state)
            for action, state in self.compiled.successors(before)
            if state == after and not self.compiled.misstep(action, before, after)
        )

    # -- checkpoints

    def _mark_of(self) -> str:
        return hashlib.sha256(self.kernel.text.encode()).hexdigest()

    def _save(self, path: Path) -> None:
        level, totals = self.level, self.totals
        with path.open("wb") as file:
            np.savez(
                file,
                instance=np.array(self._mark_of()),
                seen=self.seen,
                front=level.front,
                next=self.next[: level.found],
                fired=totals.fired,
                numbers=np.array(
                    [level.at, level.depth, level.sound, totals.states, totals.depth, self.used]
                ),
                broken=np.array([(p, *where) for p, where in totals.broken.items()], np.int64),
            )

    def load(self, path: Path) -> None:
        try:
            with np.load(path, allow_pickle=False) as saved:
                data = {name: saved[name] for name in saved.files}
            if str(data["instance"]) != self._mark_of():
                raise BadOperation(f"{path} is a checkpoint of another instance than {self.name}")
            at, depth, sound, states, reached, self.used = (int(n) for n in data["numbers"])
            self.seen = data["seen"]
            following = data["next"]
            self.next = np.empty(max(2 * len(following), len(self.next)), self.kind)
            self.next[: len(following)] = following
            self.level = _Level(data["front"], at, depth, len(following), sound)
            broken = {int(p): (int(d), int(c), int(a)) for p, d, c, a in data["broken"]}
            self.totals = _Totals(states, reached, data["fired"], broken)
        except (OSError, KeyError, ValueError) as error:
            raise BadOperation(f"{path} is no checkpoint: {error}") from None


def _at(array: Array) -> int:
    return int(array.ctypes.data)
