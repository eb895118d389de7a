"""The files of a gate: report.html, junit.xml, results.sarif, trace.jsonl, counterexamples."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from xml.etree import ElementTree

from kvclaims.checker.counterexample import FORMAT
from kvclaims.checker.engines import PATH_VARIABLE
from kvclaims.checker.report import page_of_gate, write_page
from kvclaims.checker.verdicts import Progress
from kvclaims.spec.interface import BadOperation
from kvclaims.spec.vocabulary import RULES, Verdict

if TYPE_CHECKING:
    from kvclaims.checker.gate import GateReport, Part

_OWN: Final = ("report.html", "junit.xml", "results.sarif", "trace.jsonl", "gate.json")


def engine_path() -> str | None:
    """The folder of `--engine-path`, None without."""
    return os.environ.get(PATH_VARIABLE)


def prepare(output: Path) -> Path:
    """The folder for the files, emptied of what an earlier gate wrote; `BadOperation` if it
    cannot be written."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(output / "counterexamples", ignore_errors=True)
        for name in _OWN:
            (output / name).unlink(missing_ok=True)
    except OSError as error:
        raise BadOperation(f"cannot write to {output}: {error.strerror}") from None
    return output


def write(report: GateReport, traces: Sequence[Path], progress: Progress) -> None:
    """Write every file of the gate into its folder."""
    folder = report.output
    told = {"verdict": report.verdict, **report.to_json()}
    (folder / "gate.json").write_text(json.dumps(told, indent=1), encoding="utf-8")
    (folder / "trace.jsonl").write_text(
        "".join(path.read_text(encoding="utf-8") for path in traces), encoding="utf-8"
    )
    _write_counterexamples(report, folder)
    write_page(page_of_gate(told, folder, progress), folder / "report.html")
    ElementTree.ElementTree(junit(report)).write(
        folder / "junit.xml", encoding="utf-8", xml_declaration=True
    )
    (folder / "results.sarif").write_text(json.dumps(sarif(report), indent=1), encoding="utf-8")


def _write_counterexamples(report: GateReport, folder: Path) -> None:
    """One file for each violation: the one that the command wrote, else what it printed."""
    for part in report.parts:
        for number, violation in enumerate(part.violations, 1):
            target = folder / part.counterexample(number)
            target.parent.mkdir(exist_ok=True)
            written = Path(str(violation.get("file") or ""))
            if written.is_file():
                shutil.copyfile(written, target)
            else:
                told = _replayable(part, violation) if "pool" in violation else violation
                target.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def _replayable(part: Part, violation: Mapping[str, Any]) -> dict[str, Any]:
    """A litmus violation in the form that `kvclaims replay` reads; marks are litmus' own."""
    return {
        "format": FORMAT,
        "engine": part.engine,
        "rule": violation["rule"],
        "message": violation["message"],
        "seed": None,
        "fault": None,
        "pool": violation["pool"],
        "operations": [o for o in violation["operations"] if o["op"] != "mark"],
    }


def junit(report: GateReport) -> ElementTree.Element:
    """A test suite for each part, a test case for each obligation, twin or program in it."""
    root = ElementTree.Element("testsuites", name="kvclaims gate")
    for part in report.parts:
        cases = list(_cases(part))
        failed = sum(verdict not in _PASSED for _, verdict, _, _ in cases)
        skipped = sum(verdict in _SKIPPED for _, verdict, _, _ in cases)
        suite = ElementTree.SubElement(
            root,
            "testsuite",
            name=part.name,
            tests=str(len(cases)),
            failures=str(failed),
            skipped=str(skipped),
            time=f"{part.seconds:.3f}",
        )
        for name, verdict, seconds, message in cases:
            case = ElementTree.SubElement(
                suite, "testcase", classname=part.name, name=name, time=f"{seconds:.3f}"
            )
            if verdict in _SKIPPED:
                ElementTree.SubElement(case, "skipped", message=message or verdict)
            elif verdict not in _PASSED:
                ElementTree.SubElement(case, "failure", type=verdict, message=message or verdict)
    return root


_SKIPPED: Final = ("not run", str(Verdict.NOT_EXPOSED))
_PASSED: Final = (str(Verdict.PROVED), str(Verdict.HOLDS), *_SKIPPED)


def _cases(part: Part) -> Iterator[tuple[str, str, float, str]]:
    """Name, verdict, seconds and message of everything a part judged."""
    items = [*part.data.get("obligations", ()), *part.data.get("programs", ())]
    for item in items:
        words = (item.get(key) for key in ("machine", "rule", "property", "action", "id", "title"))
        messages = (str(v.get("message")) for v in item.get("violations", ()))
        name = " ".join(str(word) for word in words if word)
        yield name, str(item["verdict"]), float(item.get("seconds", 0)), "; ".join(messages)
    if not items:
        told = "; ".join(v["message"] for v in part.violations) or part.missing or part.error
        yield part.name, part.shown, part.seconds, told


def sarif(report: GateReport) -> dict[str, Any]:
    """Every violation as a SARIF 2.1.0 result; rules are those of the contract."""
    results = [
        {
            "ruleId": violation["rule"],
            "level": "error",
            "message": {"text": f"{part.name}: {violation['message']}"},
            "locations": [
                {
                    "logicalLocations": [{"fullyQualifiedName": part.name, "kind": "module"}],
                    "physicalLocation": {"artifactLocation": {"uri": "trace.jsonl"}},
                }
            ],
        }
        for part in report.parts
        for violation in part.violations
    ]
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "kvclaims",
                        "version": version("kvclaims"),
                        "rules": [
                            {"id": rule.number, "shortDescription": {"text": rule.meaning}}
                            for rule in RULES.values()
                        ],
                    }
                },
                "results": results,
            }
        ],
    }
