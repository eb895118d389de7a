"""What a runtime tells: the trace of events, and the allocator steps for whoever listens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvclaims.reference.pool import Pool
from kvclaims.spec.interface import BlockFacts, KvEvent, PoolConfig, PoolStep
from kvclaims.spec.telemetry import Recorder

NANOSECONDS = 1_000_000_000
"""Trace nanoseconds in one time unit of `advance`."""


class Narrator:
    """Keeps the time of a run, numbers its events and passes steps on.

    `now` is in time units.  Steps are told when the pool call they belong to is over, and the
    last one carries what the call left behind: only then is the pool at rest.
    """

    def __init__(self, config: PoolConfig, run_id: str, pool: Pool) -> None:
        self.now = 0
        self._ticks = 0
        self._pool = pool
        self._recorder = Recorder(run_id, "resident_claims", config.usable, self._clock)
        self.events = self._recorder.events
        self.emit = self._recorder.emit
        self.listeners: list[Callable[[PoolStep], None]] = []
        self.kv_events: list[KvEvent] = []
        """What routers have not fetched yet (B8)."""
        self._untold: list[tuple[str, dict[str, Any]]] = []

    def note_step(self, action: str, args: dict[str, Any]) -> None:
        """A step was taken in the midst of a pool call."""
        if self.listeners:
            self._untold.append((action, args))
        if "k" in args:
            self._note_content(action, args["k"])

    def _note_content(self, action: str, key: str) -> None:
        """Routers hear of a content when its first copy comes and when its last one goes (B8)."""
        copies = len(self._pool.entry.get(key, ()))
        if action == "register" and copies == 1:
            self.kv_events.append(KvEvent("stored", (key,)))
        elif copies == 0:
            self.kv_events.append(KvEvent("removed", (key,)))

    def flush(self) -> None:
        """Tell the steps of a pool call that is over; the last one carries what it left behind."""
        steps, self._untold = self._untold, []
        touched = sorted({args["b"] for _, args in steps if "b" in args})
        for index, (action, args) in enumerate(steps, start=1):
            if index < len(steps):
                step = PoolStep(action, args)
            else:
                facts = {block: self.facts(block) for block in touched}
                step = PoolStep(action, args, facts, self._pool.queue.count)
            for listener in self.listeners:
                listener(step)

    def facts(self, block: int) -> BlockFacts:
        """What the pool's own tables say of a block (B1 to B3)."""
        key = self._pool.key.get(block)
        return BlockFacts(
            ref=self._pool.ref[block],
            queued=block in self._pool.queue,
            keys=() if key is None else (key,),
        )

    def _clock(self) -> int:
        """Logical time: time units, and within one a count of events."""
        self._ticks += 1
        return self.now * NANOSECONDS + self._ticks
