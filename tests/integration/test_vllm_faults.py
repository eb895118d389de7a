"""Faults planted into vLLM's own allocator are caught by name; vLLM itself breaks nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvclaims.checker import faults
from kvclaims.checker.engines import ready
from kvclaims.checker.fuzz import fuzz
from kvclaims.checker.replay import replay
from kvclaims.checker.supervise import oracle_for, supervise
from kvclaims.spec.interface import EngineMissing
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
    assert len(report.caught) == 36
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
    report = fuzz(engine, 1000, None, 3, lambda _: None, tmp_path)
    assert report.verdict is Verdict.HOLDS, "\n".join(report.lines())
    assert report.monitored > 500
