"""The order in which vLLM evicts: preferred content after all other, by its own free queue."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def spare(queue: Any, count: int, prefers: Callable[[int], bool]) -> None:
    """Before `count` blocks are taken from the head of vLLM's `FreeKVCacheBlockQueue`: preferred
    blocks that stand in the way go to its tail, in their order.

    They are taken all the same where the others do not suffice.  Walks `count` blocks and the
    preferred ones among them.
    """
    spared = []
    block, end = queue.fake_free_list_head.next_free_block, queue.fake_free_list_tail
    while count and block is not end:
        if prefers(block.block_id):
            spared.append(block)
        else:
            count -= 1
        block = block.next_free_block
    for block in spared:
        queue.remove(block)
        queue.append(block)
