"""Obligations as files: other solvers read them, and agree."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import z3

from kvclaims.checker import cli, induction, solvers
from kvclaims.checker.consequences import consequences
from kvclaims.checker.induction import Prover, Shown
from kvclaims.checker.instances import MACHINES
from kvclaims.checker.prove import Ways, obligations, prove, prove_machine
from kvclaims.checker.ranking import ranking_obligations
from kvclaims.checker.smtlib import MANIFEST, obligation_file
from kvclaims.checker.solvers import CVC5, Z3, Answer, Reply, ask_cvc5
from kvclaims.spec.blockclaims import BLOCKCLAIMS
from kvclaims.spec.interface import BadOperation, EngineMissing
from kvclaims.spec.language import Property, every, without_guard
from kvclaims.spec.pool import POOL, b, queued
from kvclaims.spec.vocabulary import Verdict

SAMPLE = {name: machine.properties[0].rule for name, machine in MACHINES.items()}
"""A rule of each machine; F1, which comes first in two, needs facts about sums and lemmas."""


def _installed() -> bool:
    try:
        return bool(solvers.solver_version(CVC5))
    except EngineMissing:
        return False


needs_cvc5 = pytest.mark.skipif(not _installed(), reason="cvc5 is not installed")


def _entries(folder: Path) -> list[dict[str, Any]]:
    files: list[dict[str, Any]] = json.loads((folder / MANIFEST).read_text())["files"]
    return files


def _read_by_z3(text: str) -> str:
    solver = z3.Solver(ctx=z3.Context())
    solver.set("timeout", 20_000)
    solver.from_string(text)
    return str(solver.check())


@pytest.fixture(scope="module")
def emitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample of every machine, in a folder each."""
    folder = tmp_path_factory.mktemp("smt")
    for machine, rule in SAMPLE.items():
        prove(rule, machine, ways=Ways(emit=folder / machine))
    return folder


@pytest.mark.parametrize("machine", SAMPLE)
def test_emitted_files_are_read_again_and_unsatisfiable(emitted: Path, machine: str) -> None:
    folder = emitted / machine
    entries = _entries(folder)
    written = {str(p.relative_to(folder)) for p in folder.rglob("*.smt2")}
    assert {entry["file"] for entry in entries} == written
    for entry in entries:
        text = (folder / entry["file"]).read_text()
        assert entry["status"] == "unsat"
        assert f"(set-info :status {entry['status']})" in text
        assert _read_by_z3(text) == "unsat", entry


@pytest.mark.parametrize("machine", SAMPLE)
def test_the_manifest_names_every_obligation(emitted: Path, machine: str) -> None:
    entries = [e for e in _entries(emitted / machine) if e["kind"] == "obligation"]
    ranked = ranking_obligations([MACHINES[machine]], SAMPLE[machine])
    follows = consequences(MACHINES[machine])
    asked = [
        *obligations(MACHINES[machine], SAMPLE[machine]),
        *(obligations(follows, SAMPLE[machine]) if follows else ()),
        *((prop, action) for _, prop, action in ranked),
    ]
    assert [(e["property"], e["action"]) for e in entries] == [(p.name, a) for p, a in asked]
    assert {e["rule"] for e in entries} == {SAMPLE[machine]}
    for entry, (prop, action) in zip(entries, asked, strict=True):
        lines = (emitted / machine / entry["file"]).read_text().splitlines()
        assert prop.rule in lines[0]
        assert prop.name in lines[0]
        assert action in lines[0]
        assert all((emitted / machine / lemma).is_file() for lemma in entry["lemmas"])


def test_file_names_are_stable_and_tell_obligations_apart() -> None:
    names = [
        obligation_file(m.name, action, prop)
        for m in MACHINES.values()
        for prop, action in obligations(m)
    ]
    assert len(names) == len({name.lower() for name in names})
    assert "pool/cover/F1-union-fits.smt2" in names


def test_the_same_text_comes_out_twice(emitted: Path, tmp_path: Path) -> None:
    prove("F1", "blockclaims", ways=Ways(emit=tmp_path, jobs=2))
    for file in (emitted / "blockclaims").rglob("*.smt2"):
        again = tmp_path / file.relative_to(emitted / "blockclaims")
        assert again.read_text() == file.read_text()


def test_proofs_from_the_cache_are_emitted_the_same(emitted: Path, tmp_path: Path) -> None:
    ways = Ways(emit=tmp_path / "smt", cache=tmp_path / "cache")
    prove("F1", "blockclaims", ways=ways)
    report = prove("F1", "blockclaims", ways=ways)
    assert report.cached == len(report.obligations)
    for file in (emitted / "blockclaims").rglob("*.smt2"):
        again = tmp_path / "smt" / file.relative_to(emitted / "blockclaims")
        assert again.read_text() == file.read_text()


def test_what_fails_is_emitted_as_satisfiable(tmp_path: Path) -> None:
    index = next(i for i, g in enumerate(POOL.action("evict").guards) if "hard claim" in g.why)
    (prop,) = [p for p in POOL.properties if p.name == "a protected block keeps its hash"]
    prover = Prover(without_guard(POOL, "evict", index))
    found = prover.step(prop, prover.machine.action("evict"))
    (file, text) = [*prover.emit(found, prop)][-1]
    assert found.verdict is Verdict.NOT_INDUCTIVE
    assert file.status == "sat"
    assert _read_by_z3(text) != "unsat"


def test_a_folder_that_cannot_be_written_is_wrong_use(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadOperation, match="cannot write"):
        prove("F3", "blockclaims", ways=Ways(emit=tmp_path / "file" / "smt"))


# --- a second solver -----------------------------------------------------------------------


@needs_cvc5
@pytest.mark.parametrize("machine", SAMPLE)
def test_both_solvers_agree(machine: str) -> None:
    found = prove_machine(MACHINES[machine], SAMPLE[machine], ways=Ways(solver="both"))
    assert [o for o in found if o.verdict is not Verdict.PROVED] == []
    assert {tuple(s.solver for s in o.shown) for o in found} == {(Z3, CVC5)}
    assert {o.solver for o in found} == {"z3+cvc5"}


@needs_cvc5
@pytest.mark.parametrize("machine", ["claims", "blockclaims"])
def test_cvc5_decides_by_itself(machine: str) -> None:
    found = prove_machine(MACHINES[machine], SAMPLE[machine], ways=Ways(solver=CVC5))
    assert [o for o in found if o.verdict is not Verdict.PROVED] == []


@needs_cvc5
@pytest.mark.parametrize("solver", [CVC5, "both"])
def test_a_false_property_is_proved_by_none(solver: str) -> None:
    nothing = Property("B1", "nothing is queued", every(b, ~queued(b)), "not so at the start")
    wrong = replace(POOL, properties=(nothing,))
    prover = Prover(wrong, solver=solver)
    found = prover.initially(nothing)
    assert found.verdict is Verdict.NOT_INDUCTIVE
    (_, text) = [*prover.emit(found, nothing)][-1]
    for options in ({}, *solvers.PORTFOLIO):
        assert ask_cvc5(text, 1000, options).answer is not Answer.UNSAT


@needs_cvc5
def test_text_that_cvc5_cannot_read_proves_nothing() -> None:
    reply = ask_cvc5("(set-logic ALL)\n(assert nonsense)\n(check-sat)\n", 1000)
    assert reply.answer is Answer.UNKNOWN
    assert reply.reason.startswith("cvc5: ")
    assert ask_cvc5("(set-logic ALL)\n", 1000).answer is Answer.UNKNOWN


def _answering(monkeypatch: pytest.MonkeyPatch, answer: Answer) -> None:
    monkeypatch.setattr(induction, "ask_cvc5", lambda *_: Reply(answer, "as told"))
    monkeypatch.setattr(solvers, "version", lambda _: "1")


def test_a_disagreement_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    _answering(monkeypatch, Answer.SAT)
    report = prove("F3", "blockclaims", ways=Ways(solver="both"))
    (found,) = report.obligations
    assert found.verdict is report.verdict is Verdict.VIOLATED
    assert found.reason.startswith("the solvers disagree: z3 says unsat, cvc5 says sat")
    assert found.to_json()["answers"] == {"z3": "unsat", "cvc5": "sat"}
    (violation,) = report.to_json()["violations"]
    assert violation["rule"] == "F3"
    assert found.reason in violation["message"]
    assert cli.exit_code(report.verdict) == 1


def test_what_one_solver_does_not_decide_is_unknown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _answering(monkeypatch, Answer.UNKNOWN)
    report = prove("F3", "blockclaims", ways=Ways(solver="both", cache=tmp_path))
    (found,) = report.obligations
    assert found.verdict is Verdict.UNKNOWN
    assert found.reason == "cvc5 does not confirm it: as told"
    assert cli.exit_code(report.verdict) == 3
    kept = [json.loads(file.read_text()) for file in tmp_path.rglob("*.json")]
    assert [entry["solver"] for entry in kept if "solver" in entry] == [Z3]


def test_a_lemma_that_cvc5_does_not_show_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Totals move with a step only where both solvers say that they may."""

    def reply(text: str, *_: object) -> Reply:
        lemma = "moves only at the places" in text
        return Reply(Answer.UNKNOWN if lemma else Answer.UNSAT)

    monkeypatch.setattr(induction, "ask_cvc5", reply)
    monkeypatch.setattr(solvers, "version", lambda _: "1")
    (prop,) = [p for p in BLOCKCLAIMS.properties if p.name == "resident and active fit"]
    found = Prover(BLOCKCLAIMS, solver="both").step(prop, BLOCKCLAIMS.action("alloc"))
    assert found.verdict is Verdict.UNKNOWN
    assert "cvc5 does not show that total" in found.reason


def test_a_solver_asked_before_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    _answering(monkeypatch, Answer.SAT)
    prop = BLOCKCLAIMS.properties[0]
    known = {name: Shown(name, Answer.UNSAT, cached=True) for name in (Z3, CVC5)}
    found = Prover(BLOCKCLAIMS, solver="both").examine(prop, "alloc", known)
    assert found.verdict is Verdict.PROVED
    assert found.cached


def test_a_missing_cvc5_is_one_line_that_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def version(package: str) -> str:
        if package == "cvc5":
            raise PackageNotFoundError(package)
        return "1"

    monkeypatch.setattr(solvers, "version", version)
    for solver in (CVC5, "both"):
        assert cli.run(["prove", "--no-cache", "--solver", solver], io.StringIO()) == 2
        error = capsys.readouterr().err
        assert error == "kvclaims: cvc5 is not installed: pip install cvc5\n"
