"""Claims in a vLLM that serves: the desk beside the scheduler, and the door that leads to it.

The door is a utility method of vLLM's engine core.  The core runs it between two steps, in the
scheduler's own thread, and every kind of client can call it: over the core's socket from API
server processes, or directly where the engine lives in one process.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any, Final

from kvclaims.bridge.serving.desk import Desk
from kvclaims.bridge.serving.settings import BadSettings, Settings, read_settings
from kvclaims.bridge.serving.spans import Spans
from kvclaims.bridge.serving.tally import Tally
from kvclaims.bridge.serving.tracefiles import TraceFiles
from kvclaims.bridge.serving.tracequeue import TraceQueue
from kvclaims.bridge.vllm.engine import imported_version
from kvclaims.spec.telemetry import Event, Recorder

POLICY: Final = "resident_claims"

DOOR: Final = "kvclaims"
"""The engine core's method: JSON of an operation in, JSON of `[status, body]` out."""

_KEPT_EVENTS: Final = 100
"""Events that stay at hand beside what the sinks make of them.  Few, so that the memory of one that
goes is still in the processor's caches when the next is made."""


class Serving:
    """What a serving scheduler has beside its enforcer."""

    def __init__(self, scheduler: Any, settings: Settings) -> None:
        groups = scheduler.kv_cache_config.kv_cache_groups
        if len(groups) != 1:
            raise BadSettings(
                f"claims speak of one KV group, and this model has {len(groups)} "
                "(several kinds of attention)"
            )
        if not scheduler.kv_cache_manager.enable_caching:
            raise BadSettings("claims keep what vLLM's prefix cache finds again, and it is off")
        usable = scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1
        settings = _of_rank(settings, scheduler.vllm_config.parallel_config)
        self.settings = settings
        self.tally = Tally()
        self.spans = Spans.where_installed()
        self._sinks: list[Callable[[Event], None]] = [self.tally.heard]
        self.trace: TraceQueue | None = None
        if settings.trace:
            files = TraceFiles(Path(settings.trace), settings.trace_bytes, settings.trace_files)
            self.trace = TraceQueue(files)
            self._sinks.append(self.trace.hear)
        if self.spans is not None:
            self._sinks.append(self.spans.heard)
        self.recorder = Recorder(
            settings.run_id, POLICY, usable, _wall_clock(), sink=self._hear, keep=_KEPT_EVENTS
        )
        self.desk: Desk | None = None

    def open(self, enforcer: Any, clock: Callable[[], float] = time.monotonic) -> Desk:
        """Begin to serve on this claim layer; `clock` gives seconds."""
        self.recorder.emit(
            "trace_opened",
            engine="vllm",
            engine_version=imported_version(),
            block_size=enforcer.block_size,
            defer_limit=self.settings.defer_limit,
        )
        enforcer.tells_tables = self.settings.trace_tables
        enforcer.book.granted = enforcer.granted
        self.desk = Desk(enforcer, self.settings, self.tally, clock, self.trace)
        open_door()
        return self.desk

    def close(self) -> None:
        """End the trace, once."""
        if self.desk is not None:
            self.desk = None
            self.recorder.emit("trace_closed", events=self.recorder.count)
            if self.trace is not None:
                self.trace.close()

    def listen(self, sink: Callable[[Event], None]) -> None:
        """Hear every event from now on."""
        self._sinks.append(sink)

    def flush(self, wait: float = 0.0) -> bool:
        """Have the trace written now; whether it is, after so many seconds at most."""
        return self.trace is None or self.trace.flush(wait)

    def _hear(self, event: Event) -> None:
        for sink in self._sinks:
            sink(event)


def _of_rank(settings: Settings, parallel: Any) -> Settings:
    """With data parallelism each rank is an engine of its own: its run and its trace have a name of
    their own, and the names of files still sort by trace and then by time."""
    rank = int(getattr(parallel, "data_parallel_index", 0))
    if not rank:
        return settings
    trace = Path(settings.trace)
    own = str(trace.with_name(f"dp{rank}-{trace.name}")) if settings.trace else ""
    return replace(settings, run_id=f"{settings.run_id}-dp{rank}", trace=own)


def settings_of(scheduler: Any) -> Settings | None:
    """The settings that a scheduler was built with.  Chosen by `--scheduler-cls`, it has claims in
    force even without any."""
    config = scheduler.vllm_config
    chosen = config.scheduler_config.scheduler_cls
    ours = isinstance(chosen, str) and chosen.startswith("kvclaims.")
    return read_settings(getattr(config, "additional_config", None), default=ours)


def open_door() -> None:
    """Give vLLM's engine core the method that leads to the desk of its scheduler, and let it end
    the trace as soon as its loop has ended; idempotent.

    What the core does after its loop a second signal may cut short: it heeds none while it loops,
    and where a signal reaches all processes at once, its parent sends it another.
    """
    from vllm.v1.engine import core

    if hasattr(core.EngineCore, DOOR):
        return
    setattr(core.EngineCore, DOOR, _through_the_door)
    for kind in (core.EngineCoreProc, getattr(core, "DPEngineCoreProc", None)):
        if kind is not None and "run_busy_loop" in vars(kind):
            kind.run_busy_loop = _ending_the_trace(kind.run_busy_loop)


def _ending_the_trace(loop: Callable[[Any], None]) -> Callable[[Any], None]:
    """An engine core's loop, after which nothing happens that a trace would tell of."""

    @wraps(loop)
    def looped(core: Any) -> None:
        try:
            loop(core)
        finally:
            serving = getattr(core.scheduler, "serving", None)
            if serving is not None:
                serving.close()

    return looped


def _through_the_door(core: Any, message: str) -> str:
    """Runs as a method of the engine core, between its steps."""
    serving = getattr(core.scheduler, "serving", None)
    if serving is None or serving.desk is None:
        return json.dumps([503, {"error": "claims are not in force on this engine"}])
    answer = serving.desk.operate(json.loads(message))
    serving.flush()
    return json.dumps([answer.status, answer.body])


def _wall_clock() -> Callable[[], int]:
    """Nanoseconds since 1970 that never run back, whatever becomes of the system's clock."""
    offset = time.time_ns() - time.monotonic_ns()
    return lambda: time.monotonic_ns() + offset
