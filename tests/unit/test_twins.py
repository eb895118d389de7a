"""Must-fail twins: a guard left out breaks exactly the rules that it protects."""

from __future__ import annotations

import pytest

from kvclaims.checker.instances import MACHINES
from kvclaims.checker.twins import Twin, TwinReport, guards, run_twins, twin
from kvclaims.spec.vocabulary import Verdict

GUARDS = {
    "claims": 19,
    "pool": 58,
    "admission": 33,
    "groups": 45,
    "arbitration": 6,
    "written": 18,
    "owners": 8,
    "tiers": 20,
    "elastic": 31,
    "trace": 13,
    "events": 20,
    "ends": 7,
    "blockclaims": 13,
    "feasible": 18,
}


@pytest.fixture(scope="module")
def report() -> TwinReport:
    return run_twins()


@pytest.mark.parametrize("machine", MACHINES)
def test_every_guard_has_a_twin(machine: str) -> None:
    assert sum(1 for name, _, _ in guards() if name == machine) == GUARDS[machine]


def test_every_twin_breaks_exactly_its_rules(report: TwinReport) -> None:
    assert [str(t) for t in report.twins if not t.killed] == []
    assert report.verdict is Verdict.HOLDS


def test_a_twin_names_its_rule_with_a_shortest_run() -> None:
    found = twin("pool", "uncover", 1)
    assert found.protects == found.broken == ("P1",)
    assert found.shortest is not None
    assert found.shortest.steps[-1][0].startswith("uncover")
    assert len(found.shortest.steps) == 7


def test_a_twin_that_breaks_nothing_survives() -> None:
    idle = Twin("pool", "take", "nothing", ("B1",), (), None, 0.0)
    assert not idle.killed
    assert TwinReport((idle,), 0.0).verdict is Verdict.VIOLATED
    assert "SURVIVES: expected B1, got nothing" in str(idle)


def test_a_twin_that_breaks_another_rule_survives_too() -> None:
    other = Twin("pool", "take", "nothing", ("B1",), ("B2",), None, 0.0)
    assert not other.killed
