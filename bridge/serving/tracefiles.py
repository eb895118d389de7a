"""The trace on disk: one file that is put aside when it is full, and only the youngest kept."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Final

from kvclaims.spec.telemetry import Event

_LONGEST_WAIT: Final = 1.0
"""Seconds after which what was written reaches the file."""


class TraceFiles:
    """A sink for a `Recorder`.  `trace.jsonl` is current; when it has `most_bytes` it becomes
    `trace-000000012345.jsonl`, after the sequence number of its first event, so that the names
    sort as the events do.  Of those, the `keep` youngest stay (0 for all).

    A trace whose oldest file was deleted no longer begins at its beginning: it can be read, and
    an audit says so (T3).
    """

    def __init__(
        self,
        path: Path,
        most_bytes: int,
        keep: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = path
        self._most, self._keep, self._clock = most_bytes, keep, clock
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():  # of an earlier run: its events must not run into those of this one
            path.replace(path.with_name(f"{path.stem}-before-{path.stat().st_mtime_ns}.jsonl"))
        self._file: IO[str] = path.open("w", encoding="utf-8")
        self._size = 0
        self._first = 0
        self._flushed = clock()

    def write(self, event: Event) -> None:
        line = event.to_json() + "\n"
        if self._size == 0:
            self._first = event.seq
        self._size += len(line.encode())
        self._file.write(line)
        if self._size >= self._most:
            self._put_aside()
        elif self._clock() - self._flushed >= _LONGEST_WAIT:
            self.flush()

    def flush(self) -> None:
        self._file.flush()
        self._flushed = self._clock()

    def close(self) -> None:
        self._file.close()

    def _put_aside(self) -> None:
        self._file.close()
        self.path.replace(self.path.with_name(f"{self.path.stem}-{self._first:012}.jsonl"))
        if self._keep:
            for old in _full(self.path)[: -self._keep]:
                old.unlink()
        self._file = self.path.open("w", encoding="utf-8")
        self._size = 0


def in_order(path: Path) -> list[Path]:
    """The files of the trace whose current file is `path`, in the order of their events."""
    return [*_full(path), path]


def _full(path: Path) -> list[Path]:
    return sorted(path.parent.glob(f"{path.stem}-[0-9]*.jsonl"))
