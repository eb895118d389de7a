"""A whole vLLM pool against itself, its tables and its KV events (B1, B2, B3, B6, B7, B8, B10).

For runs that no observer follows step by step: everything is read from vLLM's own structures.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

from kvclaims.bridge.vllm.poolcheck import found_under, own_keys, parts_of, shown, table, walk
from kvclaims.bridge.vllm.worker import Found

Broken = tuple[str, str]
"""A rule, and what is seen."""

Key = tuple[bytes, int]
"""A hash, and the KV group that content of that name is in."""


def visible(pool: Any) -> dict[Key, tuple[int, ...]]:
    """Every content that the pool finds, with its blocks."""
    return {
        parts_of(key): tuple(block.block_id for block in found_under(pool, key))
        for key in table(pool)
    }


def holders_of(managers: Iterable[Any]) -> Counter[int]:
    """Block → how many entries of tables name it."""
    return Counter(
        block.block_id
        for manager in managers
        for blocks in manager.req_to_blocks.values()
        for block in blocks
        if not block.is_null
    )


def blocks_stand(pool: Any, holders: Mapping[int, int]) -> Iterator[Broken]:
    """Queue, references, hashes and null block of the whole pool (B1, B2, B3, B6).

    `holders`: block → how many references to it can be named.
    """
    queue = [block.block_id for block in walk(pool.free_block_queue)]
    counter = pool.free_block_queue.num_free_blocks
    if len(set(queue)) != len(queue) or len(queue) != counter:
        yield "B1", f"the free queue says {counter} blocks and holds {queue[:20]}"
    waiting = set(queue)
    for block in pool.blocks:
        number = block.block_id
        if block.is_null:
            if number in waiting or own_keys(pool, block):
                yield "B6", f"the null block is {'queued' if number in waiting else 'hashed'}"
            continue
        named = holders.get(number, 0)
        if block.ref_cnt != named:
            yield "B2", f"ref of block {number} is {block.ref_cnt}, {named} can be named"
        if (number in waiting) != (block.ref_cnt == 0):
            state = "queued" if number in waiting else "not queued"
            yield "B1", f"block {number} is {state} with ref {block.ref_cnt}"
        yield from _keys_stand(pool, block)


def _keys_stand(pool: Any, block: Any) -> Iterator[Broken]:
    for key in own_keys(pool, block):
        if block not in found_under(pool, key):
            yield "B3", f"block {block.block_id} carries {shown(key)}, and a lookup misses it"


def lookups_stand(pool: Any) -> Iterator[Broken]:
    """What is found under a hash carries it (B3)."""
    for key in table(pool):
        for block in found_under(pool, key):
            if key not in own_keys(pool, block):
                yield "B3", f"a lookup of {shown(key)} finds block {block.block_id} without it"


def audit(manager: Any, leaving: Iterable[Any]) -> None:
    """Raise `Found` for the first thing that is not in order; `leaving` are blocks of requests
    that are over, which go back once a step in flight has ended."""
    pool = manager.block_pool
    holders = holders_of(manager.coordinator.single_type_managers)
    holders.update(block.block_id for block in leaving)
    broken = next(chain(blocks_stand(pool, holders), lookups_stand(pool)), None)
    if broken is not None:
        raise Found(*broken)


def at_rest(manager: Any, usable: int) -> None:
    """Nothing runs or waits: every block is free again (B7)."""
    free = manager.block_pool.get_num_free_blocks()
    if free != usable:
        held = sorted(holders_of(manager.coordinator.single_type_managers))
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
        pool = self._manager.block_pool
        resident = {(maybe_convert_block_hash(raw), group) for raw, group in visible(pool)}
        gone, untold = self._resident - resident, resident - set(self._content)
        if gone or untold:
            message = f"{len(untold)} resident hashes were never told, {len(gone)} are gone unsaid"
            raise Found("B8", message)
