"""Mutants of the reference, and what kills them.

Each mutant is judged in a forked process of its own: the changed module is compiled from its
text and stands in the place of the original when the reference is imported there.  The checks
are those of the project, the quickest first: every step of small instances (`checker.conform`),
the litmus programs, random operations under supervision with the trace folded at the end.
"""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import random
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
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
from kvclaims.checker.codemutants import CodeMutant, code_mutants
from kvclaims.checker.conform import replay_instance
from kvclaims.checker.drawing import CODE, Drawer, draw_config
from kvclaims.checker.fates import Fate, Judged
from kvclaims.checker.instances import PINNED
from kvclaims.checker.programs import builtin
from kvclaims.checker.supervise import Crash, features_of, open_supervised
from kvclaims.spec.interface import Engine
from kvclaims.spec.operations import parse
from kvclaims.spec.vocabulary import Verdict

ROOT: Final = Path(__file__).parents[1]
PACKAGE: Final = "kvclaims"
REFERENCE: Final = "reference"

LIMIT_S: Final = 60.0
"""Seconds of processor time after which a mutant counts as one that never ends."""

MEMORY: Final = 2 << 30
SEED: Final = 8
LENGTH: Final = 40
"""Operations in one random run."""

AUDIT_EVERY: Final = 3
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
    """Those with the fewest cases first."""
    return sorted(builtin(), key=lambda program: (bool(program.fold), len(program.cases)))


def survives_fuzzing(runs: range, engine: Engine) -> str | None:
    """Random operations, the same for every mutant."""
    features = features_of(engine)
    for number in runs:
        rng = random.Random(SEED * 1_000_003 + number)
        config = draw_config(rng.randbytes(CODE), engine.block_size, features)
        try:
            supervisor = open_supervised(engine, None, config, audit_every=AUDIT_EVERY)
        except Crash as crash:
            return str(crash)
        drawer = Drawer(config, features)
        found = supervisor.findings
        for _ in range(LENGTH):
            if found or not supervisor.is_alive:
                break
            found = supervisor.do(parse(drawer.draw(rng.randbytes(CODE), supervisor.seen)))
        found = found or supervisor.close()
        if found:
            return str(found[0])
    return None


def checks_for(path: str) -> Iterator[tuple[str, Check]]:
    """Every check by name, in the order in which they are likely to kill soon."""
    small = ("conformance", partial(conforms, "pool/ways"))
    fuzz = [("fuzzing", partial(survives_fuzzing, r)) for r in (range(6), range(6, 60))]
    if Path(path).name in _LEDGER:
        yield small
        yield fuzz[0]
        for name in ("pool/keys", "pool/soft-keys"):
            yield "conformance", partial(conforms, name)
        yield "litmus", keeps_litmus
        for name in ("pool/soft-copies", "pool/requests"):
            yield "conformance", partial(conforms, name)
        yield fuzz[1]
    else:
        yield fuzz[0]
        yield "litmus", keeps_litmus
        yield fuzz[1]
        yield small


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
        return importlib.util.spec_from_loader(fullname, self, origin=self.origin)

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
    """The fates of the mutants of a module of the reference, from `start` to before `stop`."""
    return [_judged(mutant) for mutant in islice(mutants_of(path), start, stop)]


@lru_cache(maxsize=4)
def mutants_of(path: str) -> tuple[CodeMutant, ...]:
    return tuple(code_mutants(ROOT / path, path))


def reference_modules() -> list[str]:
    """The modules of the reference that have code, below the package."""
    files = sorted((ROOT / REFERENCE).glob("*.py"))
    return [f"{REFERENCE}/{file.name}" for file in files if mutants_of(f"{REFERENCE}/{file.name}")]


def _judged(mutant: CodeMutant) -> Judged:
    return judged(mutant, partial(reference_child, mutant), REFERENCE)


def judged(mutant: CodeMutant, child: Callable[[], Answer], target: str) -> Judged:
    begun = time.perf_counter()
    answer = in_child(child)
    fate = Fate.KILLED if answer.by else Fate.LIVES
    return Judged(
        target,
        mutant.name,
        mutant.operator,
        mutant.before,
        mutant.after,
        fate,
        answer.by,
        answer.detail or f"line {mutant.line}: no check sees a difference",
        time.perf_counter() - begun,
    )


def reference_child(mutant: CodeMutant | None) -> Answer:
    """Import the reference with the mutant in it and run the checks up to the first that fails."""
    for name in [n for n in sys.modules if n.startswith(f"{PACKAGE}.{REFERENCE}")]:
        del sys.modules[name]
    path = mutant.path if mutant else f"{REFERENCE}/pool.py"
    if mutant:
        sys.meta_path.insert(0, Planted(module_name(path), mutant.source, str(ROOT / path)))
    try:
        engine = engines.find(REFERENCE)
    except Exception as error:  # noqa: BLE001  (whatever the mutant does)
        return Answer("import", f"{type(error).__name__}: {engines.first_line(error)}")
    for by, check in checks_for(path):
        try:
            wrong = check(engine)
        except Exception as error:  # noqa: BLE001  (whatever the mutant does)
            wrong = f"{type(error).__name__}: {engines.first_line(error)}"
        if wrong is not None:
            return Answer(by, wrong)
    return Answer()


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


def _child(work: Callable[[], Answer], limit_s: float, answer: Connection) -> None:
    """Past its processor time the kernel ends the process; past its memory it raises."""
    resource.setrlimit(resource.RLIMIT_CPU, (int(limit_s), int(limit_s)))
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    try:
        found = work()
    except MemoryError:
        found = Answer("memory", "it takes all memory")
    except RecursionError:
        found = Answer("time", "it does not end")
    answer.send_bytes(json.dumps({"by": found.by, "detail": found.detail}).encode())
