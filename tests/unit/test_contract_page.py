"""The contract page: what it says of each rule, and that what it says is proved is proved."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from kvclaims.checker.instances import MACHINES
from kvclaims.checker.notation import MATHEMATICS, laid_out
from kvclaims.checker.programs import builtin
from kvclaims.checker.tiers import PROGRAMS
from kvclaims.spec.language import show
from kvclaims.spec.vocabulary import RULES

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("contract_page", ROOT / "tools" / "contract.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules["contract_page"] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def page(tool: ModuleType) -> str:
    return str(tool.PAGE.read_text(encoding="utf-8"))


def test_every_rule_has_a_row_and_a_section_that_the_row_leads_to(
    tool: ModuleType, page: str
) -> None:
    for number, rule in RULES.items():
        assert f"## {number}: {rule.meaning}\n" in page
        assert f"| [{number}](#{tool._anchor(number)}) | {rule.meaning} |" in page


def test_what_a_page_says_is_proved_is_read_back(tool: ModuleType) -> None:
    whole, part = tool.to_show()["F2", "pool"], tool.to_show()["B3", "groups"]
    statuses = {
        ("F2", "pool"): tool.Status(whole, whole, "z3 and cvc5"),
        ("B3", "groups"): tool.Status(part - 1, part, "z3"),
    }
    text = tool.page(statuses)
    assert f"`pool`: {whole}/{whole} proved by z3 and cvc5" in text
    assert f"`groups`: {part - 1}/{part} of them proved by z3" in text
    said = tool.said_by(text)
    assert {key: said[key] for key in statuses} == statuses
    assert said["L1", "claims"] == tool.Status(0, tool.to_show()["L1", "claims"], "nobody")


def test_a_machine_that_changed_makes_the_page_out_of_date(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tool.page({})
    assert tool.page(tool.said_by(text)) == text
    tiers = MACHINES["tiers"]
    first = replace(tiers.properties[0], meaning="Something else.")
    other = replace(tiers, properties=(first, *tiers.properties[1:]))
    monkeypatch.setattr(tool, "MACHINES", {**MACHINES, "tiers": other})
    assert tool.page(tool.said_by(text)) != text


def test_a_formula_is_broken_at_its_signs_and_loses_nothing() -> None:
    for machine in MACHINES.values():
        for prop in machine.properties:
            lines = laid_out(prop.formula, MATHEMATICS, 96)
            flat = show(prop.formula)
            if len(lines) > 1:
                assert len(flat) > 96
                kept = re.findall(r"\w+", " ".join(lines))
                assert kept == re.findall(r"\w+", flat), prop.name


def test_the_transition_table_is_readable(page: str) -> None:
    assert max(len(line) for line in page.splitlines() if line.startswith("    ")) < 260


def test_programs_and_faults_of_a_rule_are_listed(page: str) -> None:
    section = page[page.index("## P1: ") : page.index("## P2: ")]
    assert "- `L3`, a hard claim on the resident prefix" in section
    assert "Faults that must be caught:" in section
    assert "A fault may take the content of a protected block" in section


def test_every_rule_is_run_by_a_program_or_it_is_said_what_runs_it(
    tool: ModuleType, page: str
) -> None:
    covered = {rule for program in builtin() for rule in program.rules}
    assert {rule for rule in RULES if rule not in covered} <= tool.ELSEWHERE.keys()
    for rule, (word, reason) in tool.ELSEWHERE.items():
        is_without = reason.startswith("No litmus program can ")
        assert is_without == (rule not in covered)
        assert f"\n{reason}\n" in page[page.index(f"## {rule}: ") :]
        (row,) = [line for line in page.splitlines() if line.startswith(f"| [{rule}](")]
        assert row.split(" | ")[4].isdigit() != is_without
        assert word in (row if is_without else reason)
    told = " ".join(reason for _, reason in tool.ELSEWHERE.values())
    files, programs = re.findall(r"`(tests/\S+)`", told), re.findall(r"kvclaims tier (\S+)", told)
    assert files
    assert all((ROOT / file).is_file() for file in files)
    assert programs
    assert set(programs) <= set(PROGRAMS)


@pytest.mark.slow
def test_what_the_page_says_is_proved_is_proved(tool: ModuleType, page: str) -> None:
    said = tool.said_by(page)
    now = tool.proved_now("z3")
    assert {key: s.proved for key, s in said.items()} == {key: s.proved for key, s in now.items()}
    assert all(status.proved == status.asked for status in said.values())
