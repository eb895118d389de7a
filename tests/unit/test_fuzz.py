"""Fuzzing the reference: it holds, it is repeatable, and it finds what is planted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvclaims.checker import faults
from kvclaims.checker.counterexample import read, shortest
from kvclaims.checker.engines import find
from kvclaims.checker.fuzz import FuzzReport, Ways, fuzz
from kvclaims.checker.supervise import Program
from kvclaims.checker.verdicts import Violation
from kvclaims.spec.interface import PoolConfig
from kvclaims.spec.operations import parse
from kvclaims.spec.vocabulary import Verdict

REFERENCE = find("reference")


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    assert not (tmp_path / ".hypothesis").exists()


def run(steps: int, seed: int) -> FuzzReport:
    return fuzz(REFERENCE, steps, None, seed, lambda _: None)


def test_the_reference_holds(tmp_path: Path) -> None:
    report = run(1500, 0)
    assert report.verdict is Verdict.HOLDS
    assert report.operations == 1500
    assert report.runs > 10
    assert report.monitored > 1000
    told = report.to_json()
    assert told["violations"] == []
    assert told["steps"] > 300
    assert list(tmp_path.iterdir()) == []


def test_the_same_seed_makes_the_same_run() -> None:
    first, again, other = (run(400, seed).to_json() for seed in (7, 7, 8))
    assert first == again
    assert first != other


def test_seconds_are_kept() -> None:
    report = fuzz(REFERENCE, None, 3.0, 0, lambda _: None)
    assert report.verdict is Verdict.HOLDS
    assert 3.0 <= report.seconds < 20  # what was begun is brought to its end


def test_a_planted_fault_is_found_made_short_and_written(tmp_path: Path) -> None:
    fault = faults.named("counter-not-lowered", REFERENCE)
    with faults.planted(fault, REFERENCE):
        report = run(2000, 1)
        again = run(2000, 1)
    assert report.verdict is Verdict.VIOLATED
    assert report.finding is not None
    assert report.finding.rule == "B1"
    assert report.finding == again.finding
    (violation,) = report.to_json()["violations"]
    assert len(violation["operations"]) <= 3
    assert violation["file"] == "counterexamples/reference-seed1-B1.json"
    example = read(tmp_path / violation["file"])
    assert example.rule == "B1"
    assert [op.to_json() for op in example.program.operations] == violation["operations"]
    shown = "\n".join(report.lines())
    assert "kvclaims replay counterexamples/reference-seed1-B1.json" in shown
    json.dumps(report.to_json())


def test_a_finding_that_cannot_be_written_is_not_lost(tmp_path: Path) -> None:
    blocked = tmp_path / "a file"
    blocked.write_text("")
    with faults.planted(faults.named("counter-not-lowered", REFERENCE), REFERENCE):
        report = fuzz(REFERENCE, 200, None, 1, lambda _: None, blocked)
    assert report.verdict is Verdict.VIOLATED
    assert report.file is None
    assert "not kept: cannot write" in "\n".join(report.lines())
    assert report.to_json()["violations"][0]["rule"] == "B1"


def test_too_little_tried_is_vacuous() -> None:
    report = fuzz(REFERENCE, 60, None, 0, lambda _: None, ways=Ways(60, None, floor=21))
    assert report.verdict is Verdict.VACUOUS
    assert "too little was tried: 21 kinds of step are the least" in "\n".join(report.lines())


def test_leaving_operations_out() -> None:
    """Of ten operations two are needed, one after the other."""
    raw = [{"op": "advance", "ticks": n} for n in range(1, 11)]
    program = Program(PoolConfig(4), tuple(parse(item) for item in raw))

    def breaks(candidate: Program) -> list[Violation]:
        ticks = [operation.fields["ticks"] for operation in candidate.operations]
        if 3 in ticks and 8 in ticks:
            return [Violation("L6", "both", operation=ticks.index(8) + 1)]
        return [Violation("L1", "another rule", operation=1)]

    left = shortest(program, "L6", breaks)
    assert [operation.fields["ticks"] for operation in left.operations] == [3, 8]
