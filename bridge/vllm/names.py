"""Content ids for vLLM's block hashes, so that its steps speak of the same content as programs.

A request knows its tokens and its chain of block hashes; the ids of `spec.content` are chained
over the same tokens, so position i of one names position i of the other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache
from typing import Any

from kvclaims.bridge.vllm.setup import modality_of
from kvclaims.spec.content import cache_domain, content_ids, in_group

_GROUP_BYTES = 4
"""vLLM appends the id of the KV group to a hash to make the key of its map."""

_FIRST_GROUP = bytes(_GROUP_BYTES)


@cache
def _numbers(count: int) -> bytes:
    """So many numbers with commas between them, to be filled in."""
    return b",".join([b"%d"] * count)


class ContentChain:
    """`spec.content.content_ids`, one block at a time, for tokens that keep growing."""

    def __init__(self, block_size: int, salt: str = "") -> None:
        self.block_size = block_size
        self.ids: list[str] = []
        self._text = _numbers(block_size)
        self._parent = hashlib.sha256(salt.encode()).digest()

    def extend(self, tokens: Sequence[int]) -> list[str]:
        """The ids of all full blocks of `tokens`, which begin with those seen before."""
        size = self.block_size
        for start in range(len(self.ids) * size, len(tokens) - size + 1, size):
            block = self._text % tuple(tokens[start : start + size])
            self._parent = hashlib.sha256(self._parent + block).digest()
            self.ids.append(self._parent[:8].hex())
        return self.ids


def domain_of(request: Any) -> str:
    """The cache domain of a vLLM request: its salt, its adapter's name, its modality input."""
    lora = getattr(request, "lora_request", None)
    adapter = "" if lora is None else lora.lora_name
    return cache_domain(request.cache_salt or "", adapter, modality_of(request))


class Names:
    """Names the block hashes that are visible now; any other hash names itself."""

    def __init__(self, block_size: int, chained: bool = True) -> None:
        self.block_size = block_size
        self._chained = chained
        """Whether vLLM hashes whole blocks of this size, so that positions correspond."""
        self._by_hash: dict[bytes, str] = {}
        self._chains: dict[str, ContentChain] = {}

    def of_request(self, request: Any) -> list[str]:
        """The content ids of the request's full blocks so far, in order."""
        chain = self._chains.get(request.request_id)
        if chain is None:
            chain = ContentChain(self.block_size, domain_of(request))
            self._chains[request.request_id] = chain
        if self._chained and len(request.block_hashes) > len(chain.ids):
            chain.extend(request.all_token_ids)
        return chain.ids

    def learn(self, request: Any, first: int, last: int) -> None:
        """Remember the names of the request's blocks `first` to `last` (not included)."""
        ids, hashes = self.of_request(request), request.block_hashes
        for position in range(first, min(last, len(ids))):
            self._by_hash[bytes(hashes[position])] = ids[position]

    def forget_request(self, request_id: str) -> None:
        """The request has ended; the names of its hashes stay, as its content may."""
        self._chains.pop(request_id, None)

    def forget_key(self, key: bytes) -> None:
        """The last copy of a content is gone."""
        self._by_hash.pop(bytes(key)[:-_GROUP_BYTES], None)

    def of_key(self, key: bytes) -> str:
        """The content id of a key of vLLM's map, or the hash in hexadecimal if unknown.

        Keys of a KV group other than the first carry its number: `1f2e…@1`.
        """
        block_hash, group = key[:-_GROUP_BYTES], key[-_GROUP_BYTES:]
        name = self._by_hash.get(block_hash) or block_hash.hex()
        return name if group == _FIRST_GROUP else in_group(name, int.from_bytes(group, "big"))

    def of_tokens(self, tokens: tuple[int, ...], salt: str = "") -> tuple[str, ...]:
        """The content ids of the full blocks of `tokens`."""
        return content_ids(tokens, self.block_size, salt)
