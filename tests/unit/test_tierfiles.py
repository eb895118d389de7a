"""Copies of KV blocks in files: whole or not there, and never another's (O1, O2)."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvclaims.bridge.serving import tierfiles
from kvclaims.bridge.serving.tierfiles import BadCopy, TierBusy, TierFiles, clear_left

OLD, NEW = b"old content" * 50, b"new content, longer" * 90
NAME, OTHER = "ab12", "cd34"
CALLS = ("open", "write", "fsync", "replace", "close")
"""What the store asks of the operating system, in `os`."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TierFiles]:
    files = TierFiles(tmp_path / "tier", "form")
    files.begin("one")
    yield files
    files.close()


def test_what_is_published_is_read_back(store: TierFiles) -> None:
    store.publish(NAME, [OLD, memoryview(NEW)])
    assert bytes(store.read(NAME)) == OLD + NEW
    assert store.names() == {NAME}
    store.publish(NAME, [NEW])
    assert bytes(store.read(NAME)) == NEW
    store.drop([NAME, NAME])
    with pytest.raises(BadCopy, match="gone"):
        store.read(NAME)


def test_each_byte_of_a_copy_counts(store: TierFiles) -> None:
    store.publish(NAME, [b"\x00\x01" * 40])
    path = store.folder / f"{NAME}.kv"
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(BadCopy):
            store.read(NAME)
    path.write_bytes(whole)
    assert bytes(store.read(NAME)) == b"\x00\x01" * 40


def test_a_copy_that_is_cut_short_anywhere_is_no_copy(store: TierFiles) -> None:
    store.publish(NAME, [b"\x00\x01" * 40])
    path = store.folder / f"{NAME}.kv"
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(BadCopy):
            store.read(NAME)
    path.write_bytes(whole + b"\x00")
    with pytest.raises(BadCopy, match="81 bytes, not 80"):
        store.read(NAME)


def test_a_copy_answers_to_its_own_name_only(store: TierFiles) -> None:
    store.publish(NAME, [OLD])
    (store.folder / f"{NAME}.kv").rename(store.folder / f"{OTHER}.kv")
    with pytest.raises(BadCopy, match="of another name"):
        store.read(OTHER)


def test_copies_of_another_life_or_form_are_not_read(store: TierFiles, tmp_path: Path) -> None:
    store.publish(NAME, [OLD])
    kept = (store.folder / f"{NAME}.kv").read_bytes()
    store.begin("two")
    assert store.names() == set()
    (store.folder / f"{NAME}.kv").write_bytes(kept)
    with pytest.raises(BadCopy, match="of another life"):
        store.read(NAME)
    other = TierFiles(tmp_path / "other", "another form")
    other.begin("one")
    (other.folder / f"{NAME}.kv").write_bytes(kept)
    with pytest.raises(BadCopy, match="of another form"):
        other.read(NAME)
    other.close()


def test_a_header_that_is_forged_is_not_believed(store: TierFiles) -> None:
    """Whoever changes the header changes what the checksum is over."""
    store.publish(NAME, [OLD])
    path = store.folder / f"{NAME}.kv"
    magic, header, content = path.read_bytes().split(b"\n", 2)
    said = json.loads(header)
    for field, value in (("more", 1), ("bytes", len(OLD) + 0.0), ("sha256", None)):
        path.write_bytes(b"\n".join([magic, json.dumps({**said, field: value}).encode(), content]))
        with pytest.raises(BadCopy):
            store.read(NAME)
    for header in (b"[]", b"7", b"{", b"null", b"{}"):
        path.write_bytes(b"\n".join([magic, header, content]))
        with pytest.raises(BadCopy, match="header"):
            store.read(NAME)


def test_only_names_that_are_hashes_are_taken(store: TierFiles) -> None:
    for name in ("", "../ab", "AB", "a/b", "x" * 10, "a" * 200):
        with pytest.raises(ValueError, match="no copy"):
            store.publish(name, [OLD])


def test_a_folder_has_one_user(store: TierFiles) -> None:
    store.publish(NAME, [OLD])
    with pytest.raises(TierBusy, match="in use by another engine"):
        TierFiles(store.folder, "form")
    assert bytes(store.read(NAME)) == OLD
    store.close()
    store.close()
    TierFiles(store.folder, "form").close()


def test_a_folder_that_is_full_keeps_what_it_had(
    store: TierFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.publish(NAME, [OLD])
    written = os.write

    def full(file: int, piece: Any) -> int:
        if len(piece) > 100:
            raise OSError(errno.ENOSPC, "No space left on device")
        return written(file, piece)

    monkeypatch.setattr(tierfiles.os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        store.publish(NAME, [NEW])
    monkeypatch.undo()
    assert bytes(store.read(NAME)) == OLD
    assert sorted(p.name for p in store.folder.iterdir()) == ["ab12.kv", "in-use"]


def test_what_cannot_be_removed_keeps_nothing_else(store: TierFiles) -> None:
    """A folder in the place of a copy: everything else goes, and it is never read."""
    for name in (NAME, OTHER, "ef56"):
        store.publish(name, [OLD])
    (store.folder / f"{OTHER}.kv").unlink()
    (store.folder / f"{OTHER}.kv").mkdir()
    with pytest.raises(BadCopy, match="cannot be read"):
        store.read(OTHER)
    with pytest.raises(OSError, match=OTHER):
        store.drop([OTHER, NAME])
    assert store.names() == {OTHER, "ef56"}
    store.publish(NAME, [OLD])
    with pytest.raises(OSError, match=OTHER):
        store.begin("two")
    assert (store.names(), store.life) == ({OTHER}, "two")
    (store.folder / f"{OTHER}.kv").rmdir()


def test_a_folder_that_cannot_be_cleared_is_not_begun_with_nor_held(tmp_path: Path) -> None:
    folder = tmp_path / "tier"
    (folder / f"{NAME}.kv").mkdir(parents=True)
    with pytest.raises(OSError, match=NAME):
        TierFiles(folder, "form")
    (folder / f"{NAME}.kv").rmdir()
    TierFiles(folder, "form").close()


def test_a_file_that_is_no_file_does_not_hold_up_its_reader(store: TierFiles) -> None:
    """A pipe that nobody writes to, a link, and a file much larger than what was written."""
    store.publish(NAME, [OLD])
    place = store.folder / f"{NAME}.kv"
    kept = place.rename(store.folder / "kept")
    os.mkfifo(place)
    with pytest.raises(BadCopy, match="no plain file"):
        store.read(NAME)
    place.unlink()
    place.symlink_to(kept)
    with pytest.raises(BadCopy, match="cannot be read"):
        store.read(NAME)
    place.unlink()
    kept.rename(place)
    assert bytes(store.read(NAME)) == OLD
    with place.open("r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(BadCopy, match=f"{1 << 40} bytes"):
        store.read(NAME)


def dies_at(call: int, after: bool) -> Callable[[], None]:
    """Make this process die by SIGKILL at the `call`-th call of the operating system; a write
    that it dies after has written half."""
    count = 0

    def wrapped(name: str) -> Any:
        inner = getattr(os, name)

        def called(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == call:
                if after and name == "write":
                    inner(args[0], args[1][: len(args[1]) // 2])
                elif after:
                    inner(*args, **kwargs)
                os.kill(os.getpid(), signal.SIGKILL)
            return inner(*args, **kwargs)

        return called

    def plant() -> None:
        for name in CALLS:
            setattr(tierfiles.os, name, wrapped(name))

    return plant


def in_a_child(folder: Path, plant: Callable[[], None]) -> int:
    """Publish a new copy over the old one in a child; the signal that ended it."""
    child = os.fork()
    if child == 0:
        try:
            files = TierFiles(folder, "form")
            files.begin("one")
            files.publish(NAME, [OLD])
            plant()
            files.publish(NAME, [NEW])
            files.publish(OTHER, [NEW])
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("after", [False, True])
def test_killed_at_any_point_it_leaves_whole_copies(tmp_path: Path, after: bool) -> None:
    folder = tmp_path / "tier"
    seen = set()
    for call in range(1, 40):
        ended = in_a_child(folder, dies_at(call, after))
        if ended == 0:
            break
        assert ended == -signal.SIGKILL, f"call {call}"
        found = _as_left(folder)
        assert found[NAME] in (OLD, NEW)
        assert found.get(OTHER) in (None, NEW)
        seen.add((found[NAME] == NEW, OTHER in found, any(folder.glob("*.part"))))
        restarted = TierFiles(folder, "form")
        assert [p.name for p in folder.iterdir()] == ["in-use"]
        restarted.begin("two")
        with pytest.raises(BadCopy, match="gone"):
            restarted.read(NAME)
        restarted.close()
    else:
        raise AssertionError("two copies take more calls than that")
    assert call > 10
    # Killed before and after the move, with and without something half done:
    assert {(False, False, True), (True, False, False), (True, False, True)} <= seen


def _as_left(folder: Path) -> dict[str, bytes]:
    """What a reader of the same life finds in the folder, before anybody clears it."""
    reader = TierFiles.__new__(TierFiles)
    reader.folder, reader.life, reader._form, reader._lock = folder, "one", "form", -1
    reader._sizes = {}
    return {name: bytes(reader.read(name)) for name in reader.names()}


def test_a_copy_is_never_written_in_its_place(store: TierFiles) -> None:
    """Whatever is opened for writing is moved to its place when it is whole."""
    opened, moved, listening = [], [], True

    def heard(event: str, args: tuple[Any, ...]) -> None:
        if listening and event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR):
            opened.append(Path(os.fsdecode(args[0])).suffix)
        if listening and event == "os.rename":
            moved.append(tuple(Path(os.fsdecode(path)).suffix for path in args[:2]))

    sys.addaudithook(heard)
    try:
        store.publish(NAME, [OLD])
        store.publish(NAME, [NEW])
    finally:
        listening = False
    assert (opened, moved) == ([".part"] * 2, [(".part", ".kv")] * 2)


def test_an_engine_of_fewer_workers_clears_what_those_of_before_left(tmp_path: Path) -> None:
    """No worker opens their folders any more; those in use, and of other engines, stay."""
    left = {part: TierFiles(tmp_path / part, "form") for part in ("0-0", "0-1", "0-2", "1-2")}
    for files in left.values():
        files.begin("one")
        files.publish(NAME, [OLD])
    for part in ("0-0", "0-1", "1-2"):
        left[part].let_go()
    (tmp_path / "0-1" / f"{OTHER}.part").write_bytes(OLD)
    (tmp_path / "0-notes").write_text("somebody's")
    clear_left(tmp_path, 0, 1)
    held = {part: files.names() for part, files in left.items()}
    assert held == {"0-0": {NAME}, "0-1": set(), "0-2": {NAME}, "1-2": {NAME}}
    assert not list((tmp_path / "0-1").glob("*.part"))
    clear_left(tmp_path / "none", 0, 1)
    left["0-2"].close()
