"""Trials of vLLM's scheduler: nothing is broken by it, and what is broken on purpose is found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from vllm_world import NEEDS_VLLM

from kvclaims.bridge.vllm.engine import IN_PROCESS
from kvclaims.bridge.vllm.trial_settings import KINDS
from kvclaims.bridge.vllm.worker import STOP, Found, SlotMemory, Work, Worker
from kvclaims.checker.baseline import allowing
from kvclaims.checker.trials import Trial, attempt, told

pytestmark = NEEDS_VLLM

TRIALS = IN_PROCESS.trials
NAMES = tuple(name for name, _ in KINDS)


def worker(window: int = 0, clears: bool = False) -> Worker:
    return Worker(SlotMemory(4, 4), (window,), clears)


def work(
    request: str, start: int, end: int, table: tuple[int, ...], known: tuple[int, ...] | None
) -> Work:
    return Work(request, start, end, (table,), known, (), samples=True)


# --- the worker --------------------------------------------------------------------------


def test_a_request_reads_what_it_wrote_and_every_sampling_is_another() -> None:
    one = worker()
    (first,) = one.execute(work("r", 0, 3, (1,), (5, 6, 7)))
    (second,) = one.execute(work("r", 3, 4, (1,), None))
    assert first != second
    behind = one.chain_of("r").names([5, 6, 7])[3]
    assert one.is_continuation("r", first, behind)
    assert not one.is_continuation("r", second, behind)
    assert not one.is_continuation("other", first, behind)


@pytest.mark.parametrize(
    ("table", "known", "message"),
    [
        ((1,), (5, 9, 7, 8), "reads token 1 of its KV and finds KV of other tokens, written for r"),
        ((2,), (5, 6, 7, 8), "reads token 0 of its KV and finds nothing written"),
        ((0,), (5, 6, 7, 8), "reads token 0 of its KV and finds no block"),
    ],
)
def test_what_is_not_there_is_found(
    table: tuple[int, ...], known: tuple[int, ...], message: str
) -> None:
    one = worker()
    one.execute(work("r", 0, 3, (1,), (5, 6, 7)))
    with pytest.raises(Found, match=message):
        one.execute(work("s", 3, 4, table, known))


def test_a_window_reads_no_further_back() -> None:
    for window in (4, 5):
        one = worker(window)
        one.execute(work("r", 0, 7, (1, 2), tuple(range(10, 17))))
        if window == 4:
            one.execute(work("r", 7, 8, (0, 2), None))
            continue
        with pytest.raises(Found, match="reads token 3 of its KV and finds no block"):
            one.execute(work("r", 7, 8, (0, 2), None))


def test_what_another_left_in_a_block_that_is_cleared_is_found() -> None:
    one = worker(clears=True)
    one.execute(work("before", 0, 4, (1,), (5, 6, 7, 8)))
    with pytest.raises(Found, match="computes in block 1, which was not cleared"):
        one.execute(work("r", 0, 2, (1,), (5, 6)))
    one.memory.fill([1])
    one.execute(work("r", 0, 2, (1,), (5, 6)))


def test_it_stops_where_it_is_told_to() -> None:
    one = worker()
    one.stops["r"] = 2
    assert one.execute(work("r", 0, 2, (1,), (5, 6))) != [STOP]
    assert one.execute(work("r", 2, 3, (1,), None)) == [STOP]


# --- vLLM as it is -----------------------------------------------------------------------


def test_vllm_breaks_nothing_and_everything_is_done() -> None:
    tried = attempt(TRIALS, 1, allowing(IN_PROCESS), 4 * len(KINDS))
    assert tried.failure is None
    assert tried.runs == Counter(dict.fromkeys(NAMES, 4))
    assert (tried.never, dict(tried.not_exposed)) == ((), {})


def test_seed_and_number_fix_a_trial() -> None:
    for number in (0, 3, 5):
        assert TRIALS.run(3, number) == TRIALS.run(3, number)
    assert TRIALS.run(3, 1).operations != TRIALS.run(4, 1).operations


def test_who_is_stranded_behind_a_larger_one_is_a_finding_that_is_known() -> None:
    """A trial that meets it: allowed by its name, and by no other wait of requests with blocks."""
    stranded = TRIALS.run(0, 76)
    assert stranded.finding is not None
    assert "r9 hold blocks, and wait behind r8, r10" in stranded.finding.message
    allowed = allowing(IN_PROCESS)
    known = allowed(stranded.finding.rule, told(stranded))
    assert known is not None
    assert known.name == "stranded-behind"
    assert allowed("B11", told(stranded).partition(" behind")[0]) is None


# --- vLLM broken on purpose ----------------------------------------------------------------


def broken(kind: str, most: int = 40) -> Trial | None:
    """The first trial of a kind that breaks a rule."""
    place = NAMES.index(kind)
    for number in range(place, most * len(KINDS), len(KINDS)):
        one = TRIALS.run(1, number)
        if one.finding is not None:
            return one
    return None


def without(method: str, **answer: object) -> Callable[[pytest.MonkeyPatch], None]:
    """A method of vLLM's scheduler or KV manager that does nothing."""

    def breaks(patch: pytest.MonkeyPatch) -> None:
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.sched.scheduler import Scheduler

        owner = Scheduler if hasattr(Scheduler, method) else KVCacheManager
        patch.setattr(owner, method, lambda *_, **__: answer.get("gives"))

    return breaks


def delivers_what_is_dropped(patch: pytest.MonkeyPatch) -> None:
    """What was under way when a request gave way is given to it although it starts over."""
    from vllm.v1.core.sched.scheduler import Scheduler

    update = Scheduler.update_from_output

    def undropped(scheduler: Any, *args: Any) -> Any:
        for request in scheduler.requests.values():
            request.drop_stale_output = False
        return update(scheduler, *args)

    patch.setattr(Scheduler, "update_from_output", undropped)


def counts_one_more(patch: pytest.MonkeyPatch) -> None:
    """The first of several new blocks counts twice."""
    from vllm.v1.core.block_pool import BlockPool

    take = BlockPool.get_new_blocks

    def twice(pool: Any, number: int) -> Any:
        blocks = take(pool, number)
        for block in blocks[:1]:
            block.ref_cnt += 1
        return blocks

    patch.setattr(BlockPool, "get_new_blocks", twice)


def loses_sessions(patch: pytest.MonkeyPatch) -> None:
    """A session that has answered is put into no queue."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import RequestStatus

    enqueue = Scheduler._enqueue_waiting_request

    def forgets(scheduler: Any, request: Any) -> None:
        if request.status != RequestStatus.WAITING_FOR_STREAMING_REQ:
            enqueue(scheduler, request)

    patch.setattr(Scheduler, "_enqueue_waiting_request", forgets)


def repeats_hits_wrongly(patch: pytest.MonkeyPatch) -> None:
    """Hits are told with the tokens of the block after theirs."""
    from vllm.v1.core.block_pool import BlockPool

    build = BlockPool._build_block_stored_event

    def shifted(pool: Any, request: Any, **told: Any) -> Any:
        event = build(pool, request, **told)
        event.token_ids = event.token_ids[::-1]
        return event

    patch.setattr(BlockPool, "_build_block_stored_event", shifted)
    emit = BlockPool.emit_cached_block_events

    def unshifted(pool: Any, *args: Any, **kwargs: Any) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(BlockPool, "_build_block_stored_event", build)
            emit(pool, *args, **kwargs)

    patch.setattr(BlockPool, "emit_cached_block_events", unshifted)


@pytest.mark.parametrize(
    ("kind", "breaks", "rule", "message"),
    [
        ("sessions", loses_sessions, "B11", "8 steps in a row changed nothing"),
        ("pipeline that is reset", delivers_what_is_dropped, "B4", "not sampled behind its own"),
        ("clearing", without("_get_new_block_ids_to_zero"), "B4", "which was not cleared"),
        ("resets", without("reset_prefix_cache", gives=True), "B10", "visible is"),
        ("resets", without("reset_prefix_cache", gives=False), "B10", "says False"),
        ("in flight", without("_free_blocks"), "B11", "8 steps in a row changed nothing"),
        ("transfers", counts_one_more, "B2", "can be named"),
        ("throttled", repeats_hits_wrongly, "B8", "a hash is told of"),
        ("transfers", without("_update_from_kv_xfer_finished"), "B11", "changed nothing"),
    ],
)
def test_what_is_broken_on_purpose_is_found(
    kind: str,
    breaks: Callable[[pytest.MonkeyPatch], None],
    rule: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    breaks(monkeypatch)
    found = broken(kind)
    assert found is not None
    assert found.finding is not None
    assert (found.finding.rule, message in found.finding.message) == (rule, True), found.finding
    assert found.finding.operation == len(found.operations)
