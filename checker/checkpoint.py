"""An interrupted search on disk: arrays and numbers in one file, written whole or not at all.

The file is NumPy's archive of arrays.  Nothing in it is an object: it is read with pickling off.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvclaims.spec.interface import BadOperation

Array = np.ndarray[Any, np.dtype[Any]]


def save(path: Path, search: str, arrays: Mapping[str, Array]) -> None:
    """Keep the arrays of the search named `search`.  An older file stays whole until then.

    Raises BadOperation where the file cannot be written.
    """
    try:
        with tempfile.NamedTemporaryFile(
            dir=path.parent, prefix=path.name, suffix=".part", delete=False
        ) as file:
            part = Path(file.name)
            try:
                marks = {"search": np.array(search), "digest": np.array(_digest(search, arrays))}
                np.savez(file, allow_pickle=False, **marks, **arrays)
                file.flush()
                os.fsync(file.fileno())
                part.replace(path)
            finally:
                part.unlink(missing_ok=True)
    except OSError as error:
        raise BadOperation(f"cannot write the checkpoint {path}: {error.strerror}") from None


def load(path: Path, search: str, name: str) -> dict[str, Array]:
    """The arrays of a search.  Raises BadOperation for what is no checkpoint, or another's, and
    where they are not those that were kept."""
    try:
        with np.load(path, allow_pickle=False) as saved:
            data = {key: saved[key] for key in saved.files}
        belongs, digest = str(data.pop("search")), str(data.pop("digest"))
    except FileNotFoundError:
        raise BadOperation(f"{path}: no such checkpoint") from None
    except (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile):
        raise BadOperation(f"{path} is no checkpoint of a search") from None
    if belongs != search:
        raise BadOperation(
            f"{path} is a checkpoint of another instance than {name}, or of another way to "
            "explore it: give the settings that it was made with, or start anew without --resume"
        )
    if digest != _digest(search, data):
        raise damaged(path, "its numbers are not those that were kept")
    return data


def damaged(path: Path, why: str) -> BadOperation:
    return BadOperation(f"{path} is a damaged checkpoint: {why}; start anew without --resume")


def _digest(search: str, arrays: Mapping[str, Array]) -> str:
    """Of what the arrays are called, their kinds and shapes, and all their bytes."""
    whole = hashlib.sha256(search.encode())
    for name, array in sorted(arrays.items()):
        whole.update(f"\n{name} {array.dtype.str} {array.shape}\n".encode())
        whole.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return whole.hexdigest()
