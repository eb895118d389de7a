"""Digests of the KV bytes in given blocks, straight from the engine's tensors.

Plain torch on whatever device the tensors are: only one number a block leaves the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

import torch

_MULTIPLIER: Final = 0x2545F4914F6CDD1D
_GOLDEN: Final = -0x61C8864680B583EB
"""Odd constants of well-known mixing functions, as signed 64-bit numbers."""

_WORDS: Final = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def fingerprints(tensors: Sequence[Any], blocks: Sequence[int], axis: int = 0) -> tuple[int, ...]:
    """A 64-bit digest of each block over all `tensors` (one a layer; `axis` is the block id).

    Equal bytes give equal digests, on any device; a changed byte or two swapped words
    change it but for a chance of 2⁻⁶⁴.
    """
    if not blocks:
        return ()
    digest: Any = None
    for layer, tensor in enumerate(tensors):
        chosen = torch.as_tensor(list(blocks), dtype=torch.int64, device=tensor.device)
        words = _words(tensor.index_select(axis, chosen).movedim(axis, 0))
        mixed = _mix(words + _positions(words.shape[1], layer, str(tensor.device))).sum(dim=1)
        digest = mixed if digest is None else _mix(digest.to(mixed.device)) + mixed
    return tuple(int(value) for value in digest.tolist())


def _words(blocks: Any) -> Any:
    """The bytes of each block as one row of 64-bit integers."""
    rows = blocks.contiguous().reshape(blocks.shape[0], -1)
    width = rows.element_size()
    for size in (8, 4, 2, 1):
        if size <= width or (rows.shape[1] * width) % size == 0:
            return rows.view(_WORDS[size]).to(torch.int64)
    raise AssertionError("one byte divides everything")


@lru_cache(maxsize=64)
def _positions(count: int, layer: int, device: str) -> Any:
    """A distinct offset for each word of a layer, so that order counts."""
    index = torch.arange(1, count + 1, dtype=torch.int64, device=device)
    return _mix((index + layer * count) * _GOLDEN)


def _mix(words: Any) -> Any:
    """An invertible scramble of 64-bit integers (multiplications wrap around)."""
    words = (words ^ (words >> 30)) * _MULTIPLIER
    words = (words ^ (words >> 27)) * _GOLDEN
    return words ^ (words >> 31)
