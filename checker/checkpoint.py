"""An interrupted search on disk: arrays and numbers in one file, written whole or not at all.

The file is NumPy's archive of arrays.  Nothing in it is an object: it is read with pickling off.
"""

from __future__ import annotations

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
                np.savez(file, allow_pickle=False, search=np.array(search), **arrays)
                file.flush()
                os.fsync(file.fileno())
                part.replace(path)
            finally:
                part.unlink(missing_ok=True)
    except OSError as error:
        raise BadOperation(f"cannot write the checkpoint {path}: {error.strerror}") from None


def load(path: Path, search: str, name: str) -> dict[str, Array]:
    """The arrays of a search.  Raises BadOperation for what is no checkpoint, or another's."""
    try:
        with np.load(path, allow_pickle=False) as saved:
            data = {key: saved[key] for key in saved.files}
        belongs = str(data.pop("search"))
    except FileNotFoundError:
        raise BadOperation(f"{path}: no such checkpoint") from None
    except (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile):
        raise BadOperation(f"{path} is no checkpoint of a search") from None
    if belongs != search:
        raise BadOperation(
            f"{path} is a checkpoint of another instance than {name}, or of another way to "
            "explore it: give the settings that it was made with, or start anew without --resume"
        )
    return data
