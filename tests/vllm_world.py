"""Programs for live vLLM: short verbs, and random operations to compare runtimes by.

A content such as "A60+B2" is 60 blocks of stream A followed by 2 blocks of stream B; "A2.3" is
two blocks of A and three tokens.
"""

from __future__ import annotations

import importlib.util
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from kvclaims.spec.content import Segment, content_ids, tokens_of
from kvclaims.spec.fidelity import Fidelity
from kvclaims.spec.interface import (
    BadOperation,
    ClaimAnswer,
    ClaimSpec,
    ClaimView,
    Engine,
    PoolConfig,
    PoolStep,
    Predicate,
    PredicateKind,
    RequestSpec,
    RequestView,
    Runtime,
)
from kvclaims.spec.operations import Operation, drain, parse, perform
from kvclaims.spec.telemetry import Event
from kvclaims.spec.vocabulary import Protection

NEEDS_VLLM = [
    pytest.mark.engine,
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vLLM is not installed (make setup)"
    ),
]


class World:
    """A runtime of some engine, the steps it told, and short verbs."""

    def __init__(
        self, engine: Engine, usable: int, *, block_size: int | None = None, defer_limit: int = 1
    ) -> None:
        self.size = block_size or getattr(engine, "block_size", 16)
        config = PoolConfig(usable, self.size, defer_limit)
        self.runtime: Runtime = engine.open(config, "test")
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

    def blocks(self, content: str) -> tuple[int, ...]:
        """The blocks of a content that is resident in full."""
        found = self.runtime.locate(self.tokens(content))
        assert None not in found
        return tuple(block for block in found if block is not None)

    def cache(self, content: str) -> tuple[int, ...]:
        """Leave a content in the cache, by a request of its own; the blocks it is in."""
        self.ask(f"cache {content}", content)
        self.drain()
        return self.blocks(content)

    def ask(self, request: str, content: str, **more: Any) -> None:
        self.runtime.submit(RequestSpec(request, self.tokens(content), **more))

    def claim(
        self,
        claim: str,
        content: str,
        protection: Protection = Protection.HARD,
        *,
        n: int | None = None,
        start: int = 0,
        fidelity: Fidelity = Fidelity.EXACT,
        **more: Any,
    ) -> ClaimAnswer:
        tokens = self.tokens(content)
        kind = PredicateKind.RANGE if start else PredicateKind.LEADING
        predicate = Predicate(kind, n or len(tokens) // self.size - start, start, fidelity)
        return self.runtime.declare(
            ClaimSpec(claim, tokens, predicate, protection=protection, **more)
        )

    def drain(self) -> None:
        drain(self.runtime)

    def view(self, claim: str) -> ClaimView:
        return self.runtime.observe().claims[claim]

    def asked(self, request: str) -> RequestView:
        return self.runtime.observe().requests[request]

    def events(self, name: str) -> list[Event]:
        return [event for event in self.runtime.events() if event.event == name]

    def counts(self) -> Counter[str]:
        return Counter(event.event for event in self.runtime.events())


class Chance:
    """Random operations on few streams, so that contents are shared, evicted and found again."""

    def __init__(self, seed: int, usable: int, block_size: int) -> None:
        self._random = random.Random(seed)
        self._most = max(2, usable // 2)
        self._longest = 3 * block_size
        self._requests = 0
        self._generations: Counter[str] = Counter()

    def operations(self, count: int) -> Iterator[Operation]:
        made = 0
        while made < count:
            try:
                yield parse(self._operation())
            except BadOperation:
                continue
            made += 1

    def _operation(self) -> dict[str, Any]:
        chance = self._random
        weights = {
            "submit": 20,
            "step": 30,
            "drain": 4,
            "declare": 14,
            "release": 4,
            "demote": 4,
            "renew": 2,
            "advance": 6,
            "abort": 4,
            "reset": 1,
            "lose": 4,
        }
        (op,) = chance.choices(list(weights), list(weights.values()))
        return {"op": op, **getattr(self, f"_{op}", dict)()}

    def _content(self) -> list[list[Any]]:
        chance = self._random
        parts = [
            [chance.choice("ABCD"), chance.randint(1, self._most), chance.choice([0, 0, 1])]
            for _ in range(chance.choice([1, 1, 2]))
        ]
        shared = [["A", chance.randint(1, self._most)]] if chance.random() < 0.5 else []
        return shared + parts

    def _salt(self) -> str:
        return self._random.choice(["", "", "", "s"])

    def _claim(self) -> str:
        return f"c{self._random.randint(1, 8)}"

    def _submit(self) -> dict[str, Any]:
        chance = self._random
        self._requests += 1
        return {
            "request": f"r{self._requests}" if chance.random() < 0.97 else "r1",
            "content": self._content(),
            "max_new_tokens": chance.choice([1, 1, 2, 5, chance.randint(1, self._longest)]),
            "admit_reuse": chance.random() < 0.8,
            "salt": self._salt(),
        }

    def _declare(self) -> dict[str, Any]:
        chance = self._random
        claim = self._claim()
        self._generations[claim] += 1
        soft = [p.value for p in Protection if p is not Protection.HARD]
        fields: dict[str, Any] = {
            "claim": claim,
            "content": self._content(),
            "n": chance.randint(1, self._most),
            "protection": chance.choice(["hard_protected"] * 5 + soft),
            "generation": self._generations[claim],
            "salt": self._salt(),
        }
        if chance.random() < 0.3:
            fields.update(kind="contiguous_range", start=chance.randint(0, 3))
        elif chance.random() < 0.3:
            fields["min_blocks"] = chance.randint(1, 4)
        if chance.random() < 0.3:
            fields["duration"] = chance.randint(1, 6)
        return fields

    def _release(self) -> dict[str, Any]:
        return {"claim": self._claim()}

    _demote = _release

    def _renew(self) -> dict[str, Any]:
        return {"claim": self._claim(), "duration": self._random.randint(1, 5)}

    def _advance(self) -> dict[str, Any]:
        return {"ticks": self._random.randint(1, 3)}

    def _abort(self) -> dict[str, Any]:
        return {"request": f"r{max(1, self._requests - self._random.randint(0, 3))}"}

    def _lose(self) -> dict[str, Any]:
        return {"content": [["A", 6]], "position": self._random.randint(0, 6)}

    def _step(self) -> dict[str, Any]:
        return {"times": self._random.randint(1, 3)}


def attempt(runtime: Runtime, operation: Operation) -> tuple[bool, Any]:
    """Do an operation; whether it was accepted, and its answer."""
    try:
        return True, perform(runtime, operation)
    except BadOperation:
        return False, None
