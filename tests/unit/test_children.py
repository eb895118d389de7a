"""No process outlives the command that started it, also where that is told to stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvclaims.checker import children

MARK = "KVCLAIMS_TEST_FAMILY"
"""Set in the environment of every process of a family, so that it can be found."""

FAMILY = """
import subprocess, sys, threading
from kvclaims.checker import children
parent = [sys.executable, "-c", '''
import subprocess, sys
subprocess.run([sys.executable, "-c", "import time; time.sleep(60)"])
''']
with children.stopping():
    children.run(parent)
"""

STUBBORN = FAMILY.replace("import time;", "import signal, time; signal.signal(15, signal.SIG_IGN);")

GATE = ["-m", "kvclaims.checker.cli", "gate", "--engine", "reference", "--budget", "30"]


def family(name: str) -> set[int]:
    """The processes with this mark that run (one that waits to be noticed runs no more)."""
    found = set()
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            marked = f"{MARK}={name}".encode() in (folder / "environ").read_bytes().split(b"\0")
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            continue
        if marked and state != "Z":
            found.add(int(folder.name))
    return found


@pytest.fixture
def name() -> Iterator[str]:
    """A mark; whatever bears it at the end is killed, so that a failure leaves nothing either."""
    mark = uuid.uuid4().hex
    yield mark
    for process in family(mark):
        os.kill(process, signal.SIGKILL)


def listens() -> None:
    """A process in the background of a shell would be deaf to Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def started(name: str, command: list[str], least: int, folder: Path) -> subprocess.Popen[bytes]:
    """A family that has grown to so many processes."""
    head = subprocess.Popen(
        [sys.executable, *command],
        env={**os.environ, MARK: name},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=folder,
        preexec_fn=listens,  # noqa: PLW1509  (no threads here)
    )
    until = time.monotonic() + 60
    while len(family(name)) < least and time.monotonic() < until:
        assert head.poll() is None, "it ended before it was told to"
        time.sleep(0.05)
    assert len(family(name)) >= least
    return head


def gone(name: str) -> bool:
    until = time.monotonic() + 30
    while family(name) and time.monotonic() < until:
        time.sleep(0.05)
    return not family(name)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 1)])
def test_who_is_told_to_stop_leaves_no_child_and_no_grandchild(
    name: str, number: signal.Signals, code: int, tmp_path: Path
) -> None:
    head = started(name, ["-c", FAMILY], 3, tmp_path)
    head.send_signal(number)
    assert head.wait(20) in (code, -number)  # Python ends by the signal after Ctrl-C
    assert gone(name)


def test_a_grandchild_that_does_not_listen_is_killed(name: str, tmp_path: Path) -> None:
    head = started(name, ["-c", STUBBORN], 3, tmp_path)
    time.sleep(0.5)  # until it does not listen
    head.send_signal(signal.SIGTERM)
    assert head.wait(20) == 143
    assert gone(name)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_gate_that_is_told_to_stop_leaves_nothing_behind(
    name: str, number: signal.Signals, code: int, tmp_path: Path
) -> None:
    head = started(name, [*GATE, "--output", str(tmp_path / "gate")], 3, tmp_path)
    head.send_signal(number)
    assert head.wait(30) == code
    assert gone(name)


def test_what_a_child_leaves_behind_ends_with_it(name: str) -> None:
    leaves = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'input()'], stdin=-1)"
    ended = children.run(
        [sys.executable, "-c", leaves + "; print('done')"], environment={**os.environ, MARK: name}
    )
    assert (ended.returncode, ended.stdout) == (0, "done\n")
    assert gone(name)


def test_a_child_that_takes_too_long_is_ended_with_its_own(name: str) -> None:
    long = "import time; time.sleep(60)"
    sleeps = f"import subprocess, sys; subprocess.run([sys.executable, '-c', '{long}'])"
    with pytest.raises(subprocess.TimeoutExpired):
        children.run(
            [sys.executable, "-c", sleeps], timeout=1.5, environment={**os.environ, MARK: name}
        )
    assert gone(name)


def test_nobody_is_born_while_all_are_ended() -> None:
    with children.stopping():
        children.end_all()
        with pytest.raises(children.Stopped):
            children.run(["true"])
    assert children.run(["true"]).returncode == 0
