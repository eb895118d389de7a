"""The trace on disk: one file that is put aside when it is full, and only the youngest kept."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import time
from collections import deque
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

from kvclaims.bridge.serving.settings import BadSettings

_LOG: Final = logging.getLogger("kvclaims.trace")

_MOST_AT_ONCE: Final = 1 << 20
"""Bytes that are written at a time."""


class Line(NamedTuple):
    """An event as the file has it, with its sequence number."""

    seq: int
    text: bytes


class TraceFiles:
    """`trace.jsonl` is current; when it has `most_bytes` it becomes `trace-000000012345.jsonl`,
    after the sequence number of its first event, so that the names sort as the events do.  Of
    those, the `keep` youngest stay (0 for all).

    A trace whose oldest file was deleted no longer begins at its beginning: it can be read, and
    an audit says so (T3).  A path has one writer at a time.
    """

    def __init__(self, path: Path, most_bytes: int, keep: int) -> None:
        self.path = path
        self.events = 0
        """How many are in files by now."""
        self.bytes = 0
        self._most, self._keep = most_bytes, keep
        self._size = 0
        """Bytes of the current file that are whole lines."""
        self._first = 0
        try:
            _make_way(path)
            self._file = self._open()
        except BlockingIOError:
            raise BadSettings(f"the trace {path} is written by another engine") from None

    def write(self, lines: deque[Line]) -> None:
        """Take these lines from the front as they get into files.

        Raises `OSError` where one cannot be written: it and those behind it are still there, and
        the file ends with the line before.
        """
        while lines:
            if self._size >= self._most:
                self._put_aside()
            if self._file < 0:
                self._file = self._open()
            if self._size == 0:
                self._first = lines[0].seq
            self._append(lines, self._fitting(lines))

    def close(self) -> None:
        """Idempotent."""
        if self._file >= 0:
            file, self._file = self._file, -1
            os.close(file)

    def _fitting(self, lines: deque[Line]) -> int:
        """How many of them fill the file, or are enough at a time."""
        room = min(self._most - self._size, _MOST_AT_ONCE)
        for n, line in enumerate(lines, 1):
            room -= len(line.text)
            if room <= 0:
                return n
        return len(lines)

    def _append(self, lines: deque[Line], count: int) -> None:
        rest = memoryview(b"".join(line.text for line in islice(lines, count)))
        size = self._size + len(rest)
        try:
            while rest:
                rest = rest[os.pwrite(self._file, rest, size - len(rest)) :]
        except OSError:
            os.ftruncate(self._file, self._size)  # no half line; if it stays, it is written over
            raise
        self.bytes += size - self._size
        self.events += count
        self._size = size
        for _ in range(count):
            lines.popleft()

    def _put_aside(self) -> None:
        self.close()
        try:
            self.path.replace(self.path.with_name(f"{self.path.stem}-{self._first:012}.jsonl"))
        except FileNotFoundError:
            _LOG.warning("somebody took %s away, with the events in it", self.path)
        self._size = 0
        if self._keep:
            for old in _full(self.path)[: -self._keep]:
                old.unlink(missing_ok=True)

    def _open(self) -> int:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            _lock(file)
            os.ftruncate(file, 0)
        except OSError:
            os.close(file)
            raise
        return file


def _make_way(path: Path) -> None:
    """The files of an earlier run go into a folder `trace-before-…`, under the names that they
    have: its events must not run into those of this one, nor its files be taken for this one's."""
    if path.exists() and not path.is_file():
        raise BadSettings(f"trace is the path of a file, and {path} is something else")
    earlier = [file for file in in_order(path) if file.exists()]
    if not earlier:
        return
    file = os.open(earlier[-1], os.O_RDONLY | os.O_CLOEXEC)
    try:
        _lock(file)
        folder = path.with_name(f"{path.stem}-before-{time.time_ns()}")
        folder.mkdir()
        for one in earlier:
            one.replace(folder / one.name)
    finally:
        os.close(file)


def _lock(file: int) -> None:
    """Raises `BlockingIOError` while another writer has the file."""
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def in_order(path: Path) -> list[Path]:
    """The files of the trace whose current file is `path`, in the order of their events."""
    return [*_full(path), path]


def _full(path: Path) -> list[Path]:
    """Those put aside, and none of another trace whose name begins like this one's."""
    put_aside = re.compile(rf"{re.escape(path.stem)}-\d{{12,}}\.jsonl")
    folder = path.parent
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted(file for file in found if put_aside.fullmatch(file.name))
