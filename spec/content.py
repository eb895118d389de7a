"""Token content by name, so that programs, fuzzing and reports speak of the same prefixes.

A `Content` is a list of segments; a segment is a number of tokens from a named endless
stream.  `A×60 blocks` on two engines with different block sizes is the same program.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
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
        """Tokens, with blocks of `block_size` tokens."""
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


def cache_domain(salt: str = "", adapter: str = "", modality: str = "") -> str:
    """What the identity of content depends on beside its tokens, as one text (B4): a plain salt
    is its own domain, other parts are told apart from it and from each other, also by a salt that
    looks like them."""
    if not adapter and not modality and not salt.startswith("{"):
        return salt
    return json.dumps({"salt": salt, "adapter": adapter, "modality": modality})


def in_group(content: str, group: int) -> str:
    """What a content is called in a KV group: its plain id in the first, `1f2e…@1` in others, as
    each group keeps KV of its own for the same tokens."""
    return f"{content}@{group}" if group else content


def in_any_group(content: str) -> str:
    """The plain id of a content of some KV group."""
    return content.partition("@")[0]


def partial_content(parent: str, tokens: Sequence[int]) -> str:
    """The name of a block that is not full: `parent` is the id of the block before it, or the
    cache domain for the first one; `tokens` are those written so far."""
    return f"{parent}+{','.join(map(str, tokens))}"


@lru_cache(maxsize=65536)
def fingerprint(content: str) -> int:
    """The digest of memory that holds this content and nothing else; 0 for blank memory.

    A simulated memory keeps these in place of KV bytes, so that whoever reads a block can tell
    what was last written there without asking any table.
    """
    if not content:
        return 0
    return int.from_bytes(hashlib.sha256(content.encode()).digest()[:7], "big")


def content_to_json(content: Content) -> list[list[Any]]:
    """A list a segment: label, blocks, and single tokens where there are any."""
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
