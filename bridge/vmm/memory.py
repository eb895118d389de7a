"""Elastic memory: a stretch of physical memory per layer that changes sides (rules E1 to E5).

Each layer has one reserved range at an address that never moves: a base that is always mapped,
and above it the lent part.  The memory of the lent part is mapped either there, as KV blocks,
or as activations, in one range that all layers share; so recommitting it allocates nothing.

`lend` and `return_` are made of single steps, layer by layer, which are the actions of the
machine in `spec.elastic`: each is refused where the machine's guard does not hold (`Refused`),
and each that is taken is told to `tell`.  Who uses the lent blocks is known to `Tenants` alone.
"""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from types import FrameType
from typing import Any, Final, Protocol

from kvclaims.bridge.vmm.driver import Driver, DriverError

Tell = Callable[[str, dict[str, Any]], None]
"""Told each step: the action of `spec.elastic` and its parameters by name."""


class Refused(RuntimeError):
    """A step whose guard does not hold; nothing has changed."""

    def __init__(self, rule: str, why: str) -> None:
        super().__init__(f"{rule}: not so: {why}")
        self.rule = rule


class Mode(StrEnum):
    """What the memory is about; values as in `spec.elastic`."""

    HOME = "home"
    LENDING = "lending"
    LENT = "lent"
    DRAINING = "draining"
    RETURNING = "returning"
    UNLENDING = "unlending"
    UNRETURNING = "unreturning"


@dataclass(frozen=True)
class Shape:
    """Layers and blocks, with the seam between base and lent part on a multiple of the
    granularity.  Blocks count without the null block, which is number 0 and lies in the base.

    `base_blocks` are those wholly below the seam; one that straddles it counts as lent.
    """

    layers: int
    block_bytes: int
    base_blocks: int
    lent_blocks: int
    base_bytes: int
    lent_bytes: int

    @classmethod
    def fit(
        cls, layers: int, block_bytes: int, base_blocks: int, lent_blocks: int, granularity: int
    ) -> Shape:
        """The smallest shape with at least that many base blocks, and lent ones above."""
        if min(layers, block_bytes, lent_blocks, granularity) <= 0 or base_blocks < 0:
            raise ValueError("layers, sizes and the number of lent blocks are positive")
        base = _rounded((1 + base_blocks) * block_bytes, granularity)
        whole = _rounded((1 + base_blocks + lent_blocks) * block_bytes, granularity)
        whole = max(whole, base + granularity)
        fixed = base // block_bytes - 1
        return cls(layers, block_bytes, fixed, whole // block_bytes - 1 - fixed, base, whole - base)

    @property
    def lent(self) -> range:
        """The ids of the lent blocks."""
        return range(1 + self.base_blocks, 1 + self.base_blocks + self.lent_blocks)


def _rounded(size: int, granularity: int) -> int:
    return -(-size // granularity) * granularity


class Tenants(Protocol):
    """Who uses the lent blocks.  Each of the four may be called again after a failure."""

    def fence(self) -> None:
        """From now on hand out no lent block."""

    def drain(self) -> None:
        """Empty the lent blocks: whoever holds one finishes, moves or loses it, and what was
        kept in one is dropped.  Ends within a bound; raises what stands in its way."""

    def wait(self) -> None:
        """Return when no job in flight may touch a lent block (B5)."""

    def in_use(self) -> bool:
        """Whether a lent block is held, found by a lookup, or touched by a job in flight."""

    def open(self) -> None:
        """The lent blocks are there, blank: they may be handed out."""


class Nobody:
    """No tenants: for memory whose user knows by itself when nobody touches the lent part."""

    def fence(self) -> None: ...
    def drain(self) -> None: ...
    def wait(self) -> None: ...
    def in_use(self) -> bool:
        return False

    def open(self) -> None: ...


@dataclass
class Side:
    """Where the memory of one layer can be mapped, and whether it is, and may be touched."""

    address: int
    mapped: bool = False
    open: bool = False


@dataclass
class Costs:
    """What the toggles took so far: seconds and numbers of driver calls by name."""

    lends: int = 0
    returns: int = 0
    failures: int = 0
    lend_seconds: float = 0.0
    return_seconds: float = 0.0
    calls: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=dict)


@contextmanager
def _together() -> Iterator[None]:
    """Ctrl-C comes afterwards: what a driver has done and the note of it are not torn apart."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            handler(*came[0])


KV: Final = "kv"
ACT: Final = "act"
_OTHER: Final = {KV: ACT, ACT: KV}
_UNMAPPING: Final = {
    KV: (Mode.RETURNING, Mode.UNLENDING),
    ACT: (Mode.LENDING, Mode.UNRETURNING),
}
"""The modes in which a side is out of use, so that its mappings may be taken away."""


class ElasticMemory:
    """Memory of all layers on one driver.  Built with the reserve at the activations.

    Raises `DriverError` if the driver refuses a call, and has then given everything back, as it has
    where it is interrupted.
    """

    def __init__(self, driver: Driver, shape: Shape, tell: Tell | None = None) -> None:
        self.driver = driver
        self.shape = shape
        self.mode = Mode.HOME
        self.needed = False
        self.in_prefill = False
        self.costs = Costs()
        self.tenants: Tenants = Nobody()
        self._listeners: list[Tell] = [tell] if tell else []
        self._undo: list[tuple[str, tuple[int, ...]]] = []
        self._bases: list[int] = []
        self._handles: list[int] = []
        self._sides: dict[str, list[Side]] = {KV: [], ACT: []}
        self._activations = 0
        try:
            with _together():
                self._build()
        except BaseException as error:
            self._give_up(error)
            raise

    # -- where things are ------------------------------------------------------------------------

    def address(self, layer: int) -> int:
        """Where the layer's KV begins; it never changes."""
        return self._bases[layer]

    @property
    def kv_bytes(self) -> int:
        """The length of a layer's range, base and lent part."""
        return self.shape.base_bytes + self.shape.lent_bytes

    @property
    def activations(self) -> tuple[int, int]:
        """Address and length of the activations; to be touched in a prefill only."""
        return self._activations, self.shape.layers * self.shape.lent_bytes

    @property
    def usable_blocks(self) -> int:
        """Blocks that the pool has now, the null block not counted."""
        lent = self.shape.lent_blocks if self.mode is Mode.LENT else 0
        return self.shape.base_blocks + lent

    def side(self, name: str, layer: int) -> Side:
        """How a layer's memory is mapped on the side `KV` or `ACT`."""
        return self._sides[name][layer]

    # -- whole moves -----------------------------------------------------------------------------

    def lend(self) -> bool:
        """Map the reserve as KV blocks in every layer, or in none (E5).

        False if it was lent already.  Raises `Refused` while a prefill needs the reserve or
        runs (E1), and `DriverError` when a step failed and everything was undone.
        """
        self._settle()
        if self.mode is not Mode.LENT:
            with self._timed("lend"):
                self.begin_lend()
                self._carry(KV)
                self.arrive_lent()
            self.tenants.open()
            return True
        self.tenants.open()
        return False

    def return_(self) -> bool:
        """Fence, drain, wait for readers, then map the reserve as activations in every layer.

        False if it was home already.  Raises `DriverError` when a step failed and was undone;
        what stops a drain or a wait comes through, and the next call goes on from there.
        """
        self._settle()
        if self.mode is Mode.HOME:
            return False
        with self._timed("return"):
            if self.mode is not Mode.DRAINING:
                self.begin_return()
            self.tenants.drain()
            self.tenants.wait()
            self.withdraw()
            self._carry(ACT)
            self.arrive_home()
        return True

    @contextmanager
    def prefill(self) -> Iterator[tuple[int, int]]:
        """A prefill step: the reserve comes home first (E1); address and length of activations.

        One inside another ends with the outer one.  Where the return fails the reserve is still
        needed, and nothing is lent.  Enter again; or, if nobody wants it any more, `return_`,
        `start_prefill` and `end_prefill` end the need.
        """
        if self.in_prefill:
            yield self.activations
            return
        self.need()
        self.return_()
        self.start_prefill()
        try:
            yield self.activations
        finally:
            self.end_prefill()

    def close(self) -> None:
        """Give everything back; may be called again when a call was refused half way."""
        for side in (KV, ACT):
            for layer in range(len(self._sides[side])):
                place = self.side(side, layer)
                with _together():
                    if place.mapped:
                        self._call("unmap", place.address, self.shape.lent_bytes)
                        place.mapped = place.open = False
        while self._undo:
            call, args = self._undo[-1]
            with _together():
                self._call(call, *args)
                self._undo.pop()

    # -- single steps, as the machine has them ---------------------------------------------------

    def begin_lend(self) -> None:
        self._require(self.mode is Mode.HOME, "E4", "nothing is lent, nothing is under way")
        self._require(not self.in_prefill, "E1", "no prefill step runs")
        self._require(not self.needed, "E1", "no prefill needs the reserve")
        self._go(Mode.LENDING, "lend")

    def begin_return(self) -> None:
        self._require(self.mode is Mode.LENT, "E4", "the reserve is lent")
        self.tenants.fence()
        self._go(Mode.DRAINING, "give_back")

    def withdraw(self) -> None:
        self._require(self.mode is Mode.DRAINING, "E4", "the ids are fenced")
        self._require(not self.tenants.in_use(), "E4", "the lent blocks are out of use")
        self._go(Mode.RETURNING, "withdraw")

    def turn_back(self) -> None:
        """What is under way is to be undone; anything else stays as it is."""
        back = {Mode.LENDING: Mode.UNLENDING, Mode.RETURNING: Mode.UNRETURNING}
        self._go(back.get(self.mode, self.mode), "turn_back")

    def arrive_lent(self) -> None:
        self._arrive(KV, Mode.LENT, "arrive_lent")

    def arrive_home(self) -> None:
        self._arrive(ACT, Mode.HOME, "arrive_home")

    def unmap(self, side: str, layer: int) -> None:
        """The memory of a layer is no longer mapped on that side."""
        place = self.side(side, layer)
        self._require(self.mode in _UNMAPPING[side], "E4", "that side is out of use")
        self._require(place.mapped, "E5", "it is mapped in this layer")
        with _together():
            self._call("unmap", place.address, self.shape.lent_bytes)
            place.mapped = place.open = False
            self._tell(f"unmap_{side}", {"x": layer})

    def map(self, side: str, layer: int) -> None:
        """The memory of a layer is mapped on that side."""
        place = self.side(side, layer)
        self._require(not self.side(_OTHER[side], layer).mapped, "E4", "not mapped otherwise")
        self._require(not place.mapped, "E5", "it is not mapped yet")
        with _together():
            self._call("map", place.address, self.shape.lent_bytes, self._handles[layer])
            place.mapped = True
            self._tell(f"map_{side}", {"x": layer})

    def open(self, side: str, layer: int) -> None:
        """Access to the memory of a layer is set on that side."""
        place = self.side(side, layer)
        self._require(place.mapped, "E5", "it is mapped on that side")
        with _together():
            self._call("open", place.address, self.shape.lent_bytes)
            place.open = True
            self._tell(f"open_{side}", {"x": layer})

    def need(self) -> None:
        """A prefill comes to need the reserve: nothing is lent until it has started."""
        self.needed = True
        self._tell("need", {})

    def start_prefill(self) -> None:
        self._require(self.mode is Mode.HOME, "E1", "the reserve is with the activations")
        self.in_prefill, self.needed = True, False
        self._tell("start_prefill", {})

    def end_prefill(self) -> None:
        self.in_prefill = False
        self._tell("end_prefill", {})

    def listen(self, tell: Tell) -> None:
        """Tell this one too every step from now on."""
        self._listeners.append(tell)

    def told(self, action: str, args: dict[str, Any]) -> None:
        """For tenants: add a step of theirs to the one log of this memory."""
        self._tell(action, args)

    # -- parts -----------------------------------------------------------------------------------

    def _tell(self, action: str, args: dict[str, Any]) -> None:
        for listener in self._listeners:
            listener(action, args)

    def _require(self, holds: bool, rule: str, why: str) -> None:
        if not holds:
            raise Refused(rule, why)

    def _go(self, mode: Mode, action: str) -> None:
        self.mode = mode
        self._tell(action, {})

    def _arrive(self, side: str, mode: Mode, action: str) -> None:
        ways = {
            Mode.LENT: (Mode.LENDING, Mode.UNRETURNING),
            Mode.HOME: (Mode.RETURNING, Mode.UNLENDING),
        }
        self._require(self.mode in ways[mode], "E4", "the memory is on its way there")
        there = all(s.open and not o.mapped for s, o in self._pairs(side))
        self._require(there, "E5", "every layer is on that side")
        self._go(mode, action)

    def _pairs(self, side: str) -> Iterator[tuple[Side, Side]]:
        return zip(self._sides[side], self._sides[_OTHER[side]], strict=True)

    def _carry(self, side: str) -> None:
        """Bring every layer to a side; a refused step is undone in all of them."""
        try:
            self._bring(side)
        except DriverError as error:
            self.costs.failures += 1
            self.turn_back()
            try:
                self._settle()
            except DriverError as again:
                error.add_note(f"not undone yet, the next call does it: {again}")
            raise

    def _bring(self, side: str) -> None:
        """Take the steps that are still missing, so that a second attempt goes on."""
        self._call("synchronize")  # nothing in the driver waits for running work
        for layer, (mine, other) in enumerate(self._pairs(side)):
            if other.mapped:
                self.unmap(_OTHER[side], layer)
            if not mine.mapped:
                self.map(side, layer)
            if not mine.open:
                self.open(side, layer)

    def _settle(self) -> None:
        """Finish what an earlier failure left undone: errors do not stick (E5)."""
        if self.mode in (Mode.LENDING, Mode.RETURNING):
            self.turn_back()
        if self.mode is Mode.UNLENDING:
            self._bring(ACT)
            self.arrive_home()
        elif self.mode is Mode.UNRETURNING:
            self._bring(KV)
            self.arrive_lent()
            if not self.needed:
                self.tenants.open()

    def _call(self, name: str, *args: int) -> int:
        started = time.perf_counter()
        try:
            result = getattr(self.driver, name)(*args)
        finally:
            self.costs.calls[name] += 1
            spent = time.perf_counter() - started
            self.costs.seconds[name] = self.costs.seconds.get(name, 0.0) + spent
        return int(result or 0)

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        seconds = time.perf_counter() - started
        if what == "lend":
            self.costs.lends += 1
            self.costs.lend_seconds += seconds
        else:
            self.costs.returns += 1
            self.costs.return_seconds += seconds

    # -- building up and giving up ---------------------------------------------------------------

    def _build(self) -> None:
        shape = self.shape
        self._activations = self._reserve(shape.layers * shape.lent_bytes)
        for layer in range(shape.layers):
            start = self._reserve(self.kv_bytes)
            self._bases.append(start)
            base = self._create(shape.base_bytes)
            self._call("map", start, shape.base_bytes, base)
            self._undo.append(("unmap", (start, shape.base_bytes)))
            self._call("open", start, shape.base_bytes)
            self._handles.append(self._create(shape.lent_bytes))
            self._sides[KV].append(Side(start + shape.base_bytes))
            self._sides[ACT].append(Side(self._activations + layer * shape.lent_bytes))
            place = self.side(ACT, layer)
            self._call("map", place.address, shape.lent_bytes, self._handles[layer])
            place.mapped = True
            self._call("open", place.address, shape.lent_bytes)
            place.open = True

    def _reserve(self, size: int) -> int:
        address = self._call("reserve", size)
        self._undo.append(("free", (address, size)))
        return address

    def _create(self, size: int) -> int:
        handle = self._call("create", size)
        self._undo.append(("release", (handle,)))
        return handle

    def _give_up(self, error: BaseException) -> None:
        try:
            self.close()
        except DriverError as again:
            error.add_note(f"and giving back failed: {again}")
