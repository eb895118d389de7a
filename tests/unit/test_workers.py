"""Processes that share work end with the one that started them, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from kvclaims.checker.workers import processes

STARTER = """
import os, time
from kvclaims.checker.workers import processes

def where(seconds):
    time.sleep(seconds)
    return os.getpid()

if __name__ == "__main__":
    with processes(2, fresh=False) as pool:
        found = {pool.submit(where, 0.2).result() for _ in range(2)}
        print(*found, flush=True)
        pool.submit(where, 600).result()
"""


def runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    return stat.rpartition(")")[2].split()[0] != "Z"


def wait_until(holds: Callable[[], bool], seconds: float = 20.0) -> bool:
    until = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks into /proc for what still runs")
def test_workers_end_when_their_starter_is_killed() -> None:
    starter = subprocess.Popen([sys.executable, "-c", STARTER], stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    pids = [int(pid) for pid in starter.stdout.readline().split()]
    assert pids
    assert all(map(runs, pids))
    starter.send_signal(signal.SIGKILL)
    starter.wait()
    assert wait_until(lambda: not any(map(runs, pids)))


def test_what_was_not_begun_is_dropped_when_the_work_is_left() -> None:
    with suppress(KeyError), processes(1) as pool:
        futures = [pool.submit(time.sleep, 0.01) for _ in range(400)]
        raise KeyError
    assert any(future.cancelled() for future in futures)
