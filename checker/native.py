"""Breadth-first exploration in machine code: the counts of `checker.explore`, millions a second.

`checker.planning` says beforehand how a state is numbered, which set of visited states will be
used and how much memory that takes.  `explore_native` counts states, transitions of every action
and levels exactly, and checks every invariant and property of steps on the way; what the machine
code finds suspicious is judged by `checker.finite`, so that both engines mean the same.  No
parents are stored: the run that breaks a rule is found by a second search that keeps its levels.

A level is cut into chunks.  With several threads each takes chunks until none is left, marks
states in the one set that all share, and collects what it found in a list of its own; which
thread finds a state is left to chance, which states a level has is not.

A value that leaves its slot's domain without breaking a rule stops the search with an error.
An interrupt, and memory that runs out, leave a checkpoint where one was asked for.
"""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, Final

import numpy as np

from kvclaims.checker import checkpoint as checkpoints
from kvclaims.checker.explore import Counterexample, ExploreReport
from kvclaims.checker.finite import Compiled, Instance, State, compile_instance
from kvclaims.checker.grounded import Grounded, ground, inside
from kvclaims.checker.machinecode import CONTROL, Build, Kernel, batch, layout, text
from kvclaims.checker.planning import FIRST_TABLE, TooLarge, default_budget, planned, words
from kvclaims.checker.symmetry import Symmetry, symmetry
from kvclaims.checker.verdicts import Progress
from kvclaims.checker.visitedcode import EMPTY
from kvclaims.spec.interface import BadOperation

ENGINE: Final = "explicit, native (LLVM)"
JOBS: Final = min(os.cpu_count() or 1, 8)
"""Threads of a search that is not told how many."""

CHUNK: Final = 1 << 17
"""States expanded by one call at most: between two rounds of calls an interrupt is heard."""

_ROUND: Final = 4
"""Chunks for each thread in a round: one that is slow leaves the others something to take."""

_ALONE: Final = 1 << 12
"""A level of so many states is not worth waking threads for."""

_FOUND, _LIMIT, _MASK, _SHIFT, _EVENTS, _BROKEN, _WHOLE = range(len(CONTROL))

Array = np.ndarray[Any, np.dtype[Any]]


class LeftDomain(BadOperation):
    """A step led to a state that no domain holds and no rule forbids."""


class Interrupted(KeyboardInterrupt):
    """The search was interrupted; the message says how it goes on."""


@dataclass(frozen=True)
class Way:
    """How to search: whether rules are checked, within how many bytes, by how many threads,
    with one representative for states that differ in names only, and where to leave a
    checkpoint or go on from one.  `interrupted` is where an interrupt leaves one if no
    `checkpoint` was asked for."""

    check: bool = True
    budget: int | None = None
    jobs: int = 1
    symmetric: bool = False
    checkpoint: Path | None = None
    interrupted: Path | None = None
    resume: Path | None = None


AS_USUAL: Final = Way()


def explore_native(
    instance: Instance,
    name: str,
    progress: Progress | None = None,
    way: Way = AS_USUAL,
    *,
    bounds: Mapping[str, tuple[int, int]] | None = None,
) -> ExploreReport:
    """Explore the instance.

    Raises BadOperation (no bounds; a checkpoint that is none, or another's), LeftDomain,
    TooLarge, and Interrupted after the checkpoint was written.
    """
    start = time.perf_counter()
    search = Search(instance, name, way, bounds)
    if progress:
        progress(f"{name}: {search.plan.memory}")
    if way.resume is not None:
        search.load(way.resume)
    return search.report(progress, start)


def searching(instance: Instance, way: Way = AS_USUAL) -> tuple[int, int, float, float, float]:
    """States, transitions, seconds of everything, of the search alone, and the processor's
    seconds of the search: for benchmarks."""
    start = time.perf_counter()
    search = Search(instance, instance.machine.name, way, None)
    begun, cpu = time.perf_counter(), time.process_time()
    search.run(None, None, 1 << 62)
    end, spent = time.perf_counter(), time.process_time() - cpu
    fired = int(search.totals.fired.sum())
    return search.totals.whole, fired, end - start, end - begun, spent


@dataclass
class _Level:
    """How far a search has come: states of this level, and which of them still wait."""

    front: Array
    at: int = 0
    depth: int = 0
    sound: int = 0
    """States of this level that break no invariant."""
    waiting: deque[tuple[int, int]] = field(default_factory=deque)
    """Chunks before `at` that are not done."""


@dataclass
class _Totals:
    states: int = 0
    whole: int = 0
    """How many states they stand for."""
    depth: int = 0
    fired: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    broken: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    """For each broken property the first occasion: level, state, and step or −1."""


class _Hand:
    """What one thread writes: the states that it found for the next level, and its counts."""

    def __init__(self, kind: np.dtype[Any], room: int, actions: int) -> None:
        self.control = np.zeros(len(CONTROL), np.int64)
        self.fired = np.zeros(actions, np.int64)
        self.events: Array = np.empty(CHUNK, kind)
        self.broken: Array = np.empty(CHUNK, kind)
        self.next: Array = np.empty(room, kind)
        self.found = 0
        self.done = self.whole = 0
        """States expanded in this round, those that break an invariant left out, and how many
        states they stand for."""
        self.unsound: list[int] = []
        self.odd: list[int] = []

    def grow(self) -> None:
        larger: Array = np.empty(2 * len(self.next), self.next.dtype)
        larger[: self.found] = self.next[: self.found]
        self.next = larger


class Search:
    """A search that can be stopped between two rounds and goes on from there."""

    def __init__(
        self,
        instance: Instance,
        name: str,
        way: Way,
        bounds: Mapping[str, tuple[int, int]] | None,
    ) -> None:
        self.instance = instance
        self.name = name
        self.way = way
        self.check = way.check
        self.budget = way.budget or default_budget()
        self.grounded: Grounded = ground(instance, bounds)
        self.symmetry = self._renamings() if way.symmetric else None
        self.where = layout(self.grounded.slots, self.symmetry)
        self.plan = planned(instance, self.where, self.budget)
        self.dense = self.plan.visited == "bitmap"
        self.kernel = Kernel(self.grounded, self.where, self._build())
        self.kind = np.dtype(np.int64 if self.where.wide else np.int32)
        self.width = batch(self.grounded) * max(len(self.grounded.steps), 1)
        self.compiled: Compiled = compile_instance(instance)
        self.lock = threading.Lock()
        self._restart()

    def _build(self) -> Build:
        visited = "bitmap" if self.dense else "hash"
        return Build(visited, self.check, self.way.jobs > 1, self.symmetry)

    def _renamings(self) -> Symmetry | None:
        slots = self.grounded.slots
        places = [(slot.symbol, slot.args) for slot in slots]
        found = symmetry(self.instance, places, [(slot.lo, slot.hi) for slot in slots])
        return found if found.order > 1 else None

    def _restart(self) -> None:
        actions = len(self.instance.machine.actions)
        self.totals = _Totals(fired=np.zeros(actions, np.int64))
        room = max(4 * self.width, 1 << 12)
        self.hands = [_Hand(self.kind, room, actions) for _ in range(self.way.jobs)]
        self.used = 0
        if self.dense:
            self.seen: Array = np.zeros(words(self.where), self.kind)
        else:
            self.seen = np.full(FIRST_TABLE, EMPTY, np.int64)
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
                yield self.where.encode(self._representative(state))
            elif not (self.check and self.compiled.broken(state)):
                raise self._left(state, "initially")
            else:
                # It breaks a rule and is not entered; there is no number for it.
                for prop in self.compiled.broken(state):
                    self.totals.broken.setdefault(prop, (-1, self.compiled.initial.index(state), 0))

    def _representative(self, state: State) -> State:
        """As the machine code chooses it: the least number, not the least state."""
        if self.symmetry is None:
            return state
        return self.symmetry.representative(state, self.where.encode)

    def _mark(self, code: int) -> None:
        if self.dense:
            shift = 6 if self.where.wide else 5
            words = self.seen.view(np.uint64 if self.where.wide else np.uint32)
            bit = 1 << (code & ((1 << shift) - 1))
            words[code >> shift] = int(words[code >> shift]) | bit
            return
        single = np.array([code], np.int64)
        self.kernel.rehash(
            address(single), 1, address(self.seen), len(self.seen) - 1, self._shift()
        )
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
        self.kernel.rehash(address(old), len(old), address(table), larger - 1, self._shift())

    def taken(self) -> int:
        lists = sum(hand.next.nbytes for hand in self.hands)
        return self.seen.nbytes + lists + self.level.front.nbytes

    def _allow(self, more: int) -> None:
        if self.taken() + more > self.budget:
            raise TooLarge(
                f"{self.name}: more than {self.budget:,} bytes needed after "
                f"{self.totals.states:,} states at depth {self.level.depth}: give more with "
                f"--memory, take states that differ in names only as one with --symmetry, or "
                f"explore it by symbolic"
            )

    # -- searching

    def run(self, progress: Progress | None, levels: list[Array] | None, until: int) -> None:
        """Cover the levels up to `until`; `levels` receives the states of each."""
        begun = last = time.perf_counter()
        before = self.totals.states
        level = self.level
        with ExitStack() as stack:
            asked = stack.enter_context(_interrupts())
            pool = None
            if self.way.jobs > 1:
                pool = stack.enter_context(ThreadPoolExecutor(self.way.jobs))
            while len(level.front) and level.depth <= until:
                if levels is not None and level.at == 0:
                    levels.append(level.front)
                while level.at < len(level.front) or level.waiting:
                    self._round(pool)
                    now = time.perf_counter()
                    if progress and now - last > 0.5:
                        last = now
                        rate = (self.totals.states - before) / (now - begun)
                        progress(
                            f"{self.name}: level {level.depth}, {self.totals.states:,} states, "
                            f"{rate / 1e6:.2f} million states/s, {self.taken():,} of "
                            f"{self.budget:,} bytes"
                        )
                    if asked:
                        raise KeyboardInterrupt
                if level.sound:
                    self.totals.depth = level.depth
                self.advance()

    def advance(self) -> None:
        level = self.level
        level.front = np.concatenate([hand.next[: hand.found] for hand in self.hands])
        for hand in self.hands:
            hand.found = 0
        level.at = level.sound = 0
        level.depth += 1

    def absorb(self, codes: Array) -> None:
        """States found elsewhere: those not seen yet go to the next level."""
        hand = self.hands[0]
        while len(hand.next) < hand.found + len(codes) + 1:
            self._allow(2 * hand.next.nbytes)
            hand.grow()
        while not self.dense and self.used + len(codes) > self._most():
            self._grow_table()
        own = codes.copy()
        hand.control[:] = (hand.found, 0, len(self.seen) - 1, self._shift(), 0, 0, 0)
        found = self.kernel.absorb(
            address(own), len(own), address(self.seen), address(hand.next), address(hand.control)
        )
        self.used += found - hand.found
        hand.found = found

    def _round(self, pool: ThreadPoolExecutor | None) -> None:
        """Some chunks of the level, by all threads; more room first where there is none."""
        level = self.level
        alone = pool is None or len(level.front) <= _ALONE
        if not level.waiting:
            level.waiting.extend(self._chunks(1 if alone else self.way.jobs))
        hands = self.hands[:1] if alone else self.hands
        while not self.dense and self.used + len(hands) * self.width > self._most():
            self._grow_table()
        share = (self._most() - self.used) // len(hands)
        found = sum(hand.found for hand in hands)
        try:
            if alone or pool is None:
                self._work(hands[0], share)
            else:
                _all([pool.submit(self._work, hand, share) for hand in hands])
        finally:
            self.used += sum(hand.found for hand in hands) - found
            self._collect(hands)

    def _chunks(self, threads: int) -> Iterator[tuple[int, int]]:
        """The next chunks of the level, from where it stands."""
        level = self.level
        left = len(level.front) - level.at
        size = min(CHUNK, max(-(-left // (threads * _ROUND)), 1)) if threads > 1 else CHUNK
        for _ in range(threads * _ROUND if threads > 1 else 1):
            if level.at < len(level.front):
                to = min(level.at + size, len(level.front))
                yield level.at, to
                level.at = to

    def _work(self, hand: _Hand, share: int) -> None:
        """One thread: takes chunks until none is left or its share of the table is used up."""
        waiting = self.level.waiting
        most = hand.found + share - self.width
        while True:
            try:
                at, to = waiting.popleft()
            except IndexError:
                return
            try:
                while at < to and (self.dense or hand.found <= most):
                    at = self._expand(hand, at, to, most)
            finally:
                if at < to:
                    waiting.appendleft((at, to))
            if at < to:
                return

    def _expand(self, hand: _Hand, at: int, to: int, most: int) -> int:
        """One call of the machine code; how far it came."""
        room = len(hand.next) - self.width - 1
        if hand.found > room:
            with self.lock:
                self._allow(2 * hand.next.nbytes)
                hand.grow()
            return at
        limit = room if self.dense else min(room, most)
        control = hand.control
        control[:] = (hand.found, limit, len(self.seen) - 1, self._shift(), 0, 0, 0)
        stopped: int = self.kernel.expand(
            address(self.level.front), at, to, address(self.seen), address(hand.next),
            address(control), address(hand.fired), address(hand.events), address(hand.broken),
        )  # fmt: skip
        unsound, odd = int(control[_BROKEN]), int(control[_EVENTS])
        hand.found = int(control[_FOUND])
        hand.done += stopped - at - unsound
        hand.whole += int(control[_WHOLE])
        hand.unsound += hand.broken[:unsound].tolist()
        hand.odd += hand.events[:odd].tolist()
        return stopped

    def _collect(self, hands: Sequence[_Hand]) -> None:
        """What the threads of a round found."""
        for hand in hands:
            self.level.sound += hand.done
            self.totals.states += hand.done
            self.totals.whole += hand.whole if self.symmetry else hand.done
            self.totals.fired += hand.fired
            hand.fired[:] = 0
            unsound, odd, hand.unsound, hand.odd = hand.unsound, hand.odd, [], []
            hand.done = hand.whole = 0
            for code in unsound:
                self._judge_state(code)
            for code in odd:
                self._judge_steps(code)

    def _judge_state(self, code: int) -> None:
        for prop in self.compiled.broken(self.where.decode(code)):
            self.totals.broken.setdefault(prop, (self.level.depth, code, -1))

    def _judge_steps(self, code: int) -> None:
        state = self.where.decode(code)
        for action, prop in self.compiled.idle(state) if self.check else ():
            self.totals.broken.setdefault(prop, (self.level.depth, code, action))
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

    def report(self, progress: Progress | None, start: float) -> ExploreReport:
        try:
            self.run(progress, None, 1 << 62)
        except KeyboardInterrupt:
            where = self.way.checkpoint or self.way.interrupted
            raise Interrupted(self._kept("interrupted", where)) from None
        except TooLarge as error:
            raise TooLarge(self._kept(str(error), self.way.checkpoint)) from None
        totals = self.totals
        names = (action.name for action in self.instance.machine.actions)
        fired = dict(zip(names, map(int, totals.fired), strict=True))
        threads = f", {self.way.jobs} threads" if self.way.jobs > 1 else ""
        return ExploreReport(
            machine=self.name,
            states=totals.whole,
            transitions=sum(fired.values()),
            depth=totals.depth,
            fired=fired,
            counterexamples=tuple(self._counterexamples()),
            seconds=time.perf_counter() - start,
            engine=f"{ENGINE}, {self.plan.visited}{threads}",
            representatives=totals.states if self.way.symmetric else None,
            memory={
                "visited": self.plan.visited,
                "taken": self.taken(),
                "most": self.plan.most_bytes,
                "allowed": self.budget,
            },
        )

    def _kept(self, what: str, path: Path | None) -> str:
        """The message, and how the search goes on from the checkpoint."""
        if path is None:
            return what
        self.save(path)
        return (
            f"{what} (after {self.totals.states:,} states at depth {self.level.depth}; the same "
            f"command with --resume {path} goes on from there)"
        )

    def _counterexamples(self) -> Iterator[Counterexample]:
        if not self.totals.broken:
            return
        until = max(depth for depth, _, _ in self.totals.broken.values())
        levels: list[Array] = []
        # Threads find states in any order: which of the shortest runs is shown is up to one.
        self.way = replace(self.way, jobs=1)
        self._restart()
        self.run(None, levels, until)
        for prop, (depth, code, action) in sorted(self.totals.broken.items()):
            rule = self.instance.machine.properties[prop]
            if depth < 0:
                yield Counterexample(rule, self.compiled.show(self.compiled.initial[code]), ())
                continue
            run = self._run(self._path(levels, depth, code))
            start, last = run[0][1], run[-1][1]
            steps = run[1:] if action < 0 else [*run[1:], self._last(last, prop)]
            yield Counterexample(
                rule,
                self.compiled.show(start),
                tuple((self.compiled.actions[a].label, self.compiled.show(s)) for a, s in steps),
            )

    def _path(self, levels: Sequence[Array], depth: int, code: int) -> list[State]:
        """A shortest run to the state: backwards, one level at a time."""
        codes = [code]
        for level in reversed(levels[:depth]):
            at = self.kernel.find(address(level), 0, len(level), codes[-1])
            codes.append(int(level[at]))
        return [self.where.decode(c) for c in reversed(codes)]

    def _run(self, path: Sequence[State]) -> list[tuple[int, State]]:
        """Steps of the machine that lead along the path, which may hold representatives: what
        they stand for is reached."""
        run = [(-1, path[0])]
        for wanted in path[1:]:
            before = run[-1][1]
            run.append(
                next(
                    (action, after)
                    for action, after in self.compiled.successors(before)
                    if inside(self.where.slots, after)
                    and self._representative(after) == wanted
                    and not self.compiled.misstep(action, before, after)
                )
            )
        return run

    def _last(self, before: State, prop: int) -> tuple[int, State]:
        """The step that breaks the property; one that changes nothing is no successor."""
        for action, broken in self.compiled.idle(before):
            if broken == prop:
                return action, before
        return next(
            (action, after)
            for action, after in self.compiled.successors(before)
            if prop in (*self.compiled.misstep(action, before, after), *self.compiled.broken(after))
        )

    # -- checkpoints

    def _mark_of(self) -> str:
        """Names the search, threads left out: what machine, over which states, from where."""
        build = replace(self._build(), shared=False)
        whole = text(self.grounded, self.where, build)
        start = sorted(dict.fromkeys(self._initial()))
        parts = f"{self.instance.machine.name} {start} {whole}"
        return hashlib.sha256(parts.encode()).hexdigest()

    def save(self, path: Path) -> None:
        """Raises BadOperation where the file cannot be written."""
        level, totals = self.level, self.totals
        numbers = [level.at, level.depth, level.sound]
        numbers += [totals.states, totals.whole, totals.depth, self.used]
        broken = [(prop, *where) for prop, where in totals.broken.items()]
        arrays = {
            "seen": self.seen,
            "front": level.front,
            "waiting": np.array(level.waiting, np.int64).reshape(-1, 2),
            "next": np.concatenate([hand.next[: hand.found] for hand in self.hands]),
            "fired": totals.fired,
            "numbers": np.array(numbers, np.int64),
            "broken": np.array(broken, np.int64).reshape(-1, 4),
        }
        checkpoints.save(path, self._mark_of(), arrays)

    def load(self, path: Path) -> None:
        """Go on from a checkpoint.  Raises BadOperation for what is none, or another's, or does
        not fit together."""
        data = checkpoints.load(path, self._mark_of(), self.name)
        if odd := self._misshapen(data) or self._unlikely(data):
            raise checkpoints.damaged(path, odd)
        at, depth, sound, states, whole, reached, self.used = (int(n) for n in data["numbers"])
        self.seen = data["seen"]
        self.level = _Level(data["front"], at, depth, sound)
        self.level.waiting.extend((int(a), int(b)) for a, b in data["waiting"])
        broken = {int(p): (int(d), int(c), int(a)) for p, d, c, a in data["broken"]}
        self.totals = _Totals(states, whole, reached, data["fired"], broken)
        first, following = self.hands[0], data["next"]
        while len(first.next) < len(following):
            first.grow()
        first.next[: len(following)] = following
        first.found = len(following)
        self._allow(0)

    def _misshapen(self, data: Mapping[str, Array]) -> str:
        """Which array is missing, or of another kind or shape than this search has, in words."""
        one, many = np.dtype(np.int64), (-1,)
        table = self.kind if self.dense else one
        expected = {
            "seen": (table, (words(self.where),) if self.dense else many),
            "front": (self.kind, many),
            "next": (self.kind, many),
            "waiting": (one, (-1, 2)),
            "fired": (one, (len(self.instance.machine.actions),)),
            "numbers": (one, (7,)),
            "broken": (one, (-1, 4)),
        }
        if odd := expected.keys() ^ data.keys():
            return f"{', '.join(sorted(odd))} too few or too many"
        for name, (kind, shape) in expected.items():
            array = data[name]
            fits = len(shape) == array.ndim and all(
                size in (-1, own) for size, own in zip(shape, array.shape, strict=True)
            )
            if array.dtype != kind or not fits:
                return f"{name} is {array.dtype} {array.shape}"
        return ""

    def _unlikely(self, data: Mapping[str, Array]) -> str:
        """Which numbers no search can have come to, in words."""
        at, depth, sound, states, _, reached, used = map(int, data["numbers"])
        seen, front, following = data["seen"], data["front"], data["next"]
        begin, end = data["waiting"][:, 0], data["waiting"][:, 1]
        if (data["numbers"] < 0).any() or (data["fired"] < 0).any():
            return "a count is negative"
        if at > len(front) or sound > len(front) or reached > depth:
            return "it stands beyond its end"
        if any(((a < 0) | (a >= self.where.space)).any() for a in (front, following)):
            return "a state is none of the instance"
        if ((begin < 0) | (begin >= end) | (end > at)).any():
            return "what waits is not before where it stands"
        if not all(self._can_be_broken(depth, *map(int, row)) for row in data["broken"]):
            return "a rule is broken that there is not"
        grown = len(seen) >= FIRST_TABLE and not len(seen) & (len(seen) - 1)
        visited = _ones(seen) if self.dense else int((seen != EMPTY).sum())
        if not self.dense and (not grown or visited != used):
            return "the table of states is not as large as it says"
        # Whatever was met was counted, or waits; but what breaks a rule is not counted.
        left = len(front) - at + int((end - begin).sum()) + len(following)
        if visited < states + left or (visited > states + left and not len(data["broken"])):
            return f"{visited:,} states were met, {states + left:,} were counted or wait"
        return ""

    def _can_be_broken(self, depth: int, prop: int, level: int, code: int, action: int) -> bool:
        """Whether an occasion on which a property was broken can be one of this search."""
        codes = self.where.space if level >= 0 else len(self.compiled.initial)
        return (
            0 <= prop < len(self.instance.machine.properties)
            and -1 <= level <= depth
            and 0 <= code < codes
            and -1 <= action < len(self.compiled.actions)
        )


_IN_BYTE: Final = np.array([byte.bit_count() for byte in range(256)], np.uint8)


def _ones(bits: Array) -> int:
    """How many bits of a bitmap are set."""
    return int(_IN_BYTE[bits.view(np.uint8)].sum(dtype=np.int64))


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """While a search runs Ctrl-C only leaves word of itself, so that no count is torn."""
    asked: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def note(number: int, _frame: FrameType | None) -> None:
        asked.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)


def _all(futures: Sequence[Future[None]]) -> None:
    wait(futures)
    for future in futures:
        future.result()


def address(array: Array) -> int:
    """Where the array's numbers begin in memory."""
    return int(array.ctypes.data)
