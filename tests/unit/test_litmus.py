"""The litmus runner judges every number, and what it cannot see it does not call passed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvclaims.checker.engines import find, ready
from kvclaims.checker.faults import Edit, Fault, named, planted
from kvclaims.checker.litmus import LitmusReport, litmus
from kvclaims.checker.programs import FIELD_RULES, FIELDS, Program, builtin, load, select
from kvclaims.spec.interface import (
    BadOperation,
    Engine,
    EngineInfo,
    EngineMissing,
    NotExposed,
    PoolConfig,
    PoolStep,
    Runtime,
)
from kvclaims.spec.vocabulary import RULES, Verdict


def run(programs: tuple[Program, ...], engine: Engine | None = None) -> LitmusReport:
    return litmus(
        engine or find("reference"), EngineInfo("test", "1", "here"), programs, lambda _: None
    )


class Altered:
    """The reference with one method of its runtime replaced."""

    name = "altered"
    block_size = 8

    def __init__(self, method: str, replacement: Callable[..., Any]) -> None:
        self._method = method
        self._replacement = replacement

    def info(self) -> EngineInfo:
        return EngineInfo(self.name, "1", "here")

    def open(self, config: PoolConfig, run_id: str) -> Runtime:
        runtime = find("reference").open(config, run_id)
        original = getattr(runtime, self._method)
        setattr(runtime, self._method, lambda *args: self._replacement(original, *args))
        return runtime


def raises(error: Exception) -> Callable[..., Any]:
    def replacement(*_: object) -> None:
        raise error

    return replacement


@pytest.mark.parametrize("program", builtin(), ids=lambda program: program.id)
def test_the_reference_keeps_every_program(program: Program) -> None:
    report = run((program,))
    assert report.verdict is Verdict.HOLDS, "\n".join(report.lines())
    assert report.to_json()["not_exposed"] == []


def test_every_expected_number_is_seen() -> None:
    for result in run(builtin()).programs:
        for case in result.cases:
            assert set(case.expected) <= set(case.observed), result.program.id


NOT_MATERIALIZED = "materialized is True, expected False"


@pytest.mark.parametrize(
    ("rule", "right", "wrong", "message"),
    [
        ("F4", 'outcome = "refused"', 'outcome = "served"', "outcome is refused, expected served"),
        ("F5", "victims = 0", "victims = 1", "victims is 0, expected 1"),
        ("F4", "shortfall = 50", "shortfall = 49", "shortfall is 50, expected 49"),
        ("T2", "free = 20", "free = 19", "free is 20, expected 19"),
        ("F4", '["keep"]\n', "[]\n", "blocking_claims is ['keep'], expected []"),
        (
            "L7",
            "materialized = true",
            "materialized = false",
            "materialized is True, expected False",
        ),
        ("P1", "kv_intact = 60", "kv_intact = 59", "kv_intact is 60, expected 59"),
    ],
)
def test_every_wrong_number_is_told_by_its_own_rule(
    tmp_path: Path, rule: str, right: str, wrong: str, message: str
) -> None:
    source = Path(__file__).parents[2] / "spec" / "programs" / "L3.toml"
    text = source.read_text()
    assert right in text
    changed = tmp_path / "L3.toml"
    changed.write_text(text.replace(right, wrong))
    report = run((load(changed),))
    assert report.verdict is Verdict.VIOLATED
    (violation,) = report.to_json()["violations"]
    assert (violation["rule"], violation["message"]) == (rule, message)
    assert len(violation["operations"]) == 6


def _edit(rule: str, path: str, function: str, find_: str, replace: str) -> Fault:
    return Fault("test", rule, "a test", (Edit(path, function, find_, replace),), budget=1)


def _called_restored() -> Fault:
    phase = "self._phase(entry)"
    back = f"{phase} is Phase.HARMED and self._survival(entry)[0] == entry.granted.n"
    return _edit(
        "O3",
        "reference/residency.py",
        "Residency.views",
        phase,
        f"Phase.MATERIALIZED if {back} else {phase}",
    )


RENEWED_FOR_EVER = _edit(
    "V2", "reference/residency.py", "Residency.renew", "self._narrator.now + duration", "None"
)
EVICTED_UNSAID = _edit(
    "B8",
    "reference/narrator.py",
    "Narrator._note_content",
    'KvEvent("removed", (key,))',
    'KvEvent("removed", ())',
)
DROPPED_FIRST = _edit(
    "B9",
    "reference/residency.py",
    "Residency.end",
    "self._end(self._responsible(claim_id), how)",
    "self.reset()\nself._end(self._responsible(claim_id), how)",
)


@pytest.mark.parametrize(
    ("program", "fault", "also", "message"),
    [
        ("generations", "second-life", (), "operation 4 (declare"),
        ("free-queue", "counter-not-lowered", (), "the free counter: the machine says 20"),
        ("counted", "second-reference-lost", (), "references is 71, expected 191"),
        ("null-block", "null-block-free", ("F3", "P1"), "null_uses is 2, expected 0"),
        ("routed", EVICTED_UNSAID, (), "routed is 130, expected 80"),
        ("turned-down", "abort-of-the-ended", (), "operation 8 (abort request=resident) raised"),
        ("turned-down", DROPPED_FIRST, (), "was turned down, and changed the state: no claim"),
        ("recomputed", _called_restored(), ("T2",), "materialized is True, expected False"),
        ("lease-ends", RENEWED_FOR_EVER, (), "expired is 0, expected 1"),
    ],
)
def test_a_fault_is_told_by_the_rule_that_the_program_is_about(
    program: str, fault: str | Fault, also: tuple[str, ...], message: str
) -> None:
    """`also`: what cannot but be broken with it.  That block 0 is used means that it is not in the
    machine's queue; what is shown of a claim and what its trace tells are not the same."""
    reference = find("reference")
    with planted(named(fault, reference) if isinstance(fault, str) else fault, reference):
        report = run(select([program]))
    (rule,) = report.programs[0].program.rules
    violations = report.to_json()["violations"]
    assert {v["rule"] for v in violations} == {rule, *also}
    assert [v for v in violations if v["rule"] == rule and message in v["message"]]
    assert run(select([program])).verdict is Verdict.HOLDS


def test_what_has_to_fail_and_does_not_ends_the_run(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text(
        'id = "x"\ntitle = "a release that may be done"\nrules = ["L1"]\nusable = 8\n'
        'do = [\n  {op = "declare", claim = "c", content = [["A", 2]], n = 2},\n'
        '  {op = "release", claim = "c", fails = "L1"},\n  {op = "drain"},\n]\n'
        "[expect]\naccepted = 1\n"
    )
    (violation,) = run((load(path),)).to_json()["violations"]
    told = "operation 2 (release claim=c) was done, and has to be turned down"
    assert (violation["rule"], violation["message"]) == ("L1", told)


def test_without_kv_events_or_a_pool_to_look_at_nothing_is_counted() -> None:
    deaf = Altered("events", lambda original: original())  # it has no features
    assert run(select(["routed"]), deaf).verdict is Verdict.NOT_EXPOSED
    blind = Altered("snapshot", raises(NotExposed("no access to the pool")))
    (program,) = run(select(["counted"]), blind).to_json()["programs"]
    assert (program["observed"]["references"], program["observed"]["queued"]) == (
        "not_exposed",
        "not_exposed",
    )


def test_evicting_in_the_order_of_use_alone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvclaims.reference.residency.PREFERRED", frozenset())
    report = run(select(["soft-order"]))
    said = [v["message"] for v in report.to_json()["violations"]]
    assert said[:2] == ["harmed is 1, expected 0", "leading is 10, expected 30"]


@pytest.mark.parametrize(("always", "accepted", "refused"), [(True, 2, 0), (False, 0, 2)])
def test_a_runtime_that_does_not_look_at_the_class_that_is_asked_for_is_found(
    monkeypatch: pytest.MonkeyPatch, always: bool, accepted: int, refused: int
) -> None:
    monkeypatch.setattr("kvclaims.reference.residency.Residency._survives", lambda *_: always)
    report = run(select(["fidelity"]))
    said = {v["message"] for v in report.to_json()["violations"] if v["rule"] in ("L2", "F2")}
    of_two = {f"accepted is {accepted}, expected 1", f"claims_refused is {refused}, expected 1"}
    of_three = {
        f"accepted is {accepted and 3}, expected 1",
        f"claims_refused is {refused and 3}, expected 2",
    }
    assert said == of_two | of_three
    assert all(case.problems for case in report.programs[0].cases)


def test_a_mechanism_that_serves_something_else_than_expected_is_found(tmp_path: Path) -> None:
    source = Path(__file__).parents[2] / "spec" / "programs" / "fidelity.toml"
    changed = tmp_path / "fidelity.toml"
    text = source.read_text().replace("leading_tokens = 7", "leading_tokens = 8")
    changed.write_text(text.replace("output_error = 0.71", "output_error = 0.7"))
    report = run((load(changed),))
    said = {(v["case"], v["message"]) for v in report.to_json()["violations"]}
    assert said == {
        ("counter-causal-surprise/80", "leading_tokens is 7, expected 8"),
        ("think/80", "output_error is 0.71, expected 0.7"),
    }


def test_every_field_of_a_program_has_a_rule() -> None:
    assert FIELD_RULES.keys() == FIELDS.keys()
    assert set(FIELD_RULES.values()) <= RULES.keys()


def test_json_tells_what_was_seen() -> None:
    (program,) = run(select(["L3"])).to_json()["programs"]
    seen = program["observed"]
    assert (seen["outcome"], seen["victims"], seen["shortfall"]) == ("refused", 0, 50)
    assert (seen["free"], seen["blocking_claims"], seen["kv_intact"]) == (20, ["keep"], 60)


def test_the_monitor_judges_every_allocator_step() -> None:
    report = run(select(["L3"]))
    assert report.to_json()["monitored_steps"] > 60

    def dishonest(original: Callable[[Any], None], listener: Callable[[PoolStep], None]) -> None:
        original(lambda step: listener(step._replace(free=0 if step.free else step.free)))

    (violation,) = run(select(["L2"]), Altered("listen", dishonest)).to_json()["violations"][:1]
    assert violation["rule"] == "B1"
    assert violation["step"]


def test_a_lowered_promise_comes_with_a_run_that_shows_the_loss() -> None:
    (program,) = run(select(["C1"])).to_json()["programs"]
    witness = program["observed"]["witness"]
    assert program["observed"]["lowering"] == "rejected"
    assert witness["rule"] == "L5"
    assert {
        "op": "declare",
        "claim": "keep",
        "content": [["A", 60]],
        "n": 60,
        "protection": "soft_priority",
    } in witness["operations"]


def test_a_lowering_that_loses_nothing_is_not_rejected(tmp_path: Path) -> None:
    source = Path(__file__).parents[2] / "spec" / "programs" / "C1.toml"
    roomy = tmp_path / "C1.toml"
    roomy.write_text(source.read_text().replace("usable = 80", "usable = 200"))
    report = run((load(roomy),))
    assert report.verdict is Verdict.VIOLATED
    messages = [v["message"] for v in report.to_json()["violations"]]
    assert "lowering is accepted, expected rejected" in messages


def test_what_the_engine_does_not_expose_is_not_passed() -> None:
    blind = Altered("fingerprint", raises(NotExposed("no access to memory")))
    report = run(select(["L3"]), blind)
    (program,) = report.to_json()["programs"]
    assert report.verdict is Verdict.HOLDS
    assert program["observed"]["kv_intact"] == "not_exposed"
    assert program["not_exposed"] == ["kv_intact: no access to memory"]


def test_a_program_that_cannot_be_expressed_is_not_exposed() -> None:
    report = run(select(["L6"]), Altered("lose", raises(NotExposed("no faults here"))))
    assert report.verdict is Verdict.NOT_EXPOSED
    assert report.to_json()["not_exposed"][0].startswith("L6: operation 3 (lose")


@pytest.mark.parametrize(
    ("method", "error", "message"),
    [
        ("step", AssertionError("free list is broken"), "raised AssertionError: free list is"),
        ("submit", BadOperation("no such"), "was turned down: no such"),
    ],
)
def test_a_crash_is_a_finding(method: str, error: Exception, message: str) -> None:
    report = run(select(["L1", "L7"]), Altered(method, raises(error)))
    assert report.verdict is Verdict.VIOLATED
    for violation in report.to_json()["violations"]:
        assert violation["rule"] == "B9"
        assert message in violation["message"]


def test_a_request_that_never_ends_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvclaims.spec.operations.DRAIN_LIMIT", 5)
    report = run(select(["L1"]), Altered("step", lambda original: None))
    assert report.to_json()["violations"][0]["rule"] == "B11"


def test_a_trace_that_tells_another_story_is_a_finding() -> None:
    def forgetful(original: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...]:
        return tuple(e for e in original() if e.event != "resident_claim_demoted")

    report = run(select(["L4"]), Altered("events", forgetful))
    (violation,) = report.to_json()["violations"]
    assert violation["rule"] == "T3"


def test_an_engine_that_cannot_be_imported_is_missing() -> None:
    class Broken(Altered):
        def open(self, config: PoolConfig, run_id: str) -> Runtime:
            raise ImportError("no libfoo.so")

    with pytest.raises(EngineMissing, match=r"cannot be imported: no libfoo\.so"):
        run(select(["L1"]), Broken("step", raises(AssertionError())))


@pytest.mark.engine
def test_live_engine_in_process() -> None:
    try:
        engine, info = ready("vllm")
    except EngineMissing as error:
        pytest.skip(str(error))
    report = litmus(engine, info, builtin(), lambda _: None)
    assert report.verdict is Verdict.HOLDS, "\n".join(report.lines())
