"""Scheduling: which requests compute how many tokens in a step, and what becomes of it.

Start at `Scheduler.dispatch` and `Scheduler.complete`.  It follows vLLM's: running requests
first, one of them preempted when room is short; then waiting requests in order, admitted when
the whole of them fits and computed as far as the step's token budget goes.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from kvclaims.reference.door import Door
from kvclaims.reference.ledger import Ledger
from kvclaims.reference.memory import Chunk, Memory
from kvclaims.reference.narrator import Narrator
from kvclaims.reference.requests import Request, Scheduled
from kvclaims.reference.residency import Residency
from kvclaims.spec.content import GENERATED_TOKEN
from kvclaims.spec.interface import PRIORITY, BadOperation, PoolConfig
from kvclaims.spec.vocabulary import Outcome

REJECTED = -1
"""What a wrong guess leaves in memory."""


class Scheduler:
    """The requests of one pool, and the steps that are under way."""

    def __init__(
        self,
        config: PoolConfig,
        ledger: Ledger,
        residency: Residency,
        narrator: Narrator,
        memory: Memory,
    ) -> None:
        self._config = config
        self._ledger = ledger
        self._pool = ledger.pool
        self._residency = residency
        self._narrator = narrator
        self._memory = memory
        self._door = Door(config, ledger, residency, narrator)
        self.requests: dict[str, Request] = {}
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self.under_way: list[list[Scheduled]] = []
        """Steps dispatched and not complete, the oldest first."""

    # --- coming and going -------------------------------------------------------------------

    def add(self, request: Request) -> None:
        self._ledger.enter(request.name, admit_reuse=request.spec.admit_reuse)
        self.requests[request.name] = request
        self._waiting.append(request)
        self._door.tell(
            "active_request_submitted",
            request,
            admit_reuse=request.spec.admit_reuse,
            active_live_blocks_required=self._door.blocks(len(request.tokens)),
        )

    def abort(self, request: Request) -> None:
        """End a request at once, unless a transfer still writes its blocks (B5)."""
        if request.state == "loading":
            request.state = "ending"
            return
        (self._running if request.state == "running" else self._waiting).remove(request)
        self._end_aborted(request)

    def _end_aborted(self, request: Request) -> None:
        request.state, request.outcome = "finished", Outcome.ABORTED
        self._door.tell("active_request_aborted", request, blocks=self._release(request))
        self._narrator.flush()

    def load(self, request: Request, blocks: int) -> None:
        """The transfer of a request ends: its first `blocks` arrived, the rest did not (O2)."""
        if blocks > request.loads:
            raise BadOperation(f"request {request.name!r} loads {request.loads} blocks")
        table = self._pool.held[request.name]
        for position in range(request.hits, request.hits + blocks):
            self._memory.load(table[position], request.keys[position])
        self._door.tell("external_load_finished", request, blocks=request.loads, loaded=blocks)
        if request.state == "ending":
            self._end_aborted(request)
            return
        request.state = "running"
        request.computed = request.written = (request.hits + blocks) * self._config.block_size
        self._register(request)
        self._running.append(request)
        self._residency.cover_written()
        self._narrator.flush()

    # --- a step begins ----------------------------------------------------------------------

    def dispatch(self) -> None:
        """Grow the running, admit the waiting, and start to compute."""
        scheduled: dict[str, Scheduled] = {}
        budget = self._config.token_budget or sys.maxsize
        budget, preempted = self._grow_running(scheduled, budget)
        if not preempted:
            self._admit_waiting(scheduled, budget)
        self.under_way.append(list(scheduled.values()))

    def _grow_running(self, scheduled: dict[str, Scheduled], budget: int) -> tuple[int, bool]:
        """Room for what each running request computes next; what is left of the budget, and
        whether one had to be preempted."""
        preempted = False
        for request in tuple(self._running):
            new = min(self._next_tokens(request), budget)
            if new == 0 or request not in self._running:
                continue  # nothing to compute for it, or it gave way in this step
            while not self._fits(request, new):
                victim = self._victim()
                preempted = True
                budget += self._preempt(victim, scheduled)
                if victim is request:
                    return budget, True
            self._schedule(request, new, scheduled)
            budget -= new
        return budget, preempted

    def _next_tokens(self, request: Request) -> int:
        """Tokens known or on their way that have no KV, and the drafts after them."""
        if len(request.tokens) + request.pending >= request.last:
            return 0
        known = len(request.tokens) + request.pending - request.computed
        return known + (self._config.drafts if request.has_drafts else 0)

    def _fits(self, request: Request, new: int) -> bool:
        end = request.computed + new
        missing = self._door.missing_positions(request, (), end)
        return len(missing) - len(self._door.loans(request, missing)) <= self._pool.headroom

    def _victim(self) -> Request:
        """Who gives way: the last one that came, or the one of least rank."""
        if self._config.policy == PRIORITY:
            return max(self._running, key=lambda r: r.rank)
        return self._running[-1]

    def _preempt(self, request: Request, scheduled: dict[str, Scheduled]) -> int:
        """Give all blocks back and start over later, first in line, keeping the tokens.

        Tokens it was scheduled for in this very step are free again (their number); what was
        made visible for them will never be written, and goes (B4).
        """
        own = scheduled.pop(request.name, None)
        self._running.remove(request)
        self._start_over(request)
        self._waiting.insert(0, request)
        self._door.tell("active_request_preempted", request, blocks=self._release(request))
        for block, key in own.fresh if own else ():
            if self._pool.key.get(block) == key:
                self._residency.evict(block, request.name, "never_written")
        self._narrator.flush()
        return own.end - own.start if own else 0

    def _start_over(self, request: Request) -> None:
        request.state = "waiting"
        request.life = object()
        request.pending = 0
        request.has_drafts = False

    def _admit_waiting(self, scheduled: dict[str, Scheduled], budget: int) -> None:
        while self._waiting and budget > 0:
            request = self._head()
            hits = self._door.hits(request)
            loads = self._door.loads(request, len(hits))
            if loads and self.under_way:
                return  # a step under way may still write what is free by now (B5)
            answer = self._door.ask(request, hits)
            if answer.outcome is not Outcome.SERVED:
                if self._door.turn_down(request, hits, answer):
                    self._waiting.remove(request)
                return
            self._waiting.remove(request)
            budget -= self._admit(request, hits, loads, scheduled, budget)

    def _head(self) -> Request:
        if self._config.policy == PRIORITY:
            return min(self._waiting, key=lambda r: r.rank)
        return self._waiting[0]

    def _admit(
        self,
        request: Request,
        hits: Mapping[int, str],
        loads: int,
        scheduled: dict[str, Scheduled],
        budget: int,
    ) -> int:
        """Give a request its hits and blocks for what it computes now; how many tokens that is.

        A request that loads gets all its blocks at once: what waits for a transfer must not
        wait for room as well (V3).
        """
        whole, size = len(request.tokens), self._config.block_size
        request.computed = request.written = len(hits) * size
        self._door.tell(
            "active_request_admitted",
            request,
            hit_blocks=len(hits),
            new_blocks=self._door.blocks(whole) - len(hits),
            free_blocks_before_allocate=self._pool.queue.count,
        )
        request.state, request.outcome = "running", Outcome.PENDING
        request.hits = request.registered = len(hits)
        request.loads = loads
        if loads:
            request.state = "loading"
            self._take_room(request, hits, whole)
            self._narrator.flush()
            self._door.tell("external_load_started", request, blocks=loads)
            return 0
        self._running.append(request)
        new = min(whole - request.computed, budget)
        self._schedule(request, new, scheduled, hits)
        return new

    def _schedule(
        self,
        request: Request,
        new: int,
        scheduled: dict[str, Scheduled],
        hits: Mapping[int, str] | None = None,
    ) -> None:
        """Room for `new` tokens more, what they fill made visible, and a place in the step."""
        start, end = request.computed, request.computed + new
        self._take_room(request, hits or {}, end)
        ahead = len(request.tokens) + request.pending
        one = Scheduled(
            request,
            start,
            end,
            tuple(self._pool.held[request.name]),
            samples=end >= ahead,
            life=request.life,
            drafts=max(0, end - ahead),
        )
        request.computed = end
        request.pending += one.samples
        one.fresh = self._register(request)
        self._narrator.flush()
        scheduled[request.name] = one

    def _take_room(self, request: Request, hits: Mapping[int, str], end: int) -> None:
        """The hits, and a new block for each missing position up to token `end`."""
        missing = self._door.missing_positions(request, hits, end)
        loans = self._door.loans(request, missing)
        queued = sum(1 for block in hits if block in self._pool.queue)
        grant = len(missing) - len(loans) + queued
        if grant or request.name not in self._pool.held:
            self._ledger.admit(request.name, grant)
        for block, key in hits.items():
            self._ledger.share(request.name, block, key)
        self._residency.spare(len(missing))
        for position in missing:
            block = self._pool.queue.head()
            self._residency.evict(block, request.name)
            self._memory.hand_out(block)
            if position in loans:
                self._residency.lend(request.name, loans[position], block, request.keys[position])
            else:
                self._ledger.take(request.name, block)
        if missing:
            self._tell_table(request)

    def _tell_table(self, request: Request) -> None:
        table = self._pool.held[request.name]
        lenders = ((self._pool.drawn.get(block), block) for block in table)
        lent = [[c.rpartition("#")[0], block] for c, block in lenders if c is not None]
        self._door.tell("active_request_blocks", request, blocks=list(table), lent=lent)

    def _register(self, request: Request) -> list[tuple[int, str]]:
        """Make the full blocks visible, as vLLM does: before the step writes them.  Tokens that
        are guesses or not known yet name nothing."""
        if not request.spec.admit_reuse:
            return []
        full = min(request.computed, len(request.tokens)) // self._config.block_size
        blocks = self._pool.held[request.name]
        fresh = [(blocks[p], request.keys[p]) for p in range(request.registered, full)]
        for block, key in fresh:
            self._ledger.register(request.name, block, key)
        request.registered = max(request.registered, full)
        return fresh

    # --- a step ends ------------------------------------------------------------------------

    def complete(self) -> None:
        """The oldest step is over: write, learn the tokens, finish, cover."""
        step = self.under_way.pop(0)
        for one in step:
            self._write(one)
        for one in step:
            if one.counts:
                self._learn(one)
                if one.request.is_done:
                    self._finish(one.request)
        self._residency.cover_written()
        self._narrator.flush()

    def _write(self, one: Scheduled) -> None:
        """The KV of the step's tokens reaches the blocks that it began with, whatever became of
        the request since."""
        right = one.end - one.drafts + self._right_guesses(one)
        missing = max(0, right - len(one.request.tokens))
        tokens = one.request.tokens[:right] + [GENERATED_TOKEN] * missing
        tokens += [REJECTED] * one.drafts
        keys, domain = one.request.keys, one.request.spec.domain
        if len(keys) < right // self._config.block_size:
            keys = one.request.keys_of(tokens[:right], self._config.block_size)
        self._memory.write(Chunk(one.start, one.end, tokens, keys, domain, one.blocks))

    def _right_guesses(self, one: Scheduled) -> int:
        return min(one.request.spec.accepts, one.drafts)

    def _learn(self, one: Scheduled) -> None:
        """Sampled tokens are known now, wrong guesses are taken back."""
        request, size = one.request, self._config.block_size
        right = self._right_guesses(one)
        request.written = one.end - one.drafts + right
        request.computed -= one.drafts - right
        if not one.samples:
            return
        request.pending -= 1
        request.append(1 + right, size)
        request.has_drafts = True
        if self._config.in_flight > 1:
            self._register(request)

    def _finish(self, request: Request) -> None:
        self._running.remove(request)
        admits = request.spec.admit_reuse
        full = min(request.computed, len(request.tokens)) // self._config.block_size - request.hits
        request.state = "finished"
        request.outcome = Outcome.SERVED if admits else Outcome.SERVED_NO_ADMIT
        held = self._pool.held[request.name]
        self._door.tell(
            "active_request_finished",
            request,
            outcome=request.outcome.value,
            blocks=len(held),
        )
        kind = "future_reuse_admitted" if admits else "future_reuse_denied"
        self._door.tell(kind, request, blocks=full)
        self._release(request)
        self._narrator.flush()

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
