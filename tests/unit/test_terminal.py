"""What a terminal sees beside results: who runs, Ctrl-C in odd places, a reader that has gone."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvclaims.checker import cli
from kvclaims.checker.gate import Board
from kvclaims.checker.verdicts import Progress
from kvclaims.reference.engine import ENGINE
from kvclaims.spec.interface import PoolConfig


def test_the_board_says_what_is_done_and_what_runs() -> None:
    told: list[str] = []
    board = Board(told.append)
    board.begin("prove")
    board.begin("litmus vllm")
    board.end("prove", "PROVED")
    board.end("litmus vllm", "not run")
    assert told == [
        "0 checks done in 0 s, running: prove (0 s)",
        "0 checks done in 0 s, running: prove (0 s), litmus vllm (0 s)",
        "prove PROVED in 0 s; 1 check done in 0 s, running: litmus vllm (0 s)",
        "litmus vllm not run in 0 s; 2 checks done in 0 s, running: none",
    ]


def test_ctrl_c_inside_a_destructor_is_said_again(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[int] = []
    shown: list[Any] = []
    monkeypatch.setattr(signal, "raise_signal", raised.append)
    monkeypatch.setattr(sys, "__unraisablehook__", shown.append)
    cli._unraisable(SimpleNamespace(exc_type=KeyboardInterrupt))  # type: ignore[arg-type]
    assert (raised, shown) == ([signal.SIGINT], [])
    other = SimpleNamespace(exc_type=ValueError)
    cli._unraisable(other)  # type: ignore[arg-type]
    assert (raised, shown) == ([signal.SIGINT], [other])


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["written at the end", "written at once"])
@pytest.mark.parametrize("how", [["watch", "--once"], ["audit"], ["audit", "--json"]], ids=" ".join)
def test_a_reader_that_has_gone_is_no_traceback(
    how: list[str], unbuffered: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    runtime = ENGINE.open(PoolConfig(8), "run")
    runtime.close()
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(event.to_json() + "\n" for event in runtime.events()))
    command = [sys.executable, "-m", "kvclaims.checker.cli", *how, str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as started:
        assert started.stdout is not None
        assert started.stderr is not None
        started.stdout.close()
        said = started.stderr.read()
    assert (started.returncode, said) == (cli.BROKEN_PIPE, b"")


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.parquet"])
def test_a_trace_that_cannot_be_written_is_one_line(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "nowhere" / name
    assert cli.run(["litmus", "L1", "--trace", str(target)], io.StringIO()) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"kvclaims: cannot write {target}: ")
    assert error.count("\n") == 1


def test_the_line_of_progress_says_what_and_for_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(cli.time, "monotonic", lambda: now)
    line = cli._Doing()
    line.tell("folding a.jsonl (1 of 2)")
    now += 71.4
    assert line.__rich__().plain == "folding a.jsonl (1 of 2)  71 s"


TELLS = [
    (["audit", "trace.jsonl", "trace.jsonl"], "folding trace.jsonl (2 of 2)"),
    (["report", "trace.jsonl"], "folding trace.jsonl"),
    (["explore", "claims"], "claims"),
    (["litmus", "L1"], "L1 on reference"),
    (["fuzz", "--engine", "reference", "--steps", "600"], "fuzzing reference: 500 operations"),
    (["prove", "--machine", "blockclaims", "--no-cache"], "blockclaims"),
    (["elastic", "plan"], "estimating"),
    (["doctor"], "looking around"),
]


@pytest.mark.parametrize(("arguments", "text"), TELLS, ids=lambda v: v[0] if v[1:] else None)
def test_every_command_says_what_it_does_while_it_does_it(
    arguments: list[str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    runtime = ENGINE.open(PoolConfig(8), "run")
    runtime.close()
    lines = "".join(event.to_json() + "\n" for event in runtime.events())
    (tmp_path / "trace.jsonl").write_text(lines)
    told: list[str] = []

    @contextmanager
    def kept() -> Iterator[Progress]:
        yield told.append

    monkeypatch.setattr(cli, "_progress", kept)
    assert cli.run(arguments, io.StringIO()) == 0
    assert any(text in one for one in told), told
