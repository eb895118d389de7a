"""A small runtime that keeps the contract: pool, claim book, arbiter, scheduler, memory.

Start at `MicroRuntime.step`, and go on in `kvclaims.reference.scheduler` for requests and in
`kvclaims.reference.residency` for claims.  Memory is simulated: every block remembers what was
last written into it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvclaims.reference.ledger import Ledger
from kvclaims.reference.memory import Memory
from kvclaims.reference.narrator import Narrator
from kvclaims.reference.pool import Pool
from kvclaims.reference.requests import Request
from kvclaims.reference.residency import Residency
from kvclaims.reference.scheduler import Scheduler
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
)
from kvclaims.spec.telemetry import Event
from kvclaims.spec.vocabulary import Phase


class MicroRuntime:
    """The reference runtime (`kvclaims.spec.interface.Runtime`)."""

    def __init__(self, config: PoolConfig, run_id: str, engine: str) -> None:
        if config.windows != (0,):
            raise NotExposed("the reference has one group of full attention")
        if config.drafts and config.in_flight > 1:
            raise NotExposed("the reference drafts only where each step ends before the next")
        self.config = config
        self._pool = Pool(range(1, config.usable + 1))
        self._narrator = Narrator(config, run_id, self._pool)
        self._ledger = Ledger(self._pool, self._narrator.note_step)
        self._memory = Memory(config.block_size)
        self._residency = Residency(self._ledger, self._narrator, self._memory, config)
        self._scheduler = Scheduler(
            config, self._ledger, self._residency, self._narrator, self._memory
        )
        self._asleep = False
        self._closed = False
        self._narrator.emit(
            "trace_opened",
            engine=engine,
            block_size=config.block_size,
            defer_limit=config.defer_limit,
        )

    # --- claims, time and content -------------------------------------------------------------

    def declare(self, claim: ClaimSpec) -> ClaimAnswer:
        with self._operation():
            return self._residency.declare(claim)

    def release(self, claim_id: str) -> None:
        with self._operation():
            self._residency.end(claim_id, Phase.RELEASED)

    def demote(self, claim_id: str) -> None:
        with self._operation():
            self._residency.end(claim_id, Phase.DEMOTED)

    def renew(self, claim_id: str, duration: int) -> None:
        with self._operation():
            self._residency.renew(claim_id, duration)

    def advance(self, ticks: int) -> None:
        with self._operation():
            if ticks <= 0:
                raise BadOperation("time advances by at least one unit")
            self._narrator.now += ticks
            self._residency.expire()

    def reset(self) -> bool:
        with self._operation():
            return self._residency.reset()

    def lose(self, tokens: tuple[int, ...], position: int, salt: str = "") -> bool:
        with self._operation():
            return self._residency.lose(tokens, position, salt)

    def sleep(self) -> bool:
        with self._operation():
            self._require_awake()
            self._asleep = self._residency.sleep()
            return self._asleep

    def wake(self) -> None:
        with self._operation():
            if not self._asleep:
                raise BadOperation("the runtime is awake")
            self._asleep = False
            self._narrator.emit("pool_woken")

    # --- requests -------------------------------------------------------------------------

    def submit(self, request: RequestSpec) -> None:
        self._require_open()
        name = request.request_id
        if not name or name in self._scheduler.requests:
            raise BadOperation(f"request {name!r} is known already, or has no id")
        if not request.tokens or request.max_new_tokens < 1:
            raise BadOperation("a request has a prompt and at least one token to decode")
        if request.external < 0 or request.accepts < 0:
            raise BadOperation("external and accepts count from 0")
        keys = content_ids(request.tokens, self.config.block_size, request.domain)
        arrival = len(self._scheduler.requests)
        self._scheduler.add(Request(request, list(request.tokens), keys, arrival))

    def abort(self, request_id: str) -> None:
        self._require_open()
        entry = self._scheduler.requests.get(request_id)
        if entry is None or entry.state in ("finished", "ending"):
            raise BadOperation(f"request {request_id!r} is not waiting or running")
        self._scheduler.abort(entry)

    def load(self, request_id: str, blocks: int) -> None:
        self._require_open()
        entry = self._scheduler.requests.get(request_id)
        if entry is None or entry.state not in ("loading", "ending") or blocks < 0:
            raise BadOperation(f"request {request_id!r} is not loading")
        self._scheduler.load(entry, blocks)

    def step(self) -> None:
        """One scheduling step to its end, after what is under way."""
        self._require_open()
        self._require_awake()
        while self._scheduler.under_way:
            self._scheduler.complete()
        self._scheduler.dispatch()
        self._scheduler.complete()

    def dispatch(self) -> None:
        self._require_open()
        self._require_awake()
        if len(self._scheduler.under_way) >= self.config.in_flight:
            raise BadOperation(f"{self.config.in_flight} steps are under way")
        self._scheduler.dispatch()

    def complete(self) -> None:
        self._require_open()
        if not self._scheduler.under_way:
            raise BadOperation("no step is under way")
        self._scheduler.complete()

    # --- what can be asked ------------------------------------------------------------------

    def locate(self, tokens: tuple[int, ...], salt: str = "") -> tuple[int | None, ...]:
        keys = content_ids(tokens, self.config.block_size, salt)
        return tuple(self._pool.find(key) for key in keys)

    def fingerprint(self, blocks: tuple[int, ...]) -> tuple[int, ...]:
        if not all(block in self._pool.ref for block in blocks):
            raise BadOperation("no such block")
        return tuple(self._memory.fingerprint(block) for block in blocks)

    def observe(self) -> Observation:
        held = self._pool.held
        return Observation(
            usable=self.config.usable,
            free=self._pool.queue.count,
            headroom=self._pool.headroom,
            claims=self._residency.views(),
            requests={
                name: request.view(tuple(held.get(name, ())))
                for name, request in self._scheduler.requests.items()
            },
            resident={key: next(iter(blocks)) for key, blocks in self._pool.entry.items()},
        )

    def snapshot(self) -> PoolSnapshot:
        return PoolSnapshot(
            null_block=0,
            queue=tuple(self._pool.queue),
            counter=self._pool.queue.count,
            facts={block: self._narrator.facts(block) for block in self._pool.ref},
            holders={name: tuple(blocks) for name, blocks in self._pool.held.items()},
            pins={
                claim: tuple(blocks)
                for claim, blocks in self._pool.covers.items()
                if blocks and self._ledger.book.hard[claim]
            },
            lookup={key: tuple(blocks) for key, blocks in self._pool.entry.items()},
        )

    def events(self) -> tuple[Event, ...]:
        return tuple(self._narrator.events)

    def kv_events(self) -> tuple[KvEvent, ...]:
        told, self._narrator.kv_events = tuple(self._narrator.kv_events), []
        return told

    def listen(self, listener: Callable[[PoolStep], None]) -> None:
        self._narrator.listeners.append(listener)

    def close(self) -> None:
        self._require_open()
        self._narrator.emit("trace_closed", events=len(self._narrator.events))
        self._closed = True

    # --- small helpers ----------------------------------------------------------------------

    @contextmanager
    def _operation(self) -> Iterator[None]:
        """An operation on an open runtime; its steps are told when it is over."""
        self._require_open()
        yield
        self._narrator.flush()

    def _require_open(self) -> None:
        if self._closed:
            raise BadOperation("the runtime is closed")

    def _require_awake(self) -> None:
        if self._asleep:
            raise BadOperation("the runtime is asleep")
