"""The page that says what finds what: kinds of faults, planted faults, mutants by operator."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvclaims.checker.codemutants import CodeMutant
from kvclaims.checker.detection import (
    CLEAN,
    CONTROL,
    Drawn,
    Results,
    is_reached,
    versions_in,
)
from kvclaims.checker.faults import Fault
from kvclaims.spec.interface import BadOperation
from kvclaims.spec.vocabulary import RULES

KINDS: Final = Path(__file__).with_name("kinds.toml")

BOTH, OURS, THEIRS, NEITHER = "both", "ours only", "theirs only", "neither"
HALF: Final = "one side only was run"
FATES: Final = (BOTH, OURS, THEIRS, NEITHER, HALF)


@dataclass(frozen=True)
class Kind:
    """A kind of fault seen in the field, and what shows it here."""

    where: str
    what: str
    rules: tuple[str, ...]
    shown_by: tuple[str, ...]
    why: str = ""


def read_kinds(path: Path = KINDS) -> tuple[Kind, ...]:
    """Read the kinds; `BadOperation` for one that nothing shows, or that breaks no known rule."""
    raw = tomllib.loads(path.read_text(encoding="utf-8"))
    kinds = []
    for table in raw["kind"]:
        kind = Kind(
            table["where"],
            table["what"],
            tuple(table["rules"]),
            tuple(table["shown_by"]),
            table.get("why", ""),
        )
        if not kind.shown_by or not set(kind.rules) <= set(RULES):
            raise BadOperation(f"{path.name}: {kind.where} is shown by nothing, or breaks no rule")
        kinds.append(kind)
    return tuple(kinds)


EQUIVALENT, POLICY, UNSPOKEN = "equivalent", "policy only", "no words for it"
REASONS: Final = {
    EQUIVALENT: "nothing that any rule speaks of can come out otherwise",
    POLICY: "what changes is owed by no rule",
    UNSPOKEN: "a rule may break, in what the runtime interface has no words for",
}
"""Why a mutant is not caught by our checks, though nothing more is to be done about it here."""

WHY: Final = "mutants-why.toml"
"""The name of the file of reasons, beside the engine's planted faults."""

OPEN: Final = "not explained"


@dataclass(frozen=True)
class Reason:
    """Why our checks do not catch a mutant: its kind, and in words what was read in the engine."""

    kind: str
    why: str


def read_reasons(path: Path, drawn: Drawn) -> dict[str, Reason]:
    """Mutant → why our checks do not catch it; nothing where there is no such file.

    Raises `BadOperation` for a mutant that was not drawn, a kind that is none, or no words.
    """
    if not path.is_file():
        return {}
    names = {mutant.name for mutant in drawn.mutants}
    found: dict[str, Reason] = {}
    for table in tomllib.loads(path.read_text(encoding="utf-8"))["reason"]:
        reason = Reason(table["kind"], table["why"])
        if reason.kind not in REASONS or not reason.why:
            raise BadOperation(f"{path.name}: {reason.kind!r} says nothing of why")
        for name in table["mutants"]:
            if name not in names or name in found:
                raise BadOperation(f"{path.name}: not drawn, or explained twice: {name}")
            found[name] = reason
    return found


def page(
    drawn: Drawn,
    results: Results,
    root: Path,
    faults: Mapping[str, Sequence[Fault]],
    findings: Mapping[str, str],
    reasons: Mapping[str, Reason] | None = None,
) -> str:
    """The whole page.  `root` holds the engine's package; `faults` are the planted ones by engine;
    `findings` are the known findings with the rule of each; `reasons` say why mutants live."""
    parts = [
        _head(drawn, results),
        _clean(results.path),
        _kinds(faults, findings),
        _planted(results, faults),
        _mutants(drawn, results, root, reasons or {}),
    ]
    return "\n".join(line for part in parts for line in (*part, "")).rstrip() + "\n"


# --- kinds and planted faults --------------------------------------------------------------


def _head(drawn: Drawn, results: Results) -> Iterator[str]:
    yield "# What finds what"
    yield ""
    yield "Made by `make detection` from `docs/detection.jsonl`; do not edit."
    yield ""
    run = {side: sum(m.name in _latest(results, side) for m in drawn.mutants) for side in _SIDES}
    total = len(drawn.mutants)
    yield (
        f"vLLM {results.version}. Of {total} mutants by operator, {run['ours']} were run against "
        f"our checks and {run['theirs']} against the engine's own tests; the rest waits for "
        "`make detection`, which goes on where it was left."
    )


_SIDES: Final = ("ours", "theirs")


def _clean(path: Path) -> Iterator[str]:
    """What fuzzing found in each version of the engine as it is."""
    found = {version: clean_rows(Results(path, version)) for version in versions_in(path)}
    found = {version: rows for version, rows in found.items() if rows}
    if not found:
        return
    yield "## vLLM as it is"
    yield ""
    yield (
        "`kvclaims fuzz` on each version, unpatched: random operations, arrangements of KV groups "
        "and trials, one run a seed. Broken is what no finding of `bridge/vllm/findings.toml` "
        "names; of those that are named, the seeds that met them."
    )
    yield ""
    yield "| vLLM | seeds | operations | in KV groups | trials | broken | known findings met |"
    yield "|---|---|---|---|---|---|---|"
    for version, rows in found.items():
        broken = [f"{row['mutant']}: {row['by']}, {row['detail']}" for row in rows if row["by"]]
        known = Counter(name for row in rows for name in row["known"])
        cells = (
            version,
            f"{len(rows)}",
            f"{sum(row['effort'] for row in rows):,}",
            f"{sum(row['arranged'] for row in rows):,}",
            f"{sum(row['trials'] for row in rows):,}",
            _plain("; ".join(broken)) or "nothing",
            ", ".join(f"{name} ({times})" for name, times in sorted(known.items())) or "none",
        )
        yield f"| {' | '.join(cells)} |"


def clean_rows(results: Results) -> list[dict[str, Any]]:
    """The newest line of each seed, in the order of the seeds."""
    newest = _latest(results, CLEAN)
    return sorted(newest.values(), key=lambda row: int(row["mutant"].partition(" ")[2]))


def _kinds(faults: Mapping[str, Sequence[Fault]], findings: Mapping[str, str]) -> Iterator[str]:
    rules = {f"{engine}:{f.id}": f.rule for engine, of in faults.items() for f in of}
    rules |= {f"finding:{name}": rule for name, rule in findings.items()}
    yield "## Kinds of faults seen in the field"
    yield ""
    yield (
        "`vllm:` and `reference:` are planted faults, each caught by the rule beside it; "
        "`finding:` is broken in unpatched vLLM and has a script in `docs/findings/`; `machine:` "
        "is a guard whose must-fail twin shows the rule where the runtime interface has no words "
        "for the kind."
    )
    yield ""
    yield "| where | kind | rules | shown by | left out |"
    yield "|---|---|---|---|---|"
    for kind in read_kinds():
        shown = ", ".join(f"{one} ({rules[one]})" if one in rules else one for one in kind.shown_by)
        yield f"| {kind.where} | {kind.what} | {' '.join(kind.rules)} | {shown} | {kind.why} |"


def _planted(results: Results, faults: Mapping[str, Sequence[Fault]]) -> Iterator[str]:
    yield "## Faults planted in vLLM"
    yield ""
    yield (
        "Each is caught by the program that stands beside it (`kvclaims faults --engine vllm`). "
        "The last columns are random operations alone: the rule that broke first, and the "
        "processor time until then."
    )
    yield ""
    yield "| fault | rule | what is wrong | by fuzzing | seconds |"
    yield "|---|---|---|---|---|"
    for fault in faults["vllm"]:
        row = results.last("faults", fault.id)
        found, seconds = "not run", ""
        if row is not None:
            found = row["detail"].partition(" ")[0] if row["by"] else "not found"
            seconds = f"{row['cpu']:.1f}"
        yield f"| {fault.id} | {fault.rule} | {fault.meaning} | {found} | {seconds} |"


# --- mutants -------------------------------------------------------------------------------


def _latest(results: Results, side: str) -> dict[str, dict[str, Any]]:
    return {row["mutant"]: row for row in results.rows if row["side"] == side}


def fate_of(ours: Mapping[str, Any] | None, theirs: Mapping[str, Any] | None) -> str:
    """Who caught a mutant; a mutant that one side was not run on is compared with nobody."""
    if ours is None or theirs is None:
        return HALF
    caught = (bool(ours["by"]), bool(theirs["by"]))
    return {(True, True): BOTH, (True, False): OURS, (False, True): THEIRS}.get(caught, NEITHER)


def _mutants(
    drawn: Drawn, results: Results, root: Path, reasons: Mapping[str, Reason]
) -> Iterator[str]:
    ours, theirs = (_latest(results, side) for side in _SIDES)
    run = [m for m in drawn.mutants if m.name in ours or m.name in theirs]
    fates = {m.name: fate_of(ours.get(m.name), theirs.get(m.name)) for m in run}
    counts = Counter(fates.values())
    yield "## Mutants by operator"
    yield ""
    yield (
        f"{len(drawn.mutants)} drawn out of {drawn.total:,} by a seed, over the places that "
        "`bridge/vllm/mutants.toml` names; none is picked by its result. Ours: fuzzing and "
        "trials, then the litmus programs, then more of both; no known finding kills. The "
        "situations that fuzzing begins with (`bridge/vllm/situations.toml`), the arrangements of "
        "KV groups that it draws (`bridge/vllm/layouts.py`) and the trials "
        "(`bridge/vllm/trials.py`) were written for mutants of this sample that "
        "had lived: on new mutants they show less. Theirs: the engine's own "
        "core and connector tests that pass without the mutant, the quickest first. What a side "
        "has not seen within its effort counts as not caught by it."
    )
    yield ""
    yield from _control(ours.get(CONTROL))
    yield from _efforts(ours, theirs)
    yield from ("| caught by | mutants |", "|---|---|")
    yield from (f"| {fate} | {counts[fate]} |" for fate in FATES)
    yield ""
    killed = sum(bool(row["by"]) for name, row in ours.items() if name != CONTROL)
    yield (
        f"Our checks caught {killed} of the {len(ours) - (CONTROL in ours)} mutants that they "
        f"were run on; the engine's tests {sum(bool(r['by']) for r in theirs.values())} of "
        f"{len(theirs)}."
    )
    yield ""
    yield from _explained(fates, reasons)
    reached = results.last("reach", CONTROL)
    yield "| mutant | ours | theirs | caught by | why not by ours |"
    yield "|---|---|---|---|---|"
    for fate in FATES:
        for mutant in (m for m in run if fates[m.name] == fate):
            mine = _cell(ours.get(mutant.name)) + _reason(mutant, ours, reached, root)
            told = reasons.get(mutant.name) if fate in (THEIRS, NEITHER) else None
            why = f"{told.kind}: {_plain(told.why)}" if told else ""
            row = (_shown(mutant), mine, _cell(theirs.get(mutant.name)), fate, why)
            yield f"| {' | '.join(row)} |"


def _explained(fates: Mapping[str, str], reasons: Mapping[str, Reason]) -> Iterator[str]:
    """How many of those that our checks have not caught are explained, and by what."""
    meanings = "; ".join(f"*{kind}*: {what}" for kind, what in REASONS.items())
    yield f"Why ours did not catch a mutant, as read in the engine's source. {meanings}."
    yield ""
    yield f"| why not by ours | {THEIRS} | {NEITHER} |"
    yield "|---|---|---|"
    kinds = {name: reasons[name].kind if name in reasons else OPEN for name in fates}
    for kind in (*REASONS, OPEN):
        counts = [
            sum(1 for name, f in fates.items() if f == fate and kinds[name] == kind)
            for fate in (THEIRS, NEITHER)
        ]
        yield f"| {kind} | {counts[0]} | {counts[1]} |"
    yield ""


def _control(row: Mapping[str, Any] | None) -> Iterator[str]:
    if row is not None:
        fate = f"broken by {row['by']}: {row['detail']}" if row["by"] else "nothing is broken"
        yield f"The engine as it is, with the same seeds and {row['effort']:,} operations: {fate}."
        yield ""


def _efforts(
    ours: Mapping[str, Mapping[str, Any]], theirs: Mapping[str, Mapping[str, Any]]
) -> Iterator[str]:
    """How hard each side has tried so far on what it has not caught."""
    mine = Counter(row["effort"] for name, row in ours.items() if name != CONTROL and not row["by"])
    tests = Counter(row["tests"] for row in theirs.values() if not row["by"])
    shown = ", ".join(f"{effort:,} operations on {n}" for effort, n in sorted(mine.items()))
    yield f"Mutants that live: ours, after {shown or 'nothing'};"
    shown = ", ".join(f"{number} tests on {n}" for number, n in sorted(tests.items()))
    yield f"theirs, after {shown or 'nothing'}."
    yield ""


def _shown(mutant: CodeMutant) -> str:
    file = Path(mutant.path).name
    before, after = _code(mutant.before), _code(mutant.after)
    again = f" #{mutant.nth}" if mutant.nth > 1 else ""
    return f"{file}:{mutant.line} {mutant.function}: {mutant.operator}, {before} ⇒ {after}{again}"


def _code(text: str) -> str:
    short = text if len(text) <= 90 else f"{text[:87]}…"
    return f"`{_plain(short)}`" if short else "nothing"


def _plain(text: str) -> str:
    """A text that may stand in a cell of a table."""
    return text.replace("|", "\\|")


def _cell(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "not run"
    if not row["by"]:
        return "lives"
    detail = str(row["detail"])
    if row["by"] == "their tests":
        return _plain(detail.rpartition("/")[2])
    parts = detail.split(":", maxsplit=2)
    words = parts[0] if row["by"] in ("fuzzing", "trials") else ":".join(parts[:2])
    return _plain(f"{row['by']}, {words}"[:80])


def _reason(
    mutant: CodeMutant,
    ours: Mapping[str, Mapping[str, Any]],
    reached: Mapping[str, Any] | None,
    root: Path,
) -> str:
    """Of a mutant that lives: whether our runs get to its line at all."""
    row = ours.get(mutant.name)
    if row is None or row["by"] or reached is None:
        return ""
    return ", reached" if is_reached(mutant, reached, root) else ", not reached"
