"""Litmus programs are read strictly: every mistake is one line that names the file and field."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvclaims.checker.programs import builtin, load, select
from kvclaims.spec.interface import BadOperation

GOOD = """
id = "X"
title = "a title"
rules = ["F3"]
usable = 8
request = "r"
do = [{op = "submit", request = "r", content = [["A", 2]]}, {op = "drain"}]
[expect]
outcome = "served"
"""

MATRIX = """
id = "M"
title = "a matrix"
rules = ["F3"]
usable = [8, 9]
request = "r"
[[mode]]
name = "native"
do = [{op = "submit", request = "r", content = [["A", 2]]}, {op = "drain"}]
[mode.expect]
outcome = "served"
[mode.expect_each]
victims = [0, 1]
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "x.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_contract_comes_first_and_every_program_is_read() -> None:
    ids = [program.id for program in builtin()]
    assert ids[:9] == ["C1", "L1", "L2", "L3", "L4", "L5", "L6", "L7", "S"]
    assert len(ids) == len(set(ids))


def test_the_sweep_has_every_cell() -> None:
    (sweep,) = select(["S"])
    cells = [case.name for case in sweep.cases]
    assert len(cells) == 21
    assert {name.split("/")[0] for name in cells} == {"native", "no-admit", "hard"}
    for case in sweep.cases:
        missing = max(0, 130 - case.usable)
        if case.name.startswith("hard"):
            assert case.expect["victims"] == 0
            assert case.expect["shortfall"] == missing
        else:
            assert case.expect["victims"] == missing


def test_a_file_is_a_program_like_any_other(tmp_path: Path) -> None:
    (program,) = select([str(write(tmp_path, GOOD))])
    assert program.id == "X"
    assert program.cases[0].expect == {"outcome": "served"}
    assert program.defer_limit == 1


def test_a_number_may_be_judged_by_another_rule_and_an_operation_have_to_fail(
    tmp_path: Path,
) -> None:
    text = GOOD.replace('op = "drain"', 'op = "drain", fails = "F3"')
    program = load(write(tmp_path, f'{text}victims = 0\n[rule]\noutcome = "F3"\n'))
    assert (program.rule("outcome"), program.rule("victims")) == ("F3", "F5")
    (case,) = program.cases
    assert case.fails == {2: "F3"}
    assert case.operations[1].to_json() == {"op": "drain"}


def test_a_matrix_has_one_case_for_each_mode_and_pool(tmp_path: Path) -> None:
    program = load(write(tmp_path, MATRIX))
    assert [(c.name, c.usable, c.expect["victims"]) for c in program.cases] == [
        ("native/8", 8, 0),
        ("native/9", 9, 1),
    ]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('title = "a title"', "", "lacks 'title'"),
        ("usable = 8", "usable = -8", "usable must be a whole number of at least 1"),
        ("usable = 8", "", "usable must be a whole number of at least 1"),
        ("usable = 8", "usable = 8\nsize = 3", "unknown field 'size'"),
        ("usable = 8", "usable = 8\ndefer_limit = -1", "defer_limit must be a whole number of"),
        ('rules = ["F3"]', 'rules = ["F33"]', "rules: unknown rule 'F33'"),
        ('rules = ["F3"]', "rules = 3", "rules must be a list of rule numbers"),
        ('op = "drain"', 'op = "drian"', "operation 2: unknown operation 'drian'"),
        ('op = "drain"', 'op = "drain", x = 1', "operation 2: drain: unknown field 'x'"),
        ('request = "r", content', "content", "operation 1: submit: lacks 'request'"),
        ('["A", 2]', '["A", -2]', "operation 1: submit: content segment 'A' has a negative size"),
        ('outcome = "served"', 'outcom = "served"', "expect: unknown field 'outcom'"),
        ('outcome = "served"', 'outcome = "serve"', "expect: outcome must be an outcome"),
        ('outcome = "served"', "victims = -1", "expect: victims must be a count"),
        ('outcome = "served"', "victims = true", "expect: victims must be a count"),
        ('outcome = "served"', "", "expect must be a table of expected values"),
        ('request = "r"\ndo', "do", "expecting outcome needs a 'request' to judge"),
        ('request = "r"\ndo', 'request = "q"\ndo', "request 'q' occurs in no operation"),
        ('outcome = "served"', "leading = 1", "expecting leading needs a 'claim' to judge"),
        ('outcome = "served"', "kv_intact = 1", "expecting kv_intact needs a 'mark' operation"),
        (
            'outcome = "served"',
            'outcome = "served"\n[lowering]\npromised = "hard_protected"\noffered = "x"',
            "lowering: offered must be a protection",
        ),
        (
            'outcome = "served"',
            'lowering = "rejected"',
            "[lowering] and the expected field 'lowering' go together",
        ),
        ("usable = 8", "usable =", "not TOML: "),
        (
            'outcome = "served"',
            "leading_tokens = 1",
            "expecting leading_tokens needs a mode with a 'mechanism'",
        ),
        ('outcome = "served"', "output_error = 1", "expect: output_error must be a number such"),
        ('op = "drain"', 'op = "drain", fails = "L1"', "operation 2: fails must be one of the"),
        ('op = "drain"', 'op = "drain", fails = 1', "operation 2: fails must be one of the"),
        (
            'outcome = "served"',
            'outcome = "served"\n[rule]\noutcome = "L1"',
            "rule: outcome must be judged by one of the program's rules",
        ),
        (
            'outcome = "served"',
            'outcome = "served"\n[rule]\nvictims = "F3"',
            "rule: victims is not expected",
        ),
        ('rules = ["F3"]', 'rules = ["F3"]\nrule = 1', "rule must be a table"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in GOOD
    with pytest.raises(BadOperation) as error:
        load(write(tmp_path, GOOD.replace(old, new)))
    assert str(error.value).startswith(f"x.toml: {message}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("usable = [8, 9]", "usable = 8", "usable must be a list of pools in a matrix"),
        ("victims = [0, 1]", "victims = [0]", "victims needs one value for each pool"),
        ("victims = [0, 1]", "victims = [0, -1]", "expect_each: victims must be a count"),
        ('name = "native"', "", "lacks 'name'"),
        ('name = "native"', 'name = "native"\nx = 1', "mode: unknown field 'x'"),
        ('name = "native"', 'name = "native"\nmechanism = 1', "mechanism must be a text"),
        ("victims = [0, 1]", "exact_tokens = [0, 1]", "exact_tokens needs a 'mechanism'"),
    ],
)
def test_mistakes_in_a_matrix_are_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(BadOperation, match=r"x\.toml: ") as error:
        load(write(tmp_path, MATRIX.replace(old, new)))
    assert message in str(error.value)


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadOperation, match=r"nowhere\.toml: no such file"):
        select([str(tmp_path / "nowhere.toml")])
    with pytest.raises(BadOperation, match="unknown program 'L9' "):
        select(["L9"])


def test_a_binary_file_is_not_toml(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadOperation, match=r"x\.toml: not TOML: not UTF-8 text"):
        load(path)
