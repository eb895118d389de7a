"""Programs that break a rule: the file they are kept in, and how they are made shorter.

A file names the engine, the pool, the operations and the rule, and a planted fault by its id.
Nothing in it is executed but the operations, which `spec.operations.parse` has to accept.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from kvclaims.checker.supervise import Finding, Program
from kvclaims.spec.interface import BadOperation, PoolConfig
from kvclaims.spec.operations import Operation, parse
from kvclaims.spec.vocabulary import RULES

FORMAT: Final = 1
FOLDER: Final = Path("counterexamples")

Breaks = Callable[[Program], Sequence[Finding]]
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
            "rule": self.rule,
            "message": self.message,
            "seed": self.seed,
            "fault": self.fault,
            "pool": {
                "usable": config.usable,
                "block_size": config.block_size,
                "defer_limit": config.defer_limit,
            },
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
        return _read(raw)
    except BadOperation as error:
        raise BadOperation(f"{path}: {error}") from None


def _read(raw: object) -> Counterexample:
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise BadOperation("not a counterexample of this format")
    engine, rule, message = (_text(raw, name) for name in ("engine", "rule", "message"))
    if rule not in RULES:
        raise BadOperation(f"unknown rule {rule!r}")
    fault, seed = raw.get("fault"), raw.get("seed")
    if not (fault is None or isinstance(fault, str)) or not (seed is None or type(seed) is int):
        raise BadOperation("fault must be a text and seed a whole number, or null")
    pool = raw.get("pool")
    names = {"usable", "block_size", "defer_limit"}
    if (
        not isinstance(pool, dict)
        or set(pool) != names
        or any(type(n) is not int for n in pool.values())
    ):
        raise BadOperation("pool must have whole numbers usable, block_size and defer_limit")
    operations = raw.get("operations")
    if not isinstance(operations, list):
        raise BadOperation("operations must be a list")
    program = Program(PoolConfig(**pool), tuple(parse(item) for item in operations))
    return Counterexample(engine, program, rule, message, seed, fault)


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


def _cut(program: Program, found: Sequence[Finding]) -> Program:
    """Without the operations after the one that broke the rule."""
    if not found:
        return program
    return replace(program, operations=program.operations[: found[0].operation])


def described(program: Program) -> list[str]:
    """The operations in words, numbered."""
    return [f"{number:3} {operation}" for number, operation in enumerate(program.operations, 1)]


def operations_json(operations: Sequence[Operation]) -> list[dict[str, Any]]:
    return [operation.to_json() for operation in operations]
