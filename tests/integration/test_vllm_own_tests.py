"""vLLM's own scheduler tests, with claims in force on every scheduler that they make."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import own_models
import pytest
from own_models import write_folders
from vllm_world import NEEDS_VLLM

HERE = str(Path(own_models.__file__).parent)
SDIST = os.environ.get("KVCLAIMS_VLLM_SDIST", "")

pytestmark = [
    *NEEDS_VLLM,
    pytest.mark.slow,
    pytest.mark.skipif(not SDIST, reason="KVCLAIMS_VLLM_SDIST names no vLLM source distribution"),
]

FILES = (
    "core/test_scheduler.py",
    "core/test_async_scheduler.py",
    "core/test_deferred_block_free.py",
    "core/test_prefix_caching.py",
    "core/test_prefix_replay.py",
    "core/test_priority_preemption_bug.py",
    "core/test_priority_scheduler_random.py",
    "core/test_swa_inflight_window_free.py",
    "core/test_worker_slot_overflow.py",
    "kv_connector/unit/test_cache_pollution_prevention.py",
    "kv_connector/unit/test_error_propagation.py",
    "kv_connector/unit/test_invalid_blocks_correctness.py",
    "kv_connector/unit/test_kv_load_failure_recovery.py",
    "kv_connector/unit/test_remote_decode_lifecycle.py",
    "kv_connector/unit/test_remote_prefill_lifecycle.py",
)


@pytest.mark.timeout(1800)
def test_they_pass_with_claims_in_force(tmp_path: Path) -> None:
    write_folders(tmp_path)
    own = Path(SDIST) / "tests" / "v1"
    ran = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "--noconftest", "-q", "-rfE", "--tb=line"),
            *("-c", os.devnull, f"--rootdir={tmp_path}", "-p", "no:cacheprovider"),
            *("-p", "own_models", "-p", "kvclaims.bridge.vllm.stand_in"),
            *(str(own / name) for name in FILES if (own / name).exists()),
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([SDIST, HERE, os.environ.get("PYTHONPATH", "")]),
            "VLLM_TARGET_DEVICE": "cpu",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        },
    )
    said = ran.stdout[-6000:]
    found = re.search(r"schedulers: (\d+) with claims", ran.stdout)
    assert found, said
    assert int(found[1]) > 100, said
    passed = re.search(r"(\d+) passed", ran.stdout)
    assert passed, said
    assert int(passed[1]) > 400, said
    assert re.findall(r"^(?:FAILED|ERROR) .*$", ran.stdout, re.MULTILINE) == [], said
    assert ran.returncode == 0, said
