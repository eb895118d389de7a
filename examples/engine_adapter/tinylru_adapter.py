"""The small engine as `kvclaims` sees it: what it can do, and what it does not have."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import tinylru

from kvclaims.bridge.vllm.requests import Blocked, RequestLog, RequestRecord
from kvclaims.spec.content import content_ids
from kvclaims.spec.feasibility import Situation, judge
from kvclaims.spec.interface import (
    BadOperation,
    EngineInfo,
    Feature,
    NotExposed,
    Observation,
    PoolConfig,
    RequestSpec,
)
from kvclaims.spec.telemetry import Event, Recorder
from kvclaims.spec.vocabulary import Outcome


@dataclass
class Job:
    """A request, the contents of its full blocks, and where it stands."""

    spec: RequestSpec
    record: RequestRecord
    contents: tuple[str, ...]
    size: int
    """Blocks that it needs in all."""
    blocks: list[int] = field(default_factory=list)
    left: int = 0
    """Steps until it has all its tokens."""


class TinyRuntime:
    """A pool of the engine, with a scheduler that admits in the order of arrival."""

    def __init__(self, config: PoolConfig, run_id: str) -> None:
        self.config = config
        self._cache = tinylru.Cache(config.usable)
        self._jobs: dict[str, Job] = {}
        self._recorder = Recorder(run_id, "lru", config.usable, lambda: len(self.events()))
        self._log = RequestLog(self._recorder, config.defer_limit)
        size = config.block_size
        self._recorder.emit(
            "trace_opened", engine="tinylru", block_size=size, defer_limit=config.defer_limit
        )

    # -- what can be told

    def submit(self, request: RequestSpec) -> None:
        if request.domain or request.external or request.request_id in self._jobs:
            raise BadOperation(f"request {request.request_id!r} is known, or asks for too much")
        contents = content_ids(request.tokens, self.config.block_size)
        written = len(request.tokens) + request.max_new_tokens - 1
        size = -(-written // self.config.block_size)
        record = RequestRecord(request.request_id, request.admit_reuse, (*contents, None)[-1])
        job = Job(request, record, contents, size, left=request.max_new_tokens)
        self._jobs[request.request_id] = job
        self._log.arrived(record, size)

    def step(self) -> None:
        """Admit whoever fits, in order; then each running request computes one token."""
        for job in self._in("waiting"):
            if not self._admit(job):
                break
        for job in self._in("running"):
            job.left -= 1
            if job.left == 0:
                self._finish(job)

    def _in(self, state: str) -> list[Job]:
        return [job for job in self._jobs.values() if job.record.state == state]

    def _admit(self, job: Job) -> bool:
        """Judge the request, and tell it; whether the next in line may be looked at."""
        hits = self._cache.find(
            job.contents[: (len(job.spec.tokens) - 1) // self.config.block_size]
        )
        fresh, free = job.size - len(hits), len(self._cache.free)
        active = {other.spec.request_id: frozenset(other.blocks) for other in self._in("running")}
        situation = Situation(self.config.usable, {}, active, fresh, frozenset(hits))
        judgement = judge(situation)
        if judgement.outcome is not Outcome.SERVED:
            blocked = Blocked(job, situation, judgement, free, 0, tuple(hits))
            self._log.judged(job.record, blocked, {})
            return job.record.state == "finished"
        self._log.admitted(job.record, len(hits), fresh, free)
        taken, evicted = self._cache.take(hits, fresh)
        for block, content in evicted.items():
            self._recorder.emit(
                "allocation_victim_selected",
                request_id=job.spec.request_id,
                prefix_id=content,
                block_id=block,
                hash=content,
                ref_count=0,
                protected=False,
                reason="cached_prefix_reuse",
            )
        job.blocks = [*hits, *taken]
        self._log.grew(job.record, job.blocks, [])
        return True

    def _finish(self, job: Job) -> None:
        hits = job.record.hit_blocks
        if job.spec.admit_reuse:
            for block, content in list(zip(job.blocks, job.contents, strict=False))[hits:]:
                self._cache.keep(block, content)
        self._log.finished(job.record, len(job.blocks), len(job.contents) - hits)
        self._cache.give_back(job.blocks)
        job.blocks = []

    def close(self) -> None:
        self._recorder.emit("trace_closed", events=self._recorder.count)

    # -- what can be asked

    def observe(self) -> Observation:
        free = len(self._cache.free)
        requests = {
            name: job.record.view(tuple(job.blocks), computed=None)
            for name, job in self._jobs.items()
        }
        resident = dict(self._cache.block_of)
        return Observation(self.config.usable, free, free, {}, requests, resident)

    def locate(self, tokens: tuple[int, ...], salt: str = "") -> tuple[int | None, ...]:
        contents = content_ids(tokens, self.config.block_size, salt)
        return tuple(self._cache.block_of.get(content) for content in contents)

    def events(self) -> tuple[Event, ...]:
        return tuple(self._recorder.events)

    # -- what the engine does not have

    def _lacks(self, *_: Any, **__: Any) -> NoReturn:
        raise NotExposed("the engine has no such thing")

    declare = release = demote = renew = offload = restore = _lacks
    abort = dispatch = complete = load = sleep = wake = reset = lose = advance = _lacks
    kv_events = fingerprint = snapshot = listen = _lacks


class TinyEngine:
    """What the entry point names (`kvclaims.spec.interface.Engine`)."""

    name = "tinylru"
    block_size = 16
    package = "tinylru"
    faults = None
    features: frozenset[Feature] = frozenset()

    def info(self) -> EngineInfo:
        return EngineInfo(self.name, "0.1", str(Path(tinylru.__file__).resolve().parent))

    def open(self, config: PoolConfig, run_id: str) -> TinyRuntime:
        return TinyRuntime(config, run_id)


ENGINE = TinyEngine()
