"""Breadth-first exploration on tensors, with torch: one operation for all states of a level.

It starts from the same grounded declaration as the native engine.  The states of a level are one
tensor of numbers (`machinecode.layout`); digits, guards and successors are tensors beside it, so
the same code runs on a CPU and on a GPU.  Visited states are a map of truth values over the
product of all domains while that fits, and a sorted tensor of numbers past that.

States, transitions of every action and levels are counted exactly.  If a rule is broken the
shortest run is left to the native engine.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from typing import Any, Final

from kvclaims.checker.explore import ExploreReport
from kvclaims.checker.finite import Instance, initial_states
from kvclaims.checker.grounded import Grounded, Node, Step, Value, ground, inside
from kvclaims.checker.machinecode import Layout, layout
from kvclaims.checker.native import LeftDomain, Way, explore_native
from kvclaims.checker.planning import TooLarge, default_budget
from kvclaims.checker.verdicts import Progress
from kvclaims.spec.interface import BadOperation, EngineMissing

DEVICES: Final = ("cpu", "cuda")

_CHUNK: Final = 1 << 15
"""States whose successors are made at once."""

_MAP: Final = 1 << 28
"""Up to this many states in the product the map is preferred to a sorted tensor."""

Tensor = Any


def explore_tensors(
    instance: Instance,
    name: str,
    progress: Progress | None = None,
    *,
    device: str = "cpu",
    budget: int | None = None,
    jobs: int = 1,
) -> ExploreReport:
    """Count the instance's states and transitions on a device of torch, on a CPU by `jobs`
    threads (more than the cores that are idle make it much slower: they wait by spinning).

    Raises EngineMissing without torch or the device, BadOperation without bounds, TooLarge where
    states do not fit into 63 bits or the budget, and LeftDomain where a value leaves its domain
    without breaking a rule.
    """
    start = time.perf_counter()
    torch = _torch(device)
    search = _Search(torch, ground(instance), device, budget or default_budget(), name)
    threads = torch.get_num_threads()
    torch.set_num_threads(jobs)
    try:
        with torch.inference_mode():
            search.run(progress)
    finally:
        torch.set_num_threads(threads)
    fired = search.fired()
    way = Way(budget=budget)
    broken = explore_native(instance, name, None, way).counterexamples if search.odd else ()
    if search.odd and not broken:
        raise LeftDomain(f"{name}: a value leaves its domain")
    return ExploreReport(
        machine=name,
        states=search.states,
        transitions=sum(fired.values()),
        depth=max(search.depth, 0),
        fired=fired,
        counterexamples=broken,
        seconds=time.perf_counter() - start,
        engine=f"explicit, torch {torch.__version__} on {device}",
        memory={"visited": search.visited.kind, "allowed": search.budget},
    )


def _torch(device: str) -> Any:
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        raise EngineMissing("the tensor engine needs torch (pip install torch)") from None
    if device not in DEVICES:
        raise BadOperation(f"unknown device {device!r} (known: {', '.join(DEVICES)})")
    if device == "cuda" and not torch.cuda.is_available():
        raise EngineMissing("torch finds no GPU here (--device cpu runs without one)")
    return torch


class _Batch:
    """Some states, and what expressions are in each of them.

    A value that is the same in all of them stays a plain number.
    """

    def __init__(self, torch: Any, where: Layout, codes: Tensor) -> None:
        self.torch = torch
        self.where = where
        self.codes = codes
        self._digits: dict[int, Tensor] = {}
        self._known: dict[int, Tensor] = {}

    def digit(self, slot: int) -> Tensor:
        """Distances from the slot's lower bound, as 32-bit integers."""
        if slot not in self._digits:
            above = self.codes // self.where.strides[slot]
            digit = above % self.where.slots[slot].size
            self._digits[slot] = digit.to(self.torch.int32)
        return self._digits[slot]

    def truth(self, value: Value) -> Tensor:
        """Truth values, one for each state."""
        if isinstance(value, int):
            return self.torch.full_like(self.codes, value, dtype=self.torch.bool)
        found = self._once(value)
        return found if value.truth else found != 0

    def number(self, value: Value) -> Tensor:
        if isinstance(value, int):
            return value
        found = self._once(value)
        return found.to(self.torch.int32) if value.truth else found

    def _once(self, node: Node) -> Tensor:
        if node.number not in self._known:
            self._known[node.number] = self._of(node)
        return self._known[node.number]

    def _of(self, node: Node) -> Tensor:
        args: Any = node.args
        match node.kind:
            case "slot":
                return self.digit(args[0]) + self.where.slots[args[0]].lo
            case "in":
                return self._member(*args)
            case "not":
                return ~self.truth(args[0])
            case "and" | "or":
                return self._junction(node.kind, args)
            case "sum":
                return sum(self.number(part) * factor for factor, part in args)
            case "plus":
                return self.number(args[0]) + args[1]
            case "le":
                return self.number(args[0]) <= args[1]
            case "eq":
                return self.number(args[0]) == args[1]
            case "if":
                then, otherwise = self.number(args[1]), self.number(args[2])
                return self.torch.where(self.truth(args[0]), then, otherwise)
        raise TypeError(f"not a node: {node!r}")

    def _junction(self, kind: str, parts: Sequence[Node]) -> Tensor:
        result = self.truth(parts[0])
        for part in parts[1:]:
            result = result & self.truth(part) if kind == "and" else result | self.truth(part)
        return result

    def _member(self, slot: int, values: int) -> Tensor:
        digit, size = self.digit(slot), self.where.slots[slot].size
        first, last = (values & -values).bit_length() - 1, values.bit_length() - 1
        if first == last:
            return digit == first
        if values + (1 << first) == 1 << (last + 1):
            low = digit >= first if first else None
            high = digit <= last if last < size - 1 else None
            both = [part for part in (low, high) if part is not None]
            return both[0] & both[-1]
        table = [bool(values >> place & 1) for place in range(size)]
        return self.torch.tensor(table, device=digit.device)[digit.long()]


class _Map:
    """Visited states as one truth value for each state of the product."""

    kind = "map"

    def __init__(self, torch: Any, space: int, device: str) -> None:
        self.torch = torch
        self.seen = torch.zeros(space, dtype=torch.bool, device=device)

    def add(self, codes: Tensor) -> Tensor:
        """Those that were not seen yet, each once."""
        new = self.torch.unique(codes[~self.seen[codes]])
        self.seen[new] = True
        return new


class _Sorted:
    """Visited states as their numbers in order."""

    kind = "sorted"

    def __init__(self, torch: Any, device: str) -> None:
        self.torch = torch
        self.seen = torch.empty(0, dtype=torch.int64, device=device)

    def add(self, codes: Tensor) -> Tensor:
        """Those that were not seen yet, each once."""
        codes = self.torch.unique(codes)
        if len(self.seen):
            at = self.torch.searchsorted(self.seen, codes).clamp_(max=len(self.seen) - 1)
            codes = codes[self.seen[at] != codes]
        self.seen = self.torch.cat((self.seen, codes)).sort().values
        return codes


class _Search:
    def __init__(self, torch: Any, grounded: Grounded, device: str, budget: int, name: str) -> None:
        self.torch = torch
        self.grounded = grounded
        self.device = device
        self.budget = budget
        self.name = name
        self.where = layout(grounded.slots)
        if self.where.space >= 1 << 63:
            raise TooLarge(f"{name}: a state takes more than 63 bits: explore it by symbolic")
        mapped = self.where.space <= min(_MAP, budget // 2)
        self.visited: _Map | _Sorted = (
            _Map(torch, self.where.space, device) if mapped else _Sorted(torch, device)
        )
        names = [action.name for action in grounded.instance.machine.actions]
        self.counts = {name: torch.zeros((), dtype=torch.int64, device=device) for name in names}
        self.wrong = torch.zeros((), dtype=torch.bool, device=device)
        self.outside = False
        self.states = 0
        self.depth = -1

    @property
    def odd(self) -> bool:
        """Some rule was broken, or some value left its domain."""
        return self.outside or bool(self.wrong)

    def fired(self) -> dict[str, int]:
        return {name: int(count) for name, count in self.counts.items()}

    def run(self, progress: Progress | None) -> None:
        begun = last = time.perf_counter()
        front = self._checked(self.visited.add(self._initial()))
        while len(front):
            self.depth += 1
            self.states += len(front)
            found = [
                self.visited.add(successors)
                for chunk in front.split(_CHUNK)
                if len(successors := self._successors(chunk))
            ]
            self._allow()
            front = self._checked(self.torch.cat(found)) if found else front[:0]
            now = time.perf_counter()
            if progress and now - last > 0.5:
                last = now
                rate = self.states / (now - begun) / 1e6
                progress(f"{self.name}: level {self.depth}, {self.states:,} states, "
                         f"{rate:.2f} million states/s")  # fmt: skip

    def _allow(self) -> None:
        taken = self.visited.seen.nbytes * (1 if isinstance(self.visited, _Map) else 3)
        if taken > self.budget:
            raise TooLarge(
                f"{self.name}: more than {self.budget:,} bytes needed after {self.states:,} "
                f"states: give more with --memory, or explore it by native with --symmetry"
            )

    def _initial(self) -> Tensor:
        codes = []
        for state in initial_states(self.grounded.instance):
            if inside(self.where.slots, state):
                codes.append(self.where.encode(state))
            else:
                self.outside = True
        return self.torch.tensor(codes, dtype=self.torch.int64, device=self.device)

    def _checked(self, codes: Tensor) -> Tensor:
        """The states that break no invariant: the others are not entered."""
        if self.grounded.invariant == 1 or not len(codes):
            return codes
        kept = []
        for chunk in codes.split(_CHUNK):
            sound = _Batch(self.torch, self.where, chunk).truth(self.grounded.invariant)
            self.wrong |= ~sound.all()
            kept.append(chunk[sound])
        return self.torch.cat(kept)

    def _successors(self, codes: Tensor) -> Tensor:
        batch = _Batch(self.torch, self.where, codes)
        if self.grounded.idle != 1:
            self.wrong |= ~batch.truth(self.grounded.idle).all()
        steps = [self._step(batch, step) for step in self.grounded.steps]
        return self.torch.cat([codes[:0], *steps])

    def _step(self, batch: _Batch, step: Step) -> Tensor:
        guard = batch.truth(step.guard)
        self.counts[step.action] += guard.sum()
        taken = guard
        for condition in (step.inside, step.kept):
            if condition != 1:
                taken = taken & batch.truth(condition)
        if taken is not guard:
            self.wrong |= (guard & ~taken).any()
        after, known = batch.codes, 0
        for slot, value in step.shifts:
            stride = self.where.strides[slot]
            if isinstance(value, int):
                known += stride * value
            else:
                after = after + batch.number(value).long() * stride
        return self.torch.masked_select(after, taken) + known
