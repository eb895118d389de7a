"""Replaying counterexamples: shown again, gone, or no counterexample at all."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from kvclaims.checker import faults
from kvclaims.checker.cli import run
from kvclaims.checker.engines import find
from kvclaims.checker.replay import replay
from kvclaims.spec.interface import BadOperation
from kvclaims.spec.vocabulary import Verdict

REFERENCE = find("reference")

EXAMPLE: dict[str, Any] = {
    "format": 1,
    "engine": "reference",
    "rule": "B1",
    "message": "the counter was wrong",
    "seed": 3,
    "fault": None,
    "pool": {"usable": 4, "block_size": 4, "defer_limit": 1},
    "operations": [{"op": "submit", "request": "r1", "content": [["A", 1]]}, {"op": "step"}],
}


def written(folder: Path, **changes: Any) -> Path:
    path = folder / "example.json"
    path.write_text(json.dumps({**EXAMPLE, **changes}))
    return path


def command(*arguments: str) -> tuple[int, str]:
    out = io.StringIO()
    return run(["replay", *arguments], out), out.getvalue()


def test_what_is_mended_holds(tmp_path: Path) -> None:
    code, text = command(str(written(tmp_path)))
    assert code == 0
    assert "nothing is broken by 2 operations" in text


def test_a_planted_fault_shows_again(tmp_path: Path) -> None:
    path = written(tmp_path, fault="counter-not-lowered")
    report = replay(path)
    assert report.verdict is Verdict.VIOLATED
    assert report.findings[0].rule == "B1"
    code, text = command(str(path))
    assert code == 1
    assert "VIOLATED B1 a block is in the free queue exactly when nobody refers to it" in text
    assert "(at register(r1, 1, " in text
    assert "2 step" in text
    assert "request r1: state: waiting → finished" in text
    assert replay(written(tmp_path)).verdict is Verdict.HOLDS


def test_json(tmp_path: Path) -> None:
    code, text = command(str(written(tmp_path, fault="counter-not-lowered")), "--json")
    told = json.loads(text)
    assert (code, told["exit"], told["verdict"]) == (1, 1, "VIOLATED")
    assert told["violations"][0]["rule"] == "B1"
    assert told["violations"][0]["operations"] == EXAMPLE["operations"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 2}, "not a counterexample of this format"),
        ({"rule": "X1"}, "unknown rule 'X1'"),
        ({"engine": 3}, "engine must be a text"),
        ({"fault": 3}, "fault must be a text and seed a whole number, or null"),
        ({"pool": {"usable": 4}}, "pool must have whole numbers"),
        ({"pool": {"usable": 0, "block_size": 4, "defer_limit": 1}}, "a pool needs usable > 0"),
        ({"operations": "none"}, "operations must be a list"),
        ({"operations": [{"op": "eval"}]}, "unknown operation 'eval'"),
    ],
)
def test_malformed(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = written(tmp_path, **changes)
    with pytest.raises(BadOperation, match=message):
        replay(path)
    assert command(str(path))[0] == 2


@pytest.mark.parametrize("text", ["", "{", "[1]", "null"])
def test_not_a_counterexample(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    assert command(str(path))[0] == 2


def test_an_unknown_fault_is_wrong_use(tmp_path: Path) -> None:
    path = written(tmp_path, fault="nowhere")
    with pytest.raises(BadOperation, match="no planted fault 'nowhere'"):
        replay(path)


def test_the_file_of_a_caught_fault_shows_the_same_rule(tmp_path: Path) -> None:
    report = faults.run_faults("reference", lambda _: None, tmp_path, ["pins-kept"])
    (caught,) = report.caught
    assert caught.file is not None
    assert replay(caught.file).findings[0].rule == "P2"


def test_that_another_version_is_run_is_said(tmp_path: Path) -> None:
    _, text = command(str(written(tmp_path, version="0.0.1")))
    assert "it was found on reference 0.0.1" in text
    _, text = command(str(written(tmp_path, version=REFERENCE.info().version)))
    assert "it was found on" not in text


def test_a_version_that_is_no_text_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BadOperation, match="version must be a text"):
        replay(written(tmp_path, version=3))


def test_the_reference_is_part_of_this_package_and_has_no_line_to_show(tmp_path: Path) -> None:
    assert replay(written(tmp_path, fault="counter-not-lowered")).places == ()
