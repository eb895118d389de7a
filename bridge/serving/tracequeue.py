"""The trace off the engine's step: events wait in memory until a thread has written them.

A step makes a line of each event and goes on, however slow the disk is, or full.  What cannot be
written is tried again, so a disk that was full for a while costs no event.  Where too much waits,
events are lost, and that is told: in the log, in `/metrics`, and by the gap that an audit finds in
the sequence numbers (T3).
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections import deque
from typing import Final

from kvclaims.bridge.serving.tracefiles import Line, TraceFiles
from kvclaims.spec.telemetry import Event

_LOG: Final = logging.getLogger("kvclaims.trace")

MOST_WAITING: Final = 64 << 20
"""Bytes of events that wait in memory, at most."""

_ENOUGH: Final = 64 << 10
"""Bytes at which the thread is woken; a flush, and the time, wake it too."""

_LONGEST_WAIT: Final = 1.0
"""Seconds after which what was told reaches the file, and a failure is tried again."""

_PATIENCE: Final = 10.0
"""Seconds that the end of an engine waits for its trace."""


class TraceQueue:
    """A sink for a `Recorder`.  Without a thread, what waits is written when `work` is called."""

    def __init__(
        self, files: TraceFiles, most_waiting: int = MOST_WAITING, threaded: bool = True
    ) -> None:
        self.lost = 0
        """Events that are in no file, and never will be."""
        self._files = files
        self._most = most_waiting
        self._heard = 0
        self._heard_bytes = 0
        self._new: deque[Line] = deque()
        self._under_way: deque[Line] = deque()
        """What only the writing thread touches."""
        self._failing = ""
        self._hurry = False
        self._closed = False
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        if threaded:
            self._thread = threading.Thread(target=self._run, name="kvclaims-trace", daemon=True)
            self._thread.start()
        atexit.register(self.close)  # before daemons are stopped where they stand

    @property
    def waiting(self) -> int:
        """Events that are in no file yet."""
        return self._heard - self._files.events

    # -- in the engine's thread ------------------------------------------------------------------

    def hear(self, event: Event) -> None:
        """Have the event written, soon."""
        line = Line(event.seq, event.to_json().encode() + b"\n")
        with self._changed:
            waiting = self._heard_bytes - self._files.bytes + len(line.text)
            if waiting > self._most:
                self._lose()
                return
            self._new.append(line)
            self._heard += 1
            self._heard_bytes += len(line.text)
            if waiting >= _ENOUGH and not (self._failing or self._hurry):
                self._hurry = True
                self._changed.notify_all()

    def flush(self, wait: float = 0.0) -> bool:
        """Have everything written now; whether it is, after so many seconds at most."""
        with self._changed:
            self._hurry = True
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not self.waiting, wait)

    def close(self) -> None:
        """Write what can be written, and say what could not; idempotent."""
        if os.getpid() != self._process:
            return  # a copy in a child that was forked: the trace is its parent's
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        atexit.unregister(self.close)
        if self._thread is None:
            self.work()
        else:
            self._thread.join(_PATIENCE)
        if self._thread is None or not self._thread.is_alive():
            self._files.close()
        if missing := self.lost + self.waiting:
            why = f": {self._failing}" if self._failing else ""
            _LOG.error("%d events are missing in %s%s", missing, self._files.path, why)

    def _lose(self) -> None:
        if not self.lost:
            told = "%s is not written fast enough: events are lost from here on (%s)"
            _LOG.error(told, self._files.path, self._failing or "the disk is slow")
        self.lost += 1

    # -- in the other ----------------------------------------------------------------------------

    def work(self) -> None:
        """Try to write all that waits."""
        with self._changed:
            self._under_way.extend(self._new)
            self._new.clear()
            self._hurry = False
        reason = ""
        try:
            self._files.write(self._under_way)
        except OSError as error:
            reason = error.strerror or str(error)
        with self._changed:
            self._tell(reason)
            self._failing = reason
            self._changed.notify_all()

    def _tell(self, reason: str) -> None:
        """Once for each reason, and once when it is over."""
        if reason and reason != self._failing:
            told = "%s cannot be written: %s; %d events wait, and it is tried again"
            _LOG.warning(told, self._files.path, reason, self.waiting)
        elif self._failing and not reason:
            _LOG.warning("%s is written again; %d events were lost", self._files.path, self.lost)

    def _run(self) -> None:
        closed = False
        while not closed:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._hurry, _LONGEST_WAIT)
                closed = self._closed
            self.work()
