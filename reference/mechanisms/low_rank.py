"""LESS: a sparse cache of the tokens that weigh most, and one low-rank state for all others.

The state is a sum over tokens: it answers queries, but no token can be taken out of it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch

from kvclaims.reference.mechanisms.model import (
    MODEL,
    WIDTH,
    asked_with,
    blocks_of,
    foreign,
)
from kvclaims.spec.fidelity import Declaration, Fidelity, Loaded, Part, Stored, Tier

KEPT: Final = 32
_PARTS: Final = ("keys", "values", "sum", "weight", "query")


_OWN: Final = {"model": MODEL.name, "tokens kept": KEPT, "feature map": "1 + score"}


class SparseAndLowRank:
    """Implements `spec.fidelity.Mechanism`."""

    declaration = Declaration(
        name="less",
        title="sparse cache and a constant low-rank state",
        source="LESS (arXiv 2402.09398)",
        fidelity=Fidelity.STATE,
        identity=(*_OWN, "query"),
        obligation="cache and state together, for the query that chose them: no block alone",
    )
    model = MODEL

    def store(self, tokens: Sequence[int], query: Any, folder: Path) -> Stored:
        keys, values = self.model.kv(tokens)
        order = (keys @ query[..., None])[..., 0].argsort(dim=-1, descending=True, stable=True)
        kept, rest = order[..., :KEPT], order[..., KEPT:]
        features = _features(_chosen(keys, rest))
        tensors = (
            _chosen(keys, kept),
            _chosen(values, kept),
            features.transpose(2, 3) @ _chosen(values, rest),
            features.sum(2),
            query.clone(),
        )
        parts = {n: Part(Tier.DEVICE, t) for n, t in zip(_PARTS, tensors, strict=True)}
        return Stored(tuple(tokens), parts, identity={**_OWN, "query": asked_with(query)})

    def load(self, stored: Stored, before: Sequence[int] = (), blocks: int | None = None) -> Loaded:
        if before or (blocks is not None and blocks < len(blocks_of(stored.tokens))):
            return Loaded(declined="the state stands for the whole prompt only")
        if any(name not in stored.parts for name in _PARTS):
            return Loaded(declined="cache or state is gone")
        keys, values, summed, weight, asked = (stored.parts[name].tensor for name in _PARTS)
        if odd := foreign(stored, {**_OWN, "query": asked_with(asked)}):
            return Loaded(declined=odd)

        def output(query: Any) -> Any:
            sharp = ((keys @ query[..., None])[..., 0] / WIDTH**0.5).exp()
            soft = _features(query)
            above = (sharp[..., None] * values).sum(2) + (soft[..., None] * summed).sum(2)
            return above / (sharp.sum(-1) + (soft * weight).sum(-1))[..., None]

        return Loaded(provenance=("device",) * len(blocks_of(stored.tokens)), output=output)


def _chosen(vectors: Any, places: Any) -> Any:
    """The vectors at [layers, heads, places] of [layers, heads, tokens, width]."""
    return vectors.gather(2, places[..., None].expand(*places.shape, WIDTH))


def _features(vectors: Any) -> Any:
    """Features whose product is 1 + score, the exponential of a score to first order (the paper
    learns better ones)."""
    ones = torch.ones_like(vectors[..., :1])
    return torch.cat((ones, vectors / WIDTH**0.25), dim=-1)


MECHANISM: Final = SparseAndLowRank()
