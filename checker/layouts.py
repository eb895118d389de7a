"""Pools whose KV groups an engine's adapter names and judges itself: arrangements.

An engine that has them says so by an attribute `layouts` (`Layouts`).  A program for one is a
program like any other: it is fuzzed, made shorter, kept in a file and replayed.  Which groups there
are, how an arrangement is driven and what it has to keep is the adapter's affair: the runtime
interface has one block size and no claims over groups of many kinds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from kvclaims.checker.baseline import Allowed
from kvclaims.checker.engines import first_line
from kvclaims.checker.supervise import Program, supervise
from kvclaims.checker.verdicts import Violation
from kvclaims.spec.interface import BadOperation, Engine, NotExposed, PoolConfig
from kvclaims.spec.operations import Operation

SHARE: Final = 500
"""Of so many operations of fuzzing, one run goes to each arrangement."""


@dataclass(frozen=True)
class LayoutPool(PoolConfig):
    """A pool of `usable` blocks, shared by the KV groups that `layout` names; `block_size` are the
    tokens that contents are counted in."""

    layout: str = ""


class LayoutRun(Protocol):
    """One run of one arrangement."""

    @property
    def steps(self) -> int:
        """Scheduling steps so far."""

    @property
    def reads(self) -> int:
        """Tokens and states that steps have read from blocks so far."""

    def do(self, operation: Operation) -> Sequence[tuple[str, str]]:
        """Perform an operation; the rules it broke, with what was seen.  `BadOperation` where it
        makes no sense now: then nothing has changed."""

    def close(self) -> None: ...


class Layouts(Protocol):
    """The arrangements of an engine."""

    def names(self) -> tuple[str, ...]: ...
    def draw(self, name: str, seed: str) -> Program:
        """A random program; the same seed, the same program."""

    def open(self, pool: LayoutPool) -> LayoutRun:
        """A fresh run.  `NotExposed` where the engine has no such groups."""


@dataclass
class Tally:
    """What was done to the arrangements of an engine."""

    runs: int = 0
    operations: int = 0
    steps: int = 0
    reads: int = 0
    known: Counter[str] = field(default_factory=Counter)
    not_exposed: dict[str, None] = field(default_factory=dict)


def layouts_of(engine: Engine) -> Layouts | None:
    """The arrangements of an engine, None where it has none."""
    found: Layouts | None = getattr(engine, "layouts", None)
    return found


def judge(
    engine: Engine, program: Program, allowed: Allowed, tally: Tally | None = None
) -> tuple[Violation, ...]:
    """Run a program on its arrangement until an operation breaks a rule; what that broke.

    What the engine is known to break is counted; the run goes on, or ends where its state is not
    sound any more.  Raises `NotExposed` and `BadOperation`.
    """
    layouts = layouts_of(engine)
    pool = program.config
    if layouts is None or not isinstance(pool, LayoutPool):
        raise NotExposed("KV groups by name")
    tally = tally or Tally()
    try:
        run = layouts.open(pool)
    except (NotExposed, BadOperation):
        raise
    except Exception as error:  # noqa: BLE001  (whatever the engine raises, it fails by it)
        told = f"opening the pool raised {type(error).__name__}: {first_line(error)}"
        return (Violation("B9", told, operation=0),)
    tally.runs += 1
    found = _judged(run, program, allowed, tally)
    tally.steps += run.steps
    tally.reads += run.reads
    return found


def run_program(
    engine: Engine, oracle: Engine | None, program: Program, allowed: Allowed
) -> tuple[Violation, ...]:
    """What a program breaks, on a pool of the runtime interface or on an arrangement."""
    if isinstance(program.config, LayoutPool):
        return judge(engine, program, allowed)
    return supervise(engine, oracle, program, allowed)


def _judged(
    run: LayoutRun, program: Program, allowed: Allowed, tally: Tally
) -> tuple[Violation, ...]:
    for number, operation in enumerate(program.operations, 1):
        tally.operations += 1
        try:
            broken = run.do(operation)
        except BadOperation:
            continue  # refused, and nothing has changed
        news = []
        for rule, message in broken:
            # A drain is made of steps, and what is known of an engine is told of these.
            doing = "step" if operation.op == "drain" else operation.op
            known = allowed(rule, f"{doing}: {message}")
            if known is None:
                news.append(Violation(rule, message, operation=number))
                continue
            tally.known[known.name] += 1
            if not known.goes_on:
                return ()  # what comes of it is no news either
        if news:
            return tuple(news)
    run.close()
    return ()
