"""A tier of files: each holds one block of KV, and is published whole or not at all (O1, O2).

A copy is written beside its place, synced, and moved there in one step; so whoever finds the file
finds all of it, wherever the writer was killed.  What it holds is read only by who knows its name,
the life that it was written in and the form of the blocks, and only while the checksum over all of
that and the content is right.

A life is one engine's, from its start (or its last reset) on: claims do not outlive it, so neither
do files.  A folder has one user at a time.  On a file system in memory it is host memory.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

Buffer = bytes | bytearray | memoryview

MAGIC: Final = b"kvclaims copy 1\n"
_LOCK: Final = "in-use"
_DONE: Final = ".kv"
_UNDER_WAY: Final = ".part"
_NAME: Final = re.compile(r"[0-9a-f]{1,160}")
_MOST_HEADER: Final = 4096
_MOST_AT_ONCE: Final = 1 << 20
"""Bytes that are read or written at a time."""


class BadCopy(Exception):
    """A copy that must not be served; the message says why."""


class TierBusy(OSError):
    """Another engine uses the folder."""


class TierFiles:
    """The copies in one folder, for blocks of one `form` (layers, shapes, element types).

    Whatever files a former user left there are removed: no claim speaks of them.
    """

    def __init__(self, folder: Path, form: str) -> None:
        self.folder = folder
        self.life = ""
        self._form = form
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise TierBusy(f"{folder} is in use by another engine") from None
        self.clear()

    def begin(self, life: str) -> None:
        """From now on copies belong to `life`; those of another are removed."""
        if life != self.life:
            self.clear()
            self.life = life

    def publish(self, name: str, content: Sequence[Buffer]) -> None:
        """Keep `content` under `name`, in place of what was there.

        Raises `OSError` where the folder cannot hold it; then nothing has changed there.
        """
        place = self._place(name)
        part = place.with_suffix(_UNDER_WAY)
        try:
            file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            try:
                for piece in (MAGIC, self._header(name, content), *content):
                    _write(file, piece)
                os.fsync(file)
            finally:
                os.close(file)
            part.replace(place)
        except OSError:
            part.unlink(missing_ok=True)
            raise
        self._sync_folder()

    def read(self, name: str) -> memoryview:
        """What was published under `name`.  Raises `BadCopy` unless every byte of it is right."""
        try:
            whole = memoryview(bytearray(self._place(name).read_bytes()))
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
        """Remove these copies; one that is gone already is no error."""
        for name in names:
            self._place(name).unlink(missing_ok=True)

    def clear(self) -> None:
        """Remove every copy, and what a writer left half done."""
        for suffix in (_DONE, _UNDER_WAY):
            for path in self.folder.glob(f"*{suffix}"):
                path.unlink(missing_ok=True)
        self.life = ""

    def names(self) -> set[str]:
        """What is published now."""
        return {path.stem for path in self.folder.glob(f"*{_DONE}")}

    def close(self) -> None:
        """Remove all copies and let others use the folder; idempotent."""
        if self._lock >= 0:
            self.clear()
            os.close(self._lock)
            self._lock = -1

    def _place(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise ValueError(f"no copy can be called {name!r}")
        return self.folder / f"{name}{_DONE}"

    def _header(self, name: str, content: Sequence[Buffer]) -> bytes:
        size = sum(memoryview(piece).nbytes for piece in content)
        said = {"name": name, "life": self.life, "form": self._form, "bytes": size}
        return json.dumps({**said, "sha256": _digest(said, content)}).encode() + b"\n"

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


def _digest(said: object, content: Sequence[Buffer]) -> str:
    digest = hashlib.sha256(json.dumps(said, sort_keys=True).encode())
    for piece in content:
        digest.update(piece)
    return digest.hexdigest()


def _write(file: int, piece: Buffer) -> None:
    rest = memoryview(piece).cast("B")
    while rest:
        rest = rest[os.write(file, rest[:_MOST_AT_ONCE]) :]
