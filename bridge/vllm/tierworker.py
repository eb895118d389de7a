"""A worker's side of the tier: it does what the scheduler orders, and says later what became of it.

A block is copied off the device within the step that it is ordered in, as the next one may write
it; the copy is written to its file in a thread of its own.  What a load has read is put on the
device between two steps, into blocks that vLLM holds for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count
from typing import Final, Protocol

from kvclaims.bridge.serving.tierfiles import BadCopy, Buffer
from kvclaims.bridge.serving.tierqueue import Read, TierQueue
from kvclaims.bridge.vllm.tier import Load, Loaded, Move, Orders, Results, Saved

_PAUSE: Final = 0.01
"""Seconds that a step waits in which nothing is computed."""


class Device(Protocol):
    """Where blocks are."""

    def take(self, blocks: Sequence[int]) -> Iterable[Sequence[Buffer]]:
        """What each of these blocks holds now, in memory that nobody else writes."""

    def put(self, block: int, content: memoryview) -> None:
        """Fill a block.  Raises `BadCopy` for what is no block."""


class TierWorker:
    """What one worker does with its part of every block."""

    def __init__(self, device: Device, queue: TierQueue) -> None:
        self.queue = queue
        self._device = device
        self._life = ""
        self._results = Results()
        self._numbers = count()
        self._loads: dict[int, Load] = {}
        self._received: set[str] = set()
        self._failed: set[int] = set()

    def begin(self, orders: Orders) -> None:
        """Take note of which life it is, forget what is given up, and begin to load."""
        if not orders.life:
            return
        if orders.life != self._life:
            self._life = orders.life
            self.queue.begin(orders.life)
            for number, load in list(self._loads.items()):
                self._end(number, load, 0, "the tier was emptied")
            self._results = Results(orders.life)
        self.queue.drop(orders.drops)
        for load in orders.loads:
            number = next(self._numbers)
            self._loads[number] = load
            self.queue.read(number, [move.name for move in load.moves])

    def save(self, moves: Sequence[Move]) -> None:
        """Copy these blocks now, and have the copies written."""
        for move, content in zip(moves, self._device.take([m.block for m in moves]), strict=True):
            self.queue.write(move.name, content)

    def collect(self, idle: bool = False) -> None:
        """Take note of what was done meanwhile; a step that is `idle` waits a little for it."""
        if idle:
            self.queue.wait(_PAUSE)
        for done in self.queue.taken():
            if not isinstance(done, Read):
                self._results.saved[done.name] = Saved(done.reason)
            elif done.load in self._loads:
                self._fill(done, self._loads[done.load])

    def received(self) -> set[str]:
        """Requests whose load has ended since the last time."""
        received, self._received = self._received, set()
        return received

    def failed(self) -> set[int]:
        """Blocks that were not filled with what they should hold, since the last time."""
        failed, self._failed = self._failed, set()
        return failed

    def results(self) -> Results | None:
        """What became of orders since the last time, None for nothing."""
        done, self._results = self._results, Results(self._life)
        return done if done.saved or done.loaded else None

    def close(self) -> None:
        self.queue.close()

    def _fill(self, read: Read, load: Load) -> None:
        if read.content is None:
            self._end(read.load, load, read.position, read.reason)
            return
        try:
            self._device.put(load.moves[read.position].block, read.content)
        except BadCopy as error:
            self._end(read.load, load, read.position, str(error))
            return
        if read.position + 1 == len(load.moves):
            self._end(read.load, load, len(load.moves))

    def _end(self, number: int, load: Load, good: int, reason: str = "") -> None:
        del self._loads[number]
        self._results.loaded[load.request_id] = Loaded(good, reason)
        self._received.add(load.request_id)
        self._failed.update(move.block for move in load.moves[good:])
