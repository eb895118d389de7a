"""Faults planted into vLLM's own allocator are caught by name; vLLM itself breaks nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvclaims.checker import faults
from kvclaims.checker.baseline import allowing, own_findings
from kvclaims.checker.engines import ready
from kvclaims.checker.fuzz import fuzz
from kvclaims.checker.replay import replay
from kvclaims.checker.supervise import Program, open_supervised, oracle_for, supervise
from kvclaims.spec.interface import EngineMissing, PoolConfig
from kvclaims.spec.operations import Operation, parse
from kvclaims.spec.vocabulary import Verdict

pytestmark = pytest.mark.engine


@pytest.fixture(autouse=True)
def _vllm() -> None:
    try:
        ready("vllm")
    except EngineMissing as error:
        pytest.skip(str(error))


def test_every_fault_is_caught_by_its_rule(tmp_path: Path) -> None:
    report = faults.run_faults("vllm", lambda _: None, tmp_path)
    assert [str(one) for one in report.caught if one.verdict is not Verdict.HOLDS] == []
    assert len(report.caught) == 38
    file = report.caught[0].file
    assert file is not None
    assert replay(file).findings[0].rule == report.caught[0].fault.rule


def test_vllm_itself_breaks_nothing_in_their_programs() -> None:
    engine, _ = ready("vllm")
    for fault in faults.faults_of(engine):
        assert fault.program is not None
        assert supervise(engine, oracle_for(engine), fault.program) == (), fault.id


def test_fuzzing_vllm_beside_the_reference(tmp_path: Path) -> None:
    engine, _ = ready("vllm")
    report = fuzz(engine, 2000, None, 3, lambda _: None, tmp_path)
    assert report.verdict is Verdict.HOLDS, "\n".join(report.lines())
    assert report.monitored > 500


TWO_COPIES = Program(
    PoolConfig(usable=8, block_size=16),
    tuple(
        parse(item)
        for item in (
            {"op": "submit", "request": "r1", "content": [["A", 2]]},
            {"op": "submit", "request": "r2", "content": [["A", 2]]},
            {"op": "drain"},
            {"op": "submit", "request": "r3", "content": [["B", 6]]},
            {"op": "drain"},
        )
    ),
)
"""Two requests compute the same content; a third takes the blocks of one copy of it."""


def test_a_known_finding_is_allowed_by_name_and_told() -> None:
    engine, _ = ready("vllm")
    supervisor = open_supervised(engine, oracle_for(engine), TWO_COPIES.config)
    for operation in TWO_COPIES.operations:
        supervisor.do(operation)
    assert supervisor.close() == []
    assert set(supervisor.known_findings) == {"removed-while-resident"}
    (first, *_) = supervise(engine, oracle_for(engine), TWO_COPIES, allowing(engine, ()))
    assert first.rule == "B8"
    assert "another copy" in first.message


def test_the_known_finding_hides_no_other_of_its_rule() -> None:
    engine, _ = ready("vllm")
    with faults.planted(faults.named("removal-unsaid", engine), engine):
        gone = Operation(
            "lose", {"content": TWO_COPIES.operations[0].fields["content"], "position": 0}
        )
        program = Program(TWO_COPIES.config, (*TWO_COPIES.operations, gone))
        found = supervise(engine, oracle_for(engine), program)
    assert [(one.rule, "is not resident" in one.message) for one in found[:1]] == [("B8", True)]


LEFT_OUT = Program(
    PoolConfig(16, 4, 0, token_budget=9, policy="priority"),
    tuple(
        parse(item)
        for item in (
            {"op": "submit", "request": "r5", "content": [["A", 1]]},
            {"op": "step"},
            {"op": "submit", "request": "r7", "content": [["A", 1]]},
            {"op": "dispatch"},
            {"op": "submit", "request": "r9", "content": [["A", 1]]},
            {"op": "submit", "request": "r11", "content": [["A", 1]]},
            {
                "op": "submit",
                "request": "r12",
                "content": [["A", 3], ["B", 3]],
                "max_new_tokens": 8,
                "priority": 2,
            },
            {"op": "dispatch"},
            {"op": "complete"},
            {"op": "dispatch"},
            {"op": "abort", "request": "r11"},
            {"op": "submit", "request": "r13", "content": [["A", 1]]},
            {"op": "step"},
            {"op": "dispatch"},
            {
                "op": "submit",
                "request": "r14",
                "content": [["A", 6], ["B", 3]],
                "max_new_tokens": 2,
            },
            {"op": "step"},
            {
                "op": "submit",
                "request": "r16",
                "content": [["A", 3]],
                "max_new_tokens": 2,
                "admit_reuse": False,
                "priority": 1,
            },
            {"op": "dispatch"},
            {"op": "lose", "content": [["A", 6], ["B", 3]], "position": 7},
            {
                "op": "declare",
                "claim": "b",
                "content": [["A", 1], ["B", 1]],
                "protection": "hard_protected",
                "n": 2,
                "duration": 3,
                "owner": "other",
                "generation": 3,
            },
            {"op": "step", "times": 6},
        )
    ),
)
"""Found by fuzzing: in its last operation a request is scheduled, its block becomes visible, and it
gives way in the same step to one of a higher priority."""


def test_a_known_finding_that_spoils_the_state_ends_the_run_by_name() -> None:
    engine, _ = ready("vllm")
    supervisor = open_supervised(engine, oracle_for(engine), LEFT_OUT.config)
    for operation in LEFT_OUT.operations:
        supervisor.do(operation)
    assert supervisor.findings == []
    assert supervisor.known_findings["never-computed-hit"] == 1
    assert not supervisor.is_alive
    others = allowing(engine, [known for known in own_findings(engine) if known.goes_on])
    (first, *_) = supervise(engine, oracle_for(engine), LEFT_OUT, others)
    assert (first.rule, "left request r12 out" in first.message) == ("B4", True)
