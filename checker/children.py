"""Processes that this one starts and has to end: none outlives it, also where it is told to stop.

Each child leads a process group of its own, with whatever it starts.  `stopping` stands around
the time in which there are any: a SIGTERM or Ctrl-C ends every group, politely first, and then
goes on as it would have.  What is killed outright (SIGKILL) cannot do that.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Final, TextIO

GRACE_S: Final = 5.0
"""Seconds that a group has to end by itself before it is killed."""

TERMINATED: Final = 128 + signal.SIGTERM
"""Exit code after a SIGTERM, as a shell tells it."""

_alive: Final[set[subprocess.Popen[str]]] = set()
_lock: Final = threading.Lock()
_over: Final = threading.Event()
"""No child is started any more."""


class Stopped(Exception):
    """No child is started any more: the process is ending."""


def run(
    command: Sequence[str],
    *,
    timeout: float | None = None,
    environment: Mapping[str, str] | None = None,
    out: TextIO | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, with its output as text; `out` takes standard output instead, and
    standard error is then this process's own.

    Raises `subprocess.TimeoutExpired` after `timeout` seconds, when nothing of it runs any more.
    """
    with _lock:
        if _over.is_set():
            raise Stopped(command[0])
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if out is None else out,
            stderr=subprocess.PIPE if out is None else None,
            text=True,
            env=environment,
            start_new_session=True,
        )
        _alive.add(child)
    try:
        stdout, stderr = child.communicate(timeout=timeout)
    except BaseException:
        _end([child])
        raise
    finally:
        _tell(child, signal.SIGKILL)  # what its leader left behind in the group
        with _lock:
            _alive.discard(child)
    return subprocess.CompletedProcess(command, child.returncode, stdout, stderr)


def end_all() -> None:
    """End every child, and start none until whoever stands in `stopping` has left."""
    with _lock:
        _over.set()
        left = list(_alive)
    _end(left)


@contextmanager
def stopping() -> Iterator[None]:
    """What is told to stop in here ends its children first (signals reach the main thread alone).

    Threads that wait for children are waited for by whoever started them, after `end_all`.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _terminated)
    try:
        yield
    except BaseException:
        end_all()
        raise
    finally:
        _over.clear()
        signal.signal(signal.SIGTERM, before)


def _terminated(_number: int, _frame: FrameType | None) -> None:
    raise SystemExit(TERMINATED)


def _end(children: Sequence[subprocess.Popen[str]]) -> None:
    """Ask the leaders to end, and kill what is left of their groups."""
    for child in children:
        _tell(child, signal.SIGTERM)
    until = time.monotonic() + GRACE_S
    for child in children:
        with suppress(subprocess.TimeoutExpired):
            child.wait(max(0.0, until - time.monotonic()))
        _tell(child, signal.SIGKILL)
        child.wait()


def _tell(child: subprocess.Popen[str], number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(child.pid, number)
