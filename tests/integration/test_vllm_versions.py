"""`--engine-path`: another vLLM in its own process, and one plain line where there is none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from vllm_world import NEEDS_VLLM

from kvclaims.bridge.vllm.engine import WHOLE_ENGINE, compiled, version_of
from kvclaims.spec.interface import EngineMissing

pytestmark = NEEDS_VLLM

SDIST = os.environ.get("KVCLAIMS_VLLM_SDIST", "")


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvclaims.checker.cli", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def package(folder: Path, text: str) -> Path:
    (folder / "vllm").mkdir()
    (folder / "vllm" / "__init__.py").write_text(text)
    return folder


def test_a_path_without_an_engine_says_so(tmp_path: Path) -> None:
    ran = command("litmus", "L1", "--engine", "vllm", "--engine-path", str(tmp_path))
    assert ran.returncode == 2
    assert ran.stderr.count("\n") == 1
    assert "no engine there" in ran.stderr


def test_an_engine_that_cannot_be_imported_says_so(tmp_path: Path) -> None:
    folder = package(tmp_path, "import not_there_at_all\n")
    ran = command("litmus", "L1", "--engine", "vllm", "--engine-path", str(folder))
    assert ran.returncode == 2
    assert ran.stderr.count("\n") == 1
    assert "not_there_at_all" in ran.stderr


def test_the_version_is_that_of_the_code(tmp_path: Path) -> None:
    folder = package(tmp_path, "") / "vllm"
    assert version_of(folder) == "unknown"
    (tmp_path / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.30.0\n")
    assert version_of(folder) == "0.30.0"
    (folder / "_version.py").write_text("__version__ = version = '0.31.1'\n")
    assert version_of(folder) == "0.31.1"


def test_a_source_tree_runs_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = package(tmp_path, "") / "vllm"
    assert not compiled(folder)
    monkeypatch.setattr("kvclaims.bridge.vllm.engine.compiled", lambda _: False)
    with pytest.raises(EngineMissing, match="source tree without compiled files"):
        WHOLE_ENGINE.info()


@pytest.mark.skipif(not SDIST, reason="KVCLAIMS_VLLM_SDIST names no vLLM source distribution")
def test_another_version_is_the_one_under_test() -> None:
    ran = command("litmus", "L1", "--json", "--engine", "vllm", "--engine-path", SDIST)
    report = json.loads(ran.stdout)
    assert report["verdict"] == "HOLDS"
    assert Path(report["engine"]["path"]).is_relative_to(SDIST)
