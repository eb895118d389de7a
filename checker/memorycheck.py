"""The simulated memory of the reference held against what was written, slot by slot.

Honest runs never go on writing a block that somebody else began; a runtime with a wrong block table
does, and the memory is there to show it.  So writers draw their blocks here without asking whose
they are.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvclaims.spec.content import content_ids, fingerprint, partial_content

MODULE: Final = "kvclaims.reference.memory"
SIZE: Final = 3
"""Tokens in a block."""

BLOCKS: Final = 2
LONGEST: Final = BLOCKS * SIZE
ALPHABET: Final = (1, 2)
"""Few tokens, so that those of two writers often begin alike."""

SEED: Final = 1
STEPS: Final = 12


GARBAGE: Final = "garbage"
"""What a block reads as that holds no content, and what a guess continues."""


@dataclass
class Writer:
    """A request: its tokens, its blocks, and how many tokens it has written."""

    domain: str
    tokens: tuple[int, ...]
    blocks: Sequence[int]
    known: int
    """Of the contents of its full blocks so many have a name; the rest are guesses."""
    at: int = 0

    @property
    def keys(self) -> tuple[str, ...]:
        return content_ids(self.tokens, SIZE, self.domain)[: self.known]

    def parent(self, position: int) -> str:
        """What the block at a position continues."""
        if not position:
            return self.domain
        return self.keys[position - 1] if position <= self.known else GARBAGE


@dataclass(frozen=True)
class Slots:
    """What a block holds: its tokens after a parent, and what they are called."""

    parent: str
    tokens: tuple[int, ...]
    name: str


NOTHING: Final = Slots("", (), GARBAGE)
BLANK: Final = Slots("", (), "")


def check_memory(rounds: int) -> str | None:
    """Where a block reads as something else than was written, None if nowhere."""
    rng = random.Random(SEED)
    return next(filter(None, (_check_round(rng) for _ in range(rounds))), None)


def _check_round(rng: random.Random) -> str | None:
    module = importlib.import_module(MODULE)
    memory, held = module.Memory(SIZE), dict.fromkeys(range(BLOCKS + 1), BLANK)
    writers = [_writer(rng) for _ in range(3)]
    for _ in range(STEPS):
        writer = rng.choice(writers)
        end = min(LONGEST, writer.at + rng.randint(1, SIZE + 1))
        what = writer.tokens, writer.keys, writer.domain, writer.blocks
        memory.write(module.Chunk(writer.at, end, *what))
        for at in range(writer.at, end):
            _write(held, writer, at)
        writer.at = end
        for block, slots in held.items():
            if memory.fingerprint(block) != fingerprint(slots.name):
                return f"block {block} reads as {memory.get(block)!r}, not {slots.name!r}"
    return None


def _writer(rng: random.Random) -> Writer:
    tokens = tuple(rng.choice(ALPHABET) for _ in range(LONGEST))
    return Writer(
        rng.choice("de"), tokens, rng.sample(range(BLOCKS + 1), BLOCKS), rng.randint(0, BLOCKS)
    )


def _write(held: dict[int, Slots], writer: Writer, at: int) -> None:
    """One token: the first of a block makes it the writer's, others need those before them."""
    position, slot = divmod(at, SIZE)
    block, parent, tokens = writer.blocks[position], writer.parent(position), writer.tokens
    there = held[block]
    if slot and (there.parent, there.tokens[:slot]) != (parent, tokens[at - slot : at]):
        held[block] = NOTHING
        return
    begun = tokens[at - slot : at + 1]
    is_named = len(begun) == SIZE and position < writer.known
    name = writer.keys[position] if is_named else partial_content(parent, begun)
    held[block] = Slots(parent, begun, name)
