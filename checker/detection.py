"""What finds mutants of an engine: our checks beside the engine's own tests.

`tools/detection.py` is the command.  Results are lines of a file, the last one of a mutant
counts; a mutant that lives is tried again where more effort is asked for.  Effort is counted in
operations, so that a result does not depend on how busy the machine was.
"""

from __future__ import annotations

import ast
import json
import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from packaging.version import Version

from kvclaims.checker import litmus
from kvclaims.checker.baseline import KnownFinding, allowing, read_baseline
from kvclaims.checker.codemutants import CodeMutant
from kvclaims.checker.enginemutants import Places, plant
from kvclaims.checker.faults import FaultError, planted
from kvclaims.checker.fuzz import FuzzReport, Ways, first_failure, fuzz
from kvclaims.checker.mutatecode import Answer, in_child
from kvclaims.checker.programs import builtin
from kvclaims.checker.trials import attempt, trials_of
from kvclaims.spec.interface import BadOperation, Engine
from kvclaims.spec.vocabulary import Verdict

__all__ = ["Answer", "CodeMutant", "Drawn", "Results", "Stage", "judge", "share", "stages"]

QUICK: Final = 300
"""Operations of fuzzing that every mutant gets first: most fall within them."""

TRIALS: Final = 60
"""Trials of an engine's own (`kvclaims.checker.trials`) beside each run of the fuzzing."""

OPERATIONS: Final = 6000
"""Operations of fuzzing that a mutant has to survive: about 30 s of one core."""

SEED: Final = 1
SEEDS: Final = 4
"""Into so many runs of their own the fuzzing is parted: each begins with pools of all kinds."""
CHILD_S: Final = 300.0
"""Processor time after which a mutant counts as one that never ends."""

CONTROL: Final = "(the engine as it is)"

TESTS: Final = (
    *("test_prefix_caching.py", "test_kv_cache_utils.py", "test_single_type_kv_cache_manager.py"),
    *("test_scheduler.py", "test_deferred_block_free.py", "test_async_scheduler.py"),
    *("test_prefix_replay.py", "test_swa_inflight_window_free.py", "test_kv_sharing.py"),
    *("test_priority_preemption_bug.py", "test_priority_scheduler_random.py"),
    *("test_worker_slot_overflow.py", "prefix_cache"),
)
"""The engine's core tests of allocator and scheduler, below tests/v1/core."""

CONNECTOR_TESTS: Final = (
    *("test_cache_pollution_prevention.py", "test_error_propagation.py"),
    *("test_invalid_blocks_correctness.py", "test_kv_connector_lifecycle.py"),
    *("test_kv_load_failure_recovery.py", "test_remote_decode_lifecycle.py"),
    "test_remote_prefill_lifecycle.py",
)
"""Those of loads and stores that need no device, below tests/v1/kv_connector/unit."""


# --- what is judged ----------------------------------------------------------------------


@dataclass(frozen=True)
class Drawn:
    """The mutants that were drawn, out of `total`."""

    mutants: tuple[CodeMutant, ...]
    total: int

    @classmethod
    def read(cls, path: Path, places: Places | None = None) -> Drawn | None:
        """What was kept in a file; None where there is none, or one of other places."""
        if not path.is_file():
            return None
        raw = json.loads(path.read_text(encoding="utf-8"))
        if places is not None and raw["places"] != repr(places):
            return None
        mutants = (
            CodeMutant(**{**one, "build": partial(str, one["build"])}) for one in raw["mutants"]
        )
        return cls(tuple(mutants), raw["total"])

    def write(self, path: Path, places: Places) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        mutants = [{**asdict(mutant), "build": mutant.source} for mutant in self.mutants]
        told = {"places": repr(places), "total": self.total, "mutants": mutants}
        path.write_text(json.dumps(told), encoding="utf-8")


@dataclass
class Results:
    """The lines of a results file that are of one version of the engine."""

    path: Path
    version: str
    rows: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.path.is_file():
            lines = self.path.read_text(encoding="utf-8").splitlines()
            rows = [json.loads(line) for line in lines if line]
            self.rows = [row for row in rows if row["engine"] == self.version]

    def last(self, side: str, name: str) -> dict[str, Any] | None:
        """The newest line of a mutant, None where there is none."""
        found = (r for r in reversed(self.rows) if (r["side"], r["mutant"]) == (side, name))
        return next(found, None)

    def wants(self, side: str, mutant: CodeMutant, effort: int) -> bool:
        """Whether a mutant was not tried yet, or lives and was tried with less effort."""
        row = self.last(side, mutant.name)
        return row is None or (not row["by"] and row["effort"] < effort)

    def put(
        self,
        side: str,
        mutant: CodeMutant | str,
        effort: int,
        answer: Answer,
        seconds: float,
        **more: Any,
    ) -> str:
        """Write a line; what it says in words."""
        name = mutant if isinstance(mutant, str) else mutant.name
        row = {
            "engine": self.version,
            "side": side,
            "mutant": name,
            "effort": effort,
            "by": answer.by,
            "detail": answer.detail,
            "seconds": round(seconds, 2),
            **more,
        }
        self.rows.append(row)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        fate = f"killed by {answer.by}: {answer.detail}" if answer.by else "lives"
        return f"{side} {seconds:5.1f} s  {name}\n    {fate[:300]}"


def versions_in(path: Path) -> list[str]:
    """The versions of the engine that a results file tells of, the oldest first."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return sorted({json.loads(line)["engine"] for line in lines if line}, key=Version)


def share(mutants: Sequence[CodeMutant], part: str) -> list[CodeMutant]:
    """Part `i/n` of the mutants."""
    i, n = map(int, part.split("/"))
    return list(mutants[i::n])


# --- by our checks -----------------------------------------------------------------------

Check = Callable[[Engine, tuple[KnownFinding, ...]], Answer]


@dataclass(frozen=True)
class Stage:
    """Checks that a mutant has survived when `effort` operations are done."""

    effort: int
    checks: tuple[Check, ...]


def stages(operations: int) -> tuple[Stage, ...]:
    """Quick ones for all first, then the litmus programs and the rest of the fuzzing."""
    quick = Stage(QUICK, (partial(_fuzzed, QUICK, SEED), partial(_tried, TRIALS, SEED)))
    seeds = range(SEED + 1, SEED + 1 + SEEDS)
    parts: list[Check] = [partial(_fuzzed, operations // SEEDS, seed) for seed in seeds]
    trials: list[Check] = [partial(_tried, TRIALS, seed) for seed in seeds]
    rest: tuple[Check, ...] = (_litmus, *trials, *parts)
    return (quick, Stage(operations, rest)) if operations > QUICK else (quick,)


def whole(operations: int) -> Stage:
    """All of them as one."""
    return Stage(operations, tuple(check for stage in stages(operations) for check in stage.checks))


def known_findings(engine: Engine) -> tuple[KnownFinding, ...]:
    """What the engine is known to break: no mutant is killed by that."""
    path = getattr(engine, "findings", None)
    return () if path is None else read_baseline(path).findings


def judge(
    mutant: CodeMutant | None,
    engine: Engine,
    known: tuple[KnownFinding, ...],
    stage: Stage,
    results: Results,
) -> str:
    """Do the checks of a stage on a mutant, or on the engine as it is where there is none, and
    write down what came of it."""
    answer, seconds, used = _timed(partial(_judged, mutant, engine, known, stage.checks))
    return results.put("ours", mutant or CONTROL, stage.effort, answer, seconds, cpu=used)


def judge_clean(
    engine: Engine, known: tuple[KnownFinding, ...], operations: int, results: Results
) -> Answer:
    """The same checks on the engine as it is: what kills it kills nothing else."""
    row = results.last("ours", CONTROL)
    if row is not None and (row["by"] or row["effort"] >= operations):
        return Answer(row["by"], row["detail"])
    judge(None, engine, known, whole(operations), results)
    row = results.last("ours", CONTROL)
    assert row is not None
    return Answer(row["by"], row["detail"])


# --- the engine as it is, seed by seed -----------------------------------------------------

CLEAN: Final = "clean"
"""The side of the lines that tell of one seed of fuzzing on the engine as it is."""


def seed_name(seed: int) -> str:
    """How the line of a seed is called."""
    return f"seed {seed}"


def fuzz_clean(
    engine: Engine, results: Results, seeds: Sequence[int], operations: int, folder: Path
) -> Iterator[str]:
    """What `kvclaims fuzz` finds in the engine as it is, its own known findings allowed by name, in
    words.  A seed that broke nothing in as many operations is not done again.  A counterexample
    goes into `folder`."""
    for seed in seeds:
        row = results.last(CLEAN, seed_name(seed))
        if row is not None and not row["by"] and row["effort"] >= operations:
            continue
        report = fuzz(engine, operations, None, seed, lambda _: None, folder)
        tried, said = report.tried, _said(report)
        results.put(
            CLEAN,
            seed_name(seed),
            operations,
            said,
            report.seconds,
            cpu=round(report.cpu_seconds, 2),
            steps=report.steps,
            monitored=report.monitored,
            arranged=report.arranged.operations,
            trials=0 if tried is None else sum(tried.runs.values()),
            known=report.allowed,
            not_exposed=len(report.not_exposed),
        )
        found = f"{said.by}, {said.detail}" if said.by else "nothing is broken"
        yield f"{results.version}, {seed_name(seed)}, {report.seconds:.1f} s: {found}"


def _said(report: FuzzReport) -> Answer:
    if report.finding is not None:
        by = "fuzzing" if report.program is not None else "trials"
        return Answer(by, f"{report.finding.rule}: {report.finding.message}")
    if report.verdict is not Verdict.HOLDS:
        return Answer("nothing", f"{report.verdict}: fewer than {report.floor} kinds of step taken")
    return Answer()


def _timed(work: Callable[[], Answer]) -> tuple[Answer, float, float]:
    """The answer of a child, the seconds it took, and those of processor time."""
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    answer = in_child(work, CHILD_S)
    seconds, after = time.monotonic() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return answer, seconds, round(used, 2)


def _judged(
    mutant: CodeMutant | None,
    engine: Engine,
    known: tuple[KnownFinding, ...],
    checks: Sequence[Check],
) -> Answer:
    if mutant is not None:
        try:
            plant(mutant)
        except (FaultError, SyntaxError) as error:
            return Answer("error", str(error))
    return _first(checks, engine, known)


def check(engine: Engine, known: tuple[KnownFinding, ...], chosen: Sequence[Stage]) -> Answer:
    """The checks of some stages, in this process."""
    return _first([one for stage in chosen for one in stage.checks], engine, known)


def _first(checks: Sequence[Check], engine: Engine, known: tuple[KnownFinding, ...]) -> Answer:
    for one in checks:
        answer = one(engine, known)
        if answer.by:
            return answer
    return Answer()


def _fuzzed(operations: int, seed: int, engine: Engine, known: tuple[KnownFinding, ...]) -> Answer:
    found = first_failure(engine, Ways(steps=operations, seed=seed, known=known))
    if found is None:
        return Answer()
    program, finding = found
    number = f"in operation {finding.operation} of {len(program.operations)}"
    return Answer("fuzzing", f"{finding.rule} {number}: {finding.message}")


def _tried(count: int, seed: int, engine: Engine, known: tuple[KnownFinding, ...]) -> Answer:
    trials = trials_of(engine)
    if trials is None:
        return Answer()
    tried = attempt(trials, seed, allowing(engine, known), count)
    if tried.failure is None or tried.failure.finding is None:
        return Answer()
    finding = tried.failure.finding
    number = f"in operation {finding.operation} of {len(tried.failure.operations)}"
    where = f"{tried.failure.kind}, trial {tried.number} of seed {seed}"
    return Answer("trials", f"{finding.rule} {number}: {where}: {finding.message}")


def _litmus(engine: Engine, _: tuple[KnownFinding, ...]) -> Answer:
    for program in sorted(builtin(), key=lambda p: (bool(p.fold), len(p.cases))):
        report = litmus.litmus(engine, engine.info(), [program], lambda _: None)
        if report.verdict not in (Verdict.HOLDS, Verdict.NOT_EXPOSED):
            told = report.to_json()["violations"]
            first = f"{told[0]['rule']}: {told[0]['message']}" if told else str(report.verdict)
            return Answer("litmus", f"{program.id}: {first}")
    return Answer()


# --- planted faults, by fuzzing alone ------------------------------------------------------


def hunt_faults(
    engine: Engine, results: Results, operations: int, limit: int | None
) -> Iterator[str]:
    """Look for every planted fault with random operations alone, whatever its own program."""
    from kvclaims.checker.faults import Fault, faults_of

    known = known_findings(engine)

    def hunted(fault: Fault) -> Answer:
        try:
            with planted(fault, engine):
                return _fuzzed(operations, SEED, engine, known)
        except FaultError as error:
            return Answer("error", str(error))

    done = 0
    for fault in faults_of(engine):
        row = results.last("faults", fault.id)
        if row is not None and (row["by"] or row["effort"] >= operations):
            continue
        if limit is not None and done >= limit:
            return
        done += 1
        answer, seconds, used = _timed(partial(hunted, fault))
        yield results.put("faults", fault.id, operations, answer, seconds, cpu=used)


# --- by the engine's own tests -------------------------------------------------------------


def test_files(distribution: Path) -> Iterator[Path]:
    """The engine's core and connector tests in a source distribution; those a version lacks are
    left out.  Raises `BadOperation` where it has none."""
    folders = {"core": TESTS, "kv_connector/unit": CONNECTOR_TESTS}
    files = [distribution / "tests/v1" / f / name for f, names in folders.items() for name in names]
    found = [file for file in files if file.exists()]
    if not found:
        raise BadOperation(f"{distribution} has no tests of the engine's core")
    yield from found


MODELS: Final[dict[str, dict[str, Any]]] = {
    "facebook/opt-125m": {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "hidden_size": 768,
        "ffn_dim": 3072,
        "num_attention_heads": 12,
        "num_hidden_layers": 12,
        "max_position_embeddings": 2048,
        "vocab_size": 50272,
        "word_embed_proj_dim": 768,
        "torch_dtype": "float16",
        "bos_token_id": 2,
        "eos_token_id": 2,
        "pad_token_id": 1,
    }
}
"""Configurations that the engine's tests ask for by name: a folder of that name stands for it."""


def write_models(folder: Path) -> None:
    """Write the configurations, so that the tests find them without a network."""
    for name, config in MODELS.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(config), encoding="utf-8")


def functions_of(file: Path) -> Iterator[tuple[str, int, int]]:
    """Every function of a module and method of its classes, with the lines of its body."""

    def inside(node: ast.AST, prefix: str) -> Iterator[tuple[str, int, int]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                yield from inside(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.FunctionDef):
                body = child.body
                yield f"{prefix}{child.name}", body[0].lineno, body[-1].end_lineno or 0

    yield from inside(ast.parse(file.read_text(encoding="utf-8")), "")


def outermost(mutant: CodeMutant) -> str:
    """The function or method that a mutant stands in, with its module: a function inside of
    another is entered with it."""
    parts = mutant.function.split(".")
    is_method = parts[0].lstrip("_")[:1].isupper()
    return f"{mutant.path}:{'.'.join(parts[: 2 if is_method else 1])}"


def statement(file: Path, line: int) -> range:
    """The lines of the smallest statement around a line; of a compound one those of its head."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    around = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0)
    ]
    smallest = min(around, key=lambda node: (node.end_lineno or 0) - node.lineno)
    body = getattr(smallest, "body", None)
    last = body[0].lineno - 1 if body else smallest.end_lineno or 0
    return range(smallest.lineno, max(last, smallest.lineno) + 1)


def is_reached(mutant: CodeMutant, reached: Mapping[str, Any], root: Path) -> bool:
    """Whether the engine as it is gets to the statement of a mutant, in the run that `reached`
    (a line of side "reach") tells of."""
    lines = set(reached["lines"].get(mutant.path, ()))
    return not lines.isdisjoint(statement(root / mutant.path, mutant.line))


def pass_over(
    mutants: Sequence[CodeMutant], effort: int, root: Path, results: Results
) -> Iterator[str]:
    """Write down which mutants live because nothing gets to them.

    Seeds and operations fix a run, so a mutant at a statement that the engine as it is does not
    reach with them runs as the engine does.
    """
    row = results.last("reach", CONTROL)
    if row is None or row["effort"] < effort or row["by"]:
        return
    for mutant in mutants:
        if results.wants("ours", mutant, effort) and not is_reached(mutant, row, root):
            yield results.put("ours", mutant, effort, Answer("", "not reached"), 0.0, cpu=0.0)
