"""Token content by name, so that programs, fuzzing and reports speak of the same prefixes.

A `Content` is a list of segments; a segment is a number of tokens from a named endless
stream.  `A×60 blocks` on two engines with different block sizes is the same program.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

GENERATED_TOKEN: Final = 0
"""The token every runtime appends while decoding, so that contents stay comparable."""

VOCABULARY: Final = 251
"""Streams use token ids 1..VOCABULARY: small enough for a tiny test model."""


MOST: Final = 1_000_000
"""The longest segment, in blocks or tokens; more is taken for a slip of the pen."""


@dataclass(frozen=True)
class Segment:
    """`blocks` whole blocks plus `tokens` single tokens from the start of stream `label`."""

    label: str
    blocks: int
    tokens: int = 0

    def __post_init__(self) -> None:
        if not self.label:
            raise ValueError("a segment needs the name of a stream")
        if self.blocks < 0 or self.tokens < 0:
            raise ValueError(f"segment {self.label!r} has a negative size")
        if self.blocks > MOST or self.tokens > MOST:
            raise ValueError(f"segment {self.label!r} is longer than {MOST:,}")

    def length(self, block_size: int) -> int:
        return self.blocks * block_size + self.tokens


Content = tuple[Segment, ...]


def tokens_of(content: Content, block_size: int) -> tuple[int, ...]:
    """The token ids of a content for blocks of `block_size` tokens."""
    tokens: list[int] = []
    for segment in content:
        tokens.extend(_stream(segment.label, segment.length(block_size)))
    return tuple(tokens)


def content_ids(tokens: tuple[int, ...], block_size: int, salt: str = "") -> tuple[str, ...]:
    """The identity of each full block: a digest chained over the whole prefix and the salt.

    Position i identifies tokens 0 to (i+1)·block_size, so equal ids mean equal prefixes.  The
    ids name content in observations and traces; engines keep their own hashes.
    """
    ids: list[str] = []
    parent = hashlib.sha256(salt.encode()).digest()
    for start in range(0, len(tokens) - block_size + 1, block_size):
        block = ",".join(map(str, tokens[start : start + block_size]))
        parent = hashlib.sha256(parent + block.encode()).digest()
        ids.append(parent.hex()[:16])
    return tuple(ids)


def content_to_json(content: Content) -> list[list[Any]]:
    return [[s.label, s.blocks] + ([s.tokens] if s.tokens else []) for s in content]


def content_from_json(value: object) -> Content:
    """Read `[["A", 60], ["B", 2, 5]]`; raises ValueError with the reason on anything else."""
    if not isinstance(value, list) or not value:
        raise ValueError("content must be a list of [stream, blocks] or [stream, blocks, tokens]")
    segments = []
    for part in value:
        if (
            not isinstance(part, list)
            or len(part) not in (2, 3)
            or not isinstance(part[0], str)
            or not all(type(n) is int for n in part[1:])
        ):
            raise ValueError(f"not a content segment: {part!r}")
        segments.append(Segment(*part))
    return tuple(segments)


@lru_cache(maxsize=256)
def _stream(label: str, length: int) -> tuple[int, ...]:
    digest = hashlib.shake_256(label.encode()).digest(4 * length)
    return tuple(
        int.from_bytes(digest[4 * i : 4 * i + 4], "big") % VOCABULARY + 1 for i in range(length)
    )
