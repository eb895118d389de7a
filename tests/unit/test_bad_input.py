"""Input that is out of all measure gets one line and exit 2, as any other wrong input."""

from __future__ import annotations

import io
import os
import socket
import threading
from pathlib import Path

import pytest

from kvclaims.checker.cli import run


def fails(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line; nothing was printed as a result, and no raw error of the system is in it."""
    out = io.StringIO()
    assert run(arguments, out) == 2
    assert out.getvalue() == ""
    (line,) = capsys.readouterr().err.splitlines()
    assert "Errno" not in line
    assert "codec" not in line
    return line


@pytest.mark.parametrize("value", ["inf", "nan"])
def test_seconds_are_finite(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "not a finite number" in fails(["prove", "--timeout", value], capsys)
    assert "not a finite number" in fails(
        ["fuzz", "--engine", "reference", "--seconds", value], capsys
    )
    said = fails(["audit", "tcp://127.0.0.1:1", "--seconds", value], capsys)
    assert "not a finite number" in said or "not in the range" in said


@pytest.mark.parametrize("text", ["[" * 100_000, "9" * 5_000])
def test_json_that_nobody_can_read(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "odd"
    file.write_text(text + "\n")
    assert "JSON" in fails(["audit", str(file)], capsys)
    assert "JSON" in fails(["replay", str(file)], capsys)


def test_a_pool_beyond_measure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from kvclaims.spec import operations

    source = Path(operations.__file__).with_name("programs") / "L1.toml"
    file = tmp_path / "huge.toml"
    file.write_text(source.read_text().replace("usable = 80", "usable = 99999999999"))
    assert "more than 1,000,000 blocks" in fails(["litmus", str(file)], capsys)


@pytest.mark.parametrize(
    ("machine", "setting", "said"),
    [
        ("pool", "blocks=15", "pool: 5,985,765 parts to unroll, 4,000,000 are the most"),
        ("pool", "blocks=2000", "pool: 4,666,594,834,185 parts to unroll"),
        ("pool", "blocks=99999999", "pool: blocks 99,999,999 is too large: 1,000,000 is the most"),
        ("arbitration", "covers=1,99999999", "arbitration: covers 99,999,999 is too large"),
    ],
)
def test_an_instance_beyond_measure_is_refused_before_it_is_built(
    machine: str,
    setting: str,
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def built(*_: object) -> None:
        raise AssertionError("it was built")

    monkeypatch.setattr("kvclaims.checker.grounded.initial_states", built)
    monkeypatch.setattr("kvclaims.checker.explore.compile_instance", built)
    for engine in ("native", "python", "symbolic"):
        assert said in fails(["explore", machine, "--set", setting, "--by", engine], capsys)


# --- files that are none -----------------------------------------------------------------

JUNK = b"\xff\xfe\x00junk"

READS = [
    ["audit"],
    ["elastic", "plan", "--model"],
    ["explore", "claims", "--resume"],
    ["fuzz", "--engine", "reference", "--steps", "5", "--baseline"],
    ["gate", "--engine", "reference", "--engine-only", "--budget", "1", "--baseline"],
    ["litmus"],
    ["lower"],
    ["replay"],
    ["report"],
    ["watch", "--once"],
]
"""Every command that reads a file, with what comes before the file's name."""


def names(command: list[str]) -> str:
    return " ".join(command)


@pytest.mark.parametrize("command", READS, ids=names)
@pytest.mark.parametrize("kind", ["missing", "junk", "folder", "pipe"])
def test_what_cannot_be_read_is_one_line_with_its_name(
    command: list[str],
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / f"odd-{kind}.toml"
    if kind == "junk":
        file.write_bytes(JUNK)
    elif kind == "folder":
        file.mkdir()
    elif kind == "pipe":
        os.mkfifo(file)  # nobody will ever write to it
    assert file.stem in fails([*command, str(file)], capsys)
    assert [path for path in tmp_path.rglob("*") if path != file] == []  # nothing is left behind


def test_no_file_is_said_to_be_safe_to_unpickle(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "odd.npz"
    file.write_bytes(JUNK)
    line = fails(["explore", "claims", "--resume", str(file)], capsys)
    assert line == f"kvclaims: {file} is no checkpoint of a search"
    line = fails(["explore", "claims", "--resume", str(tmp_path / "none.npz")], capsys)
    assert line == f"kvclaims: {tmp_path / 'none.npz'}: no such checkpoint"


# --- places where nothing can be written -------------------------------------------------

WRITES = [
    (["explore", "claims", "--by", "native", "--checkpoint"], False),
    (["litmus", "L1", "--trace"], False),
    (["litmus", "L1", "--report"], True),
    (["mutate", "--output"], False),
    (["mutate", "--resume"], True),
    (["report", "trace.jsonl", "--output"], True),
    (["audit", "trace.jsonl", "--report"], True),
    (["fuzz", "--engine", "reference", "--steps", "5", "--report"], True),
    (["fuzz", "--engine", "reference", "--steps", "5", "--output"], True),
    (["fuzz", "--engine", "reference", "--steps", "5", "--examples"], True),
    (["faults", "--output"], True),
    (["gate", "--engine", "reference", "--engine-only", "--budget", "1", "--output"], True),
]
"""Every option that names something to write; whether folders on the way are made."""


@pytest.mark.parametrize(("command", "makes_folders"), WRITES, ids=str)
def test_what_cannot_be_written_is_said_before_the_work_begins(
    command: list[str],
    makes_folders: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A file stands where a folder should; or, where none is made, a folder is missing."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "file"
    file.write_text("as it was")

    def worked(*_: object, **__: object) -> None:
        pytest.fail("the work was begun")

    from kvclaims.checker import audit, faults, fuzz, gate, litmus, mutate, native, report

    for module, name in (
        (audit, "audit"),
        (faults, "run_faults"),
        (fuzz, "fuzz"),
        (gate, "gate"),
        (litmus, "litmus"),
        (mutate, "mutate"),
        (native, "explore_native"),
        (report, "report"),
    ):
        monkeypatch.setattr(module, name, worked)
    assert "cannot write file/x" in fails([*command, "file/x"], capsys)
    if not makes_folders:
        assert "cannot write nowhere/x" in fails([*command, "nowhere/x"], capsys)
    assert file.read_text() == "as it was"
    assert list(tmp_path.iterdir()) == [file]


def test_a_folder_that_cannot_be_made_for_examples(capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody may make one in /proc, whatever its bits say."""
    arguments = ["fuzz", "--engine", "reference", "--steps", "5", "--examples", "/proc/nope"]
    assert (
        fails(arguments, capsys) == "kvclaims: cannot write /proc/nope: No such file or directory"
    )


# --- addresses that are none --------------------------------------------------------------


@pytest.mark.parametrize("address", ["https://[bad", "http://", "http://127.0.0.1:1/metrics"])
def test_an_address_that_leads_nowhere(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"{address}: cannot be read: " in fails(["watch", address, "--once"], capsys)


def test_a_server_that_speaks_something_else(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with server.accept()[0] as asked:
                asked.recv(1000)
                asked.sendall(b"no http\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        address = f"http://127.0.0.1:{server.getsockname()[1]}/metrics"
        assert f"{address}: cannot be read: " in fails(["watch", address, "--once"], capsys)
        thread.join()


def test_a_trace_in_which_nothing_stands_shows_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    out = io.StringIO()
    assert run(["watch", str(tmp_path / "empty.jsonl"), "--once"], out) == 3
    assert out.getvalue().endswith("VACUOUS\n")


def test_a_rule_of_another_machine(capsys: pytest.CaptureFixture[str]) -> None:
    line = fails(["prove", "--rule", "P1", "--machine", "claims", "--no-cache"], capsys)
    who = "pool, groups, runtime, runtime-refines-pool do"
    assert line == f"kvclaims: machine claims does not state rule P1 ({who})"


def test_an_instance_that_can_stop_is_not_said_to_hold() -> None:
    """No rule is broken in a pool of no blocks, and nothing moves there: that is not HOLDS."""
    out = io.StringIO()
    assert run(["explore", "blockclaims", "--set", "pool=0", "--by", "python"], out) == 1
    assert out.getvalue().splitlines()[-1] == "VIOLATED"
