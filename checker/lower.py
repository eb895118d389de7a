"""Fail-closed lowering: the verdict on a profile follows from its evidence, never from its words.

A mode is supported only if each of its obligations has evidence that is anchored, allowed at the
mode's adapter depth, and true when looked at again: probes are run, traces are read.  What is not
shown is unknown; a profile that claims more than that is rejected (arXiv 2606.01387).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from kvclaims.checker import engines, litmus, obligations, programs, tiers
from kvclaims.checker.profiles import Evidence, Mode, Probe, Profile
from kvclaims.checker.verdicts import Progress, worst
from kvclaims.spec.interface import BadOperation, EngineMissing, NotExposed
from kvclaims.spec.lowering import DEPTH_OF, OWED, Depth, Lowering, Obligation, Way
from kvclaims.spec.vocabulary import Protection, Verdict

_STRENGTH: Final = {
    Lowering.REJECTED: 0,
    Lowering.UNKNOWN: 0,
    Lowering.APPROXIMATE: 1,
    Lowering.OBSERVATIONAL: 2,
    Lowering.POLICY: 2,
    Lowering.NATIVE: 3,
}
"""How much a verdict claims; the two kinds of adapter claim as much."""

_BY_WAY: Final = {
    Way.NEARLY: Lowering.APPROXIMATE,
    Way.PATCHED: Lowering.POLICY,
    Way.STEERED: Lowering.POLICY,
    Way.JOINED: Lowering.OBSERVATIONAL,
    Way.OWN: Lowering.NATIVE,
}
"""What a mode is worth whose weakest obligation is met in this way, the weakest first."""

_SHOWN_BY: Final[Mapping[Obligation, frozenset[str]]] = {
    Obligation.IDENTITY: frozenset({"L6", "L7", "observed", "tier-restore"}),
    Obligation.ACCEPTANCE: frozenset({"oversubscribed", "tier-refused"}),
    Obligation.PREDICATE: frozenset({"L6", "observed", "shared-release", "tier-restore"}),
    Obligation.ORDER: frozenset({"L7", "tier-restore"}),
    Obligation.EVICTION_ORDER: frozenset({"soft-order"}),
    Obligation.PROTECTION: frozenset({"L3", "demotable", "lease-read"}),
    Obligation.REFUSAL: frozenset({"L3", "minimal-blame"}),
    Obligation.EXPIRY: frozenset({"L5", "lease-read"}),
    Obligation.RELEASE: frozenset({"L4", "demotable"}),
    Obligation.REGISTERED: frozenset({"tier-restore"}),
    Obligation.OBJECT: frozenset({"tier-restore"}),
    Obligation.CACHE_IDENTITY: frozenset({"tier-identity"}),
    Obligation.RESTORE: frozenset({"tier-restore"}),
    Obligation.RESTORE_FAILURE: frozenset({"load-failed", "tier-failed"}),
}
"""The litmus programs, and those on a tier, whose outcome speaks of each obligation: any other run
that goes well says nothing of it."""

_STRONGER: Final = {
    Protection.HARD: {Protection.SOFT, Protection.BEST_EFFORT},
    Protection.SOFT: {Protection.BEST_EFFORT},
    Protection.DEMOTABLE: {Protection.SOFT, Protection.BEST_EFFORT},
    Protection.EXPIRING: {Protection.SOFT, Protection.BEST_EFFORT},
    Protection.OFFLOADABLE: {Protection.BEST_EFFORT},
}
"""Modes that cannot stand in for each mode: they allow a loss that it forbids."""

_KEPT_IN: Final = {
    Protection.HARD: "L3",
    Protection.DEMOTABLE: "demotable",
    Protection.EXPIRING: "lease-read",
}
"""The run that shows, for each mode, that its content is not lost by the runtime's own choice."""

_LOST_IN_C1: Final = (Protection.HARD, Protection.DEMOTABLE, Protection.EXPIRING)
"""Modes that forbid what the run of C1 shows: content that is lost while its claim is in force."""

_LOSING: Final = frozenset({"L1", "L2", "C1"})
"""The litmus programs that, where they hold, show such a loss."""

ONLY_READ: Final = "; by documents alone, read and not run"
"""What is said of a mode that nothing here runs or has recorded."""

RunProbe = Callable[[Probe], "ProbeResult"]


@dataclass(frozen=True)
class ProbeResult:
    """A litmus program as it came out now."""

    verdict: Verdict
    says: str


@dataclass(frozen=True)
class ModeVerdict:
    """A mode of a profile: what it claims, what follows, and why."""

    mode: Mode
    lowering: Lowering
    reasons: tuple[str, ...]
    anchors: tuple[str, ...]

    @property
    def places(self) -> list[str]:
        """What it rests on: commands that run here, traces, documents."""
        return sorted({anchor.split(": ", 1)[1] for anchor in self.anchors})

    @property
    def is_only_read(self) -> bool:
        """It is supported, and by nothing that runs or was recorded."""
        evidence = self.mode.evidence.values()
        return _STRENGTH[self.lowering] > 0 and all(e.document is not None for e in evidence)

    @property
    def verdict(self) -> Verdict:
        """HOLDS where the profile claims no more than follows."""
        if _STRENGTH[self.mode.claims] > _STRENGTH[self.lowering]:
            return Verdict.VIOLATED
        return Verdict.HOLDS

    def to_json(self) -> dict[str, Any]:
        return {
            "protection": self.mode.protection,
            "depth": self.mode.depth.name.lower(),
            "claims": self.mode.claims,
            "lowering": self.lowering,
            "only_read": self.is_only_read,
            "verdict": self.verdict,
            "reasons": list(self.reasons),
            "anchors": list(self.anchors),
        }


@dataclass(frozen=True)
class LowerReport:
    """A profile, mode by mode."""

    profile: Profile
    modes: tuple[ModeVerdict, ...]
    here: str | None = None
    """The version of the profile's engine that is here; None where none is, or none was run."""

    @property
    def verdict(self) -> Verdict:
        """A profile that supports nothing shows nothing, however honestly it says so."""
        whole = worst(mode.verdict for mode in self.modes)
        supported = any(_STRENGTH[mode.lowering] for mode in self.modes)
        return whole if supported or whole is not Verdict.HOLDS else Verdict.UNKNOWN

    def to_json(self) -> dict[str, Any]:
        return {
            "profile": self.profile.id,
            "title": self.profile.title,
            "version": self.profile.version,
            "engine": self.profile.engine,
            "here": self.here,
            "modes": [mode.to_json() for mode in self.modes],
        }

    @property
    def _where(self) -> str:
        engine = self.profile.engine
        if self.here is None:
            return f"; {engine} is not run here" if engine else ""
        return f"; here is {engine} {self.here}"

    def lines(self) -> Iterator[str]:
        yield (
            f"{self.profile.id}: {self.profile.title} ({self.profile.version}{self._where}): "
            f"{self.verdict}"
        )
        for mode in self.modes:
            said = mode.mode.claims
            told = "" if said is mode.lowering else f"; the profile claims {said}: {mode.verdict}"
            told += ONLY_READ if mode.is_only_read else ""
            yield f"  {mode.mode.protection:15} {mode.lowering}{told}"
            yield f"            owes {', '.join(sorted(OWED[mode.mode.protection]))}"
            for place in mode.places:
                yield f"            rests on {place}"
            for reason in mode.reasons:
                yield f"            {reason}"


def lower(
    profile: Profile, run_probe: RunProbe | None = None, progress: Progress | None = None
) -> LowerReport:
    """Judge a profile; probes run once each, on the version that it speaks of.  Raises
    BadOperation for a trace that cannot be read or a program that does not exist."""
    here = None if run_probe else _version_here(profile)
    run = run_probe or _of_its_version(profile, here)
    found = []
    for mode in profile.modes:
        if progress:
            progress(f"{profile.id}: {mode.protection}")
        found.append(judge(mode, run, profile.engine, profile))
    return LowerReport(profile, tuple(found), here)


def _version_here(profile: Profile) -> str | None:
    if profile.engine is None:
        return None
    try:
        return engines.ready(profile.engine)[1].version
    except EngineMissing:
        return None


def _of_its_version(profile: Profile, here: str | None) -> RunProbe:
    """Runs of the profile's engine say nothing of it where another version is installed here."""
    if here is None or _is_of(here, profile.version):
        return probe  # where there is none, each probe says why it cannot run
    says = f"the profile speaks of {profile.engine} {profile.version}, here is {here}"

    def run(wanted: Probe) -> ProbeResult:
        return (
            ProbeResult(Verdict.UNKNOWN, says) if wanted.engine == profile.engine else probe(wanted)
        )

    return run


def _is_of(version: str, told: str) -> bool:
    """Whether a whole version is the one told, or one of those that it begins: 0.32.1 of 0.32.  A
    0 alone begins none: before 1.0 whatever follows may be another runtime."""
    wanted = told.split(".")
    begins = set(wanted) != {"0"} and version.split(".")[: len(wanted)] == wanted
    return begins or version == told


def judge(
    mode: Mode, run: RunProbe, engine: str | None = None, of: Profile | None = None
) -> ModeVerdict:
    """The verdict on one mode of a runtime that `engine` runs here, if any; traces must be of the
    profile's runtime and version."""
    anchors = tuple(
        f"{obligation}: {_place(evidence)}" for obligation, evidence in mode.evidence.items()
    )

    def verdict(lowering: Lowering, reasons: list[str]) -> ModeVerdict:
        return ModeVerdict(mode, lowering, tuple(reasons), anchors)

    if reasons := list(_refuted(mode, run, engine)):
        return verdict(Lowering.REJECTED, reasons)
    if reasons := list(_untrue(mode, run, engine, of)):
        return verdict(Lowering.REJECTED, reasons)
    if reasons := list(dict.fromkeys(_not_shown(mode, run, engine, of))):
        claims_more = _STRENGTH[mode.claims] > 0
        return verdict(Lowering.REJECTED if claims_more else Lowering.UNKNOWN, reasons)
    ways = {mode.evidence[obligation].way for obligation in OWED[mode.protection]}
    return verdict(next(low for way, low in _BY_WAY.items() if way in ways), [])


def _refuted(mode: Mode, run: RunProbe, engine: str | None) -> Iterator[str]:
    """The runs that show that the mode is not kept."""
    if _weaker(mode) and mode.protection in _LOST_IN_C1:
        shown = run(_C1)
        if shown.verdict is Verdict.HOLDS:
            yield f"{mode.lowers_to} cannot stand in for {mode.protection}: {shown.says}"
            return
    for refutation in mode.refuted:
        if refutation.probe.engine != engine or not _speaks_against(mode, refutation.probe):
            continue
        shown = run(refutation.probe)
        if shown.verdict is Verdict.HOLDS:
            yield f"{refutation.says}: {shown.says}"


def _speaks_against(mode: Mode, wanted: Probe) -> bool:
    """Whether a run, where it holds, shows a loss that the mode forbids."""
    return mode.protection in _LOST_IN_C1 and wanted.program in _LOSING


_C1: Final = Probe(engines.REFERENCE, "C1")


def _weaker(mode: Mode) -> bool:
    return mode.lowers_to in _STRONGER.get(mode.protection, ())


def _not_shown(mode: Mode, run: RunProbe, engine: str | None, of: Profile | None) -> Iterator[str]:
    """What the mode would need and nothing shows: fail-closed, also where a run that might
    refute it says nothing."""
    if missing := sorted(OWED[mode.protection] - mode.evidence.keys()):
        yield f"nothing shows {', '.join(missing)}"
    stand_in = mode.lowers_to not in (None, mode.protection)
    if stand_in and mode.protection not in _STRONGER.get(mode.lowers_to or mode.protection, ()):
        yield f"nothing shows that {mode.lowers_to} can stand in for {mode.protection}"
    for probe_ in (evidence.probe for evidence in mode.evidence.values()):
        if probe_ and (result := run(probe_)).verdict is not Verdict.HOLDS:
            yield result.says
    if of is not None:
        yield from _of_another_version(mode, engine or of.id, of.version)
    if not missing and all(one.way is Way.OWN for one in mode.evidence.values()):
        read = [str(o) for o, one in mode.evidence.items() if one.document is not None]
        if read:
            yield f"a document shows no mode of the runtime's own: {', '.join(read)}"
    for refutation in mode.refuted:
        if refutation.probe.engine != engine:
            where, whom = refutation.probe.engine, engine or "this runtime"
            yield f"a run on {where} refutes nothing of {whom}"
            continue
        if not _speaks_against(mode, refutation.probe):
            yield f"litmus {refutation.probe.program} shows no loss that {mode.protection} forbids"
            continue
        result = run(refutation.probe)
        if result.verdict is not Verdict.VIOLATED:
            yield f"it may be refuted: {result.says}"


def _of_another_version(mode: Mode, runtime: str, version: str) -> Iterator[str]:
    """The documents of a mode that speak of another version than its profile."""
    for obligation, evidence in mode.evidence.items():
        read = evidence.document
        if read is not None and not _is_of(read.version, version):
            yield f"{obligation}: a document of {read.version} says nothing of {runtime} {version}"


def _untrue(mode: Mode, run: RunProbe, engine: str | None, of: Profile | None) -> Iterator[str]:
    """What is wrong with the evidence that is given, obligation by obligation."""
    for obligation, evidence in mode.evidence.items():
        if DEPTH_OF[evidence.way] > mode.depth:
            yield (
                f"{obligation}: {evidence.way} needs an adapter of depth "
                f"{DEPTH_OF[evidence.way].name.lower()}, the mode has {mode.depth.name.lower()}"
            )
        elif evidence.anchor is None:
            yield f"{obligation}: no anchor"
        elif evidence.probe is not None:
            yield from _untrue_probe(mode.protection, obligation, evidence, run, engine)
        elif evidence.trace is not None:
            yield from _untrue_trace(obligation, evidence, engine, of)


def _untrue_probe(
    protection: Protection,
    obligation: Obligation,
    evidence: Evidence,
    run: RunProbe,
    engine: str | None,
) -> Iterator[str]:
    """A run that cannot be done here is not untrue: it has shown nothing."""
    wanted = evidence.probe
    assert wanted is not None
    depth = depth_of_run(wanted)
    kept_in = _KEPT_IN.get(protection) if obligation is Obligation.PROTECTION else None
    if wanted.engine != engine:
        yield f"{obligation}: a run on {wanted.engine} says nothing of {engine or 'this runtime'}"
    elif wanted.program not in _SHOWN_BY.get(obligation, ()):
        yield f"{obligation}: litmus {wanted.program} does not show it"
    elif kept_in not in (None, wanted.program):
        yield f"{obligation}: litmus {wanted.program} does not show it of {protection}"
    elif DEPTH_OF[evidence.way] < depth:
        yield (
            f"{obligation}: litmus {wanted.program} on {wanted.engine} runs an adapter of depth "
            f"{depth.name.lower()}, and shows nothing that is {evidence.way}"
        )
    elif (result := run(wanted)).verdict is Verdict.VIOLATED:
        yield f"{obligation}: {result.says}"


def depth_of_run(wanted: Probe) -> Depth:
    """How deep the adapter reaches that a run needs: an engine of others knows no claims, so one
    in force is the adapter's policy, one of best effort its bookkeeping.  Raises BadOperation."""
    if wanted.engine == engines.REFERENCE:
        return Depth.NONE  # any other engine may say so of itself, and nothing shows it
    engines.find(wanted.engine)
    if wanted.program in tiers.PROGRAMS:
        return Depth.POLICY
    (program,) = programs.select([wanted.program])
    if program.fold is not None:
        return depth_of_run(Probe(wanted.engine, program.fold))
    declared = {
        Protection(operation.fields.get("protection", Protection.HARD))
        for case in program.cases
        for operation in case.operations
        if operation.op == "declare"
    }
    return Depth.POLICY if declared - {Protection.BEST_EFFORT} else Depth.TELEMETRY


def _untrue_trace(
    obligation: Obligation, evidence: Evidence, engine: str | None, of: Profile | None
) -> Iterator[str]:
    """`evidence` is anchored in a trace.  One that says whose it is speaks of that runtime alone,
    and of the version that it says; where a run here would speak of the runtime, it must say both.
    """
    assert evidence.trace is not None
    lines = obligations.read_lines(Path(str(evidence.trace)))
    shown = obligations.shown_by(lines)
    depth = _depth_of_trace(lines, engine)
    if obligation not in shown:
        yield f"{obligation}: no trace can show it"
    elif evidence.way is not Way.NEARLY and DEPTH_OF[evidence.way] < depth:
        yield (
            f"{obligation}: trace {evidence.trace.name} is of an adapter of depth "
            f"{depth.name.lower()}, and shows nothing that is {evidence.way}"
        )
    elif elsewhere := _of_another(obligations.opening(lines), engine, of):
        yield f"{obligation}: {elsewhere}"
    elif not shown[obligation].holds:
        yield f"{obligation}: {shown[obligation].reason}"


def _depth_of_trace(lines: Sequence[Mapping[str, Any]], engine: str | None) -> Depth:
    """How deep the adapter reached that wrote a trace: only a runtime that knows claims tells of
    them itself, and one of ours that has more than best effort in force enforces them."""
    if engine is None:
        return Depth.TELEMETRY
    if engine == engines.REFERENCE:
        return Depth.NONE
    told = {str(line["protection"]) for line in lines if line.get("protection") is not None}
    return Depth.POLICY if told - {Protection.BEST_EFFORT} else Depth.TELEMETRY


def _of_another(opening: Mapping[str, Any], engine: str | None, of: Profile | None) -> str:
    """Of what other runtime or version a trace speaks by its opening, empty if of none."""
    told, version = opening.get("engine"), opening.get("engine_version")
    own = (engine,) if engine else (None, of.id, of.title) if of else (None, told)
    if told not in own or (engine is None and told in engines.names()):
        return f"a trace of {_plain(told, 'engine')} says nothing of {engine or 'this runtime'}"
    if of is None or (engine is None and version is None):
        return ""
    if not isinstance(version, str) or not _is_of(version, of.version):
        whole = _plain(version, "version")
        return f"a trace of {whole} says nothing of {engine or 'this runtime'} {of.version}"
    return ""


def _plain(told: object, what: str) -> str:
    if told is None:
        return f"no {what} by name"
    return told if isinstance(told, str) and told.isprintable() else repr(told)


def _place(evidence: Evidence) -> str:
    if evidence.probe is not None:
        command = "tier" if evidence.probe.program in tiers.PROGRAMS else "litmus"
        return f"kvclaims {command} {evidence.probe.program} --engine {evidence.probe.engine}"
    if evidence.trace is not None:
        return f"trace {evidence.trace.name}"
    if evidence.document is not None:
        own = evidence.document
        return f"document: {own.title} {own.version}, {own.place}"
    return "no anchor"


@cache
def probe(wanted: Probe) -> ProbeResult:
    """Run a litmus program on an engine; one that cannot run here has shown nothing."""
    if wanted.program in tiers.PROGRAMS:
        return _probe_tier(wanted)
    (program,) = programs.select([wanted.program])
    command = f"litmus {wanted.program} on {wanted.engine}"
    try:
        engine, info = engines.ready(wanted.engine)
    except EngineMissing as error:
        return ProbeResult(Verdict.UNKNOWN, f"{command} cannot run here ({error})")
    try:
        report = litmus.litmus(engine, info, (program,), lambda _: None)
    except EngineMissing as error:
        return ProbeResult(Verdict.UNKNOWN, f"{command} cannot run here ({error})")
    result = report.to_json()["programs"][0]
    seen = ", ".join(
        f"{name} {value}"
        for name, value in result["observed"].items()
        if name in ("outcome", "victims", "harmed", "shortfall")
    )
    return ProbeResult(
        report.verdict, f"{command}: {report.verdict}" + (f" ({seen})" if seen else "")
    )


def _probe_tier(wanted: Probe) -> ProbeResult:
    """The same for a program on the engine's tier."""
    command = f"{wanted.program} on {wanted.engine}"
    try:
        report = tiers.run(wanted.engine, wanted.program)
    except (EngineMissing, NotExposed, BadOperation) as error:
        return ProbeResult(Verdict.UNKNOWN, f"{command} cannot run here ({error})")
    said = f" (not so: {report.wrong[0]})" if report.wrong else ""
    return ProbeResult(report.verdict, f"{command}: {report.verdict}{said}")
