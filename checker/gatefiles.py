"""The files of a gate: report.html, junit.xml, results.sarif, trace.jsonl, counterexamples."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from xml.etree import ElementTree

from kvclaims.checker import children
from kvclaims.checker.counterexample import FORMAT
from kvclaims.checker.engines import REFERENCE
from kvclaims.checker.report import page_of_gate, write_page
from kvclaims.checker.verdicts import Progress
from kvclaims.spec.interface import BadOperation
from kvclaims.spec.vocabulary import RULES, Verdict

if TYPE_CHECKING:
    from kvclaims.checker.gate import GateReport, Part

_OWN: Final = ("report.html", "junit.xml", "results.sarif", "trace.jsonl", "gate.json")


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
    places = _located(report, progress)
    write_page(page_of_gate(told, folder, progress), folder / "report.html")
    ElementTree.ElementTree(junit(report, places)).write(
        folder / "junit.xml", encoding="utf-8", xml_declaration=True
    )
    results = json.dumps(sarif(report, places), indent=1)
    (folder / "results.sarif").write_text(results, encoding="utf-8")


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
        "version": str((part.data.get("engine") or {}).get("version", "")),
        "rule": violation["rule"],
        "message": violation["message"],
        "seed": None,
        "fault": None,
        "pool": violation["pool"],
        "operations": [o for o in violation["operations"] if o["op"] != "mark"],
    }


Located = Mapping[str, Sequence[Mapping[str, Any]]]
"""Counterexample file, below the gate's folder → the engine's lines, the breaking one first."""


def _located(report: GateReport, progress: Progress) -> Located:
    """Where in the engine the first counterexample of each rule breaks it, by running it again.

    Each is a process that loads the engine, and others of the rule most often break at the same
    line: a badly broken engine must not keep its owner waiting for all of them.
    """
    found: dict[str, Sequence[Mapping[str, Any]]] = {}
    seen: set[tuple[str, str]] = set()
    for part in report.parts:
        if part.engine is None or part.engine == REFERENCE:
            continue
        for number, violation in enumerate(part.violations, 1):
            if (kind := (part.engine, violation["rule"])) in seen:
                continue
            seen.add(kind)
            name = part.counterexample(number)
            progress(f"looking for the line behind {name}")
            found[name] = _places(report.output / name)
    return found


def _places(file: Path) -> Sequence[Mapping[str, Any]]:
    """What `kvclaims replay` says of the place; none where the run does not repeat itself."""
    command = [sys.executable, "-m", "kvclaims.checker.cli", "replay", str(file), "--json"]
    ended = children.run(command)
    try:
        told = json.loads(ended.stdout)
    except json.JSONDecodeError:
        return ()
    violations = told.get("violations") if isinstance(told, dict) else None
    return violations[0].get("places", ()) if violations else ()


def junit(report: GateReport, places: Located) -> ElementTree.Element:
    """A test suite for each part, a test case for each obligation, twin or program in it.

    A test case that failed at a known line of the engine carries it as `file` and `line`.
    """
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
                _at_line(case, part, places)
                ElementTree.SubElement(case, "failure", type=verdict, message=message or verdict)
    return root


def _at_line(case: ElementTree.Element, part: Part, places: Located) -> None:
    numbers = range(1, len(part.violations) + 1)
    known = [found for n in numbers if (found := places.get(part.counterexample(n)))]
    if known:
        case.set("file", str(known[0][0]["file"]))
        case.set("line", str(known[0][0]["line"]))


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


def sarif(report: GateReport, places: Located) -> dict[str, Any]:
    """Every violation as a SARIF 2.1.0 result; rules are those of the contract.

    A result lies at the engine's line where that is known, relative to the folder that holds the
    engine's package, which is the root of its repository.
    """
    results = [
        _result(part, violation, places.get(part.counterexample(number), ()))
        for part in report.parts
        for number, violation in enumerate(part.violations, 1)
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


def _result(
    part: Part, violation: Mapping[str, Any], places: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    where = places[0]["function"] if places else part.name
    return {
        "ruleId": violation["rule"],
        "level": "error",
        "message": {"text": f"{part.name}: {violation['message']}"},
        "locations": [_location(places[0])] if places else [_nowhere(part)],
        "relatedLocations": [
            {"id": n, **_location(place), "message": {"text": f"called by {place['function']}"}}
            for n, place in enumerate(places[1:], 1)
        ],
        "partialFingerprints": {"kvclaims/v1": f"{violation['rule']}:{where}"},
    }


def _location(place: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "logicalLocations": [{"fullyQualifiedName": place["function"], "kind": "function"}],
        "physicalLocation": {
            "artifactLocation": {"uri": place["file"], "uriBaseId": "%SRCROOT%"},
            "region": {"startLine": place["line"]},
        },
    }


def _nowhere(part: Part) -> dict[str, Any]:
    """A violation that no line of an engine stands for: the trace shows it."""
    return {
        "logicalLocations": [{"fullyQualifiedName": part.name, "kind": "module"}],
        "physicalLocation": {"artifactLocation": {"uri": "trace.jsonl"}},
    }
