"""Simulated KV memory: every block remembers what was last written into it, and nothing else.

No table is asked: what a block reads as comes from the writes alone, so that a wrong block table
or a lost write shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvclaims.spec.content import fingerprint, partial_content

GARBAGE = "garbage"


@dataclass(frozen=True)
class Chunk:
    """Tokens `start` to `end` of a request as one step computes them.

    `tokens` are the request's tokens up to `end` at least, `keys` the contents of its full blocks,
    `domain` its cache domain, `blocks` its table when the step began.
    """

    start: int
    end: int
    tokens: Sequence[int]
    keys: Sequence[str]
    domain: str
    blocks: Sequence[int]


class Memory:
    """What each block reads as: a content id, the name of a part of one, or garbage."""

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._name: dict[int, str] = {}
        self._slots: dict[int, tuple[str, tuple[int, ...]]] = {}
        """What a block continues, and its tokens."""
        self._awaited: set[int] = set()
        """Blocks handed out since they were last written."""

    def get(self, block: int | None) -> str:
        """What the block reads as; empty where nothing was ever written, or where there is none."""
        return "" if block is None else self._name.get(block, "")

    def hand_out(self, block: int) -> None:
        """The block belongs to somebody new: what it reads as is not theirs yet."""
        self._awaited.add(block)

    def is_written(self, block: int | None, key: str) -> bool:
        """Its owner has written this content into it."""
        return self.get(block) == key and block not in self._awaited

    def fingerprint(self, block: int) -> int:
        return fingerprint(self.get(block))

    def write(self, chunk: Chunk) -> None:
        """The KV of a chunk reaches the blocks of its table.

        A block that is written from the middle on has to hold the tokens before: KV is computed
        from what is read there.
        """
        for position in range(chunk.start // self._size, -(-chunk.end // self._size)):
            first = position * self._size
            start, end = max(first, chunk.start), min(first + self._size, chunk.end)
            parent = _parent(chunk, position)
            block = chunk.blocks[position]
            self._awaited.discard(block)
            if self._reads(block, parent, chunk.tokens[first:start]):
                key = chunk.keys[position] if position < len(chunk.keys) else ""
                self._put(block, parent, chunk.tokens[first:end], key)
            else:
                self._name[block], self._slots[block] = GARBAGE, ("", ())

    def load(self, block: int, key: str) -> None:
        """A transfer writes a whole block."""
        self._awaited.discard(block)
        self._name[block], self._slots[block] = key, ("", ())

    def discard(self) -> None:
        """All memory is given up; what comes back is blank."""
        self._name.clear()
        self._slots.clear()

    def _reads(self, block: int, parent: str, tokens: Sequence[int]) -> bool:
        """Whether the block begins with these tokens after this parent (trivially so if none)."""
        there, slots = self._slots.get(block, ("", ()))
        return not tokens or (there == parent and slots[: len(tokens)] == tuple(tokens))

    def _put(self, block: int, parent: str, tokens: Sequence[int], key: str) -> None:
        whole = len(tokens) == self._size
        self._name[block] = key if key and whole else partial_content(parent, tokens)
        self._slots[block] = parent, tuple(tokens)


def _parent(chunk: Chunk, position: int) -> str:
    """What the block continues; a guess continues nothing that has a name."""
    if not position:
        return chunk.domain
    return chunk.keys[position - 1] if position <= len(chunk.keys) else GARBAGE
