"""InferScale: the KV of a fact, computed once behind a window of context, put in wherever wanted.

Keys are kept as if each token stood at 0 and turned to their place when they are composed.  What
deeper layers saw of the context is the window's, so window and catalogue belong to the identity.
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
    rotate,
    unrotate,
)
from kvclaims.spec.fidelity import Declaration, Fidelity, Loaded, Part, Stored, Tier

WINDOW: Final = tuple((7 * i + 3) % 61 for i in range(BLOCK))
"""The tokens that every fact of the catalogue is computed behind."""


_OWN: Final = {"model": MODEL.name, "catalogue": "tiny", "context window": WINDOW}


class Facts:
    """Implements `spec.fidelity.Mechanism`."""

    declaration = Declaration(
        name="inferscale",
        title="fact injection: re-rotated KV computed behind a context window",
        source="InferScale (arXiv 2607.27090)",
        fidelity=Fidelity.POSITION_INDEPENDENT,
        identity=tuple(_OWN),
        obligation="exact behind its own window; elsewhere the context is approximate",
        leans=True,
    )
    model = MODEL

    def store(self, tokens: Sequence[int], query: Any, folder: Path) -> Stored:
        keys, values = self.model.kv(tokens, WINDOW)
        return Stored(
            tuple(tokens),
            {
                "keys": Part(Tier.DEVICE, unrotate(keys, len(WINDOW))),
                "values": Part(Tier.DEVICE, values),
            },
            identity=_OWN,
            context=WINDOW,
        )

    def load(self, stored: Stored, before: Sequence[int] = (), blocks: int | None = None) -> Loaded:
        if odd := foreign(stored, _OWN):
            return Loaded(declined=odd)
        if len(stored.parts) < 2:
            return Loaded(declined="a part is gone")
        wanted = blocks_of(stored.tokens)[:blocks]
        end = min(len(wanted) * BLOCK, len(stored.tokens))
        keys = rotate(stored.parts["keys"].tensor[:, :, :end], len(before))
        values = stored.parts["values"].tensor[:, :, :end]
        return Loaded(keys, values, torch.ones(end, dtype=torch.bool), ("device",) * len(wanted))


MECHANISM: Final = Facts()
