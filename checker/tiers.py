"""Fuzzing of an engine's tier: offloadable claims, and the files that keep them.

An engine that has one offers `tier_fuzzer()`, an object with `fuzz` and `replay`; what a tier is
differs too much from engine to engine for operations of one kind.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, cast

from kvclaims.checker import engines
from kvclaims.checker.verdicts import Progress, Report, Several
from kvclaims.spec.interface import BadOperation, Engine, EngineInfo
from kvclaims.spec.vocabulary import Verdict

FORMAT: Final = "kvclaims tier 1"
"""What the file of a run that broke a rule says of itself."""


class TierFuzzer(Protocol):
    def program(self, engine: EngineInfo, name: str) -> ProgramReport:
        """Run one of `PROGRAMS`."""

    def fuzz(
        self,
        engine: EngineInfo,
        acts: int | None,
        seconds: float | None,
        seed: int,
        progress: Progress,
        output: Path | None = None,
    ) -> Report:
        """Random acts; a run that breaks a rule is made shorter and written to `output`."""

    def replay(self, engine: EngineInfo, raw: Any, file: Path) -> Report:
        """Do the run of a file again.  `BadOperation` for one that is none."""


@dataclass(frozen=True)
class ProgramReport:
    """A program on a tier: what had to come of it, each with whether it did."""

    engine: EngineInfo
    name: str
    title: str
    shown: tuple[tuple[str, bool], ...]

    @property
    def wrong(self) -> list[str]:
        return [sentence for sentence, came_true in self.shown if not came_true]

    @property
    def verdict(self) -> Verdict:
        if self.wrong:
            return Verdict.VIOLATED
        return Verdict.HOLDS if self.shown else Verdict.VACUOUS

    def to_json(self) -> dict[str, Any]:
        return {
            "engine": vars(self.engine),
            "program": self.name,
            "title": self.title,
            "shown": [{"says": sentence, "holds": holds} for sentence, holds in self.shown],
        }

    def lines(self) -> Iterator[str]:
        yield f"{self.name}: {self.title}"
        for sentence, came_true in self.shown:
            yield f"  {'' if came_true else 'NOT '}{sentence}"
        yield str(self.verdict)


PROGRAMS: Final = ("tier-restore", "tier-failed", "tier-identity", "tier-refused")
"""What an engine with a tier can run of it."""


def run(name: str, program: str) -> ProgramReport:
    """Run a program on an engine's tier.  `NotExposed` where its version has none."""
    engine, info = engines.ready(name)
    if program not in PROGRAMS:
        raise BadOperation(f"no program {program!r} (known: {', '.join(PROGRAMS)})")
    return _fuzzer(engine).program(info, program)


def run_all(name: str, programs: Sequence[str], progress: Progress) -> Report:
    """Several of them, all where none is named."""
    reports = []
    for program in programs or PROGRAMS:
        progress(f"{program} on {name}")
        reports.append(run(name, program))
    return Several("programs", tuple(reports), ())


def has_tier(engine: Engine) -> bool:
    return hasattr(engine, "tier_fuzzer")


def fuzz(
    name: str,
    acts: int | None,
    seconds: float | None,
    seed: int,
    progress: Progress,
    output: Path | None = None,
) -> Report:
    engine, info = engines.ready(name)
    return _fuzzer(engine).fuzz(info, acts, seconds, seed, progress, output)


def read(path: Path) -> dict[str, Any] | None:
    """The run of a tier that a file tells of; None for any other file."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None  # whoever reads it as another kind of file says what is wrong
    return raw if isinstance(raw, dict) and raw.get("format") == FORMAT else None


def replay(path: Path, raw: dict[str, Any], name: str | None) -> Report:
    engine, info = engines.ready(name or str(raw.get("engine")))
    try:
        return _fuzzer(engine).replay(info, raw, path)
    except BadOperation as error:
        raise BadOperation(f"{path}: {error}") from None


def _fuzzer(engine: Engine) -> TierFuzzer:
    if not has_tier(engine):
        raise BadOperation(f"engine {engine.name} has no tier to fuzz")
    return cast(TierFuzzer, engine.tier_fuzzer())  # type: ignore[attr-defined]
