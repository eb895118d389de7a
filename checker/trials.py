"""Runs in ways that the runtime interface has no words for, as an engine's adapter draws them.

An engine may bring `Trials`: numbered runs of several kinds, each fixed by a seed and its number,
with its own operations and its own judge.  Fuzzing begins with some of each kind; one that breaks
a rule is kept in a file that names seed and number, and `kvclaims replay` draws it again.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Final, Protocol

from kvclaims.checker.baseline import Allowed
from kvclaims.checker.verdicts import Violation, counted
from kvclaims.spec.interface import BadOperation, Engine, EngineInfo, NotExposed
from kvclaims.spec.vocabulary import RULES, Verdict

FORMAT: Final = 1

EACH: Final = 40
"""For so many operations of fuzzing there is one trial, where no time is asked for."""

SHARE: Final = 0.1
"""Of the seconds of fuzzing, where it is asked for by time."""


@dataclass(frozen=True)
class Trial:
    """What came of one run: `kind` and `setting` say what it was about, `operations` what was done,
    in words, and `done` counts them by name."""

    kind: str
    setting: str
    operations: tuple[str, ...]
    done: Counter[str] = field(default_factory=Counter)
    finding: Violation | None = None


class Trials(Protocol):
    """What an engine brings as its attribute `trials`."""

    @property
    def kinds(self) -> Sequence[str]:
        """Runs take them in turn: that of a number is `kinds[number % len(kinds)]`."""

    @property
    def operations(self) -> Sequence[str]:
        """The names of all operations that runs are made of."""

    def run(self, seed: int, number: int) -> Trial:
        """One run to its end.  Raises `NotExposed` where the engine has no such feature."""


@dataclass
class Tried:
    """All trials of one session."""

    runs: Counter[str] = field(default_factory=Counter)
    done: Counter[str] = field(default_factory=Counter)
    allowed: Counter[str] = field(default_factory=Counter)
    not_exposed: dict[str, None] = field(default_factory=dict)
    never: tuple[str, ...] = ()
    """Operations that no run has done, and that no kind which is not exposed would have done."""
    failure: Trial | None = None
    number: int = 0
    """Of the run that failed."""

    def to_json(self) -> dict[str, Any]:
        return {
            "runs": dict(self.runs),
            "operations": dict(self.done),
            "never_done": list(self.never),
        }

    def lines(self) -> Iterator[str]:
        runs, done = sum(self.runs.values()), sum(self.done.values())
        kinds = counted(len(self.runs), "kind")
        yield f"  {counted(runs, 'trial')} of {kinds}, {counted(done, 'operation')}"
        if self.never:
            yield f"  never done in them: {', '.join(self.never)}"


def trials_of(engine: Engine) -> Trials | None:
    """What the engine brings; None where it brings nothing."""
    found: Trials | None = getattr(engine, "trials", None)
    return found


def attempt(
    trials: Trials, seed: int, permitted: Allowed, most: int, until: float | None = None
) -> Tried:
    """The first `most` trials of a seed, or so many as begin before `until` (monotonic seconds) and
    at least one of each kind; the first that breaks what is not permitted ends them."""
    tried = Tried()
    for number in count():
        if number >= len(trials.kinds):
            is_late = number >= most if until is None else time.monotonic() >= until
            if is_late:
                break
        kind = trials.kinds[number % len(trials.kinds)]
        try:
            one = trials.run(seed, number)
        except NotExposed as error:
            tried.not_exposed[f"trial: {error}"] = None
            continue
        tried.runs[kind] += 1
        tried.done.update(one.done)
        if one.finding is None:
            continue
        name = permitted(one.finding.rule, told(one))
        if name is None:
            tried.failure, tried.number = one, number
            break
        tried.allowed[name.name] += 1
    if not tried.not_exposed and tried.failure is None:
        tried.never = tuple(o for o in trials.operations if not tried.done[o])
    return tried


def told(trial: Trial) -> str:
    """A finding as the signatures of known ones see it: the operation that showed it first."""
    assert trial.finding is not None
    return f"{trial.operations[-1].partition(' ')[0]}: {trial.finding.message}"


def shown(trial: Trial) -> Iterator[str]:
    """A trial that broke a rule, for people."""
    assert trial.finding is not None
    yield f"  {Verdict.VIOLATED} {trial.finding}"
    yield f"  {trial.kind}, {trial.setting}; broken in operation {trial.finding.operation} of:"
    yield from (f"    {number:3} {line}" for number, line in enumerate(trial.operations, 1))


# --- the file ----------------------------------------------------------------------------


def write(folder: Path, engine: EngineInfo, seed: int, number: int, trial: Trial) -> Path:
    """Keep a trial that broke a rule.  Raises `BadOperation` where that is not possible."""
    assert trial.finding is not None
    rule = trial.finding.rule
    path = folder / f"{engine.name}-trial{number}-seed{seed}-{rule}.json"
    raw = {
        "format": FORMAT,
        "engine": engine.name,
        "version": engine.version,
        "rule": rule,
        "message": trial.finding.message,
        "seed": seed,
        "trial": number,
        "setting": trial.setting,
        "operations": list(trial.operations),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise BadOperation(f"cannot write {path}: {error.strerror}") from None
    return path


@dataclass(frozen=True)
class Kept:
    """A trial as its file names it."""

    engine: str
    version: str
    rule: str
    seed: int
    number: int


def read(path: Path) -> Kept | None:
    """The trial that a file names; None where it is a file of another kind.  Raises `BadOperation`
    for one that is a trial's and cannot be read."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None  # whoever reads programs says what is wrong with it
    if not isinstance(raw, dict) or "trial" not in raw:
        return None
    texts = [raw.get(name) for name in ("engine", "version", "rule")]
    numbers = [raw.get(name) for name in ("seed", "trial")]
    if (
        raw.get("format") != FORMAT
        or not all(isinstance(text, str) for text in texts)
        or not all(type(number) is int for number in numbers)
        or raw["rule"] not in RULES
    ):
        raise BadOperation(f"{path}: not a trial of this format")
    return Kept(raw["engine"], raw["version"], raw["rule"], raw["seed"], raw["trial"])


# --- drawing it again --------------------------------------------------------------------


@dataclass(frozen=True)
class TrialReport:
    """What a kept trial broke this time."""

    file: Path
    engine: EngineInfo
    kept: Kept
    trial: Trial

    @property
    def verdict(self) -> Verdict:
        return Verdict.VIOLATED if self.trial.finding else Verdict.HOLDS

    def to_json(self) -> dict[str, Any]:
        found, operations = self.trial.finding, list(self.trial.operations)
        more = {"operations": operations, "file": str(self.file)}
        return {
            "engine": vars(self.engine),
            "rule": self.kept.rule,
            "meaning": RULES[self.kept.rule].meaning,
            "found_on": self.kept.version,
            "operations": len(operations),
            "violations": [] if found is None else [{**found.to_json(), **more}],
            "not_exposed": [],
        }

    def lines(self) -> Iterator[str]:
        yield f"{self.engine.name} {self.engine.version} ({self.engine.path})"
        yield f"  the file tells of {self.kept.rule}: {RULES[self.kept.rule].meaning}"
        if self.trial.finding:
            yield from shown(self.trial)
        else:
            done = counted(len(self.trial.operations), "operation")
            yield f"  {self.trial.kind}, {self.trial.setting}: nothing is broken by {done}"
        yield f"{self.verdict}"


def again(path: Path, kept: Kept, engine: Engine) -> TrialReport:
    """Draw a kept trial again.  Raises `BadOperation` for an engine that has none."""
    trials = trials_of(engine)
    if trials is None:
        raise BadOperation(f"engine {engine.name} has no trials")
    try:
        trial = trials.run(kept.seed, kept.number)
    except NotExposed as error:
        raise BadOperation(f"{path}: not exposed: {error}") from None
    return TrialReport(path, engine.info(), kept, trial)
