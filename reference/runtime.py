"""A small runtime that keeps the contract: pool, claim book, arbiter and a scheduler loop.

Start at `MicroRuntime.step`.  Memory is simulated: every block remembers what was last written
into it.  Scheduling follows vLLM's: running requests first, each by one token, the last one
preempted when room is short; then waiting requests in order, each whole prompt at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kvclaims.reference.arbiter import Answer, Owed, Question, decide
from kvclaims.reference.ledger import Ledger
from kvclaims.reference.narrator import Narrator
from kvclaims.reference.pool import Pool
from kvclaims.reference.residency import Residency
from kvclaims.spec.content import GENERATED_TOKEN, content_ids
from kvclaims.spec.interface import (
    BadOperation,
    ClaimAnswer,
    ClaimSpec,
    Observation,
    PoolConfig,
    PoolSnapshot,
    PoolStep,
    RequestSpec,
    RequestView,
)
from kvclaims.spec.telemetry import Event
from kvclaims.spec.vocabulary import (
    Feasibility,
    Outcome,
    Phase,
)


@dataclass
class Request:
    """An active request: its tokens so far and how many of them have KV (`computed`)."""

    spec: RequestSpec
    tokens: list[int]
    keys: tuple[str, ...]
    state: str = "waiting"
    outcome: Outcome = Outcome.PENDING
    computed: int = 0
    written: int = 0
    """How many of the computed tokens had KV before this step."""
    hits: int = 0
    registered: int = 0
    """Leading blocks whose content was found or made visible."""
    deferrals: int = 0
    waits_on: tuple[str, ...] = ()
    shortfall: int = 0
    blocking: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.spec.request_id

    @property
    def is_done(self) -> bool:
        return len(self.tokens) >= len(self.spec.tokens) + self.spec.max_new_tokens


class MicroRuntime:
    """The reference runtime (`kvclaims.spec.interface.Runtime`)."""

    def __init__(self, config: PoolConfig, run_id: str, engine: str) -> None:
        self.config = config
        self._pool = Pool(range(1, config.usable + 1))
        self._narrator = Narrator(config, run_id, self._pool)
        self._ledger = Ledger(self._pool, self._narrator.note_step)
        self._residency = Residency(self._ledger, self._narrator, config.block_size)
        self._requests: dict[str, Request] = {}
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._memory: dict[int, str] = {}
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

    # --- requests -------------------------------------------------------------------------

    def submit(self, request: RequestSpec) -> None:
        self._require_open()
        name = request.request_id
        if not name or name in self._requests:
            raise BadOperation(f"request {name!r} is known already, or has no id")
        if not request.tokens or request.max_new_tokens < 1:
            raise BadOperation("a request has a prompt and at least one token to decode")
        keys = content_ids(request.tokens, self.config.block_size, request.salt)
        entry = Request(request, list(request.tokens), keys)
        self._ledger.enter(name, admit_reuse=request.admit_reuse)
        self._requests[name] = entry
        self._waiting.append(entry)
        self._emit_request(
            "active_request_submitted",
            entry,
            admit_reuse=request.admit_reuse,
            active_live_blocks_required=self._blocks(len(request.tokens)),
        )

    def abort(self, request_id: str) -> None:
        self._require_open()
        entry = self._requests.get(request_id)
        if entry is None or entry.state == "finished":
            raise BadOperation(f"request {request_id!r} is not waiting or running")
        (self._running if entry.state == "running" else self._waiting).remove(entry)
        self._close_request(entry, Outcome.ABORTED)
        self._emit_request("active_request_aborted", entry, blocks=self._release(entry))
        self._narrator.flush()

    def step(self) -> None:
        """One scheduling step: grow the running, admit the waiting, write, finish, cover."""
        self._require_open()
        scheduled: list[Request] = []
        if not self._grow_running(scheduled):
            self._admit_waiting(scheduled)
        for request in scheduled:
            self._write(request)
        for request in scheduled:
            self._append_token(request)
            if request.is_done:
                self._finish(request)
        self._residency.cover_written(self._memory)
        self._narrator.flush()

    def _grow_running(self, scheduled: list[Request]) -> bool:
        """Room for one token more in each running request; True if one had to be preempted."""
        preempted = False
        index = 0
        while index < len(self._running):
            request = self._running[index]
            if self._grow(request):
                scheduled.append(request)
                index += 1
            else:
                self._preempt(self._running.pop())
                preempted = True
        return preempted

    def _grow(self, request: Request) -> bool:
        missing = self._missing_positions(request, (), request.computed + 1)
        loans = self._loans(request, missing, request.computed + 1)
        if len(missing) - len(loans) > self._pool.headroom:
            return False
        self._allocate(request, {}, missing, loans, request.computed + 1)
        return True

    def _preempt(self, request: Request) -> None:
        """Give all blocks back and start over later, first in line, keeping the tokens."""
        request.state = "waiting"
        request.computed = 0
        request.registered = 0
        self._waiting.insert(0, request)
        self._emit_request("active_request_preempted", request, blocks=self._release(request))
        self._narrator.flush()

    def _admit_waiting(self, scheduled: list[Request]) -> None:
        while self._waiting:
            request = self._waiting[0]
            hits = self._hits(request)
            answer = decide(self._question(request, hits))
            if answer.outcome is not Outcome.SERVED:
                self._turn_down(request, hits, answer)
                return
            self._waiting.pop(0)
            self._admit(request, hits)
            self._running.append(request)
            scheduled.append(request)

    def _hits(self, request: Request) -> dict[int, str]:
        """The longest cached run from position 0, short of the last token (P5)."""
        found: dict[int, str] = {}
        for key in request.keys[: (len(request.tokens) - 1) // self.config.block_size]:
            block = self._pool.find(key)
            if block is None:
                break
            found[block] = key
        return found

    def _question(self, request: Request, hits: Mapping[int, str]) -> Question:
        end = len(request.tokens)
        missing = self._missing_positions(request, hits, end)
        computes = self._computes(request, missing, end)
        return Question(
            usable=self.config.usable,
            claims={
                entry.spec.claim_id: Owed(
                    covered=frozenset(entry.places.values()),
                    reserve=self._pool.reserve[entry.name],
                    lends=frozenset(self._residency.lends(entry, computes)),
                )
                for entry in self._residency.hard_claims()
            },
            active={
                name: frozenset(blocks)
                for name, blocks in self._pool.held.items()
                if name != request.name
            },
            hits=frozenset(hits),
            need=len(missing),
        )

    def _admit(self, request: Request, hits: Mapping[int, str]) -> None:
        end = len(request.tokens)
        missing = self._missing_positions(request, hits, end)
        self._emit_request(
            "active_request_admitted",
            request,
            hit_blocks=len(hits),
            new_blocks=len(missing),
            free_blocks_before_allocate=self._pool.queue.count,
        )
        request.state, request.outcome = "running", Outcome.PENDING
        request.hits = request.registered = len(hits)
        request.computed = len(hits) * self.config.block_size
        self._allocate(request, hits, missing, self._loans(request, missing, end), end)

    def _allocate(
        self,
        request: Request,
        hits: Mapping[int, str],
        missing: range,
        loans: Mapping[int, str],
        end: int,
    ) -> None:
        """Give a request its hits and a new block for each missing position, up to token `end`."""
        queued = sum(1 for block in hits if block in self._pool.queue)
        grant = len(missing) - len(loans) + queued
        if hits or grant or request.name not in self._pool.held:
            self._ledger.admit(request.name, grant)
        for block, key in hits.items():
            self._ledger.share(request.name, block, key)
        for position in missing:
            block = self._pool.queue.head()
            self._residency.evict(block, request.name)
            if position in loans:
                self._ledger.draw(request.name, loans[position], block)
            else:
                self._ledger.take(request.name, block)
        request.written, request.computed = request.computed, end
        if request.spec.admit_reuse:
            self._register(request)
        self._narrator.flush()

    def _register(self, request: Request) -> None:
        """Make the full blocks visible, as vLLM does: before the step writes them."""
        full = request.computed // self.config.block_size
        blocks = self._pool.held[request.name]
        for position in range(request.registered, full):
            self._ledger.register(request.name, blocks[position], request.keys[position])
        request.registered = max(request.registered, full)

    def _missing_positions(self, request: Request, hits: Iterable[int], end: int) -> range:
        """The positions up to token `end` for which the request has no block yet."""
        have = len(self._pool.held.get(request.name, ())) + len(tuple(hits))
        return range(have, max(have, self._blocks(end)))

    def _computes(self, request: Request, missing: range, end: int) -> dict[str, int]:
        """The contents, not resident yet, that new blocks will hold at token `end`."""
        if not request.spec.admit_reuse:
            return {}
        full = range(missing.start, min(missing.stop, end // self.config.block_size))
        return {request.keys[p]: p for p in full if self._pool.find(request.keys[p]) is None}

    def _loans(self, request: Request, missing: range, end: int) -> dict[int, str]:
        """Missing position → the claim that lends its block (F3)."""
        return self._residency.loans(self._computes(request, missing, end))

    def _turn_down(self, request: Request, hits: Mapping[int, str], answer: Answer) -> None:
        """Tell a request that it waits or is refused; no block changes (F4, F5)."""
        structural = answer.outcome is Outcome.REFUSED
        deferred = answer.outcome is Outcome.DEFERRED or (
            structural and request.deferrals < self.config.defer_limit
        )
        news = structural or answer.waits_on != request.waits_on or not deferred
        if deferred:
            request.outcome = Outcome.DEFERRED
            request.deferrals += structural
            request.waits_on = answer.waits_on or request.waits_on
        else:
            self._waiting.remove(request)
            self._close_request(request, answer.outcome)
            request.shortfall, request.blocking = answer.shortfall, answer.blocking
        if news:
            self._tell_answer(request, hits, answer)
            self._emit_answer(request, answer, deferred=deferred)
        self._narrator.flush()

    def _tell_answer(self, request: Request, hits: Mapping[int, str], answer: Answer) -> None:
        if request.outcome is Outcome.DEFERRED:
            self._ledger.defer(request.name, self._pool.headroom + answer.missing_now)
        elif request.outcome is Outcome.REFUSED:
            promised = sum(self._pool.reserve.values())
            self._ledger.turn_away(request.name, answer.together - answer.protected - promised)
        else:
            missing = self._missing_positions(request, hits, len(request.tokens))
            self._ledger.overflow(request.name, len(hits) + len(missing))

    def _emit_answer(self, request: Request, answer: Answer, *, deferred: bool) -> None:
        label = {
            Outcome.DEFERRED: Feasibility.ACTIVE_ACCUMULATION,
            Outcome.REFUSED: Feasibility.HEADROOM_EXHAUSTED,
            Outcome.CAPACITY_REQUIRED: Feasibility.CAPACITY_INFEASIBLE,
        }[answer.outcome]
        if deferred and answer.blocking:
            label = Feasibility.REQUIRES_DEFERRAL
        active = {b for blocks in self._pool.held.values() for b in blocks}
        self._emit_request(
            "active_request_deferred" if deferred else "active_request_refused",
            request,
            outcome=request.outcome.value,
            feasibility=label.value,
            blocking_claim_ids=list(answer.blocking),
            waits_on=list(answer.waits_on),
            protected_resident_blocks=answer.protected,
            resident_plus_active_blocks=answer.together,
            capacity_shortfall_blocks=answer.shortfall,
            missing_now=answer.missing_now,
            free_blocks_before_allocate=self._pool.queue.count,
            active_live_blocks_required=self._blocks(len(request.tokens)),
            active_live_blocks_current=len(active),
            arbiter_action="none",
        )

    def _append_token(self, request: Request) -> None:
        request.tokens.append(GENERATED_TOKEN)
        if len(request.tokens) % self.config.block_size == 0:
            request.keys = content_ids(
                tuple(request.tokens), self.config.block_size, request.spec.salt
            )

    def _write(self, request: Request) -> None:
        """The KV of this step's tokens reaches memory."""
        size = self.config.block_size
        blocks = self._pool.held[request.name]
        for position in range(request.written // size, self._blocks(request.computed)):
            end = (position + 1) * size
            if end <= request.computed:
                written = request.keys[position]
            else:
                before = request.keys[position - 1] if position else request.spec.salt
                written = f"{before}+{request.tokens[position * size : request.computed]}"
            self._memory[blocks[position]] = written

    def _finish(self, request: Request) -> None:
        self._running.remove(request)
        admits = request.spec.admit_reuse
        full = request.computed // self.config.block_size - request.hits
        self._close_request(request, Outcome.SERVED if admits else Outcome.SERVED_NO_ADMIT)
        self._emit_request(
            "active_request_finished",
            request,
            outcome=request.outcome.value,
            blocks=len(self._pool.held[request.name]),
        )
        kind = "future_reuse_admitted" if admits else "future_reuse_denied"
        self._emit_request(kind, request, blocks=full)
        self._release(request)
        self._narrator.flush()

    def _close_request(self, request: Request, outcome: Outcome) -> None:
        request.state, request.outcome = "finished", outcome

    def _release(self, request: Request) -> int:
        """Give all blocks of a request back (B7); how many it held."""
        blocks = list(self._pool.held.get(request.name, ()))
        for block in self._residency.order_of_return(blocks):
            lender = self._pool.drawn.get(block)
            if lender is not None and self._pool.ref[block] == 1:
                self._ledger.give_back(request.name, lender, block)
            else:
                self._ledger.drop(request.name, block)
        if request.name in self._pool.held:
            self._ledger.retire(request.name)
        return len(blocks)

    # --- what can be asked ------------------------------------------------------------------

    def locate(self, tokens: tuple[int, ...], salt: str = "") -> tuple[int | None, ...]:
        keys = content_ids(tokens, self.config.block_size, salt)
        return tuple(self._pool.find(key) for key in keys)

    def fingerprint(self, blocks: tuple[int, ...]) -> tuple[int, ...]:
        if not all(block in self._pool.ref for block in blocks):
            raise BadOperation("no such block")
        return tuple(_digest(self._memory.get(block, "")) for block in blocks)

    def observe(self) -> Observation:
        return Observation(
            usable=self.config.usable,
            free=self._pool.queue.count,
            headroom=self._pool.headroom,
            claims=self._residency.views(),
            requests={
                name: RequestView(
                    state=request.state,
                    outcome=request.outcome,
                    blocks=tuple(self._pool.held.get(name, ())),
                    hit_blocks=request.hits,
                    shortfall=request.shortfall,
                    blocking_claims=request.blocking,
                )
                for name, request in self._requests.items()
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

    def _blocks(self, tokens: int) -> int:
        """How many blocks that many tokens take."""
        return -(-tokens // self.config.block_size)

    def _emit_request(self, event: str, request: Request, **data: Any) -> None:
        prefix = request.keys[-1] if request.keys else None
        self._narrator.emit(event, request_id=request.name, prefix_id=prefix, **data)


def _digest(written: str) -> int:
    return int.from_bytes(hashlib.sha256(written.encode()).digest()[:8], "big")
