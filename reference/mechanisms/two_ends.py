"""Cake: the front of a prompt is computed while its back is loaded, until the two meet.

Each block says where it came from: a block that was computed was not restored (O3), however equal
its bits are.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch

from kvclaims.reference.mechanisms.file_offload import OWN, FileOffload
from kvclaims.reference.mechanisms.files import read
from kvclaims.reference.mechanisms.model import (
    BLOCK,
    MODEL,
    blocks_of,
    cut,
    foreign,
)
from kvclaims.spec.fidelity import Declaration, Fidelity, Loaded, Stored


class TwoEnds:
    """Implements `spec.fidelity.Mechanism`: computing and loading go at the same speed."""

    declaration = Declaration(
        name="cake",
        title="front computed while the back is loaded",
        source="Cake (arXiv 2410.03065)",
        fidelity=Fidelity.RESTORABLE,
        identity=tuple(OWN),
        obligation="provenance of each block: computed or loaded",
    )
    model = MODEL

    def __init__(self) -> None:
        self._files = FileOffload()

    def store(self, tokens: Sequence[int], query: Any, folder: Path) -> Stored:
        return self._files.store(tokens, query, folder)

    def load(self, stored: Stored, before: Sequence[int] = (), blocks: int | None = None) -> Loaded:
        if odd := foreign(stored, OWN):
            return Loaded(declined=odd)
        if before:
            return Loaded(declined="the hash names another prefix")
        front, back = 0, len(blocks_of(stored.tokens)[:blocks])
        provenance = [""] * back
        computed: tuple[Any, Any] | None = None
        loaded: list[tuple[Any, Any]] = []
        while front < back:
            computed = self.model.read(stored.tokens[cut(front)], computed)
            provenance[front] = "computed"
            front += 1
            part = stored.parts.get(f"block/{back - 1}")
            one = read(part.path) if part and front < back else None
            if one is not None:
                loaded.insert(0, one)
                back -= 1
                provenance[back] = "file"
        assert computed is not None
        keys = torch.cat((computed[0], *(k for k, _ in loaded)), dim=2)
        values = torch.cat((computed[1], *(v for _, v in loaded)), dim=2)
        end = min(len(provenance) * BLOCK, len(stored.tokens))
        return Loaded(keys, values, torch.ones(end, dtype=torch.bool), tuple(provenance))

    def reuse(self, stored: Stored, part: str) -> bool:
        return self._files.reuse(stored, part)


MECHANISM: Final = TwoEnds()
