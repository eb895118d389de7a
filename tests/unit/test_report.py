"""Reports: what a page says is what was found, and a page needs nothing but itself."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvclaims.checker import engines, faults, mutate, reportgraph, reportrun
from kvclaims.checker.audit import read_trace
from kvclaims.checker.cli import run
from kvclaims.checker.counterexample import Counterexample, read
from kvclaims.checker.fates import Fate, Judged
from kvclaims.checker.instances import claims
from kvclaims.checker.report import page_of_counterexample, page_of_gate, page_of_runs, report
from kvclaims.checker.reportpage import Check, Page, changes, render
from kvclaims.checker.reportrules import MONITORED, NOTHING, RuleRow, by_property, rule_rows
from kvclaims.checker.reportrun import record
from kvclaims.checker.reporttimeline import timeline
from kvclaims.checker.stategraph import state_graph
from kvclaims.checker.verdicts import Violation
from kvclaims.reference.engine import ENGINE
from kvclaims.spec.interface import BadOperation, EngineMissing, PoolConfig
from kvclaims.spec.operations import parse, perform
from kvclaims.spec.vocabulary import RULES

CONFLICT: list[dict[str, Any]] = [
    {"op": "submit", "request": "resident", "content": [["A", 60]]},
    {"op": "drain"},
    {"op": "declare", "claim": "keep", "content": [["A", 60]], "n": 60},
    {"op": "submit", "request": "active", "content": [["B", 70]]},
    {"op": "drain"},
]


def trace(folder: Path, *, run_id: str = "L3") -> Path:
    runtime = ENGINE.open(PoolConfig(80), run_id)
    for raw in CONFLICT:
        perform(runtime, parse(raw))
    runtime.close()
    file = folder / "trace.jsonl"
    file.write_text("".join(event.to_json() + "\n" for event in runtime.events()))
    return file


def broken_file(folder: Path) -> Path:
    """A refusal that blames every claim, by a fault planted in the reference (F4)."""
    engine, _ = engines.ready("reference")
    fault = faults.named("everyone-to-blame", engine)
    assert fault.program is not None
    example = Counterexample("reference", fault.program, "F4", fault.meaning, fault=fault.id)
    return example.write(folder)


def quiet(_: str) -> None:
    """No progress."""


def check(command: str, verdict: str = "HOLDS", engine: str = "", **data: Any) -> Check:
    violations = tuple(data.pop("violations", ()))
    return Check(command, command, engine, verdict, 1.0, "", data, violations)


def row(number: str, *checks: Check) -> RuleRow:
    return next(row for row in rule_rows(checks) if row.number == number)


# --- the command


def test_a_trace_becomes_a_page_with_the_same_numbers(tmp_path: Path) -> None:
    out, page = io.StringIO(), tmp_path / "out" / "report.html"
    arguments = ["report", str(trace(tmp_path)), "--output", str(page), "--json"]
    assert run(arguments, out) == 0
    told = json.loads(out.getvalue())
    (line,) = told["timelines"]
    assert (line["usable"], line["events"], line["steps"]) == (80, 75, 12)
    assert line["doors"][-1]["shortfall"] == 50
    assert line["last"]["protected"] == 60
    text = page.read_text()
    assert "The founding conflict: litmus L3" in text
    embedded = re.search(r'id="line-0">(.*?)</script>', text)
    assert embedded is not None
    assert json.loads(embedded[1])["doors"][-1]["shortfall"] == 50


def test_a_page_asks_the_network_for_nothing(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    report(trace(tmp_path), page, None, quiet)
    asks = r"""(?:src|href)\s*=\s*["']?(?!data:|\#)[^"'\s>]+|url\((?!\#)|@import"""
    fetched = re.findall(asks, page.read_text())
    assert fetched == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "neither a trace, nor a counterexample, nor a gate's JSON, nor one of mutate"),
        ('{"mutants": 1, "survivors": []}', "no report of mutants: KeyError('verdict')"),
        ("", "an empty trace"),
        ("not json", "line 1: not JSON"),
    ],
)
def test_another_file_is_one_line(
    tmp_path: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.json"
    file.write_text(text)
    assert run(["report", str(file), "--output", str(tmp_path / "r.html")], io.StringIO()) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "r.html").exists()


def test_an_unknown_run_is_named_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(BadOperation, match=r"no run 'L9' in trace.jsonl \(there are: L3\)"):
        report(trace(tmp_path), tmp_path / "r.html", "L9", quiet)


def test_commands_write_a_page_of_what_they_found(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert run(["audit", str(trace(tmp_path)), "--report", str(page)], io.StringIO()) == 0
    assert "The founding conflict" in page.read_text()
    assert run(["litmus", "L3", "--report", str(page)], io.StringIO()) == 0
    text = page.read_text()
    assert "The founding conflict" in text
    assert "nothing shown" in text  # litmus proves nothing
    assert text.count('class="timeline"') == 1


def test_what_is_heard_live_has_a_page_too(tmp_path: Path) -> None:
    pytest.importorskip("zmq", reason="KV events are received with pyzmq")
    endpoint, page = f"ipc://{tmp_path}/nobody", tmp_path / "page.html"
    arguments = ["audit", endpoint, "--seconds", "0.1", "--report", str(page)]
    assert run(arguments, io.StringIO()) == 3
    assert endpoint in page.read_text()
    assert "VACUOUS" in page.read_text()


# --- a violation


def blamed_wrongly(folder: Path) -> Path:
    """Whoever is put off or refused in the trace is told of a claim that is not there."""
    file = trace(folder)
    text = file.read_text().replace('"blocking_claim_ids":["keep"]', '"blocking_claim_ids":["x"]')
    file.write_text(text)
    return file


def test_a_run_that_breaks_several_rules_is_one_case_and_all_are_counted(tmp_path: Path) -> None:
    page = page_of_runs("trace.jsonl", read_trace(blamed_wrongly(tmp_path)))
    (case,) = page.cases
    assert [(v.rule, v.seq) for v in (case.violation, *case.also)] == [
        ("T2", 71),
        ("F4", 71),
        ("T2", 73),
        ("F4", 73),
    ]
    assert page.said == "4 violations of 2 rules: T2, F4"
    assert [v["seq"] for v in page.to_json()["violations"]] == [71, 71, 73, 73]
    assert "It also breaks <b>F4</b> at event 73: " in render(page)


def test_audit_and_report_tell_the_same_of_a_trace(tmp_path: Path) -> None:
    file, page = blamed_wrongly(tmp_path), tmp_path / "page.html"
    assert run(["audit", str(file), "--report", str(page)], io.StringIO()) == 1
    text = page.read_text()
    assert text.count('class="case"') == text.count('class="timeline"') == 1
    assert "<title>VIOLATED: audit trace.jsonl</title>" in text
    assert "4 violations of 2 rules: T2, F4" in text
    assert " · reference" in text  # the engine that wrote it
    out = io.StringIO()
    assert run(["report", str(file), "--output", str(page)], out) == 1
    assert out.getvalue().count("  VIOLATED ") == 4


def test_what_the_json_leaves_out_of_a_violation_is_seen_in_its_run(tmp_path: Path) -> None:
    """Litmus tells no operation and no before and after; running the file again does."""
    file = broken_file(tmp_path / "counterexamples")
    violation = {"rule": "F4", "message": "m", "part": "litmus reference", "file": str(file)}
    data = {
        "parts": [{"name": "litmus reference", "verdict": "VIOLATED", "seconds": 1.0, "did": ""}],
        "violations": [
            {**violation, "operations": json.loads(file.read_text())["operations"]},
        ],
    }
    (case,) = page_of_gate(data, tmp_path, quiet).cases
    assert (case.violation.message, case.at) == ("m", "operation 4 of 4: drain")
    assert "request r7: shortfall" in [change.name for change in case.changes]


def test_a_violation_is_told_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = broken_file(tmp_path)
    monkeypatch.setattr("kvclaims.checker.report.again", lambda path: record(read(path)))
    page = page_of_counterexample(file)
    (case,) = page.cases
    assert (page.verdict, case.violation.rule, case.violation.operation) == ("VIOLATED", "F4", 4)
    assert case.at == "operation 4 of 4: drain"
    assert [(c.name, c.before, c.after, c.difference) for c in case.changes] == [
        ("request r7: state", "waiting", "finished", ""),
        ("request r7: outcome", "pending", "refused", ""),
        ("request r7: shortfall", "0", "3", "0 + 3 = 3"),
        ("request r7: blocking_claims", "none", "a, c", ""),
    ]
    assert case.line is not None
    ((step, found), *_) = case.line.broken
    assert "because of claim a, claim c" in case.line.text(step)
    assert found.rule == "F4"
    text = render(page)
    for words in (
        RULES["F4"].meaning,
        "should be [&#39;c&#39;]",
        f"kvclaims replay {file}",
        "declare claim=c content=B×3+C×1 n=4",
        "<b>breaks F4</b>",
        "0 + 3 = 3",
    ):
        assert words in text


def test_a_counterexample_runs_again_in_a_process_of_its_own(tmp_path: Path) -> None:
    file = broken_file(tmp_path)
    told, own = reportrun.again(file), record(read(file))
    assert told.events == own.events
    assert [f.message for f in told.findings] == [f.message for f in own.findings]
    assert [o.resident for o in told.operations] == [o.resident for o in own.operations]
    raw = json.loads(file.read_text())
    file.write_text(json.dumps({**raw, "engine": "nobody", "fault": None}))
    with pytest.raises(BadOperation, match="unknown engine 'nobody'"):
        reportrun.again(file)


def test_why_there_is_no_timeline_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: Path) -> object:
        raise EngineMissing("no vllm; install: pip install vllm")

    monkeypatch.setattr("kvclaims.checker.report.again", missing)
    file = broken_file(tmp_path / "counterexamples")
    violation = {"rule": "F4", "message": "m", "operations": [], "part": "fuzz vllm"}
    data = {
        "parts": [{"name": "fuzz vllm", "verdict": "VIOLATED", "seconds": 1.0, "did": ""}],
        "violations": [{**violation, "file": str(file)}],
    }
    page = page_of_gate(data, tmp_path, quiet)
    assert page.cases[0].note == (
        "No timeline: it was run again, and no vllm; install: pip install vllm."
    )
    assert page.cases[0].replay == str(file)


def test_only_what_changed_is_shown() -> None:
    shown = changes({"a": 1, "b": 4, "c": "x"}, {"a": 1, "b": 3, "d": True})
    assert [(c.name, c.before, c.after, c.difference) for c in shown] == [
        ("b", "4", "3", "4 − 1 = 3"),
        ("c", "x", "—", ""),
        ("d", "—", "true", ""),
    ]


# --- the rules


def test_every_rule_of_the_contract_has_a_row() -> None:
    assert [row.number for row in rule_rows([])] == list(RULES)
    assert all(cell.verdict == NOTHING for row in rule_rows([]) for cell in row.cells)


def test_a_proof_is_as_good_as_its_worst_obligation() -> None:
    obligations = [
        {"rule": "P1", "property": "p", "machine": "m", "action": "a", "verdict": "PROVED"},
        {"rule": "P1", "property": "p", "machine": "m", "action": "b", "verdict": "NOT INDUCTIVE"},
    ]
    proof = row("P1", check("prove", "NOT INDUCTIVE", obligations=obligations)).cells[0]
    assert (proof.verdict, proof.detail) == ("NOT INDUCTIVE", "1 of 2 obligations")
    (one,) = by_property(obligations)
    assert (one.proved, one.total, one.open) == (1, 2, ("b",))


def test_fuzzing_without_a_finding_shows_nothing_for_a_rule_it_never_caught() -> None:
    fuzz = check("fuzz", operations=500)
    caught = {"caught_by": "P1", "verdict": "HOLDS"}
    planted = check("faults", faults=[caught, {**caught, "caught_by": "L1", "verdict": "VIOLATED"}])
    cell = row("P1", fuzz, planted).cells[2]
    assert (cell.verdict, cell.detail) == ("HOLDS", "500 operations; 1 planted fault caught")
    assert row("L1", fuzz, planted).cells[2].verdict == NOTHING
    assert row("P1", planted).cells[2].verdict == NOTHING
    stopped = check("fuzz", "VIOLATED", operations=9, violations=[{"rule": "L1", "message": "m"}])
    assert row("P1", stopped, planted).cells[2].verdict == "UNKNOWN"
    assert row("L1", stopped, planted).cells[2].verdict == "VIOLATED"


def test_a_litmus_program_that_breaks_one_rule_does_not_show_its_others() -> None:
    program = {"id": "X", "rules": ["F4", "P1"], "verdict": "VIOLATED"}
    broken = check(
        "litmus", "VIOLATED", "e", programs=[program], violations=[{"rule": "F4", "message": "m"}]
    )
    assert row("F4", broken).cells[1].verdict == "VIOLATED"
    assert row("P1", broken).cells[1].verdict == "UNKNOWN"


def test_the_monitor_speaks_for_the_rules_it_evaluates() -> None:
    litmus = check("litmus", "HOLDS", "e", programs=[], monitored_steps=7)
    assert row("P1", litmus).cells[3].detail == "7 steps judged"
    assert "Q1" not in MONITORED
    assert row("Q1", litmus).cells[3].verdict == NOTHING
    found = {"rule": "P1", "message": "m", "step": "take(r, 1)"}
    assert row("P1", check("fuzz", "VIOLATED", violations=[found])).cells[3].verdict == "VIOLATED"


# --- the graph


def test_the_way_of_a_claim_is_found_in_the_graph() -> None:
    graph = state_graph(claims(generations=1, duration=1, hard=(1,)))
    edges, left_at = reportgraph.walk(graph, ["submitted", "accepted", "materialized", "released"])
    assert left_at is None
    assert [graph.edges[e].label for e in edges] == [
        "submit(claim0, 0)",
        "accept(claim0)",
        "gain(claim0)",
        "materialize(claim0)",
        "release(claim0)",
    ]
    assert reportgraph.follow(graph, [graph.edges[e].label for e in edges]) == edges


def test_a_step_that_the_machine_lacks_is_where_the_run_left_the_contract() -> None:
    graph = state_graph(claims(generations=1, duration=1, hard=(1,)))
    edges, left_at = reportgraph.walk(graph, ["submitted", "refused", "materialized"])
    assert (len(edges), left_at) == (2, "materialized")
    assert reportgraph.follow(graph, ["submit(claim0, 0)", "expire(claim0)"]) == edges[:1]


def test_the_claim_that_a_rule_was_broken_for_is_the_one_that_is_lit(tmp_path: Path) -> None:
    runtime = ENGINE.open(PoolConfig(8), "run")
    for claim in "ab":
        perform(runtime, parse({"op": "declare", "claim": claim, "content": [["A", 2]], "n": 2}))
    seq = len(runtime.events()) - 1
    line = timeline(runtime.events(), found=[Violation("F2", "m", seq=seq)])
    assert "the way of claim b#1" in reportgraph.life_of_a_claim(line).said
    plain = reportgraph.life_of_a_claim(timeline(runtime.events()))
    assert "the way of claim a#1" in plain.said


def test_a_page_without_anything_still_says_its_verdict() -> None:
    text = render(Page("empty", "VACUOUS", "nothing was checked"))
    assert '<span class="verdict v-vacuous">VACUOUS</span>' in text


# --- mutants


def mutants(file: Path, fate: Fate) -> Path:
    """What `mutate --output` writes of two mutants, one of them killed."""
    found = [
        Judged("monitor", f"m<{i}>", "off by one", "1", "2", one, "cost", "said")
        for i, one in enumerate((Fate.KILLED, fate))
    ]
    mutate.write(mutate.MutationReport(tuple(found), (), (), 0, 1.0), file)
    return file


@pytest.mark.parametrize(
    ("fate", "code", "said"),
    [
        (Fate.LIVES, 1, "2 mutants, 1 live, 0 equivalent, score 50.00%"),
        (Fate.DECLARED, 0, "2 mutants, 0 live, 1 equivalent, score 100.00%"),
    ],
)
def test_a_report_of_mutants_becomes_a_page(
    fate: Fate, code: int, said: str, tmp_path: Path
) -> None:
    file, page, out = mutants(tmp_path / "m.json", fate), tmp_path / "page.html", io.StringIO()
    assert run(["report", str(file), "--output", str(page), "--json"], out) == code
    told = json.loads(out.getvalue())["mutation"]
    assert (told["mutants"], told["targets"][0]["killers"]) == (2, "cost 1")
    text = page.read_text()
    assert said in text
    assert f"<code>m&lt;1&gt;</code></dt><dd>{fate}: said" in text
    assert "m&lt;0&gt;" not in text  # killed


def test_the_gates_page_shows_the_mutants_in_its_folder(tmp_path: Path) -> None:
    gate = {"parts": [{"name": "twins", "verdict": "HOLDS", "seconds": 1.0, "did": "1 twin"}]}
    assert page_of_gate(gate, tmp_path, quiet).mutation is None
    mutants(tmp_path / "mutation.json", Fate.LIVES)
    page = page_of_gate(gate, tmp_path, quiet)
    assert (page.verdict, page.mutation and page.mutation.verdict) == ("HOLDS", "VIOLATED")
    assert "1 live" in render(page)
    (tmp_path / "mutation.json").write_text("[]")
    page = page_of_gate(gate, tmp_path, quiet)
    assert page.mutation is None
    assert any("no report of mutants" in note for note in page.notes)
