"""Planted faults: each breaks one rule in an engine on purpose, and has to be caught by its name.

A fault is data: a fragment of one function, found by its syntax, and what stands in its place.
The altered function is compiled from the engine's own source and put into the live function, in
a forked child, so that nothing of it is left behind.
"""

from __future__ import annotations

import ast
import copy
import importlib
import inspect
import json
import multiprocessing
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, Final, TypeVar

from kvclaims.checker import engines
from kvclaims.checker.counterexample import FOLDER, Counterexample, parsed, shortest
from kvclaims.checker.fuzz import SMALL_BLOCK, hunt
from kvclaims.checker.supervise import Program, oracle_for, supervise, warm_up
from kvclaims.checker.verdicts import Progress, Violation, counted, worst
from kvclaims.spec.interface import BadOperation, Engine, EngineInfo, PoolConfig
from kvclaims.spec.operations import parse
from kvclaims.spec.vocabulary import RULES, Verdict

TIME_LIMIT_S: Final = 60
"""A fault that is not decided by then is reported as not shown."""

_OWN_PACKAGE: Final = "kvclaims"


class FaultError(BadOperation):
    """A fault that cannot be planted; the message begins with its id."""


@dataclass(frozen=True)
class Edit:
    """In `function` of the module at `path`, `find` gives way to `replace` (`count` times)."""

    path: str
    function: str
    find: str
    replace: str
    count: int = 1


@dataclass(frozen=True)
class Fault:
    """One planted fault: the rule it breaks, and what shows it.

    With no operations, `budget` random ones are tried from `seed` on.
    """

    id: str
    rule: str
    meaning: str
    edits: tuple[Edit, ...]
    program: Program | None = None
    budget: int = 0
    seed: int = 0
    alternatives: tuple[tuple[Edit, ...], ...] = ()
    """The same fault in the words of other versions: the first that applies is planted."""


# --- reading -----------------------------------------------------------------------------


def faults_of(engine: Engine) -> tuple[Fault, ...]:
    """The faults that come with an engine.  Raises BadOperation where there are none."""
    if engine.faults is None:
        raise BadOperation(f"engine {engine.name} comes with no planted faults")
    return read_faults(engine.faults, engine.block_size)


def named(fault_id: str, engine: Engine) -> Fault:
    for fault in faults_of(engine):
        if fault.id == fault_id:
            return fault
    raise BadOperation(f"engine {engine.name} has no planted fault {fault_id!r}")


def read_faults(path: Path, block_size: int | None = None) -> tuple[Fault, ...]:
    """Read a file of faults; `BadOperation` with one line that says what is wrong with it."""
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadOperation(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise BadOperation(f"{path}: {error}") from None
    tables = raw.get("fault", [])
    faults = tuple(_read(table, path, block_size) for table in tables)
    if not faults or len({fault.id for fault in faults}) != len(faults):
        raise BadOperation(f"{path}: faults need ids of their own, and there must be one")
    return faults


def _read(table: Mapping[str, Any], path: Path, block_size: int | None) -> Fault:
    where = f"{path.name}: {table.get('id', 'a fault without id')}"
    try:
        edits = tuple(Edit(**edit) for edit in table["edits"])
        others = tuple(tuple(Edit(**e) for e in one) for one in table.get("alternatives", ()))
        program = None
        if "operations" in table:
            config = PoolConfig(
                table["usable"],
                table.get("block_size", block_size or SMALL_BLOCK),
                table["defer_limit"],
                **table.get("pool", {}),
            )
            program = Program(config, tuple(parse(item) for item in table["operations"]))
        fault = Fault(
            table["id"],
            table["rule"],
            table["meaning"],
            edits,
            program,
            table.get("budget", 0),
            table.get("seed", 0),
            others,
        )
    except (KeyError, TypeError) as error:
        raise FaultError(f"{where}: lacks or mistakes {error}") from None
    if fault.rule not in RULES or not fault.edits or not (program or fault.budget):
        raise FaultError(f"{where}: needs a known rule, an edit, and operations or a budget")
    return fault


# --- planting ----------------------------------------------------------------------------


@contextmanager
def planted(fault: Fault, engine: Engine) -> Iterator[None]:
    """The fault is in the live functions of this process; afterwards they are as before.

    Raises `FaultError` where neither its edits nor any alternative applies.
    """
    with ExitStack() as stack:
        for function, code in _changes(fault, engine):
            stack.callback(setattr, function, "__code__", function.__code__)
            try:
                function.__code__ = code
            except ValueError as error:
                raise FaultError(f"{fault.id}: {error}") from None
        yield


Changed = list[tuple[FunctionType, CodeType]]


def _changes(fault: Fault, engine: Engine) -> Changed:
    """The live functions that change with their new code, by the first edits that apply."""
    errors = []
    for edits in (fault.edits, *fault.alternatives):
        try:
            return _changed(fault, edits, engine)
        except FaultError as error:
            errors.append(error)
    raise errors[0]


def _changed(fault: Fault, edits: Sequence[Edit], engine: Engine) -> Changed:
    changed = []
    for path in dict.fromkeys(edit.path for edit in edits):
        of_path = [edit for edit in edits if edit.path == path]
        changed += _altered(fault, of_path, _module(fault, path, engine))
    return changed


def _module(fault: Fault, path: str, engine: Engine) -> ModuleType:
    name = path.removesuffix(".py").replace("/", ".")
    if engine.package is None:
        name = f"{_OWN_PACKAGE}.{name}"
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise FaultError(f"{fault.id}: {error}") from None


def _altered(fault: Fault, edits: Sequence[Edit], module: ModuleType) -> Changed:
    """The live functions of one module with their code after all its edits."""
    tree = ast.parse(inspect.getsource(module))
    live = {edit.function: _edited(fault, edit, tree, module) for edit in edits}
    compiled = compile(ast.fix_missing_locations(tree), str(module.__file__), "exec")
    codes = {code.co_qualname: code for code in codes_of(compiled)}
    return [(function, codes[name]) for name, function in live.items()]


def _edited(fault: Fault, edit: Edit, tree: ast.Module, module: ModuleType) -> FunctionType:
    """Replace the fragment in the tree; the live function that it belongs to."""
    node = _find_function(tree, edit.function)
    live = live_function(module, edit.function)
    if node is None or live is None:
        raise FaultError(f"{fault.id}: no function {edit.function} in {edit.path}")
    fragment = _Fragment(edit.find, edit.replace)
    fragment.visit(node)
    if fragment.matches != edit.count:
        raise FaultError(
            f"{fault.id}: {edit.function} in {edit.path} has the fragment {fragment.matches} "
            f"times, not {edit.count}: {edit.find!r}"
        )
    return live


def _find_function(tree: ast.Module, qualname: str) -> ast.FunctionDef | None:
    body: Sequence[ast.stmt] = tree.body
    *classes, name = qualname.split(".")
    for wanted in classes:
        found = next((n for n in body if isinstance(n, ast.ClassDef) and n.name == wanted), None)
        if found is None:
            return None
        body = found.body
    functions = (n for n in body if isinstance(n, ast.FunctionDef) and n.name == name)
    return next(functions, None)


def live_function(module: ModuleType, qualname: str) -> FunctionType | None:
    *classes, name = qualname.split(".")
    owner: Any = module
    for wanted in classes:
        owner = vars(owner).get(wanted)
        if owner is None:
            return None
    found = vars(owner).get(name)
    if isinstance(found, property):
        found = found.fget
    found = inspect.unwrap(getattr(found, "__func__", found)) if found is not None else None
    return found if isinstance(found, FunctionType) else None


def codes_of(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from codes_of(constant)


class _Fragment(ast.NodeTransformer):
    """Replaces an expression, or a run of statements, wherever its syntax is the same."""

    def __init__(self, find: str, instead: str) -> None:
        self.matches = 0
        self._find = [ast.unparse(node) for node in ast.parse(find).body]
        self._instead = ast.parse(instead).body
        self._expression = _expression(find) and _expression(instead)

    def visit(self, node: ast.AST) -> Any:
        expression = self._expression
        if expression and isinstance(node, ast.expr) and ast.unparse(node) == self._find[0]:
            self.matches += 1
            return _in_place_of(expression, node)
        self.generic_visit(node)
        if self._expression is None:
            for name in ("body", "orelse", "finalbody"):
                block = getattr(node, name, None)
                if isinstance(block, list):
                    setattr(node, name, self._statements(block))
        return node

    def _statements(self, block: list[ast.stmt]) -> list[ast.stmt]:
        result: list[ast.stmt] = []
        length, index = len(self._find), 0
        while index < len(block):
            if [ast.unparse(node) for node in block[index : index + length]] == self._find:
                self.matches += 1
                result += [_in_place_of(new, block[index]) for new in self._instead]
                index += length
            else:
                result.append(block[index])
                index += 1
        return result or [ast.Pass() for _ in block[:1]]


Node = TypeVar("Node", bound=ast.AST)


def _in_place_of(new: Node, old: ast.AST) -> Node:
    """A copy of `new` that says it stands on the lines of `old`."""
    made = copy.deepcopy(new)
    for node in ast.walk(made):
        ast.copy_location(node, old)
    return made


def _expression(source: str) -> ast.expr | None:
    body = ast.parse(source).body
    only = body[0] if len(body) == 1 else None
    return only.value if isinstance(only, ast.Expr) else None


# --- catching ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Caught:
    """What became of one fault: the finding, the shortest program that shows it, its file."""

    fault: Fault
    finding: Violation | None
    program: Program | None
    file: Path | None
    seconds: float
    error: str = ""
    unwritten: str = ""
    """Why the counterexample has no file."""

    @property
    def verdict(self) -> Verdict:
        """HOLDS: the fault was caught by its rule."""
        if self.error:
            return Verdict.UNKNOWN
        if self.finding is None or self.finding.rule != self.fault.rule:
            return Verdict.VIOLATED
        return Verdict.HOLDS

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.fault.id,
            "meaning": self.fault.meaning,
            "rule": self.fault.rule,
            "verdict": self.verdict,
            "caught_by": self.finding.rule if self.finding else None,
            "message": self.finding.message if self.finding else self.error or None,
            "operations": len(self.program.operations) if self.program else None,
            "file": str(self.file) if self.file else None,
            "seconds": round(self.seconds, 3),
        }

    def __str__(self) -> str:
        if self.error:
            return f"ERROR     {self.error}"
        if self.finding is None:
            return f"LIVES     {self.fault.rule:4} {self.fault.id}: {self.fault.meaning}"
        length = counted(len(self.program.operations), "operation") if self.program else ""
        word = "caught" if self.finding.rule == self.fault.rule else "MISNAMED"
        by = "" if word == "caught" else f", by {self.finding.rule}: {self.finding.message}"
        lost = f" ({self.unwritten})" if self.unwritten else ""
        return f"{word:9} {self.fault.rule:4} {self.fault.id}, {length}{by}{lost}"


@dataclass(frozen=True)
class FaultReport:
    """All planted faults of one engine."""

    engine: EngineInfo
    caught: tuple[Caught, ...]

    @property
    def verdict(self) -> Verdict:
        """VIOLATED if one lives or is named by another rule, UNKNOWN if one cannot be planted."""
        return worst(one.verdict for one in self.caught)

    def to_json(self) -> dict[str, Any]:
        missed = [one for one in self.caught if one.verdict is not Verdict.HOLDS]
        return {
            "engine": vars(self.engine),
            "faults": [one.to_json() for one in self.caught],
            "violations": [
                {
                    "rule": one.fault.rule,
                    "message": str(one),
                    "operations": [],
                    "file": str(one.file) if one.file else None,
                }
                for one in missed
            ],
        }

    def lines(self) -> Iterator[str]:
        yield f"{self.engine.name} {self.engine.version} ({self.engine.path})"
        yield from (f"  {one}" for one in self.caught)
        good = sum(one.verdict is Verdict.HOLDS for one in self.caught)
        total = counted(len(self.caught), "planted fault")
        yield f"{good} of {total} caught by name: {self.verdict}"


def run_faults(
    target: str, progress: Progress, folder: Path = FOLDER, only: Sequence[str] = ()
) -> FaultReport:
    """Plant each fault of an engine in a child of its own and look for it."""
    engine, info = engines.ready(target)
    faults = [fault for fault in faults_of(engine) if not only or fault.id in only]
    warm_up(engine, engine.block_size)
    caught = []
    for fault in faults:
        progress(f"{fault.id} in {info.name}")
        caught.append(_in_child(fault, engine, folder))
    return FaultReport(info, tuple(caught))


def _in_child(fault: Fault, engine: Engine, folder: Path) -> Caught:
    """Catch the fault in a forked process; what it says, or why it says nothing."""
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe(duplex=False)
    child = fork.Process(target=_child, args=(fault, engine, folder, theirs))
    started = time.monotonic()
    child.start()
    theirs.close()
    try:
        if not ours.poll(TIME_LIMIT_S):
            return Caught(fault, None, None, None, TIME_LIMIT_S, f"{fault.id}: takes too long")
        answer = json.loads(ours.recv_bytes())
    except EOFError:
        child.join()
        return Caught(fault, None, None, None, 0.0, f"{fault.id}: exit code {child.exitcode}")
    finally:
        if child.is_alive():
            child.kill()
        child.join()
    return _received(fault, answer, time.monotonic() - started)


def _received(fault: Fault, answer: Mapping[str, Any], seconds: float) -> Caught:
    finding, file = answer.get("finding"), answer.get("file")
    return Caught(
        fault,
        Violation(**finding) if finding else None,
        parsed(answer["example"]).program if finding else None,
        Path(file) if file else None,
        seconds,
        answer.get("error", ""),
        answer.get("unwritten", ""),
    )


def _child(fault: Fault, engine: Engine, folder: Path, answer: Connection) -> None:
    told: dict[str, Any]
    try:
        with planted(fault, engine):
            told = _told(catch(fault, engine), folder)
    except FaultError as error:
        told = {"error": str(error)}
    except Exception as error:  # noqa: BLE001 - a child's failure is told, not printed
        told = {"error": f"{fault.id}: {type(error).__name__}: {engines.first_line(error)}"}
    answer.send_bytes(json.dumps(told).encode())


def _told(found: tuple[Violation, Counterexample] | None, folder: Path) -> dict[str, Any]:
    """What a child tells: the finding stands also where its file cannot be written."""
    if found is None:
        return {}
    finding, example = found
    told = {"finding": vars(finding), "example": example.to_json(), "file": None, "unwritten": ""}
    try:
        told["file"] = str(example.write(folder))
    except BadOperation as error:
        told["unwritten"] = str(error)
    return told


def catch(fault: Fault, engine: Engine) -> tuple[Violation, Counterexample] | None:
    """Look for a fault that is planted; what it broke, and the shortest program that shows it.
    None if the fault lives."""
    oracle = oracle_for(engine)
    program = fault.program or hunt(engine, fault.budget, fault.seed)
    found = supervise(engine, oracle, program) if program is not None else ()
    if program is None or not found:
        return None
    rule = found[0].rule
    program = shortest(program, rule, lambda shorter: supervise(engine, oracle, shorter))
    finding = supervise(engine, oracle, program)[0]
    example = Counterexample(
        engine.name,
        program,
        rule,
        finding.message,
        fault.seed,
        fault.id,
        engine.info().version,
    )
    return finding, example
