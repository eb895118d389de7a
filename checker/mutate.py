"""Mutation: small changes to the machines, the reference and the monitor, and who notices.

`checker.mutants` and `checker.codemutants` make them, `checker.mutatemachines` and
`checker.mutatecode` judge them.  A mutant is killed by a check, proved to be no change, declared
to be none with a reason (`equivalents.toml`), or it lives: then a check is missing.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, as_completed
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from kvclaims.checker import mustfail, mutatecode, mutatemachines
from kvclaims.checker.fates import Fate, Judged, declared, settle, stale
from kvclaims.checker.instances import MACHINES
from kvclaims.checker.keptfates import KeptFates
from kvclaims.checker.mutants import mutants
from kvclaims.checker.sensitivity import ONE_MORE, Sensitivity, sensitivity
from kvclaims.checker.verdicts import Progress
from kvclaims.checker.workers import processes
from kvclaims.spec.interface import BadOperation
from kvclaims.spec.vocabulary import Verdict

ALL: Final = "all"
TARGETS: Final = ("machines", "reference", "monitor", ALL)

_MACHINES_AT_A_TIME: Final = 80
_CODE_AT_A_TIME: Final = 20


@dataclass(frozen=True)
class MutationReport:
    """What became of every mutant.  `left` counts those that time did not suffice for."""

    judged: tuple[Judged, ...]
    sensitivity: tuple[Sensitivity, ...]
    stale: tuple[str, ...]
    left: int
    seconds: float
    kept: int = 0
    """Of those judged, how many an earlier run judged."""

    @property
    def survivors(self) -> tuple[Judged, ...]:
        return tuple(one for one in self.judged if one.fate is Fate.LIVES)

    @property
    def equivalents(self) -> tuple[Judged, ...]:
        return tuple(one for one in self.judged if one.fate in (Fate.PROVED, Fate.DECLARED))

    @property
    def verdict(self) -> Verdict:
        """VIOLATED where a mutant lives, a bound is too small or a declaration is stale."""
        if self.survivors or self.stale or not all(row.holds for row in self.sensitivity):
            return Verdict.VIOLATED
        if self.left:
            return Verdict.UNKNOWN
        return Verdict.HOLDS if self.judged else Verdict.VACUOUS

    @property
    def score(self) -> float:
        """The share of the mutants that are a change and were killed."""
        killed = sum(one.fate is Fate.KILLED for one in self.judged)
        return killed / max(1, killed + len(self.survivors))

    def to_json(self) -> dict[str, Any]:
        return {
            "mutants": len(self.judged),
            "left": self.left,
            "kept": self.kept,
            "score": round(self.score, 4),
            "targets": [_counts(name, of) for name, of in _by(self.judged, "target").items()],
            "operators": [_counts(name, of) for name, of in _by(self.judged, "operator").items()],
            "survivors": [one.to_json() for one in self.survivors],
            "equivalents": [one.to_json() for one in self.equivalents],
            "stale": list(self.stale),
            "sensitivity": [row.to_json() for row in self.sensitivity],
        }

    def lines(self) -> Iterator[str]:
        for name, of in _by(self.judged, "target").items():
            yield _line(name, of)
        for row in self.sensitivity:
            yield str(row)
        for one in self.survivors:
            yield from one.lines()
        for name in self.stale:
            yield f"declared equivalent, and is not made, killed or proved: {name}"
        undone = f", {self.left:,} not judged in time" if self.left else ""
        undone += f", {self.kept:,} judged before" if self.kept else ""
        yield (
            f"{self.verdict}: {len(self.judged):,} mutants, {len(self.survivors)} live, "
            f"{len(self.equivalents)} equivalent, score {self.score:.2%}, "
            f"{self.seconds:.0f} s{undone}"
        )


def _by(judged: Sequence[Judged], field_name: str) -> dict[str, list[Judged]]:
    found: dict[str, list[Judged]] = {}
    for one in judged:
        found.setdefault(getattr(one, field_name), []).append(one)
    return dict(sorted(found.items()))


def _counts(name: str, judged: Sequence[Judged]) -> dict[str, Any]:
    fates = Counter(one.fate for one in judged)
    killers = Counter(one.by for one in judged if one.fate is Fate.KILLED)
    return {
        "name": name,
        "mutants": len(judged),
        "killed": fates[Fate.KILLED],
        "killed_by": dict(killers.most_common()),
        "proved": fates[Fate.PROVED],
        "declared": fates[Fate.DECLARED],
        "lives": fates[Fate.LIVES],
    }


def _line(name: str, judged: Sequence[Judged]) -> str:
    counts = _counts(name, judged)
    killers = ", ".join(f"{by} {times}" for by, times in counts["killed_by"].items())
    equivalent = counts["proved"] + counts["declared"]
    return (
        f"{name:12} {counts['mutants']:5} mutants, {counts['killed']:5} killed ({killers}), "
        f"{equivalent} equivalent, {counts['lives']} live"
    )


# --- running -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """Some mutants of one machine or module, and who judges them."""

    judge: Callable[[str, int, int], list[Judged]]
    of: str
    start: int
    stop: int

    def run(self) -> list[Judged]:
        return self.judge(self.of, self.start, self.stop)


def mutate(
    target: str = ALL,
    machine: str | None = None,
    progress: Progress | None = None,
    jobs: int = 1,
    seconds: float | None = None,
    resume: Path | None = None,
) -> MutationReport:
    """Judge every mutant of a target (of one machine), on `jobs` processes.

    Past `seconds` no more are begun, and the report counts what is left.  In the folder `resume`
    fates are kept, and taken from there while no text has changed.  Raises BadOperation for an
    unknown target or machine, and where a target fails its checks unmutated.
    """
    if target not in TARGETS:
        raise BadOperation(f"unknown target {target!r} (known: {', '.join(TARGETS)})")
    if machine is not None and (machine not in MACHINES or target not in ("machines", ALL)):
        raise BadOperation(f"no machine {machine!r} to mutate (known: {', '.join(MACHINES)})")
    begun = time.monotonic()
    tell = progress or (lambda _: None)
    names = [machine] if machine else list(MACHINES) if target in ("machines", ALL) else []
    paths = [] if machine else _paths(target)
    for path in paths:
        tell(f"checking {path} as it is")
        if wrong := mutatecode.baseline(path, whole=path in (paths[0], paths[-1])):
            raise BadOperation(f"nothing can be judged: {wrong}")
    tasks = [*_tasks(names), *_code_tasks(paths)]
    fates = KeptFates(resume) if resume else None
    known = _known(tasks, fates)
    until = None if seconds is None else begun + seconds
    judged, left = _judge_all(tasks, known, fates, jobs, until, tell)
    reasons = {
        name: reason
        for name, reason in declared().items()
        if any(name.startswith((f"{of}.", f"{of}:")) for of in (*names, *paths))
    }
    settled = tuple(settle(judged, reasons))
    alive = {one.name for one in settled if one.fate is Fate.LIVES}
    rows = tuple(_rows(names, alive, tell)) if not left else ()
    outdated = () if left else tuple(stale(settled, reasons))
    kept = sum(map(len, known.values()))
    return MutationReport(settled, rows, outdated, left, time.monotonic() - begun, kept)


def _paths(target: str) -> list[str]:
    reference = mutatecode.reference_modules() if target in ("reference", ALL) else []
    return [*reference, *(mutatecode.MONITOR if target in ("monitor", ALL) else ())]


def _tasks(machines: Sequence[str]) -> Iterator[Task]:
    for name in machines:
        for start, stop in _shares(mutatemachines.count_mutants(name), _MACHINES_AT_A_TIME):
            yield Task(mutatemachines.judge, name, start, stop)


def _code_tasks(paths: Sequence[str]) -> Iterator[Task]:
    for path in paths:
        for start, stop in _shares(len(mutatecode.mutants_of(path)), _CODE_AT_A_TIME):
            yield Task(mutatecode.judge, path, start, stop)


def _shares(whole: int, size: int) -> Iterator[tuple[int, int]]:
    return ((at, min(at + size, whole)) for at in range(0, whole, size))


def _known(tasks: Sequence[Task], fates: KeptFates | None) -> dict[int, list[Judged]]:
    """What an earlier run found, by the number of the task."""
    found = {i: fates.find(t.of, t.start, t.stop) for i, t in enumerate(tasks)} if fates else {}
    return {number: judged for number, judged in found.items() if judged is not None}


def _judge_all(
    tasks: Sequence[Task],
    known: Mapping[int, list[Judged]],
    fates: KeptFates | None,
    jobs: int,
    until: float | None,
    tell: Progress,
) -> tuple[list[Judged], int]:
    """The fates in the order of the tasks, and how many mutants there was no time for."""
    whole = sum(task.stop - task.start for task in tasks)
    done = dict(known)
    waiting = [(number, task) for number, task in enumerate(tasks) if number not in known][::-1]
    running: dict[Future[list[Judged]], int] = {}
    with processes(jobs) as pool:
        while waiting or running:
            while waiting and len(running) < 2 * jobs and not _is_over(until):
                number, task = waiting.pop()
                running[pool.submit(task.run)] = number
            if not running:
                break
            future = next(as_completed(running))
            number = running.pop(future)
            done[number] = future.result()
            if fates:
                task = tasks[number]
                fates.keep(task.of, task.start, task.stop, done[number])
            count = sum(len(judged) for judged in done.values())
            lives = sum(one.fate is Fate.LIVES for judged in done.values() for one in judged)
            tell(f"{count:,} of {whole:,} mutants, {lives} live: {tasks[number].of}")
    judged = [one for number in sorted(done) for one in done[number]]
    return judged, whole - len(judged)


def _is_over(until: float | None) -> bool:
    return until is not None and time.monotonic() > until


def _rows(machines: Sequence[str], alive: set[str], tell: Progress) -> Iterator[Sensitivity]:
    """Whether one more of something shows what the pinned instances do not."""
    for name in machines:
        if name in ONE_MORE:
            tell(f"{name}: what one more shows")
            left = [mutant for mutant in mutants(MACHINES[name]) if mutant.name in alive]
            yield from sensitivity(name, left)


def write(report: MutationReport, path: Path) -> None:
    """The whole report as JSON, every mutant in it.  Raises BadOperation."""
    whole: dict[str, Any] = {"verdict": report.verdict, **report.to_json()}
    whole |= {"seconds": round(report.seconds, 1), "written": int(time.time())}
    whole["version"] = version("kvclaims")
    whole["judged"] = [one.to_json() for one in report.judged]
    try:
        path.write_text(json.dumps(whole, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise BadOperation(f"cannot write {path}: {error.strerror}") from None


# --- must-fail twins ---------------------------------------------------------------------


@dataclass(frozen=True)
class Proposals:
    """Entries for `mustfail.toml`: of properties that have none, or one that does not hold."""

    entries: tuple[str, ...]
    examined: int

    @property
    def verdict(self) -> Verdict:
        return Verdict.UNKNOWN if self.entries else Verdict.HOLDS

    def to_json(self) -> dict[str, Any]:
        return {"examined": self.examined, "proposals": list(self.entries)}

    def lines(self) -> Iterator[str]:
        yield from self.entries
        yield f"{self.verdict}: {self.examined} properties, {len(self.entries)} need an entry"


def propose(machine: str | None, progress: Progress) -> Proposals:
    """Look for the must-fail twins that the table lacks.  Raises BadOperation."""
    if machine is not None and machine not in MACHINES:
        raise BadOperation(f"unknown machine {machine!r} (known: {', '.join(MACHINES)})")
    found, examined = [], 0
    for name, declared_machine in MACHINES.items():
        if machine not in (None, name):
            continue
        for prop in declared_machine.properties:
            examined += 1
            if not mustfail.is_in_order(declared_machine, prop):
                progress(f"{name}: looking for what breaks {prop.name!r}")
                proposal = mustfail.propose(declared_machine, prop)
                found.append(mustfail.as_toml(name, prop.name, proposal))
    return Proposals(tuple(found), examined)
