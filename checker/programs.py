"""Litmus programs: small runs with an exact expected outcome, read from TOML.

A program file holds

    id = "L3"                      title, rules (numbers of the contract) beside it
    usable = 80                    blocks in the pool; defer_limit (default 1)
    request = "active"             whose outcome is judged;  claim = "keep" likewise
    do = [ {op = "submit", …}, … ] the operations of `kvclaims.spec.operations`
    [expect]                       field = value, see `FIELDS`
    [rule]                         field = the rule that is broken where it is another value, if
                                   that is not the one in `FIELD_RULES`

An operation with `fails = "L1"` has to be turned down, because of that rule, and to change nothing.

A matrix has a list of pools in `usable` and one or more `[[mode]]`, each with a `name`, its own
`do`, an `expect` that is the same in every pool and an `expect_each` with one value per pool.  A
mode may name the `mechanism` that keeps the KV of its pool: what that really gives is measured.
`fold = "L3"` judges the trace of another program; `[lowering]` with `promised` and `offered`
runs the program with another protection and asks whether the promise survives.

Sizes are in blocks, so the same file runs on engines with different block sizes.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Final

from kvclaims.spec.interface import BadOperation
from kvclaims.spec.operations import Operation, parse
from kvclaims.spec.vocabulary import RULES, Outcome, Protection

Check = Callable[[object], bool]


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _is_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_outcome(value: object) -> bool:
    return isinstance(value, str) and value in set(Outcome)


FIELDS: Final[dict[str, tuple[Check, str]]] = {
    "outcome": (_is_outcome, "an outcome"),
    "victims": (_is_count, "a count"),
    "shortfall": (_is_count, "a count"),
    "free": (_is_count, "a count"),
    "blocking_claims": (_is_names, "a list of names"),
    "waits_on": (_is_names, "a list of names"),
    "deferred": (_is_count, "a count"),
    "accepted": (_is_count, "a count"),
    "claims_refused": (_is_count, "a count"),
    "harmed": (_is_count, "a count"),
    "demoted": (_is_count, "a count"),
    "expired": (_is_count, "a count"),
    "lost_after_release": (_is_count, "a count"),
    "future_reuse_denied": (_is_count, "a count"),
    "new_reusable": (_is_count, "a count"),
    "hit_blocks": (_is_count, "a count"),
    "leading": (_is_count, "a count"),
    "survivors": (_is_count, "a count"),
    "materialized": (lambda value: type(value) is bool, "true or false"),
    "kv_intact": (_is_count, "a count"),
    "queued": (_is_count, "a count"),
    "references": (_is_count, "a count"),
    "null_uses": (_is_count, "a count"),
    "routed": (_is_count, "a count"),
    "lowering": (lambda value: value in ("rejected", "accepted"), "rejected or accepted"),
    "exact_tokens": (_is_count, "a count"),
    "leading_tokens": (_is_count, "a count"),
    "output_error": (lambda value: type(value) is float and value >= 0, "a number such as 0.34"),
}
"""What a program may expect, with the check of its value.

Counts are of events in the whole run, except: `shortfall`, `free` (blocks in the free queue when
it was refused), `blocking_claims`, `waits_on` (of its first deferral), `deferred`, `hit_blocks`
and `new_reusable` (contents of the request that became resident) speak of the program's request;
`leading`, `survivors` and `materialized` of its claim; `kv_intact` counts marked blocks whose KV
bytes did not change.  Of the pool at the end: `queued` counts the blocks met by walking the free
queue, `references` sums the reference counts, `null_uses` counts the places where the null block
stands (the queue, requests, claims, hashes), `routed` the contents that a replay of the engine's KV
events yields on the device.  What a reader of the mode's mechanism is served, whatever was
promised: `exact_tokens` and of those `leading_tokens`, and `output_error`, the largest relative
error of an attention output, to two decimals."""

FIELD_RULES: Final = {
    "outcome": "F4",
    "victims": "F5",
    "shortfall": "F4",
    "free": "T2",
    "blocking_claims": "F4",
    "waits_on": "F4",
    "deferred": "F4",
    "accepted": "L2",
    "claims_refused": "F2",
    "harmed": "L3",
    "demoted": "F6",
    "expired": "L6",
    "lost_after_release": "L4",
    "future_reuse_denied": "P4",
    "new_reusable": "P4",
    "hit_blocks": "P5",
    "leading": "L3",
    "survivors": "L3",
    "materialized": "L7",
    "kv_intact": "P1",
    "queued": "B1",
    "references": "B2",
    "null_uses": "B6",
    "routed": "B8",
    "lowering": "L5",
    "exact_tokens": "L2",
    "leading_tokens": "L2",
    "output_error": "L2",
}
"""The rule that is broken where a number is another than expected, unless the program names one."""

OF_REQUEST: Final = frozenset(
    {
        "outcome",
        "shortfall",
        "free",
        "blocking_claims",
        "waits_on",
        "deferred",
        "hit_blocks",
        "new_reusable",
    }
)
OF_CLAIM: Final = frozenset({"leading", "survivors", "materialized"})
OF_MECHANISM: Final = frozenset({"exact_tokens", "leading_tokens", "output_error"})


@dataclass(frozen=True)
class Lowering:
    """A promise as the client made it, and what an engine would offer in its place."""

    promised: Protection
    offered: Protection


@dataclass(frozen=True)
class Case:
    """One run: a pool, the operations, and the expected value of each judged field."""

    name: str
    usable: int
    operations: tuple[Operation, ...]
    expect: Mapping[str, Any]
    mechanism: str | None = None
    """What keeps the KV of the pool; None for the engine as it is."""
    fails: Mapping[int, str] = field(default_factory=dict)
    """Operations, counted from 1, that have to be turned down, with the rule that says so."""


@dataclass(frozen=True)
class Program:
    """One litmus program; `cases` has one entry, or one for each cell of a matrix.

    `fold` names the program whose trace is judged instead of a run of its own.
    """

    id: str
    title: str
    rules: tuple[str, ...]
    defer_limit: int
    request: str | None
    claim: str | None
    cases: tuple[Case, ...]
    fold: str | None = None
    lowering: Lowering | None = None
    rule_of: Mapping[str, str] = field(default_factory=dict)
    """Field → rule, where that is not the one in `FIELD_RULES`."""

    def rule(self, name: str) -> str:
        """The rule that is broken where this field is another than expected."""
        return self.rule_of.get(name, FIELD_RULES[name])


def builtin() -> tuple[Program, ...]:
    """The programs of the package, the contract's own (L, C, S) first."""
    folder = files("kvclaims.spec") / "programs"
    programs = [_read(entry) for entry in folder.iterdir() if entry.name.endswith(".toml")]
    return tuple(sorted(programs, key=lambda p: (not _of_the_contract(p.id), p.id)))


def select(names: Sequence[str]) -> tuple[Program, ...]:
    """The programs named by id or by path of a TOML file; all of them if none is named."""
    known = {program.id: program for program in builtin()}
    if not names:
        return tuple(known.values())
    chosen = []
    for name in names:
        if name in known:
            chosen.append(known[name])
        elif name.endswith(".toml"):
            chosen.append(load(Path(name)))
        else:
            raise BadOperation(f"unknown program {name!r} (known: {', '.join(known)})")
    return tuple(chosen)


def load(path: Path) -> Program:
    """Read one program file; raises `BadOperation` that names the file and what is wrong."""
    return _read(path)


def _of_the_contract(name: str) -> bool:
    return name[0] in "LCS" and (len(name) == 1 or name[1:].isdigit())


def _read(source: Traversable) -> Program:
    try:
        raw = tomllib.loads(source.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadOperation(f"{source}: no such file") from None
    except OSError as error:
        raise BadOperation(f"{source}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise BadOperation(f"{source.name}: not TOML: not UTF-8 text") from None
    except tomllib.TOMLDecodeError as error:
        raise BadOperation(f"{source.name}: not TOML: {error}") from None
    return _Reader(source.name).program(raw)


class _Reader:
    """Turns the tables of one file into a `Program`; every error names the file and the field."""

    def __init__(self, file: str) -> None:
        self._file = file

    def program(self, raw: dict[str, Any]) -> Program:
        shape = {"id", "title", "rules", "defer_limit", "request", "claim", "usable", "rule"}
        if "fold" in raw:
            shape = {"id", "title", "rules", "fold"}
        elif "mode" in raw:
            shape |= {"mode"}
        else:
            shape |= {"do", "expect", "lowering"}
        self._only(raw, shape, "")
        fold = self._optional_text(raw, "fold")
        program = Program(
            id=self._text(raw, "id"),
            title=self._text(raw, "title"),
            rules=self._rules(raw),
            defer_limit=self._count(raw, "defer_limit", 1),
            request=self._optional_text(raw, "request"),
            claim=self._optional_text(raw, "claim"),
            cases=() if fold else self._cases(raw),
            fold=fold,
            lowering=self._lowering(raw),
            rule_of=self._rule_of(raw),
        )
        self._check_subjects(program)
        self._check_rules(program)
        return program

    def _cases(self, raw: dict[str, Any]) -> tuple[Case, ...]:
        if "mode" not in raw:
            usable = self._pool(raw.get("usable"), "usable")
            expect = self._expect(raw, "expect", "")
            if odd := sorted(OF_MECHANISM & expect.keys()):
                raise self._wrong(f"expecting {odd[0]} needs a mode with a 'mechanism'")
            operations, fails = self._operations(raw, "")
            return (Case("", usable, operations, expect, fails=fails),)
        sizes = raw.get("usable")
        if not isinstance(sizes, list) or not sizes:
            raise self._wrong("usable must be a list of pools in a matrix")
        pools = [self._pool(size, "usable") for size in sizes]
        modes = raw["mode"]
        if not isinstance(modes, list):
            raise self._wrong("mode must be a list of tables")
        return tuple(case for mode in modes for case in self._mode(mode, pools))

    def _mode(self, mode: object, pools: list[int]) -> list[Case]:
        if not isinstance(mode, dict):
            raise self._wrong("mode must be a list of tables")
        self._only(mode, {"name", "do", "expect", "expect_each", "mechanism"}, "mode: ")
        name = self._text(mode, "name")
        where = f"mode {name!r}: "
        operations, fails = self._operations(mode, where)
        mechanism = self._optional_text(mode, "mechanism")
        same = self._expect(mode, "expect", where) if "expect" in mode else {}
        each = mode.get("expect_each", {})
        if not isinstance(each, dict):
            raise self._wrong(f"{where}expect_each must be a table")
        for of, values in each.items():
            if not isinstance(values, list) or len(values) != len(pools):
                raise self._wrong(f"{where}expect_each: {of} needs one value for each pool")
        cases = []
        for index, usable in enumerate(pools):
            own = {of: values[index] for of, values in each.items()}
            expect = {**same, **self._checked(own, f"{where}expect_each: ")}
            if mechanism is None and (odd := sorted(OF_MECHANISM & expect.keys())):
                raise self._wrong(f"{where}expecting {odd[0]} needs a 'mechanism'")
            cases.append(Case(f"{name}/{usable}", usable, operations, expect, mechanism, fails))
        return cases

    def _operations(
        self, table: dict[str, Any], where: str
    ) -> tuple[tuple[Operation, ...], dict[int, str]]:
        """The operations, and those that have to fail."""
        raw = table.get("do")
        if not isinstance(raw, list) or not raw:
            raise self._wrong(f"{where}do must be a list of operations")
        operations, fails = [], {}
        for index, one in enumerate(raw, 1):
            plain = one
            if isinstance(one, dict) and "fails" in one:
                fails[index] = one["fails"]
                plain = {key: value for key, value in one.items() if key != "fails"}
            try:
                operations.append(parse(plain))
            except BadOperation as error:
                raise self._wrong(f"{where}operation {index}: {error}") from None
        return tuple(operations), fails

    def _expect(self, table: dict[str, Any], key: str, where: str) -> dict[str, Any]:
        raw = table.get(key)
        if not isinstance(raw, dict) or not raw:
            raise self._wrong(f"{where}{key} must be a table of expected values")
        return self._checked(raw, f"{where}{key}: ")

    def _checked(self, raw: dict[str, Any], where: str) -> dict[str, Any]:
        for name, value in raw.items():
            if name not in FIELDS:
                raise self._wrong(f"{where}unknown field {name!r}")
            check, meaning = FIELDS[name]
            if not check(value):
                raise self._wrong(f"{where}{name} must be {meaning}")
        return raw

    def _check_subjects(self, program: Program) -> None:
        for case in program.cases:
            names = {
                kind: {o.fields[kind] for o in case.operations if kind in o.fields}
                for kind in ("request", "claim")
            }
            for kind, subject, judged in (
                ("request", program.request, OF_REQUEST),
                ("claim", program.claim, OF_CLAIM),
            ):
                needing = sorted(judged & set(case.expect))
                if needing and subject is None:
                    raise self._wrong(f"expecting {needing[0]} needs a {kind!r} to judge")
                if subject is not None and subject not in names[kind]:
                    raise self._wrong(f"{kind} {subject!r} occurs in no operation")
            marked = any(operation.op == "mark" for operation in case.operations)
            if "kv_intact" in case.expect and not marked:
                raise self._wrong("expecting kv_intact needs a 'mark' operation")
        if (program.lowering is not None) != any("lowering" in c.expect for c in program.cases):
            raise self._wrong("[lowering] and the expected field 'lowering' go together")

    def _rule_of(self, raw: dict[str, Any]) -> dict[str, str]:
        table = raw.get("rule", {})
        if not isinstance(table, dict):
            raise self._wrong("rule must be a table")
        return table

    def _check_rules(self, program: Program) -> None:
        """What a number or a failure is judged by is a rule that the program is about."""
        expected = {name for case in program.cases for name in case.expect}
        for name, rule in program.rule_of.items():
            if name not in expected:
                raise self._wrong(f"rule: {name} is not expected")
            if rule not in program.rules:
                raise self._wrong(f"rule: {name} must be judged by one of the program's rules")
        for case in program.cases:
            for index, rule in case.fails.items():
                if rule not in program.rules:
                    raise self._wrong(
                        f"operation {index}: fails must be one of the program's rules"
                    )

    def _lowering(self, raw: dict[str, Any]) -> Lowering | None:
        table = raw.get("lowering")
        if table is None:
            return None
        if not isinstance(table, dict):
            raise self._wrong("lowering must be a table")
        self._only(table, {"promised", "offered"}, "lowering: ")
        return Lowering(self._protection(table, "promised"), self._protection(table, "offered"))

    def _protection(self, table: dict[str, Any], key: str) -> Protection:
        try:
            return Protection(self._text(table, key))
        except ValueError:
            raise self._wrong(f"lowering: {key} must be a protection") from None

    def _rules(self, raw: dict[str, Any]) -> tuple[str, ...]:
        rules = raw.get("rules")
        if not _is_names(rules) or not rules:
            raise self._wrong("rules must be a list of rule numbers")
        for rule in rules:
            if rule not in RULES:
                raise self._wrong(f"rules: unknown rule {rule!r}")
        return tuple(rules)

    def _only(self, table: dict[str, Any], known: set[str], where: str) -> None:
        for key in table:
            if key not in known:
                raise self._wrong(f"{where}unknown field {key!r}")

    def _text(self, table: dict[str, Any], key: str) -> str:
        if key not in table:
            raise self._wrong(f"lacks {key!r}")
        value = table[key]
        if not isinstance(value, str) or not value:
            raise self._wrong(f"{key} must be a text")
        return value

    def _optional_text(self, table: dict[str, Any], key: str) -> str | None:
        return self._text(table, key) if key in table else None

    def _count(self, table: dict[str, Any], key: str, default: int) -> int:
        value = table.get(key, default)
        if type(value) is not int or value < 0:
            raise self._wrong(f"{key} must be a whole number of at least 0")
        return value

    def _pool(self, value: object, key: str) -> int:
        if type(value) is not int or value < 1:
            raise self._wrong(f"{key} must be a whole number of at least 1")
        return value

    def _wrong(self, reason: str) -> BadOperation:
        return BadOperation(f"{self._file}: {reason}")
