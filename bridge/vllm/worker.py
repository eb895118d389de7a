"""A pretended vLLM worker that keeps what it samples to itself, and memory that shows every slot.

`SimulatedDriver` generates one token only, so it cannot tell two samplings apart.  This worker
never samples the same token twice, takes the tokens that it computes from what the scheduler sent
it and from its own samplings, as a real one does, and writes into each slot of a block the name
of all tokens up to there.  What it reads is compared with that: whatever a scheduler does, a
request must find in its blocks the KV of its own tokens (B4, B5).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import count
from typing import Final

from kvclaims.checker.verdicts import Violation

STOP: Final = 2
"""The token at which a request ends before its time, where it is told so."""

_FIRST_SAMPLED: Final = 1_000_000

BLANK: Final = ""
"""What a slot holds that was never written, or filled with zeros."""
SPOILED: Final = "spoiled"
"""What a transfer that failed has left."""


@dataclass(frozen=True)
class Slot:
    """The KV of one token: `content` names it and all tokens before it, in their domain."""

    content: str
    owner: str
    """The request that wrote it."""


_EMPTY: Final = Slot(BLANK, "")


class Chain:
    """Names of the prefixes of one request's tokens; each is computed once."""

    def __init__(self, domain: str) -> None:
        self._names = [domain]
        self._tokens: list[int] = []

    def names(self, tokens: Sequence[int]) -> list[str]:
        """The name of each prefix: `names(tokens)[p]` stands for the first `p` tokens."""
        same = 0
        for ours, theirs in zip(self._tokens, tokens, strict=False):
            if ours != theirs:
                break
            same += 1
        del self._tokens[same:], self._names[same + 1 :]
        for token in tokens[same:]:
            digest = blake2b(f"{self._names[-1]} {token}".encode(), digest_size=9)
            self._names.append(digest.hexdigest())
            self._tokens.append(token)
        return self._names


class SlotMemory:
    """The KV memory of all groups: a slot for each token of each block."""

    def __init__(self, blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._slots = [[_EMPTY] * block_size for _ in range(blocks)]

    def at(self, table: Sequence[int], position: int) -> Slot | None:
        """The slot of a token; None where its table has no block for it."""
        place = position // self.block_size
        if place >= len(table) or not table[place]:
            return None
        return self._slots[table[place]][position % self.block_size]

    def put(self, table: Sequence[int], position: int, slot: Slot) -> None:
        """Write one token; a token for which the table has no block goes nowhere."""
        place = position // self.block_size
        if place < len(table) and table[place]:
            self._slots[table[place]][position % self.block_size] = slot

    def fill(self, blocks: Iterable[int], slot: Slot = _EMPTY) -> None:
        """Every slot of these blocks becomes the same: zeros, if nothing else is said."""
        for block in blocks:
            self._slots[block] = [slot] * self.block_size

    def leftovers(self, table: Sequence[int], end: int, request: str) -> list[int]:
        """The block of the last token, if something stands behind it that is another's."""
        place = (end - 1) // self.block_size
        if place >= len(table) or not table[place]:
            return []
        behind = self._slots[table[place]][(end - 1) % self.block_size + 1 :]
        return [table[place]] if any(s.content and s.owner != request for s in behind) else []


@dataclass(frozen=True)
class Work:
    """What a dispatched step does for a request: positions `start` to `end`, into these tables."""

    request: str
    start: int
    end: int
    tables: tuple[tuple[int, ...], ...]
    known: tuple[int, ...] | None
    """The request's tokens where the scheduler sends them along (it begins or is resumed)."""
    guesses: tuple[int, ...]
    """What is drafted for its last positions."""
    samples: bool


@dataclass
class Held:
    """What the worker keeps of a request between steps."""

    chain: Chain
    tokens: list[int] = field(default_factory=list)
    outputs: int = 0
    """Tokens that were sampled for it since it was last sent."""
    canvas: list[int] = field(default_factory=list)
    rounds: int = 0
    """Steps that refine the canvas before it is given out."""


class Worker:
    """Executes steps in their order; what it finds wrong is raised as `Found`."""

    def __init__(self, memory: SlotMemory, windows: tuple[int, ...], zeroes: bool) -> None:
        self.memory = memory
        self._windows = windows
        self._zeroes = zeroes
        self._held: dict[str, Held] = {}
        self._sampled = count(_FIRST_SAMPLED)
        self._origin: dict[int, tuple[str, str]] = {}
        """Sampled token → its request, and the name of the tokens that it was sampled behind."""
        self.domains: dict[str, str] = {}
        self.stops: dict[str, int] = {}
        """Request → so many outputs after which the worker samples `STOP` for it."""

    def chain_of(self, request: str) -> Chain:
        """A chain for a request's tokens."""
        return Chain(self.domains.get(request, ""))

    def execute(self, work: Work) -> list[int]:
        """Read, write and sample; the tokens that were sampled.  Raises `Found`."""
        held = self._held_of(work)
        tokens = [*held.tokens[: work.end - len(work.guesses)], *work.guesses]
        if len(tokens) < work.end:
            message = f"{work.request} is to compute {work.end} tokens, and has {len(tokens)}"
            raise Found("B9", message)
        names = held.chain.names(tokens)
        for window, table in zip(self._windows, work.tables, strict=True):
            self._read(work, window, table, names)
            for position in range(work.start, work.end):
                self.memory.put(table, position, Slot(names[position + 1], work.request))
            if self._zeroes and (left := self.memory.leftovers(table, work.end, work.request)):
                message = f"{work.request} computes in block {left[0]}, which was not cleared"
                raise Found("B4", f"{message} of what another left there")
        if work.guesses:
            return self._settle(work, held)
        return [self._sample(work, held, names[work.end])] if work.samples else []

    def _held_of(self, work: Work) -> Held:
        if work.known is not None:
            held = Held(self.chain_of(work.request), list(work.known))
            self._held[work.request] = held
        return self._held[work.request]

    def _read(self, work: Work, window: int, table: tuple[int, ...], names: list[str]) -> None:
        first = max(0, work.start - window + 1) if window else 0
        for position in range(first, work.start):
            slot = self.memory.at(table, position)
            found = None if slot is None else slot.content
            if found != names[position + 1]:
                what = "no block" if slot is None else _what(slot)
                message = f"{work.request} reads token {position} of its KV and finds {what}"
                raise Found("B4", message)

    def _sample(self, work: Work, held: Held, behind: str) -> int:
        held.outputs += 1
        token = next(self._sampled)
        if self.stops.get(work.request) == held.outputs:
            token = STOP
        else:
            self._origin[token] = (work.request, behind)
        held.tokens.append(token)
        return token

    def draft(self, request: str, length: int, rounds: int) -> list[int]:
        """A canvas of so many tokens behind those of a request, that `rounds` steps refine before
        another one gives it out (diffusion); the same as long as it is under way."""
        held = self._held[request]
        if not held.canvas:
            held.canvas, held.rounds = [next(self._sampled) for _ in range(length)], rounds
            names = held.chain.names([*held.tokens, *held.canvas])
            for place, token in enumerate(held.canvas, len(held.tokens)):
                self._origin[token] = (request, names[place])
        return list(held.canvas)

    def _settle(self, work: Work, held: Held) -> list[int]:
        """A step on a canvas refines it, and gives nothing out, or gives it out."""
        if held.rounds:
            held.rounds -= 1
            return []
        held.canvas = []
        held.tokens.extend(work.guesses)
        return list(work.guesses)

    def is_continuation(self, request: str, token: int, behind: str) -> bool:
        """Whether the token was sampled for the request behind these tokens."""
        return token == STOP or self._origin.get(token) == (request, behind)

    def forget(self, live: Iterable[str]) -> None:
        """Requests that are not among the living are over."""
        kept = set(live)
        for request in [r for r in self._held if r not in kept]:
            del self._held[request]


class Found(Exception):
    """A rule is broken."""

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(message)
        self.violation = Violation(rule, message)


def _what(slot: Slot) -> str:
    if slot.content in (BLANK, SPOILED):
        return "nothing written" if slot.content == BLANK else "what a failed transfer left"
    return f"KV of other tokens, written for {slot.owner}"
