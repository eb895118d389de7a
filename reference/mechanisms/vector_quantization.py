"""CommVQ: keys as sums of codewords that a rotation passes through.

A pair of key channels is a complex number and a codeword another: turning the sum is turning
each codeword.  So keys are coded once, before rotation, and decoded at any position from a
turned codebook.  Without its codebook a code means nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch

from kvclaims.reference.mechanisms.model import (
    BLOCK,
    MODEL,
    WIDTH,
    blocks_of,
    cut,
    foreign,
    rotate,
    turn,
    unrotate,
)
from kvclaims.spec.fidelity import Declaration, Fidelity, Loaded, Part, Stored, Tier

STAGES: Final = 2
CODEWORDS: Final = 8
_ROUNDS: Final = 6


_OWN: Final = {
    "model": MODEL.name,
    "codebook": (STAGES, CODEWORDS),
    "bits": STAGES * (CODEWORDS - 1).bit_length(),
}


class VectorQuantization:
    """Implements `spec.fidelity.Mechanism`."""

    declaration = Declaration(
        name="commvq",
        title="additive vector quantization with a codebook that commutes with rotation",
        source="CommVQ (arXiv 2506.18879)",
        fidelity=Fidelity.LOSSY,
        identity=tuple(_OWN),
        obligation="the codebook lives as long as any code",
        leans=True,
    )
    model = MODEL

    def store(self, tokens: Sequence[int], query: Any, folder: Path) -> Stored:
        keys, values = self.model.kv(tokens)
        parts: dict[str, Part] = {}
        for name, plain in (("keys", unrotate(keys, 0)), ("values", values)):
            book, codes = learn(pairs(plain))
            parts[f"codebook/{name}"] = Part(Tier.DEVICE, book)
            for i in blocks_of(tokens):
                parts[f"{name}/{i}"] = Part(Tier.DEVICE, codes[:, :, :, cut(i)])
        return Stored(tuple(tokens), parts, identity=_OWN)

    def load(self, stored: Stored, before: Sequence[int] = (), blocks: int | None = None) -> Loaded:
        if odd := foreign(stored, _OWN):
            return Loaded(declined=odd)
        wanted = blocks_of(stored.tokens)[:blocks]
        both = []
        for name in ("keys", "values"):
            needed = [f"codebook/{name}", *(f"{name}/{i}" for i in wanted)]
            if any(part not in stored.parts for part in needed):
                return Loaded(declined="a code or its codebook is gone")
            book, *codes = (stored.parts[part].tensor for part in needed)
            both.append(vectors(decode(book, torch.cat(codes, dim=3))))
        keys, values = both
        return Loaded(
            rotate(keys, len(before)),
            values,
            torch.ones(min(len(wanted) * BLOCK, len(stored.tokens)), dtype=torch.bool),
            ("device",) * len(wanted),
        )

    def turned(self, stored: Stored, by: int) -> Stored:
        """Implements `checker.measure.Turning`: no code is touched."""
        part = stored.parts["codebook/keys"]
        words = vectors(part.tensor.movedim(3, -1))
        book = pairs(turn(words, by)).movedim(-1, 3)
        return replace(stored, parts={**stored.parts, "codebook/keys": replace(part, tensor=book)})


def decode(book: Any, codes: Any) -> Any:
    """Sums of codewords: complex [layers, heads, tokens, pairs]."""
    spread = book[:, :, :, None].expand(*book.shape[:3], codes.shape[3], *book.shape[3:])
    return spread.gather(-1, codes[..., None].long())[..., 0].sum(0)


def learn(targets: Any) -> tuple[Any, Any]:
    """Codebook [stages, layers, heads, pairs, codewords] and codes [stages, layers, heads,
    tokens, pairs], stage by stage on what the stages before left over."""
    books, codes, rest = [], [], targets
    for _ in range(STAGES):
        spots = torch.linspace(0, rest.shape[2] - 1, CODEWORDS).long()
        book = rest[:, :, spots].movedim(2, -1).clone()
        for _ in range(_ROUNDS):
            choice = (rest[..., None] - book[:, :, None]).abs().argmin(-1)
            for word in range(CODEWORDS):
                chosen = choice == word
                sums = torch.where(chosen, rest, 0).sum(2)
                book[..., word] = torch.where(
                    chosen.any(2), sums / chosen.sum(2).clamp_min(1), book[..., word]
                )
        choice = (rest[..., None] - book[:, :, None]).abs().argmin(-1)
        rest = rest - decode(book[None], choice[None])
        books.append(book)
        codes.append(choice.to(torch.uint8))
    return torch.stack(books), torch.stack(codes)


def pairs(real: Any) -> Any:
    """Channels i and i + half as one complex number."""
    half = WIDTH // 2
    return torch.complex(real[..., :half].contiguous(), real[..., half:].contiguous())


def vectors(complex_pairs: Any) -> Any:
    """The inverse of `pairs`."""
    return torch.cat((complex_pairs.real, complex_pairs.imag), dim=-1)


MECHANISM: Final = VectorQuantization()
