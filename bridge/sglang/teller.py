"""Steps of the machine in `spec.pool`, told operation by operation with the pool's own facts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kvclaims.bridge.sglang.pool import RadixPool
from kvclaims.spec.interface import PoolStep


class Teller:
    """Passes steps on when the operation that they belong to is over.

    The last one carries what the pool then holds of every slot that was touched.
    """

    def __init__(self, pool: RadixPool) -> None:
        self.listeners: list[Callable[[PoolStep], None]] = []
        self._pool = pool
        self._steps: list[PoolStep] = []
        self._depth = 0

    def tell(self, action: str, **args: Any) -> None:
        if self.listeners:
            self._steps.append(PoolStep(action, args))
            if self._depth == 0:
                self._flush()

    @contextmanager
    def operation(self) -> Iterator[None]:
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._flush()

    def _flush(self) -> None:
        steps, self._steps = self._steps, []
        if not steps:
            return
        touched = sorted({step.args["b"] for step in steps if "b" in step.args})
        last = steps[-1]
        steps[-1] = PoolStep(
            last.action, last.args, self._pool.facts(touched), self._pool.counter()
        )
        for step in steps:
            for listener in self.listeners:
                listener(step)
