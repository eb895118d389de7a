"""Random acts on a pool with a tier in files, each judged by `tierworld`; start at `fuzz`.

An act is a name and numbers that mean something in every state, so a run that breaks a rule stays
one when acts are left out of it: it is made shorter in that way, and written down.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from kvclaims.bridge.vllm.serving_bench import quiet
from kvclaims.bridge.vllm.tierprograms import run_program
from kvclaims.bridge.vllm.tierworld import TierRun, World, draw_world
from kvclaims.checker.tiers import FORMAT, ProgramReport
from kvclaims.checker.verdicts import Progress, Violation, counted
from kvclaims.spec.interface import BadOperation, EngineInfo, NotExposed
from kvclaims.spec.vocabulary import RULES, Verdict

DEFAULT_ACTS: Final = 6000
LENGTH: Final = (40, 200)
SHRINK_S: Final = 60.0

MET: Final = (
    *("resident_claim_offloaded", "restoration_required", "resident_claim_restored"),
    *("restoration_failed", "resident_claim_harmed", "block_lost_after_release"),
    *("resident_claim_unsaved", "harmed early by own_choice", "harmed early by fault"),
    *("abort of one that loads", "loss on the device", "reset", "sleep", "kill"),
    *("harm 0", "harm 1", "harm 2", "harm 3"),
)
"""What a run of some length has to have met, or it shows nothing."""

MET_FROM: Final = 6000
"""Acts from which on that is asked for."""

Act = tuple[Any, ...]
"""Its name, and whole numbers."""


def _blocks(chance: random.Random) -> int:
    return 1 + min(11, int(chance.expovariate(0.3)))


_Draw = Callable[[random.Random], tuple[int, ...]]


def _ask(chance: random.Random) -> tuple[int, ...]:
    answer = chance.choice([1, 1, 2, 6])
    return chance.randrange(9), _blocks(chance), chance.randrange(4), answer, chance.random() < 0.9


def _claim(chance: random.Random) -> tuple[int, ...]:
    who, what = chance.randrange(9), chance.randrange(9)
    more = chance.randrange(99), chance.random() < 0.6, chance.choice([0, 0, 3, 5])
    return who, what, _blocks(chance), *more


_DRAWN: Final[dict[str, tuple[int, _Draw]]] = {
    "ask": (60, _ask),
    "step": (60, lambda c: (c.choice([1, 1, 2, 6]),)),
    "dispatch": (8, lambda _: ()),
    "complete": (8, lambda _: ()),
    "claim": (26, _claim),
    "piece": (8, lambda c: (c.randrange(9), c.randrange(9), c.randrange(6), _blocks(c))),
    "again": (8, lambda c: (c.randrange(99), c.randrange(9), _blocks(c))),
    "change": (16, lambda c: (c.randrange(99), c.randrange(3))),
    "wait": (8, lambda c: (c.randrange(1, 4),)),
    "abort": (20, lambda c: (c.randrange(99),)),
    "harm": (10, lambda c: (c.randrange(99), c.randrange(4), c.randrange(10**4))),
    "fill": (3, lambda c: (c.random() < 0.4,)),
    "pace": (8, lambda c: (c.choice([0, 1, 1, 2, 4]),)),
    "lose": (2, lambda c: (c.randrange(9), c.randrange(6))),
    "reset": (1, lambda _: ()),
    "sleep": (1, lambda _: ()),
    "kill": (2, lambda c: (c.randrange(999),)),
}
"""Acts of `TierRun`: how often each, and its numbers."""


@dataclass(frozen=True)
class TierProgram:
    """A run: where it begins, and what is done."""

    world: World
    acts: tuple[Act, ...]

    def to_json(self) -> dict[str, Any]:
        return {"world": self.world.to_json(), "acts": [list(act) for act in self.acts]}


def draw(chance: random.Random) -> TierProgram:
    kinds, weights = list(_DRAWN), [weight for weight, _ in _DRAWN.values()]
    count = chance.randint(*LENGTH)
    chosen = chance.choices(kinds, weights, k=count)
    acts = tuple((kind, *(int(n) for n in _DRAWN[kind][1](chance))) for kind in chosen)
    return TierProgram(draw_world(chance), acts)


@dataclass
class Ran:
    """What a run did, and what it broke first."""

    acts: int = 0
    monitored: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    finding: Violation | None = None


def run(program: TierProgram) -> Ran:
    """Do a program in a folder of its own; it ends with the first act that breaks a rule."""
    ran = Ran()
    with TemporaryDirectory(prefix="kvclaims-tier-") as folder, quiet():
        world = TierRun(program.world, Path(folder))
        for act in (*program.acts, ("end",)):
            ran.acts += 1
            try:
                getattr(world, act[0])(*act[1:])
                if act[0] != "end":
                    world.judge()
            except Exception as error:  # noqa: BLE001  (whatever an engine raises is a finding)
                told = f"{act[0]} raised {type(error).__name__}: {error}"
                world.findings.append(Violation("B9", told))
            if world.findings:
                break
        ran.monitored, ran.counts = world.monitored, world.counts
        ran.finding = world.findings[0] if world.findings else None
    return ran


@dataclass(frozen=True)
class TierFuzzReport:
    """What was done to a tier, and what it broke."""

    engine: EngineInfo
    seed: int
    operations: int
    runs: int
    monitored: int
    counts: dict[str, int]
    asked_for: bool = True
    """Whether enough was done to have met all of `MET`."""
    program: TierProgram | None = None
    finding: Violation | None = None
    file: Path | None = None
    not_exposed: str = ""
    """Why this version has no tier."""

    @property
    def never_met(self) -> list[str]:
        return [name for name in MET if not self.counts.get(name)]

    @property
    def verdict(self) -> Verdict:
        if self.finding is not None:
            return Verdict.VIOLATED
        if self.not_exposed:
            return Verdict.NOT_EXPOSED
        if not self.runs or (self.asked_for and self.never_met):
            return Verdict.VACUOUS
        return Verdict.HOLDS

    def to_json(self) -> dict[str, Any]:
        violations = []
        if self.finding is not None and self.program is not None:
            operations = [{"op": act[0], "numbers": list(act[1:])} for act in self.program.acts]
            file = str(self.file) if self.file else None
            told = {**self.finding.to_json(), "operations": operations, "file": file}
            violations.append({**told, "places": []})
        return {
            "engine": vars(self.engine),
            "seed": self.seed,
            "runs": self.runs,
            "operations": self.operations,
            "monitored_steps": self.monitored,
            "met": self.counts,
            "never_met": self.never_met,
            "violations": violations,
            "not_exposed": [self.not_exposed] if self.not_exposed else [],
        }

    def lines(self) -> Iterator[str]:
        yield f"{self.engine.name} {self.engine.version} ({self.engine.path}), a tier in files"
        yield (
            f"  {counted(self.operations, 'act')} in {counted(self.runs, 'run')}, "
            f"{counted(self.monitored, 'monitored step')}, seed {self.seed}"
        )
        if self.not_exposed:
            yield f"  {Verdict.NOT_EXPOSED}: {self.not_exposed}"
        for name in () if self.not_exposed else MET:
            if self.counts.get(name):
                yield f"  {name}: {counted(self.counts[name], 'time')}"
        if self.never_met and not self.not_exposed:
            yield f"  never met: {', '.join(self.never_met)}"
        if self.finding is not None and self.program is not None:
            yield f"  {Verdict.VIOLATED} {self.finding}"
            yield f"  {json.dumps(self.program.world.to_json())}"
            yield from (f"  {' '.join(map(str, act))}" for act in self.program.acts)
            if self.file is not None:
                yield f"  run it again: kvclaims replay {self.file}"
        yield f"{self.verdict}"


def fuzz(
    engine: EngineInfo,
    acts: int | None,
    seconds: float | None,
    seed: int,
    progress: Progress,
    output: Path | None = None,
) -> TierFuzzReport:
    """Runs until so many acts are done, or so many seconds are over, or a rule is broken."""
    most = None if seconds else acts or DEFAULT_ACTS
    until = time.monotonic() + (seconds or 0.0)
    counts: Counter[str] = Counter()
    done = runs = monitored = 0
    chance = random.Random(seed)
    while done < most if most is not None else time.monotonic() < until:
        program = draw(chance)
        try:
            ran = run(program)
        except NotExposed as error:
            return TierFuzzReport(engine, seed, 0, 0, 0, {}, not_exposed=str(error))
        done, runs, monitored = done + ran.acts, runs + 1, monitored + ran.monitored
        counts.update(ran.counts)
        if ran.finding is not None:
            progress("making it shorter")
            program, finding = shorter(program, ran.finding)
            file = None if output is None else write(output, engine, seed, program, finding)
            told = (engine, seed, done, runs, monitored, dict(counts))
            return TierFuzzReport(*told, program=program, finding=finding, file=file)
        if runs % 10 == 0:
            progress(f"fuzzing the tier: {done} acts")
    asked_for = done >= MET_FROM
    return TierFuzzReport(engine, seed, done, runs, monitored, dict(counts), asked_for)


def shorter(program: TierProgram, finding: Violation) -> tuple[TierProgram, Violation]:
    """The same rule broken with fewer acts, as few as a minute allows to find."""
    until = time.monotonic() + SHRINK_S
    acts = list(program.acts)
    size = len(acts) // 2
    while size and time.monotonic() < until:
        at = 0
        while at < len(acts) and time.monotonic() < until:
            fewer = acts[:at] + acts[at + size :]
            found = run(TierProgram(program.world, tuple(fewer))).finding
            if found is not None and found.rule == finding.rule:
                acts, finding = fewer, found
            else:
                at += size
        size //= 2
    return TierProgram(program.world, tuple(acts)), finding


def program(engine: EngineInfo, name: str) -> ProgramReport:
    """A program of `tierprograms`."""
    return run_program(engine, name)


# -- files -----------------------------------------------------------------------------------------


def write(
    folder: Path, engine: EngineInfo, seed: int, program: TierProgram, finding: Violation
) -> Path:
    """Write a run that breaks a rule; `BadOperation` where that is not possible."""
    path = folder / f"{engine.name}-tier-seed{seed}-{finding.rule}.json"
    told = {"engine": engine.name, "rule": finding.rule, "message": finding.message}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"format": FORMAT, **told, **program.to_json()}, indent=1))
    except OSError as error:
        raise BadOperation(f"cannot write {path}: {error.strerror}") from None
    return path


def parse(raw: Any) -> TierProgram:
    """What `write` has written; `BadOperation` for anything else."""
    try:
        world = World(**raw["world"])
        acts = tuple((name, *numbers) for name, *numbers in raw["acts"])
        right = raw["rule"] in RULES and world.is_right and all(map(_is_act, acts))
    except (KeyError, TypeError, ValueError):
        right = False
    if not right:
        raise BadOperation("no run of a tier")
    return TierProgram(world, acts)


def _is_act(act: Act) -> bool:
    name, *numbers = act
    if name not in _DRAWN or any(type(n) is not int or n < 0 for n in numbers):
        return False
    return len(numbers) == len(_DRAWN[name][1](random.Random(0)))


def replay(engine: EngineInfo, raw: Any, file: Path) -> TierFuzzReport:
    """Do the run of a file again."""
    program = parse(raw)
    ran = run(program)
    told = (engine, 0, ran.acts, 1, ran.monitored, dict(ran.counts), False)
    if ran.finding is None:
        return TierFuzzReport(*told)
    return TierFuzzReport(*told, program=program, finding=ran.finding, file=file)
