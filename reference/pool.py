"""Blocks, who refers to them, and what has been promised: plain tables with small steps.

Each method is one step.  It checks for itself whether the step is allowed and raises `Refused`
before it changes anything (B9), so a state is never half changed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator


class Refused(Exception):
    """The step is not allowed in this state; nothing has changed."""


def require(allowed: bool, why: str) -> None:
    """Raise `Refused` with the reason unless the step is allowed."""
    if not allowed:
        raise Refused(why)


class FreeQueue:
    """The free blocks in eviction order: the head is reused first.

    `count` is a counter of its own, as in real engines; B1 says that it agrees with the list.
    """

    def __init__(self, blocks: Iterable[int]) -> None:
        self._order: OrderedDict[int, None] = OrderedDict.fromkeys(blocks)
        self.count = len(self._order)

    def __contains__(self, block: int) -> bool:
        return block in self._order

    def __iter__(self) -> Iterator[int]:
        return iter(self._order)

    def head(self) -> int:
        return next(iter(self._order))

    def put(self, block: int, *, first: bool) -> None:
        """Add a block at the head (`first`) or at the tail."""
        self._order[block] = None
        self._order.move_to_end(block, last=not first)
        self.count += 1

    def last(self, block: int) -> None:
        """The block is to be reused after all others."""
        self._order.move_to_end(block)

    def remove(self, block: int) -> None:
        del self._order[block]
        self.count -= 1


class Pool:
    """All physical blocks of a pool.  Contents, requests and claims are names (text) here.

    A block is free exactly while its reference count is 0.  It has at most one content under
    which it is found; one content may be found in several blocks, first registered first.
    """

    def __init__(self, blocks: Iterable[int]) -> None:
        self.queue = FreeQueue(blocks)
        self.usable = self.queue.count
        self.ref = dict.fromkeys(self.queue, 0)
        self.key: dict[int, str] = {}
        """Block → the content it is found under."""
        self.entry: dict[str, dict[int, None]] = {}
        """Content → the blocks it is found in, in order of registration."""
        self.held: dict[str, list[int]] = {}
        """Active request → its blocks in logical order."""
        self.owed: dict[str, int] = {}
        """Active request → blocks granted to it and not drawn yet."""
        self.covers: dict[str, dict[int, None]] = {}
        """Claim → the blocks it covers; a hard claim refers to each of them (a pin)."""
        self.reserve: dict[str, int] = {}
        """Responsible hard claim → blocks promised to it and not covered yet."""
        self.drawn: dict[int, str] = {}
        """Block taken out of a claim's reserve and not covered yet → that claim: a loan."""

    @property
    def headroom(self) -> int:
        """Free blocks that nobody was promised (F2)."""
        return self.queue.count - sum(self.reserve.values()) - sum(self.owed.values())

    def promised(self, claim: str) -> int:
        """Blocks that a claim was promised and does not cover yet, those on loan too."""
        lent = sum(1 for lender in self.drawn.values() if lender == claim)
        return self.reserve.get(claim, 0) + lent

    def find(self, key: str) -> int | None:
        """The block in which a content is found: the first registered copy."""
        return next(iter(self.entry.get(key, ())), None)

    def coverers(self, block: int) -> list[str]:
        return [claim for claim, blocks in self.covers.items() if block in blocks]

    def is_held(self, block: int) -> bool:
        """Some active request holds the block."""
        return self._holders(block) > 0

    # What requests do.

    def admit(self, request: str, blocks: int) -> None:
        """Grant a request blocks of the free queue that it will draw (F3)."""
        require(0 <= blocks <= self.headroom, "the grant would break a promise")
        self.held.setdefault(request, [])
        self.owed[request] = self.owed.get(request, 0) + blocks

    def take(self, request: str, block: int) -> None:
        """A request takes an empty free block out of its grant."""
        require(self.owed.get(request, 0) > 0, "the request has no grant left")
        self._require_empty(block)
        self.owed[request] -= 1
        self._hold(request, block)

    def draw(self, request: str, claim: str, block: int) -> None:
        """A request takes an empty free block on loan from the claim it materializes (F3)."""
        require(request in self.held, "the request is not active")
        require(self.reserve.get(claim, 0) > 0, "the claim has no reserve left")
        self._require_empty(block)
        self.reserve[claim] -= 1
        self.drawn[block] = claim
        self._hold(request, block)

    def share(self, request: str, block: int, key: str) -> None:
        """A hit: a request refers to a block found under a content; a free one costs a grant."""
        require(request in self.held, "the request is not active")
        require(self.key.get(block) == key, "the block is not found under that content")
        require(block not in self.held[request], "the request holds the block already")
        if block in self.queue:
            require(self.owed[request] > 0, "the request has no grant left")
            self.owed[request] -= 1
        self._hold(request, block)

    def drop(self, request: str, block: int) -> None:
        """A request lets go of a block."""
        require(block in self.held.get(request, ()), "the request does not hold the block")
        lent = block in self.drawn and self._holders(block) == 1
        require(not lent, "a block on loan is given back by its last holder")
        self.held[request].remove(block)
        self._release(block)

    def give_back(self, request: str, claim: str, block: int) -> None:
        """The last holder returns a block on loan, and the claim is owed it again."""
        require(block in self.held.get(request, ()), "the request does not hold the block")
        require(self.drawn.get(block) == claim, "the block is not on loan from the claim")
        require(self.ref[block] == 1, "somebody else refers to the block")
        self.held[request].remove(block)
        del self.drawn[block]
        self.reserve[claim] += 1
        self._release(block)

    def retire(self, request: str) -> None:
        """A request that holds nothing any more leaves; what is left of its grant lapses."""
        require(not self.held.get(request), "the request still holds blocks")
        self.held.pop(request, None)
        self.owed.pop(request, None)

    def register(self, request: str, block: int, key: str) -> None:
        """A content becomes visible in the block of the request that computes it."""
        require(block in self.held.get(request, ()), "the request does not hold the block")
        require(block not in self.key, "the block has a content already")
        self.key[block] = key
        self.entry.setdefault(key, {})[block] = None

    # What claims do.

    def promise(self, claim: str, blocks: int) -> None:
        """Set aside blocks for a hard claim (F2)."""
        require(0 <= blocks <= self.headroom, "the promise would break another")
        self.reserve[claim] = blocks

    def cover(self, claim: str, block: int, *, pin: bool, pays: bool) -> None:
        """A claim covers a resident block.  A pin is a reference of its own; it `pays` with
        one block of the claim's reserve unless the block was held already or is on loan."""
        require(block in self.key, "only resident content is covered")
        require(block not in self.covers.get(claim, ()), "the claim covers the block already")
        require(pays or not pin or self.ref[block] > 0, "a free block must be paid for")
        require(not pays or self.reserve.get(claim, 0) > 0, "the claim has no reserve left")
        self.covers.setdefault(claim, {})[block] = None
        if pays:
            self.reserve[claim] -= 1
        if self.drawn.get(block) == claim:
            del self.drawn[block]
        if pin:
            self._refer(block)

    def uncover(self, claim: str, block: int, *, pin: bool) -> None:
        """A claim no longer covers a block; other references to it stay (P2)."""
        require(block in self.covers.get(claim, ()), "the claim does not cover the block")
        del self.covers[claim][block]
        if pin:
            self._release(block)

    def forsake(self, claim: str, block: int) -> None:
        """A hard claim gives up a block that lost its content, and is promised another one."""
        require(block in self.covers.get(claim, ()), "the claim does not cover the block")
        require(block not in self.key, "the block still has its content")
        require(self.ref[block] == 1 or self.headroom > 0, "no block is left to promise")
        self.uncover(claim, block, pin=True)
        self.reserve[claim] += 1

    def lapse(self, claim: str) -> None:
        """Nothing is promised to a claim any more."""
        self.reserve.pop(claim, None)
        for block in [b for b, lender in self.drawn.items() if lender == claim]:
            del self.drawn[block]

    def forget(self, block: int, key: str) -> None:
        """A block loses its content: it carries no hash and no lookup finds it (B3)."""
        require(self.key.get(block) == key, "the block is not found under that content")
        del self.key[block]
        del self.entry[key][block]
        if not self.entry[key]:
            del self.entry[key]

    def _require_empty(self, block: int) -> None:
        require(block in self.queue, "the block is not free")
        require(block not in self.key, "the block still has a content")

    def _hold(self, request: str, block: int) -> None:
        self.held[request].append(block)
        self._refer(block)

    def _refer(self, block: int) -> None:
        if block in self.queue:
            self.queue.remove(block)
        self.ref[block] += 1

    def _release(self, block: int) -> None:
        """One reference less.  The last one returns the block to the queue: to the tail if its
        content can be found, to the head if it is of no use to anyone."""
        self.ref[block] -= 1
        if self.ref[block] == 0:
            self.queue.put(block, first=block not in self.key)

    def _holders(self, block: int) -> int:
        return sum(1 for blocks in self.held.values() if block in blocks)
