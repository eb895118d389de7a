"""Known findings: each script shows its finding on the vLLM that is installed, unpatched."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from vllm_world import NEEDS_VLLM

from kvclaims.bridge.vllm.engine import IN_PROCESS, imported_version
from kvclaims.checker.baseline import read_baseline

pytestmark = NEEDS_VLLM

FOLDER = Path(__file__).parents[2] / "docs" / "findings"
SHOWN = {
    "copied_before_computed": "BROKEN B4",
    "double_release": "BROKEN B2 B5",
    "failed_assert": "BROKEN B9 B1",
    "failed_load_waits": "BROKEN B11",
    "hits_of_no_block": "BROKEN B8",
    "never_computed_hit": "BROKEN B4 L7",
    "removed_while_resident": "BROKEN B8",
    "session_forgets": "BROKEN B4",
    "stale_partial_key": "BROKEN B3 B8",
    "state_of_fewer_tokens": "BROKEN B4",
    "stranded_behind": "BROKEN B11",
    "waits_for_ever": "BROKEN B11",
    "window_of_a_load": "BROKEN B4",
}


MENDED = {"parked_ahead": "B11"}
"""Shown on older versions; on what is installed there is nothing to see any more."""


@pytest.mark.parametrize("name", sorted(MENDED))
def test_it_is_mended(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    assert capsys.readouterr().out.splitlines()[-1] == "not shown"


@pytest.mark.parametrize("name", sorted(MENDED))
def test_it_is_shown_where_holders_wait_among_the_others(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As it was before vLLM 0.31."""
    from vllm.v1.core.sched.scheduler import Scheduler

    monkeypatch.setattr(Scheduler, "_holds_kv_blocks", staticmethod(lambda _: False))
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    assert capsys.readouterr().out.splitlines()[-1] == f"BROKEN {MENDED[name]}"


@pytest.mark.parametrize("name", sorted(SHOWN))
def test_it_is_shown(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    assert capsys.readouterr().out.splitlines()[-1] == SHOWN[name]


def test_every_script_is_known_by_name_and_the_other_way_round() -> None:
    findings = read_baseline(IN_PROCESS.findings).findings
    older = {"session-waits-behind", "session-answered-late"}  # mended in what is installed
    assert {finding.name for finding in findings if not finding.script} == older
    findings = tuple(finding for finding in findings if finding.script)
    shown = SHOWN | MENDED
    assert {Path(finding.script).stem for finding in findings} == set(shown)
    assert {path.stem for path in FOLDER.glob("*.py")} == set(shown)
    for finding in findings:
        script = Path(finding.script).stem
        assert finding.rule in shown[script].split()
        assert finding.versions.contains(imported_version()) is (script in SHOWN)
