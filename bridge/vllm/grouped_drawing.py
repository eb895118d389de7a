"""Random programs for an arrangement of KV groups: few texts, told again, cut short and gone on."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, Final

from kvclaims.bridge.vllm.layouts import Layout
from kvclaims.spec.operations import Operation, parse

OPERATIONS: Final = 40
TEXTS: Final = 3
REQUESTS: Final = 5
USABLE: Final = (12, 20, 32, 56)
"""Blocks of a pool: from few, where content is lost soon, to more than a run takes."""

_SHARES: Final = (
    ("submit", 36),
    ("step", 35),
    ("dispatch", 7),
    ("complete", 6),
    ("abort", 6),
    ("load", 5),
    ("drain", 4),
    ("reset", 1),
)


def drawn(layout: Layout, seed: str) -> tuple[int, tuple[Operation, ...]]:
    """The blocks of a pool and a program for it; the same seed, the same of both."""
    rng = random.Random(seed)
    usable = rng.choice(USABLE)
    return usable, tuple(map(parse, _operations(layout, rng, longest(layout, usable))))


def longest(layout: Layout, usable: int) -> int:
    """Tokens of a request, at most: two of them fit, so none waits for ever."""
    each = sum(layout.step / layout.block_of(g) for g in range(len(layout.groups)))
    return max(layout.step, int((usable // 2 - len(layout.groups)) / each) * layout.step)


def _operations(layout: Layout, rng: random.Random, most: int) -> Iterator[dict[str, Any]]:
    texts = [_text(layout, rng, most) for _ in range(TEXTS)]
    names = [name for name, share in _SHARES for _ in range(share)]
    for _ in range(OPERATIONS):
        name = rng.choice(names)
        request = f"r{rng.randrange(REQUESTS)}"
        if name == "submit":
            yield _submit(layout, rng, request, rng.choice(texts), most)
        elif name == "abort":
            yield {"op": name, "request": request}
        elif name == "load":
            yield {"op": name, "request": request, "blocks": 1}
        else:
            yield {"op": name}
    yield {"op": "drain"}


def _text(layout: Layout, rng: random.Random, most: int) -> list[list[Any]]:
    """One stream, or one behind another."""
    first = rng.randint(1, max(1, min(most, 40) // layout.unit - 1))
    text = [[rng.choice("AB"), first, rng.randrange(layout.unit)]]
    if rng.random() < 0.4:
        text.append([rng.choice("AB"), rng.randint(1, max(1, first // 2))])
    return text


def _submit(
    layout: Layout, rng: random.Random, request: str, text: list[list[Any]], most: int
) -> dict[str, Any]:
    (label, blocks, tokens), *rest = text
    if rng.random() < 0.4:  # another end, or none
        blocks, rest = rng.randint(0, blocks), rest if rng.random() < 0.5 else []
    new = rng.choice((1, 1, 2, 5, 9))
    room = (most - new) // layout.unit - 1
    blocks = max(0, min(blocks, room - sum(part[1] for part in rest)))
    tokens = tokens if blocks else max(1, tokens)
    content = [[label, blocks, tokens] if tokens else [label, blocks], *rest]
    made = {"op": "submit", "request": request, "content": content, "max_new_tokens": new}
    if layout.connector and rng.random() < 0.6:
        made["external"] = rng.randint(1, most)
    if rng.random() < 0.3:
        made["priority"] = 1
    if rng.random() < 0.1:
        made["salt"] = "s"
    return made
