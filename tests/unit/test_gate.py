"""The gate puts the parts together: worst verdict, missing engines, files for people and tools."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from kvclaims.checker import children, engines, gatefiles
from kvclaims.checker.counterexample import read
from kvclaims.checker.engines import PATH_VARIABLE
from kvclaims.checker.gate import GateReport, gate
from kvclaims.checker.verdicts import Several, exit_code, worst
from kvclaims.spec.interface import BadOperation, EngineMissing
from kvclaims.spec.vocabulary import Verdict

ANSWERS: dict[str, dict[str, Any]] = {
    "prove": {
        "verdict": "PROVED",
        "obligations": [
            {
                "machine": "pool",
                "rule": "F2",
                "property": "headroom",
                "action": "take",
                "verdict": "PROVED",
                "seconds": 0.1,
            }
        ],
    },
    "explore": {"verdict": "HOLDS", "states": 10, "transitions": 20, "counterexamples": []},
    "conform": {"verdict": "HOLDS", "transitions": 20},
    "tier": {"verdict": "HOLDS", "operations": 6000},
    "twins": {"verdict": "HOLDS", "twins": [1, 2, 3]},
    "litmus": {
        "verdict": "HOLDS",
        "engine": {"name": "e", "version": "1", "path": "/e"},
        "programs": [
            {
                "id": "L1",
                "title": "a <title>",
                "rules": ["F3"],
                "verdict": "HOLDS",
                "seconds": 0.1,
                "observed": {"victims": 50},
                "violations": [],
                "not_exposed": [],
            }
        ],
        "violations": [],
        "not_exposed": [],
        "monitored_steps": 100,
    },
    "faults": {"verdict": "HOLDS", "faults": [{}, {}], "violations": []},
    "fuzz": {"verdict": "HOLDS", "steps": 7, "operations": 7, "violations": [], "not_exposed": []},
}
VIOLATION = {
    "rule": "F4",
    "message": "blames <nobody>",
    "operations": [{"op": "drain"}],
}


class Answers:
    """Stands for `children.run`: what each command prints, by command and engine."""

    def __init__(self) -> None:
        self.by_command: dict[tuple[str, str | None], subprocess.CompletedProcess[str]] = {}

    def set(self, command: str, engine: str | None, code: int, out: object, err: str = "") -> None:
        text = out if isinstance(out, str) else json.dumps(out)
        self.by_command[command, engine] = subprocess.CompletedProcess([], code, text, err)

    def missing(self, engine: str) -> None:
        told = {"verdict": "ERROR", "exit": 2, "error": f"no {engine}; install: pip install it"}
        self.set("litmus", engine, 2, told)

    def __call__(self, command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        arguments = command[3:]
        name = "tier" if "--tier" in arguments else arguments[0]
        if name not in ANSWERS:  # a counterexample, run again for the report
            return subprocess.CompletedProcess([], 1, "", "cannot run here")
        engine = arguments[arguments.index("--engine") + 1] if "--engine" in arguments else None
        default = subprocess.CompletedProcess([], 0, json.dumps(ANSWERS[name]), "")
        if "--trace" in arguments and (name, engine) not in self.by_command:
            Path(arguments[arguments.index("--trace") + 1]).write_text(f"{engine}\n")
        return self.by_command.get((name, engine), default)


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Answers:
    fake = Answers()
    monkeypatch.setattr(children, "run", fake)
    monkeypatch.setattr(engines, "names", lambda: ("reference", "vllm", "vllm-engine"))
    return fake


def run(output: Path, *chosen: str) -> GateReport:
    return gate(chosen, 9.0, 0, output, lambda _: None)


def test_all_is_well(tmp_path: Path, answers: Answers) -> None:
    report = run(tmp_path)
    assert report.verdict is Verdict.HOLDS
    assert [part.name for part in report.parts] == [
        *("proofs", "exploration", "conformance", "twins"),
        *("litmus reference", "fuzz reference", "faults reference"),
        *("litmus vllm", "fuzz vllm", "fuzz vllm tier", "faults vllm"),
        *("litmus vllm-engine", "fuzz vllm-engine"),
        "monitor",
    ]
    rows = list(report.lines())
    assert rows[0].endswith("1 obligation")
    assert rows[1].endswith("10 states, 20 transitions")
    assert rows[9].endswith("6,000 operations")
    assert rows[13].endswith("300 monitored steps")
    assert (tmp_path / "trace.jsonl").read_text() == "reference\nvllm\nvllm-engine\n"
    assert (report.to_json()["steps"], report.to_json()["operations"]) == (21, 6021)
    assert len(report.to_json()["engines"]) == 3


def test_progress_calls_a_run_on_a_tier_what_the_table_calls_it(
    tmp_path: Path, answers: Answers
) -> None:
    told: list[str] = []
    gate(("vllm",), 9.0, 0, tmp_path, told.append, own=False)
    ended = [line.split(" HOLDS in ")[0] for line in told if " HOLDS in " in line]
    assert ended == ["litmus vllm", "fuzz vllm", "fuzz vllm tier", "faults vllm"]


def test_without_an_engine_the_reference_is_checked_and_that_is_said(
    tmp_path: Path, answers: Answers
) -> None:
    answers.missing("vllm")
    answers.missing("vllm-engine")
    report = run(tmp_path)
    assert exit_code(report.verdict) == 0
    assert list(report.notes) == [
        "only the reference was checked:",
        "vllm was not run: no vllm; install: pip install it",
        "vllm-engine was not run: no vllm-engine; install: pip install it",
    ]
    assert "fuzz vllm" not in [part.name for part in report.parts]


def test_a_chosen_engine_that_is_missing_is_an_error(tmp_path: Path, answers: Answers) -> None:
    answers.missing("vllm")
    with pytest.raises(EngineMissing, match="no vllm; install: pip install it"):
        run(tmp_path, "vllm")


def test_an_engine_path_that_nothing_ran_from_is_an_error(
    tmp_path: Path, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PATH_VARIABLE, "/there")
    answers.missing("vllm")
    answers.missing("vllm-engine")
    with pytest.raises(EngineMissing, match="no engine ran from /there: "):
        run(tmp_path)


def test_a_crash_of_an_engine_is_a_result(tmp_path: Path, answers: Answers) -> None:
    answers.set("fuzz", "vllm", -11, "", "Segmentation fault")
    report = run(tmp_path)
    assert report.verdict is Verdict.VIOLATED
    (violation,) = report.to_json()["violations"]
    assert violation["message"] == "the process was killed by SIGSEGV: Segmentation fault"


def test_what_the_monitor_found_is_told_in_its_row_too(tmp_path: Path, answers: Answers) -> None:
    found = {**ANSWERS["litmus"], "verdict": "VIOLATED"}
    found["violations"] = [{**VIOLATION, "step": "take(r, 1)"}]
    answers.set("litmus", "vllm", 1, found)
    report = run(tmp_path)
    assert report.parts[-1].verdict is Verdict.VIOLATED
    assert len(report.to_json()["violations"]) == 1


def test_a_crash_of_the_checker_shows_nothing(tmp_path: Path, answers: Answers) -> None:
    answers.set("conform", None, 1, "", "Traceback\nValueError: x")
    report = run(tmp_path)
    assert exit_code(report.verdict) == 3
    assert report.parts[2].did == "the process ended with exit code 1: ValueError: x"


def test_a_violation_reaches_every_file(tmp_path: Path, answers: Answers) -> None:
    written = tmp_path / "found.json"
    written.write_text('{"operations": []}')
    found = {**ANSWERS["fuzz"], "verdict": "VIOLATED"}
    found["violations"] = [VIOLATION, {**VIOLATION, "file": str(written)}]
    answers.set("fuzz", "reference", 1, found)
    output = tmp_path / "gate"
    report = run(output)
    assert exit_code(report.verdict) == 1
    page = (output / "report.html").read_text()
    assert "blames &lt;nobody&gt;" in page
    assert "counterexamples/fuzz-reference-2.json" in page
    copied = output / "counterexamples" / "fuzz-reference-2.json"
    assert copied.read_text() == written.read_text()
    assert json.loads((output / "counterexamples" / "fuzz-reference-1.json").read_text())[
        "operations"
    ] == [{"op": "drain"}]
    root = ElementTree.parse(output / "junit.xml").getroot()
    failures = [
        case.attrib["name"] for case in root.iter("testcase") if case.find("failure") is not None
    ]
    assert failures == ["fuzz reference"]
    sarif = json.loads((output / "results.sarif").read_text())
    assert [result["ruleId"] for result in sarif["runs"][0]["results"]] == ["F4", "F4"]
    with pytest.raises(BadOperation, match="not a counterexample of this format"):
        read(output / "counterexamples" / "fuzz-reference-1.json")
    again = run(output, "vllm")
    assert again.verdict is Verdict.HOLDS
    assert not (output / "counterexamples").exists()


def test_a_litmus_violation_can_be_replayed(tmp_path: Path, answers: Answers) -> None:
    found = {**ANSWERS["litmus"], "verdict": "VIOLATED"}
    pool = {"usable": 80, "block_size": 16, "defer_limit": 1}
    operations = [{"op": "mark", "content": [["A", 1]]}, {"op": "drain"}]
    found["violations"] = [{**VIOLATION, "pool": pool, "operations": operations}]
    answers.set("litmus", "vllm", 1, found)
    example = read(tmp_path / run(tmp_path).parts[7].counterexample(1))
    assert (example.engine, example.rule, example.program.config.usable) == ("vllm", "F4", 80)
    assert [operation.op for operation in example.program.operations] == ["drain"]


def test_an_output_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(BadOperation, match="cannot write to"):
        run(blocked / "gate")


def test_verdicts_never_round_up() -> None:
    assert worst([]) is Verdict.VACUOUS
    assert worst([Verdict.PROVED, Verdict.HOLDS]) is Verdict.HOLDS
    assert worst([Verdict.HOLDS, Verdict.NOT_EXPOSED]) is Verdict.HOLDS
    assert worst([Verdict.HOLDS, Verdict.UNKNOWN]) is Verdict.UNKNOWN
    assert worst([Verdict.UNKNOWN, Verdict.VIOLATED]) is Verdict.VIOLATED
    assert worst([Verdict.NOT_EXPOSED]) is Verdict.NOT_EXPOSED


class Canned:
    def __init__(self, verdict: Verdict, states: int) -> None:
        self.verdict = verdict
        self._states = states

    def to_json(self) -> dict[str, Any]:
        return {"states": self._states, "depth": 3, "found": [self._states]}

    def lines(self) -> list[str]:
        return [f"{self._states} states"]


def test_reports_put_together() -> None:
    both = Several(
        "instances", (Canned(Verdict.HOLDS, 1), Canned(Verdict.VIOLATED, 2)), sums=("states",)
    )
    told = both.to_json()
    assert (both.verdict, told["states"], told["found"]) == (Verdict.VIOLATED, 3, [1, 2])
    assert "depth" not in told
    assert [part["depth"] for part in told["instances"]] == [3, 3]
    assert list(both.lines()) == ["1 states", "2 states"]


PLACES = [
    {"file": "vllm/v1/core/block_pool.py", "line": 712, "function": "BlockPool.free_blocks"},
    {"file": "vllm/v1/core/sched/scheduler.py", "line": 40, "function": "Scheduler.schedule"},
]


def located(answers: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM breaks a rule, and running that again tells the lines."""
    found = {**ANSWERS["fuzz"], "verdict": "VIOLATED", "violations": [VIOLATION]}
    answers.set("fuzz", "vllm", 1, found)
    again = {"verdict": "VIOLATED", "violations": [{**VIOLATION, "places": PLACES}]}
    monkeypatch.setitem(ANSWERS, "replay", again)


def test_a_violation_is_shown_at_the_line_of_the_engine(
    tmp_path: Path, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    located(answers, monkeypatch)
    run(tmp_path)
    (result,) = json.loads((tmp_path / "results.sarif").read_text())["runs"][0]["results"]
    where = result["locations"][0]["physicalLocation"]
    assert where["artifactLocation"]["uri"] == "vllm/v1/core/block_pool.py"
    assert where["region"] == {"startLine": 712}
    (caller,) = result["relatedLocations"]
    assert caller["message"]["text"] == "called by Scheduler.schedule"
    assert result["partialFingerprints"] == {"kvclaims/v1": "F4:BlockPool.free_blocks"}
    cases = ElementTree.parse(tmp_path / "junit.xml").getroot().iter("testcase")
    (failed,) = [case for case in cases if case.find("failure") is not None]
    assert (failed.get("file"), failed.get("line")) == ("vllm/v1/core/block_pool.py", "712")


def test_the_line_is_looked_for_once_for_each_rule(
    tmp_path: Path, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look loads the engine: with thirty counterexamples a gate would run for minutes."""
    many = [
        {**VIOLATION, "rule": rule, "message": f"{n}"} for n in range(15) for rule in ("F4", "B2")
    ]
    answers.set("fuzz", "vllm", 1, {**ANSWERS["fuzz"], "verdict": "VIOLATED", "violations": many})
    looked: list[Path] = []
    monkeypatch.setattr(gatefiles, "_places", lambda file: looked.append(file) or PLACES)
    run(tmp_path)
    assert [file.name for file in looked] == ["fuzz-vllm-1.json", "fuzz-vllm-2.json"]
    results = json.loads((tmp_path / "results.sarif").read_text())["runs"][0]["results"]
    assert len(results) == 30
    named = [str(result["partialFingerprints"]) for result in results]
    assert sum("BlockPool.free_blocks" in name for name in named) == 2


def test_a_violation_without_a_line_is_shown_all_the_same(tmp_path: Path, answers: Answers) -> None:
    found = {**ANSWERS["fuzz"], "verdict": "VIOLATED", "violations": [VIOLATION]}
    answers.set("fuzz", "vllm", 1, found)
    run(tmp_path)
    (result,) = json.loads((tmp_path / "results.sarif").read_text())["runs"][0]["results"]
    assert result["locations"][0]["logicalLocations"][0]["fullyQualifiedName"] == "fuzz vllm"
    cases = ElementTree.parse(tmp_path / "junit.xml").getroot().iter("testcase")
    assert [c.get("line") for c in cases if c.find("failure") is not None] == [None]


def test_known_findings_are_allowed_by_name_and_shown(tmp_path: Path, answers: Answers) -> None:
    answers.set("fuzz", "vllm", 0, {**ANSWERS["fuzz"], "known": {"never-computed-hit": 3}})
    report = run(tmp_path)
    assert report.verdict is Verdict.HOLDS
    (told,) = [line for line in report.lines() if line.startswith("known finding")]
    assert told.startswith("known finding never-computed-hit: 3 times, allowed by ")
    assert told.endswith("findings.toml")
    assert report.to_json()["known"] == {"never-computed-hit": 3}


def test_each_engine_is_fuzzed_with_its_own_findings_or_those_that_are_given(
    tmp_path: Path, answers: Answers
) -> None:
    asked: list[list[str]] = []
    plain = Answers.__call__

    def note(self: Answers, command: list[str], **options: Any) -> Any:
        asked.append(command[3:])
        return plain(self, command, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Answers, "__call__", note)
        run(tmp_path / "own", "vllm", "reference")
        mine = tmp_path / "mine.toml"
        mine.write_text(BASELINE)
        gate(("reference",), 9.0, 0, tmp_path / "given", lambda _: None, mine)
    fuzzed = [c for c in asked if c[0] == "fuzz" and "--tier" not in c]
    given = {
        command[command.index("--engine") + 1]: command[command.index("--baseline") + 1]
        for command in fuzzed
        if "--baseline" in command
    }
    assert Path(given["vllm"]).name == "findings.toml"
    assert given["reference"] == str(mine)
    assert sum("--baseline" not in command for command in fuzzed) == 1


BASELINE = """
[[finding]]
name = "mine"
rule = "B4"
package = "vllm"
versions = ">=0.24"
signature = "x"
meaning = "x"
"""


def test_a_baseline_that_cannot_be_read_is_an_error_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(BadOperation, match="No such file"):
        gate((), 9.0, 0, tmp_path, lambda _: None, tmp_path / "none.toml")


def test_what_an_engine_cannot_do_and_the_seed_are_told(tmp_path: Path, answers: Answers) -> None:
    answers.set("fuzz", "vllm", 0, {**ANSWERS["fuzz"], "not_exposed": ["feature drafts"]})
    lines = list(run(tmp_path).lines())
    assert "not_exposed by vllm: feature drafts" in lines
    assert "seed 0" in lines


def test_of_an_engine_alone_what_says_nothing_of_it_is_left_out(
    tmp_path: Path, answers: Answers
) -> None:
    report = gate(("vllm",), 9.0, 0, tmp_path, lambda _: None, own=False)
    assert [part.name for part in report.parts] == [
        *("litmus vllm", "fuzz vllm", "fuzz vllm tier", "faults vllm"),
        "monitor",
    ]
