"""ThinK: key channels that matter least to the query at hand are pruned.

Another query would have kept other channels: what is stored belongs to the query.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch

from kvclaims.reference.mechanisms.model import (
    BLOCK,
    MODEL,
    WIDTH,
    asked_with,
    blocks_of,
    foreign,
)
from kvclaims.spec.fidelity import Declaration, Fidelity, Loaded, Part, Stored, Tier

KEPT: Final = WIDTH // 2


_OWN: Final = {"model": MODEL.name, "channels kept": KEPT}


class PrunedChannels:
    """Implements `spec.fidelity.Mechanism`."""

    declaration = Declaration(
        name="think",
        title="key channels pruned by query",
        source="ThinK (arXiv 2407.21018)",
        fidelity=Fidelity.LOSSY,
        identity=(*_OWN, "query"),
        obligation="served to the query that it was pruned for",
        leans=True,
    )
    model = MODEL

    def store(self, tokens: Sequence[int], query: Any, folder: Path) -> Stored:
        keys, values = self.model.kv(tokens)
        weight = query.abs() * keys.norm(dim=2)
        channels = weight.topk(KEPT, dim=-1).indices.sort(-1).values
        spread = channels[:, :, None].expand(*keys.shape[:3], KEPT)
        return Stored(
            tuple(tokens),
            {
                "channels": Part(Tier.DEVICE, channels),
                "keys": Part(Tier.DEVICE, keys.gather(-1, spread)),
                "values": Part(Tier.DEVICE, values),
                "query": Part(Tier.DEVICE, query.clone()),
            },
            identity={**_OWN, "query": asked_with(query)},
        )

    def load(self, stored: Stored, before: Sequence[int] = (), blocks: int | None = None) -> Loaded:
        if before or len(stored.parts) < 4:
            return Loaded(declined="another prefix" if before else "a part is gone")
        if odd := foreign(stored, {**_OWN, "query": asked_with(stored.parts["query"].tensor)}):
            return Loaded(declined=odd)
        channels, kept, values = (stored.parts[n].tensor for n in ("channels", "keys", "values"))
        spread = channels[:, :, None].expand(kept.shape)
        keys = torch.zeros_like(values).scatter(-1, spread, kept)
        wanted = blocks_of(stored.tokens)[:blocks]
        end = min(len(wanted) * BLOCK, len(stored.tokens))
        present = torch.ones(end, dtype=torch.bool)
        return Loaded(keys[:, :, :end], values[:, :, :end], present, ("device",) * len(wanted))


MECHANISM: Final = PrunedChannels()
