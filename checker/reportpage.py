"""One self-contained page from what checks found: verdict, rules, violations, pictures.

A `Page` is plain data; `render` makes HTML of it with the templates `report.*`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from typing import Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from kvclaims.checker.reportgraph import Lit
from kvclaims.checker.reportmutation import Mutation
from kvclaims.checker.reportrules import COLUMNS, RuleRow, by_property
from kvclaims.checker.reporttimeline import Timeline, embedded
from kvclaims.checker.verdicts import Violation, counted
from kvclaims.spec.vocabulary import RULES, Verdict

NOT_RUN: Final = "not run"

MEANINGS: Final = {
    str(Verdict.PROVED): "for any number of blocks, claims and requests",
    str(Verdict.HOLDS): "on everything that was run; what no run reached was not judged",
    str(Verdict.VIOLATED): "the contract is broken",
    str(Verdict.NOT_INDUCTIVE): "not shown: the proof does not go through",
    str(Verdict.VACUOUS): "not shown: nothing was checked",
    str(Verdict.UNKNOWN): "not shown",
    str(Verdict.NOT_EXPOSED): "the engine has no such thing, or none that can be seen",
}


@dataclass(frozen=True)
class Check:
    """One command that was run: its verdict in a word, and its own JSON object in `data`."""

    name: str
    command: str
    engine: str
    verdict: str
    seconds: float
    did: str
    data: Mapping[str, Any] = field(default_factory=dict)
    violations: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class Change:
    """A value before and after, and their difference where they are numbers."""

    name: str
    before: str
    after: str
    difference: str = ""


@dataclass(frozen=True)
class Case:
    """One broken rule with all that is needed to understand it."""

    violation: Violation
    where: str
    operations: tuple[str, ...] = ()
    replay: str = ""
    """The file that `kvclaims replay` runs again, empty where there is none."""
    kept: str = ""
    """The file with what was found, where it cannot be run again."""
    line: Timeline | None = None
    note: str = ""
    """Why there is no timeline, or what it is not."""
    also: tuple[Violation, ...] = ()

    @property
    def violations(self) -> tuple[Violation, ...]:
        return (self.violation, *self.also)

    @property
    def meaning(self) -> str:
        return RULES[self.violation.rule].meaning

    @property
    def at(self) -> str:
        """The operation that broke the rule, in words."""
        number = self.violation.operation
        if number is None:
            return ""
        if number == 0:
            return "opening the pool"
        if number > len(self.operations):
            return "closing the run"
        return f"operation {number} of {len(self.operations)}: {self.operations[number - 1]}"

    @property
    def changes(self) -> list[Change]:
        return changes(self.violation.before, self.violation.after)


@dataclass(frozen=True)
class Show:
    """A run that broke nothing and is worth looking at."""

    title: str
    said: str
    line: Timeline


@dataclass(frozen=True)
class Page:
    """What a report says, in the order in which it is read."""

    title: str
    verdict: str
    said: str
    engines: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    cases: tuple[Case, ...] = ()
    shows: tuple[Show, ...] = ()
    rules: tuple[RuleRow, ...] = ()
    checks: tuple[Check, ...] = ()
    mutation: Mutation | None = None
    graph: Lit | None = None

    def to_json(self) -> dict[str, Any]:
        """What the page says, for programs: the same numbers."""
        return {
            "title": self.title,
            "violations": [
                {
                    **violation.to_json(),
                    "where": case.where,
                    "file": case.replay or case.kept or None,
                }
                for case in self.cases
                for violation in case.violations
            ],
            "timelines": [told(line) for line in self.lines],
            "rules": [row.to_json() for row in self.rules],
            "notes": list(self.notes),
            "mutation": asdict(self.mutation) if self.mutation else None,
        }

    @property
    def lines(self) -> Iterator[Timeline]:
        """Every timeline in the order of the page."""
        yield from (case.line for case in self.cases if case.line is not None)
        yield from (show.line for show in self.shows)


def told(line: Timeline) -> dict[str, Any]:
    """A timeline's numbers: the pool at its end, and every answer at the door."""
    last = None
    for counts in line.counts():
        last = counts
    return {
        "run_id": line.run_id,
        "engine": line.engine,
        "events": line.events,
        "steps": len(line.steps),
        "usable": line.usable,
        "last": {**vars(last), "headroom": last.headroom} if last is not None else {},
        "doors": [vars(door) for door in line.doors],
    }


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """Changed fields only."""
    found = []
    for name in {**before, **after}:
        was, now = before.get(name), after.get(name)
        if was == now:
            continue
        difference = ""
        if type(was) is int and type(now) is int:
            sign, size = ("+", now - was) if now > was else ("−", was - now)
            difference = f"{was} {sign} {size} = {now}"
        found.append(Change(name, _shown(was), _shown(now), difference))
    return found


def _shown(value: object) -> str:
    if value is None:
        return "—"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple | set | frozenset):
        return ", ".join(map(str, value)) or "none"
    return str(value)


def said_of(verdict: str, cases: Sequence[Case]) -> str:
    """The verdict in a sentence."""
    if cases:
        found = [violation for case in cases for violation in case.violations]
        rules = list(dict.fromkeys(violation.rule for violation in found))
        named = ", ".join(rules[:6]) + (" and others" if rules[6:] else "")
        more = "" if len(rules) == 1 else f" of {counted(len(rules), 'rule')}"
        meaning = f": {RULES[rules[0]].meaning}" if len(rules) == 1 else ""
        return f"{counted(len(found), 'violation')}{more}: {named}{meaning}"
    return MEANINGS.get(verdict, "")


def render(page: Page) -> str:
    """One page that needs nothing else: no network, any browser, any size of screen, paper."""
    loader = PackageLoader("kvclaims.checker")
    environment = Environment(
        loader=loader,
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    source = {
        name: Markup(loader.get_source(environment, f"report.{name}")[0]) for name in ("css", "js")
    }
    lines = list(page.lines)
    places = {id(line): place for place, line in enumerate(lines)}
    return environment.get_template("report.html.jinja").render(
        page=page,
        columns=COLUMNS,
        rules=RULES,
        meanings=MEANINGS,
        version=version("kvclaims"),
        number_of=lambda line: places[id(line)],
        by_property=by_property,
        rule_words=Markup(embedded({rule.number: rule.meaning for rule in RULES.values()})),
        data=[Markup(line.data()) for line in lines],
        style=source["css"],
        script=source["js"],
    )


def engines_of(checks: Iterable[Check]) -> tuple[str, ...]:
    """Name, version and path of every engine that was run."""
    found = (check.data.get("engine") for check in checks)
    named = (e for e in found if isinstance(e, Mapping))
    return tuple(dict.fromkeys(f"{e['name']} {e['version']} ({e['path']})" for e in named))
