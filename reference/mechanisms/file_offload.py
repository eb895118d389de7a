"""py-kvcache: blocks offloaded to immutable files that are named by hash.

A lookup says hit, miss or in flight, and promises nothing (O3): a file that was there may be
gone when it is read.  What a claim needs is a restore commitment, which keeps the files.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import torch

from kvclaims.reference.mechanisms.files import name_of, publish, read
from kvclaims.reference.mechanisms.model import (
    BLOCK,
    MODEL,
    blocks_of,
    cut,
    foreign,
)
from kvclaims.spec.fidelity import Declaration, Fidelity, Loaded, Part, Stored, Tier


class Lookup(StrEnum):
    HIT = "hit"
    MISS = "miss"
    IN_FLIGHT = "in flight"


OWN: Final = {"model": MODEL.name, "block size": BLOCK}


class FileOffload:
    """Implements `spec.fidelity.Mechanism`; without `commit` files may go at any time."""

    declaration = Declaration(
        name="py-kvcache",
        title="offload to immutable files named by hash",
        source="py-kvcache (2026)",
        fidelity=Fidelity.RESTORABLE,
        identity=tuple(OWN),
        obligation="a restore commitment: a present block may still be declined without one",
    )
    model = MODEL

    def __init__(self, commit: bool = True) -> None:
        self._commit = commit
        self._in_flight: set[Path] = set()

    def store(self, tokens: Sequence[int], query: Any, folder: Path) -> Stored:
        stored = self.begin(tokens, folder)
        self.finish(stored)
        return stored

    def begin(self, tokens: Sequence[int], folder: Path) -> Stored:
        """Start to write; until `finish` every lookup says in flight."""
        parts = {
            f"block/{i}": Part(Tier.FILE, path=folder / name_of(tokens[: cut(i).stop], MODEL.name))
            for i in blocks_of(tokens)
        }
        self._in_flight |= {part.path for part in parts.values() if part.path}
        return Stored(tuple(tokens), parts, identity=OWN)

    def finish(self, stored: Stored) -> None:
        keys, values = self.model.kv(stored.tokens)
        for i in blocks_of(stored.tokens):
            path = stored.parts[f"block/{i}"].path
            assert path is not None
            publish(path, keys[:, :, cut(i)], values[:, :, cut(i)])
            self._in_flight.discard(path)

    def lookup(self, stored: Stored, block: int) -> Lookup:
        part = stored.parts.get(f"block/{block}")
        if part is None or part.path is None:
            return Lookup.MISS
        if part.path in self._in_flight:
            return Lookup.IN_FLIGHT
        return Lookup.HIT if part.path.exists() else Lookup.MISS

    def load(self, stored: Stored, before: Sequence[int] = (), blocks: int | None = None) -> Loaded:
        if odd := foreign(stored, OWN):
            return Loaded(declined=odd)
        if before:
            return Loaded(declined="the hash names another prefix")
        wanted = blocks_of(stored.tokens)[:blocks]
        found = []
        for i in wanted:
            found_as = self.lookup(stored, i)
            one = read(stored.parts[f"block/{i}"].path) if found_as is Lookup.HIT else None
            if one is None:
                return Loaded(declined=f"block {i} cannot be restored ({found_as})")
            found.append(one)
        keys = torch.cat([k for k, _ in found], dim=2)
        values = torch.cat([v for _, v in found], dim=2)
        present = torch.ones(min(len(wanted) * BLOCK, len(stored.tokens)), dtype=torch.bool)
        return Loaded(keys, values, present, ("file",) * len(wanted))

    def reuse(self, stored: Stored, part: str) -> bool:
        path = stored.parts[part].path
        if self._commit or path is None:
            return False
        path.unlink()
        return True


MECHANISM: Final = FileOffload()
