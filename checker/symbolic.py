"""A second engine: reachable states of a finite instance as a decision diagram, with `dd`.

It starts from the same grounded declaration as the native engine and shares none of its search:
sets of states are diagrams over the bits of the slots, a step maps whole sets.  The wheel of
`dd` for Linux carries CUDD; elsewhere its pure Python diagrams are used, some twenty times slower.

States, transitions of every action and levels are counted exactly.  If a rule is broken the
shortest run is left to the native engine.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from kvclaims.checker.explore import ExploreReport
from kvclaims.checker.finite import Instance, initial_states
from kvclaims.checker.grounded import Grounded, Node, Step, Value, ground, inside
from kvclaims.checker.native import LeftDomain, explore_native
from kvclaims.checker.verdicts import Progress
from kvclaims.spec.interface import BadOperation

_EXACT_BITS: Final = 50
"""CUDD counts in floating point: beyond so many bits it is done here instead."""

_TOGETHER: Final = 4096
"""Nodes up to which relations are one: fewer images pay for more bits that stay as they are."""

Set = Any
"""A diagram: a set of states, or the relation of a step."""


def backend() -> str:
    """Which of the modules of `dd` is there; raises BadOperation without any."""
    for name in ("cudd", "autoref"):
        try:
            importlib.import_module(f"dd.{name}")
        except ImportError:
            continue
        return name
    raise BadOperation("the symbolic engine needs dd (pip install dd)")


def explore_symbolic(
    instance: Instance, name: str, progress: Progress | None = None, *, using: str = ""
) -> ExploreReport:
    """Count the instance's states and transitions; `using` names a module of `dd`.

    Raises BadOperation without `dd` or bounds, and LeftDomain where a value leaves its domain
    without breaking a rule.
    """
    start = time.perf_counter()
    using = using or backend()
    search = _Search(ground(instance), using)
    broken = search.run(name, progress)
    fired = search.fired()
    counterexamples = explore_native(instance, name).counterexamples if broken else ()
    if broken and not counterexamples:
        raise LeftDomain(f"{name}: a value leaves its domain")
    return ExploreReport(
        machine=name,
        states=search.count(search.reached),
        transitions=sum(fired.values()),
        depth=search.depth,
        fired=fired,
        counterexamples=counterexamples,
        seconds=time.perf_counter() - start,
        engine=f"symbolic, dd.{using}",
    )


def searching(instance: Instance) -> tuple[int, int, float, float, float]:
    """States, transitions, seconds of everything, of the search alone, and the processor's
    seconds of the search: for benchmarks."""
    start = time.perf_counter()
    search = _Search(ground(instance), backend())
    begun, cpu = time.perf_counter(), time.process_time()
    search.run(instance.machine.name, None)
    fired = sum(search.fired().values())
    end, spent = time.perf_counter(), time.process_time() - cpu
    return search.count(search.reached), fired, end - start, end - begun, spent


@dataclass(frozen=True)
class _Relation:
    """Steps that write the bits `written`; what they become stands primed in `relation`."""

    relation: Set
    written: list[str]

    @cached_property
    def unprimed(self) -> dict[str, str]:
        """The name of each written bit by that of what it becomes."""
        return {f"{bit}'": bit for bit in self.written}


class _Search:
    def __init__(self, grounded: Grounded, using: str) -> None:
        self.grounded = grounded
        self.module = importlib.import_module(f"dd.{using}")
        self.bdd: Any = self.module.BDD()
        self.bdd.configure(reordering=False)
        self.bits = [[f"s{i}b{k}" for k in range((slot.size - 1).bit_length())]
                     for i, slot in enumerate(grounded.slots)]  # fmt: skip
        written = {slot for step in grounded.steps for slot, _ in step.changes}
        for i, names in enumerate(self.bits):
            for bit in reversed(names):
                self.bdd.declare(bit)
                if i in written:
                    self.bdd.declare(f"{bit}'")
        self.width = sum(map(len, self.bits))
        self._truths: dict[int, Set] = {}
        self._numbers: dict[int, dict[int, Set]] = {}
        self.reached: Set = self.bdd.false
        self.depth = 0
        self.conditions = [self._conditions(step) for step in grounded.steps]
        self.relations = self._relations()

    # -- expressions

    def truth(self, value: Value) -> Set:
        if isinstance(value, int):
            return self.bdd.true if value else self.bdd.false
        if value.number not in self._truths:
            self._truths[value.number] = self._truth(value)
        return self._truths[value.number]

    def _truth(self, node: Node) -> Set:
        args: Any = node.args
        match node.kind:
            case "in":
                result = self.bdd.false
                for place in range(self.grounded.slots[args[0]].size):
                    if args[1] >> place & 1:
                        result |= self.digit(args[0], place)
                return result
            case "not":
                return ~self.truth(args[0])
            case "and" | "or":
                result = self.truth(args[0])
                for part in args[1:]:
                    if node.kind == "and":
                        result &= self.truth(part)
                    else:
                        result |= self.truth(part)
                return result
        return self._where(node)

    def _where(self, node: Node) -> Set:
        args: Any = node.args
        result = self.bdd.false
        if node.kind in ("le", "eq"):
            of, bound = args
            for number, states in self.number(of).items():
                if number <= bound if node.kind == "le" else number == bound:
                    result |= states
            return result
        for number, states in self.number(node).items():
            if number:
                result |= states
        return result

    def number(self, value: Value) -> dict[int, Set]:
        """For each value that the expression takes, the states in which it does."""
        if isinstance(value, int):
            return {value: self.bdd.true}
        if value.number not in self._numbers:
            found = self._number(value)
            self._numbers[value.number] = {
                number: states for number, states in found.items() if states != self.bdd.false
            }
        return self._numbers[value.number]

    def _number(self, node: Node) -> dict[int, Set]:
        args: Any = node.args
        match node.kind:
            case "slot":
                slot = self.grounded.slots[args[0]]
                return {slot.lo + place: self.digit(args[0], place) for place in range(slot.size)}
            case "plus":
                return {n + args[1]: states for n, states in self.number(args[0]).items()}
            case "sum":
                sums = {0: self.bdd.true}
                for factor, part in args:
                    sums = self._added(sums, factor, self.number(part))
                return sums
            case "if":
                condition = self.truth(args[0])
                result: dict[int, Set] = {}
                for branch, here in ((args[1], condition), (args[2], ~condition)):
                    for number, states in self.number(branch).items():
                        result[number] = result.get(number, self.bdd.false) | (states & here)
                return result
        yes = self.truth(node)
        return {1: yes, 0: ~yes}

    def _added(self, sums: dict[int, Set], factor: int, part: Mapping[int, Set]) -> dict[int, Set]:
        result: dict[int, Set] = {}
        for before, some in sums.items():
            for number, states in part.items():
                both = some & states
                if both != self.bdd.false:
                    after = before + factor * number
                    result[after] = result.get(after, self.bdd.false) | both
        return result

    def digit(self, slot: int, place: int, prime: str = "") -> Set:
        """The states in which the slot stands at this place of its domain."""
        names = self.bits[slot]
        return self.bdd.cube({f"{bit}{prime}": bool(place >> k & 1) for k, bit in enumerate(names)})

    # -- steps

    def _conditions(self, step: Step) -> tuple[Set, Set]:
        return self.truth(step.guard), self.truth(step.inside) & self.truth(step.kept)

    def _relations(self) -> list[_Relation]:
        """Steps that write the same slots are one relation: one image instead of many."""
        relations: dict[tuple[int, ...], Set] = {}
        for step, (guard, fine) in zip(self.grounded.steps, self.conditions, strict=True):
            changes = dict(step.changes)
            relation = guard & fine
            for slot, new in changes.items():
                relation &= self._becomes(slot, new)
            written = tuple(sorted(changes))
            relations[written] = relations.get(written, self.bdd.false) | relation
        return self._together(
            _Relation(relation, [bit for slot in written for bit in self.bits[slot]])
            for written, relation in relations.items()
        )

    def _together(self, relations: Iterable[_Relation]) -> list[_Relation]:
        """Neighbours made one while that is small: what one of them does not write, it keeps."""
        result: list[_Relation] = []
        for one in relations:
            if result:
                last = result[-1]
                more = [bit for bit in one.written if bit not in last.written]
                less = [bit for bit in last.written if bit not in one.written]
                either = last.relation & self._kept(more) | one.relation & self._kept(less)
                if len(either) <= _TOGETHER:
                    result[-1] = _Relation(either, [*last.written, *more])
                    continue
            result.append(one)
        return result

    def _kept(self, bits: Sequence[str]) -> Set:
        """The bits stay as they are."""
        result = self.bdd.true
        for bit in reversed(bits):
            result &= self.bdd.apply("<=>", self.bdd.var(bit), self.bdd.var(f"{bit}'"))
        return result

    def _becomes(self, slot: int, new: Value) -> Set:
        lo, hi = self.grounded.slots[slot].lo, self.grounded.slots[slot].hi
        result = self.bdd.false
        for number, states in self.number(new).items():
            if lo <= number <= hi:
                result |= states & self.digit(slot, number - lo, "'")
        return result

    def _image(self, states: Set, by: _Relation) -> Set:
        if self.module.__name__ == "dd.cudd":
            after = self.module.and_exists(states, by.relation, by.written)
        else:
            after = self.bdd.exist(by.written, states & by.relation)
        return self.bdd.let(by.unprimed, after)

    def run(self, name: str, progress: Progress | None) -> bool:
        """Cover the instance; whether some rule was broken."""
        invariant = self.truth(self.grounded.invariant)
        start = time.perf_counter()
        self.depth = -1
        following, broken = self._initial()
        while True:
            broken |= following & ~invariant != self.bdd.false
            following &= invariant
            if following == self.reached:
                break
            self.depth += 1
            self.reached = following
            for relation in self.relations:
                following |= self._image(self.reached, relation)
            if progress and self.depth % 8 == 7:
                states = self.count(self.reached)
                rate = states / (time.perf_counter() - start) / 1e6
                progress(f"{name}: level {self.depth}, {states:,} states, {rate:.2f} million/s")
        self.depth = max(self.depth, 0)
        broken |= self.reached & ~self.truth(self.grounded.idle) != self.bdd.false
        for guard, fine in self.conditions:
            broken |= self.reached & guard & ~fine != self.bdd.false
        return bool(broken)

    def _initial(self) -> tuple[Set, bool]:
        states, outside = self.bdd.false, False
        for state in initial_states(self.grounded.instance):
            if not inside(self.grounded.slots, state):
                outside = True
                continue
            cube = self.bdd.true
            for i, (slot, value) in enumerate(zip(self.grounded.slots, state, strict=True)):
                cube &= self.digit(i, value - slot.lo)
            states |= cube
        return states, outside

    # -- counting

    def fired(self) -> dict[str, int]:
        fired = {action.name: 0 for action in self.grounded.instance.machine.actions}
        for step, (guard, _) in zip(self.grounded.steps, self.conditions, strict=True):
            fired[step.action] += self.count(self.reached & guard)
        return fired

    def count(self, states: Set) -> int:
        if self.width <= _EXACT_BITS:
            return int(self.bdd.count(states, nvars=self.width))
        return _Counter(self.bdd, [bit for names in self.bits for bit in names]).count(states)


class _Counter:
    """Counts with whole numbers, node by node."""

    def __init__(self, bdd: Any, bits: list[str]) -> None:
        self.bdd = bdd
        order = sorted(bits, key=bdd.level_of_var)
        self.place = {bit: i for i, bit in enumerate(order)}
        self.width = len(bits)
        self.known: dict[Any, int] = {}

    def count(self, states: Set) -> int:
        return self._below(states) << self._place(states)

    def _place(self, node: Set) -> int:
        return self.width if node in (self.bdd.true, self.bdd.false) else self.place[node.var]

    def _below(self, node: Set) -> int:
        """Ways to choose the bits from this node's on."""
        if node == self.bdd.false:
            return 0
        if node == self.bdd.true:
            return 1
        if node not in self.known:
            low, high = node.low, node.high
            if node.negated:
                low, high = ~low, ~high
            at = self.place[node.var] + 1
            self.known[node] = sum(
                self._below(part) << (self._place(part) - at) for part in (low, high)
            )
        return self.known[node]
