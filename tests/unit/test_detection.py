"""The record of what finds what: it resumes, compares fairly, and every kind is really shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvclaims.checker import detection
from kvclaims.checker.baseline import read_baseline
from kvclaims.checker.codemutants import CodeMutant
from kvclaims.checker.detection import (
    CLEAN,
    CONTROL,
    Answer,
    Drawn,
    Results,
    functions_of,
    fuzz_clean,
    outermost,
    pass_over,
    seed_name,
    statement,
)
from kvclaims.checker.detectionpage import (
    BOTH,
    HALF,
    NEITHER,
    OURS,
    POLICY,
    THEIRS,
    Reason,
    fate_of,
    page,
    read_kinds,
    read_reasons,
)
from kvclaims.checker.enginemutants import Place, Places
from kvclaims.checker.engines import find
from kvclaims.checker.faults import faults_of, planted
from kvclaims.checker.instances import MACHINES
from kvclaims.spec.interface import BadOperation

MUTANT = CodeMutant(
    "e/pool.py", "Pool.take", 3, "flip a comparison", "a < b", "a <= b", lambda: "def take(): ..."
)
KILLED = Answer("fuzzing", "B1 in operation 2 of 2: the queue is short")


def test_every_kind_is_shown_by_something_that_is_there() -> None:
    vllm = find("vllm")
    planted = {f"{e.name}:{f.id}" for e in (vllm, find("reference")) for f in faults_of(e)}
    known = read_baseline(vllm.findings).findings  # type: ignore[attr-defined]
    names = planted | {f"finding:{finding.name}" for finding in known}
    guarded = {
        f"machine:{machine.name} {rule}"
        for machine in MACHINES.values()
        for action in machine.actions
        for guard in action.guards
        for rule in guard.protects
    }
    shown = {one for kind in read_kinds() for one in kind.shown_by}
    assert shown - names - guarded == set()
    assert len(read_kinds()) == 53


def test_a_kind_that_only_a_machine_shows_says_why() -> None:
    for kind in read_kinds():
        if all(one.startswith("machine:") for one in kind.shown_by):
            assert kind.why, kind.where


def test_a_kind_that_nothing_shows_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "kinds.toml"
    path.write_text('[[kind]]\nwhere = "x"\nwhat = "y"\nrules = ["B1"]\nshown_by = []\n')
    with pytest.raises(BadOperation, match="x is shown by nothing"):
        read_kinds(path)


def test_results_are_kept_and_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    first = Results(path, "1.0")
    assert first.wants("ours", MUTANT, 300)
    first.put("ours", MUTANT, 300, Answer(), 1.5)
    again = Results(path, "1.0")
    assert not again.wants("ours", MUTANT, 300)
    assert again.wants("ours", MUTANT, 6000), "one that lives is tried again with more effort"
    assert again.wants("theirs", MUTANT, 300)
    again.put("ours", MUTANT, 6000, KILLED, 9.0)
    assert not Results(path, "1.0").wants("ours", MUTANT, 60_000), "one that was caught is not"
    assert Results(path, "2.0").wants("ours", MUTANT, 300), "another version begins anew"


def test_a_sample_is_read_back_only_for_the_same_places(tmp_path: Path) -> None:
    places = Places((Place("e/pool.py"),), 1, 4)
    drawn = Drawn((MUTANT,), 9)
    drawn.write(tmp_path / "sample.json", places)
    back = Drawn.read(tmp_path / "sample.json", places)
    assert back == drawn
    assert [mutant.source for mutant in back.mutants] == ["def take(): ..."]
    assert Drawn.read(tmp_path / "sample.json", Places(places.modules, 1, 5)) is None
    assert Drawn.read(tmp_path / "none.json", places) is None


def test_shares_are_all_of_it_and_disjoint() -> None:
    whole = [MUTANT] * 5
    assert sum(len(detection.share(whole, f"{i}/3")) for i in range(3)) == 5


@pytest.mark.parametrize(
    ("ours", "theirs", "fate"),
    [
        ("x", "y", BOTH),
        ("x", "", OURS),
        ("", "y", THEIRS),
        ("", "", NEITHER),
        ("x", None, HALF),
        (None, "y", HALF),
    ],
)
def test_who_caught_it(ours: str | None, theirs: str | None, fate: str) -> None:
    rows: list[dict[str, Any] | None] = [
        None if by is None else {"by": by} for by in (ours, theirs)
    ]
    assert fate_of(*rows) == fate


def test_the_page_tells_what_was_not_run(tmp_path: Path) -> None:
    source = tmp_path / "e" / "pool.py"
    source.parent.mkdir()
    source.write_text("class Pool:\n    def take(self, a, b):\n        return a < b\n")
    other = CodeMutant("e/pool.py", "Pool.take", 3, "return another value", "a | b", "", str)
    results = Results(tmp_path / "results.jsonl", "1.0")
    results.put("ours", CONTROL, 6000, Answer(), 1.0)
    results.put("ours", MUTANT, 300, KILLED, 1.0)
    results.put("theirs", MUTANT, 20, Answer(), 1.0, tests=7)
    results.put("ours", other, 300, Answer(), 1.0)
    results.put("reach", CONTROL, 300, Answer(), 0.0, lines={"e/pool.py": [1]})
    vllm, reference = find("vllm"), find("reference")
    planted = {e.name: faults_of(e) for e in (vllm, reference)}
    findings = {f.name: f.rule for f in detection.known_findings(vllm)}
    results.put(
        "theirs", other, 20, Answer("their tests", "t/test_pool.py::test_take"), 1.0, tests=7
    )
    why = {other.name: Reason(POLICY, "a | is no rule")}
    told = page(Drawn((MUTANT, other), 9), results, tmp_path, planted, findings, why)
    assert "Of 2 mutants by operator, 2 were run against our checks and 2 against" in told
    assert "| ours only | 1 |" in told
    assert "| one side only was run | 0 |" in told
    assert "| policy only | 1 | 0 |" in told
    assert "Our checks caught 1 of the 2 mutants" in told
    assert (
        "`a \\| b` ⇒ nothing | lives, not reached | test_pool.py::test_take | theirs only "
        "| policy only: a \\| is no rule |" in told
    )
    assert "with the same seeds and 6,000 operations: nothing is broken." in told
    assert "| hash-unmapped | B3 |" in told


def test_the_page_tells_what_fuzzing_found_in_each_version(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    for version, seed, said in (("0.10", 1, Answer()), ("0.9", 0, KILLED), ("0.10", 0, KILLED)):
        more = {"arranged": 1000, "trials": 12, "known": {"removed-while-resident": 3}}
        Results(path, version).put(CLEAN, seed_name(seed), 1500, said, 1.0, **more)
    Results(path, "0.10").put(
        CLEAN, seed_name(0), 1500, Answer(), 1.0, arranged=5, trials=1, known={}
    )
    told = page(Drawn((), 0), Results(path, "0.10"), tmp_path, {"vllm": ()}, {})
    broken = "seed 0: fuzzing, B1 in operation 2 of 2: the queue is short"
    rows = [line for line in told.splitlines() if line.startswith("| 0.")]
    assert rows == [
        f"| 0.9 | 1 | 1,500 | 1,000 | 12 | {broken} | removed-while-resident (1) |",
        "| 0.10 | 2 | 3,000 | 1,005 | 13 | nothing | removed-while-resident (1) |",
    ]


def test_a_seed_is_done_once_and_again_while_something_is_broken(tmp_path: Path) -> None:
    reference = find("reference")
    results = Results(tmp_path / "results.jsonl", reference.info().version)
    results.put(CLEAN, seed_name(1), 400, KILLED, 1.0)
    told = [*fuzz_clean(reference, results, range(2), 400, tmp_path)]
    assert [line.split(", ")[1] for line in told] == ["seed 0", "seed 1"]
    assert all(line.endswith(": nothing is broken") for line in told)
    assert [*fuzz_clean(reference, results, range(2), 400, tmp_path)] == []
    row = results.last(CLEAN, seed_name(0))
    assert row is not None
    assert (row["by"], row["known"], row["trials"]) == ("", {}, 0)
    assert row["monitored"] > 0
    with planted(next(iter(faults_of(reference))), reference):
        (line,) = fuzz_clean(reference, results, range(1), 401, tmp_path)
    assert ": fuzzing, " in line


def test_reasons_are_of_mutants_that_were_drawn(tmp_path: Path) -> None:
    path, drawn = tmp_path / "why.toml", Drawn((MUTANT,), 9)
    assert read_reasons(path, drawn) == {}
    text = '[[reason]]\nkind = "{}"\nwhy = "{}"\nmutants = ["{}"]\n'
    path.write_text(text.format(POLICY, "order only", MUTANT.name))
    assert read_reasons(path, drawn) == {MUTANT.name: Reason(POLICY, "order only")}
    for kind, why, name in (
        (POLICY, "", MUTANT.name),
        ("luck", "w", MUTANT.name),
        (POLICY, "w", "x"),
    ):
        path.write_text(text.format(kind, why, name))
        with pytest.raises(BadOperation):
            read_reasons(path, drawn)


def test_the_smallest_statement_around_a_line(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_text("if (\n    a\n):\n    b(\n        c,\n    )\n")
    assert list(statement(file, 5)) == [4, 5, 6]
    assert list(statement(file, 2)) == [1, 2, 3]


def test_functions_and_the_mutants_in_them(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_text(
        "class A:\n    def f(self):\n        def g():\n            pass\n\ndef h():\n    pass\n"
    )
    assert [(name, first, last) for name, first, last in functions_of(file)] == [
        ("A.f", 3, 4),
        ("h", 7, 7),
    ]
    inner = CodeMutant("x.py", "A.f.g", 4, "", "", "", str)
    assert outermost(inner) == "x.py:A.f"
    assert outermost(CodeMutant("x.py", "h.g", 4, "", "", "", str)) == "x.py:h"


def test_a_mutant_that_nothing_gets_to_lives_without_a_run(tmp_path: Path) -> None:
    file = tmp_path / "e" / "pool.py"
    file.parent.mkdir()
    file.write_text("class Pool:\n    def take(self, a, b):\n        return a < b\n")
    results = Results(tmp_path / "results.jsonl", "1.0")
    assert list(pass_over([MUTANT], 300, tmp_path, results)) == [], "nobody has looked yet"
    results.put("reach", CONTROL, 300, Answer(), 0.0, lines={"e/pool.py": [3]})
    assert list(pass_over([MUTANT], 300, tmp_path, results)) == [], "it is reached"
    results.put("reach", CONTROL, 300, Answer(), 0.0, lines={"e/pool.py": [2]})
    assert list(pass_over([MUTANT], 600, tmp_path, results)) == [], "only that far"
    assert len(list(pass_over([MUTANT], 300, tmp_path, results))) == 1
    assert not results.wants("ours", MUTANT, 300)
