"""The trace off the engine's step: full, slow and strange disks, and what is told of them."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvclaims.bridge.serving.settings import BadSettings
from kvclaims.bridge.serving.tracefiles import TraceFiles, in_order
from kvclaims.bridge.serving.tracequeue import TraceQueue
from kvclaims.checker.audit import read_trace
from kvclaims.spec.telemetry import Recorder, TraceError, parse_event


class Disk:
    """The disk under `os.pwrite`: full from `room` bytes on, and as slow as `gate` is shut."""

    def __init__(self, room: int | None = None) -> None:
        self.room = room
        self.gate = threading.Event()
        self.gate.set()
        self._write = os.pwrite

    def pwrite(self, file: int, text: Any, place: int) -> int:
        self.gate.wait(30)
        if self.room is None:
            return self._write(file, text, place)
        fits = min(self.room, len(text))
        if not fits:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.room -= fits
        return self._write(file, text[:fits], place)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk()
    monkeypatch.setattr(os, "pwrite", disk.pwrite)
    return disk


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "t.jsonl"


def queued(path: Path, threaded: bool = False, most_waiting: int = 1 << 20) -> TraceQueue:
    return TraceQueue(TraceFiles(path, 4096, keep=0), most_waiting, threaded)


def run(queue: TraceQueue) -> Recorder:
    clock = iter(range(10**6))
    told = Recorder("r", "p", 8, lambda: next(clock), sink=queue.hear, keep=1)
    told.emit("trace_opened", engine="e", block_size=4, defer_limit=1)
    return told


def some(told: Recorder, events: int) -> None:
    for _ in range(events):
        told.emit("pool_reset", succeeded=True)


def end(told: Recorder, queue: TraceQueue) -> None:
    told.emit("trace_closed", events=told.count)
    queue.close()


def seqs(path: Path) -> list[int]:
    return [parse_event(line).seq for file in in_order(path) for line in file.open()]


def whole(path: Path) -> Path:
    text = "".join(file.read_text() for file in in_order(path))
    joined = path.with_name("whole")
    joined.write_text(text)
    return joined


@pytest.mark.parametrize("room", [0, 1, 250, 5000])
def test_a_disk_that_was_full_for_a_while_costs_no_event(
    path: Path, disk: Disk, room: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The file never ends in half a line, wherever the disk was full."""
    queue = queued(path)
    told = run(queue)
    disk.room = room
    some(told, 60)
    queue.work()
    assert queue.waiting > 0
    assert seqs(path) == list(range(61 - queue.waiting))
    disk.room = None
    queue.work()
    assert (queue.waiting, queue.lost) == (0, 0)
    end(told, queue)
    (events,) = read_trace(whole(path))
    assert len(events) == 62
    assert "cannot be written: No space left on device" in caplog.text
    assert "is written again; 0 events were lost" in caplog.text


def test_what_is_lost_is_told(path: Path, disk: Disk, caplog: pytest.LogCaptureFixture) -> None:
    """In the log as it begins and at the end, by the queue, and by the gap that an audit finds."""
    queue = queued(path, most_waiting=2000)
    told = run(queue)
    disk.room = 0
    some(told, 1)
    queue.work()
    some(told, 59)
    assert queue.waiting + queue.lost == 61
    assert queue.lost > 40
    lost = queue.lost
    disk.room = None
    queue.work()
    end(told, queue)
    assert caplog.text.count("events are lost from here on (No space left on device)") == 1
    assert f"{lost} events are missing in {path}" in caplog.text
    with pytest.raises(TraceError, match="seq 61 follows 9: events are missing"):
        read_trace(whole(path))


def test_the_end_of_an_engine_tells_what_could_not_be_written(
    path: Path, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    queue = queued(path, threaded=True)
    told = run(queue)
    disk.room = 0
    some(told, 3)
    end(told, queue)
    assert "5 events are missing" in caplog.text
    assert seqs(path) == []


def test_no_step_waits_for_a_disk_that_hangs(path: Path, disk: Disk) -> None:
    queue = queued(path, threaded=True)
    told = run(queue)
    disk.gate.clear()
    some(told, 1000)  # more than at once: the thread is in the middle of it
    assert not queue.flush(wait=0.05)
    begun = time.monotonic()
    some(told, 1000)
    assert not queue.flush()
    assert time.monotonic() - begun < 5
    disk.gate.set()
    assert queue.flush(wait=30)
    end(told, queue)
    assert seqs(path) == list(range(2002))


def test_what_was_told_reaches_the_file_within_a_second_or_two(path: Path) -> None:
    queue = queued(path, threaded=True)
    run(queue)
    deadline = time.monotonic() + 20
    while queue.waiting and time.monotonic() < deadline:
        time.sleep(0.05)
    assert seqs(path) == [0]
    queue.close()
    queue.close()


def test_a_file_that_somebody_takes_away_ends_nothing(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    queue = queued(path)
    told = run(queue)
    some(told, 30)
    queue.work()
    path.unlink()
    some(told, 30)
    queue.work()
    end(told, queue)
    assert seqs(path) == [*range(21), *range(42, 62)]
    assert "somebody took" in caplog.text


def test_a_child_that_was_forked_leaves_the_trace_to_its_parent(path: Path) -> None:
    queue = queued(path)
    told = run(queue)
    child = os.fork()
    if not child:
        queue.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert seqs(path) == []
    end(told, queue)
    assert seqs(path) == [0, 1]


@pytest.fixture
def held(path: Path) -> Iterator[TraceFiles]:
    files = TraceFiles(path, 4096, keep=0)
    yield files
    files.close()


def test_a_path_has_one_engine_at_a_time(path: Path, held: TraceFiles) -> None:
    with pytest.raises(BadSettings, match="is written by another engine"):
        TraceFiles(path, 4096, keep=0)
    assert list(path.parent.iterdir()) == [path]
    held.close()
    TraceFiles(path, 4096, keep=0).close()


def test_what_is_no_file_stays_where_it_is(path: Path) -> None:
    """A folder that stands there, or a device, is not moved out of the way."""
    path.mkdir()
    with pytest.raises(BadSettings, match="something else"):
        TraceFiles(path, 4096, keep=0)
    assert path.is_dir()
    fifo = path.with_name("fifo")
    os.mkfifo(fifo)
    with pytest.raises(BadSettings, match="something else"):
        TraceFiles(fifo, 4096, keep=0)
    assert fifo.exists()
