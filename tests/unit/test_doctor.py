"""The doctor says what is there and how to get what is not."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from kvclaims.checker import doctor as physician
from kvclaims.checker import engines
from kvclaims.checker.doctor import Finding, doctor
from kvclaims.spec.interface import EngineMissing
from kvclaims.spec.vocabulary import Verdict


def found() -> dict[str, Finding]:
    return {finding.name: finding for finding in doctor().findings}


def test_all_that_is_needed_is_here() -> None:
    assert doctor().verdict is Verdict.HOLDS
    assert set(found()) >= {"python", "z3-solver", "engine reference", "torch", "gpu", "cores"}
    assert found()["engine reference"].found


def test_what_is_needed_is_what_the_package_declares() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    declared = tomllib.loads(text)["project"]["dependencies"]
    assert physician.needed() == sorted(re.split(r"[<>=]", one)[0] for one in declared)
    assert all(found()[name].needed for name in physician.needed())


def test_a_missing_engine_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> object:
        raise EngineMissing(f"{name} is not installed; install: pip install {name}\nmore")

    monkeypatch.setattr(engines, "ready", missing)
    assert doctor().verdict is Verdict.HOLDS
    line = next(line for line in doctor().lines() if line.startswith("engine vllm "))
    assert line.split() == [
        *("engine", "vllm", "missing", "vllm", "is", "not", "installed;"),
        *("install:", "pip", "install", "vllm"),
    ]


def test_a_missing_solver_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(physician, "version", gone)
    report = doctor()
    assert report.lacks_needed
    assert report.verdict is Verdict.UNKNOWN
    assert any("(install: pip install z3-solver)" in line for line in report.lines())


def test_what_is_optional_says_what_it_is_for_and_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def gone(name: str) -> str:
        raise PackageNotFoundError(name)

    assert {*physician.OPTIONAL, *physician.PROGRAMS} <= set(found())
    monkeypatch.setattr(physician, "version", gone)
    monkeypatch.setattr(physician.shutil, "which", lambda _: None)
    lines = list(doctor().lines())
    assert any(
        "not on the path: tests of report.html in a browser (install: apt-get install chromium)"
        in line
        for line in lines
    )
    assert any(line.endswith("(install: pip install cvc5)") for line in lines)
