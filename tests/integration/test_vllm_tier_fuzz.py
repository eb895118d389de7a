"""Random acts on offloadable claims and the files that keep them; what is planted is found."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from tier_plants import (
    a_reset_spares_the_tier,
    any_room,
    blamed_on_all,
    computed_is_restored,
    copied_late,
    counted_at_once,
    every_copy_is_written,
    failed_on_all,
    loads_are_good,
    no_limit,
    no_look,
    no_quota,
    offloaded_without_copies,
    promised_copies_go,
    rests_stay,
    silent_before_kept,
)
from vllm_world import NEEDS_VLLM

from kvclaims.spec.interface import EngineInfo
from kvclaims.spec.vocabulary import Verdict

pytestmark = NEEDS_VLLM

INFO = EngineInfo("vllm", "here", "here")


def fuzz(acts: int, seed: int = 0, output: Path | None = None) -> Any:
    from kvclaims.bridge.vllm import tierfuzz

    return tierfuzz.fuzz(INFO, acts, None, seed, lambda _: None, output)


def test_nothing_is_found_and_everything_is_met() -> None:
    report = fuzz(6000)
    assert report.verdict is Verdict.HOLDS, list(report.lines())
    assert report.never_met == []
    assert report.to_json()["violations"] == []


def test_too_few_acts_to_meet_everything_show_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvclaims.bridge.vllm import tierfuzz

    monkeypatch.setattr(tierfuzz, "MET_FROM", 1)
    report = fuzz(50)
    assert report.verdict is Verdict.VACUOUS
    assert any("never met" in line for line in report.lines())


def test_a_version_without_the_interface_has_no_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    monkeypatch.delattr(KVConnectorBase_V1, "has_pending_push_work")
    report = fuzz(50)
    assert report.verdict is Verdict.NOT_EXPOSED
    assert "a tier, in this version" in report.to_json()["not_exposed"][0]


# -- what is planted -------------------------------------------------------------------------------


PLANTED: dict[Any, set[str]] = {
    no_look: {"B4", "O2"},
    counted_at_once: {"O1"},
    copied_late: {"B4", "O1"},
    any_room: {"O1"},
    promised_copies_go: {"O1", "O2"},
    no_quota: {"Q2"},
    no_limit: {"O1"},
    loads_are_good: {"B4", "O2"},
    blamed_on_all: {"O2"},
    rests_stay: {"O1"},
    a_reset_spares_the_tier: {"B10", "O1", "O2"},
    computed_is_restored: {"O1", "O3"},
    offloaded_without_copies: {"O1", "O2"},
    every_copy_is_written: {"B4"},
    silent_before_kept: {"L3"},
    failed_on_all: {"O2"},
}


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_what_is_planted_is_found(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvclaims.bridge.vllm import tierfuzz

    monkeypatch.setattr(tierfuzz, "SHRINK_S", 0.0)
    plant(monkeypatch)
    report = fuzz(12_000)
    assert report.verdict is Verdict.VIOLATED, plant.__doc__
    assert report.finding.rule in PLANTED[plant], report.finding


# -- what is written -------------------------------------------------------------------------------


def command(*arguments: str) -> tuple[int, dict[str, Any]]:
    """Its exit code, and what it told as JSON."""
    from kvclaims.checker.cli import run

    out = io.StringIO()
    code = run([*arguments, "--json"], out)
    return code, json.loads(out.getvalue())


def test_a_find_is_made_shorter_and_run_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with monkeypatch.context() as patch:
        any_room(patch)
        report = fuzz(6000, output=tmp_path)
        assert len(report.program.acts) <= 12
        code, told = command("replay", str(report.file))
        assert (code, told["violations"][0]["rule"]) == (1, "O1")
        assert f"run it again: kvclaims replay {report.file}" in "\n".join(report.lines())
    code, told = command("replay", str(report.file))
    assert (code, told["violations"]) == (0, [])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"acts": [["rmtree", 1]]}, "no run of a tier"),
        ({"acts": [["kill"]]}, "no run of a tier"),
        ({"acts": [["step", "many"]]}, "no run of a tier"),
        ({"acts": 3}, "no run of a tier"),
        ({"world": {"usable": 10, "tower": 3}}, "no run of a tier"),
        ({"world": {"usable": "ten"}}, "no run of a tier"),
        ({"rule": "Z9"}, "no run of a tier"),
        ({"engine": "nobody"}, "nobody"),
    ],
)
def test_a_file_that_is_no_run_is_turned_down(
    change: dict[str, Any], says: str, tmp_path: Path
) -> None:
    good = {"format": "kvclaims tier 1", "engine": "vllm", "rule": "O1", "world": {}, "acts": []}
    path = tmp_path / "run.json"
    path.write_text(json.dumps(good))
    assert command("replay", str(path))[0] == 0
    path.write_text(json.dumps({**good, **change}))
    code, told = command("replay", str(path))
    assert (code, says in told["error"]) == (2, True), told


def test_the_command_fuzzes_a_tier(capsys: pytest.CaptureFixture[str]) -> None:
    code, told = command("fuzz", "--engine", "vllm", "--tier", "--steps", "300")
    assert (code, told["verdict"]) == (0, "HOLDS")
    assert told["operations"] >= 300
    assert told["monitored_steps"] > 300
    code, told = command("fuzz", "--engine", "reference", "--tier")
    assert (code, told["error"]) == (2, "engine reference has no tier to fuzz")
    code, told = command("fuzz", "--engine", "vllm", "--tier", "--floor", "2")
    assert code == 2
    assert "--tier goes with" in capsys.readouterr().err
