"""Counter-Causal Surprise: drop the tokens whose KV later tokens predict well.

What stays is bit for bit what was computed; from the first dropped token on the prefix is no
longer one.
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
    foreign,
)
from kvclaims.spec.fidelity import Declaration, Fidelity, Loaded, Part, Stored, Tier

DROPPED_SHARE: Final = 0.25
_RIDGE: Final = 1e-3


_OWN: Final = {"model": MODEL.name, "share dropped": DROPPED_SHARE}


class Surprise:
    """Implements `spec.fidelity.Mechanism`."""

    declaration = Declaration(
        name="counter-causal-surprise",
        title="tokens that later ones predict are dropped",
        source="Counter-Causal Surprise (2026)",
        fidelity=Fidelity.LOSSY,
        identity=tuple(_OWN),
        obligation="exact up to the first dropped token only: a leading prefix ends there",
        leans=True,
    )
    model = MODEL

    def store(self, tokens: Sequence[int], query: Any, folder: Path) -> Stored:
        keys, values = self.model.kv(tokens)
        kept = _surprise(keys, values).argsort(stable=True)[int(DROPPED_SHARE * len(tokens)) :]
        kept = kept.sort().values
        return Stored(
            tuple(tokens),
            {
                "places": Part(Tier.DEVICE, kept),
                "keys": Part(Tier.DEVICE, keys[:, :, kept]),
                "values": Part(Tier.DEVICE, values[:, :, kept]),
            },
            identity=_OWN,
        )

    def load(self, stored: Stored, before: Sequence[int] = (), blocks: int | None = None) -> Loaded:
        if odd := foreign(stored, _OWN):
            return Loaded(declined=odd)
        if before or len(stored.parts) < 3:
            return Loaded(declined="another prefix" if before else "a part is gone")
        places, kept_keys, kept_values = (
            stored.parts[name].tensor for name in ("places", "keys", "values")
        )
        shape = (*kept_keys.shape[:2], len(stored.tokens), kept_keys.shape[3])
        keys, values = kept_keys.new_zeros(shape), kept_keys.new_zeros(shape)
        keys[:, :, places], values[:, :, places] = kept_keys, kept_values
        present = torch.zeros(len(stored.tokens), dtype=torch.bool)
        present[places] = True
        wanted = blocks_of(stored.tokens)[:blocks]
        end = len(wanted) * BLOCK
        return Loaded(
            keys[:, :, :end], values[:, :, :end], present[:end], ("device",) * len(wanted)
        )


def _surprise(keys: Any, values: Any) -> Any:
    """How badly the KV of each token follows from that of the next one: the leave-one-out error
    of a ridge regression.  The last token has no later one and is never dropped."""
    flat = torch.cat((keys, values), dim=-1).permute(2, 0, 1, 3).flatten(1)
    later, target = flat[1:], flat[:-1]
    gram = later @ later.T
    ridge = _RIDGE * gram.diagonal().mean() * torch.eye(len(later), dtype=later.dtype)
    hat = gram @ torch.linalg.inv(gram + ridge)
    error = (target - hat @ target).norm(dim=1) / (1 - hat.diagonal())
    return torch.cat((error, torch.full((1,), torch.inf, dtype=error.dtype)))


MECHANISM: Final = Surprise()
