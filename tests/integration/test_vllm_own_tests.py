"""vLLM's own scheduler tests, with claims in force on every scheduler that they make."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from vllm_world import NEEDS_VLLM

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

NO_MODEL = "Invalid repository ID or local directory specified"
"""What tests say whose model would have to be downloaded."""

MODELS = ("facebook/opt-125m", "facebook/opt-350m", "Qwen/Qwen2.5-VL-3B-Instruct")
"""Models that tests only name, and never run: a folder that is called so says what they are."""

OPT = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "hidden_size": 768,
    "ffn_dim": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 2048,
    "vocab_size": 50272,
    "word_embed_proj_dim": 768,
    "torch_dtype": "float16",
    "bos_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 1,
}


@pytest.mark.timeout(1800)
def test_they_pass_with_claims_in_force(tmp_path: Path) -> None:
    for model in MODELS:
        (tmp_path / model).mkdir(parents=True)
        (tmp_path / model / "config.json").write_text(json.dumps(OPT))
    own = Path(SDIST) / "tests" / "v1"
    ran = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "--noconftest", "-q", "-rf", "--tb=line"),
            *("-c", os.devnull, f"--rootdir={tmp_path}", "-p", "no:cacheprovider"),
            *("-p", "kvclaims.bridge.vllm.stand_in"),
            *(str(own / name) for name in FILES if (own / name).exists()),
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([SDIST, os.environ.get("PYTHONPATH", "")]),
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
    assert int(passed[1]) > 150, said
    failed = re.findall(r"^FAILED .*? - (.*)$", ran.stdout, re.MULTILINE)
    odd = [reason for reason in failed if not reason.startswith("pydantic_core")]
    assert odd == [], said
    assert ran.stdout.count(NO_MODEL) >= len(failed), said
