"""A small scheduler over SGLang's pool: which requests compute in a step, and what it keeps.

It calls SGLang's objects in the order in which SGLang's scheduler does: look the prefix up, lock
it, evict if the allocator has too few slots, allocate, fill the row; then, once the KV is written,
`cache_unfinished_req` or `cache_finished_req`.  What is its own:

- admission (F3, F4): a request enters if all of it fits beside what is locked and promised, where
  SGLang also keeps room for tokens that running requests may still decode;
- it evicts for the slots that are missing, where SGLang asks for as many as it allocates.  Either
  way SGLang drops whole leaves of the tree, so more may go than is needed: what is dropped and not
  reused is told as a victim with the reason `dropped_with_its_leaf`;
- two requests that would compute the same prefix do not begin in the same step;
- a request without reuse (P4) ends as SGLang retracts one: its slots are freed, nothing inserted;
  so does one that is aborted.

Start at `RadixScheduler.step`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvclaims.bridge.sglang.jobs import Job
from kvclaims.bridge.sglang.residency import Residency
from kvclaims.bridge.vllm.requests import Blocked, RequestLog
from kvclaims.spec.content import fingerprint
from kvclaims.spec.feasibility import Situation, judge
from kvclaims.spec.vocabulary import Outcome

_GARBAGE: Final = fingerprint("garbage")


@dataclass(frozen=True)
class _Visit:
    """A waiting request at the door: its hits, the node they end at, and what it needs beyond."""

    job: Job
    match: Any
    hits: tuple[int, ...]

    @property
    def need(self) -> int:
        return len(self.job.tokens) - len(self.hits)


class RadixScheduler:
    """The requests of one pool.  First come, first served; the last to come gives way."""

    def __init__(self, residency: Residency, log: RequestLog, usable: int) -> None:
        self._residency = residency
        self._pool = residency.pool
        self._tell = residency.teller.tell
        self._log = log
        self._usable = usable
        self.jobs: dict[str, Job] = {}
        self._waiting: list[Job] = []
        self._running: list[Job] = []

    # -- coming and going ------------------------------------------------------------------------

    def add(self, job: Job) -> None:
        self.jobs[job.name] = job
        self._waiting.append(job)
        self._log.arrived(job.record, len(job.tokens))

    def abort(self, job: Job) -> None:
        """A request ends at once and leaves nothing that was not visible before."""
        with self._residency.teller.operation():
            self._log.aborted(job.record, job.length)
            if job in self._waiting:
                self._waiting.remove(job)
            else:
                self._running.remove(job)
                self._retract(job)

    def blocks(self, job: Job) -> tuple[int, ...]:
        """The slots of a request in its row of SGLang's table."""
        index = job.request.req_pool_idx
        return () if index is None else tuple(self._pool.row(index, job.length))

    def holders(self) -> dict[str, tuple[int, ...]]:
        """The slots of every request that was admitted, in this step too."""
        jobs = (job for job in self.jobs.values() if job.request.req_pool_idx is not None)
        return {job.name: self.blocks(job) for job in jobs}

    # -- a step ----------------------------------------------------------------------------------

    def step(self) -> None:
        """Room for what runs and for what comes in, the forward pass, and its results."""
        with self._residency.teller.operation():
            preempted = self._make_room()
            decoding = list(self._running)
            self._grow(decoding)
            admitted = [] if preempted else self._admit_waiting()
            for job in (*decoding, *admitted):
                self._compute(job)
            for job in admitted:
                self._prefilled(job)
            for job in decoding:
                self._decoded(job)
            self._residency.cover_written()

    def _make_room(self) -> bool:
        """Preempt until every running request has a slot for its next token."""
        preempted = False
        while self._running and self._growth() > self._residency.headroom():
            job = self._running.pop()
            self._waiting.insert(0, job)
            self._log.preempted(job.record, job.length)
            self._retract(job)
            job.start_over()
            preempted = True
        return preempted

    def _growth(self) -> int:
        """Slots that the running requests together take from the headroom now."""
        loans = [(lender, job.keys[-1]) for job in self._running for lender in self._lender(job)]
        return len(self._running) - len(set(loans))

    def _lender(self, job: Job) -> list[str]:
        """The claim that lends the slot of the next token, if any."""
        return list(self._draws(job, job.length).values())

    def _grow(self, jobs: Sequence[Job]) -> None:
        """One slot for each running request, allocated together."""
        slots = self._residency.allocate([job.name for job in jobs]) if jobs else []
        for job, slot in zip(jobs, slots, strict=True):
            lenders = self._draws(job, job.length)
            if not lenders:
                self._tell("admit", r=job.name, n=1)
            self._append(job, [slot], lenders)

    def _append(self, job: Job, slots: Sequence[int], lenders: Mapping[int, str]) -> None:
        """Put new slots into the row of a request, each granted to it or on a claim's reserve."""
        start, keys, row = job.length, job.keys, job.request.req_pool_idx
        assert row is not None, "a request without a row has not been admitted"
        for position, slot in enumerate(slots, start):
            self._residency.take(job.name, slot, keys[position], lenders.get(position))
        self._pool.write_row(row, start, slots)
        job.length += len(slots)
        table = list(self.blocks(job))
        self._log.grew(job.record, table, self._residency.book.lent(table))

    def _draws(self, job: Job, first: int) -> dict[int, str]:
        """Position → the claim on whose reserve the request computes what comes there."""
        return self._residency.draws(job.keys, first) if job.spec.admit_reuse else {}

    # -- the door --------------------------------------------------------------------------------

    def _admit_waiting(self) -> list[Job]:
        admitted: list[Job] = []
        while self._waiting and self._pool.rows.available_size():
            visit = self._visit(self._waiting[0])
            if self._waits_for_prefix(visit, admitted) or not self._answer(visit):
                break
            admitted.append(self._waiting.pop(0))
            self._admit(visit)
        self._running += admitted
        return admitted

    def _visit(self, job: Job) -> _Visit:
        """Look the prefix up, short of the last token, which has to be computed."""
        match = self._pool.tree.match_prefix(job.tokens[:-1])
        return _Visit(job, match, tuple(match.device_indices.tolist()))

    def _waits_for_prefix(self, visit: _Visit, admitted: Sequence[Job]) -> bool:
        """Whether one that begins in this step computes what this request could hit in the next."""
        place = len(visit.hits)
        mine = visit.job.keys[place]
        return visit.job.spec.admit_reuse and any(
            job.spec.admit_reuse and mine in job.keys[place : place + 1] for job in admitted
        )

    def _answer(self, visit: _Visit) -> bool:
        """Whether the request is admitted; if not, it is told why (F4) and may have ended."""
        job, record, blocked = visit.job, visit.job.record, self._judged(visit)
        if blocked.judgement.outcome is Outcome.SERVED:
            return True
        order = {name: claim.order for name, claim in self._residency.book.claims.items()}
        if self._log.judged(record, blocked, order):
            self._tell_verdict(job, blocked)
            if record.state == "finished":
                self._waiting.remove(job)
        return False

    def _judged(self, visit: _Visit) -> Blocked:
        job, first = visit.job, len(visit.hits)
        admits = job.spec.admit_reuse
        situation = Situation(
            usable=self._usable,
            promises=self._residency.book.promises(),
            active={name: frozenset(slots) for name, slots in self.holders().items()},
            need=visit.need,
            holds=frozenset(visit.hits),
            materializes=self._residency.wanted_by(job.keys, first) if admits else {},
        )
        drawn = len(self._draws(job, first))
        free = self._pool.counter()
        return Blocked(job, situation, judge(situation), free, drawn, visit.hits)

    def _tell_verdict(self, job: Job, blocked: Blocked) -> None:
        """The machine's `n` is what the request lacks of what its guard speaks of."""
        situation, outcome = blocked.situation, job.record.outcome
        if outcome is Outcome.DEFERRED:
            queued = self._queued(blocked.hits)
            self._tell("defer", r=job.name, n=situation.need + queued - blocked.drawn)
        elif outcome is Outcome.REFUSED:
            beyond = len(situation.holds - blocked.protected) + situation.need - blocked.drawn
            self._tell("turn_away", r=job.name, n=beyond)
        else:
            self._tell("overflow", r=job.name, n=len(situation.holds) + situation.need)

    def _queued(self, slots: Sequence[int]) -> int:
        return sum(facts.queued for facts in self._pool.facts(slots).values())

    def _admit(self, visit: _Visit) -> None:
        """Lock the hits, then evict and allocate for the rest."""
        job, request = visit.job, visit.job.request
        lenders = self._draws(job, len(visit.hits))
        grant = visit.need - len(lenders) + self._queued(visit.hits)
        self._log.admitted(job.record, len(visit.hits), visit.need, self._pool.counter())
        self._tell("admit", r=job.name, n=grant)
        request.fill_ids = job.tokens
        request.prefix_indices = visit.match.device_indices
        request.last_node = visit.match.last_device_node
        self._pool.tree.inc_lock_ref(request.last_node)
        request.req_pool_idx = self._pool.new_row(visit.hits)
        job.length = job.written = len(visit.hits)
        for slot, key in zip(visit.hits, job.keys, strict=False):
            self._tell("share", r=job.name, b=slot, k=key)
        slots = self._residency.allocate([job.name] * visit.need)
        self._append(job, slots, lenders)

    # -- the forward pass and its results --------------------------------------------------------

    def _compute(self, job: Job) -> None:
        """Write the KV of the tokens that have none.  What is computed from a memory that does not
        hold the tokens before is garbage."""
        slots, names = self.blocks(job), [fingerprint(key) for key in job.keys[: job.length]]
        start = job.written
        reads_right = self._pool.read(slots[:start]) == names[:start]
        fresh = names[start:] if reads_right else [_GARBAGE] * (job.length - start)
        self._pool.write(slots[start:], fresh)
        job.written = job.length

    def _prefilled(self, job: Job) -> None:
        job.sampled()
        if job.is_done:
            self._finish(job)
        elif job.spec.admit_reuse:
            self._keep(job)

    def _decoded(self, job: Job) -> None:
        job.sampled()
        if job.is_done:
            self._finish(job)

    def _keep(self, job: Job) -> None:
        """SGLang takes a prefilled prompt into its tree.  Where the tree has a token already, the
        request goes on with the tree's slot and its own is freed."""
        own = self.blocks(job)
        self._pool.tree.cache_unfinished_req(job.request)
        self._residency.registered(job.name, job.keys)
        now = self.blocks(job)
        for position, (old, new) in enumerate(zip(own, now, strict=True)):
            if old != new:
                self._residency.release(job.name, [old])
                if self._residency.ref(new) == 1:
                    self._tell("admit", r=job.name, n=1)
                self._tell("share", r=job.name, b=new, k=job.keys[position])

    def _finish(self, job: Job) -> None:
        slots, record = self.blocks(job), job.record
        record.prefix_id = job.keys[-1]
        self._running.remove(job)
        self._log.finished(record, len(slots), len(slots) - record.hit_blocks)
        if not job.spec.admit_reuse:
            self._retract(job)
            return
        self._pool.tree.cache_finished_req(job.request)
        self._residency.registered(job.name, job.keys)
        self._gave_back(job, slots)

    def _retract(self, job: Job) -> None:
        """As SGLang retracts a request: what is not in the tree is freed, the lock is let go of."""
        slots, request = self.blocks(job), job.request
        self._pool.free(slots[len(request.prefix_indices) :])
        self._pool.rows.free(request.req_pool_idx)
        self._pool.tree.dec_lock_ref(request.last_node)
        self._gave_back(job, slots)

    def _gave_back(self, job: Job, slots: Sequence[int]) -> None:
        job.request.req_pool_idx, job.length, job.written = None, 0, 0
        self._residency.release(job.name, slots)
        self._tell("retire", r=job.name)
