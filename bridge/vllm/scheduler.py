"""A vLLM scheduler that enforces claims, for `--scheduler-cls` and in process.

Enforcement needs three grips, all on the live objects of vLLM:

- pins are references taken with `BlockPool.touch`, so vLLM's own headroom shrinks by itself;
- while a request allocates, the pool's free count leaves out the reserves that the request may
  not draw on, so vLLM itself decides that it does not fit;
- the waiting request that did not fit is judged by `spec.feasibility` (F4): it stays, or ends.

What comes for every request in every step is `allocate_slots` alone, and it goes straight to vLLM
for a request that runs, unless it takes a block while something is owed.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Final

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import RequestStatus

from kvclaims.bridge.serving.desk import Desk
from kvclaims.bridge.vllm.claims import NO_CONTENT, ClaimBook
from kvclaims.bridge.vllm.eviction import spare
from kvclaims.bridge.vllm.names import Names
from kvclaims.bridge.vllm.observer import UNNAMED, PoolObserver, Reactions
from kvclaims.bridge.vllm.offloading import Offloading
from kvclaims.bridge.vllm.requests import Blocked, RequestLog, RequestRecord
from kvclaims.bridge.vllm.serving import Serving, settings_of
from kvclaims.spec.feasibility import Judgement, Situation, judge
from kvclaims.spec.interface import BadOperation, ClaimAnswer, ClaimSpec
from kvclaims.spec.telemetry import Recorder
from kvclaims.spec.vocabulary import Cause, Outcome, Phase

ADMIT_REUSE: Final = "kvclaims_admit_reuse"
"""Key in `SamplingParams.extra_args` (`vllm_xargs` over HTTP): false is write no-admit (P4)."""

CLAIM: Final = "kvclaims"
"""Key there: a claim on the request's own prompt, as JSON (`kvclaims.bridge.serving.wire`)."""

VERDICT: Final = "kvclaims"
"""Key in the `kv_transfer_params` of the answer: a refusal, and what became of a claim."""

_COUNT: Final = "get_num_free_blocks"

_AS_IT_IS: Final = nullcontext()

_ALL: Final = "(all claims)"

_REUSED: Final = "cached_prefix_reuse"
_TAKEN_BACK: Final = "lent_memory_returned"
"""Why a cached block was given up: for a request, or for nobody's sake but the memory's."""

_RUNNING: Final = RequestStatus.RUNNING
_WITHOUT_HOPE: Final = (Outcome.REFUSED, Outcome.CAPACITY_REQUIRED)
_WAITING: Final = (RequestStatus.WAITING, RequestStatus.PREEMPTED)
_GIVES_WAY: Final = (RequestStatus.RUNNING, RequestStatus.WAITING_FOR_REMOTE_KVS)
"""What a request is whose blocks vLLM frees though it has not ended: it was preempted, or nothing
of what was loaded for it is right."""


def admits_reuse(request: Any) -> bool:
    """Whether what the request computes may be left for others."""
    return bool(_extra_args(request).get(ADMIT_REUSE, True))


def _extra_args(request: Any) -> dict[str, Any]:
    params = request.sampling_params
    return (params.extra_args if params is not None else None) or {}


def _kept_free(pool: Any, blocks: int) -> AbstractContextManager[None]:
    """The pool counts so many blocks less as free, inside."""
    return _counting_less(pool, blocks) if blocks else _AS_IT_IS


@contextmanager
def _counting_less(pool: Any, blocks: int) -> Iterator[None]:
    own, count = vars(pool).get(_COUNT), pool.get_num_free_blocks
    pool.get_num_free_blocks = lambda: count() - blocks
    try:
        yield
    finally:
        if own is None:
            delattr(pool, _COUNT)
        else:
            setattr(pool, _COUNT, own)


class ClaimEnforcer(Reactions):
    """Claims on the pool of one live scheduler; `ClaimScheduling` calls it at the right moments."""

    def __init__(
        self,
        scheduler: Any,
        recorder: Recorder,
        defer_limit: int,
        alias: Callable[[str], str] = lambda request: request,
    ) -> None:
        self.scheduler = scheduler
        self.recorder = recorder
        self.alias = alias
        manager = scheduler.kv_cache_manager
        self.manager = manager
        self.pool = manager.block_pool
        self.block_size = manager.coordinator.single_type_managers[0].block_size
        self.groups = manager.coordinator.single_type_managers
        self.has_windows = len(self.groups) > 1 or hasattr(self.groups[0], "sliding_window")
        """Whether requests let go of blocks while they run, or have them in several KV groups: then
        no claims are made here, and what a request needs is known at most, not exactly."""
        hashed = getattr(self.pool, "hash_block_size", self.block_size)
        self._tables_grow_at_ends = not self.has_windows and hashed == self.block_size
        """Whether a request that runs takes a block only where the last one of its table is full:
        with hashes of less than a block, vLLM may copy one that is shared instead."""
        self.usable = self.pool.num_gpu_blocks - 1
        self.names = Names(self.block_size)
        self.observer = PoolObserver(manager, self.names, alias)
        self.observer.reactions = self
        self.book = ClaimBook(self, recorder)
        self.requests = RequestLog(recorder, defer_limit)
        self.tells_tables = True
        """Whether the trace has each request's table of blocks whenever it grew."""
        self.admits = admits_reuse
        self.adopted = 0
        """How many blocks the request that was last given any found on the device."""
        self.offloading: Offloading | None = None
        """The tier of offloadable claims, where vLLM was given our connector."""
        self.desk: Desk | None = None
        """Where claims are made and told of while serving; then ended requests are forgotten."""
        self._blocked: Blocked | None = None
        self._fresh: dict[tuple[str, int], None] = {}
        """Contents and the blocks that they became visible in since the last step began."""
        self._in_flight: deque[dict[tuple[str, int], None]] = deque()
        self._unwritten: set[int] = set()
        self._resetting: str | None = None
        self._admitting: tuple[Any, int, int] | None = None
        """The waiting request that allocates now, its hits, and the free blocks before."""
        self._settled: tuple[Any, ...] = ()
        """What the last judgement was made by, where nothing more follows from it (`_seen`)."""
        self._settled_with: int | None = None
        """The free blocks then, where the judgement depends on how many there are."""
        self._refused: list[tuple[Any, dict[str, Any]]] = []
        """Requests that were turned away and not answered yet, with what they are to be told."""
        self._grip()
        connector = getattr(scheduler, "connector", None)
        attach = getattr(connector, "attach_claims", None)
        if attach is not None:
            self.offloading = attach(self)

    def _grip(self) -> None:
        """Wrap `allocate_slots` of the live object (on the instance)."""
        observer, book, listeners = self.observer, self.book, self.observer.listeners
        watched, unwatched = self.manager.allocate_slots, observer.allocate

        def allocate_slots(
            request: Any,
            num_new_tokens: int,
            *more: Any,
            num_lookahead_tokens: int | None = None,
            **named: Any,
        ) -> Any:
            if num_lookahead_tokens is not None:
                if (  # as vLLM asks for requests that run: passed on as it is, nothing unpacked
                    request.status is _RUNNING
                    and book.owed <= 0
                    and not (more or named or listeners or self.tells_tables)
                ):
                    observer.request = request  # all that the observer's own wrapper would do
                    try:
                        return unwatched(
                            request, num_new_tokens, num_lookahead_tokens=num_lookahead_tokens
                        )
                    finally:
                        observer.request = None
                named["num_lookahead_tokens"] = num_lookahead_tokens
            return self._allocate(watched, request, num_new_tokens, *more, **named)

        self.manager.allocate_slots = allocate_slots

    def _takes_freely(self, request: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether a request that runs may have what it needs for its next tokens: nothing is owed,
        or they go into blocks that it has."""
        if self.book.owed <= 0:
            return True
        if not self._tables_grow_at_ends or len(args) != 1:
            return False
        held = len(self.observer.held.get(self.alias(request.request_id), ()))
        end = request.num_computed_tokens + args[0] + kwargs.get("num_lookahead_tokens", 0)
        return bool(end <= held * self.block_size)

    # -- the pool as the claim book sees it ----------------------------------------------------

    def lookup(self, key: str, only: int | None = None) -> int | None:
        block = self.observer.lookup(key)
        if only is not None:
            block = only if only in self.observer.where.get(key, ()) else None
        return None if block in self._unwritten else block

    def is_written(self, block: int) -> bool:
        """Whether what the block is found under has been computed (L7)."""
        return block not in self._unwritten

    def copied(self, block: int, keys: Iterable[str]) -> None:
        """`block` was filled with a copy of written KV: claims may cover it at once (L7)."""
        self._unwritten.discard(block)
        with self.observer.operation():
            self.book.written(keys)

    def ended_reset(self, succeeded: bool) -> None:
        """vLLM reset its prefix cache: what tiers keep goes with it (B10)."""
        if succeeded and self.offloading is not None:
            with self.observer.operation():
                self.offloading.cleared()

    def is_visible(self, key: str) -> bool:
        return self.observer.lookup(key) is not None

    def survives(self, key: str) -> bool:
        return any(b not in self._unwritten for b in self.observer.where.get(key, ()))

    def ref(self, block: int) -> int:
        return self.observer.ref(block)

    def queue_length(self) -> int:
        return self.observer.queue_length()

    def pin(self, blocks: Iterable[int]) -> None:
        self.observer.pin(blocks)

    def unpin(self, blocks: Iterable[int]) -> None:
        self.observer.unpin(blocks)

    def tell(self, action: str, **args: Any) -> None:
        self.observer.tell(action, **args)

    # -- operations on claims ------------------------------------------------------------------

    def declare(self, spec: ClaimSpec) -> ClaimAnswer:
        keys = self.names.of_tokens(spec.tokens, spec.domain)
        with self.observer.operation():
            return self.book.declare(spec, keys)

    def end_claim(self, claim_id: str, how: Phase) -> None:
        with self.observer.operation():
            self.book.end(claim_id, how)

    def advance(self, ticks: int) -> None:
        if not self.book.is_due(ticks):  # as at almost every step
            self.book.now += ticks
            return
        with self.observer.operation():
            self.book.advance(ticks)

    def reset(self, told_as: str = "pool_reset") -> bool:
        """vLLM's own reset of the prefix cache, told as this event (B10)."""
        self._resetting = told_as
        succeeded = bool(self.scheduler.reset_prefix_cache())
        self._tell_reset(succeeded)
        return succeeded

    def _tell_reset(self, succeeded: bool) -> None:
        """Once, and before the losses that a reset means."""
        if self._resetting is not None:
            event, self._resetting = self._resetting, None
            self.recorder.emit(event, succeeded=succeeded)

    def lose(self, key: str, position: int) -> bool:
        """A fault takes every copy of a content; False if there is none."""
        blocks = tuple(self.observer.where.get(key, ()))
        if not blocks:
            return False
        for block in blocks:
            self.recorder.emit(
                "resident_block_lost",
                prefix_id=key,
                position=position,
                block_id=block,
                cause=Cause.FAULT.value,
            )
        self.pool.evict_blocks(set(blocks))
        return True

    # -- what the observer tells ---------------------------------------------------------------

    def shares(self, request: Any) -> bool:
        return admits_reuse(request)

    def before_taking(self, blocks: int) -> None:
        if self.book.has_preferred:
            keys = self.observer.keys
            spare(
                self.pool.free_block_queue,
                blocks,
                lambda block: self.book.prefers(block, keys.get(block, {}).values()),
            )

    def before_loss(self, lost: Mapping[int, str], request: str | None) -> None:
        self._admit_first()
        self._tell_reset(succeeded=True)
        if self.book.minds(lost):  # otherwise no claim has anything to move, or to end first
            self.book.expect_loss(lost, self._copies(lost))
        if request is None:
            return
        for block, key in lost.items():
            self.recorder.emit(
                "allocation_victim_selected",
                request_id=None if request == UNNAMED else request,
                prefix_id=key,
                block_id=block,
                hash=key,
                ref_count=0,
                protected=False,
                reason=_TAKEN_BACK if request == UNNAMED else _REUSED,
            )

    def _copies(self, lost: Mapping[int, str]) -> dict[str, list[int]]:
        """The other blocks that have these contents, written."""
        where, unwritten = self.observer.where, self._unwritten
        return {
            key: [b for b in where[key] if b not in lost and b not in unwritten]
            for key in lost.values()
        }

    def after_loss(self, lost: Mapping[int, str], request: str | None) -> None:
        self._unwritten.difference_update(lost)
        self.book.lost(lost, Cause.FAULT if request is None else Cause.OWN_CHOICE)

    def drawn(self, claim: str, block: int, request: Any, position: int) -> None:
        key = self.names.of_request(request)[position]
        self.book.lend(claim.rpartition("#")[0], block, key)

    def freed(self, block: int) -> str | None:
        if self.offloading is not None:
            self.offloading.freed(block)
        return self.book.freed(block)

    def registered(self, block: int, key: str) -> None:
        self._fresh[key, block] = None
        self._unwritten.add(block)
        if self.offloading is not None:
            self.offloading.registered(block, key)

    def ended(self, request: Any, blocks: int) -> None:
        record = self._record(request)
        status = request.status
        if status in _GIVES_WAY:
            if record is not None:
                self.requests.preempted(record, blocks)
            return
        self.names.forget_request(request.request_id)
        if record is None:
            return
        if record.state != "finished":
            self._tell_end(request, record, blocks)
        if self.desk is not None and RequestStatus.is_finished(status):
            del self.requests.records[record.request_id]

    def ending(self, request: Any) -> None:
        record = self._record(request)
        if record is not None:
            record.state = "ending"

    def load_started(self, request: Any, blocks: int) -> None:
        """vLLM has room for the request, and waits until so many blocks of it were loaded."""
        record = self._record(request)
        if record is not None:
            self.requests.loading(record, blocks)

    def _tell_end(self, request: Any, record: RequestRecord, blocks: int) -> None:
        if request.status == RequestStatus.FINISHED_ERROR:
            self.requests.aborted(record, blocks)  # the engine gave it up: it was not served
        elif request.status == RequestStatus.FINISHED_ABORTED:
            self.requests.aborted(record, blocks)
            if self.desk is not None:
                self.desk.answer(request.request_id)  # there is nobody left to tell
            if self.offloading is not None:
                self.offloading.unrestored.pop(request.request_id, None)
        elif RequestStatus.is_finished(request.status):
            full = request.num_computed_tokens // self.block_size  # 0 where it gave way before
            self.requests.finished(record, blocks, max(0, full - record.hit_blocks))

    def _record(self, request: Any) -> RequestRecord | None:
        """The record of a request that arrived under claims, with its prefix up to date."""
        record = self.requests.records.get(self.alias(request.request_id))
        if record is not None:
            ids = self.names.of_request(request)
            record.prefix_id = ids[-1] if ids else None
        return record

    # -- scheduling ----------------------------------------------------------------------------

    def arrived(self, request: Any) -> None:
        ids = self.names.of_request(request)
        name = self.alias(request.request_id)
        record = RequestRecord(name, admits_reuse(request), ids[-1] if ids else None)
        self.requests.arrived(record, self._blocks(request.num_tokens))
        if self._settled and self._settled[0][0] == request.request_id:
            self._settled = ()  # this one is another of that name
        claim = _extra_args(request).get(CLAIM)
        if self.desk is not None and claim is not None:
            plain = not getattr(request, "mm_features", None)
            tokens = tuple(request.prompt_token_ids or ()) if plain else None
            salt, lora = request.cache_salt or "", request.lora_request
            adapter = "" if lora is None else lora.lora_name
            owner = self.desk.owner_of(_extra_args(request))
            self.desk.arrived(request.request_id, claim, tokens, salt, adapter, owner)

    def _blocks(self, tokens: int) -> int:
        """How many blocks that many tokens take, at most where there are windows."""
        return -(-tokens // int(self.block_size)) * len(self.groups)

    def _allocate(
        self, allocate: Callable[..., Any], request: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if request.status is _RUNNING and self._takes_freely(request, args, kwargs):
            return self._continue(allocate, request, *args, **kwargs)
        name = self.alias(request.request_id)
        record = self.requests.records.get(name)
        loaded = record is not None and record.state == "running"
        waiting = request.status in _WAITING and not loaded
        hits = _hits(args, kwargs)
        self.adopted = len(hits)
        if self.offloading is not None and kwargs.get("delay_cache_blocks"):
            args = _for_all(request, args, kwargs)
        held = len(self.observer.held.get(name, ()))
        draws = self._draws(request, held + len(hits))
        free = self.queue_length()
        if waiting:
            self._blocked = self._hopeless(request, hits, draws, free, kwargs)
            if self._blocked is not None:
                return None
            self._admitting = (request, len(hits), free)
        self.observer.draws = {p: self.book.claims[c[0]].name for p, c in draws.items()}
        try:
            with _kept_free(self.pool, self.book.owed - len(draws)):
                blocks = allocate(request, *args, **kwargs)
        finally:
            self.observer.draws = {}
        if blocks is not None:
            self._admit_first()
            self._tell_table(request, held, hits)
        elif waiting:
            self._blocked = self._judge(request, hits, draws, free, kwargs)
        self._admitting = None
        return blocks

    def _hopeless(
        self,
        request: Any,
        hits: list[int],
        draws: dict[int, list[str]],
        free: int,
        asked: Mapping[str, Any],
    ) -> Blocked | None:
        """Why a waiting request could not have all that it needs even if all others ended, where
        vLLM would let it begin all the same: it looks at the next chunk alone, or at no room for
        drafts.  The request would come to its end of room, give way to itself, and begin anew."""
        ahead = asked.get("num_lookahead_tokens", 0)
        if asked.get("full_sequence_must_fit") and not ahead:
            return None
        queued = sum(self.ref(block) == 0 for block in hits)
        wanted = self._needed(request, ahead) - len(hits) + queued - len(draws)
        if wanted <= free - self.book.owed:
            return None
        blocked = self._judge(request, hits, draws, free, asked)
        is_so = blocked is not None and blocked.judgement.outcome in _WITHOUT_HOPE
        return blocked if is_so else None

    def _continue(
        self, allocate: Callable[..., Any], request: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """The same for a request that runs and takes what it needs."""
        if not self.tells_tables:
            return allocate(request, *args, **kwargs)
        held = len(self.observer.held.get(self.alias(request.request_id), ()))
        blocks = allocate(request, *args, **kwargs)
        if blocks is not None:
            self._tell_table(request, held, [])
        return blocks

    def _admit_first(self) -> None:
        """The admission is told before the losses that it causes, once it is certain."""
        if self._admitting is None:
            return
        request, hits, free = self._admitting
        self._admitting = None
        record = self._record(request)
        if record is not None:
            new = self._blocks(request.num_tokens) - hits
            self.requests.admitted(record, hits, new, free)

    def _tell_table(self, request: Any, held: int, hits: list[int]) -> None:
        """Tell the request's table if it had `held` blocks before and has more now."""
        if not self.tells_tables:
            return
        table = self.observer.held.get(self.alias(request.request_id), [])
        if not hits and len(table) <= held:
            return
        record = self._record(request)
        if record is not None:
            self.requests.grew(record, list(table), self.book.lent(table))

    def tell_moved(self, request: Any) -> None:
        """Tell the request's table, some of whose blocks have changed places."""
        record = self._record(request) if self.tells_tables else None
        if record is not None:
            table = list(self.observer.held.get(self.alias(request.request_id), ()))
            self.requests.grew(record, table, self.book.lent(table))

    def _draws(self, request: Any, first: int) -> dict[int, list[str]]:
        if self.book.owed <= 0 or not admits_reuse(request):
            return {}
        return self.book.draws(self.names.of_request(request), first)

    def _judge(
        self,
        request: Any,
        hits: list[int],
        draws: dict[int, list[str]],
        free: int,
        asked: Mapping[str, Any],
    ) -> Blocked | None:
        """Why the request did not fit: the whole of it counts, not the chunk that was tried, and
        what vLLM keeps free for others while a load waits.  None where its need is not known (with
        windows, unless it has the pool for itself), and where nothing has changed since nothing
        followed from it: a request may wait for long, and is tried in every step."""
        reserved = asked.get("reserved_blocks", 0)
        seen = self._seen(request, hits, reserved)
        if seen == self._settled and self._settled_with in (None, free):
            return None
        materializes: dict[str, set[int]] = {}
        for position, claims in draws.items():
            for claim in claims:
                materializes.setdefault(claim, set()).add(position)
        name = self.alias(request.request_id)
        active = {r: frozenset(b) for r, b in self.observer.held.items() if b and r != name}
        if self.has_windows and active:
            return None
        situation = Situation(
            usable=self.usable,
            promises=self.book.promises() if draws else {_ALL: self.book.all_together()},
            active=active,
            need=self._needed(request, asked.get("num_lookahead_tokens", 0)) - len(hits),
            holds=frozenset(hits),
            materializes={c: frozenset(positions) for c, positions in materializes.items()},
        )
        found = judge(situation)
        if found.outcome is Outcome.REFUSED and not draws:  # now it matters whose they are
            situation = replace(situation, promises=self.book.promises())
            found = judge(situation)
        if found.outcome is Outcome.SERVED:
            situation, found = _kept_for_others(situation, reserved)
        return Blocked(request, situation, found, free, len(draws), tuple(hits), seen)

    def _needed(self, request: Any, ahead: int) -> int:
        """The blocks that vLLM wants for a request, with room for so many tokens of drafts."""
        known = request.num_tokens
        most = max(known, self.scheduler.max_model_len)
        return self._blocks(min(known + ahead, most))

    def _seen(self, request: Any, hits: list[int], reserved: int) -> tuple[Any, ...]:
        """What a judgement is made by, but for how many blocks are free."""
        request_ = (request.request_id, request.num_tokens, *hits)
        return (request_, reserved, self.usable, self.book.version, self.observer.tables)

    def granted(self) -> Counter[str]:
        """What requests that are computed in chunks were admitted with, and have yet to take: those
        blocks are free, and no claim is promised them (F2).  What they will draw on the reserves of
        claims is in those.  By content, as in `ClaimBook.granted`."""
        needs: Counter[str] = Counter()
        ahead = getattr(self.scheduler, "num_lookahead_tokens", 0)
        for request in self.scheduler.running:
            now = ahead - bool(request.num_output_tokens)  # the last token is of the next step
            held = len(self.observer.held.get(self.alias(request.request_id), ()))
            missing = range(held, self._needed(request, now))
            if not missing:
                continue
            keys = self.names.of_request(request) if admits_reuse(request) else []
            drawn = self._draws(request, held)
            needs.update(
                keys[p] if p < len(keys) else NO_CONTENT for p in missing if p not in drawn
            )
        return needs

    def _settles(self, blocked: Blocked) -> None:
        """Nothing more follows from the judgement until something changes.  Where the request
        waits for all the others that have blocks, they may take more: it waits for them still."""
        judgement, situation = blocked.judgement, blocked.situation
        self._settled = blocked.seen
        waits_on_all = len(judgement.waits_on) == len(situation.active) > 0
        self._settled_with = None if waits_on_all else blocked.free

    def scheduled(self) -> None:
        """vLLM has scheduled a step: what it registered is in flight; act on a blocked request."""
        self._in_flight.append(self._fresh)
        self._fresh = {}
        if self._blocked is not None:
            blocked, self._blocked = self._blocked, None
            self._settle(blocked)

    def _settle(self, blocked: Blocked) -> None:
        request, judgement = blocked.request, blocked.judgement
        record = self._record(request)
        if judgement.outcome in (Outcome.SERVED, Outcome.DEFERRED) or record is None:
            self._settles(blocked)
        if judgement.outcome is Outcome.SERVED or record is None:
            return  # vLLM waits for a reason of its own (a watermark, an encoder cache)
        order = {c: self.book.claims[c].order for c in blocked.situation.materializes}
        if not self.requests.judged(record, blocked, order):
            return
        with self.observer.operation():
            self._tell_verdict(record, blocked)
            if record.state == "finished":
                if self.desk is not None:
                    self.desk.refused(request.request_id, judgement, blocked.situation)
                self._refused.append((request, self._told(request, judgement)))
                self.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ERROR)

    def _tell_verdict(self, record: RequestRecord, blocked: Blocked) -> None:
        """The machine's `n` is what the request lacks of what its guard speaks of."""
        situation, name = blocked.situation, record.request_id
        if record.outcome is Outcome.DEFERRED:
            queued = sum(self.observer.pool.blocks[b].ref_cnt == 0 for b in situation.holds)
            self.tell("defer", r=name, n=situation.need + queued - blocked.drawn)
        elif record.outcome is Outcome.REFUSED:
            beyond = len(situation.holds - blocked.protected) + situation.need - blocked.drawn
            self.tell("turn_away", r=name, n=beyond)
        else:
            self.tell("overflow", r=name, n=len(situation.holds) + situation.need)

    def written(self) -> None:
        """The oldest step in flight has ended: its KV is written, claims cover it (L7)."""
        ended = self._in_flight.popleft() if self._in_flight else {}
        if self._fresh:
            ended.update(self._fresh)
            self._fresh = {}
        for key, block in ended:
            if block in self.observer.where.get(key, ()):
                self._unwritten.discard(block)
        if self.book.awaits_content:
            with self.observer.operation():
                self.book.written(key for key, _ in ended)

    def answers(self, outputs: dict[int, Any]) -> dict[int, Any]:
        """Add an answer for every request that was refused since the last step, and to the others
        what they are to be told of claims."""
        if self._refused:
            self._answer_refused(outputs)
        if self.desk is not None and self.desk.has_answers:
            self._answer_claims(self.desk, outputs)
        if self.offloading is not None and self.offloading.unrestored:
            self._tell_unrestored(self.offloading.unrestored, outputs)
        return outputs

    def _answer_refused(self, outputs: dict[int, Any]) -> None:
        refused, self._refused = self._refused, []
        for request, told in refused:
            output = EngineCoreOutput(
                request_id=request.request_id,
                new_token_ids=[],
                finish_reason=request.get_finished_reason(),
                kv_transfer_params={VERDICT: told},
                **_failure_of_pooling(request),
            )
            known = outputs.get(request.client_index)
            if known is None:
                outputs[request.client_index] = EngineCoreOutputs(outputs=[output])
            else:
                known.outputs.append(output)

    def blamed(self, request_id: str, claims: list[str]) -> list[Any]:
        """These claims as whoever made the request may know them (Q3)."""
        request = self.scheduler.requests.get(request_id)
        if self.desk is None or request is None:
            return list(claims)
        return self.desk.told_claims(claims, self.desk.owner_of(_extra_args(request)))

    def _tell_unrestored(self, failed: dict[str, list[Any]], outputs: dict[int, Any]) -> None:
        """Requests that end are told if content that was to be loaded for them could not be, and
        which claims were concerned (O2)."""
        for output in (o for some in outputs.values() for o in some.outputs):
            if output.finish_reason is None or output.request_id not in failed:
                continue
            told = failed.pop(output.request_id)
            params = dict(output.kv_transfer_params or {})
            params[VERDICT] = {**params.get(VERDICT, {}), "restoration_failed": told}
            output.kv_transfer_params = params

    def _told(self, request: Any, judgement: Judgement) -> dict[str, Any]:
        if self.desk is None:
            return _verdict(judgement)
        owner = self.desk.owner_of(_extra_args(request))
        return self.desk.told_refusal(request.request_id, owner)

    def _answer_claims(self, desk: Desk, outputs: dict[int, Any]) -> None:
        """Requests that end are told of the claims that they brought."""
        for output in (o for some in outputs.values() for o in some.outputs):
            told = None if output.finish_reason is None else desk.answer(output.request_id)
            if told is not None:
                params = dict(output.kv_transfer_params or {})
                params[VERDICT] = {**params.get(VERDICT, {}), **told}
                output.kv_transfer_params = params


def _kept_for_others(situation: Situation, blocks: int) -> tuple[Situation, Judgement]:
    """A request that fits, but for so many blocks that vLLM keeps free for those which it admitted
    before: it waits for them.  It is never turned away for that, as it passes with them (F4)."""
    room = situation.usable - len(situation.holds) - situation.need
    longer = replace(situation, need=situation.need + min(blocks, room))
    found = judge(longer)
    if found.outcome is Outcome.DEFERRED:
        return longer, found
    return situation, judge(situation)


def _verdict(judgement: Judgement) -> dict[str, Any]:
    return {
        "outcome": judgement.outcome.value,
        "shortfall": judgement.shortfall,
        "missing_now": judgement.missing_now,
        "blocking_claims": list(judgement.blocking_claims),
    }


def _failure_of_pooling(request: Any) -> dict[str, Any]:
    """What an answer needs beside for a request that pools: vLLM takes one without a tensor for
    text, and ends the server.  The one failure of such requests that it knows is a cache that
    missed an input, and has the client try again; of a version that knows none the tensor is empty.
    """
    if request.pooling_params is None:
        return {}
    if "mm_cache_miss_hashes" in EngineCoreOutput.__struct_fields__:
        return {"mm_cache_miss_hashes": [""]}  # no input has that hash
    from torch import empty

    return {"pooling_output": empty(0)}


def _hits(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    """The blocks that a call of `allocate_slots` adopts from the cache."""
    blocks = kwargs.get("new_computed_blocks")
    if blocks is None and len(args) > 2:
        blocks = args[2]
    if blocks is None:
        return []
    return [block.block_id for group in blocks.blocks for block in group if not block.is_null]


def _for_all(request: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments of `allocate_slots` for a request that loads: vLLM asks for the blocks that the
    load fills.  It gets all of them at once: what waits for a transfer must not wait for room as
    well (V3), and nobody else is promised what it still needs (F2)."""
    found = kwargs["num_new_computed_tokens"] + kwargs["num_external_computed_tokens"]
    return (max(0, request.num_tokens - found), *args[1:])


class ClaimScheduling:
    """Mixin over a vLLM scheduler.  Claims are in force once `enforce` was called; from the start
    where vLLM was told to use this class (`--scheduler-cls`), or has settings for claims."""

    enforcer: ClaimEnforcer | None = None
    serving: Serving | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = settings_of(self)
        if settings is not None:
            self.serving = Serving(self, settings)
            enforcer = self.enforce(self.serving.recorder, settings.defer_limit)
            enforcer.desk = self.serving.open(enforcer)

    def enforce(
        self,
        recorder: Recorder,
        defer_limit: int = 1,
        alias: Callable[[str], str] = lambda request: request,
    ) -> ClaimEnforcer:
        """Put claims into force on this scheduler, once."""
        if self.enforcer is not None:
            raise BadOperation("claims are in force on this scheduler already")
        self.enforcer = ClaimEnforcer(self, recorder, defer_limit, alias)
        return self.enforcer

    def add_request(self, request: Any) -> None:
        known = request.request_id in self.requests  # type: ignore[attr-defined]
        super().add_request(request)  # type: ignore[misc]
        if self.enforcer is not None and not known:
            if self.serving is not None and self.serving.spans is not None:
                self.serving.spans.arrived(request.request_id, request.trace_headers)
            self.enforcer.arrived(request)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        enforcer = self.enforcer
        if enforcer is None:
            return super().schedule(*args, **kwargs)  # type: ignore[misc]
        if enforcer.desk is not None:
            enforcer.desk.tick()
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        enforcer.scheduled()
        return output

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> Any:
        succeeded = super().reset_prefix_cache(*args, **kwargs)  # type: ignore[misc]
        if self.enforcer is not None:
            self.enforcer.ended_reset(bool(succeeded))
        return succeeded

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().update_from_output(*args, **kwargs)  # type: ignore[misc]
        if self.enforcer is not None:
            self.enforcer.written()
            outputs = self.enforcer.answers(outputs)
        return outputs

    def received(self, connector_output: Any) -> None:
        """What transfers brought between two steps, told as vLLM tells it of a step that computed
        nothing; no step has ended by that."""
        from vllm.v1.core.sched.output import SchedulerOutput
        from vllm.v1.outputs import ModelRunnerOutput

        nothing = ModelRunnerOutput(
            req_ids=[], req_id_to_index={}, kv_connector_output=connector_output
        )
        super().update_from_output(SchedulerOutput.make_empty(), nothing)  # type: ignore[misc]

    def shutdown(self) -> None:
        super().shutdown()  # type: ignore[misc]
        if self.serving is not None:
            self.serving.close()


class ClaimScheduler(ClaimScheduling, Scheduler):  # type: ignore[misc]
    """vLLM's scheduler with claims.  Under asynchronous scheduling it is an
    `AsyncClaimScheduler`, so one name serves both."""

    def __new__(cls, *args: Any, **kwargs: Any) -> ClaimScheduler:
        config = kwargs.get("vllm_config", args[0] if args else None)
        asynchronous = config is not None and config.scheduler_config.async_scheduling
        kind = AsyncClaimScheduler if asynchronous and cls is ClaimScheduler else cls
        return object.__new__(kind)


class AsyncClaimScheduler(ClaimScheduler, AsyncScheduler):  # type: ignore[misc]
    """vLLM's asynchronous scheduler with claims: content counts once its step was processed."""
