"""The runtime interface over SGLang's pool (`kvclaims.bridge.sglang.pool` says what maps to what).

What it does not have: content that is lost in the midst of a prefix, cache salts and adapters,
claims on anything but leading positions (a lock on a node of the tree holds its whole prefix), and
every feature but fingerprints.  These raise `NotExposed`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NoReturn

from kvclaims.bridge.sglang.jobs import job_of
from kvclaims.bridge.sglang.pool import RadixPool
from kvclaims.bridge.sglang.residency import Residency
from kvclaims.bridge.sglang.scheduler import RadixScheduler
from kvclaims.bridge.sglang.teller import Teller
from kvclaims.bridge.vllm.requests import RequestLog
from kvclaims.spec.content import content_ids
from kvclaims.spec.interface import (
    BadOperation,
    ClaimAnswer,
    ClaimSpec,
    KvEvent,
    NotExposed,
    Observation,
    PoolConfig,
    PoolSnapshot,
    PoolStep,
    RequestSpec,
    RequestView,
)
from kvclaims.spec.telemetry import Event, Recorder
from kvclaims.spec.vocabulary import Phase

POLICY: Final = "resident_claims"

NANOSECONDS: Final = 1_000_000_000
"""Trace nanoseconds in one time unit of `advance`."""


class RadixRuntime:
    """One run over one pool.  Operations that are refused have changed nothing (B9)."""

    def __init__(self, name: str, config: PoolConfig, run_id: str, version: str) -> None:
        if config.block_size != 1:
            raise NotExposed("pages of more than one token: their allocator needs a GPU")
        if config != PoolConfig(config.usable, 1, config.defer_limit):
            raise NotExposed("a pool with more than a size and a limit of deferrals")
        self.config = config
        self._now = 0
        self._ticks = 0
        self._is_open = True
        self._recorder = Recorder(run_id, POLICY, config.usable, self._clock)
        self._pool = RadixPool(config.usable)
        self._teller = Teller(self._pool)
        self._residency = Residency(self._pool, self._teller, self._recorder)
        log = RequestLog(self._recorder, config.defer_limit)
        self._scheduler = RadixScheduler(self._residency, log, config.usable)
        self._recorder.emit(
            "trace_opened",
            engine=name,
            engine_version=version,
            block_size=1,
            defer_limit=config.defer_limit,
        )

    # -- claims ----------------------------------------------------------------------------------

    def declare(self, claim: ClaimSpec) -> ClaimAnswer:
        self._check_open()
        if claim.domain:
            raise NotExposed("content told apart by salt, adapter or modality")
        if claim.predicate.start:
            raise NotExposed("a range that is no prefix: a lock on the tree holds the whole prefix")
        keys = content_ids(claim.tokens, 1)
        with self._teller.operation():
            return self._residency.book.declare(claim, keys)

    def release(self, claim_id: str) -> None:
        self._end(claim_id, Phase.RELEASED)

    def demote(self, claim_id: str) -> None:
        self._end(claim_id, Phase.DEMOTED)

    def _end(self, claim_id: str, how: Phase) -> None:
        self._check_open()
        with self._teller.operation():
            self._residency.book.end(claim_id, how)

    def renew(self, claim_id: str, duration: int) -> None:
        self._check_open()
        self._residency.book.renew(claim_id, duration)

    def advance(self, ticks: int) -> None:
        self._check_open()
        if ticks <= 0:
            raise BadOperation("time passes in positive ticks")
        self._now += ticks
        with self._teller.operation():
            self._residency.book.advance(ticks)

    # -- requests --------------------------------------------------------------------------------

    def submit(self, request: RequestSpec) -> None:
        self._check_open()
        if not request.request_id or request.request_id in self._scheduler.jobs:
            raise BadOperation(f"request {request.request_id!r} is known already, or has no id")
        if not request.tokens or request.max_new_tokens < 1:
            raise BadOperation("a request has a prompt and generates at least one token")
        if request.domain or request.priority or request.external or request.accepts:
            raise NotExposed("salt, adapter, modality, priority, transfers and drafts")
        self._scheduler.add(job_of(request))

    def abort(self, request_id: str) -> None:
        self._check_open()
        job = self._scheduler.jobs.get(request_id)
        if job is None or job.record.state == "finished":
            raise BadOperation(f"no request {request_id!r} waits or runs")
        self._scheduler.abort(job)

    def step(self) -> None:
        self._check_open()
        self._scheduler.step()

    # -- content ---------------------------------------------------------------------------------

    def reset(self) -> bool:
        self._check_open()
        with self._teller.operation():
            return self._residency.reset()

    def lose(self, tokens: tuple[int, ...], position: int, salt: str = "") -> bool:
        self._check_open()
        if not 0 <= position < len(content_ids(tokens, 1, salt)):
            raise BadOperation("the content has no full block at that position")
        raise NotExposed("a token lost in the midst of a prefix: the tree drops from its leaves")

    def locate(self, tokens: tuple[int, ...], salt: str = "") -> tuple[int | None, ...]:
        found = self._pool.resident()
        return tuple(found.get(key) for key in content_ids(tokens, 1, salt))

    def fingerprint(self, blocks: tuple[int, ...]) -> tuple[int, ...]:
        if not all(0 < block <= self.config.usable for block in blocks):
            raise BadOperation("no such block")
        return tuple(self._pool.read(blocks))

    def kv_events(self) -> tuple[KvEvent, ...]:
        _lacks("KV events that name content: a block's hash is that of its own tokens alone")

    def dispatch(self) -> None:
        _lacks("steps in flight, in this adapter")

    def complete(self) -> None:
        _lacks("steps in flight, in this adapter")

    def load(self, request_id: str, blocks: int) -> None:
        _lacks(f"the load of {blocks} blocks for {request_id!r}, in this adapter")

    def offload(self, claim_id: str) -> bool:
        _lacks(f"a host tier for {claim_id!r}, in this adapter")

    def restore(self, claim_id: str, succeeds: bool = True) -> bool:
        _lacks(f"a host tier for {claim_id!r} (succeeds: {succeeds}), in this adapter")

    def sleep(self) -> bool:
        _lacks("sleep, in this adapter")

    def wake(self) -> None:
        _lacks("sleep, in this adapter")

    # -- what can be seen ------------------------------------------------------------------------

    def observe(self) -> Observation:
        book = self._residency.book
        return Observation(
            usable=self.config.usable,
            free=self._pool.counter(),
            headroom=book.headroom(),
            claims={name: book.view(claim) for name, claim in book.claims.items()},
            requests={name: self._view(name) for name in self._scheduler.jobs},
            resident=self._pool.resident(),
        )

    def _view(self, name: str) -> RequestView:
        job = self._scheduler.jobs[name]
        return job.record.view(self._scheduler.blocks(job), job.written)

    def snapshot(self) -> PoolSnapshot:
        return self._pool.snapshot(self._scheduler.holders(), self._residency.book.pins())

    def events(self) -> tuple[Event, ...]:
        return tuple(self._recorder.events)

    def listen(self, listener: Callable[[PoolStep], None]) -> None:
        self._teller.listeners.append(listener)

    def close(self) -> None:
        self._check_open()
        self._is_open = False
        self._recorder.emit("trace_closed", events=len(self._recorder.events))

    def _clock(self) -> int:
        """Logical time: time units, and within one a count of events."""
        self._ticks += 1
        return self._now * NANOSECONDS + self._ticks

    def _check_open(self) -> None:
        if not self._is_open:
            raise BadOperation("the runtime is closed")


def _lacks(what: str) -> NoReturn:
    raise NotExposed(what)
