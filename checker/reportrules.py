"""The contract's rules beside the evidence for each: proof, litmus, fuzz and monitor.

A cell never rounds up: a rule for which a check has shown nothing says so, even where the check
as a whole holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from kvclaims.checker.verdicts import counted, worst
from kvclaims.spec import pool
from kvclaims.spec.vocabulary import RULES, Verdict

COLUMNS: Final = ("proof", "litmus", "fuzz", "monitor")
NOTHING: Final = "nothing shown"

MONITORED: Final = frozenset(
    {rule for action in pool.ACTIONS for guard in action.guards for rule in guard.protects}
)
"""Rules whose guards the monitor evaluates at every step of an allocator."""


class Checked(Protocol):
    """What a check found, as its command's JSON tells it."""

    @property
    def command(self) -> str: ...
    @property
    def engine(self) -> str: ...
    @property
    def verdict(self) -> str: ...
    @property
    def data(self) -> Mapping[str, Any]: ...
    @property
    def violations(self) -> Sequence[Mapping[str, Any]]: ...


@dataclass(frozen=True)
class Cell:
    """A verdict in its word, or `NOTHING`, and what it rests on."""

    verdict: str
    detail: str = ""

    @property
    def is_empty(self) -> bool:
        return self.verdict == NOTHING


@dataclass(frozen=True)
class RuleRow:
    number: str
    meaning: str
    cells: tuple[Cell, ...]
    """One for each of `COLUMNS`."""

    @property
    def is_violated(self) -> bool:
        return any(cell.verdict == Verdict.VIOLATED for cell in self.cells)

    @property
    def is_silent(self) -> bool:
        """No check has said anything about the rule."""
        return all(cell.is_empty for cell in self.cells)

    def to_json(self) -> dict[str, Any]:
        cells = zip(COLUMNS, self.cells, strict=True)
        return {"rule": self.number, **{name: [c.verdict, c.detail] for name, c in cells}}


def rule_rows(checks: Sequence[Checked]) -> tuple[RuleRow, ...]:
    """A row for every rule of the contract, in its order."""
    return tuple(
        RuleRow(
            number,
            rule.meaning,
            (
                _proof(number, checks),
                _litmus(number, checks),
                _fuzz(number, checks),
                _monitor(number, checks),
            ),
        )
        for number, rule in RULES.items()
    )


def _verdict(words: Iterable[str]) -> str:
    return str(worst(Verdict(word) for word in words))


def _of(checks: Sequence[Checked], *commands: str) -> Iterator[Checked]:
    return (check for check in checks if check.command in commands)


def _broken(rule: str, checks: Iterable[Checked]) -> list[Mapping[str, Any]]:
    return [v for check in checks for v in check.violations if v["rule"] == rule]


def _proof(rule: str, checks: Sequence[Checked]) -> Cell:
    found = [
        one
        for check in _of(checks, "prove")
        for one in check.data.get("obligations", ())
        if one["rule"] == rule
    ]
    if found:
        proved = sum(one["verdict"] == Verdict.PROVED for one in found)
        return Cell(_verdict(o["verdict"] for o in found), f"{proved} of {len(found)} obligations")
    explored = [
        one
        for check in _of(checks, "explore")
        for one in check.data.get("progress", ())
        if one["rule"] == rule
    ]
    if explored:
        detail = f"explored on {counted(len(explored), 'instance')}"
        return Cell(_verdict(one["verdict"] for one in explored), detail)
    return Cell(NOTHING)


def _litmus(rule: str, checks: Sequence[Checked]) -> Cell:
    found = [
        (check.engine, program)
        for check in _of(checks, "litmus")
        for program in check.data.get("programs", ())
        if rule in program["rules"]
    ]
    broken = _broken(rule, _of(checks, "litmus"))
    if broken:
        names = sorted({str(v.get("message")) for v in broken})
        return Cell(str(Verdict.VIOLATED), names[0])
    if not found:
        return Cell(NOTHING)
    programs = list(dict.fromkeys(program["id"] for _, program in found))
    on = len({engine for engine, _ in found})
    detail = ", ".join(programs[:4]) + (f" and {len(programs) - 4} more" if programs[4:] else "")
    verdict = _verdict(program["verdict"] for _, program in found)
    if verdict == Verdict.VIOLATED:
        verdict, detail = str(Verdict.UNKNOWN), f"{detail}; one of them breaks another rule"
    return Cell(verdict, f"{detail} on {counted(on, 'engine')}")


def _fuzz(rule: str, checks: Sequence[Checked]) -> Cell:
    """Nothing found counts only where fuzzing has caught a planted fault of the same rule."""
    fuzzed = list(_of(checks, "fuzz"))
    broken = _broken(rule, [*fuzzed, *_of(checks, "replay")])
    if broken:
        return Cell(str(Verdict.VIOLATED), str(broken[0].get("message")))
    caught = [
        fault
        for check in _of(checks, "faults")
        for fault in check.data.get("faults", ())
        if fault.get("caught_by") == rule and fault.get("verdict") == Verdict.HOLDS
    ]
    if caught and not fuzzed:
        return Cell(NOTHING, f"{counted(len(caught), 'planted fault')} caught")
    if not caught:
        return Cell(NOTHING)
    done = sum(check.data.get("operations", 0) for check in fuzzed)
    detail = f"{done:,} operations; {counted(len(caught), 'planted fault')} caught"
    verdict = _verdict(check.verdict for check in fuzzed)
    if verdict == Verdict.VIOLATED:
        verdict, detail = str(Verdict.UNKNOWN), f"{detail}; stopped at another rule"
    return Cell(verdict, detail)


def _monitor(rule: str, checks: Sequence[Checked]) -> Cell:
    broken = [v for v in _broken(rule, checks) if v.get("step")]
    if broken:
        return Cell(str(Verdict.VIOLATED), str(broken[0]["step"]))
    steps = sum(
        check.data.get("monitored_steps", 0) for check in checks if check.command != "monitor"
    )
    if rule in MONITORED and steps:
        return Cell(str(Verdict.HOLDS), f"{steps:,} steps judged")
    return Cell(NOTHING)


@dataclass(frozen=True)
class Proved:
    """All obligations of one property of a machine; `open` are the actions that are not proved."""

    rule: str
    name: str
    machine: str
    verdict: str
    proved: int
    total: int
    seconds: float
    open: tuple[str, ...]


def by_property(obligations: Sequence[Mapping[str, Any]]) -> list[Proved]:
    """Obligations put together by machine and property."""
    groups: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for one in obligations:
        key = (one["rule"], str(one.get("property", "")), str(one.get("machine", "")))
        groups.setdefault(key, []).append(one)
    return [
        Proved(
            *key,
            verdict=_verdict(one["verdict"] for one in group),
            proved=sum(one["verdict"] == Verdict.PROVED for one in group),
            total=len(group),
            seconds=sum(float(one.get("seconds", 0)) for one in group),
            open=tuple(str(o["action"]) for o in group if o["verdict"] != Verdict.PROVED),
        )
        for key, group in groups.items()
    ]
