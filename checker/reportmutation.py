"""What `kvclaims mutate --output` wrote, as a page and as a section of the gate's page."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from kvclaims.checker.verdicts import counted
from kvclaims.spec.interface import BadOperation
from kvclaims.spec.vocabulary import Verdict

FILE: Final = "mutation.json"
"""Where the gate's page looks for one, beside the gate's JSON."""


@dataclass(frozen=True)
class Target:
    """What became of the mutants of the machines, of the reference, or of the monitor."""

    name: str
    mutants: int
    killed: int
    killers: str
    equivalent: int
    lives: int


@dataclass(frozen=True)
class Told:
    """A mutant that lives or is equivalent: its name, its fate, and what is said of it."""

    name: str
    fate: str
    detail: str


@dataclass(frozen=True)
class Mutation:
    """A whole report of mutants; `written` is when, and `version` of what."""

    verdict: str
    score: float
    mutants: int
    left: int
    targets: tuple[Target, ...]
    survivors: tuple[Told, ...]
    equivalents: tuple[Told, ...]
    stale: tuple[str, ...]
    version: str
    written: str

    @property
    def said(self) -> str:
        """The report in a sentence."""
        undone = f"; {self.left:,} were not judged in time" if self.left else ""
        return (
            f"{counted(self.mutants, 'mutant')}, {len(self.survivors)} live, "
            f"{len(self.equivalents)} equivalent, score {self.score:.2%}{undone}"
        )


def is_mutation(raw: Mapping[str, Any]) -> bool:
    """Whether a JSON object is such a report."""
    return "mutants" in raw and "survivors" in raw


def mutation_of(raw: Mapping[str, Any], name: str) -> Mutation:
    """The report in a JSON object.  Raises BadOperation where it is none."""
    try:
        return Mutation(
            verdict=str(Verdict(raw["verdict"])),
            score=float(raw["score"]),
            mutants=int(raw["mutants"]),
            left=int(raw["left"]),
            targets=tuple(map(_target, raw["targets"])),
            survivors=tuple(map(_told, raw["survivors"])),
            equivalents=tuple(map(_told, raw["equivalents"])),
            stale=tuple(map(str, raw["stale"])),
            version=str(raw["version"]),
            written=datetime.fromtimestamp(float(raw["written"]), UTC).strftime("%Y-%m-%d %H:%M"),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise BadOperation(f"{name}: no report of mutants: {error!r}") from None


def beside(folder: Path) -> Mutation | None:
    """The report in a gate's folder, if there is one.  Raises BadOperation."""
    file = folder / FILE
    if not file.is_file():
        return None
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BadOperation(f"{file}: {error}") from None
    return mutation_of(raw if isinstance(raw, dict) else {}, FILE)


def _target(raw: Mapping[str, Any]) -> Target:
    killers = ", ".join(f"{by} {times:,}" for by, times in raw["killed_by"].items())
    equivalent = int(raw["proved"]) + int(raw["declared"])
    counts = int(raw["mutants"]), int(raw["killed"])
    return Target(str(raw["name"]), *counts, killers, equivalent, int(raw["lives"]))


def _told(raw: Mapping[str, Any]) -> Told:
    return Told(str(raw["mutant"]), str(raw["fate"]), str(raw["detail"] or ""))
