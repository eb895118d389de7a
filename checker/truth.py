"""Whether a model is one that a mechanism can be measured against.

A mechanism brings the model whose KV it keeps, and that model is the truth in every question.  One
that makes the same KV of anything, or answers each query alike, would agree with whatever is
served: so it must tell prompts, places, contexts and queries apart, in every block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any, Final

import torch

from kvclaims.spec.fidelity import Model

NEAR: Final = 1e-9
"""Two results of double-precision arithmetic are the same up to rounding."""

Tokens = Sequence[int]


def unfit(model: Model, tokens: Tokens, other: Tokens, before: Tokens, queries: Any) -> list[str]:
    """What the model does not tell apart, in words.  `other` is another prompt as long as `tokens`,
    `before` what may stand before them; `queries` are [count, layers, heads, width]."""
    return [*_of_kv(model, tokens, other, before), *_of_answers(model, tokens, other, queries)]


def _of_kv(model: Model, tokens: Tokens, other: Tokens, before: Tokens) -> Iterator[str]:
    own, size = model.kv(tokens), model.block
    if not 0 < size < len(tokens):
        yield f"its blocks of {size} tokens do not divide a prompt of {len(tokens)}"
        return
    if not all(bool(tensor.isfinite().all()) for tensor in own):
        yield "its KV is no number"
        return
    if not all(map(torch.equal, own, model.kv(tokens))):
        yield "the same prompt has another KV each time"
    if not all(map(_everywhere, own, model.kv(other), (size, size))):
        yield "another prompt has the same KV"
    behind = model.kv(tokens, before)
    if not all(map(_everywhere, own, behind, (size, size))):
        yield "another context leaves the same KV"
    moved = model.moved(own[0], 0, len(before))
    if not _near(moved[0], behind[0][0]):
        yield "keys of its first layer, moved, are not those that it computes there"
    if not _near(model.moved(moved, len(before), 0), own[0]):
        yield "keys that are moved there and back are others"


def _of_answers(model: Model, tokens: Tokens, other: Tokens, queries: Any) -> Iterator[str]:
    if any(torch.equal(one, another) for one, another in combinations(queries, 2)):
        yield "its queries are alike"
    keys, values = model.kv(tokens)
    attended = [model.attend(query, keys, values) for query in queries]
    whole = model.output(queries[0], tokens)
    if any(torch.equal(one, another) for one, another in combinations(attended, 2)):
        yield "different queries attend to the same"
    for at in range(0, len(tokens), model.block):
        if not _near(
            model.attend(queries[0], keys[:, :, at : at + 1], values[:, :, at : at + 1]),
            values[:, :, at],
        ):
            yield f"attention to token {at} alone is not its value"
        changed = [*tokens]
        changed[at : at + model.block] = other[at : at + model.block]
        if torch.equal(whole, model.output(queries[0], changed)):
            yield f"an answer is the same whatever block {at // model.block} holds"


def _everywhere(one: Any, other: Any, size: int) -> bool:
    """Whether [layers, heads, tokens, width] differ in every block."""
    tokens = (one != other).any(-1).any(0).any(0)
    return all(bool(block.any()) for block in tokens.split(size))


def _near(one: Any, other: Any) -> bool:
    return bool(one.shape == other.shape and ((one - other).abs() < NEAR).all())
