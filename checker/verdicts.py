"""How verdicts combine, and what every report can do.

A verdict never rounds up: one part that was violated makes the whole VIOLATED, one that was
not shown keeps the whole from HOLDS, and a check that checked nothing is VACUOUS.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from kvclaims.spec.vocabulary import EXIT_CODES, RULES, Verdict

EXIT_WRONG_USE: Final = 2
"""Wrong usage, or something needed is missing."""

_WORST_FIRST: Final = (
    Verdict.VIOLATED,
    Verdict.NOT_INDUCTIVE,
    Verdict.UNKNOWN,
    Verdict.VACUOUS,
    Verdict.HOLDS,
    Verdict.PROVED,
    Verdict.NOT_EXPOSED,
)


@dataclass(frozen=True)
class Violation:
    """A broken rule, and where it shows: an allocator `step` with what was before and after, or
    the event `seq` of a run's trace."""

    rule: str
    message: str
    step: str = ""
    before: Mapping[str, Any] = field(default_factory=dict)
    after: Mapping[str, Any] = field(default_factory=dict)
    run_id: str = ""
    seq: int | None = None
    operation: int | None = None
    """In which operation of a run it was seen: from 1, and 0 for its opening."""

    def __str__(self) -> str:
        where = f" (run {self.run_id}, event {self.seq})" if self.seq is not None else ""
        where += f" (at {self.step})" if self.step else ""
        return f"{self.rule} {RULES[self.rule].meaning}: {self.message}{where}"

    def to_json(self) -> dict[str, Any]:
        return {
            "rule": self.rule,
            "meaning": RULES[self.rule].meaning,
            "message": self.message,
            "step": self.step or None,
            "before": dict(self.before),
            "after": dict(self.after),
            "run_id": self.run_id,
            "seq": self.seq,
            "operation": self.operation,
        }


Progress = Callable[[str], None]
"""Told in a few words what is being done now."""


class Report(Protocol):
    """What a command found."""

    @property
    def verdict(self) -> Verdict: ...

    def to_json(self) -> dict[str, Any]:
        """The fields of the command's JSON object, without verdict, exit and seconds."""

    def lines(self) -> Iterable[str]:
        """The same for people, one line each."""


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """The verdict on the whole; VACUOUS if there are no parts."""
    present = set(verdicts)
    return next((verdict for verdict in _WORST_FIRST if verdict in present), Verdict.VACUOUS)


def exit_code(verdict: Verdict) -> int:
    return EXIT_CODES[verdict]


def counted(number: int, word: str) -> str:
    """`1 event`, `2 events`."""
    return f"{number:,} {word}" + ("" if number == 1 else "s")


@dataclass(frozen=True)
class Several:
    """Reports of one kind put together: lists are joined and the fields `sums` added up.

    `name` is the field under which the parts stand in full.
    """

    name: str
    parts: tuple[Report, ...]
    sums: tuple[str, ...]

    @property
    def verdict(self) -> Verdict:
        return worst(part.verdict for part in self.parts)

    def to_json(self) -> dict[str, Any]:
        whole: dict[str, Any] = {}
        details = [{"verdict": part.verdict, **part.to_json()} for part in self.parts]
        for detail in details:
            for key, value in detail.items():
                if key in self.sums:
                    whole[key] = whole.get(key, 0) + value
                elif isinstance(value, list):
                    whole[key] = [*whole.get(key, []), *value]
        return {**whole, self.name: details}

    def lines(self) -> Iterable[str]:
        for part in self.parts:
            yield from part.lines()
