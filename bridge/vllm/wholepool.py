"""A whole vLLM pool against itself, its tables and its KV events (B1, B2, B3, B6, B7, B8, B10).

For runs that no observer follows step by step: everything is read from vLLM's own structures.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Final

from kvclaims.bridge.vllm.poolcheck import own_keys, table
from kvclaims.bridge.vllm.worker import Found

_GROUP_BYTES: Final = 4


def audit(manager: Any, leaving: Iterable[Any]) -> None:
    """Raise `Found` for the first thing that is not in order; `leaving` are blocks of requests
    that are over, which go back once a step in flight has ended."""
    pool = manager.block_pool
    queued = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    counter = pool.free_block_queue.num_free_blocks
    if len(set(queued)) != len(queued) or len(queued) != counter:
        raise Found("B1", f"the free queue says {counter} blocks and holds {queued}")
    holders = Counter(_held(manager))
    holders.update(block.block_id for block in leaving)
    free = set(queued)
    for block in pool.blocks:
        number = block.block_id
        if block.is_null:
            if number in free or own_keys(pool, block):
                raise Found("B6", "the null block is queued or hashed")
        elif block.ref_cnt != holders[number]:
            held = f"ref of block {number} is {block.ref_cnt}, {holders[number]} hold it"
            raise Found("B2", held)
        elif (number in free) != (block.ref_cnt == 0):
            raise Found("B1", f"block {number} with ref {block.ref_cnt} is not where it belongs")
        for key in own_keys(pool, block):
            if number not in _found(pool, key):
                raise Found("B3", f"block {number} carries a hash, and a lookup misses it")
    for key in table(pool):
        for number in _found(pool, key):
            if key not in own_keys(pool, pool.blocks[number]):
                raise Found("B3", f"a lookup finds block {number}, which does not carry the hash")


def _held(manager: Any) -> Iterator[int]:
    for group in manager.coordinator.single_type_managers:
        for blocks in group.req_to_blocks.values():
            yield from (block.block_id for block in blocks if not block.is_null)


def _found(pool: Any, key: bytes) -> list[int]:
    value = table(pool).get(key, {})
    blocks = value.values() if isinstance(value, dict) else (value,)
    return [block.block_id for block in blocks]


def at_rest(manager: Any, usable: int) -> None:
    """Nothing runs or waits: every block is free again (B7)."""
    free = manager.block_pool.get_num_free_blocks()
    if free != usable:
        held = sorted({*_held(manager)})
        message = f"no request is left, {free} of {usable} blocks are free, tables hold {held}"
        raise Found("B7", message)


class Told:
    """vLLM's KV events of a pool, folded to what a router believes (B8)."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        manager.enable_kv_cache_events = True
        manager.block_pool.enable_kv_cache_events = True
        self._resident: set[tuple[Any, int]] = set()
        self._content: dict[tuple[Any, int], tuple[Any, ...]] = {}
        """What was told of a hash: the one before it, its tokens and what else is in its key."""
        self._take = manager.take_events
        manager.take_events = self._kept

    def _kept(self) -> Any:
        events = self._take()
        for event in events:
            self._fold(event)
        return events

    def _fold(self, event: Any) -> None:
        kind, group = type(event).__name__, getattr(event, "group_idx", None) or 0
        if kind == "AllBlocksCleared":
            self._resident.clear()
            return
        hashes = [(h, group) for h in event.block_hashes]
        if kind == "BlockRemoved":
            self._resident.difference_update(hashes)
            return
        self._resident.update(hashes)
        before, size = event.parent_block_hash, event.block_size
        keys = getattr(event, "extra_keys", None) or [None] * len(hashes)
        for place, name in enumerate(hashes):
            tokens = tuple(event.token_ids[place * size : (place + 1) * size])
            content = (before, tokens, repr(keys[place]))
            if self._content.setdefault(name, content) != content:
                raise Found("B8", f"a hash is told of {self._content[name]}, then of {content}")
            before = name[0]

    def check(self) -> None:
        """What is resident was told, and what is gone was taken back.  Raises `Found`.

        That one of several copies is gone is told as if it were the last (the known finding
        `removed-while-resident`): what was told once and is resident still is not missed here.
        """
        from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

        self._manager.take_events()
        resident = {
            (
                maybe_convert_block_hash(key[:-_GROUP_BYTES]),
                int.from_bytes(key[-_GROUP_BYTES:], "big"),
            )
            for key in table(self._manager.block_pool)
        }
        gone, untold = self._resident - resident, resident - set(self._content)
        if gone or untold:
            message = f"{len(untold)} resident hashes were never told, {len(gone)} are gone unsaid"
            raise Found("B8", message)
