"""What a step does for claims that it does not concern: next to nothing, however many there are,
and nothing else than where every step is told to somebody and judged anew."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from vllm_world import NEEDS_VLLM

pytestmark = NEEDS_VLLM

RUNNING = 8


def calls(step: Any) -> Counter[str]:
    """How often functions of the claim layer are called in a step, by name."""
    seen: Counter[str] = Counter()

    def called(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and "kvclaims" in code.co_filename and "_bench" not in code.co_filename:
            seen[code.co_name] += 1

    sys.setprofile(called)
    try:
        step()
    finally:
        sys.setprofile(None)
    del seen["called"]
    return seen


def decoding(claims: int) -> Any:
    from kvclaims.bridge.vllm.overhead_bench import DECODE, Contender

    contender = Contender("none", DECODE, claims, None)
    contender.prepare(100)
    for _ in range(4):
        contender.step()
    return contender


@pytest.mark.parametrize("claims", [0, 1, 300])
def test_a_step_in_which_requests_go_on_calls_the_claim_layer_once_for_each(claims: int) -> None:
    contender = decoding(claims)
    scheduler = contender.driver.scheduler
    told = scheduler.serving.recorder.count
    seen = calls(contender.driver.step)
    del seen["step"], seen["sampled"], seen["<dictcomp>"], seen["<listcomp>"]  # of the benchmark
    assert seen.pop("allocate_slots") == RUNNING
    assert sum(seen.values()) <= 16, seen  # for the step itself
    assert scheduler.serving.recorder.count == told
    contender.close()


@pytest.mark.parametrize("claims", [1, 300])
def test_who_waits_for_others_is_not_judged_anew_while_nothing_changes(
    claims: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvclaims.bridge.vllm import scheduler as claiming

    judged = []
    judge = claiming.judge
    monkeypatch.setattr(claiming, "judge", lambda found: judged.append(found) or judge(found))
    contender = decoding(claims)
    big = contender.driver.request(_spec("big", 244), {})
    contender.driver.add(big)
    contender.step()
    contender.step()
    assert [len(found.promises) for found in judged] == [1]
    record = contender.driver.scheduler.enforcer.requests.records["big"]
    assert record.outcome.value == "deferred"
    for _ in range(30):  # tables grow meanwhile
        contender.step()
    assert len(judged) == 1
    _end(contender, "r0")
    contender.step()
    assert len(judged) == 2, "a request ended, and what it waits for is another set"
    contender.close()


def test_a_namesake_is_judged_too() -> None:
    contender = decoding(1)
    records = contender.driver.scheduler.enforcer.requests.records
    for _ in range(2):
        contender.driver.add(contender.driver.request(_spec("big", 244), {}))
        contender.step()
        contender.step()
        assert records["big"].outcome.value == "deferred"
        _end(contender, "big")
    contender.close()


def _spec(name: str, blocks: int) -> Any:
    from kvclaims.bridge.vllm.overhead_bench import SIZE
    from kvclaims.spec.content import Segment, tokens_of
    from kvclaims.spec.interface import RequestSpec

    return RequestSpec(name, tokens_of((Segment(name, blocks),), SIZE), 1)


def _end(contender: Any, request: str) -> None:
    from vllm.v1.request import RequestStatus

    contender.driver.scheduler.finish_requests(request, RequestStatus.FINISHED_ABORTED)


# -- short cuts change nothing ---------------------------------------------------------------------


def trace_of(folder: Path, seed: int, requests: int, heard: bool) -> list[dict[str, Any]]:
    """The events of a random life of an engine, as its files have them, without their times."""
    from kvclaims.bridge.serving.tracefiles import in_order
    from kvclaims.bridge.vllm.serving_bench import Life, SoakReport

    folder.mkdir()
    report = SoakReport()
    life = Life(False, seed, folder, report)
    if not heard:
        life._pool.enforcer.observer.listeners.clear()
    while life._made < requests:
        life._act()
    life._pool.close()
    lines = [line for path in in_order(life._trace) for line in path.read_text().splitlines()]
    events = [json.loads(line) for line in lines]
    for event in events:
        del event["timestamp_ns"]
    return events


@pytest.mark.parametrize("seed", range(3))
def test_it_is_told_the_same_whether_or_not_anybody_listens(seed: int, tmp_path: Path) -> None:
    heard = trace_of(tmp_path / "heard", seed, 120, heard=True)
    unheard = trace_of(tmp_path / "unheard", seed, 120, heard=False)
    kinds = {event["event"] for event in heard}
    assert {"active_request_deferred", "allocation_victim_selected"} <= kinds
    assert unheard == heard


@pytest.mark.parametrize("seed", range(3))
def test_it_is_told_the_same_where_every_step_is_judged_anew(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvclaims.bridge.vllm.scheduler import ClaimEnforcer

    short = trace_of(tmp_path / "short", seed, 120, heard=False)
    monkeypatch.setattr(ClaimEnforcer, "_settles", lambda *_: None)
    assert trace_of(tmp_path / "long", seed, 120, heard=False) == short


def test_what_claims_are_owed_together_is_kept_as_they_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvclaims.bridge.vllm.serving_bench import Life

    act, checked = Life._act, []

    def checking(self: Any) -> None:
        act(self)
        book = self._pool.enforcer.book
        each = book.promises().values()
        together = book.all_together()
        assert together.covered == frozenset().union(*(p.covered for p in each))
        assert together.reserve == sum(p.reserve for p in each)
        checked.append(len(together.covered))

    monkeypatch.setattr(Life, "_act", checking)
    trace_of(tmp_path / "life", 7, 200, heard=True)
    assert max(checked) > 10 > min(checked)


def test_who_runs_takes_no_block_that_is_owed_to_a_claim() -> None:
    from kvclaims.bridge.vllm.serving_bench import ServedPool

    pool = ServedPool(10, 4)
    enforcer = pool.enforcer
    pool.ask("r", pool.tokens("R", 1), answer=20)
    pool.step()
    owed = enforcer.queue_length()
    assert pool.declare("keep", "A", owed).status == 201
    while pool.scheduler.has_requests():
        assert enforcer.queue_length() >= enforcer.book.owed == owed
        pool.step()
    assert pool.outputs["r"].finish_reason is not None
    assert pool.serving.tally.outcomes == {"refused": 1}, "it gave way, and does not fit again"
    assert enforcer.queue_length() == 10
    pool.close()
