"""Immutable files of KV: published whole or not at all, checked when read."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch


def name_of(tokens: Sequence[int], identity: str) -> str:
    """A file name for a whole prefix and what else it belongs to (B4: the key is complete)."""
    return hashlib.sha256(f"{identity}:{','.join(map(str, tokens))}".encode()).hexdigest()[:32]


def publish(path: Path, keys: Any, values: Any) -> None:
    """Write beside, then rename: a reader sees the whole file or none."""
    body = io.BytesIO()
    np.save(body, torch.stack((keys, values)).numpy(), allow_pickle=False)
    beside = path.with_suffix(".part")
    with beside.open("wb") as file:
        file.write(hashlib.sha256(body.getvalue()).digest() + body.getvalue())
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def read(path: Path | None) -> tuple[Any, Any] | None:
    """Keys and values, or None where the file is gone or does not carry its checksum."""
    if path is None or not path.exists():
        return None
    whole = path.read_bytes()
    digest, body = whole[:32], whole[32:]
    if hashlib.sha256(body).digest() != digest:
        return None
    keys, values = torch.from_numpy(np.load(io.BytesIO(body), allow_pickle=False))
    return keys, values
