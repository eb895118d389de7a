"""Short runs by hand, beside the random ones: what those show too rarely (`scenes.toml`)."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvclaims.checker.layouts import LayoutPool
from kvclaims.spec.interface import BadOperation, PoolConfig
from kvclaims.spec.operations import Operation, parse

FILE: Final = Path(__file__).with_name("scenes.toml")


@dataclass(frozen=True)
class Scene:
    """What is to be seen in it, its pool, and its operations; `refused` counts, from 0, those that
    no runtime takes."""

    shows: str
    config: PoolConfig
    operations: tuple[Operation, ...]
    refused: frozenset[int] = frozenset()


def _pool(raw: dict[str, Any]) -> PoolConfig:
    fields: dict[str, Any] = {
        name: tuple(v) if isinstance(v, list) else v for name, v in raw.items()
    }
    return LayoutPool(**fields) if "layout" in fields else PoolConfig(**fields)


def scenes(file: Path = FILE) -> tuple[Scene, ...]:
    """Every scene of the file, in its order.  Raises BadOperation."""
    try:
        raw = tomllib.loads(file.read_text(encoding="utf-8"))["scene"]
        return tuple(
            Scene(
                one["shows"],
                _pool(one["pool"]),
                tuple(map(parse, one["do"])),
                frozenset(one.get("refused", ())),
            )
            for one in raw
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadOperation(f"{file.name}: {error}") from None
