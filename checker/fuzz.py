"""Random operations on an engine, drawn by hypothesis and judged by a `Supervisor`.

Start at `fuzz`.  Hypothesis draws byte strings, `kvclaims.checker.drawing` makes operations of
them that fit the state at hand.  Runs are steered towards those in which requests are refused,
deferred and preempted, and towards steps that were rarely seen in such a situation; a run that
leaves too many steps of the machine untaken shows nothing and is VACUOUS.
"""

from __future__ import annotations

import gc
import shlex
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Final

import hypothesis
from hypothesis import HealthCheck, Phase, Verbosity, given, settings, target
from hypothesis import strategies as st
from hypothesis.configuration import set_hypothesis_home_dir
from hypothesis.database import DirectoryBasedExampleDatabase, ExampleDatabase
from hypothesis.internal.conjecture import providers

from kvclaims.checker import engines, trials
from kvclaims.checker.baseline import Allowed, KnownFinding, allowing
from kvclaims.checker.counterexample import (
    FOLDER,
    Counterexample,
    described,
    operations_json,
    shortest,
    simplest,
)
from kvclaims.checker.drawing import CODE, POOL_CODE, Drawer, draw_config
from kvclaims.checker.layouts import SHARE, Tally, judge, layouts_of, run_program
from kvclaims.checker.scenes import scenes
from kvclaims.checker.supervise import (
    Crash,
    Program,
    Supervisor,
    features_of,
    open_supervised,
    oracle_for,
    warm_up,
)
from kvclaims.checker.verdicts import Progress, Violation, counted
from kvclaims.spec import pool
from kvclaims.spec.interface import (
    BadOperation,
    Engine,
    EngineInfo,
    Feature,
    NotExposed,
    PoolConfig,
)
from kvclaims.spec.operations import Operation, parse
from kvclaims.spec.vocabulary import Verdict

DEFAULT_STEPS: Final = 3000
"""Operations where neither a number nor a time is asked for."""

EXAMPLES: Final = 100
"""Runs in one call of hypothesis: the second half of them is steered by `target`."""

LENGTH: Final = (30, 90)
"""Operations in one run, at least and at most."""

SMALL_BLOCK: Final = 4
"""Tokens in a block where the engine leaves it open: decoding fills blocks soon."""

AUDIT_EVERY: Final = 4

FLOOR: Final = 18
"""Steps of the machine that a run of some length has to take, or it shows nothing."""

FLOOR_FROM: Final = 1000
"""Operations from which on the floor is asked for where nobody gave one."""

SHRINK_S: Final = 60.0
"""Seconds in which a failure is made shorter."""

LAYOUT_PART: Final = 0.2
"""Of the time for fuzzing, what runs of arrangements of KV groups take."""

MOST_ROUNDS: Final = 1000
"""Runs of each arrangement, where only time ends them."""

PRESSURE: Final = {
    "active_request_refused": 4,
    "active_request_deferred": 2,
    "active_request_preempted": 6,
    "resident_claim_harmed": 3,
    "resident_claim_demoted": 1,
    "block_lost_after_release": 2,
    "allocation_victim_selected": 1,
    "external_load_finished": 2,
}
"""Events that a run is steered towards, with their weight."""


_LOOK: Final = "_get_local_constants"
_CONSTANTS: Final = "_local_constants"
"""Where hypothesis looks for constants, and keeps what it found."""


class Broken(AssertionError):
    """A rule was broken in this run."""


class _Enough(BaseException):
    """Leave hypothesis at once: the budget is spent.  No `Exception`, so nothing catches it."""


@dataclass
class Ways:
    """How to fuzz: see the options of `kvclaims fuzz`."""

    steps: int | None = None
    seconds: float | None = None
    seed: int = 0
    folder: Path = FOLDER
    floor: int | None = None
    known: tuple[KnownFinding, ...] | None = None
    """What may be broken, by name; None stands for what the engine's own file says."""
    examples: Path | None = None
    """Folder in which hypothesis keeps examples between runs."""


@dataclass
class _Session:
    """What one fuzzing run shares over all its examples."""

    engine: Engine
    oracle: Engine | None
    block_size: int
    limit: int | None
    seconds: float | None
    until: float | None
    """When the generated programs end; arrangements and trials come after them."""
    progress: Progress
    permitted: Allowed
    features: frozenset[Feature] = frozenset()
    operations: int = 0
    steps: int = 0
    events: int = 0
    monitored: int = 0
    cpu_seconds: float = 0.0
    """Of the processor, in the runs that are counted here: not in scenes, arrangements, trials."""
    reads: int = 0
    runs: int = 0
    fired: Counter[str] = field(default_factory=Counter)
    edges: Counter[tuple[str, str]] = field(default_factory=Counter)
    allowed: Counter[str] = field(default_factory=Counter)
    not_exposed: dict[str, None] = field(default_factory=dict)
    tally: Tally = field(default_factory=Tally)
    """Of the arrangements of KV groups."""
    failure: tuple[Program, Violation] | None = None
    is_over: bool = False

    @property
    def has_ended(self) -> bool:
        return self.is_over or self.failure is not None

    def spend(self) -> None:
        """One operation more; raises `_Enough` where there is no budget for it."""
        if self.limit is not None:
            self.is_over = self.operations >= self.limit
        elif self.until is not None:
            self.is_over = time.monotonic() >= self.until
        if self.is_over:
            raise _Enough
        self.operations += 1
        if self.operations % 500 == 0:
            self.progress(f"fuzzing {self.engine.name}: {self.operations} operations")

    def broke(self, program: Program, found: Sequence[Violation]) -> None:
        """A run ends with what it broke."""
        if self.failure is None:
            self.failure = (program, found[0])
        raise Broken(str(found[0]))

    def ended(self, supervisor: Supervisor) -> None:
        """Add a run up, and steer the next ones: towards pressure, and towards what is rare."""
        rare = sum(1 / (1 + self.edges[edge]) for edge in supervisor.edges)
        self.runs += 1
        self.steps += supervisor.steps
        self.events += supervisor.events
        self.monitored += supervisor.monitor.steps
        self.reads += supervisor.serving.reads
        self.fired.update(supervisor.monitor.fired)
        self.edges.update(supervisor.edges)
        self.allowed.update(supervisor.known_findings)
        self.not_exposed.update(supervisor.not_exposed)
        pressure = sum(PRESSURE.get(e, 0) * n for e, n in supervisor.event_kinds.items())
        target(float(pressure), label="pressure")
        target(rare, label="rare steps")


def _run(session: _Session, pool_code: bytes, codes: Sequence[bytes]) -> None:
    """One run: a pool, and operations until one breaks a rule or there are no more."""
    config = draw_config(pool_code, session.block_size, session.features)
    supervisor = _opened(session, config)
    if supervisor is None:
        return
    drawer = Drawer(config, session.features)
    done: list[Operation] = []
    found: Sequence[Violation] = supervisor.findings
    for code in codes:
        if found or not supervisor.is_alive:
            break
        session.spend()
        operation = parse(drawer.draw(code, supervisor.seen))
        done.append(operation)
        found = supervisor.do(operation)
    session.ended(supervisor)
    found = found or supervisor.close()
    if found:
        session.broke(Program(config, tuple(done)), found)


def _opened(session: _Session, config: PoolConfig) -> Supervisor | None:
    session.spend()
    try:
        return open_supervised(
            session.engine,
            session.oracle,
            config,
            audit_every=AUDIT_EVERY,
            allowed=session.permitted,
        )
    except NotExposed as error:
        session.not_exposed[f"pool: {error}"] = None
    except Crash as crash:
        session.broke(Program(config, ()), [Violation("B9", str(crash), operation=0)])
    return None


# --- the command -------------------------------------------------------------------------


@dataclass(frozen=True)
class FuzzReport:
    """What was done to an engine and what it broke."""

    engine: EngineInfo
    seed: int
    operations: int
    steps: int
    runs: int
    events: int
    monitored: int
    reads: int
    edges: int
    floor: int
    never_fired: tuple[str, ...]
    allowed: dict[str, int]
    not_exposed: tuple[str, ...]
    seconds: float
    cpu_seconds: float
    """Of the processor, drawing and judging the `runs`."""
    program: Program | None = None
    finding: Violation | None = None
    file: Path | None = None
    arranged: Tally = field(default_factory=Tally)
    """What was done to the engine's arrangements of KV groups."""
    tried: trials.Tried | None = None
    """What the engine's own trials did; None where it brings none, or a program failed before."""
    unwritten: str = ""
    """Why the counterexample could not be written; the finding stands all the same."""

    @property
    def verdict(self) -> Verdict:
        if self.finding is not None:
            return Verdict.VIOLATED
        taken = len(pool.ACTIONS) - len(self.never_fired)
        return Verdict.HOLDS if taken >= max(self.floor, 1) else Verdict.VACUOUS

    @property
    def rate(self) -> float:
        """Allocator operations of the runs that were judged in a second of processor time.

        One is a step of a block's life that the engine tells and the monitor judges: admit, take,
        share, register, evict, drop and the like, not a call of the fuzzer, which makes none or
        many.
        """
        return self.monitored / self.cpu_seconds if self.cpu_seconds else 0.0

    @property
    def _trial(self) -> trials.Trial:
        """The trial that failed: what was found in no program was found in one."""
        assert self.tried is not None
        assert self.tried.failure is not None
        return self.tried.failure

    def to_json(self) -> dict[str, Any]:
        violations = []
        if self.finding is not None and self.program is not None:
            violations.append(
                {
                    **self.finding.to_json(),
                    "operations": operations_json(self.program.operations),
                    "file": str(self.file) if self.file else None,
                }
            )
        elif self.finding is not None:
            violations.append(
                {
                    **self.finding.to_json(),
                    "operations": list(self._trial.operations),
                    "file": str(self.file) if self.file else None,
                }
            )
        return {
            "engine": vars(self.engine),
            "seed": self.seed,
            "runs": self.runs,
            "operations": self.operations,
            "steps": self.steps,
            "events": self.events,
            "monitored_steps": self.monitored,
            "blocks_read": self.reads,
            "edges": self.edges,
            "floor": self.floor,
            "never_fired": list(self.never_fired),
            "known": dict(self.allowed),
            "arrangements": {
                name: getattr(self.arranged, name)
                for name in ("runs", "operations", "steps", "reads")
            },
            **({} if self.tried is None else {"trials": self.tried.to_json()}),
            "violations": violations,
            "not_exposed": list(self.not_exposed),
        }

    def lines(self) -> Iterator[str]:
        yield f"{self.engine.name} {self.engine.version} ({self.engine.path})"
        yield (
            f"  {counted(self.operations, 'operation')} in {counted(self.runs, 'run')}, "
            f"{counted(self.steps, 'step')}, {counted(self.events, 'event')}, seed {self.seed}"
        )
        yield (
            f"  {counted(self.monitored, 'monitored step')} ({self.rate:,.0f} a CPU second), "
            f"{counted(self.reads, 'block')} read, {counted(self.edges, 'edge')} "
            "of step and situation"
        )
        if self.arranged.runs:
            yield (
                f"  KV groups of many kinds: {counted(self.arranged.runs, 'run')}, "
                f"{counted(self.arranged.operations, 'operation')}, "
                f"{counted(self.arranged.steps, 'step')}, {counted(self.arranged.reads, 'read')}"
            )
        if self.tried is not None:
            yield from self.tried.lines()
        if self.never_fired:
            yield f"  never taken: {', '.join(self.never_fired)}"
        if self.verdict is Verdict.VACUOUS:
            yield f"  too little was tried: {self.floor} kinds of step are the least"
        for name, times in self.allowed.items():
            yield f"  known finding {name}: {counted(times, 'time')}"
        for name in self.not_exposed:
            yield f"  {Verdict.NOT_EXPOSED}: {name}"
        if self.finding is not None:
            if self.program is not None:
                yield from shown(self.finding, self.program)
            else:
                yield from trials.shown(self._trial)
            if self.file is not None:
                path = engines.given_path()
                where = f" --engine-path {shlex.quote(path)}" if path else ""
                yield f"  run it again: kvclaims replay {self.file}{where}"
            else:
                yield f"  not kept: {self.unwritten}"
        yield f"{self.verdict}"


def shown(finding: Violation, program: Program) -> Iterator[str]:
    """A violation for people: the rule, the step, the operations, before and after."""
    yield f"  {Verdict.VIOLATED} {finding}"
    yield f"  {_shown_pool(program.config)}; broken in operation {finding.operation} of:"
    yield from (f"    {line}" for line in described(program))
    for name in {**finding.before, **finding.after}:
        before, after = finding.before.get(name, "-"), finding.after.get(name, "-")
        yield f"    {name}: {before} → {after}"


def _shown_pool(config: PoolConfig) -> str:
    plain = type(config)(config.usable)
    more = [
        f"{name} {value}"
        for name, value in vars(config).items()
        if name not in ("usable", "block_size", "defer_limit") and value != getattr(plain, name)
    ]
    size = f"pool of {config.usable} blocks of {config.block_size} tokens"
    return ", ".join([size, f"defer limit {config.defer_limit}", *more])


def fuzz(
    engine: Engine,
    steps: int | None,
    seconds: float | None,
    seed: int,
    progress: Progress,
    folder: Path = FOLDER,
    ways: Ways | None = None,
) -> FuzzReport:
    """Do `steps` operations, or as many as fit in `seconds`; stop at the first broken rule.

    The same seed and steps make the same run (unless examples are kept between runs: those come
    first).  A counterexample is written into `folder`.
    """
    ways = ways or Ways(steps, seconds, seed, folder)
    progress(f"starting {engine.name}")
    warm_up(engine, block_size_of(engine))
    started = time.monotonic()
    brought = trials.trials_of(engine)
    session = _session(engine, ways, progress)
    with _settled_memory():
        search(session, ways.seed, ways.examples)
        tried = None
        if brought is not None and session.failure is None:
            tried = _tried(session, ways, brought)
    spent = time.monotonic() - started
    program = finding = file = None
    unwritten = ""
    if tried is not None and tried.failure is not None:
        finding = tried.failure.finding
        try:
            file = trials.write(ways.folder, engine.info(), ways.seed, tried.number, tried.failure)
        except BadOperation as error:
            unwritten = str(error)
    if session.failure is not None:
        progress("making the counterexample shorter")
        program, finding = reduced(session)
        example = Counterexample(
            engine.name,
            program,
            finding.rule,
            finding.message,
            ways.seed,
            version=engine.info().version,
        )
        try:
            file = example.write(ways.folder)
        except BadOperation as error:
            unwritten = str(error)
    never = tuple(action.name for action in pool.ACTIONS if not session.fired[action.name])
    floor = ways.floor
    if floor is None:
        floor = FLOOR if session.operations >= FLOOR_FROM else 0
    for feature in sorted(set(Feature) - session.features):
        session.not_exposed[f"feature {feature}"] = None
    return FuzzReport(
        engine=engine.info(),
        seed=ways.seed,
        operations=session.operations,
        steps=session.steps,
        runs=session.runs,
        events=session.events,
        monitored=session.monitored,
        reads=session.reads,
        edges=len(session.edges),
        floor=floor,
        never_fired=never,
        allowed=dict(session.allowed + session.tally.known),
        arranged=session.tally,
        tried=tried,
        not_exposed=tuple(session.not_exposed),
        seconds=spent,
        cpu_seconds=session.cpu_seconds,
        program=program,
        finding=finding,
        file=file,
        unwritten=unwritten,
    )


def hunt(engine: Engine, steps: int, seed: int) -> Program | None:
    """A program that breaks a rule, as short as it could be made; None if none was found."""
    session = _session(engine, Ways(steps, None, seed), lambda _: None)
    search(session, seed)
    return reduced(session)[0] if session.failure is not None else None


def first_failure(engine: Engine, ways: Ways) -> tuple[Program, Violation] | None:
    """The first program that breaks a rule, as it was found, with what it broke; None if none
    was found."""
    session = _session(engine, ways, lambda _: None)
    search(session, ways.seed)
    return session.failure


def block_size_of(engine: Engine) -> int:
    """Tokens in a block of the pools that are drawn for the engine."""
    size: int = getattr(engine, "fuzz_block_size", getattr(engine, "block_size", SMALL_BLOCK))
    return size


def _rare(session: _Session) -> None:
    """The situations that an engine says are rare, each as a run of its own; they are beside the
    budget, and end at the first that breaks a rule."""
    file: Path | None = getattr(session.engine, "situations", None)
    for scene in scenes(file) if file is not None else ():
        program = Program(scene.config, scene.operations)
        try:
            found = run_program(session.engine, session.oracle, program, session.permitted)
        except NotExposed as error:
            session.not_exposed[f"pool: {error}"] = None
            continue
        if found:
            session.failure = (program, found[0])
            return


def _arranged(session: _Session, seed: int) -> None:
    """Runs of the engine's own arrangements of KV groups, the same number of each and beside the
    budget; in a budget of time they take a fixed part of it."""
    layouts = layouts_of(session.engine)
    if layouts is None:
        return
    until = None if session.seconds is None else time.monotonic() + LAYOUT_PART * session.seconds
    rounds = MOST_ROUNDS if session.limit is None else max(1, session.limit // SHARE)
    for number in range(rounds):
        for name in layouts.names():
            if until is not None and time.monotonic() > until:
                return
            program = layouts.draw(name, f"{name}/{seed}/{number}")
            try:
                found = judge(session.engine, program, session.permitted, session.tally)
            except NotExposed as error:
                session.not_exposed[str(error)] = None
                continue
            if found:
                session.failure = (program, found[0])
                return


def _tried(session: _Session, ways: Ways, brought: trials.Trials) -> trials.Tried:
    """The engine's own trials, beside the budget where it counts operations.

    They come last: what a program shows as well it shows with fewer operations.
    """
    session.progress(f"trials on {session.engine.name}")
    until = None
    if ways.steps is None and ways.seconds is not None:
        until = time.monotonic() + trials.SHARE * ways.seconds
    most = (session.limit or 0) // trials.EACH
    tried = trials.attempt(brought, ways.seed, session.permitted, most, until)
    session.allowed.update(tried.allowed)
    session.not_exposed.update(tried.not_exposed)
    return tried


def _session(engine: Engine, ways: Ways, progress: Progress) -> _Session:
    any_limit = ways.steps is not None or ways.seconds is not None
    later = (LAYOUT_PART if layouts_of(engine) is not None else 0.0) + (
        trials.SHARE if trials.trials_of(engine) is not None else 0.0
    )
    return _Session(
        engine=engine,
        oracle=oracle_for(engine),
        block_size=block_size_of(engine),
        limit=ways.steps if any_limit else DEFAULT_STEPS,
        seconds=ways.seconds,
        until=None if ways.seconds is None else time.monotonic() + (1 - later) * ways.seconds,
        progress=progress,
        permitted=allowing(engine, ways.known),
        features=features_of(engine),
    )


_CODES: Final = st.lists(
    st.binary(min_size=CODE, max_size=CODE), min_size=LENGTH[0], max_size=LENGTH[1]
)
_POOLS: Final = st.binary(min_size=POOL_CODE, max_size=POOL_CODE)


def search(session: _Session, seed: int, examples: Path | None = None) -> None:
    """Look for a failure until the session's budget is spent: in what is rare, in programs that
    hypothesis generates, in arrangements.

    The first two come first since their failures say more: they are compared with the machine, and
    their last step is found in the engine's source.
    """
    kept = None
    if examples is not None:
        try:  # hypothesis says nothing where it cannot keep them
            examples.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadOperation(f"cannot write {examples}: {error.strerror}") from None
        kept = DirectoryBasedExampleDatabase(examples)
    _rare(session)
    if session.failure is None:
        _generate(session, seed, kept)
    if session.failure is None:
        _arranged(session, seed)


def _generate(session: _Session, seed: int, kept: ExampleDatabase | None) -> None:
    """Let hypothesis generate programs until they have spent their part, or one fails."""
    for batch in count():
        used = time.process_time()
        try:
            with _own_storage():
                _searching(session, seed * 1_000_003 + batch, kept)()
        except _Enough:
            return
        except Exception:
            # Hypothesis complains in its own way of a run that was cut short.
            if session.has_ended:
                return
            raise
        finally:
            session.cpu_seconds += time.process_time() - used


def _searching(session: _Session, seed: int, kept: ExampleDatabase | None) -> Callable[[], None]:
    """One call of hypothesis, as a test without arguments."""
    phases = (Phase.generate, Phase.target)

    @hypothesis.seed(seed)
    @settings(
        max_examples=EXAMPLES,
        database=kept,
        deadline=None,
        phases=(Phase.reuse, *phases) if kept is not None else phases,
        suppress_health_check=list(HealthCheck),
        verbosity=Verbosity.quiet,
        print_blob=False,
        report_multiple_bugs=False,
    )
    @given(pool_code=_POOLS, codes=_CODES)
    def searching(pool_code: bytes, codes: list[bytes]) -> None:
        _run(session, pool_code, codes)

    return searching


@contextmanager
def _settled_memory() -> Iterator[None]:
    """What an engine brought with it lasts: Python looks for garbage among what comes later."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def _own_storage() -> Iterator[None]:
    """Hypothesis keeps files of its own; they go where nobody sees them.

    Nor does it read all source that is loaded for constants to draw: beside an engine that takes
    more than a second, and what a seed draws would change with any byte string in the source.  A
    version that looks for none, or in another way, is left as it is.
    """
    look, known = getattr(providers, _LOOK, None), getattr(providers, _CONSTANTS, None)
    with tempfile.TemporaryDirectory(prefix="kvclaims-fuzz-") as folder:
        set_hypothesis_home_dir(folder)
        if look is not None and known is not None:
            setattr(providers, _LOOK, lambda: known)
        try:
            yield
        finally:
            set_hypothesis_home_dir(None)
            if look is not None:
                setattr(providers, _LOOK, look)


def reduced(session: _Session) -> tuple[Program, Violation]:
    """The failure with every operation left out that it does not need, and the rest plain."""
    assert session.failure is not None
    found_program, finding = session.failure
    rule = finding.rule

    until = time.monotonic() + SHRINK_S

    def breaks(program: Program) -> tuple[Violation, ...]:
        if time.monotonic() > until:
            return ()  # as short as the time allowed: nothing shorter is tried any more
        return run_program(session.engine, session.oracle, program, session.permitted)

    program = simplest(shortest(found_program, rule, breaks), rule, breaks)
    found = run_program(session.engine, session.oracle, program, session.permitted)
    if found and found[0].rule == rule:
        return program, found[0]
    return found_program, finding
