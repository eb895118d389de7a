"""Runs a counterexample again: does the engine still break the rule?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvclaims.checker import engines, faults, trials
from kvclaims.checker.baseline import allowing, own_findings
from kvclaims.checker.counterexample import Counterexample, operations_json, read
from kvclaims.checker.fuzz import shown
from kvclaims.checker.layouts import LayoutPool, run_program
from kvclaims.checker.locating import Place, locate
from kvclaims.checker.supervise import oracle_for
from kvclaims.checker.trials import TrialReport
from kvclaims.checker.verdicts import Violation
from kvclaims.spec.interface import EngineInfo
from kvclaims.spec.vocabulary import RULES, Verdict


@dataclass(frozen=True)
class ReplayReport:
    """What the file says was broken, and what was broken this time."""

    file: Path
    engine: EngineInfo
    example: Counterexample
    findings: tuple[Violation, ...]
    places: tuple[Place, ...] = ()
    """The engine's lines that broke the rule, the innermost first."""

    @property
    def verdict(self) -> Verdict:
        return Verdict.VIOLATED if self.findings else Verdict.HOLDS

    def to_json(self) -> dict[str, Any]:
        operations = operations_json(self.example.program.operations)
        return {
            "engine": vars(self.engine),
            "rule": self.example.rule,
            "meaning": RULES[self.example.rule].meaning,
            "fault": self.example.fault,
            "found_on": self.example.version,
            "operations": len(operations),
            "violations": [
                {
                    **finding.to_json(),
                    "operations": operations,
                    "file": str(self.file),
                    "places": [vars(place) for place in self.places],
                }
                for finding in self.findings
            ],
            "not_exposed": [],
        }

    def lines(self) -> Iterator[str]:
        planted = f" with planted fault {self.example.fault}" if self.example.fault else ""
        yield f"{self.engine.name} {self.engine.version}{planted} ({self.engine.path})"
        yield f"  the file tells of {self.example.rule}: {RULES[self.example.rule].meaning}"
        if self.example.version not in ("", self.engine.version):
            yield f"  it was found on {self.example.engine} {self.example.version}"
        if self.places:
            yield f"  in {self.places[0]}"
            yield from (f"    called by {place}" for place in self.places[1:])
        if self.findings:
            yield from shown(self.findings[0], self.example.program)
            yield from (f"  and {finding}" for finding in self.findings[1:])
        else:
            yield f"  nothing is broken by {len(self.example.program.operations)} operations"
        yield f"{self.verdict}"


def replay(path: Path, engine: str | None = None) -> ReplayReport | TrialReport:
    """Run the operations of the file on its engine, or on another one; a trial is drawn again.

    What the engine is known to break is allowed, but for the rule that the file tells of.
    The fault that the file names is planted for the time of the run.  `BadOperation` for a file
    that is not a counterexample.
    """
    kept = trials.read(path)
    if kept is not None:
        return trials.again(path, kept, engines.ready(engine or kept.engine)[0])
    example = read(path)
    found, info = engines.ready(engine or example.engine)
    planted: AbstractContextManager[None] = nullcontext()
    if example.fault is not None:
        planted = faults.planted(faults.named(example.fault, found), found)
    with planted:
        others = [k for k in own_findings(found) if k.rule != example.rule]
        allowed = allowing(found, others)
        findings = run_program(found, oracle_for(found), example.program, allowed)
        located = findings and not isinstance(example.program.config, LayoutPool)
        places = locate(found, example.program, findings[0]) if located else ()
    return ReplayReport(path, info, example, findings, places)
