"""Offloadable claims in whole engines with real KV tensors: what comes back has the same bytes,
what is wrong is refused, and an engine that starts where another was killed finds nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from vllm_world import NEEDS_VLLM

from kvclaims.checker.audit import audit, read_trace
from kvclaims.spec.telemetry import TraceError
from kvclaims.spec.vocabulary import Verdict

pytestmark = [*NEEDS_VLLM, pytest.mark.slow]

PROGRAM = Path(__file__).parents[1] / "offload_program.py"


def run(policy: str, folder: Path, *call: str) -> tuple[int, dict[str, Any]]:
    """How an engine ended, and what it told."""
    ran = subprocess.run(
        [sys.executable, str(PROGRAM), policy, str(folder), *call],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ran.stdout.strip(), ran.stderr[-3000:]
    return ran.returncode, json.loads(ran.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A folder that an engine was killed in while it wrote its second copy more."""
    folder = tmp_path_factory.mktemp("killed")
    code, told = run("recompute", folder, "3")
    assert code == -signal.SIGKILL
    return folder, told


@pytest.fixture(scope="module")
def restarted(killed: tuple[Path, dict[str, Any]]) -> dict[str, Any]:
    """The next engine in the same folder, with more rubbish in it, also of a second worker that
    it does not have."""
    folder, _ = killed
    (folder / "tier" / "0-1").mkdir()
    for left in ("abcd.kv", "ef01.part"):
        (folder / "tier" / "0-1" / left).write_bytes(b"a part of a block")
    (folder / "tier" / "0-0" / "abcd.kv").write_bytes(b"kvclaims copy 1\n{}\nrubbish")
    code, told = run("fail", folder)
    assert code == 0
    return told


def test_killed_while_it_writes_it_leaves_whole_copies_and_one_part(
    killed: tuple[Path, dict[str, Any]],
) -> None:
    folder, told = killed
    assert told["phases"] == ["materialized", "offloaded"]
    left = {path.suffix for path in (folder / "tier" / "0-0").iterdir()}
    assert left == {".kv", ".part", ""}
    with pytest.raises(TraceError, match="ends without trace_closed"):
        read_trace(folder / "recompute.jsonl")


def test_the_next_engine_starts_with_nothing(
    killed: tuple[Path, dict[str, Any]], restarted: dict[str, Any]
) -> None:
    assert restarted["left"] == ["in-use"]
    assert [path.name for path in (killed[0] / "tier" / "0-1").iterdir()] == ["in-use"]
    assert restarted["claim"] == "accepted"


def test_what_comes_back_has_the_same_bytes_and_gives_the_same_tokens(
    restarted: dict[str, Any],
) -> None:
    assert restarted["phases"][:3] == ["materialized", "offloaded", "materialized"]
    assert restarted["away"] == []
    assert len(set(restarted["before"])) == 12
    assert restarted["after"] == restarted["before"]
    assert (restarted["found"], restarted["same"]) == (12, True)


def test_a_copy_with_one_bit_turned_over_fails_its_request(
    killed: tuple[Path, dict[str, Any]], restarted: dict[str, Any]
) -> None:
    assert restarted["phases"][3:] == ["offloaded", "harmed"]
    assert restarted["finish"] == "error"
    assert restarted["blamed"] == [{"claim": "c", "owner": "a", "blocks": 12}]
    assert (restarted["recovered"], restarted["recomputed"]) == (True, True)
    assert restarted["closed"] == ["in-use"]
    report = audit([killed[0] / "fail.jsonl"])
    assert report.verdict is Verdict.HOLDS, list(report.lines())
    assert report.runs[0].fold.failed_restores == ["a/c"]


def test_a_claim_that_cannot_be_kept_is_harmed_when_its_blocks_go(
    killed: tuple[Path, dict[str, Any]], restarted: dict[str, Any]
) -> None:
    """The disk is full: the claim is told why, the trace names it, and an audit agrees."""
    full = restarted["full"]
    told = (full["phase"], full["harmed_by"], full["unsaved_reason"])
    assert told == ("harmed", "own_choice", "No space left on device")
    assert audit([killed[0] / "fail.jsonl"]).runs[0].fold.unsaved["a/full"] == 12


def test_or_the_request_computes_it(tmp_path: Path) -> None:
    code, told = run("recompute", tmp_path)
    assert (code, told["finish"]) == (0, "length")
    assert told["blamed"] == [{"claim": "c", "owner": "a", "blocks": 12}]
    assert (told["recovered"], told["recomputed"]) == (True, True)
    report = audit([tmp_path / "recompute.jsonl"])
    assert report.verdict is Verdict.HOLDS, list(report.lines())
