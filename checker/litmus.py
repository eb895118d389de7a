"""Runs litmus programs on an engine and judges every expected number.

What the engine does not expose is reported as such and never counted as passed.  The monitor
judges every allocator step on the way; the trace of each run is audited, and its fold compared
with what the runtime says of itself (T2).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from kvclaims.checker.audit import Fold, read_runs
from kvclaims.checker.engines import first_line
from kvclaims.checker.monitor import Monitor
from kvclaims.checker.programs import Case, Lowering, Program, builtin
from kvclaims.checker.verdicts import Progress, Violation, counted, worst
from kvclaims.checker.watching import introduce, watch
from kvclaims.spec.content import content_ids, tokens_of
from kvclaims.spec.fidelity import Fidelity
from kvclaims.spec.interface import (
    BadOperation,
    Engine,
    EngineInfo,
    EngineMissing,
    Feature,
    NotExposed,
    Observation,
    PoolConfig,
    PoolSnapshot,
    Runtime,
)
from kvclaims.spec.operations import NoProgress, Operation, needs, perform
from kvclaims.spec.telemetry import Event, TraceError
from kvclaims.spec.vocabulary import Phase, Verdict

if TYPE_CHECKING:
    from kvclaims.checker.measure import MechanismReport

NOT_EXPOSED: Final = str(Verdict.NOT_EXPOSED)

_EVENT_COUNTS: Final = {
    "accepted": "resident_claim_accepted",
    "claims_refused": "resident_claim_refused",
    "harmed": "resident_claim_harmed",
    "demoted": "resident_claim_demoted",
    "expired": "resident_claim_expired",
    "lost_after_release": "block_lost_after_release",
    "future_reuse_denied": "future_reuse_denied",
}


WITH_ITS_LEAF: Final = "dropped_with_its_leaf"
"""Why a block was evicted that no request takes: the engine drops what stands in one leaf together
(SGLang's radix tree does)."""

_BY_THE_BLOCK: Final = frozenset({"lost_after_release", "leading", "survivors"})
"""Numbers that presume an engine which evicts block by block."""


@dataclass(frozen=True)
class CaseResult:
    """One run: what was expected and seen, what broke, and the trace."""

    case: str
    usable: int
    block_size: int
    expected: Mapping[str, Any]
    observed: Mapping[str, Any]
    problems: tuple[Violation, ...]
    not_exposed: tuple[str, ...]
    operations: tuple[Operation, ...]
    events: tuple[Event, ...] = ()
    monitored: int = 0
    """Allocator steps that the monitor judged."""

    @property
    def verdict(self) -> Verdict:
        if self.problems:
            return Verdict.VIOLATED
        judged = [name for name in self.expected if self.observed.get(name) != NOT_EXPOSED]
        return Verdict.HOLDS if judged and self.observed else Verdict.NOT_EXPOSED


@dataclass(frozen=True)
class ProgramResult:
    """A program with all its cases."""

    program: Program
    cases: tuple[CaseResult, ...]
    seconds: float

    @property
    def verdict(self) -> Verdict:
        return worst(case.verdict for case in self.cases)

    @property
    def problems(self) -> Iterator[tuple[CaseResult, Violation]]:
        return ((case, problem) for case in self.cases for problem in case.problems)

    def to_json(self) -> dict[str, Any]:
        single = len(self.cases) == 1
        return {
            "id": self.program.id,
            "title": self.program.title,
            "rules": list(self.program.rules),
            "verdict": self.verdict,
            "seconds": round(self.seconds, 3),
            "observed": dict(self.cases[0].observed)
            if single
            else {"cases": [_cell(case, case.observed) for case in self.cases]},
            "expected": dict(self.cases[0].expected)
            if single
            else {"cases": [_cell(case, case.expected) for case in self.cases]},
            "violations": [
                {
                    **problem.to_json(),
                    "case": case.case,
                    "pool": {
                        "usable": case.usable,
                        "block_size": case.block_size,
                        "defer_limit": self.program.defer_limit,
                    },
                    "operations": [operation.to_json() for operation in case.operations],
                }
                for case, problem in self.problems
            ],
            "not_exposed": sorted({name for case in self.cases for name in case.not_exposed}),
        }


def _cell(case: CaseResult, values: Mapping[str, Any]) -> dict[str, Any]:
    return {"case": case.case, "usable": case.usable, **values}


@dataclass(frozen=True)
class LitmusReport:
    """All programs on one engine."""

    engine: EngineInfo
    programs: tuple[ProgramResult, ...]

    @property
    def verdict(self) -> Verdict:
        return worst(program.verdict for program in self.programs)

    @property
    def events(self) -> Iterator[Event]:
        """The traces of all runs, one after the other."""
        return (e for p in self.programs for case in p.cases for e in case.events)

    def to_json(self) -> dict[str, Any]:
        programs = [program.to_json() for program in self.programs]
        return {
            "engine": {
                "name": self.engine.name,
                "version": self.engine.version,
                "path": self.engine.path,
            },
            "programs": programs,
            "runs": sum(len(program.cases) for program in self.programs),
            "events": sum(1 for _ in self.events),
            "monitored_steps": sum(c.monitored for p in self.programs for c in p.cases),
            "violations": [v for program in programs for v in program["violations"]],
            "not_exposed": [
                f"{program['id']}: {name}"
                for program in programs
                for name in program["not_exposed"]
            ],
        }

    def lines(self) -> Iterator[str]:
        yield f"{self.engine.name} {self.engine.version} ({self.engine.path})"
        for result in self.programs:
            yield f"  {result.verdict:12} {result.program.id:15} {result.program.title}"
            for case in result.cases:
                numbers = ", ".join(f"{k} {_shown(case.observed.get(k))}" for k in case.expected)
                yield f"      {case.case + ': ' if case.case else ''}{numbers}"
            for case, problem in result.problems:
                yield f"      {case.case + ': ' if case.case else ''}{problem}"
            failed = next((case for case in result.cases if case.problems), None)
            if failed is not None:
                yield "      operations:"
                yield from (f"        {operation}" for operation in failed.operations)
            for name in sorted({name for case in result.cases for name in case.not_exposed}):
                yield f"      {NOT_EXPOSED}: {name}"
        runs = sum(len(program.cases) for program in self.programs)
        lacking = sum(result.verdict is Verdict.NOT_EXPOSED for result in self.programs)
        without = f", {lacking} {NOT_EXPOSED}" if lacking and lacking < len(self.programs) else ""
        yield (
            f"{counted(len(self.programs), 'program')}, {counted(runs, 'run')}: "
            f"{self.verdict}{without}"
        )


def _shown(value: object) -> str:
    if isinstance(value, list):
        return "+".join(map(str, value)) or "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def litmus(
    engine: Engine, info: EngineInfo, programs: Sequence[Program], progress: Progress
) -> LitmusReport:
    """Run the programs one after the other, each in a fresh pool."""
    results = []
    for program in programs:
        progress(f"{program.id} on {info.name}")
        started = time.monotonic()
        cases = _fold_case(engine, program) if program.fold else _cases(engine, program)
        results.append(ProgramResult(program, cases, time.monotonic() - started))
    return LitmusReport(info, tuple(results))


def _cases(engine: Engine, program: Program) -> tuple[CaseResult, ...]:
    return tuple(run_case(engine, program, case) for case in program.cases)


def run_case(engine: Engine, program: Program, case: Case) -> CaseResult:
    """One run and its judgement.  An engine that crashes has failed; one that is missing raises."""
    if program.lowering is not None:
        case = replace(case, operations=_lowered(case.operations, program.lowering))
    run = _Run(engine, program, case)
    problems = list(run.perform())
    if run.reached_end and not problems:
        problems += run.judge()
    return CaseResult(
        case=case.name,
        usable=case.usable,
        block_size=engine.block_size,
        expected=case.expect,
        observed=run.observed,
        problems=tuple(problems),
        not_exposed=tuple(run.not_exposed),
        operations=case.operations,
        events=run.events,
        monitored=run.monitor.steps if run.monitor else 0,
    )


@cache
def _measured(mechanism: str) -> MechanismReport:
    """Raises EngineMissing where torch is not there."""
    try:
        from kvclaims.checker import measure
    except ImportError as error:
        raise EngineMissing(f"mechanisms need torch ({first_line(error)})") from None
    return measure.measure(measure.find(mechanism))


def _is_partial(operation: Operation) -> bool:
    """Whether the operation speaks of blocks that are partly filled."""
    return any(segment.tokens for segment in operation.fields.get("content", ()))


def _lowered(operations: Iterable[Operation], lowering: Lowering) -> tuple[Operation, ...]:
    return tuple(
        Operation("declare", {**operation.fields, "protection": lowering.offered})
        if operation.op == "declare"
        else operation
        for operation in operations
    )


@dataclass
class _Mark:
    """Blocks to be compared later, with the digests of their KV bytes then."""

    blocks: tuple[int, ...]
    before: tuple[int, ...]


@dataclass
class _Run:
    """One program being run: the runtime, what was remembered, and what was seen."""

    engine: Engine
    program: Program
    case: Case
    observed: dict[str, Any] = field(default_factory=dict)
    not_exposed: list[str] = field(default_factory=list)
    events: tuple[Event, ...] = ()
    reached_end: bool = False
    monitor: Monitor | None = None
    _marks: list[_Mark] = field(default_factory=list)
    _resident_before: frozenset[str] = frozenset()
    _routed: set[str] = field(default_factory=set)
    """Contents that routers believe to be on the device."""
    _misled: int = 0
    """Contents of which they believe what is not so."""
    _seen: Observation | None = None

    def perform(self) -> Iterator[Violation]:
        """Do every operation, then read and close the runtime."""
        size = self.engine.block_size
        config = PoolConfig(self.case.usable, size, self.program.defer_limit)
        run_id = "-".join(filter(None, (self.program.id, self.case.name.replace("/", "-"))))
        number, doing = 0, "opening the pool"
        try:
            self._check_features()
            fidelity, bound = self._fidelity()
            runtime = self._open(replace(config, fidelity=fidelity, bound=bound), run_id)
            try:
                self._watch(runtime)
                self._hear(runtime)  # some engines tell nothing before they were asked
                for number, operation in enumerate(self.case.operations, 1):
                    doing = f"operation {number} ({operation})"
                    rule = self.case.fails.get(number)
                    if rule is None:
                        self._perform(runtime, operation)
                    elif broken := self._fail(runtime, operation, doing, rule):
                        yield broken
                        return
                    self._hear(runtime)
                doing = "reading the state"
                self._read(runtime)
            finally:
                runtime.close()
            self.events = tuple(runtime.events())
            self.reached_end = True
        except NotExposed as error:
            self.not_exposed.append(f"{doing}: {first_line(error)}")
        except NoProgress as error:
            yield Violation("B11", f"{doing}: {first_line(error)}")
        except EngineMissing:
            raise
        except BadOperation as error:
            yield Violation("B9", f"{doing} was turned down: {first_line(error)}")
        except Exception as error:  # noqa: BLE001 - a crash of the engine under test is a finding
            yield Violation("B9", f"{doing} raised {type(error).__name__}: {first_line(error)}")

    @property
    def _features(self) -> frozenset[Feature]:
        return frozenset(getattr(self.engine, "features", ()))

    def _check_features(self) -> None:
        """Raises `NotExposed` where the program asks for what the engine does not have."""
        has = self._features
        lacks = sorted(set().union(*(needs(o) for o in self.case.operations)) - has)
        if lacks:
            raise NotExposed(f"the engine has no {', '.join(lacks)}")
        if self.case.mechanism is not None and Feature.FIDELITY not in has:
            raise NotExposed("no mechanism keeps the KV of its blocks")
        if self.engine.block_size == 1 and any(map(_is_partial, self.case.operations)):
            raise NotExposed("a block that is partly filled: the engine's block is one token")

    def _fidelity(self) -> tuple[Fidelity, float | None]:
        """What survives in this pool: what its mechanism was measured to give, and within which
        bound."""
        if self.case.mechanism is None:
            return Fidelity.EXACT, None
        try:
            report = _measured(self.case.mechanism)
        except EngineMissing as error:
            raise NotExposed(first_line(error)) from None
        if report.measured is None or report.verdict is not Verdict.HOLDS:
            raise NotExposed(f"{self.case.mechanism} gives no class that could be measured")
        served = report.served
        off = served.output_error
        self.observed |= {
            "exact_tokens": served.exact_tokens,
            "leading_tokens": served.leading_tokens,
            "output_error": None if off is None else round(off, 2),
        }
        is_bounded = report.measured is Fidelity.BOUNDED_LOSS
        return report.measured, report.largest_bound if is_bounded else None

    def _watch(self, runtime: Runtime) -> None:
        try:
            self.monitor = watch(runtime)
        except NotExposed as error:
            self.not_exposed.append(f"monitor: {first_line(error)}")

    def _open(self, config: PoolConfig, run_id: str) -> Runtime:
        try:
            return self.engine.open(config, run_id)
        except ImportError as error:
            raise EngineMissing(
                f"engine {self.engine.name} cannot be imported: {first_line(error)}"
            ) from error

    def _perform(self, runtime: Runtime, operation: Operation) -> None:
        fields = operation.fields
        if operation.op == "mark":
            self._mark(runtime, operation)
            return
        if operation.op == "submit" and fields["request"] == self.program.request:
            self._resident_before = frozenset(runtime.observe().resident)
        if self.monitor is not None:
            introduce(self.monitor, operation)
        perform(runtime, operation)

    def _fail(
        self, runtime: Runtime, operation: Operation, doing: str, rule: str
    ) -> Violation | None:
        """Do what has to be turned down, and look whether that changed anything (B9)."""
        before, told = runtime.observe(), len(runtime.events())
        try:
            self._perform(runtime, operation)
        except BadOperation as error:
            if runtime.observe() == before and len(runtime.events()) == told:
                return None
            return Violation(
                "B9", f"{doing} was turned down, and changed the state: {first_line(error)}"
            )
        return Violation(rule, f"{doing} was done, and has to be turned down")

    def _hear(self, runtime: Runtime) -> None:
        """What the engine told routers meanwhile (B8)."""
        if "routed" not in self.case.expect or Feature.KV_EVENTS not in self._features:
            return
        for event in runtime.kv_events():
            if event.tier != "device":
                continue
            if event.kind == "stored":
                self._routed.update(event.keys)
            elif event.kind == "removed":
                self._routed.difference_update(event.keys)
            else:
                self._routed.clear()

    def _mark(self, runtime: Runtime, operation: Operation) -> None:
        tokens = tokens_of(operation.fields["content"], runtime.config.block_size)
        found = runtime.locate(tokens, operation.fields.get("salt", ""))
        blocks = tuple(block for block in found if block is not None)
        try:
            self._marks.append(_Mark(blocks, runtime.fingerprint(blocks)))
        except NotExposed as error:
            self.observed["kv_intact"] = NOT_EXPOSED
            self.not_exposed.append(f"kv_intact: {first_line(error)}")

    def _read(self, runtime: Runtime) -> None:
        """Everything that only a live runtime can say."""
        seen = self._seen = runtime.observe()
        if self.monitor is None:
            self.observed |= dict.fromkeys(("queued", "references", "null_uses"), NOT_EXPOSED)
        else:
            snapshot = runtime.snapshot()
            self.monitor.audit(snapshot)
            self._count_blocks(snapshot)
        self._read_routed(seen)
        if self._marks:
            self.observed["kv_intact"] = sum(
                before == after
                for mark in self._marks
                for before, after in zip(mark.before, runtime.fingerprint(mark.blocks), strict=True)
            )
        if self.program.claim is not None:
            claim = seen.claims[self.program.claim]
            self.observed |= {
                "leading": claim.leading,
                "survivors": claim.survivors,
                "materialized": claim.phase is Phase.MATERIALIZED,
            }
        if self.program.request is not None:
            request = seen.requests[self.program.request]
            fresh = self._request_ids(runtime) & seen.resident.keys() - self._resident_before
            self.observed |= {
                "outcome": str(request.outcome),
                "shortfall": request.shortfall,
                "blocking_claims": list(request.blocking_claims),
                "hit_blocks": request.hit_blocks,
                "new_reusable": len(fresh),
            }

    def _count_blocks(self, pool: PoolSnapshot) -> None:
        null = pool.null_block
        places = (pool.queue, *pool.holders.values(), *pool.pins.values(), *pool.lookup.values())
        self.observed |= {
            "queued": len(set(pool.queue)),
            "references": sum(facts.ref for facts in pool.facts.values()),
            "null_uses": NOT_EXPOSED if null is None else sum(p.count(null) for p in places),
        }

    def _read_routed(self, seen: Observation) -> None:
        """What routers believe, and where that is not what is resident."""
        if "routed" not in self.case.expect:
            return
        if Feature.KV_EVENTS not in self._features:
            self.observed["routed"] = NOT_EXPOSED
            self.not_exposed.append("routed: the engine's KV events are not heard")
            return
        self.observed["routed"] = len(self._routed)
        self._misled = len(self._routed ^ seen.resident.keys())

    def _request_ids(self, runtime: Runtime) -> set[str]:
        size = runtime.config.block_size
        for operation in self.case.operations:
            if operation.op == "submit" and operation.fields["request"] == self.program.request:
                tokens = tokens_of(operation.fields["content"], size)
                return set(content_ids(tokens, size, operation.fields.get("salt", "")))
        return set()

    def judge(self) -> Iterator[Violation]:
        """The monitor's findings, the trace, its fold against the runtime, every number."""
        if self.monitor is not None:
            yield from self.monitor.violations
        lines = [event.to_json() for event in self.events]
        try:
            (events,) = read_runs(lines)
        except (TraceError, ValueError) as error:
            yield Violation("T3", f"the engine's own trace is rejected: {first_line(error)}")
            return
        fold = Fold(events)
        yield from fold.violations
        yield from self._compare(fold)
        self._count(fold)
        if self.program.lowering is not None:
            self._judge_lowering(events, self.program.lowering)
        for name, wanted in self.case.expect.items():
            got = self.observed.get(name)
            if got not in (wanted, NOT_EXPOSED):
                yield Violation(self.program.rule(name), f"{name} is {got}, expected {wanted}")
        if self._misled:
            yield Violation(
                "B8", f"of {self._misled} contents the KV events say what is not so at the end"
            )

    def _count(self, fold: Fold) -> None:
        self.observed |= {name: fold.counts.get(kind, 0) for name, kind in _EVENT_COUNTS.items()}
        self.observed["victims"] = sum(
            event.event == "allocation_victim_selected"
            and event.data["reason"] == "cached_prefix_reuse"
            for event in self.events
        )
        self._leave_out_surplus()
        if self.program.request is not None:
            request = fold.requests[self.program.request]
            self.observed["deferred"] = request.deferrals
            self.observed["waits_on"] = list(request.waited_on)
            if request.free is not None:
                self.observed["free"] = request.free

    def _leave_out_surplus(self) -> None:
        """Where the engine dropped more than the allocation needed, because it drops whole leaves,
        what survives of a content that it dropped from is its own grain and no expected number."""
        surplus = sum(event.data.get("reason") == WITH_ITS_LEAF for event in self.events)
        if surplus:
            for name in sorted(_BY_THE_BLOCK & self.case.expect.keys()):
                self.observed[name] = NOT_EXPOSED
                self.not_exposed.append(f"{name}: {surplus} blocks went with their leaf")

    def _compare(self, fold: Fold) -> Iterator[Violation]:
        """Folding the trace yields the runtime's state and every outcome (T2)."""
        assert self._seen is not None
        for name, view in self._seen.claims.items():
            life = fold.claims.get(name)
            told = life.phase if life else "nothing"
            if life is None or (life.phase, life.generation) != (view.phase, view.generation):
                yield Violation("T2", f"claim {name} is {view.phase}, the trace tells {told}")
        for name, seen in self._seen.requests.items():
            request = fold.requests.get(name)
            if request is None:
                yield Violation("T2", f"request {name} is {seen.outcome}, the trace tells nothing")
                continue
            is_ended = seen.state == "finished"
            real = (seen.state, seen.outcome, seen.shortfall, seen.blocking_claims)
            told_of = (request.state, request.outcome, request.shortfall, request.blocking_claims)
            if (is_ended and real != told_of) or seen.state != request.state:
                yield Violation(
                    "T2",
                    f"request {name} is {seen.state}, {seen.outcome}, {seen.shortfall} short, "
                    f"blaming {list(seen.blocking_claims)}; the trace tells {request.state}, "
                    f"{request.outcome}, {request.shortfall}, {list(request.blocking_claims)}",
                )

    def _judge_lowering(self, events: Sequence[Event], lowering: Lowering) -> None:
        """Whether the run kept the stronger promise; what it lost is the witness."""
        losses = [v for v in Fold(events, lowering.promised).violations if v.rule == "L5"]
        self.observed["lowering"] = "rejected" if losses else "accepted"
        if losses:
            self.observed["witness"] = {
                **losses[0].to_json(),
                "operations": [operation.to_json() for operation in self.case.operations],
            }


def _fold_case(engine: Engine, program: Program) -> tuple[CaseResult, ...]:
    """The folded program's trace as text: does it tell all, and does it miss any dropped line?"""
    source = next((p for p in builtin() if p.id == program.fold), None)
    if source is None or len(source.cases) != 1 or source.request is None or source.claim is None:
        raise BadOperation(f"program {program.id}: no program {program.fold!r} to fold")
    run = run_case(engine, source, source.cases[0])
    expected: dict[str, Any] = {
        "accepted": True,
        "materialized": True,
        "undetected": [],
        **{name: run.expected[name] for name in ("outcome", "shortfall", "blocking_claims")},
    }
    observed: dict[str, Any] = {}
    problems = list(run.problems)
    if run.events:
        lines = [event.to_json() for event in run.events]
        (events,) = read_runs(lines)
        observed = {**_recovered(Fold(events), source), **_dropped(lines)}
        problems += [
            Violation("T3" if name == "undetected" else "T2", f"{name} is {observed[name]}")
            for name, wanted in expected.items()
            if observed[name] != wanted
        ]
    return (
        CaseResult(
            case="",
            usable=run.usable,
            block_size=run.block_size,
            expected=expected,
            observed=observed,
            problems=tuple(problems),
            not_exposed=() if run.events else run.not_exposed,
            operations=run.operations,
        ),
    )


def _recovered(fold: Fold, source: Program) -> dict[str, Any]:
    """What the trace alone tells of the program's claim and request."""
    assert source.claim is not None
    assert source.request is not None
    claim, request = fold.claims[source.claim], fold.requests[source.request]
    return {
        "accepted": claim.was_accepted,
        "materialized": claim.was_materialized,
        "outcome": str(request.outcome),
        "shortfall": request.shortfall,
        "blocking_claims": list(request.blocking_claims),
    }


def _dropped(lines: list[str]) -> dict[str, Any]:
    """Drop each line in turn: the trace must be rejected every time (T3)."""
    undetected = []
    for index in range(len(lines)):
        try:
            read_runs(lines[:index] + lines[index + 1 :])
            undetected.append(index)
        except TraceError:
            continue
    return {
        "dropped": len(lines),
        "detected": len(lines) - len(undetected),
        "undetected": undetected,
    }
