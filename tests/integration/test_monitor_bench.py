"""The monitor's benchmark, short: that it drives what it says and judges what it times."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from vllm_world import NEEDS_VLLM

pytestmark = NEEDS_VLLM

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`benchmarks/monitor.py`, imported as it is run."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("monitor_script", BENCHMARKS / "monitor.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_both_schedulers_do_the_same_and_one_is_judged() -> None:
    from kvclaims.bridge.vllm import monitor_bench as bench

    load = bench.Load(running=4, groups=2, shared=2, own=2, answer=20)
    streams = [bench.Stream(60, load, watched) for watched in (False, True)]
    for stream in streams:
        stream.prepare(60)
        for _ in range(60):
            stream.step()
    pools = [stream.scheduler.kv_cache_manager.block_pool for stream in streams]
    queues = [[b.block_id for b in p.free_block_queue.get_all_free_blocks()] for p in pools]
    assert queues[0] == queues[1]
    watched = streams[1].watched
    assert watched is not None
    watched.check()
    fired = watched.monitor.fired
    assert all(fired[name] > 0 for name in ("admit", "take", "share", "register", "evict", "drop"))
    for stream in streams:
        stream.close()


def test_a_pool_that_differs_is_not_measured() -> None:
    from kvclaims.bridge.vllm import monitor_bench as bench

    stream = bench.Stream(60, bench.Load(running=4, shared=2, own=2), watched=True)
    stream.scheduler.kv_cache_manager.block_pool.blocks[3].ref_cnt += 1
    assert stream.watched is not None
    with pytest.raises(AssertionError, match="B2"):
        stream.watched.check()
    stream.close()


def test_a_bare_and_a_watched_run_share_a_whole_engine() -> None:
    from kvclaims.bridge.vllm import monitor_bench as bench

    cost = bench.whole_engine(40, 1)  # long enough to take another block each
    assert cost.steps == 40
    assert cost.monitored > 0
    assert min(cost.bare, cost.watched) > 0


def test_the_script_prints_its_table_and_says_what_it_misses(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        sys, "argv", ["monitor.py", "--pools", "600,700", "--steps", "3", "--rounds", "2"]
    )
    monkeypatch.setattr(script, "ALLOCATOR_GOAL", 2.0)  # nobody is twice as fast when watched
    assert script.main() == 1
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split("|")[1].strip() for line in lines[2:5]]
    assert rows == ["chat, pool of 600", "chat, pool of 700", "prefill, pool of 600"]
    assert lines[5].startswith("MISSED: chat, pool of 600: ")


@pytest.mark.parametrize(
    ("watched", "missed"),
    [((1.3, 1.3), 0), ((1.3, 1.5), 2), ((1.5, 1.5), 2), ((1.1, 1.3), 1)],
)
def test_a_goal_is_met_or_said_to_be_missed(
    script: ModuleType, watched: tuple[float, float], missed: int
) -> None:
    from kvclaims.bridge.vllm.monitor_bench import Cost

    costs: list[Any] = [
        Cost(f"pool {i}", 1.0, seconds, 10, 100) for i, seconds in enumerate(watched)
    ]
    assert len(script.missed_goals(costs, [])) == missed
    assert len(script.missed_goals(costs, [Cost("whole", 1.0, 1.05, 1, 1)])) == missed + 1
