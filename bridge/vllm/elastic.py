"""Elastic capacity in a live vLLM: the reserve is lent while batches only decode (E1 to E5).

`ElasticController` wraps `schedule` and `update_from_output` of one scheduler.  It looks at the
next batch before it is made: decode-only, and the tail of the KV is lent to the pool; a prefill
in it, and the tail comes home first.  Policy of a return, in this order, bounded by what there is:

1. blocks of running requests are *moved* to free blocks of the base that nothing is owed;
2. where the base has no room, the last running request that holds a lent block is preempted;
3. cached blocks that nobody holds are *dropped*, or *moved* where a hard claim wants them;
4. steps in flight are *waited for*: a return is put off, and meanwhile no prefill is admitted.

Hard claims count on the base alone: they never see a lent block, and nothing is lent while one
is still owed blocks.  While lent, vLLM admits nothing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from itertools import takewhile
from typing import Any, Final

from vllm.v1.core.sched.interface import PauseState

from kvclaims.bridge.vllm.observer import UNNAMED, PoolObserver, attach
from kvclaims.bridge.vllm.placement import Placement
from kvclaims.bridge.vmm.blocks import StillRead
from kvclaims.bridge.vmm.driver import DriverError
from kvclaims.bridge.vmm.memory import ElasticMemory, Mode
from kvclaims.spec.interface import BadOperation, ClaimAnswer, ClaimSpec, PoolStep
from kvclaims.spec.vocabulary import Protection

_TAKES: Final = ("take", "draw", "share")
_LEAVES: Final = ("drop", "give_back")


class Policy(StrEnum):
    """What becomes of the reserve."""

    STATIC = "static"
    """It stays with the activations."""
    ELASTIC = "elastic"
    """It is lent while batches only decode."""
    COMMITTED = "committed"
    """It is KV for good: a prompt that needs more activations than are left is refused, visibly, a
    batch is no larger than they allow, and no hard claim is taken."""


class ElasticController:
    """Elastic capacity on one scheduler whose blocks are those of `placement.memory`.

    `counts` says what happened: returns put off, blocks dropped and moved, requests preempted
    or refused.  `scribble` writes over the activations in every prefill, as a device would.
    """

    def __init__(
        self,
        scheduler: Any,
        placement: Placement,
        enforcer: Any = None,
        *,
        policy: Policy = Policy.ELASTIC,
        scribble: bool = True,
        most_chunk: int | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.placement = placement
        self.memory: ElasticMemory = placement.memory
        self.policy = policy
        self.lent = self.memory.shape.lent
        self.counts: Counter[str] = Counter()
        self._enforcer = enforcer
        self._scribble = scribble
        self._most_chunk = most_chunk
        self._pool = scheduler.kv_cache_manager.block_pool
        self._observer: PoolObserver = (
            attach(scheduler, self._heard) if enforcer is None else enforcer.observer
        )
        self._holders: Counter[int] = Counter()
        self._used: set[int] = set()
        """Lent blocks that were taken since they were listed, for the log."""
        self._flying: dict[int, tuple[int, ...]] = {}
        self._step = 0
        self._declined: tuple[str, frozenset[str]] | None = None
        """The request that was told to wait, and the others that ran then."""
        self.memory.tenants = self
        self._grip()

    def close(self) -> None:
        """Bring the reserve home and take the engine's own tensors back."""
        self.memory.return_()
        self.placement.restore()
        self.memory.close()

    # -- gripping the live objects -------------------------------------------------------------

    def _grip(self) -> None:
        scheduler = self.scheduler
        schedule, update = scheduler.schedule, scheduler.update_from_output

        def scheduled(*args: Any, **kwargs: Any) -> Any:
            with self._ahead():
                output = schedule(*args, **kwargs)
            self._leaves(output)
            return output

        def updated(*args: Any, **kwargs: Any) -> Any:
            outputs = update(*args, **kwargs)
            self._arrived()
            return outputs

        scheduler.schedule = scheduled
        scheduler.update_from_output = updated
        if self._enforcer is not None:
            self._observer.listen(self._heard)
            self._enforcer.queue_length = self.base_free
            self._enforcer.lookup = self._lookup(self._enforcer.lookup)
            self._enforcer.declare = self._declare(self._enforcer.declare)
            self._enforcer.end_claim = self._anew(self._enforcer.end_claim)
            self._enforcer.advance = self._anew(self._enforcer.advance)

    def _lookup(self, inner: Any) -> Any:
        """Hard claims see no lent block (E3): a copy in the base, or none."""

        def lookup(key: str, only: int | None = None) -> int | None:
            found = inner(key, None if only in self.lent else only)
            if found not in self.lent:
                return found  # type: ignore[no-any-return]
            copies = self._observer.where.get(key, ())
            return next((b for b in copies if b not in self.lent), None)

        return lookup

    def _declare(self, inner: Any) -> Any:
        """What a new hard claim wants and a lent block has is moved to the base at once."""

        def declare(spec: ClaimSpec) -> ClaimAnswer:
            if self.policy is Policy.COMMITTED and spec.protection is Protection.HARD:
                raise BadOperation("over-committed memory keeps no hard claims")
            self._declined = None
            answer: ClaimAnswer = inner(spec)
            if answer.granted is not None:
                for block in list(self.lent):
                    if self._wanted(block) and self._room() > 0:
                        self._move(block)
            return answer

        return declare

    def _anew(self, inner: Any) -> Any:
        """Where claims may have changed, whoever waits is judged anew."""

        def changed(*args: Any) -> Any:
            self._declined = None
            return inner(*args)

        return changed

    # -- the pool's true size ------------------------------------------------------------------

    def base_free(self) -> int:
        """Free blocks that are always there."""
        return self._queued() - sum(self._in_queue(b) for b in self.lent)

    def _queued(self) -> int:
        return int(self._pool.free_block_queue.num_free_blocks)

    def _in_queue(self, block: int) -> bool:
        return self._pool.blocks[block].next_free_block is not None

    def _resize(self) -> None:
        """vLLM's usage, reset and limits count what is mapped, and the null block."""
        self._pool.num_gpu_blocks = 1 + self.memory.usable_blocks

    def _room(self) -> int:
        """Base blocks that may be taken without breaking a promise."""
        owed = 0 if self._enforcer is None else self._enforcer.book.owed
        return self.base_free() - owed

    # -- one step ahead ------------------------------------------------------------------------

    @contextmanager
    def _ahead(self) -> Iterator[None]:
        """Before the next batch is made: lend or return, and admit only what may be admitted."""
        self._refuse_oversized()
        prefill = self._prefill_next()
        if self.policy is Policy.COMMITTED:
            self._lend()
        elif prefill or self._must_be_home():
            if prefill and self.memory.mode is not Mode.HOME:
                self.memory.need()
            self._home()
        else:
            self._lend()
        scheduler = self.scheduler
        state, budget = scheduler._pause_state, scheduler.max_num_scheduled_tokens
        scheduler._pause_state = max(state, self._gate())
        scheduler.max_num_scheduled_tokens = self._budget(budget)
        try:
            yield
        finally:
            scheduler._pause_state, scheduler.max_num_scheduled_tokens = state, budget

    def _budget(self, tokens: int) -> int:
        """Tokens of the next batch: over-committed, no more than there are activations for."""
        if self.policy is Policy.COMMITTED and self._most_chunk is not None:
            return min(tokens, self._most_chunk)
        return tokens

    def _gate(self) -> PauseState:
        """What vLLM may schedule: prefills only with the reserve at home (E1)."""
        if self.policy is Policy.COMMITTED or self.memory.mode is Mode.HOME:
            return PauseState.UNPAUSED
        if any(map(_prefills, self.scheduler.running)):
            return PauseState.PAUSED_ALL  # a return is put off while a prompt is half way
        return PauseState.PAUSED_NEW

    def _prefill_next(self) -> bool:
        """Whether the next batch has a prefill in it, unless what waits was just declined."""
        scheduler = self.scheduler
        if any(map(_prefills, scheduler.running)):
            return True
        head = next(iter(scheduler.waiting), None)
        if head is None:
            return False
        told = self._declined == (head.request_id, self._running())
        return not told or not scheduler.running or self._fits(head)

    def _running(self) -> frozenset[str]:
        return frozenset(request.request_id for request in self.scheduler.running)

    def _fits(self, request: Any) -> bool:
        """Whether the base has room for the request's next chunk beside what is promised and
        what a return brings into it."""
        names, where = self._observer.names, self._observer.where
        size = names.block_size
        keys = names.of_request(request)[: (request.num_tokens - 1) // size]
        hits = list(takewhile(lambda key: any(map(self._stays, where.get(key, ()))), keys))
        idle = sum(not any(self._real(b).ref_cnt for b in where[key]) for key in hits)
        left = request.num_tokens - len(hits) * size
        chunk = min(left, self.scheduler.max_num_scheduled_tokens)
        comes = sum(self._real(b).ref_cnt > 0 for b in self.lent)
        return bool(-(-chunk // size) + idle + comes <= self._room())

    def _stays(self, block: int) -> bool:
        """Whether what the block keeps survives a return."""
        return block not in self.lent or self._real(block).ref_cnt > 0

    def _must_be_home(self) -> bool:
        owed = self._enforcer is not None and self._enforcer.book.owed > 0
        return self.policy is Policy.STATIC or owed or not self.scheduler.running

    def _refuse_oversized(self) -> None:
        """Over-committed: a chunk whose activations have no memory is refused, not run."""
        from vllm.v1.request import RequestStatus

        if self.policy is not Policy.COMMITTED or self._most_chunk is None:
            return
        budget = self.scheduler.max_num_scheduled_tokens
        for request in list(self.scheduler.waiting):
            if min(request.num_tokens, budget) > self._most_chunk:
                self.counts["refused for lack of activations"] += 1
                self.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ERROR)

    def _lend(self) -> None:
        if self.memory.needed:
            self._no_longer_needed()
        if self.memory.mode is Mode.LENT or self.memory.needed:
            return
        try:
            self.memory.lend()
        except DriverError:
            self.counts["lends refused by the driver"] += 1

    def _no_longer_needed(self) -> None:
        """Whoever needed the reserve waits for blocks, or is gone: to the memory, a prefill step of
        nothing.  Where the reserve is not home yet, that comes first."""
        if self.memory.mode is not Mode.HOME:
            self._home()
        if self.memory.mode is Mode.HOME:
            self.memory.start_prefill()
            self.memory.end_prefill()

    def _home(self) -> None:
        try:
            self.memory.return_()
        except StillRead:
            self.counts["returns put off for steps in flight"] += 1
        except DriverError:
            self.counts["returns refused by the driver"] += 1
        self._resize()

    # -- steps leave and arrive ----------------------------------------------------------------

    def _leaves(self, output: Any) -> None:
        """A batch was made: it starts its prefill at home, or touches lent blocks."""
        self._step += 1
        self._note_declined(output)
        scheduled = output.num_scheduled_tokens
        if not scheduled:
            return
        resumed = getattr(output.scheduled_cached_reqs, "resumed_req_ids", ())
        if output.scheduled_new_reqs or resumed or max(scheduled.values()) > 1:
            self._start_prefill()
        touched = sorted({b for r in scheduled for b in self._table(r) if b in self.lent})
        self._flying[self._step] = tuple(touched)
        for block in touched:
            self.memory.told("touch", {"j": self._step, "b": block})

    def _start_prefill(self) -> None:
        if self.policy is Policy.COMMITTED:
            self.counts["prefills without a reserve"] += 1
            return
        self.memory.start_prefill()
        if self._scribble:
            self.placement.scribble()

    def _arrived(self) -> None:
        """The oldest step in flight has ended."""
        if self.memory.in_prefill:
            self.memory.end_prefill()
        if self._flying:
            step, blocks = next(iter(self._flying.items()))
            del self._flying[step]
            for block in blocks:
                self.memory.told("done", {"j": step, "b": block})
        idle = not self.scheduler.running and not len(self.scheduler.waiting)
        if idle and self.policy is not Policy.COMMITTED:
            self._home()  # what comes next is a prefill, and it need not wait for this

    def _note_declined(self, output: Any) -> None:
        """Remember what vLLM did not admit at home: it is tried again when more is free."""
        if self.memory.mode is not Mode.HOME:
            return
        head = next(iter(self.scheduler.waiting), None)
        admitted = bool(output.scheduled_new_reqs)
        if head is None or admitted or not self._congested(head):
            self._declined = None
        else:
            self._declined = (head.request_id, self._running())

    def _congested(self, request: Any) -> bool:
        """Whether the request waits for other requests alone, not for a verdict on claims."""
        if self._enforcer is None:
            return True
        records = self._enforcer.requests.records
        record = records.get(self._enforcer.alias(request.request_id))
        return record is not None and bool(record.told_waits_on)

    def _table(self, request_id: str) -> list[int]:
        groups = self.scheduler.kv_cache_manager.get_block_ids(request_id)
        return [block for group in groups for block in group]

    # -- what a return asks (Tenants) ----------------------------------------------------------

    def open(self) -> None:
        """Blank blocks enter the pool at its head: they are taken first, cached content last."""
        self._resize()
        if self.memory.needed:
            return
        fresh = [b for b in self.lent if not self._in_queue(b) and not self._pool.blocks[b].ref_cnt]
        self._pool.free_block_queue.prepend_n([self._pool.blocks[b] for b in fresh])
        for block in fresh:
            self.memory.told("list", {"b": block})

    def fence(self) -> None:
        """Lent blocks leave the pool's queue, and come back to it no more."""
        for block in self.lent:
            if self._in_queue(block):
                self._pool.free_block_queue.remove(self._pool.blocks[block])

    def drain(self) -> None:
        self.fence()
        self._empty_held()  # whoever gives way leaves cached blocks
        for block in self.lent:
            if self._real(block).ref_cnt == 0 and self._keys(block):
                self._drop_or_move(block)
        self.placement.scrub(self.lent)
        if self.in_use():
            return  # a step in flight; the wait says so
        for block in sorted(self._used):
            self.memory.told("drain", {"b": block})
        self._used.clear()
        self._holders.clear()

    def wait(self) -> None:
        if any(self._flying.values()):
            raise StillRead("a step in flight touches a lent block")

    def in_use(self) -> bool:
        held = any(self._real(b).ref_cnt or self._keys(b) or self._in_queue(b) for b in self.lent)
        return held or any(self._flying.values()) or self.placement.names(self.lent)

    def _real(self, block: int) -> Any:
        return self._pool.blocks[block]

    def _keys(self, block: int) -> list[str]:
        return list(self._observer.keys.get(block, {}).values())

    def _drop_or_move(self, block: int) -> None:
        if self._wanted(block) and self._room() > 0:
            self._move(block)
        else:
            with self._observer.by_choice():
                self._pool.evict_blocks({block})
            self.counts["dropped"] += 1

    def _wanted(self, block: int) -> bool:
        """Whether an accepted hard claim waits for content that the block has."""
        if self._enforcer is None:
            return False
        return any(self._enforcer.book.wants(key) for key in self._keys(block))

    def _empty_held(self) -> None:
        """Move what requests hold; preempt, the last to run first, where there is no room."""
        if any(self._flying.values()):
            return
        for block in self.lent:
            while self._real(block).ref_cnt:
                if self._room() > 0:
                    self._move(block)
                else:
                    self._preempt()
                self.fence()

    def _preempt(self) -> None:
        lent = set(self.lent)
        running = self.scheduler.running
        victim = next(r for r in reversed(running) if lent & set(self._table(r.request_id)))
        running.remove(victim)
        with self._observer.operation():
            self.scheduler._preempt_request(victim, time.monotonic())
            self.fence()
        # It may be resumed in the very next batch, which must then carry all of its tokens.
        self.scheduler.prev_step_scheduled_req_ids.discard(victim.request_id)
        self.counts["preempted"] += 1

    def _move(self, block: int) -> None:
        """Another block of the base takes the place of a lent one, in every table and lookup."""
        holders = self._holding(self._real(block))
        written = self._enforcer is None or self._enforcer.is_written(block)
        keys = self._keys(block)
        with self._observer.operation():
            new = self._copied(block, holders)
            if self.memory.mode is not Mode.LENT:
                self.fence()
        self.counts["moved"] += 1
        if self._enforcer is None:
            return
        for request_id, _, _ in holders:
            self._enforcer.tell_moved(self.scheduler.requests[request_id])
        if written:
            self._enforcer.copied(new, keys)

    def _copied(self, block: int, holders: list[tuple[str, list[Any], int]]) -> int:
        """The block of the base that has the content and the holders of a lent one now."""
        pool, old, observer = self._pool, self._real(block), self._observer
        first = self.scheduler.requests[holders[0][0]] if holders else None
        observer.tell("admit", r=observer.alias(first.request_id) if first else UNNAMED, n=1)
        with observer.acting_for(first), observer.in_place_of(block):
            (new,) = self._base_block()
        self.placement.copy(block, new.block_id)
        if self._keys(block):
            with observer.acting_for(first):
                pool.move_block_hashes(old, new)
        for request_id, blocks, position in holders:
            with observer.acting_for(self.scheduler.requests[request_id]):
                if request_id != holders[0][0]:
                    with observer.in_place_of(block):
                        pool.touch([new])
                blocks[position] = new
                pool.free_blocks([old])
            self.placement.rename(request_id, block, new.block_id)
        if not holders:
            pool.free_blocks([new])
        return int(new.block_id)

    def _base_block(self) -> list[Any]:
        """The next free block of the base; lent ones are kept out of the queue meanwhile."""
        parked = [self._real(b) for b in self.lent if self._in_queue(b)]
        for block in parked:
            self._pool.free_block_queue.remove(block)
        try:
            found: list[Any] = self._pool.get_new_blocks(1)
        finally:
            self._pool.free_block_queue.prepend_n(parked)
        return found

    def _holding(self, block: Any) -> list[tuple[str, list[Any], int]]:
        """Requests that hold the block, with vLLM's list of theirs and the position in it."""
        managers = self.scheduler.kv_cache_manager.coordinator.single_type_managers
        return [
            (request_id, blocks, position)
            for manager in managers
            for request_id, blocks in manager.req_to_blocks.items()
            for position, held in enumerate(blocks)
            if held is block
        ]

    # -- the log -------------------------------------------------------------------------------

    def _heard(self, step: PoolStep) -> None:
        """An allocator step on a lent block, in the words of `spec.elastic`."""
        block = int(step.args.get("b", 0))
        if block not in self.lent or self.memory.mode is not Mode.LENT:
            return  # while it drains, a block's end is told once, when it is empty
        tell = self.memory.told
        if step.action in _TAKES:
            self._holders[block] += 1
            if self._holders[block] == 1:
                self._used.add(block)
                tell("take", {"b": block})
                if step.action == "share":
                    tell("keep", {"b": block})  # found, and found again
        elif step.action == "register":
            tell("keep", {"b": block})
        elif step.action in _LEAVES:
            self._holders[block] -= 1
            if not self._holders[block]:
                tell("leave", {"b": block})
        elif step.action == "lose" and not self._holders[block]:
            tell("drain", {"b": block})


def _prefills(request: Any) -> bool:
    """Whether a running request has more than its last token to compute."""
    known = request.num_tokens_with_spec + request.num_output_placeholders
    return bool(known - request.num_computed_tokens > 1)
