"""Which engine explores an instance, and what it is told: the options of `kvclaims explore`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvclaims.checker import explore as python
from kvclaims.checker.explore import ExploreReport
from kvclaims.checker.instances import instance
from kvclaims.checker.verdicts import Progress
from kvclaims.spec.interface import BadOperation

ENGINES: Final = ("python", "native", "symbolic", "torch", "ray")

_TAKES: Final[Mapping[str, tuple[str, ...]]] = {
    "python": ("symmetry",),
    "native": ("symmetry", "memory", "jobs", "checkpoint", "resume"),
    "symbolic": (),
    "torch": ("memory", "jobs", "device"),
    "ray": ("memory", "workers"),
}

_UNITS: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True)
class Options:
    """What was asked for; None and False are what the engine does by itself.

    `memory` is in bytes, for each process.
    """

    memory: int | None = None
    jobs: int | None = None
    symmetry: bool = False
    checkpoint: Path | None = None
    resume: Path | None = None
    device: str | None = None
    workers: int | None = None

    @property
    def asked(self) -> tuple[str, ...]:
        return tuple(name for name, value in vars(self).items() if value not in (None, False))


def explore_by(
    engine: str | None,
    machine: str,
    settings: Mapping[str, str],
    options: Options,
    progress: Progress,
) -> ExploreReport:
    """Explore an instance by an engine; without one by native code where it is told anything.

    Raises BadOperation for an option that the engine does not take, and what the engine raises.
    """
    by = engine or ("native" if settings or options.asked else "python")
    for name in options.asked:
        if name not in _TAKES[by]:
            able = ", ".join(e for e, takes in _TAKES.items() if name in takes)
            raise BadOperation(f"--{name} is no option of --by {by} (it is one of {able})")
    match by:
        case "python":
            return python.explore(machine, settings, progress, options.symmetry)
        case "native":
            report = _native(machine, settings, options, progress)
        case "symbolic":
            from kvclaims.checker.symbolic import explore_symbolic

            report = explore_symbolic(instance(machine, settings), machine, progress)
        case "torch":
            from kvclaims.checker.tensors import explore_tensors

            report = explore_tensors(
                instance(machine, settings),
                machine,
                progress,
                device=options.device or "cpu",
                budget=options.memory,
                jobs=options.jobs or 1,
            )
        case _:
            from kvclaims.checker.distributed import explore_ray

            workers = options.workers or os.cpu_count() or 1
            report = explore_ray(machine, settings, workers, progress, options.memory)
    report.settings = settings
    return report


def _native(
    machine: str, settings: Mapping[str, str], options: Options, progress: Progress
) -> ExploreReport:
    from kvclaims.checker.native import JOBS, Way, explore_native

    way = Way(
        budget=options.memory,
        jobs=options.jobs or JOBS,
        symmetric=options.symmetry,
        checkpoint=options.checkpoint or options.resume,
        interrupted=Path(f"{machine.replace('/', '-')}.checkpoint.npz"),
        resume=options.resume,
    )
    return explore_native(instance(machine, settings), machine, progress, way)


def in_bytes(text: str) -> int:
    """`500M` or `8G` in bytes.  Raises BadOperation for anything else."""
    number, unit = text.strip().upper().removesuffix("B"), ""
    if number[-1:] in _UNITS and number[-1:]:
        number, unit = number[:-1], number[-1]
    if not number.isdigit() or not int(number):
        raise BadOperation(f"memory is given in bytes, such as 500M or 8G, not {text!r}")
    return int(number) * _UNITS[unit]
