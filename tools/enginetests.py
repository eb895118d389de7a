"""A pytest plugin that runs an engine's own tests on mutants of it (`tools/detection.py theirs`).

First all tests are run once on the engine as it is: which pass, how long each takes, and which
functions it enters.  Then, for each mutant, a forked child plants it and runs the tests that
passed and that enter its function, the quickest first, up to the first that fails.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree

import coverage
import pytest
from _pytest.runner import runtestprotocol

from kvclaims.checker import detection
from kvclaims.checker.enginemutants import plant
from kvclaims.checker.mutatecode import Answer, in_child

JOB: Final[dict[str, Any]] = json.loads(os.environ["KVCLAIMS_ENGINE_TESTS"])
ALL: Final = 1_000_000
"""The effort of a run of all tests."""

STARTED: Final = time.monotonic()
LIMIT_S: Final = 240.0
"""Seconds of processor time in which the tests have to end on a mutant."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool:
    baseline = Path(JOB["baseline"])
    if not baseline.is_file():
        known = JOB["junit"] and _reported(session.items, Path(JOB["junit"]))
        baseline.write_text(json.dumps(known or _measured(session.items)), encoding="utf-8")
    told = json.loads(baseline.read_text(encoding="utf-8"))
    sample = detection.Drawn.read(Path(JOB["sample"]))
    assert sample is not None
    results = detection.Results(Path(JOB["results"]), JOB["version"])
    effort = JOB["tests_s"] or ALL
    waiting = [m for m in sample.mutants if results.wants("theirs", m, effort)]
    waiting.sort(key=lambda m: results.last("ours", m.name) is None)  # those to compare first
    for mutant in detection.share(waiting, JOB["share"])[: JOB["limit"]]:
        if JOB["seconds"] and time.monotonic() - STARTED > JOB["seconds"]:
            break
        chosen = _within(_chosen(session.items, told, mutant), told, effort)
        begun = time.monotonic()
        answer = in_child(partial(_run, mutant, chosen), LIMIT_S)
        seconds = time.monotonic() - begun
        print(results.put("theirs", mutant, effort, answer, seconds, tests=len(chosen)), flush=True)
    return True


def _reported(items: list[pytest.Item], report: Path) -> dict[str, Any]:
    """What an earlier run of the same tests wrote as JUnit; which functions each enters is not
    told, so all of them are run."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        passed = case.find("failure") is None and case.find("error") is None
        key = (case.attrib["classname"], case.attrib["name"])
        found[key] = {"passed": passed, "seconds": float(case.attrib["time"])}
    tests = {}
    for item in items:
        file, *classes, name = item.nodeid.split("::")
        key = (".".join([file.removesuffix(".py").replace("/", "."), *classes]), name)
        if key in found:
            tests[item.nodeid] = found[key]
    return {"tests": tests, "entered": None}


def _measured(items: list[pytest.Item]) -> dict[str, Any]:
    """Of every test whether it passes, its processor time, and the functions that it enters."""
    sample = detection.Drawn.read(Path(JOB["sample"]))
    assert sample is not None
    names = sorted({m.path for m in sample.mutants})
    cover = coverage.Coverage(data_file=None, include=[f"*/{name}" for name in names])
    cover.start()
    tests: dict[str, dict[str, Any]] = {}
    for number, item in enumerate(items):
        cover.switch_context(str(number))
        begun = time.process_time()
        passed = _passes(item)
        tests[item.nodeid] = {"passed": passed, "seconds": time.process_time() - begun}
    cover.stop()
    return {"tests": tests, "entered": dict(_entered(cover, names, items))}


def _entered(
    cover: coverage.Coverage, names: list[str], items: list[pytest.Item]
) -> Iterator[tuple[str, list[str]]]:
    """For each function of the modules the tests that run one of its lines."""
    data = cover.get_data()
    for file in data.measured_files():
        path = next(name for name in names if file.endswith(name))
        lines = data.contexts_by_lineno(file)
        for function, first, last in detection.functions_of(Path(file)):
            entered = {c for n in range(first, last + 1) for c in lines.get(n, ()) if c}
            yield f"{path}:{function}", [items[int(c)].nodeid for c in sorted(entered)]


def _chosen(
    items: list[pytest.Item], told: dict[str, Any], mutant: detection.CodeMutant
) -> list[pytest.Item]:
    names = told["tests"] if told["entered"] is None else told["entered"]
    entering = set(names if told["entered"] is None else names.get(detection.outermost(mutant), ()))
    passing = {name: one for name, one in told["tests"].items() if one["passed"]}
    chosen = [item for item in items if item.nodeid in entering and item.nodeid in passing]
    return sorted(chosen, key=lambda item: float(passing[item.nodeid]["seconds"]))


def _within(chosen: list[pytest.Item], told: dict[str, Any], effort: int) -> list[pytest.Item]:
    """The quickest of them, which together took no longer than `effort` seconds."""
    spent, within = 0.0, []
    for item in chosen:
        spent += float(told["tests"][item.nodeid]["seconds"])
        if spent > effort:
            break
        within.append(item)
    return within


def _run(mutant: detection.CodeMutant, chosen: list[pytest.Item]) -> Answer:
    try:
        plant(mutant)
    except Exception as error:  # noqa: BLE001  (a mutant that cannot be planted is told)
        return Answer("error", str(error))
    for item in chosen:
        if not _passes(item):
            return Answer("their tests", item.nodeid)
    return Answer()


def _passes(item: pytest.Item) -> bool:
    reports = runtestprotocol(item, nextitem=None, log=False)
    return not any(report.failed for report in reports)
