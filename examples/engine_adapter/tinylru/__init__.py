"""A small engine: blocks of KV, found by content, the least recently used evicted first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import takewhile


class Cache:
    """`blocks` blocks.  A block that nobody holds stays in `free`, with its content, until it is
    taken for another one."""

    def __init__(self, blocks: int) -> None:
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(blocks))
        self.block_of: dict[str, int] = {}
        self.content_of: dict[int, str] = {}

    def find(self, contents: Sequence[str]) -> list[int]:
        """The blocks of the longest cached prefix."""
        return [self.block_of[c] for c in takewhile(self.block_of.__contains__, contents)]

    def take(self, hits: Iterable[int], fresh: int) -> tuple[list[int], dict[int, str]]:
        """Hold the hits and `fresh` free blocks; the new blocks, and what was evicted."""
        for block in hits:
            self.free.pop(block, None)
        taken = [self.free.popitem(last=False)[0] for _ in range(fresh)]
        evicted = {b: self.content_of.pop(b) for b in taken if b in self.content_of}
        for content in evicted.values():
            del self.block_of[content]
        return taken, evicted

    def keep(self, block: int, content: str) -> None:
        """The block now holds this content; a later request may find it."""
        if content not in self.block_of:
            self.block_of[content] = block
            self.content_of[block] = content

    def give_back(self, blocks: Iterable[int]) -> None:
        """Nobody holds these any more.  The end of a prefix is evicted before its start."""
        for block in reversed(list(blocks)):
            self.free[block] = None
