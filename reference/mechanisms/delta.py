"""DeltaKV: most tokens are kept as a small residual against a similar reference token.

A residual is worth nothing without its reference, wherever in the prompt that stands: evicting a
reference breaks all that lean on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch

from kvclaims.reference.mechanisms.model import (
    BLOCK,
    HEADS,
    LAYERS,
    MODEL,
    WIDTH,
    blocks_of,
    cut,
    foreign,
)
from kvclaims.spec.fidelity import Declaration, Fidelity, Loaded, Part, Stored, Tier

STRIDE: Final = 8
"""Every eighth token is a reference."""

_LEVELS: Final = 7


_OWN: Final = {"model": MODEL.name, "stride": STRIDE, "levels": _LEVELS}


class Residuals:
    """Implements `spec.fidelity.Mechanism`."""

    declaration = Declaration(
        name="deltakv",
        title="residuals against retrieved references",
        source="DeltaKV (arXiv 2602.08005)",
        fidelity=Fidelity.LOSSY,
        identity=tuple(_OWN),
        obligation="the closure of dependencies: a reference stays while a residual leans on it",
        leans=True,
    )
    model = MODEL

    def store(self, tokens: Sequence[int], query: Any, folder: Path) -> Stored:
        rows = _rows(*self.model.kv(tokens))
        references = rows[::STRIDE]
        parts: dict[str, Part] = {}
        for i in blocks_of(tokens):
            block = rows[cut(i)]
            known = references[: (i + 1) * BLOCK // STRIDE]
            nearest = torch.cdist(block, known).argmin(1)
            residual = block - known[nearest]
            scale = residual.abs().amax(1, keepdim=True).clamp_min(1e-12) / _LEVELS
            parts[f"reference/{i}"] = Part(Tier.DEVICE, block[::STRIDE].clone())
            parts[f"lean/{i}"] = Part(Tier.DEVICE, nearest)
            parts[f"residual/{i}"] = Part(Tier.DEVICE, (residual / scale).round().to(torch.int8))
            parts[f"scale/{i}"] = Part(Tier.DEVICE, scale)
        return Stored(tuple(tokens), parts, identity=_OWN)

    def load(self, stored: Stored, before: Sequence[int] = (), blocks: int | None = None) -> Loaded:
        if odd := foreign(stored, _OWN):
            return Loaded(declined=odd)
        if before:
            return Loaded(declined="another prefix")
        wanted = blocks_of(stored.tokens)[:blocks]
        rows = []
        for i in wanted:
            own = [f"{kind}/{i}" for kind in ("lean", "residual", "scale")]
            if any(name not in stored.parts for name in own):
                return Loaded(declined=f"block {i} is gone")
            lean, residual, scale = (stored.parts[name].tensor for name in own)
            needed = {int(n) * STRIDE // BLOCK for n in lean}
            if any(f"reference/{j}" not in stored.parts for j in needed):
                return Loaded(declined=f"block {i} leans on a reference that is gone")
            per_block = BLOCK // STRIDE
            chosen = [
                stored.parts[f"reference/{int(n) // per_block}"].tensor[int(n) % per_block]
                for n in lean
            ]
            rows.append(torch.stack(chosen) + residual * scale)
        keys, values = _unrows(torch.cat(rows))
        return Loaded(
            keys, values, torch.ones(keys.shape[2], dtype=torch.bool), ("device",) * len(wanted)
        )


def _rows(keys: Any, values: Any) -> Any:
    """One row a token: all layers, heads, keys and values."""
    return torch.cat((keys, values), dim=-1).permute(2, 0, 1, 3).flatten(1)


def _unrows(rows: Any) -> tuple[Any, Any]:
    both = rows.reshape(-1, LAYERS, HEADS, 2 * WIDTH).permute(1, 2, 0, 3)
    return both[..., :WIDTH], both[..., WIDTH:]


MECHANISM: Final = Residuals()
