"""Where in an engine's source a rule was broken: the line that made the breaking allocator call.

Only a run that is known to break a rule is looked at: its last operation is done once more under
`sys.setprofile`, which notes every call that enters the engine from outside, such as those of the
allocator, with the engine's frames above it.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final

from kvclaims.checker.monitor import shown_step
from kvclaims.checker.supervise import Crash, Program, Supervisor, open_supervised, oracle_for
from kvclaims.checker.verdicts import Violation
from kvclaims.spec.interface import Engine, PoolStep
from kvclaims.spec.operations import Operation, perform


@dataclass(frozen=True)
class Place:
    """A line of the engine.  `file` is relative to the folder that holds its package."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} ({self.function})"


@dataclass(frozen=True)
class _Entry:
    """A call into the engine: the function, and the engine's lines that led to it, the innermost
    first; none where it was asked for from outside, as a claim asks for its pins."""

    function: Place
    callers: tuple[Place, ...]
    blocks: frozenset[int]
    """The blocks among its arguments."""


def locate(engine: Engine, program: Program, finding: Violation) -> tuple[Place, ...]:
    """The engine's lines in which `program` breaks its rule, the breaking one first and what
    called it after that; none for an engine without a package, or where no line can be told."""
    if engine.package is None or not program.operations:
        return ()
    root = Path(engine.info().path).resolve()
    try:
        supervisor = open_supervised(engine, oracle_for(engine), program.config)
    except Crash:
        return ()
    *first, last = program.operations[: finding.operation or None]
    for operation in first:
        supervisor.do(operation)
    if finding.rule == "B9" and " raised " in finding.message:
        return _raised(supervisor, last, root)
    entries, marks = _watched(supervisor, last, root)
    return _breaking(entries, marks, finding, getattr(engine, "allocator_calls", {}))


def _raised(supervisor: Supervisor, last: Operation, root: Path) -> tuple[Place, ...]:
    """The engine's frames of the exception that the operation ends with."""
    operations = [last]
    if last.op == "step":
        operations = [Operation("step", {})] * last.fields.get("times", 1)
    try:
        for operation in operations:
            perform(supervisor.runtime, operation)
    except Exception as error:  # noqa: BLE001  (it is known to raise; what is shown is where)
        frames = traceback.extract_tb(error.__traceback__)
        found = (_place(f.filename, f.lineno or 0, f.name, root) for f in reversed(frames))
        return tuple(place for place in found if place is not None)
    return ()


def _watched(
    supervisor: Supervisor, last: Operation, root: Path
) -> tuple[list[_Entry], list[tuple[str, int]]]:
    """Every entry into the engine while `last` is done, and each allocator step, as violations
    name it, with how many entries came before it was told."""
    entries: list[_Entry] = []
    marks: list[tuple[str, int]] = []

    def told(step: PoolStep) -> None:
        marks.append((shown_step(step), len(entries)))

    supervisor.runtime.listen(told)
    sys.setprofile(_profile(entries, root))
    try:
        supervisor.do(last)
        supervisor.close()
    finally:
        sys.setprofile(None)
    return entries, marks


def _profile(entries: list[_Entry], root: Path) -> Callable[[FrameType, str, Any], None]:
    def note(frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        function = _place_of(frame, root)
        if function is None or frame.f_back is None or _place_of(frame.f_back, root) is not None:
            return
        callers = tuple(_callers(frame.f_back, root))
        entries.append(_Entry(function, callers, frozenset(_blocks(frame))))

    return note


def _blocks(frame: FrameType) -> Iterator[int]:
    """The ids of the blocks that a call is given; what is read only once is left alone."""
    names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
    for value in (frame.f_locals.get(name) for name in names):
        for item in value if isinstance(value, list | tuple) else (value,):
            number = getattr(item, "block_id", None)
            if type(number) is int:
                yield number


def _callers(frame: FrameType | None, root: Path) -> Iterator[Place]:
    while frame is not None:
        place = _place_of(frame, root)
        if place is not None:
            yield place
        frame = frame.f_back


def _place_of(frame: FrameType, root: Path) -> Place | None:
    code = frame.f_code
    return _place(code.co_filename, frame.f_lineno, code.co_qualname, root)


def _place(file: str, line: int, function: str, root: Path) -> Place | None:
    """The place, None outside of the engine's package."""
    if not file.startswith(f"{root}/"):
        return None
    return Place(file.removeprefix(f"{root.parent}/"), line, function)


_OWNED: Final = ("take", "draw", "share", "drop", "give_back")
"""Allocator steps that change who refers to a block, and whether it is queued."""


def _breaking(
    entries: list[_Entry],
    marks: list[tuple[str, int]],
    finding: Violation,
    calls: Mapping[str, str],
) -> tuple[Place, ...]:
    """The entry behind what was found wrong: before the step it was seen at, the last that could
    do it, if possible to the block that is named; without a step, the last of the operation."""
    action = finding.step.partition("(")[0]
    counts = [count for text, count in marks if text == finding.step] or [c for _, c in marks]
    before = entries[: (counts or [len(entries)])[-1]]
    able = [entry for entry in before if _name(entry) in _able(finding, action, calls)]
    block = re.search(r"\bblock (\d+)", finding.message)
    at_block = [entry for entry in able if block and int(block[1]) in entry.blocks]
    called = [entry for entry in before if entry.callers]
    chosen = (at_block or able or called)[-1:]
    return tuple(place for entry in chosen for place in entry.callers or (entry.function,))


def _able(finding: Violation, action: str, calls: Mapping[str, str]) -> set[str]:
    """The engine's functions that can have done what was found wrong.

    What the monitor compares is read after the outermost call, and told at its last step: so
    references and the queue are changed by a step that moves blocks, not by that one.
    """
    if finding.message.startswith(("ref of ", "queued of ", "the free counter")):
        return {calls[name] for name in _OWNED if name in calls}
    return {calls[action]} if action in calls else set()


def _name(entry: _Entry) -> str:
    return entry.function.function.rpartition(".")[2]
