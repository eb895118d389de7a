"""Execution-State Capsules: attention KV, recurrent state and convolution window, all or nothing.

The recurrence cannot be wound back, so no prefix of a capsule can be served.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch

from kvclaims.reference.mechanisms.model import (
    HEADS,
    LAYERS,
    WIDTH,
    TinyModel,
    blocks_of,
    foreign,
)
from kvclaims.spec.fidelity import Declaration, Fidelity, Loaded, Part, Stored, Tier

CONVOLVED: Final = 4
_DECAY: Final = 0.9
_AT: Final = "position of the checkpoint"


class HybridModel(TinyModel):
    """Attention beside a leaky recurrence and a short causal convolution over the embeddings."""

    name = "hybrid"

    def state(self, tokens: Sequence[int], before: Sequence[int] = ()) -> tuple[Any, Any]:
        """Recurrent state and convolution window after the last token, each [..., hidden]."""
        inputs = self.embed((*before, *tokens))
        recurrent = torch.zeros_like(inputs[0])
        for row in inputs:
            recurrent = _DECAY * recurrent + (1 - _DECAY) * row
        return recurrent, inputs[-CONVOLVED:].clone()

    def output(self, query: Any, tokens: Sequence[int], before: Sequence[int] = ()) -> Any:
        return self.mix(query, *self.kv(tokens, before), *self.state(tokens, before))

    def mix(self, query: Any, keys: Any, values: Any, recurrent: Any, window: Any) -> Any:
        beside = (recurrent + window.mean(0)).reshape(HEADS, WIDTH)
        return self.attend(query, keys, values) + beside.expand(LAYERS, HEADS, WIDTH)


class Capsules:
    """Implements `spec.fidelity.Mechanism`."""

    declaration = Declaration(
        name="execution-state-capsules",
        title="checkpoint of KV, recurrent and convolution state",
        source="Execution-State Capsules (arXiv 2606.20537)",
        fidelity=Fidelity.STATE,
        identity=("model", _AT),
        obligation="every component, at the very token of the checkpoint, or nothing",
        leans=True,
    )
    model = HybridModel()

    def store(self, tokens: Sequence[int], query: Any, folder: Path) -> Stored:
        keys, values = self.model.kv(tokens)
        recurrent, window = self.model.state(tokens)
        tensors = {"keys": keys, "values": values, "recurrent": recurrent, "window": window}
        parts = {name: Part(Tier.DEVICE, tensor) for name, tensor in tensors.items()}
        return Stored(tuple(tokens), parts, identity=self._own(tokens))

    def _own(self, tokens: Sequence[int]) -> dict[str, Any]:
        return {"model": self.model.name, _AT: len(tokens)}

    def load(self, stored: Stored, before: Sequence[int] = (), blocks: int | None = None) -> Loaded:
        if odd := foreign(stored, self._own(stored.tokens)):
            return Loaded(declined=odd)
        if before or (blocks is not None and blocks < len(blocks_of(stored.tokens))):
            return Loaded(declined="a capsule is served at its own checkpoint only")
        names = ("keys", "values", "recurrent", "window")
        if any(name not in stored.parts for name in names):
            return Loaded(declined="a component is gone")
        keys, values, recurrent, window = (stored.parts[name].tensor for name in names)
        return Loaded(
            keys,
            values,
            torch.ones(len(stored.tokens), dtype=torch.bool),
            ("device",) * len(blocks_of(stored.tokens)),
            output=lambda query: self.model.mix(query, keys, values, recurrent, window),
        )


MECHANISM: Final = Capsules()
