"""A two-layer transformer, small enough to read, whose KV is what mechanisms keep.

Double precision, fixed weights, rotary positions.  Prompts are read block by block, so that the
same tokens in the same place after the same prefix give the same bits however they are cut.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from kvclaims.spec.fidelity import Stored

LAYERS: Final = 2
HEADS: Final = 2
WIDTH: Final = 32
BLOCK: Final = 16
VOCABULARY: Final = 64
_HIDDEN: Final = HEADS * WIDTH


class TinyModel:
    """Implements `spec.fidelity.Model`."""

    block = BLOCK
    name = "tiny"

    def __init__(self, seed: int = 0) -> None:
        draw = torch.Generator().manual_seed(seed)

        def weights(*shape: int) -> Any:
            return torch.randn(*shape, generator=draw, dtype=torch.float64) / shape[-2] ** 0.5

        self._embedding = weights(VOCABULARY, _HIDDEN) * VOCABULARY**0.5
        self._query, self._key, self._value, self._out = (
            weights(LAYERS, _HIDDEN, _HIDDEN) for _ in range(4)
        )

    def kv(self, tokens: Sequence[int], before: Sequence[int] = ()) -> tuple[Any, Any]:
        keys, values = self.read((*before, *tokens))
        return keys[:, :, len(before) :], values[:, :, len(before) :]

    def read(self, tokens: Sequence[int], past: tuple[Any, Any] | None = None) -> tuple[Any, Any]:
        """Keys and values of past and tokens; the past ends where the tokens begin, on the edge
        of a block."""
        keys, values = past if past is not None else (_nothing(), _nothing())
        if keys.shape[2] % BLOCK:
            raise ValueError("a past ends on the edge of a block")
        for at in range(0, len(tokens), BLOCK):
            keys, values = self._read_block(tuple(tokens[at : at + BLOCK]), keys, values)
        return keys, values

    def _read_block(self, tokens: tuple[int, ...], keys: Any, values: Any) -> tuple[Any, Any]:
        start = keys.shape[2]
        hidden = self.embed(tokens)
        new_keys, new_values = [], []
        places = torch.arange(start + len(tokens))
        visible = places[None] <= places[start:, None]
        for layer in range(LAYERS):
            query = rotate(_heads(hidden @ self._query[layer]), start)
            key = rotate(_heads(hidden @ self._key[layer]), start)
            value = _heads(hidden @ self._value[layer])
            new_keys.append(key)
            new_values.append(value)
            whole_key = torch.cat((keys[layer], key), dim=1)
            whole_value = torch.cat((values[layer], value), dim=1)
            scores = (query @ whole_key.transpose(1, 2)) / WIDTH**0.5
            weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
            mixed = (weights @ whole_value).transpose(0, 1).reshape(len(tokens), _HIDDEN)
            hidden = hidden + mixed @ self._out[layer]
        return (
            torch.cat((keys, torch.stack(new_keys)), dim=2),
            torch.cat((values, torch.stack(new_values)), dim=2),
        )

    def moved(self, keys: Any, start: int, to: int) -> Any:
        return rotate(unrotate(keys, start), to)

    def queries(self, count: int, seed: int) -> Any:
        draw = torch.Generator().manual_seed(seed)
        return torch.randn(count, LAYERS, HEADS, WIDTH, generator=draw, dtype=torch.float64)

    def attend(self, query: Any, keys: Any, values: Any) -> Any:
        scores = (keys @ query[..., None])[..., 0] / WIDTH**0.5
        return (scores.softmax(-1)[..., None] * values).sum(-2)

    def output(self, query: Any, tokens: Sequence[int], before: Sequence[int] = ()) -> Any:
        return self.attend(query, *self.kv(tokens, before))

    def embed(self, tokens: Sequence[int]) -> Any:
        """[tokens, hidden] before the first layer."""
        return self._embedding[torch.tensor(tuple(tokens))]


MODEL: Final = TinyModel()


def rotate(vectors: Any, start: int) -> Any:
    """Rotary embedding of [..., tokens, width] that stand at `start`, `start` + 1, …"""
    return _turn(vectors, start + torch.arange(vectors.shape[-2], dtype=torch.float64))


def unrotate(vectors: Any, start: int) -> Any:
    """The inverse of `rotate` at the same start: keys as if every token stood at 0."""
    return _turn(vectors, -(start + torch.arange(vectors.shape[-2], dtype=torch.float64)))


def turn(vectors: Any, by: int) -> Any:
    """[..., width] all turned by as many places."""
    return _turn(vectors, torch.full((1,), by, dtype=torch.float64))


def _turn(vectors: Any, places: Any) -> Any:
    half = WIDTH // 2
    speeds = 10_000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = places[:, None] * speeds
    first, second = vectors[..., :half], vectors[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


def foreign(stored: Stored, own: Mapping[str, Any]) -> str:
    """What of an object's identity is not its reader's `own`, in words; "" where all is."""
    odd = [name for name, value in own.items() if stored.identity.get(name) != value]
    return f"it is of another {odd[0]}" if odd else ""


def asked_with(query: Any) -> str:
    """What a query [layers, heads, width] is called in the identity of what was stored for it."""
    return hashlib.sha256(query.numpy().tobytes()).hexdigest()[:16]


def blocks_of(tokens: Sequence[int]) -> range:
    """Block numbers of a prompt, the last one perhaps not full."""
    return range(-(-len(tokens) // BLOCK))


def cut(block: int) -> slice:
    """The tokens of one block."""
    return slice(block * BLOCK, (block + 1) * BLOCK)


def _heads(vectors: Any) -> Any:
    return vectors.reshape(vectors.shape[0], HEADS, WIDTH).transpose(0, 1)


def _nothing() -> Any:
    return torch.empty(LAYERS, HEADS, 0, WIDTH, dtype=torch.float64)
