"""KIVI: two bits an element, keys grouped per channel, values per token, the newest kept whole.

Rounding to the nearest of four levels errs by half a step at most, in every group: a bound that is
fixed when the group is stored and can be checked then.
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

GROUP: Final = 32
RECENT: Final = 32
LEVELS: Final = 4


def bits(levels: int) -> int:
    """What a code of one of so many levels takes."""
    return (levels - 1).bit_length()


_OWN: Final = {
    "model": MODEL.name,
    "bits": bits(LEVELS),
    "group": GROUP,
    "recent window": RECENT,
}


class TwoBits:
    """Implements `spec.fidelity.Mechanism`."""

    declaration = Declaration(
        name="kivi",
        title="asymmetric two-bit quantization",
        source="KIVI (arXiv 2402.02750)",
        fidelity=Fidelity.BOUNDED_LOSS,
        identity=tuple(_OWN),
        obligation="in each group the error stays within half a step of its scale",
        leans=True,
    )
    model = MODEL

    def store(self, tokens: Sequence[int], query: Any, folder: Path) -> Stored:
        keys, values = self.model.kv(tokens)
        old = max(0, len(tokens) - RECENT) // GROUP * GROUP
        parts: dict[str, Part] = {}
        bounds = torch.zeros_like(keys), torch.zeros_like(values)
        for start in range(0, old, GROUP):
            group = slice(start, start + GROUP)
            for name, tensor, axis, bound in (
                ("keys", keys, 2, bounds[0]),
                ("values", values, 3, bounds[1]),
            ):
                codes, scale, low = _quantize(tensor[:, :, group], axis)
                bound[:, :, group] = scale / 2
                at = start // GROUP
                parts[f"{name}/{at}"] = Part(Tier.DEVICE, codes)
                parts[f"{name}-scale/{at}"] = Part(Tier.DEVICE, torch.stack((scale, low)))
        parts["recent"] = Part(Tier.DEVICE, torch.stack((keys[:, :, old:], values[:, :, old:])))
        return Stored(tuple(tokens), parts, identity=_OWN, bound=bounds)

    def load(self, stored: Stored, before: Sequence[int] = (), blocks: int | None = None) -> Loaded:
        if odd := foreign(stored, _OWN):
            return Loaded(declined=odd)
        if before:
            return Loaded(declined="another prefix")
        wanted = blocks_of(stored.tokens)[:blocks]
        end = min(len(wanted) * BLOCK, len(stored.tokens))
        old = max(0, len(stored.tokens) - RECENT) // GROUP * GROUP
        pieces: dict[str, list[Any]] = {"keys": [], "values": []}
        for at in range(0, min(old, end), GROUP):
            for name, rows in pieces.items():
                own = f"{name}/{at // GROUP}", f"{name}-scale/{at // GROUP}"
                if any(part not in stored.parts for part in own):
                    return Loaded(declined="a group is gone")
                codes, (scale, low) = (stored.parts[part].tensor for part in own)
                rows.append(codes * scale + low)
        if end > old:
            if "recent" not in stored.parts:
                return Loaded(declined="the recent window is gone")
            for rows, recent in zip(pieces.values(), stored.parts["recent"].tensor, strict=True):
                rows.append(recent)
        keys, values = (torch.cat(rows, dim=2)[:, :, :end] for rows in pieces.values())
        return Loaded(keys, values, torch.ones(end, dtype=torch.bool), ("device",) * len(wanted))


def _quantize(tensor: Any, axis: int) -> tuple[Any, Any, Any]:
    low, high = tensor.amin(axis, keepdim=True), tensor.amax(axis, keepdim=True)
    scale = ((high - low) / (LEVELS - 1)).clamp_min(1e-12)
    codes = ((tensor - low) / scale).round().clamp(0, LEVELS - 1).to(torch.uint8)
    return codes, scale, low


MECHANISM: Final = TwoBits()
