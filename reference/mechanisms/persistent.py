"""PersistentKV: a decode kernel that stays resident and reads the page table by itself.

It reads exactly what the pages hold, whenever it comes by: so table and pages are leased to it
for as long as it lives (B5).
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
)
from kvclaims.spec.fidelity import Declaration, Fidelity, Loaded, Part, Stored, Tier

_OWN: Final = {"model": MODEL.name, "page size": BLOCK}


class PersistentReader:
    """Implements `spec.fidelity.Mechanism`; without `lease` the pages may be handed out."""

    declaration = Declaration(
        name="persistentkv",
        title="a persistent decode kernel on native page tables",
        source="PersistentKV (arXiv 2606.26666)",
        fidelity=Fidelity.EXACT,
        identity=tuple(_OWN),
        obligation="a lease on table and pages for the reader's whole life",
    )
    model = MODEL

    def __init__(self, lease: bool = True) -> None:
        self._lease = lease

    def store(self, tokens: Sequence[int], query: Any, folder: Path) -> Stored:
        keys, values = self.model.kv(tokens)
        pages = blocks_of(tokens)
        parts = {
            f"page/{i}": Part(Tier.DEVICE, torch.stack((keys[:, :, cut(i)], values[:, :, cut(i)])))
            for i in pages
        }
        table = Part(Tier.DEVICE, torch.arange(len(pages)))
        return Stored(tuple(tokens), {**parts, "table": table}, identity=_OWN)

    def load(self, stored: Stored, before: Sequence[int] = (), blocks: int | None = None) -> Loaded:
        if odd := foreign(stored, _OWN):
            return Loaded(declined=odd)
        if before or "table" not in stored.parts:
            return Loaded(declined="another prefix" if before else "the table is gone")
        wanted = stored.parts["table"].tensor[:blocks].tolist()
        if any(f"page/{i}" not in stored.parts for i in wanted):
            return Loaded(declined="a page is gone")
        keys, values = torch.cat([stored.parts[f"page/{i}"].tensor for i in wanted], dim=3)
        end = min(len(wanted) * BLOCK, len(stored.tokens))
        return Loaded(keys, values, torch.ones(end, dtype=torch.bool), ("device",) * len(wanted))

    def reuse(self, stored: Stored, part: str) -> bool:
        if self._lease:
            return False
        stored.parts[part].tensor.zero_()
        return True


MECHANISM: Final = PersistentReader()
