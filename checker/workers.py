"""Processes that share the work of one: none outlives the process that started it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Final

LOOK_S: Final = 1.0
"""Seconds between two looks at whether the starter is still there."""


@contextmanager
def processes(jobs: int, *, fresh: bool = True) -> Iterator[ProcessPoolExecutor]:
    """A pool of `jobs` processes; leaving it drops what was not begun and waits for the rest.

    `fresh` processes import everything anew, others are copies of this one as it is now.  Ctrl-C
    ends a worker without a word, and the end of this process, however it ends, within a second.
    """
    context = multiprocessing.get_context("spawn" if fresh else "fork")
    pool = ProcessPoolExecutor(jobs, context, _begin, (os.getpid(),))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(starter: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=_follow, args=(starter,), daemon=True).start()


def _follow(starter: int) -> None:
    while os.getppid() == starter:
        time.sleep(LOOK_S)
    os._exit(1)
