"""Programs that break a rule: the file they are kept in, and how they are made shorter.

A file names the engine, the pool, the operations and the rule, and a planted fault by its id.
Nothing in it is executed but the operations, which `spec.operations.parse` has to accept.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from kvclaims.checker.layouts import LayoutPool
from kvclaims.checker.supervise import Program
from kvclaims.checker.verdicts import Violation
from kvclaims.spec.content import Content
from kvclaims.spec.interface import BadOperation, PoolConfig
from kvclaims.spec.operations import SCHEMA, Operation, parse
from kvclaims.spec.vocabulary import RULES

FORMAT: Final = 1
FOLDER: Final = Path("counterexamples")

Breaks = Callable[[Program], Sequence[Violation]]
"""Runs a program and tells what it broke."""


@dataclass(frozen=True)
class Counterexample:
    """A program, the rule that it breaks on an engine, and how it was found."""

    engine: str
    program: Program
    rule: str
    message: str
    seed: int | None = None
    fault: str | None = None
    """The id of the planted fault that breaks the rule; None for the engine as it is."""
    version: str = ""
    """The engine's version that it was found on; empty where nobody noted it."""

    def write(self, folder: Path) -> Path:
        """Write the file; `BadOperation` where that is not possible.

        The name is made of the engine and the rule or fault, so the same find is one file.
        """
        kind = self.fault or f"seed{self.seed}-{self.rule}"
        path = folder / f"{self.engine}-{kind}.json"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise BadOperation(f"cannot write {path}: {error.strerror}") from None
        return path

    def to_json(self) -> dict[str, Any]:
        config = self.program.config
        return {
            "format": FORMAT,
            "engine": self.engine,
            "version": self.version,
            "rule": self.rule,
            "message": self.message,
            "seed": self.seed,
            "fault": self.fault,
            "pool": pool_json(config),
            "operations": [operation.to_json() for operation in self.program.operations],
        }


def read(path: Path) -> Counterexample:
    """Read a file; `BadOperation` with one line that says what is wrong with it."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadOperation(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise BadOperation(f"{path}: not JSON") from None
    try:
        return parsed(raw)
    except BadOperation as error:
        raise BadOperation(f"{path}: {error}") from None


def parsed(raw: object) -> Counterexample:
    """The counterexample in a JSON object; `BadOperation` that says what is wrong with it."""
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise BadOperation("not a counterexample of this format")
    engine, rule, message = (_text(raw, name) for name in ("engine", "rule", "message"))
    if rule not in RULES:
        raise BadOperation(f"unknown rule {rule!r}")
    fault, seed = raw.get("fault"), raw.get("seed")
    if not (fault is None or isinstance(fault, str)) or not (seed is None or type(seed) is int):
        raise BadOperation("fault must be a text and seed a whole number, or null")
    version = raw.get("version", "")
    if not isinstance(version, str):
        raise BadOperation("version must be a text")
    pool = raw.get("pool")
    config = read_pool(pool)
    operations = raw.get("operations")
    if not isinstance(operations, list):
        raise BadOperation("operations must be a list")
    program = Program(config, tuple(parse(item) for item in operations))
    return Counterexample(engine, program, rule, message, seed, fault, version)


_NEEDED: Final = ("usable", "block_size", "defer_limit")


def pool_json(config: PoolConfig) -> dict[str, Any]:
    """A pool as it stands in a file: what is not plain beside the three numbers of every pool."""
    plain = vars(PoolConfig(config.usable))
    told = {n: v for n, v in vars(config).items() if n in _NEEDED or v != plain.get(n)}
    return {n: list(v) if isinstance(v, tuple) else v for n, v in told.items()}


def read_pool(raw: object) -> PoolConfig:
    """Read a pool; `BadOperation` where something is missing, unknown or of another kind."""
    names = set(vars(LayoutPool(1)))
    if not isinstance(raw, dict) or not set(_NEEDED) <= set(raw) <= names:
        raise BadOperation("pool must have whole numbers usable, block_size and defer_limit")
    fields: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in raw.items()}
    for name, value in fields.items():
        numbers = value if name == "windows" else (value,)
        kind = str if name in ("policy", "layout") else int
        if not isinstance(numbers, tuple) or any(type(n) is not kind for n in numbers):
            raise BadOperation(f"pool: {name} is of another kind")
    return LayoutPool(**fields) if "layout" in fields else PoolConfig(**fields)


def _text(raw: dict[str, Any], name: str) -> str:
    value = raw.get(name)
    if not isinstance(value, str) or not value:
        raise BadOperation(f"{name} must be a text")
    return value


# --- making them shorter -----------------------------------------------------------------


def shortest(program: Program, rule: str, breaks: Breaks, tries: int = 400) -> Program:
    """Leave out operations, longest stretches first, while the same rule is the first broken.

    Ends when no single operation can be left out, or after so many tries.
    """
    program = _cut(program, breaks(program))
    length = len(program.operations) // 2
    while length:
        start, left_out = 0, False
        while start < len(program.operations):
            if tries == 0:
                return program
            tries -= 1
            kept = program.operations[:start] + program.operations[start + length :]
            shorter = replace(program, operations=kept)
            found = breaks(shorter)
            if found and found[0].rule == rule:
                program, left_out = _cut(shorter, found), True
            else:
                start += length
        if not left_out or length > 1:
            length = length // 2 if length > 1 else 0
    return program


def simplest(program: Program, rule: str, breaks: Breaks, tries: int = 300) -> Program:
    """Make what is left plainer while the same rule is the first broken: fields that are not
    needed go, numbers become smaller, contents shorter, and the pool plain."""

    def still(candidate: Program) -> bool:
        nonlocal tries
        tries -= 1
        found = breaks(candidate)
        return bool(found) and found[0].rule == rule

    changed = True
    while changed and tries > 0:
        changed = False
        for candidate in _plainer(program):
            if tries <= 0:
                break
            if still(candidate):
                program, changed = candidate, True
                break
    return program


def _plainer(program: Program) -> Iterator[Program]:
    """Every program that is one change plainer."""
    plain = PoolConfig(program.config.usable, program.config.block_size, 0)
    for name, value in vars(plain).items():
        if getattr(program.config, name) != value:
            yield replace(program, config=replace(program.config, **{name: value}))
    for index, operation in enumerate(program.operations):
        for fields in _plainer_fields(operation):
            raw = Operation(operation.op, fields)
            operations = (*program.operations[:index], raw, *program.operations[index + 1 :])
            yield replace(program, operations=operations)


def _plainer_fields(operation: Operation) -> Iterator[dict[str, Any]]:
    required, _ = SCHEMA[operation.op]
    fields = dict(operation.fields)
    for name, value in fields.items():
        if name not in required:
            yield {n: v for n, v in fields.items() if n != name}
        if name == "content":
            yield from ({**fields, name: shorter} for shorter in _shorter(value))
        elif type(value) is int:
            yield from (
                {**fields, name: n} for n in dict.fromkeys((1, value // 2)) if 0 < n < value
            )


def _shorter(content: Content) -> Iterator[Content]:
    if len(content) > 1:
        yield content[:1]
        yield content[1:]
    for index, segment in enumerate(content):
        smaller = []
        if segment.tokens:
            smaller.append(replace(segment, tokens=0))
        if segment.blocks > 1:
            smaller += [replace(segment, blocks=1), replace(segment, blocks=segment.blocks - 1)]
        for one in smaller:
            if one.blocks or one.tokens:
                yield (*content[:index], one, *content[index + 1 :])


def _cut(program: Program, found: Sequence[Violation]) -> Program:
    """Without the operations after the one that broke the rule."""
    if not found:
        return program
    return replace(program, operations=program.operations[: found[0].operation])


def described(program: Program) -> list[str]:
    """The operations in words, numbered."""
    return [f"{number:3} {operation}" for number, operation in enumerate(program.operations, 1)]


def operations_json(operations: Sequence[Operation]) -> list[dict[str, Any]]:
    return [operation.to_json() for operation in operations]
