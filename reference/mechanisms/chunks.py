"""MEPIC: the KV of a chunk shared at any position, its first block computed anew in place.

The first block is private to its reader and exact; the others are shared, turned to their place,
and know nothing of what stands before the chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch

from kvclaims.reference.mechanisms.model import (
    BLOCK,
    MODEL,
    blocks_of,
    cut,
    foreign,
    rotate,
    unrotate,
)
from kvclaims.spec.fidelity import Declaration, Fidelity, Loaded, Part, Stored, Tier

_OWN: Final = {"model": MODEL.name, "chunk": BLOCK}


class Chunks:
    """Implements `spec.fidelity.Mechanism`."""

    declaration = Declaration(
        name="mepic",
        title="chunk KV shared across positions, first block recomputed",
        source="MEPIC (arXiv 2512.16822)",
        fidelity=Fidelity.POSITION_INDEPENDENT,
        identity=tuple(_OWN),
        obligation="footprint: the shared blocks and one private block a reader",
    )
    model = MODEL

    def store(self, tokens: Sequence[int], query: Any, folder: Path) -> Stored:
        keys, values = self.model.kv(tokens)
        keys = unrotate(keys, 0)
        parts = {
            f"shared/{i}": Part(
                Tier.DEVICE, torch.stack((keys[:, :, cut(i)], values[:, :, cut(i)]))
            )
            for i in blocks_of(tokens)[1:]
        }
        return Stored(tuple(tokens), parts, identity=_OWN)

    def load(self, stored: Stored, before: Sequence[int] = (), blocks: int | None = None) -> Loaded:
        if odd := foreign(stored, _OWN):
            return Loaded(declined=odd)
        wanted = blocks_of(stored.tokens)[:blocks]
        if any(f"shared/{i}" not in stored.parts for i in wanted[1:]):
            return Loaded(declined="a shared block is gone")
        first_keys, first_values = self.model.kv(stored.tokens[:BLOCK], before)
        shared = [stored.parts[f"shared/{i}"].tensor for i in wanted[1:]]
        keys = [rotate(k, len(before) + i * BLOCK) for i, (k, _) in enumerate(shared, 1)]
        return Loaded(
            torch.cat((first_keys, *keys), dim=2),
            torch.cat((first_values, *(v for _, v in shared)), dim=2),
            torch.ones(min(len(wanted) * BLOCK, len(stored.tokens)), dtype=torch.bool),
            ("computed", *("device" for _ in shared)),
        )


MECHANISM: Final = Chunks()
