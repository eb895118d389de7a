"""Wrong input gives one clear line and exit code 2; `--json` gives one object and nothing else."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kvclaims.checker import engines
from kvclaims.checker.cli import run
from kvclaims.spec.interface import EngineMissing


def failing(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a failing command prints, after checking all that is common."""
    out = io.StringIO()
    assert run(arguments, out) == 2
    assert out.getvalue() == ""
    error = capsys.readouterr().err
    assert error.startswith("kvclaims: ")
    assert error.count("\n") == 1
    out = io.StringIO()
    assert run([*arguments, "--json"], out) == 2
    told = json.loads(out.getvalue())
    assert (told["verdict"], told["exit"]) == ("ERROR", 2)
    assert f"kvclaims: {told['error']}\n" == error
    capsys.readouterr()
    return error.removeprefix("kvclaims: ").rstrip("\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bogus"], "No such command 'bogus'."),
        (["litmus", "--bogus"], "No such option '--bogus'."),
        (["litmus", "L99"], "unknown program 'L99' (known: C1, L1, L2, "),
        (["litmus", "nowhere.toml"], "nowhere.toml: no such file"),
        (
            ["litmus", "--engine", "foo"],
            "unknown engine 'foo' (known: reference, sglang, vllm, vllm-engine)",
        ),
        (
            ["litmus", "--engine-path", "."],
            "--engine-path: reference has no package of its own to take from there",
        ),
        (
            ["litmus", "--engine", "vllm", "--engine-path", "nowhere"],
            "--engine-path: no folder nowhere",
        ),
        (
            ["litmus", "--engine", "vllm", "--engine-path", "tests"],
            "--engine-path: no engine there, tests/vllm/__init__.py does not exist",
        ),
        (["fuzz"], "Missing option '--engine'."),
        (
            ["fuzz", "--engine", "reference", "--steps", "-4"],
            "Invalid value for '--steps': -4 is not in the range x>=1.",
        ),
        (
            ["fuzz", "--engine", "reference", "--seconds", "0"],
            "Invalid value for '--seconds': 0.0 is not in the range x>0.",
        ),
        (
            ["fuzz", "--engine", "reference", "--steps", "5", "--seconds", "5"],
            "give --steps or --seconds, not both",
        ),
        (
            ["fuzz", "--engine", "reference", "--steps", "many"],
            "Invalid value for '--steps': 'many' is not a valid integer range.",
        ),
        (
            ["fuzz", "--engine", "reference", "--seed", "-1"],
            "Invalid value for '--seed': -1 is not in the range x>=0.",
        ),
        (["audit"], "Missing argument 'TRACES...'."),
        (["audit", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
        (["explore", "nowhere"], "unknown machine 'nowhere' (known: claims, claims/two, "),
        (["explore", "--set", "pool=3"], "--set, --by and --export need a MACHINE"),
        (
            ["explore", "blockclaims", "--set", "pool"],
            "Invalid value for '--set': 'pool' is not name=value",
        ),
        (
            ["explore", "blockclaims", "--set", "pool=-6"],
            "Invalid value for '--set': 'pool=-6': a size is at least 0",
        ),
        (
            ["explore", "blockclaims", "--set", "sizes=1,-2"],
            "Invalid value for '--set': 'sizes=1,-2': a size is at least 0",
        ),
        (["prove", "--rule", "X9"], "Invalid value for '--rule': unknown rule 'X9' (known: L1, "),
        (
            ["prove", "--machine", "x"],
            "unknown machine 'x' (known: claims, pool, ",
        ),
        (
            ["gate", "--budget", "-1"],
            "Invalid value for '--budget': -1.0 is not in the range x>0.",
        ),
        (
            ["gate", "--engine", "foo"],
            "unknown engine 'foo' (known: reference, sglang, vllm, vllm-engine)",
        ),
        (["replay"], "Missing argument 'FILE'."),
        (["replay", "nowhere.json"], "nowhere.json: No such file or directory"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = failing(arguments, capsys)
    assert line == message or (message.endswith((", ", "pool, ")) and line.startswith(message))


def test_a_broken_program_file_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "p.toml"
    path.write_text("id = ")
    assert failing(["litmus", str(path)], capsys).startswith("p.toml: not TOML: Invalid value")


def test_a_truncated_trace_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "t.jsonl"
    assert run(["litmus", "L3", "--trace", str(trace)], io.StringIO()) == 0
    text = trace.read_text()
    trace.write_text(text[:-9])
    line = failing(["audit", str(trace)], capsys)
    assert line.startswith("t.jsonl: line 75: not JSON: ")
    assert line.endswith("; the last line is cut short")


def test_a_trace_that_cannot_be_written_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    line = failing(["litmus", "L1", "--trace", "nowhere/t.jsonl"], capsys)
    assert line == "cannot write nowhere/t.jsonl: No such file or directory"


def test_a_missing_engine_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(name: str) -> Any:
        raise EngineMissing(f"engine {name} is not installed; install: pip install {name}")

    monkeypatch.setattr(engines, "ready", missing)
    line = failing(["litmus", "--engine", "vllm"], capsys)
    assert line == "engine vllm is not installed; install: pip install vllm"


@pytest.mark.parametrize(
    ("arguments", "fields"),
    [
        (["litmus", "L1", "L7"], {"engine", "programs", "violations", "not_exposed"}),
        (["explore", "claims"], {"states", "transitions", "depth", "engine"}),
        (["prove", "--machine", "blockclaims"], {"obligations"}),
        (["doctor"], {"findings"}),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_json_is_one_object(arguments: list[str], fields: set[str]) -> None:
    out = io.StringIO()
    assert run([*arguments, "--json"], out) == 0
    told = json.loads(out.getvalue())
    assert {"verdict", "exit", "seconds"} | fields <= set(told)
    assert told["exit"] == 0


def test_a_violated_trace_ends_with_exit_code_1(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    run(["litmus", "L3", "--trace", str(trace)], io.StringIO())
    trace.write_text(
        trace.read_text().replace('"blocking_claim_ids":["keep"]', '"blocking_claim_ids":["other"]')
    )
    out = io.StringIO()
    assert run(["audit", str(trace), "--json"], out) == 1
    told = json.loads(out.getvalue())
    assert told["verdict"] == "VIOLATED"
    # The blame is wrong (F4), and not what the trace itself adds up to (T2).
    assert {violation["rule"] for violation in told["violations"]} == {"F4", "T2"}


def shell(arguments: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvclaims.checker.cli", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
    )


def test_stdout_holds_the_object_alone() -> None:
    ended = shell(["litmus", "L1", "--json"])
    assert ended.returncode == 0
    assert json.loads(ended.stdout)["verdict"] == "HOLDS"


def fake_engine(folder: Path, files: Mapping[str, str]) -> Path:
    package = folder / "vllm"
    package.mkdir()
    for name, text in files.items():
        (package / name).write_text(text)
    return folder


def test_the_engine_is_taken_from_the_path(tmp_path: Path) -> None:
    """An empty package in vLLM's place: found there, and useless, which is said in one line."""
    folder = fake_engine(tmp_path, {"__init__.py": "", "_version.py": "__version__ = '0.99'\n"})
    ended = shell(
        ["litmus", "L1", "--engine", "vllm", "--engine-path", str(folder), "--json"],
        PYTHONNOUSERSITE="1",
    )
    assert ended.returncode == 2, ended.stderr
    assert json.loads(ended.stdout)["verdict"] == "ERROR"
    assert "Traceback" not in ended.stderr


def test_doctor_sees_the_engine_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(engines.PATH_VARIABLE, str(tmp_path / "elsewhere"))
    ended = shell(["doctor", "--json"])
    found = {finding["name"]: finding for finding in json.loads(ended.stdout)["findings"]}
    assert found["engine reference"]["found"]
    assert not found["engine vllm"]["found"]


def test_help_needs_no_engine() -> None:
    ended = shell(["--help"])
    assert ended.returncode == 0
    for command in ("prove", "explore", "conform", "litmus", "fuzz", "replay", "audit", "gate"):
        assert f"  {command} " in ended.stdout
