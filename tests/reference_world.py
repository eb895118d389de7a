"""A terse way to write programs for the reference: `World(80).cache("A60")`, `claim("c", "A60")`.

A content such as "A60+B2" is 60 blocks of stream A followed by 2 blocks of stream B; "A2.3" is
two blocks of A and three tokens.
"""

from __future__ import annotations

from typing import Any

from kvclaims.reference.engine import ENGINE
from kvclaims.spec.content import Segment, content_ids, tokens_of
from kvclaims.spec.fidelity import Fidelity
from kvclaims.spec.interface import (
    ClaimAnswer,
    ClaimSpec,
    ClaimView,
    PoolConfig,
    PoolStep,
    Predicate,
    PredicateKind,
    RequestSpec,
    RequestView,
)
from kvclaims.spec.operations import drain
from kvclaims.spec.telemetry import Event
from kvclaims.spec.vocabulary import Protection


class World:
    """A reference runtime with blocks of 4 tokens, the steps it told, and short verbs."""

    def __init__(
        self, usable: int, *, block_size: int = 4, defer_limit: int = 1, **more: Any
    ) -> None:
        self.size = block_size
        self.runtime = ENGINE.open(PoolConfig(usable, block_size, defer_limit, **more), "test")
        self.steps: list[PoolStep] = []
        self.runtime.listen(self.steps.append)

    def tokens(self, content: str) -> tuple[int, ...]:
        segments = []
        for part in content.split("+"):
            blocks, _, rest = part[1:].partition(".")
            segments.append(Segment(part[0], int(blocks), int(rest or 0)))
        return tokens_of(tuple(segments), self.size)

    def keys(self, content: str) -> tuple[str, ...]:
        return content_ids(self.tokens(content), self.size)

    def cache(self, *contents: str) -> World:
        """Leave contents in the cache by requests of their own."""
        for content in contents:
            self.ask(f"cache {len(self.runtime.observe().requests)}", content)
            self.drain()
        return self

    def ask(self, request: str, content: str, **more: Any) -> None:
        self.runtime.submit(RequestSpec(request, self.tokens(content), **more))

    def claim(
        self,
        claim: str,
        content: str,
        n: int | None = None,
        *,
        start: int | None = None,
        fidelity: Fidelity = Fidelity.EXACT,
        protection: Protection = Protection.HARD,
        **more: Any,
    ) -> ClaimAnswer:
        tokens = self.tokens(content)
        blocks = n or len(tokens) // self.size
        kind = PredicateKind.LEADING if start is None else PredicateKind.RANGE
        predicate = Predicate(kind, blocks, start or 0, fidelity)
        return self.runtime.declare(
            ClaimSpec(claim, tokens, predicate, protection=protection, **more)
        )

    def lose(self, content: str, position: int) -> bool:
        return self.runtime.lose(self.tokens(content), position)

    def step(self) -> None:
        self.runtime.step()

    def drain(self) -> int:
        return drain(self.runtime)

    def request(self, request: str) -> RequestView:
        return self.runtime.observe().requests[request]

    def about(self, claim: str) -> ClaimView:
        return self.runtime.observe().claims[claim]

    def resident(self, content: str) -> list[int]:
        """The positions of a content that are found in the cache."""
        found = self.runtime.locate(self.tokens(content))
        return [position for position, block in enumerate(found) if block is not None]

    def told(self, kind: str) -> list[Event]:
        return [event for event in self.runtime.events() if event.event == kind]

    @property
    def victims(self) -> int:
        return len(self.told("allocation_victim_selected"))

    @property
    def free(self) -> int:
        return self.runtime.observe().free

    @property
    def headroom(self) -> int:
        return self.runtime.observe().headroom
