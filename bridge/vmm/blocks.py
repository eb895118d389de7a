"""A small block pool over elastic memory: who uses which block, and what hard claims may count on.

For users of `ElasticMemory` that have no allocator of their own, and the second half of the
machine in `spec.elastic`: blocks that may be handed out, are held, are found by a lookup, or are
touched by a job in flight.  An engine with its own allocator implements `Tenants` instead.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from kvclaims.bridge.vmm.memory import ElasticMemory, Mode, Refused


class StillHeld(RuntimeError):
    """A return cannot go on: lent blocks are held, and there is no room to move them to."""


class StillRead(RuntimeError):
    """A return cannot go on: a job in flight did not end in time."""


class BlockPool:
    """Blocks 1 to `base + lent` of one `ElasticMemory`; block 0 is nobody's.

    `moved(old, new)` is called when a return moves a held block, so that its holder can mend its
    table; `patience` bounds in seconds how long a return waits for jobs in flight.  `allocate` and
    `declare` are for users; the other steps are the machine's own, and keep the E rules alone.
    """

    def __init__(
        self,
        memory: ElasticMemory,
        copy: Callable[[int, int], None] | None = None,
        moved: Callable[[int, int], None] | None = None,
        patience: float = 10.0,
    ) -> None:
        self.memory = memory
        self.base = range(1, 1 + memory.shape.base_blocks)
        self.lent = memory.shape.lent
        self.free: set[int] = set(self.base)
        self.held: set[int] = set()
        self.hashed: set[int] = set()
        self.touching: set[tuple[Any, int]] = set()
        self.promised: dict[Any, int] = {}
        self.covers: set[tuple[Any, int]] = set()
        self._copy = copy
        self._moved = moved or (lambda _old, _new: None)
        self._patience = patience
        self._done = threading.Condition()
        memory.tenants = self

    # -- blocks --------------------------------------------------------------------------------

    @property
    def usable(self) -> int:
        """Blocks that the pool has now."""
        return self.memory.usable_blocks

    def allocate(self, n: int) -> list[int]:
        """`n` blocks, lent ones first; blank, and without a hash.  Raises `Refused` (F3)."""
        _check_number(n)
        room = self._room()
        lent = sorted(b for b in self.free if b in self.lent)
        spare = len(lent) + max(0, len(room) - self._owed())
        self._require(n <= spare, "F3", f"{n} blocks are free beside what claims are promised")
        chosen = [*lent, *room][:n]
        for block in chosen:
            self.take(block)
        return chosen

    def take(self, b: int) -> None:
        self._require(b in self.free, "E2", "the block may be handed out")
        self.free.discard(b)
        self.hashed.discard(b)
        self.held.add(b)
        self._tell("take", b=b)

    def keep(self, b: int) -> None:
        """What a request has written becomes visible to lookups."""
        self._require(b in self.held, "E2", "a request holds the block")
        self.hashed.add(b)
        self._tell("keep", b=b)

    def leave(self, b: int) -> None:
        """Its request lets go of the block; behind a fence it is not handed out again."""
        self._require(b in self.held, "E2", "a request holds the block")
        self.held.discard(b)
        if b in self.base or self.memory.mode is Mode.LENT:
            self.free.add(b)
        else:
            self.free.discard(b)
        self._tell("leave", b=b)

    # -- jobs in flight --------------------------------------------------------------------------

    def touch(self, j: Any, b: int) -> None:
        """A job leaves that reads or writes the block (B5)."""
        self._require(b in self.held, "E4", "a request holds the block")
        with self._done:
            self.touching.add((j, b))
        self._tell("touch", j=j, b=b)

    def done(self, j: Any, b: int) -> None:
        """The job is done with the block; may be called from the thread that ran it."""
        with self._done:
            self.touching.discard((j, b))
            self._tell("done", j=j, b=b)
            self._done.notify_all()

    @contextmanager
    def job(self, j: Any, blocks: Iterable[int]) -> Iterator[None]:
        """A job over these blocks, from here to the end of the `with`."""
        chosen = list(blocks)
        for block in chosen:
            self.touch(j, block)
        try:
            yield
        finally:
            for block in chosen:
                self.done(j, block)

    # -- hard claims -----------------------------------------------------------------------------

    def declare(self, c: Any, n: int) -> None:
        """Accept a hard claim for `n` blocks of the base that are free and promised to nobody (F2).
        Raises `Refused`."""
        _check_number(n)
        spare = len(self._room()) - self._owed()
        self._require(n <= spare, "F2", f"{n} blocks of the base are free and promised to nobody")
        self.accept(c, n)

    def accept(self, c: Any, n: int) -> None:
        """Promise a hard claim `n` more blocks, of the base alone (E3)."""
        _check_number(n)
        promised = sum(self.promised.values()) + n
        self._require(promised <= len(self.base), "E3", "the base alone has room for it")
        self.promised[c] = self.promised.get(c, 0) + n
        self._tell("accept", c=c, n=n)

    def cover(self, c: Any, b: int) -> None:
        self._require(0 <= b < self.base.stop, "E3", "the block lies in the base")
        self.covers.add((c, b))
        self._tell("cover", c=c, b=b)

    def end(self, c: Any) -> None:
        self.promised.pop(c, None)
        self.covers = {(claim, b) for claim, b in self.covers if claim != c}
        self._tell("end", c=c)

    # -- what a return asks of the pool (Tenants) ------------------------------------------------

    def fence(self) -> None:
        self.free -= set(self.lent)

    def open(self) -> None:
        if not self.memory.needed:
            for block in self.lent:
                self.list_(block)

    def list_(self, b: int) -> None:
        """A lent block is added to those that may be handed out, unless it is held."""
        self._require(self.memory.mode is Mode.LENT, "E2", "the reserve is lent")
        self._require(not self.memory.needed, "E1", "no prefill needs the reserve")
        if b in self.lent and b not in self.held:
            self.free.add(b)
        self._tell("list", b=b)

    def drain(self) -> None:
        """Held blocks move to free blocks of the base, what nobody holds is dropped."""
        for block in sorted(self.lent):
            if block in self.held:
                self.move(block)
            elif block in self.hashed:
                self.empty(block)

    def move(self, old: int) -> int:
        """Give the holder of a lent block one of the base with the same content.

        Where `copy` or `moved` raises, the holder keeps the block that it has.
        """
        room = self._room()
        if self._copy is None or len(room) <= self._owed():
            raise StillHeld(f"block {old} is held, and the base has no room for it")
        new = room[0]
        self._wait_for({old})
        self.take(new)
        try:
            self._copy(old, new)
            self._moved(old, new)
        except BaseException:
            self.leave(new)  # else nobody's block would be held for good
            raise
        if old in self.hashed:
            self.keep(new)
        self.empty(old)
        return new

    def empty(self, b: int) -> None:
        """A lent block is out of use; what it kept is dropped."""
        self._require(b in self.lent, "E3", "the block is a lent one")
        self.held.discard(b)
        self.hashed.discard(b)
        self._tell("drain", b=b)

    def wait(self) -> None:
        self._wait_for(set(self.lent))

    def in_use(self) -> bool:
        lent = set(self.lent)
        read = any(b in lent for _, b in self.touching)
        return read or bool(lent & (self.held | self.hashed))

    # -- parts -----------------------------------------------------------------------------------

    def _room(self) -> list[int]:
        """Blocks of the base that may be handed out, blank ones first."""
        room = (b for b in self.base if b in self.free and not self._is_covered(b))
        return sorted(room, key=lambda b: (b in self.hashed, b))

    def _is_covered(self, block: int) -> bool:
        return any(covered == block for _, covered in self.covers)

    def _owed(self) -> int:
        """Blocks that hard claims are promised and do not cover yet."""
        covered = {c: sum(1 for claim, _ in self.covers if claim == c) for c in self.promised}
        return sum(max(0, n - covered[c]) for c, n in self.promised.items())

    def _wait_for(self, blocks: set[int]) -> None:
        with self._done:
            ended = self._done.wait_for(
                lambda: not any(b in blocks for _, b in self.touching), self._patience
            )
        if not ended:
            raise StillRead("a job in flight still touches a lent block")

    def _require(self, holds: bool, rule: str, why: str) -> None:
        if not holds:
            raise Refused(rule, why)

    def _tell(self, action: str, **args: Any) -> None:
        self.memory.told(action, args)


def _check_number(n: int) -> None:
    if n < 0:
        raise ValueError(f"a number of blocks is not negative: {n}")
