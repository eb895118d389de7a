"""The runtime interface over a live vLLM scheduler, in process or in a whole engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

from kvclaims.bridge.vllm.engine import imported_version
from kvclaims.bridge.vllm.observer import keys_found
from kvclaims.bridge.vllm.scheduler import ADMIT_REUSE, ClaimEnforcer
from kvclaims.bridge.vllm.serving import POLICY
from kvclaims.bridge.vllm.simulated import EventTap, SimulatedDriver
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

NANOSECONDS: Final = 1_000_000_000
"""Trace nanoseconds in one time unit of `advance`."""


class Driver(Protocol):
    """The engine around the scheduler: it adds requests and runs steps."""

    scheduler: Any

    def request(self, spec: RequestSpec, extra_args: dict[str, Any]) -> Any:
        """A request object for this engine, with an id that no earlier run used."""

    def add(self, request: Any) -> None: ...
    def step(self) -> None: ...
    def dispatch(self) -> None: ...
    def complete(self) -> None: ...
    def computed(self, request_id: str) -> int | None:
        """Leading tokens that completed steps have written; None where that is not told."""

    def loading(self, request_id: str) -> int | None:
        """Blocks that a transfer is to bring for a request; None where it waits for none."""

    def load(self, request_id: str, blocks: int) -> None:
        """That transfer ends, and only its first `blocks` came."""

    def discard(self) -> None:
        """All KV memory is given up, and comes back blank."""

    def fingerprint(self, blocks: tuple[int, ...]) -> tuple[int, ...]: ...
    def close(self) -> None: ...


class VllmRuntime:
    """One run over one scheduler.  Operations that are refused have changed nothing (B9)."""

    def __init__(self, name: str, config: PoolConfig, run_id: str, driver: Driver) -> None:
        self.config = config
        self._driver = driver
        self._scheduler = driver.scheduler
        self._names: dict[str, str] = {}
        """vLLM's id of a request → the id that the program gave it."""
        self._ids: dict[str, str] = {}
        self._open = True
        self._asleep = False
        self._trace: tuple[Event, ...] | None = None
        """The events once the trace has been closed: an engine ends requests when it stops."""
        self._now = 0
        self._ticks = 0
        self._recorder = Recorder(run_id, POLICY, config.usable, self._clock)
        self._recorder.emit(
            "trace_opened",
            engine=name,
            engine_version=imported_version(),
            block_size=config.block_size,
            defer_limit=config.defer_limit,
        )
        self._claims: ClaimEnforcer = self._scheduler.enforce(
            self._recorder, config.defer_limit, lambda request: self._names.get(request, request)
        )
        self._tap: EventTap | None = None

    # -- claims --------------------------------------------------------------------------------

    def declare(self, claim: ClaimSpec) -> ClaimAnswer:
        self._check_open()
        if self.config.windows != (0,):
            raise NotExposed("claims on a pool with windows or several KV groups, in this adapter")
        return self._claims.declare(claim)

    def release(self, claim_id: str) -> None:
        self._check_open()
        self._claims.end_claim(claim_id, Phase.RELEASED)

    def demote(self, claim_id: str) -> None:
        self._check_open()
        self._claims.end_claim(claim_id, Phase.DEMOTED)

    def renew(self, claim_id: str, duration: int) -> None:
        self._check_open()
        self._claims.book.renew(claim_id, duration)

    def advance(self, ticks: int) -> None:
        self._check_open()
        if ticks <= 0:
            raise BadOperation("time passes in positive ticks")
        self._now += ticks
        self._claims.advance(ticks)

    # -- requests ------------------------------------------------------------------------------

    def submit(self, request: RequestSpec) -> None:
        self._check_open()
        if request.request_id in self._ids:
            raise BadOperation(f"request {request.request_id!r} was submitted already")
        if not request.request_id:
            raise BadOperation("a request needs an id")
        if not request.tokens:
            raise BadOperation("a request needs at least one token")
        if request.max_new_tokens < 1:
            raise BadOperation("a request generates at least one token")
        made = self._driver.request(request, {ADMIT_REUSE: request.admit_reuse})
        self._ids[request.request_id] = made.request_id
        self._names[made.request_id] = request.request_id
        self._driver.add(made)

    def abort(self, request_id: str) -> None:
        from vllm.v1.request import RequestStatus

        self._check_open()
        own_id = self._ids.get(request_id)
        if own_id is None or own_id not in self._scheduler.requests:
            raise BadOperation(f"no request {request_id!r} waits or runs")
        if self._scheduler.requests[own_id].is_finished():
            raise BadOperation(f"request {request_id!r} is ending")
        self._scheduler.finish_requests(own_id, RequestStatus.FINISHED_ABORTED)
        if own_id in self._scheduler.requests:
            self._claims.ending(self._scheduler.requests[own_id])

    def step(self) -> None:
        self._check_awake()
        self._driver.step()

    def dispatch(self) -> None:
        self._check_awake()
        self._driver.dispatch()

    def complete(self) -> None:
        self._check_open()
        self._driver.complete()

    # -- content -------------------------------------------------------------------------------

    def reset(self) -> bool:
        self._check_open()
        return self._claims.reset()

    def sleep(self) -> bool:
        """vLLM's sleep at level 1 and above: the prefix cache is reset, all KV is discarded."""
        self._check_awake()
        self._asleep = self._claims.reset("pool_slept")
        if self._asleep:
            self._driver.discard()
        return self._asleep

    def wake(self) -> None:
        self._check_open()
        if not self._asleep:
            raise BadOperation("the runtime is awake")
        self._asleep = False
        self._recorder.emit("pool_woken")

    def load(self, request_id: str, blocks: int) -> None:
        self._check_open()
        own_id = self._ids.get(request_id, "")
        asked = self._driver.loading(own_id)
        if asked is None or blocks > asked:
            raise BadOperation(f"request {request_id!r} loads {asked or 0} blocks")
        record = self._claims.requests.records[request_id]
        self._claims.requests.loaded(record, asked, blocks)
        self._driver.load(own_id, blocks)

    def offload(self, claim_id: str) -> bool:
        raise NotExposed(f"a host tier for {claim_id!r}, in this adapter")

    def restore(self, claim_id: str, succeeds: bool = True) -> bool:
        how = "a restore" if succeeds else "a failing restore"
        raise NotExposed(f"{how} of {claim_id!r}, in this adapter")

    def kv_events(self) -> tuple[KvEvent, ...]:
        """vLLM's own KV events, from the first call on."""
        self._check_open()
        if self._tap is None:
            self._tap = EventTap(self._claims.observer)
        return self._tap.news()

    def lose(self, tokens: tuple[int, ...], position: int, salt: str = "") -> bool:
        self._check_open()
        keys = self._claims.names.of_tokens(tokens, salt)
        if not 0 <= position < len(keys):
            raise BadOperation("the content has no full block at that position")
        return self._claims.lose(keys[position], position)

    def locate(self, tokens: tuple[int, ...], salt: str = "") -> tuple[int | None, ...]:
        found = keys_found(self._claims.observer)
        keys = self._claims.names.of_tokens(tokens, salt)
        return tuple(found[key][0] if key in found else None for key in keys)

    def fingerprint(self, blocks: tuple[int, ...]) -> tuple[int, ...]:
        if not all(0 < b <= self.config.usable for b in blocks):
            raise BadOperation("no such block")
        return self._driver.fingerprint(blocks)

    # -- what can be seen ----------------------------------------------------------------------

    def observe(self) -> Observation:
        claims = self._claims
        return Observation(
            usable=self.config.usable,
            free=claims.queue_length(),
            headroom=claims.book.headroom(),
            claims={c: claims.book.view(claim) for c, claim in claims.book.claims.items()},
            requests={r: self._view(r) for r in self._ids},
            resident={key: blocks[0] for key, blocks in keys_found(claims.observer).items()},
        )

    def _view(self, request_id: str) -> RequestView:
        own_id = self._ids[request_id]
        record = self._claims.requests.records[request_id]
        blocks: tuple[int, ...] = ()
        tables: tuple[tuple[int, ...], ...] = ()
        if own_id in self._scheduler.requests:
            groups = self._scheduler.kv_cache_manager.get_block_ids(own_id)
            blocks = tuple(groups[0])
            if self.config.windows != (0,) and any(groups):
                tables = tuple(map(tuple, groups))
                blocks = tuple(sorted(set().union(*groups) - {0}))
        elif record.state == "ending":  # what vLLM frees when a step in flight has ended
            blocks = tuple(self._claims.observer.held.get(request_id, ()))
        has_kv = record.state in ("running", "loading", "ending")
        return record.view(blocks, self._driver.computed(own_id) if has_kv else 0, tables)

    def snapshot(self) -> PoolSnapshot:
        return self._claims.observer.snapshot(self._claims.book.pins())

    def events(self) -> tuple[Event, ...]:
        return tuple(self._recorder.events) if self._trace is None else self._trace

    def listen(self, listener: Callable[[PoolStep], None]) -> None:
        self._claims.observer.listen(listener)

    def close(self) -> None:
        """End the trace and give the engine back."""
        self._check_open()
        self._open = False
        self._recorder.emit("trace_closed", events=len(self._recorder.events))
        self._trace = tuple(self._recorder.events)
        self._driver.close()

    def _clock(self) -> int:
        """Logical time, the same in every run: time units, and within one a count of events."""
        self._ticks += 1
        return self._now * NANOSECONDS + self._ticks

    def _check_awake(self) -> None:
        self._check_open()
        if self._asleep:
            raise BadOperation("the runtime is asleep")

    def _check_open(self) -> None:
        if not self._open:
            raise BadOperation("the runtime is closed")


def open_in_process(name: str, config: PoolConfig, run_id: str) -> VllmRuntime:
    """A run on vLLM's scheduler and allocator alone: no weights, no forward pass."""
    return VllmRuntime(name, config, run_id, SimulatedDriver(config))
