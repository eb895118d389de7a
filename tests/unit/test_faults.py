"""Planted faults: each is caught by its rule, leaves nothing behind, and applies or is an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvclaims.checker import faults
from kvclaims.checker.engines import find
from kvclaims.checker.faults import Edit, Fault, FaultError, planted, read_faults, run_faults
from kvclaims.checker.supervise import Program, supervise
from kvclaims.reference.pool import FreeQueue, Pool
from kvclaims.spec.interface import BadOperation, PoolConfig
from kvclaims.spec.operations import parse
from kvclaims.spec.vocabulary import Verdict

REFERENCE = find("reference")

RULES = [
    *("L1", "L2", "L3", "L4", "L5", "L6", "L7", "F1", "F2", "F3", "F4", "F5", "F6"),
    *("P1", "P2", "P3", "P4", "P5", "B1", "B2", "B3", "B4", "B5", "B6", "B7", "B8", "B9", "B10"),
    *("O2", "T1", "T2"),
]


def test_every_fault_in_the_reference_is_caught_by_its_rule(tmp_path: Path) -> None:
    report = run_faults("reference", lambda _: None, tmp_path)
    assert [str(one) for one in report.caught if one.verdict is not Verdict.HOLDS] == []
    assert report.verdict is Verdict.HOLDS
    assert {one.fault.rule for one in report.caught} == set(RULES)
    assert len(report.caught) == 48
    assert all(one.file is not None and one.file.is_file() for one in report.caught)
    assert all(one.program and len(one.program.operations) <= 6 for one in report.caught)


def test_a_finding_stands_where_its_file_cannot_be_written(tmp_path: Path) -> None:
    blocked = tmp_path / "a file"
    blocked.write_text("")
    report = run_faults("reference", lambda _: None, blocked, ("counter-not-lowered",))
    (one,) = report.caught
    assert one.verdict is Verdict.HOLDS
    assert one.file is None
    assert "cannot write" in str(one)


def test_the_reference_itself_breaks_nothing_in_their_programs() -> None:
    for fault in faults.faults_of(REFERENCE):
        assert fault.program is not None
        assert supervise(REFERENCE, None, fault.program) == (), fault.id


def edit(function: str, find: str, instead: str, count: int = 1) -> Edit:
    return Edit("reference/pool.py", function, find, instead, count)


def fault(*edits: Edit, rule: str = "B1") -> Fault:
    return Fault("test", rule, "a test", edits, budget=10)


def test_planting_is_undone() -> None:
    queue = FreeQueue([1, 2])
    before = FreeQueue.remove.__code__
    with planted(fault(edit("FreeQueue.remove", "self.count -= 1", "self.count -= 2")), REFERENCE):
        queue.remove(1)
        assert queue.count == 0
    assert FreeQueue.remove.__code__ is before


def test_properties_expressions_and_several_edits() -> None:
    pool = Pool([1, 2])
    wrong = fault(
        edit("Pool.headroom", "self.queue.count", "self.queue.count + 40"),
        edit("Pool.find", "self.entry.get(key, ())", "[7]"),
    )
    with planted(wrong, REFERENCE):
        assert pool.headroom == 42
        assert pool.find("k") == 7
    assert pool.headroom == 2


def test_fragments_are_matched_by_syntax_not_by_spelling() -> None:
    with planted(fault(edit("Pool.retire", "self . held.pop( request,None )", "pass")), REFERENCE):
        pool = Pool([1])
        pool.admit("r", 0)
        pool.retire("r")
        assert "r" in pool.held


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (edit("FreeQueue.remove", "self.count -= 3", "pass"), "has the fragment 0 times, not 1"),
        (edit("FreeQueue.remove", "self.count -= 1", "pass", 2), "has the fragment 1 times, not 2"),
        (edit("FreeQueue.gone", "self.count -= 1", "pass"), "test: no function FreeQueue.gone"),
        (Edit("reference/gone.py", "f", "x", "y"), "test: No module named"),
    ],
)
def test_a_fault_that_no_longer_applies_is_an_error_with_its_id(wrong: Edit, message: str) -> None:
    with pytest.raises(FaultError, match=message) as raised, planted(fault(wrong), REFERENCE):
        pass
    assert str(raised.value).startswith("test: ")


def test_an_error_is_never_counted_as_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = fault(edit("FreeQueue.gone", "x", "y"))
    monkeypatch.setattr(faults, "faults_of", lambda engine: (gone,))
    report = run_faults("reference", lambda _: None, tmp_path)
    assert report.verdict is Verdict.UNKNOWN
    assert "ERROR" in "\n".join(report.lines())
    assert "test: no function FreeQueue.gone" in "\n".join(report.lines())


def test_a_fault_that_lives_or_is_misnamed_is_violated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = [{"op": "submit", "request": "r", "content": [["A", 1]]}, {"op": "step"}]
    program = Program(PoolConfig(4, 4), tuple(parse(item) for item in raw))
    harmless = Fault(
        "lives",
        "B1",
        "",
        (edit("Pool.find", "self.entry.get(key, ())", "self.entry.get(key, {})"),),
        program,
    )
    counter = edit("FreeQueue.remove", "self.count -= 1", "pass")
    misnamed = Fault("misnamed", "L1", "", (counter,), program)
    monkeypatch.setattr(faults, "faults_of", lambda engine: (harmless, misnamed))
    report = run_faults("reference", lambda _: None, tmp_path)
    assert report.verdict is Verdict.VIOLATED
    assert [str(one).split()[0] for one in report.caught] == ["LIVES", "MISNAMED"]
    assert len(report.to_json()["violations"]) == 2


def test_a_child_that_dies_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dies = edit("Pool.find", "self.entry.get(key, ())", "__import__('os')._exit(3)")
    raw = [{"op": "submit", "request": "r", "content": [["A", 1]]}, {"op": "step"}]
    program = Program(PoolConfig(4, 4), tuple(parse(item) for item in raw))
    monkeypatch.setattr(
        faults, "faults_of", lambda engine: (Fault("dies", "B1", "", (dies,), program),)
    )
    (one,) = run_faults("reference", lambda _: None, tmp_path).caught
    assert one.verdict is Verdict.UNKNOWN
    assert one.error == "dies: exit code 3"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "faults need ids of their own"),
        ("[[fault", "x.toml: "),
        ("[[fault]]\nid = 'a'", "x.toml: a: lacks or mistakes"),
        (
            "[[fault]]\nid = 'a'\nrule = 'X1'\nmeaning = ''\nbudget = 3\n"
            "edits = [{path = 'p', function = 'f', find = 'a', replace = 'b'}]",
            "a: needs a known rule",
        ),
    ],
)
def test_malformed_files(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "x.toml"
    path.write_text(text)
    with pytest.raises(BadOperation, match=message.replace("[", r"\[")):
        read_faults(path)


def test_a_fault_is_planted_in_the_words_of_the_version_at_hand() -> None:
    gone = (edit("FreeQueue.remove", "self.counter -= 1", "pass"),)
    here = (edit("FreeQueue.remove", "self.count -= 1", "self.count -= 2"),)
    queue = FreeQueue([1, 2])
    with planted(Fault("test", "B1", "", gone, budget=1, alternatives=(here,)), REFERENCE):
        queue.remove(1)
    assert queue.count == 0


def test_where_no_words_apply_the_error_is_that_of_the_first() -> None:
    gone = (edit("FreeQueue.remove", "self.counter -= 1", "pass"),)
    other = (edit("FreeQueue.gone", "x", "y"),)
    wrong = Fault("test", "B1", "", gone, budget=1, alternatives=(other,))
    with pytest.raises(FaultError, match="has the fragment 0 times"), planted(wrong, REFERENCE):
        pass
