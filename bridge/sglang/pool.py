"""SGLang's radix cache, allocator, request table and KV buffer, and what they say of themselves.

How the contract's words map onto them (one token is one block, slot 0 is the null block):

- the *free queue* is what SGLang itself counts as room: the allocator's free list and the slots
  of tree nodes that nobody locks; its counter is `available_size() + evictable_size()`;
- `ref` of a slot in the tree is its node's `lock_ref`; a slot outside the tree is either in the
  free list or belongs to the one request that took it, and SGLang keeps no count of that;
- a *key* of a slot is the content that the path to its place in the tree spells.

Everything is read from the live objects when it is asked for; nothing is remembered here.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import torch
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixCache

from kvclaims.spec.interface import BlockFacts, PoolSnapshot

NULL_SLOT: Final = 0
"""The slot into which SGLang writes padding; its allocator never hands it out."""

MOST_ROWS: Final = 256
"""Requests that may run at a time."""

_CPU: Final = "cpu"
_ROOT: Final = hashlib.sha256(b"").digest()


@lru_cache(maxsize=65536)
def _extended(parent: bytes, token: int) -> bytes:
    """The chain of `spec.content.content_ids`, one block of one token further."""
    return hashlib.sha256(parent + str(token).encode()).digest()


@dataclass(frozen=True)
class Place:
    """Where the tree has a slot: the content that the path spells, and the node."""

    slot: int
    key: str
    node: Any


class RadixPool:
    """The live objects of one pool."""

    def __init__(self, usable: int) -> None:
        self.usable = usable
        self.memory: Any = MHATokenToKVPool(
            size=usable,
            page_size=1,
            dtype=torch.int64,
            head_num=1,
            head_dim=1,
            layer_num=1,
            device=_CPU,
            enable_memory_saver=False,
        )
        self.allocator: Any = TokenToKVPoolAllocator(
            usable, torch.int64, _CPU, self.memory, need_sort=False
        )
        self.rows: Any = ReqToTokenPool(min(usable, MOST_ROWS), usable + 1, _CPU, False)
        self.tree: Any = RadixCache(self.rows, self.allocator, page_size=1)

    # -- the tree --------------------------------------------------------------------------------

    def places(self) -> Iterator[Place]:
        """Every slot in the tree."""
        ahead = [(child, _ROOT) for child in self.tree.root_node.children.values()]
        while ahead:
            node, chain = ahead.pop()
            for token, slot in zip(node.key, node.value.tolist(), strict=True):
                chain = _extended(chain, token)
                yield Place(slot, chain.hex()[:16], node)
            ahead.extend((child, chain) for child in node.children.values())

    def resident(self) -> dict[str, int]:
        """Content → the slot that a lookup finds it in."""
        return {place.key: place.slot for place in self.places()}

    def lock(self, slot: int) -> None:
        """One more reference to this slot of the tree, and to no other.

        SGLang locks whole paths.  So a holder of the path up to the slot before moves its lock on
        to this one: the new path is locked before the old one is let go of.
        """
        node = self._ending_at(slot)
        self.tree.inc_lock_ref(node)
        self.tree.dec_lock_ref(node.parent)

    def unlock(self, slot: int) -> None:
        """One reference less to this slot: the lock moves back to the slot before."""
        node = self._ending_at(slot)
        self.tree.inc_lock_ref(node.parent)
        self.tree.dec_lock_ref(node)

    def refresh(self, slots: Iterable[int]) -> None:
        """These slots count as read just now, in SGLang's order of eviction (least recently used
        leaves first)."""
        fresh, now = set(slots), time.monotonic()
        for place in self.places():
            if place.slot in fresh:
                place.node.last_access_time = now

    def _ending_at(self, slot: int) -> Any:
        """The node of this slot alone: looking a prefix up splits the node where it ends."""
        node = next(place.node for place in self.places() if place.slot == slot)
        path = [node]
        while path[-1].parent is not self.tree.root_node:
            path.append(path[-1].parent)
        upto = node.value.tolist().index(slot) + 1
        tokens = [t for above in reversed(path[1:]) for t in above.key] + list(node.key[:upto])
        found = self.tree.match_prefix(tokens).last_device_node
        if len(tokens) > 1:
            self.tree.match_prefix(tokens[:-1])
        return found

    # -- requests and memory ---------------------------------------------------------------------

    def row(self, index: int, length: int) -> list[int]:
        """The slots of a request, in logical order."""
        slots: list[int] = self.rows.req_to_token[index, :length].tolist()
        return slots

    def write_row(self, index: int, start: int, slots: Sequence[int]) -> None:
        where = (index, slice(start, start + len(slots)))
        self.rows.write(where, torch.tensor(slots, dtype=torch.int32))

    def new_row(self, slots: Sequence[int]) -> int:
        """A row for one more request, which begins with these slots."""
        index: int = self.rows.alloc(1)[0]
        self.write_row(index, 0, slots)
        return index

    def free(self, slots: Sequence[int]) -> None:
        self.allocator.free(torch.tensor(slots, dtype=torch.int64))

    def clear(self) -> None:
        """All of it as new, as SGLang's `flush_cache` does."""
        self.tree.reset()
        self.rows.clear()
        self.allocator.clear()

    def read(self, slots: Sequence[int]) -> list[int]:
        """What the KV buffer holds in these slots."""
        where = torch.tensor(slots, dtype=torch.int64)
        held: list[int] = self.memory.k_buffer[0][where, 0, 0].tolist()
        return held

    def write(self, slots: Sequence[int], digests: Sequence[int]) -> None:
        """Keys and values of these slots, as the pool's own `set_kv_buffer` stores them."""
        where = torch.tensor(slots, dtype=torch.int64)
        what = torch.tensor(digests, dtype=torch.int64).view(-1, 1, 1)
        self.memory.k_buffer[0][where] = what
        self.memory.v_buffer[0][where] = what

    # -- what the pool says ----------------------------------------------------------------------

    def free_list(self) -> list[int]:
        free: list[int] = self.allocator.free_pages.tolist() + self.allocator.release_pages.tolist()
        return free

    def counter(self) -> int:
        """The room that SGLang's scheduler counts on."""
        return int(self.allocator.available_size() + self.tree.evictable_size())

    def facts(self, slots: Iterable[int]) -> dict[int, BlockFacts]:
        """What the pool holds of each slot (see the head of this module)."""
        free = set(self.free_list())
        refs: dict[int, int] = {}
        keys: dict[int, list[str]] = {}
        for place in self.places():
            refs[place.slot] = int(place.node.lock_ref)
            keys.setdefault(place.slot, []).append(place.key)
        facts = {}
        for slot in slots:
            ref = refs.get(slot, int(slot not in free))
            queued = slot in free or refs.get(slot) == 0
            facts[slot] = BlockFacts(ref, queued, tuple(sorted(keys.get(slot, ()))))
        return facts

    def snapshot(
        self, holders: dict[str, tuple[int, ...]], pins: dict[str, tuple[int, ...]]
    ) -> PoolSnapshot:
        lookup: dict[str, tuple[int, ...]] = {}
        evictable = []
        for place in self.places():
            lookup[place.key] = (*lookup.get(place.key, ()), place.slot)
            if place.node.lock_ref == 0:
                evictable.append(place.slot)
        return PoolSnapshot(
            null_block=NULL_SLOT,
            queue=(*self.free_list(), *evictable),
            counter=self.counter(),
            facts=self.facts(range(1, self.usable + 1)),
            holders=holders,
            pins=pins,
            lookup=lookup,
        )
