"""`kvclaims report`, and the report.html of the gate and of single commands.

Start at `report`.  What was found becomes a `reportpage.Page`: violations with their runs as
timelines, the rules beside the evidence, the life of the claim that a run is about.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from kvclaims.checker import reportgraph
from kvclaims.checker.audit import AuditReport, read_trace
from kvclaims.checker.counterexample import read
from kvclaims.checker.litmus import LitmusReport
from kvclaims.checker.reportmutation import Mutation, beside, is_mutation, mutation_of
from kvclaims.checker.reportpage import (
    NOT_RUN,
    Case,
    Check,
    Page,
    Show,
    engines_of,
    render,
    said_of,
)
from kvclaims.checker.reportrules import rule_rows
from kvclaims.checker.reportrun import Recorded, again, violation_of
from kvclaims.checker.reporttimeline import Timeline, timeline
from kvclaims.checker.rows import PARQUET
from kvclaims.checker.verdicts import Progress, Report, Violation, counted, worst
from kvclaims.spec.interface import BadOperation, EngineMissing
from kvclaims.spec.operations import parse
from kvclaims.spec.telemetry import Event, TraceError
from kvclaims.spec.vocabulary import Verdict

FOUNDING: Final = "L3"
"""The program that shows what the contract is about; its run stands in the gate's report."""

MOST_CASES: Final = 40
"""Violations that a page tells in full; past them they are counted."""

MOST_LINES: Final = 8
"""Timelines on one page."""

_COMMANDS: Final = {"proofs": "prove", "exploration": "explore", "conformance": "conform"}


def write_page(page: Page, file: Path) -> None:
    """Write the page; `BadOperation` where that is not possible."""
    text = render(page)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BadOperation(f"cannot write {file}: {error.strerror}") from None


# --- the command -------------------------------------------------------------------------


@dataclass(frozen=True)
class PageReport:
    """A page that was written, and the verdict that stands on it."""

    page: Page
    output: Path

    @property
    def verdict(self) -> Verdict:
        return Verdict(self.page.verdict)

    def to_json(self) -> dict[str, Any]:
        return {**self.page.to_json(), "output": str(self.output)}

    def lines(self) -> Iterator[str]:
        yield f"{self.page.title}: {self.page.said}"
        for case in self.page.cases:
            yield from (f"  VIOLATED {found}" for found in case.violations)
        yield from (f"  {note}" for note in self.page.notes)
        yield f"{self.verdict}: {self.output}"


def report(file: Path, output: Path, run: str | None, progress: Progress) -> PageReport:
    """Make a page of a trace, a counterexample, a gate's JSON or a report of mutants: which of
    them, the file tells."""
    raw = _json_of(file)
    if run is not None and raw is not None:
        raise BadOperation("--run chooses a run of a trace")
    if raw is None:
        progress(f"folding {file.name}")
        page = page_of_runs(file.name, read_trace(file), run=run)
    elif "parts" in raw:
        progress(f"reading {file.name}")
        page = page_of_gate(raw, file.parent, progress)
    elif "operations" in raw:
        progress(f"running {file.name} again")
        page = page_of_counterexample(file)
    elif is_mutation(raw):
        page = page_of_mutation(mutation_of(raw, str(file)))
    else:
        raise BadOperation(
            f"{file}: neither a trace, nor a counterexample, nor a gate's JSON, nor one of mutate"
        )
    write_page(page, output)
    return PageReport(page, output)


def _json_of(file: Path) -> Mapping[str, Any] | None:
    """The JSON object in the file; None where it holds lines or rows, as a trace does."""
    if file.suffix == PARQUET:
        return None
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise BadOperation(f"{file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise BadOperation(f"{file}: not UTF-8 text") from None
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return raw if isinstance(raw, dict) and "schema_version" not in raw else None


# --- one run, or several -----------------------------------------------------------------


def page_of_runs(title: str, runs: Sequence[Sequence[Event]], *, run: str | None = None) -> Page:
    """The runs of a trace: what they broke, and those that are worth looking at.

    With `run`, that run alone; `BadOperation` where there is none of that id.
    """
    names = [events[0].run_id for events in runs]
    if run is not None and run not in names:
        raise BadOperation(f"no run {run!r} in {title} (there are: {', '.join(names[:20])})")
    chosen = [events for events in runs if run is None or events[0].run_id == run]
    lines = [timeline(events) for events in chosen]
    cases = _cases_of_lines(lines)
    shown = {id(case.line) for case in cases}
    rest = sorted((line for line in lines if id(line) not in shown), key=_interest)
    shows = tuple(_show(line) for line in rest[: max(0, MOST_LINES - len(shown))])
    left = len(lines) - len(shown) - len(shows)
    notes = [f"{counted(left, 'more run')} not shown: choose one with --run ID"] if left else []
    verdict = str(Verdict.VIOLATED if cases else Verdict.HOLDS)
    events = sum(line.events for line in lines)
    said = (
        said_of(verdict, cases)
        if cases
        else (
            f"{counted(events, 'event')} in {counted(len(lines), 'run')} break no rule that events "
            "can decide"
        )
    )
    first = next(iter([*(c.line for c in cases if c.line), *(s.line for s in shows)]), None)
    return Page(
        title=f"trace {title}",
        verdict=verdict,
        said=said,
        engines=tuple(dict.fromkeys(line.engine for line in lines if line.engine)),
        notes=tuple(notes),
        cases=cases,
        shows=shows,
        graph=reportgraph.graph_for(None, first),
    )


def _cases_of_lines(lines: Sequence[Timeline]) -> tuple[Case, ...]:
    """A case for each run that broke something: its first violation, with the others beside it."""
    broken = [line for line in lines if line.broken]
    return tuple(
        Case(
            violation=line.broken[0][1],
            where=f"folding the trace of run {line.run_id}",
            line=line if number < MOST_LINES else None,
            also=tuple(v for _, v in line.broken[1:]),
        )
        for number, line in enumerate(broken)
    )


def _interest(line: Timeline) -> tuple[bool, bool, int]:
    """Refusals first, the founding conflict before all others, then the longest."""
    return (line.run_id != FOUNDING, not line.doors, -line.events)


def _show(line: Timeline) -> Show:
    if line.run_id == FOUNDING and line.doors:
        return Show(f"The founding conflict: litmus {FOUNDING}", _founding(line), line)
    answers = [f"{door.request} was {door.outcome.replace('_', ' ')}" for door in line.doors[-3:]]
    said = "; ".join(answers) or "nobody was refused"
    return Show(f"Run {line.run_id}", f"{counted(line.events, 'event')}; {said}.", line)


def _founding(line: Timeline) -> str:
    door = line.doors[-1]
    free = door.usable - door.protected - door.active
    return (
        f"A pool of {door.usable} blocks. {door.protected} of them hold a finished request's "
        f"content that claim {', '.join(door.blockers)} protects; {free} are free. A request for "
        f"{door.need} would need {door.missing} more. An engine without the contract takes them in "
        f"silence; here the request is {door.outcome}, and told by whom it is blocked."
    )


# --- a counterexample --------------------------------------------------------------------


def page_of_counterexample(file: Path) -> Page:
    """A counterexample, run again on its engine: what it breaks now."""
    example = read(file)
    operations = tuple(str(operation) for operation in example.program.operations)
    planted = f" with planted fault {example.fault}" if example.fault else ""
    told = again(file)
    notes = []
    if not told.findings:
        notes.append(f"the file tells of {example.rule}; this time nothing was broken")
    case = Case(
        violation=told.findings[0] if told.findings else Violation(example.rule, example.message),
        where=f"a run on {told.engine}{planted}",
        operations=operations,
        replay=str(file),
        line=_line_of(told),
        also=told.findings[1:],
    )
    cases = (case,) if told.findings else ()
    verdict = str(Verdict.VIOLATED if cases else Verdict.HOLDS)
    shows = () if cases or case.line is None else (_show(case.line),)
    return Page(
        title=f"counterexample {file.name}",
        verdict=verdict,
        said=said_of(verdict, cases),
        engines=(told.engine + planted,),
        notes=tuple(notes),
        cases=cases,
        shows=shows,
        graph=reportgraph.graph_for(None, case.line),
    )


def _line_of(told: Recorded) -> Timeline | None:
    return timeline(told.events, told.operations, told.findings) if told.events else None


def case_of(
    raw: Mapping[str, Any], where: str, file: Path | None, name: str, *, draws: bool
) -> Case:
    """A violation as a command's JSON tells it; its run is run again where a file allows that.

    `file` is where the counterexample lies now, `name` what it is called in the replay line;
    without `draws` it is not run again.
    """
    violation = violation_of(raw)
    operations = tuple(_in_words(item) for item in raw.get("operations") or ())
    case = Case(violation, where, operations)
    if file is None or not _is_replayable(file):
        return replace(case, kept=name)
    case = replace(case, replay=name)
    if not draws:
        return replace(case, note="The timeline is left out: `kvclaims report` draws it.")
    try:
        told = again(file)
    except (BadOperation, EngineMissing, TraceError) as error:
        return replace(case, note=f"No timeline: it was run again, and {error}.")
    if not told.findings:
        return replace(case, line=_line_of(told), note="Run again, this run broke nothing.")
    return replace(case, violation=_completed(violation, told), line=_line_of(told))


def _completed(violation: Violation, told: Recorded) -> Violation:
    """With the operation and the changes that its own run shows, where the command told none."""
    seen = next((found for found in told.findings if found.rule == violation.rule), None)
    if seen is None or violation.operation is not None:
        return violation
    if violation.before or violation.after:
        return replace(violation, operation=seen.operation)
    return replace(violation, operation=seen.operation, before=seen.before, after=seen.after)


def _in_words(item: object) -> str:
    if isinstance(item, Mapping) and "op" in item:
        return str(parse(dict(item)))
    return str(item)


def _is_replayable(file: Path) -> bool:
    try:
        read(file)
    except BadOperation:
        return False
    return True


# --- a single command --------------------------------------------------------------------


def page_of_command(
    command: str,
    engine: str,
    verdict: str,
    data: Mapping[str, Any],
    runs: Sequence[Any] = (),
    of: str = "",
) -> Page:
    """What one command found; `runs` are the events of its runs, where it has them, and `of`
    names what it was about, where that is no engine."""
    violations = [*data.get("violations", ()), *data.get("counterexamples", ())]
    name = f"{command} {of or engine}".strip()
    check = Check(name, command, engine, verdict, 0.0, "", data, tuple(violations))
    own = page_of_runs(name, runs) if runs else None
    known = {(v["rule"], str(v.get("message"))) for v in violations}
    lines = {line.run_id: line for line in own.lines} if own else {}
    cases = []
    for number, raw in enumerate(violations[:MOST_CASES]):
        path = str(raw.get("file") or "")
        file = Path(path) if path else None
        case = case_of(raw, name, file, path, draws=number < MOST_LINES)
        line = lines.get(case.violation.run_id) if case.line is None else case.line
        cases.append(replace(case, line=line))
    extra = (
        [c for c in own.cases if not known & {(v.rule, v.message) for v in c.violations}]
        if own
        else []
    )
    cases = _once_each([*cases, *extra])
    shown = {id(case.line) for case in cases}
    shows = tuple(s for s in own.shows if id(s.line) not in shown) if own else ()
    first = next(iter([*(c.line for c in cases if c.line), *(s.line for s in shows)]), None)
    rows = tuple(row for row in rule_rows([check]) if any(not cell.is_empty for cell in row.cells))
    return Page(
        title=name,
        verdict=verdict,
        said=said_of(verdict, cases),
        engines=engines_of([check]) or (own.engines if own else ()),
        notes=tuple(own.notes if own else ()) + _left_out(violations),
        cases=tuple(cases),
        shows=shows,
        rules=rows,
        checks=(check,),
        graph=reportgraph.graph_for(None, first),
    )


def _once_each(cases: Sequence[Case]) -> list[Case]:
    """One case for one run: what else it broke stands with the first, unless it has a file of
    its own to run again."""
    first: dict[int, int] = {}
    kept: list[Case] = []
    for case in cases:
        at = first.get(id(case.line)) if case.line is not None else None
        if at is None:
            first[id(case.line)] = len(kept)
            kept.append(case)
        elif case.replay or case.kept:
            kept.append(replace(case, line=None, note="Its run is shown above."))
        else:
            kept[at] = replace(kept[at], also=(*kept[at].also, *case.violations))
    return kept


def _left_out(violations: Sequence[object]) -> tuple[str, ...]:
    left = len(violations) - MOST_CASES
    return (f"{counted(left, 'more violation')} in the JSON",) if left > 0 else ()


def write_report(command: str, options: Mapping[str, Any], found: Report, file: Path) -> None:
    """What `--report FILE` writes after litmus, fuzz or audit."""
    runs: Sequence[Sequence[Event]] = ()
    if isinstance(found, LitmusReport):
        runs = [case.events for program in found.programs for case in program.cases if case.events]
    elif isinstance(found, AuditReport):
        runs = [events for trace in options["traces"] for events in read_trace(trace)]
    engine = str(options.get("engine", ""))
    traces = options.get("traces", ())
    of = ", ".join(one.name if isinstance(one, Path) else one for one in traces)
    page = page_of_command(command, engine, str(found.verdict), found.to_json(), runs, of)
    write_page(page, file)


# --- the gate ----------------------------------------------------------------------------


def page_of_gate(data: Mapping[str, Any], folder: Path, progress: Progress) -> Page:
    """The whole gate, from its JSON object and the files in its folder."""
    checks = tuple(_check(part, data) for part in data["parts"])
    violations = list(data.get("violations", ()))
    cases = []
    drawn: set[tuple[str, str]] = set()
    for raw in violations[:MOST_CASES]:
        file = folder / "counterexamples" / Path(str(raw["file"])).name
        kind = str(raw["part"]), str(raw["rule"])
        draws = kind not in drawn and len(drawn) < MOST_LINES
        if draws:
            drawn.add(kind)
            progress(f"running {file.name} again")
        cases.append(case_of(raw, str(raw["part"]), file, str(raw["file"]), draws=draws))
    shows, notes = _founding_of(folder / "trace.jsonl")
    mutation, wrong = _mutation_of(folder)
    judged = [check.verdict for check in checks if check.verdict != NOT_RUN]
    verdict = str(worst(Verdict(word) for word in judged))
    missing = tuple(f"{name} was not run: {why}" for name, why in data.get("missing", {}).items())
    first = next(iter([*(c.line for c in cases if c.line), *(s.line for s in shows)]), None)
    return Page(
        title="kvclaims gate",
        verdict=verdict,
        said=said_of(verdict, cases),
        engines=engines_of(checks),
        notes=(*missing, *notes, *wrong, *_left_out(violations)),
        cases=tuple(_once_each(cases)),
        shows=shows,
        rules=rule_rows(checks),
        checks=checks,
        mutation=mutation,
        graph=reportgraph.graph_for(_broken_exploration(checks), first),
    )


def _mutation_of(folder: Path) -> tuple[Mutation | None, list[str]]:
    """The report of mutants that lies in the gate's folder, or what is wrong with it."""
    try:
        return beside(folder), []
    except BadOperation as error:
        return None, [str(error)]


def page_of_mutation(found: Mutation) -> Page:
    """What became of the mutants, and of which nothing was seen."""
    return Page("kvclaims mutate", found.verdict, found.said, mutation=found)


def _check(part: Mapping[str, Any], data: Mapping[str, Any]) -> Check:
    command, _, engine = str(part["name"]).partition(" ")
    own = tuple(v for v in data.get("violations", ()) if v.get("part") == part["name"])
    return Check(
        name=part["name"],
        command=_COMMANDS.get(command, command),
        engine=engine,
        verdict=part["verdict"],
        seconds=part["seconds"],
        did=part["did"],
        data=part,
        violations=own,
    )


def _broken_exploration(checks: Sequence[Check]) -> Mapping[str, Any] | None:
    """The first counterexample of an exploration, with its machine and settings."""
    for check in checks:
        if check.command != "explore":
            continue
        for whole in (check.data, *check.data.get("instances", ())):
            for found in whole.get("counterexamples", ()):
                if "machine" in whole:
                    settings = whole.get("settings", {})
                    return {"machine": whole["machine"], "settings": settings, **found}
    return None


def _founding_of(trace: Path) -> tuple[tuple[Show, ...], list[str]]:
    """The founding conflict as it ran on the first engine, or why it is not there."""
    if not trace.is_file():
        return (), [f"no {trace.name} beside the gate's JSON: no run is drawn"]
    try:
        line = next((timeline(events) for events in _founding_runs(trace)), None)
    except TraceError as error:
        return (), [f"no run is drawn: {error}"]
    if line is None:
        return (), [f"program {FOUNDING} was not run"]
    return (_show(line),), []


def _founding_runs(trace: Path) -> Iterator[tuple[Event, ...]]:
    """Runs of several engines stand in one file, so the ids come more than once: only lines of
    the wanted run are read."""
    from kvclaims.checker.audit import read_runs

    lines: list[str] = []
    with trace.open(encoding="utf-8") as file:
        for line in file:
            if f'"run_id":"{FOUNDING}"' in line:
                lines.append(line.rstrip("\n"))
                if '"event":"trace_closed"' in line:
                    yield from read_runs(lines)
                    return
