"""The pytest plugin: what breaks a rule fails its test, what a test builds by hand does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from vllm_world import NEEDS_VLLM

pytestmark = NEEDS_VLLM
pytest_plugins = ("pytester",)

PLUGIN = ("-p", "kvclaims.bridge.pytest_plugin", "-p", "no:cacheprovider")

SUITE = '''
import pytest

from kvclaims.bridge.vllm import setup

setup.quieten(setup.ALONE)
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.scheduler import Scheduler


@pytest.fixture
def pool():
    return BlockPool(num_gpu_blocks=6, enable_caching=True, hash_block_size=4)


def test_clean(pool):
    blocks = pool.get_new_blocks(3)
    pool.touch(blocks[:1])
    pool.free_blocks(reversed(blocks))
    pool.free_blocks(blocks[:1])
    assert pool.get_num_free_blocks() == 5
    with pytest.raises(ValueError, match="free blocks"):
        pool.get_new_blocks(9)


def test_double_free(pool):
    (block,) = pool.get_new_blocks(1)
    pool.free_blocks([block])
    pool.free_blocks([block])


def test_by_hand(pool):
    pool.blocks[2].ref_cnt = 7
    pool.free_blocks([pool.blocks[2]])
    assert pool.blocks[2].ref_cnt == 6


def test_a_lost_reference(pool, monkeypatch):
    """An allocator whose touch counts nothing (a fault planted in the class itself)."""
    (block,) = pool.get_new_blocks(1)
    touch = BlockPool.touch.__wrapped__.__code__

    def forgetful(self, blocks):
        for block in blocks:
            pass

    monkeypatch.setattr(BlockPool.touch.__wrapped__, "__code__", forgetful.__code__)
    pool.touch([block])


def test_scheduler():
    hasher = setup.block_hasher(4)
    scheduler = setup.make_scheduler(Scheduler, 8, 4)
    scheduler.add_request(setup.make_request("a", tuple(range(9)), 1, hasher))
    assert scheduler.schedule().total_num_scheduled_tokens == 9
    scheduler.finish_requests("a", 7)
    assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 8


def test_a_table_by_hand():
    scheduler = setup.make_scheduler(Scheduler, 8, 4)
    manager = scheduler.kv_cache_manager.coordinator.single_type_managers[0]
    pool = scheduler.kv_cache_manager.block_pool
    manager.req_to_blocks["made up"] = [pool.blocks[3]]
    pool.free_blocks(pool.get_new_blocks(4))
    manager.req_to_blocks.clear()
'''

FAILING = {"test_double_free": "B2", "test_a_lost_reference": "B2"}


def environment() -> dict[str, str]:
    return {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_TARGET_DEVICE": "cpu"}


def run(folder: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """Run pytest with the plugin in a process of its own; what it printed and its report."""
    report = folder / "report.json"
    command = [sys.executable, "-m", "pytest", *PLUGIN, "--kvclaims-report", str(report)]
    ran = subprocess.run(
        [*command, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env=environment(),
        timeout=600,
    )
    return ran, json.loads(report.read_text()) if report.is_file() else {}


@pytest.mark.parametrize("workers", [(), ("-n", "1")], ids=["alone", "xdist"])
def test_rules_fail_the_tests_that_break_them(tmp_path: Path, workers: tuple[str, ...]) -> None:
    (tmp_path / "test_suite.py").write_text(SUITE)
    ran, report = run(tmp_path, "-rA", *workers)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    failed = {
        line.split("::")[1].split()[0]
        for line in ran.stdout.splitlines()
        if line.startswith("FAILED ")
    }
    assert failed == set(FAILING)
    assert report["verdict"] == "VIOLATED"
    told = {v["test"].split("::")[1].split()[0]: v["rule"] for v in report["violations"]}
    assert told == FAILING
    double = next(v for v in report["violations"] if "double" in v["test"])
    assert [line.split()[0] for line in double["operations"] if line.startswith("    ")] == [
        "get_new_blocks",
        "free_blocks",
        "free_blocks",
    ]
    by_hand = {state["test"].split("::")[1].split()[0] for state in report["hand_built"]}
    assert by_hand == {"test_by_hand", "test_a_table_by_hand"}
    assert report["tests"] == 6
    assert report["pools"] == 6
    assert "B2 the reference count equals the holders that can be named" in ran.stdout
    assert "2 states built by hand in 2 tests, not judged" in ran.stdout


def test_a_suite_without_pools_is_vacuous(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_nothing(): pass")
    result = pytester.runpytest_subprocess(*PLUGIN)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*kvclaims: VACUOUS*", "no vLLM pool was made*"])


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (("--kvclaims-rules", "B1,F4"), "*F4 (known: B1, B2*"),
        (("--kvclaims-baseline", "none.toml"), "*none.toml: No such file*"),
    ],
)
def test_wrong_options_say_so(
    pytester: pytest.Pytester, option: tuple[str, str], message: str
) -> None:
    result = pytester.runpytest_subprocess(*PLUGIN, *option)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([message])


SDIST = os.environ.get("KVCLAIMS_VLLM_SDIST", "")


@pytest.mark.skipif(not SDIST, reason="KVCLAIMS_VLLM_SDIST names no vLLM source distribution")
def test_the_engine_s_own_tests_raise_no_alarm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Path(SDIST) / "tests" / "v1" / "core"
    files = [
        own / "test_priority_scheduler_random.py",
        own / "test_single_type_kv_cache_manager.py",
    ]
    path = os.pathsep.join([SDIST, os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    ran, report = run(tmp_path, "--noconftest", *map(str, files))
    assert report["violations"] == [], ran.stdout[-3000:]
    assert report["verdict"] == "HOLDS"
    assert report["operations"] > 50
