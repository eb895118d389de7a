"""Engines by name, through the entry point group `kvclaims.engines`; none is imported directly.

An engine object may say more of itself than `spec.interface.Engine` asks: `package`, the import
package under test (default: its name up to a dash; the reference has none, it is part of
kvclaims), `block_size`, the tokens in a block of the programs it runs (default 16),
`fuzz_block_size`, the same in fuzzing (default: that of programs; small ones fill soon), and
`follows_reference`, False where its order of eviction is its own, so that the reference is not run
beside it (default True).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Final, TextIO, cast

from kvclaims.checker import children
from kvclaims.checker.verdicts import Report
from kvclaims.spec.interface import BadOperation, Engine, EngineInfo, EngineMissing

GROUP: Final = "kvclaims.engines"
COMMANDS: Final = "kvclaims.commands"
REFERENCE: Final = "reference"

PATH_VARIABLE: Final = "KVCLAIMS_ENGINE_PATH"
"""Set in a process whose import path already starts with the folder of `--engine-path`."""


def given_path() -> str | None:
    """The folder of `--engine-path`, None without."""
    return os.environ.get(PATH_VARIABLE)


def names() -> tuple[str, ...]:
    """Every registered engine, the reference first."""
    found = {point.name for point in entry_points(group=GROUP)}
    return tuple(sorted(found, key=lambda name: (name != REFERENCE, name)))


def find(name: str) -> Engine:
    """The engine object.  `BadOperation` if nobody registered the name, `EngineMissing` if its
    adapter cannot be imported here."""
    point = _entry_point(name)
    try:
        return cast(Engine, point.load())
    except ImportError as error:
        raise EngineMissing(f"engine {name} cannot be loaded: {error}") from None
    except AttributeError:
        raise EngineMissing(f"engine {name} cannot be loaded: no {point.value}") from None


def extension(name: str) -> Callable[..., Report]:
    """What carries out a command whose work is done outside this package: an entry point of the
    group `kvclaims.commands`.  `EngineMissing` where it cannot be imported here."""
    for point in entry_points(group=COMMANDS):
        if point.name == name:
            try:
                return cast("Callable[..., Report]", point.load())
            except ImportError as error:
                raise EngineMissing(f"{name} cannot run here: {error}") from None
    raise EngineMissing(f"{name} is not installed: run make setup")


def ready(name: str) -> tuple[Engine, EngineInfo]:
    """The engine with what it says of itself; `EngineMissing` where it cannot run, also where
    `--engine-path` was given and the package came from elsewhere."""
    engine = find(name)
    info = engine.info()
    wanted = os.environ.get(PATH_VARIABLE)
    if wanted and engine.package and not Path(info.path).resolve().is_relative_to(wanted):
        raise EngineMissing(f"engine {name} was imported from {info.path}, not from {wanted}")
    return engine, info


def first_line(error: BaseException) -> str:
    """An error in one line."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def check_path(folder: Path, engine_names: Sequence[str]) -> None:
    """Whether the folder holds the package of one of the engines; `BadOperation` if not."""
    if not folder.is_dir():
        raise BadOperation(f"--engine-path: no folder {folder}")
    packages = sorted({p for name in engine_names if (p := find(name).package)})
    if not packages:
        raise BadOperation(
            f"--engine-path: {', '.join(engine_names)} has no package of its own to take from there"
        )
    for name in packages:
        if (folder / name / "__init__.py").is_file():
            return
    lacking = " or ".join(str(folder / name / "__init__.py") for name in packages)
    raise BadOperation(f"--engine-path: no engine there, {lacking} does not exist")


def rerun_with_path(folder: Path, arguments: Sequence[str], out: TextIO) -> int | None:
    """Run this command again in a process that imports from `folder` first and prints to `out`;
    its exit code.

    None where this is that process already.
    """
    resolved = str(folder.resolve())
    if os.environ.get(PATH_VARIABLE) == resolved:
        return None
    inherited = os.environ.get("PYTHONPATH")
    path = resolved + (os.pathsep + inherited if inherited else "")
    environment = {**os.environ, "PYTHONPATH": path, PATH_VARIABLE: resolved}
    command = [sys.executable, "-m", "kvclaims.checker.cli", *arguments]
    out.flush()
    with children.stopping():
        return children.run(command, environment=environment, out=out).returncode


def _entry_point(name: str) -> EntryPoint:
    for point in entry_points(group=GROUP):
        if point.name == name:
            return point
    raise BadOperation(f"unknown engine {name!r} (known: {', '.join(names())})")
