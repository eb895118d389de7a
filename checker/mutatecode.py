"""Mutants of the reference and of the monitor, and what kills them.

Each mutant is judged in a forked process of its own: the changed module is compiled from its
text and stands in the place of the original when it is imported there.  The checks are those of
the project, the quickest first: every step of small instances (`checker.conform`), random runs
under supervision with the trace folded at the end, the litmus programs, and for the monitor what
it says of steps that are not allowed (`checker.monitorcheck`).  Of the random runs only those are
supervised in which the mutant shows anything else than the reference (`checker.recorded`); if no
check objects to them, the pinned digest of all runs does.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import random
import resource
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from kvclaims.checker import engines, litmus
from kvclaims.checker.blame import random_situation
from kvclaims.checker.codemutants import CodeMutant, code_mutants
from kvclaims.checker.conform import replay_instance
from kvclaims.checker.fates import Fate, Judged
from kvclaims.checker.instances import PINNED
from kvclaims.checker.memorycheck import check_memory
from kvclaims.checker.programs import builtin
from kvclaims.checker.recorded import (
    CROWDED,
    Recorded,
    differing,
    introduced,
    play,
    record,
)
from kvclaims.checker.scenes import scenes
from kvclaims.checker.supervise import Crash, open_supervised
from kvclaims.checker.verdicts import Violation
from kvclaims.spec import feasibility
from kvclaims.spec.feasibility import Judgement, Situation
from kvclaims.spec.interface import Engine
from kvclaims.spec.vocabulary import Verdict

ROOT: Final = Path(__file__).parents[1]
PACKAGE: Final = "kvclaims"
REFERENCE: Final = "reference"
MONITOR: Final = ("checker/monitor.py", "checker/stepcode.py")
"""Where the meaning of what the monitor says lies: the comparisons, and the text of the steps."""

LIMIT_S: Final = 60.0
"""Seconds of processor time after which a mutant counts as one that never ends."""

STUCK_S: Final = 20.0
"""The same within one check, or one recorded run."""

MEMORY: Final = 2 << 30
"""Bytes that a mutant may take beyond what the process held that judges it."""

RUNS: Final = 3_000
"""Random runs that are recorded."""

SEED: Final = 8
SITUATIONS: Final = 300
"""Random situations in which the arbiter is asked."""

MEMORIES: Final = 300
"""Runs of writers on the simulated memory."""

SUPERVISED: Final = 5
"""Runs that show a difference and are then supervised."""

FURTHER: Final = 300
"""Runs that are looked at for more of them after the first."""

FEW: Final = 200
"""Runs that are looked at before the larger instances."""

AUDIT_EVERY: Final = 3
STEP_ROUNDS: Final = 10
"""States drawn of each machine, in each of which every action is taken once."""

TERM_ROUNDS: Final = 8
"""States drawn of each machine, in each of which every term is read."""

_LEDGER: Final = frozenset({"pool.py", "ledger.py", "claims.py", "engine.py"})
"""The modules that single steps reach: only these are worth larger instances."""

Check = Callable[[Engine], str | None]
"""What an engine did wrong, None if nothing."""


# --- the checks --------------------------------------------------------------------------


def conforms(name: str, engine: Engine) -> str | None:
    found = replay_instance(PINNED[name](), name, engine)  # type: ignore[arg-type]
    return None if found.difference is None else next(found.difference.lines())


def keeps_litmus(engine: Engine) -> str | None:
    for program in _programs():
        report = litmus.litmus(engine, engine.info(), [program], lambda _: None)
        if report.verdict not in (Verdict.HOLDS, Verdict.NOT_EXPOSED):
            return f"{program.id}: {report.verdict}"
    return None


@lru_cache(maxsize=1)
def _programs() -> Sequence[Any]:
    """Those with the fewest cases first; none that measures a mechanism, which takes seconds and
    says nothing of what is mutated."""
    programs = [p for p in builtin() if not any(case.mechanism for case in p.cases)]
    return sorted(programs, key=lambda program: (bool(program.fold), len(program.cases)))


@lru_cache(maxsize=1)
def recorded() -> tuple[Recorded, ...]:
    """What the reference as it is shows in the scenes and in random runs, those with much room
    and those that are crowded by turns."""
    engine = engines.find(REFERENCE)
    played = [play(engine, number, scene) for number, scene in enumerate(scenes(), RUNS)]
    numbers = sorted(range(RUNS), key=lambda number: number % (RUNS - CROWDED))
    return (*played, *(record(engine, number) for number in numbers))


def worth_supervision(engine: Engine, runs: Iterable[Recorded]) -> Iterator[tuple[Recorded, str]]:
    """Runs in which the engine does not show what was recorded, and where."""
    left = iter(runs)
    for first in islice(differing(engine, left), 1):
        yield first
        yield from islice(differing(engine, islice(left, FURTHER)), SUPERVISED - 1)


def survives_fuzzing(runs: Iterable[Recorded], engine: Engine) -> str | None:
    """The operations of the runs, supervised."""
    for run in runs:
        try:
            supervisor = open_supervised(engine, None, run.config, audit_every=AUDIT_EVERY)
        except Crash as crash:
            return str(crash)
        for operation in run.sound:
            if supervisor.findings or not supervisor.is_alive:
                break
            supervisor.do(operation)
        found: Sequence[Violation] = supervisor.findings or supervisor.close()
        if found:
            return str(found[0])
    return None


def by_arbiter(arbiter: Any, situation: Situation) -> Judgement:
    """What the arbiter, a module that shares no code with the specification, says of it."""
    claims = {
        claim: arbiter.Owed(
            promise.covered, promise.reserve, situation.materializes.get(claim, frozenset())
        )
        for claim, promise in situation.promises.items()
    }
    answer = arbiter.decide(
        arbiter.Question(
            situation.usable, claims, situation.active, situation.holds, situation.need
        )
    )
    return Judgement(
        answer.outcome, answer.shortfall, answer.missing_now, answer.blocking, answer.waits_on
    )


def answers_as_specified(_engine: Engine) -> str | None:
    """The arbiter against the definition of F4, in random situations."""
    arbiter = importlib.import_module(f"{PACKAGE}.{REFERENCE}.arbiter")
    rng = random.Random(SEED)
    for _ in range(SITUATIONS):
        situation = random_situation(rng)
        if (found := by_arbiter(arbiter, situation)) != (wanted := feasibility.judge(situation)):
            return f"{found}, not {wanted}, in {situation}"
    return None


_OWN: Final[Mapping[str, tuple[str, Check]]] = {
    "arbiter.py": ("specification", answers_as_specified),
    "memory.py": ("memory", lambda _: check_memory(MEMORIES)),
}
"""What is asked of one module alone."""

Look = Callable[[Sequence[Recorded]], Iterable[Recorded]]
"""Looks for the runs among some that are worth supervision, when it is asked for them."""


def checks_for(path: str, runs: Sequence[Recorded], look: Look) -> Iterator[tuple[str, Check]]:
    """Every check by name, in the order in which they are likely to kill soon."""
    steps = Path(path).name in _LEDGER
    if Path(path).name in _OWN:
        yield _OWN[Path(path).name]
    if steps:
        yield "conformance", partial(conforms, "pool/ways")
    yield "fuzzing", partial(survives_fuzzing, look(runs[:FEW]))
    yield "litmus", keeps_litmus
    for name in ("pool/soft-keys", "pool/keys", "pool/soft-copies", "pool/requests"):
        if steps:
            yield "conformance", partial(conforms, name)
    yield "fuzzing", partial(survives_fuzzing, look(runs[FEW:]))


# --- in a process of its own -------------------------------------------------------------


class Planted(MetaPathFinder, Loader):
    """Gives one module the text of a mutant when it is imported."""

    def __init__(self, name: str, source: str, origin: str) -> None:
        self.name = name
        self.source = source
        self.origin = origin

    def find_spec(self, fullname: str, *_: object) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        spec = ModuleSpec(fullname, self, origin=self.origin)
        spec.has_location = True  # a module may ask where it lies
        return spec

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self.source, self.origin, "exec"), module.__dict__)


def module_name(path: str) -> str:
    return f"{PACKAGE}.{path.removesuffix('.py').replace('/', '.')}"


@dataclass(frozen=True)
class Answer:
    """What a child said: which check saw the mutant, and how; no check if none did."""

    by: str = ""
    detail: str = ""


def judge(path: str, start: int, stop: int) -> list[Judged]:
    """The fates of the mutants of a module, from `start` to before `stop`."""
    return [_judged(mutant) for mutant in islice(mutants_of(path), start, stop)]


def baseline(path: str, *, whole: bool = True) -> str | None:
    """Which check the module fails as it is, put in its own place as a mutant would be, None if
    none: where one fails, nothing can be judged.  Without `whole` it is only imported."""
    same = CodeMutant(path, "module", 1, "none", "", "", (ROOT / path).read_text)
    answer = in_child(_work(same, path) if whole else partial(_imported, same))
    return f"{path} fails {answer.by}: {answer.detail}" if answer.by else None


def _imported(mutant: CodeMutant) -> Answer:
    _fresh(mutant, ("checker", REFERENCE))
    try:
        importlib.import_module(module_name(mutant.path))
    except Exception as error:  # noqa: BLE001  (whatever goes wrong)
        return Answer("import", f"{type(error).__name__}: {error}")
    return Answer()


def _work(mutant: CodeMutant | None, path: str) -> Callable[[], Answer]:
    if path in MONITOR:
        return partial(monitor_child, mutant)
    return partial(reference_child, mutant, path, recorded(), introduced(engines.find(REFERENCE)))


@lru_cache(maxsize=4)
def mutants_of(path: str) -> tuple[CodeMutant, ...]:
    return tuple(code_mutants(ROOT / path, path))


def reference_modules() -> list[str]:
    """The modules of the reference that have code, below the package."""
    files = sorted((ROOT / REFERENCE).glob("*.py"))
    return [f"{REFERENCE}/{file.name}" for file in files if mutants_of(f"{REFERENCE}/{file.name}")]


def _judged(mutant: CodeMutant) -> Judged:
    begun = time.perf_counter()
    answer = in_child(_work(mutant, mutant.path))
    return Judged(
        "monitor" if mutant.path in MONITOR else REFERENCE,
        mutant.name,
        mutant.operator,
        mutant.before,
        mutant.after,
        Fate.KILLED if answer.by else Fate.LIVES,
        answer.by,
        answer.detail or f"line {mutant.line}: no check sees a difference",
        time.perf_counter() - begun,
    )


def reference_child(
    mutant: CodeMutant | None, path: str, runs: tuple[Recorded, ...] = (), says: str = ""
) -> Answer:
    """Import the reference with the mutant in it and run the checks up to the first that fails.

    `runs` are what the reference shows without the mutant, and `says` what it says of itself."""
    _fresh(mutant, (REFERENCE,))
    try:
        engine = engines.find(REFERENCE)
        introduction = introduced(engine)
    except Exception as error:  # noqa: BLE001  (whatever the mutant does)
        return Answer("import", f"{type(error).__name__}: {engines.first_line(error)}")
    if says not in ("", introduction):
        return Answer("introduction", introduction)
    where: list[str] = []

    def different(some: Sequence[Recorded]) -> Iterator[Recorded]:
        for run, place in () if where else worth_supervision(engine, _each_in_time(some)):
            where.append(place)
            yield run

    answer = _first_failing(checks_for(path, runs, different), engine)
    return Answer("the runs", where[0]) if where and not answer.by else answer


def monitor_child(mutant: CodeMutant | None) -> Answer:
    """Import all that judges with the mutant of the monitor in it.

    The text of steps must mean what is declared and cost what it should, what the monitor reports
    of small instances must be right, and an honest engine must pass.
    """
    _fresh(mutant, ("checker", REFERENCE))
    try:
        checks = importlib.import_module(f"{PACKAGE}.checker.mutatecode").monitor_checks()
        engine = engines.find(REFERENCE)
    except Exception as error:  # noqa: BLE001  (whatever the mutant does)
        return Answer("import", f"{type(error).__name__}: {engines.first_line(error)}")
    return _first_failing(checks, engine)


def monitor_checks() -> Iterator[tuple[str, Check]]:
    """Every check of the monitor by name."""
    from kvclaims.checker import stepcheck, stepcost
    from kvclaims.checker.monitorcheck import check_monitor, check_reports

    def refuses(name: str, nth: int, _: Engine) -> str | None:
        return check_monitor(name, nth)

    yield "cost", lambda _: stepcost.check_cost()
    yield "refusals", lambda _: check_reports()
    yield "meaning of steps", lambda _: stepcheck.check_steps(STEP_ROUNDS)
    yield "meaning of terms", lambda _: stepcheck.check_refused()
    yield "refusals", partial(refuses, "pool/ways", 23)
    yield "meaning of terms", lambda _: stepcheck.check_terms(TERM_ROUNDS)
    runs = [record(engines.find(REFERENCE), number) for number in range(10)]
    yield "false alarms", partial(survives_fuzzing, runs[:2])
    for name, nth in (
        ("pool/ways", 3),
        ("pool/soft-keys", 31),
        ("pool/keys", 61),
        ("pool/soft", 503),
        ("pool/requests", 503),
    ):
        yield "refusals", partial(refuses, name, nth)
    yield "false alarms", keeps_litmus
    yield "false alarms", partial(survives_fuzzing, runs[2:])


def _fresh(mutant: CodeMutant | None, parts: Sequence[str]) -> None:
    """Forget the modules of these parts, so that they are imported anew with the mutant."""
    prefixes = tuple(f"{PACKAGE}.{part}" for part in parts)
    for name in [n for n in sys.modules if n.startswith(prefixes)]:
        del sys.modules[name]
    if mutant:
        planted = Planted(module_name(mutant.path), mutant.source, str(ROOT / mutant.path))
        sys.meta_path.insert(0, planted)


def _first_failing(checks: Iterator[tuple[str, Check]], engine: Engine) -> Answer:
    for by, check in checks:
        _begin_in_time()
        try:
            wrong = check(engine)
        except Exception as error:  # noqa: BLE001  (whatever the mutant does)
            wrong = f"{type(error).__name__}: {engines.first_line(error)}"
        if wrong is not None:
            return Answer(by, wrong)
    return Answer()


def _begin_in_time() -> None:
    """From now on the kernel ends this process when it is stuck."""
    signal.setitimer(signal.ITIMER_PROF, STUCK_S)


def _each_in_time(runs: Iterable[Recorded]) -> Iterator[Recorded]:
    for run in runs:
        _begin_in_time()
        yield run


def in_child(work: Callable[[], Answer], limit_s: float = LIMIT_S) -> Answer:
    """Do the work in a forked process: its answer, or how it ended without one."""
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe(duplex=False)
    child = fork.Process(target=_child, args=(work, limit_s, theirs))
    child.start()
    theirs.close()
    try:
        if not ours.poll(10 * limit_s):
            return Answer("time", "it does not end")
        return Answer(**json.loads(ours.recv_bytes()))
    except EOFError:
        child.join()
        return Answer("time", f"it does not end, or takes all memory (exit code {child.exitcode})")
    finally:
        if child.is_alive():
            child.kill()
        child.join()


def _data() -> int:
    """Bytes of data that this process has from the one it was forked from, as Linux counts them."""
    return int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()


def _child(work: Callable[[], Answer], limit_s: float, answer: Connection) -> None:
    """Past its processor time the kernel ends the process; past its memory it raises."""
    resource.setrlimit(resource.RLIMIT_CPU, (int(limit_s), int(limit_s)))
    with suppress(ValueError, OSError):
        limit = _data() + MEMORY
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    warnings.simplefilter("ignore", SyntaxWarning)  # what a mutant writes need make no sense
    try:
        found = work()
    except MemoryError:
        found = Answer("memory", "it takes all memory")
    except RecursionError:
        found = Answer("time", "it does not end")
    answer.send_bytes(json.dumps({"by": found.by, "detail": found.detail}).encode())
