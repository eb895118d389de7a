"""A tier of files: each holds one block of KV, and is published whole or not at all (O1, O2).

A copy is written beside its place, synced, and moved there in one step; so whoever finds the file
finds all of it, wherever the writer was killed.  What it holds is read only by who knows its name,
the life that it was written in and the form of the blocks, and only while the checksum over all of
that and the content is right.

A life is one engine's, from its start (or its last reset) on: claims do not outlive it, so neither
do files.  A folder has one user at a time, and may have a limit in bytes.  On a file system in
memory it is host memory.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

_LOG: Final = logging.getLogger("kvclaims.tier")

Buffer = bytes | bytearray | memoryview

MAGIC: Final = b"kvclaims copy 1\n"
_LOCK: Final = "in-use"
_DONE: Final = ".kv"
_UNDER_WAY: Final = ".part"
_NAME: Final = re.compile(r"[0-9a-f]{1,160}")
_MOST_HEADER: Final = 512
OVERHEAD: Final = len(MAGIC) + _MOST_HEADER
"""Bytes of a file beyond the content, at most."""
_MOST_AT_ONCE: Final = 1 << 20
"""Bytes that are read or written at a time."""


class BadCopy(Exception):
    """A copy that must not be served; the message says why."""


class TierBusy(OSError):
    """Another engine uses the folder."""


class TierFiles:
    """The copies in one folder, for blocks of one `form` (layers, shapes, element types), of at
    most `limit` bytes together.

    Whatever files a former user left there are removed: no claim speaks of them.
    """

    def __init__(self, folder: Path, form: str, limit: int | None = None) -> None:
        self.folder = folder
        self.life = ""
        self._form = form
        self._limit = limit
        self._sizes: dict[str, int] = {}
        """Bytes of each copy."""
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise TierBusy(f"{folder} is in use by another engine") from None
        try:
            self.clear()
        except OSError:
            self.let_go()
            raise

    def begin(self, life: str) -> None:
        """From now on copies belong to `life`; those of another are removed."""
        if life != self.life:
            try:
                self.clear()
            finally:  # what could not be removed is of another life, and is never read
                self.life = life

    def publish(self, name: str, content: Sequence[Buffer]) -> None:
        """Keep `content` under `name`, in place of what was there.

        Raises `OSError` where the folder or the limit cannot hold it; then it has no new copy.
        """
        place = self._place(name)
        part = place.with_suffix(_UNDER_WAY)
        pieces = (MAGIC, self._header(name, content), *content)
        size = sum(memoryview(piece).nbytes for piece in pieces)
        self._check_limit(size)
        try:
            file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            try:
                for piece in pieces:
                    _write(file, piece)
                os.fsync(file)
            finally:
                os.close(file)
            part.replace(place)
        except OSError:
            part.unlink(missing_ok=True)
            raise
        self._sizes[name] = size
        try:
            self._sync_folder()
        except OSError:  # whether it keeps its name is not known: it is not kept
            self.drop([name])
            raise

    def read(self, name: str) -> memoryview:
        """What was published under `name`.  Raises `BadCopy` unless every byte of it is right."""
        try:
            whole = memoryview(self._content(name))
        except FileNotFoundError:
            raise BadCopy("the file is gone") from None
        except OSError as error:
            raise BadCopy(f"the file cannot be read: {error.strerror}") from None
        if bytes(whole[: len(MAGIC)]) != MAGIC:
            raise BadCopy("the file is cut short or is no copy")
        line_end = bytes(whole[len(MAGIC) : len(MAGIC) + _MOST_HEADER]).find(b"\n")
        if line_end < 0:
            raise BadCopy("the file is cut short in its header")
        start = len(MAGIC) + line_end + 1
        content = whole[start:]
        self._check(bytes(whole[len(MAGIC) : start]), name, content)
        return content

    def drop(self, names: Iterable[str]) -> None:
        """Remove these copies; one that is gone already is no error.  `OSError` for one that cannot
        be removed, when the others are."""
        self._remove(map(self._place, names))

    def clear(self) -> None:
        """Remove every copy, and what a writer left half done; `OSError` as for `drop`."""
        self.life = ""
        self._remove(p for end in (_DONE, _UNDER_WAY) for p in self.folder.glob(f"*{end}"))

    @property
    def used(self) -> int:
        """Bytes of all copies."""
        return sum(self._sizes.values())

    def names(self) -> set[str]:
        """What is published now."""
        return {path.stem for path in self.folder.glob(f"*{_DONE}")}

    def close(self) -> None:
        """Remove all copies and let others use the folder; idempotent."""
        if self._lock >= 0:
            self.clear()
            self.let_go()

    def let_go(self) -> None:
        """Let others use the folder, with what is in it; idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _remove(self, paths: Iterable[Path]) -> None:
        failed: list[OSError] = []
        for path in list(paths):
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                failed.append(error)
            else:
                self._sizes.pop(path.stem, None)
        if failed:
            raise failed[0]

    def _content(self, name: str) -> bytearray:
        """All of a file, if it is one and no larger than what was written; else `BadCopy`."""
        file = os.open(self._place(name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            found = os.fstat(file)
            written = self._sizes.get(name, found.st_size)
            if not stat.S_ISREG(found.st_mode):
                raise BadCopy("it is no plain file, and cannot be read")
            if found.st_size > written + _MOST_HEADER:
                raise BadCopy(f"the file has {found.st_size} bytes, and {written} were written")
            with open(file, "rb", closefd=False) as reader:
                return bytearray(reader.read(found.st_size))
        finally:
            os.close(file)

    def _place(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise ValueError(f"no copy can be called {name!r}")
        return self.folder / f"{name}{_DONE}"

    def _check_limit(self, size: int) -> None:
        if self._limit is not None and self.used + size > self._limit:
            told = f"{size} bytes more than {self.used} exceed the tier's {self._limit}"
            raise OSError(errno.EDQUOT, told)

    def _header(self, name: str, content: Sequence[Buffer]) -> bytes:
        size = sum(memoryview(piece).nbytes for piece in content)
        said = {"name": name, "life": self.life, "form": self._form, "bytes": size}
        header = json.dumps({**said, "sha256": _digest(said, content)}).encode() + b"\n"
        if len(header) > _MOST_HEADER:
            raise ValueError(f"a header of {len(header)} bytes: the form is said too long")
        return header

    def _check(self, header: bytes, name: str, content: memoryview) -> None:
        try:
            said = json.loads(header)
            digest = said.pop("sha256")
        except (ValueError, KeyError, AttributeError, TypeError):
            raise BadCopy("the header cannot be read") from None
        expected = {"name": name, "life": self.life, "form": self._form}
        for field, right in expected.items():
            if said.get(field) != right:
                raise BadCopy(f"the copy is of another {field}")
        if said != {**expected, "bytes": content.nbytes}:
            raise BadCopy(f"the file holds {content.nbytes} bytes, not {said.get('bytes')}")
        if digest != _digest(said, [content]):
            raise BadCopy("the checksum is wrong")

    def _sync_folder(self) -> None:
        """So that the file has its name even after the machine fails."""
        folder = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def part_name(engine: int, rank: int) -> str:
    """The folder, in that of a tier, of a worker of an engine."""
    return f"{engine}-{rank}"


def clear_left(folder: Path, engine: int, workers: int) -> None:
    """Remove what workers left that this engine had once, and has no more."""
    for part in folder.glob(part_name(engine, 0)[:-1] + "*"):
        rank = part.name.partition("-")[2]
        if rank.isdecimal() and int(rank) >= workers:
            try:
                TierFiles(part, "").close()
            except TierBusy:
                _LOG.warning("%s is in use, though no worker of this engine's", part)


def _digest(said: object, content: Sequence[Buffer]) -> str:
    digest = hashlib.sha256(json.dumps(said, sort_keys=True).encode())
    for piece in content:
        digest.update(piece)
    return digest.hexdigest()


def _write(file: int, piece: Buffer) -> None:
    rest = memoryview(piece).cast("B")
    while rest:
        rest = rest[os.write(file, rest[:_MOST_AT_ONCE]) :]
