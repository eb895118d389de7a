"""The work on a tier's files in a thread of its own: its order, its bounds, and its failures."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvclaims.bridge.serving.tierfiles import OVERHEAD, TierFiles
from kvclaims.bridge.serving.tierqueue import MOST_READ, Read, TierQueue, Wrote

LIFE, NEXT = "one", "two"


@pytest.fixture
def files(tmp_path: Path) -> TierFiles:
    return TierFiles(tmp_path / "tier", "form")


@pytest.fixture
def queue(files: TierFiles) -> Iterator[TierQueue]:
    """One that works when it is told to."""
    queue = TierQueue(files, threaded=False)
    queue.begin(LIFE)
    yield queue
    queue.close()


def work(queue: TierQueue) -> list[Wrote | Read]:
    while queue.work():
        pass
    return queue.taken()


def test_nothing_is_said_to_be_written_before_it_is(queue: TierQueue, files: TierFiles) -> None:
    queue.write("aa", [b"content"])
    assert (queue.taken(), files.names()) == ([], set())
    assert work(queue) == [Wrote("aa")]
    assert files.names() == {"aa"}
    assert queue.taken() == []


def test_a_copy_that_is_written_again_is_the_new_one(queue: TierQueue, files: TierFiles) -> None:
    queue.write("aa", [b"old"])
    queue.drop(["aa"])
    queue.write("aa", [b"new"])
    assert work(queue) == [Wrote("aa"), Wrote("aa")]
    assert bytes(files.read("aa")) == b"new"


def test_what_a_load_reads_goes_before_what_is_written(queue: TierQueue) -> None:
    queue.write("aa", [b"first"])
    work(queue)
    queue.write("bb", [b"second"])
    queue.read(7, ["aa", "bb"])
    told = work(queue)
    assert [(type(one), getattr(one, "position", None)) for one in told] == [
        (Read, 0),
        (Read, 1),
        (Wrote, None),
    ]
    first, second = told[:2]
    assert isinstance(first, Read)
    assert first.content == b"first"
    assert second == Read(7, 1, None, "the file is gone")


def test_after_the_first_copy_that_is_not_right_no_more_is_read(queue: TierQueue) -> None:
    queue.write("aa", [b"a"])
    work(queue)
    queue.read(1, ["bb", "aa"])
    assert work(queue) == [Read(1, 0, None, "the file is gone")]


def test_only_so_much_is_read_before_it_is_taken(queue: TierQueue) -> None:
    queue.write("aa", [b"a"])
    work(queue)
    queue.read(1, ["aa"] * (2 * MOST_READ + 3))
    assert [len(work(queue)) for _ in range(4)] == [MOST_READ, MOST_READ, 3, 0]


def test_a_new_life_begins_with_nothing_and_hears_of_nothing(
    queue: TierQueue, files: TierFiles
) -> None:
    queue.write("aa", [b"a"])
    work(queue)
    queue.write("bb", [b"b"])
    queue.read(1, ["aa"])
    queue.begin(NEXT)
    queue.write("cc", [b"c"])
    queue.read(2, ["aa"])
    assert work(queue) == [Read(2, 0, None, "the file is gone"), Wrote("cc")]
    assert (files.life, files.names()) == (NEXT, {"cc"})


def test_what_was_being_written_when_a_new_life_began_is_not_told(files: TierFiles) -> None:
    queue = TierQueue(files, threaded=False)
    queue.begin(LIFE)
    publish = files.publish

    def overtaken(name: str, content: object) -> None:
        publish(name, content)  # type: ignore[arg-type]
        queue.begin(NEXT)

    queue.write("aa", [b"a"])
    files.publish = overtaken  # type: ignore[method-assign, assignment]
    assert work(queue) == []
    assert (files.life, files.names()) == (NEXT, set())
    queue.close()


def test_a_limit_in_bytes_refuses_with_numbers(tmp_path: Path) -> None:
    files = TierFiles(tmp_path / "tier", "form", limit=2 * OVERHEAD)
    queue = TierQueue(files, threaded=False)
    queue.begin(LIFE)
    queue.write("aa", [b"a" * OVERHEAD])
    queue.write("bb", [b"b" * OVERHEAD])
    one, two = work(queue)
    assert one == Wrote("aa")
    size = (files.folder / "aa.kv").stat().st_size
    assert files.used == size
    limit = 2 * OVERHEAD
    assert two == Wrote("bb", f"{size} bytes more than {size} exceed the tier's {limit}")
    assert {path.name for path in files.folder.iterdir()} == {"aa.kv", "in-use"}
    queue.drop(["aa"])
    queue.write("bb", [b"b" * OVERHEAD])
    assert work(queue) == [Wrote("bb")]
    queue.close()


def test_a_thread_does_it_while_others_go_on(files: TierFiles) -> None:
    queue = TierQueue(files)
    queue.begin(LIFE)
    may, publish = threading.Event(), files.publish

    def slow(name: str, content: object) -> None:
        assert may.wait(10)
        publish(name, content)  # type: ignore[arg-type]

    files.publish = slow  # type: ignore[method-assign, assignment]
    queue.write("aa", [b"a"])
    queue.wait(0.01)
    assert queue.taken() == []
    may.set()
    queue.wait(10)
    assert queue.taken() == [Wrote("aa")]
    queue.wait(10)  # nothing is under way: it returns at once
    queue.close()
    queue.close()
    assert files.names() == set()


def test_it_closes_in_the_middle_of_a_copy(files: TierFiles) -> None:
    queue = TierQueue(files)
    queue.begin(LIFE)
    begun, may, publish = threading.Event(), threading.Event(), files.publish

    def slow(name: str, content: object) -> None:
        begun.set()
        assert may.wait(10)
        publish(name, content)  # type: ignore[arg-type]

    files.publish = slow  # type: ignore[method-assign, assignment]
    for name in ("aa", "bb", "cc"):
        queue.write(name, [b"a"])
    assert begun.wait(10)
    closing = threading.Thread(target=queue.close)
    closing.start()
    may.set()
    closing.join(10)
    assert not closing.is_alive()
    assert {path.name for path in files.folder.iterdir()} == {"in-use"}


@pytest.mark.parametrize("act", [lambda q: q.drop(["aa"]), lambda q: q.begin(NEXT)])
def test_what_cannot_be_removed_is_not_read_and_stops_nothing(
    queue: TierQueue,
    files: TierFiles,
    act: Callable[[TierQueue], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    queue.write("aa", [b"a"])
    work(queue)

    def broken(self: Path, missing_ok: bool = False) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", broken)
        act(queue)
        assert work(queue) == []
    assert "could not be removed" in caplog.text
    queue.write("bb", [b"b"])
    assert work(queue) == [Wrote("bb")]
    if files.life == NEXT:
        queue.read(1, ["aa"])
        assert work(queue) == [Read(1, 0, None, "the copy is of another life")]


def test_what_is_no_failure_of_the_disk_is_raised_in_the_step(files: TierFiles) -> None:
    queue = TierQueue(files)
    queue.begin(LIFE)
    queue.write("no name", [b"a"])
    queue.wait(10)
    with pytest.raises(ValueError, match="no copy can be called"):
        queue.taken()
    queue.close()
