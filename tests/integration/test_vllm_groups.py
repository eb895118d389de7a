"""Sliding-window and hybrid KV groups: every block step is told, keys carry their group."""

from __future__ import annotations

import random
from typing import Any

import pytest
from vllm_world import NEEDS_VLLM

from kvclaims.checker.monitor import Monitor
from kvclaims.spec import pool
from kvclaims.spec.interface import PoolStep

pytestmark = NEEDS_VLLM

SIZE = 4


def watched(usable: int, windows: tuple[int, ...]) -> tuple[Any, Monitor, list[PoolStep]]:
    """A plain vLLM scheduler with these groups, judged by the machine."""
    from vllm.v1.core.sched.scheduler import Scheduler

    from kvclaims.bridge.vllm import setup
    from kvclaims.bridge.vllm.observer import attach

    setup.quieten(setup.ALONE)
    scheduler = setup.make_scheduler(Scheduler, usable, SIZE, windows=windows)
    scheduler.use_v2_model_runner = False
    blocks = [b.block_id for b in scheduler.kv_cache_manager.block_pool.blocks]
    monitor, steps = Monitor(blocks, null_block=0), []
    observer = attach(scheduler, monitor)
    observer.listen(steps.append)
    return scheduler, monitor, steps


def run(scheduler: Any) -> None:
    from vllm.v1.outputs import ModelRunnerOutput

    output = scheduler.schedule()
    ids = list(output.num_scheduled_tokens)
    done = [not scheduler.requests[r].is_prefill_chunk for r in ids]
    scheduler.update_from_output(
        output,
        ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={r: i for i, r in enumerate(ids)},
            sampled_token_ids=[[0] if d else [] for d in done],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        ),
    )


@pytest.mark.parametrize("windows", [(0,), (8,), (0, 8), (0, 8, 16)])
def test_hybrid_pools_break_no_rule(windows: tuple[int, ...]) -> None:
    from vllm.v1.request import RequestStatus

    from kvclaims.bridge.vllm import setup

    scheduler, monitor, steps = watched(40, windows)
    chance, hasher = random.Random(len(windows)), setup.block_hasher(SIZE)
    for number in range(60):
        name = f"r{number}"
        monitor.introduce(pool.REQUEST, name, True)
        shared = chance.randint(0, 5) * SIZE
        tokens = (*range(shared), *(100 + number for _ in range(chance.randint(1, 14))))
        scheduler.add_request(setup.make_request(name, tokens, chance.randint(1, 9), hasher))
        for _ in range(chance.randint(0, 4)):
            run(scheduler)
        if number % 7 == 3:
            scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
    for _ in range(200):
        run(scheduler)
    assert not scheduler.requests
    assert [str(v) for v in monitor.violations] == []
    told = {step.action for step in steps}
    assert {"admit", "take", "share", "register", "drop", "retire", "evict"} <= told
    keys = {step.args["k"] for step in steps if step.action == "register"}
    groups = {key.partition("@")[2] for key in keys}
    assert groups == {"", *map(str, range(1, len(windows)))}
