"""`vllm.LLM` with claims: the examples run on one engine, and say what they promise."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from vllm_world import NEEDS_VLLM

pytestmark = [*NEEDS_VLLM, pytest.mark.slow]

EXAMPLES = Path(__file__).parents[2] / "examples"

SAID = {
    "pinned_system_prompt": [
        "without a claim, 0 of 20 blocks were found again",
        "the claim was accepted: fits the headroom",
        "with it, 20 of 20 blocks were found again",
    ],
    "two_tenants": [
        "team-b asked for 30 blocks: exceeds the owner's quota of 20 blocks",
        "team-b asked for 10 to 30: 20 granted",
        "team-b's request of 50 blocks: refused, 30 missing",
        "in its way: 40 blocks of somebody else",
        "team-b sees 1 claim, the operator 2",
    ],
    "pausing_agent": [
        "claimed 15 blocks: accepted",
        "resumed with 15 blocks found",
        "let go: released",
    ],
}


@pytest.fixture(scope="module")
def said() -> str:
    """All examples, each as the command that the guide shows, but on one engine."""
    program = (
        "import engine, runpy\nllm = engine.engine()\nengine.engine = lambda: llm\n"
        + "".join(f"runpy.run_path('{name}.py', run_name='__main__')\n" for name in SAID)
    )
    ran = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        timeout=550,
        cwd=EXAMPLES,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return ran.stdout


@pytest.mark.parametrize("example", SAID)
def test_an_example_says_what_it_shows(said: str, example: str) -> None:
    lines = said.splitlines()
    at = lines.index(SAID[example][0])
    assert lines[at : at + len(SAID[example])] == SAID[example]
