"""Random operations on an engine, chosen by hypothesis and judged by a `Supervisor`.

Pools are small and contents few, so that prefixes are shared and diverge and room is short.
What was chosen is steered towards runs in which requests are refused, deferred and preempted.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, ClassVar, Final

import hypothesis
from hypothesis import HealthCheck, Phase, Verbosity, settings, target
from hypothesis import strategies as st
from hypothesis.configuration import set_hypothesis_home_dir
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)

from kvclaims.checker.counterexample import (
    FOLDER,
    Counterexample,
    described,
    operations_json,
    shortest,
)
from kvclaims.checker.supervise import (
    Crash,
    Finding,
    Program,
    Supervisor,
    open_supervised,
    oracle_for,
    supervise,
    warm_up,
)
from kvclaims.checker.verdicts import Progress, counted
from kvclaims.spec import pool
from kvclaims.spec.interface import Engine, EngineInfo, PoolConfig, PredicateKind
from kvclaims.spec.operations import Operation, parse
from kvclaims.spec.vocabulary import RESPONSIBLE, Protection, Verdict

DEFAULT_STEPS: Final = 3000
"""Operations where neither a number nor a time is asked for."""

EXAMPLES: Final = 60
"""Runs in one call of hypothesis: the second half of them is steered by `target`."""

LENGTH: Final = 50
"""Operations in one run."""

SMALL_BLOCK: Final = 4
"""Tokens in a block where the engine leaves it open: decoding fills blocks soon."""

SHRINKING: Final = 4000
"""Operations that hypothesis may spend on shrinking a failure."""

AUDIT_EVERY: Final = 3

PRESSURE: Final = {
    "active_request_refused": 4,
    "active_request_deferred": 2,
    "active_request_preempted": 6,
    "resident_claim_harmed": 3,
    "resident_claim_demoted": 1,
    "block_lost_after_release": 2,
    "allocation_victim_selected": 1,
}
"""Events that a run is steered towards, with their weight."""


@dataclass
class _Failure:
    """A run that broke a rule."""

    program: Program
    finding: Finding


class Broken(AssertionError):
    """A rule was broken in this run."""


class _Enough(BaseException):
    """Leave hypothesis at once: the budget is spent.  No `Exception`, so nothing catches it."""


@dataclass
class _Session:
    """What one fuzzing run shares over all its examples."""

    engine: Engine
    oracle: Engine | None
    block_size: int
    limit: int | None
    until: float | None
    progress: Progress
    operations: int = 0
    steps: int = 0
    events: int = 0
    monitored: int = 0
    runs: int = 0
    fired: Counter[str] = field(default_factory=Counter)
    not_exposed: dict[str, None] = field(default_factory=dict)
    failure: _Failure | None = None
    shrinking: int = 0
    """Operations spent on making the failure smaller."""
    is_over: bool = False

    @property
    def has_ended(self) -> bool:
        return self.is_over or self.failure is not None

    def spend(self) -> None:
        """One operation more; raises `_Enough` where there is no budget for it."""
        if self.failure is not None:
            self.shrinking += 1
            self.is_over = self.shrinking > SHRINKING
        elif self.limit is not None:
            self.is_over = self.operations >= self.limit
        elif self.until is not None:
            self.is_over = time.monotonic() >= self.until
        if self.is_over:
            raise _Enough
        if self.failure is not None:
            return
        self.operations += 1
        if self.operations % 500 == 0:
            self.progress(f"fuzzing {self.engine.name}: {self.operations} operations")

    def broke(self, program: Program, found: Sequence[Finding]) -> None:
        """Keep the shortest failure; only the rule that was broken first counts from then on."""
        first = found[0]
        known = self.failure
        if known is not None and first.rule != known.finding.rule:
            return
        if known is None or len(program.operations) <= len(known.program.operations):
            self.failure = _Failure(program, first)
        raise Broken(str(first))

    def ended(self, supervisor: Supervisor) -> None:
        if self.failure is not None and self.shrinking:
            return
        self.runs += 1
        self.steps += supervisor.steps
        self.events += supervisor.events
        self.monitored += supervisor.monitor.steps
        self.fired.update(supervisor.monitor.fired)
        self.not_exposed.update(supervisor.not_exposed)


# --- what is chosen ----------------------------------------------------------------------

_CLAIMS: Final = ("a", "b", "c", "d")
_STREAMS: Final = ("A", "B", "C")
_PROTECTIONS: Final = (Protection.HARD, Protection.HARD, Protection.HARD, *Protection)
_KINDS: Final = tuple(
    kind
    for kind, weight in {
        "step": 7,
        "submit": 6,
        "declare": 4,
        "drain": 1,
        "release": 1,
        "demote": 1,
        "renew": 1,
        "advance": 2,
        "abort": 2,
        "lose": 2,
        "reset": 1,
    }.items()
    for _ in range(weight)
)
"""Operations, each as often as it should be chosen."""


def _contents(usable: int, block_size: int) -> st.SearchStrategy[list[list[Any]]]:
    """Prefixes of few streams, whole or with a tail of another one, now and then too long."""
    head = st.tuples(st.sampled_from(_STREAMS[:2]), st.integers(1, usable + 1))
    tail = st.tuples(st.sampled_from(_STREAMS[1:]), st.integers(1, max(1, usable // 2)))
    some_tokens = st.sampled_from((1, block_size - 1))
    return st.one_of(
        head.map(lambda h: [list(h)]),
        st.tuples(head, tail).map(lambda p: [[p[0][0], min(p[0][1], usable // 2)], list(p[1])]),
        st.tuples(head, some_tokens).map(lambda p: [[*p[0], p[1]]]),
    )


class _Machine(RuleBasedStateMachine):
    """Operations as hypothesis chooses them; `session` is set by `_machine_for`."""

    session: _Session

    def __init__(self) -> None:
        super().__init__()
        self.supervisor: Supervisor | None = None
        self.done: list[Operation] = []
        self.requests = 0
        self.generations: dict[str, int] = {}
        self.spoken: list[list[list[Any]]] = []
        """Contents used so far: prefixes are shared, and claims are materialized."""

    @initialize(usable=st.integers(4, 12), defer_limit=st.integers(0, 2))
    def open(self, usable: int, defer_limit: int) -> None:
        session = self.session
        self.config = PoolConfig(usable, session.block_size, defer_limit)
        self.contents = _contents(usable, session.block_size)
        session.spend()
        try:
            self.supervisor = open_supervised(
                session.engine, session.oracle, self.config, audit_every=AUDIT_EVERY
            )
        except Crash as crash:
            session.broke(Program(self.config, ()), [Finding("B9", str(crash), 0)])
            return
        self._judge(self.supervisor.findings)

    def do(self, **raw: Any) -> None:
        """Do one operation, unless this run has ended with another rule broken."""
        if self.supervisor is None or not self.supervisor.is_alive or self.supervisor.findings:
            return
        self.session.spend()
        operation = parse(raw)
        self.done.append(operation)
        self._judge(self.supervisor.do(operation))

    def _content(self, data: st.DataObject) -> list[list[Any]]:
        """A content used before, or a new one."""
        known = bool(self.spoken) and data.draw(st.booleans())
        source = st.sampled_from(self.spoken) if known else self.contents
        content: list[list[Any]] = data.draw(source)
        if not known:
            self.spoken.append(content)
        return content

    def _judge(self, found: Sequence[Finding]) -> None:
        if found:
            self.session.broke(Program(self.config, tuple(self.done)), found)

    @rule(data=st.data(), kind=st.sampled_from(_KINDS))
    def operate(self, data: st.DataObject, kind: str) -> None:
        """One operation, likely one that does something in the state at hand."""
        chosen = self._choices.get(kind)
        self.do(op=kind, **(chosen(self, data) if chosen else {}))

    def _submit(self, data: st.DataObject) -> dict[str, Any]:
        size = self.session.block_size
        self.requests += 1
        chosen: dict[str, Any] = {
            "request": f"r{self.requests}",
            "content": self._content(data),
            "max_new_tokens": data.draw(st.sampled_from((1, 2, size + 1, 2 * size))),
        }
        if data.draw(st.integers(0, 4)) == 4:
            chosen["admit_reuse"] = False
        if data.draw(st.integers(0, 9)) == 9:
            chosen["salt"] = "other"
        return chosen

    def _declare(self, data: st.DataObject) -> dict[str, Any]:
        claim = data.draw(st.sampled_from(_CLAIMS))
        content = self._content(data)
        full = sum(segment[1] for segment in content)
        chosen: dict[str, Any] = {
            "claim": claim,
            "content": content,
            "protection": data.draw(st.sampled_from(_PROTECTIONS)).value,
            "n": data.draw(st.one_of(st.just(full), st.integers(1, full))),
        }
        if data.draw(st.integers(0, 3)) == 3:
            chosen |= {"kind": PredicateKind.RANGE.value, "start": data.draw(st.integers(0, 2))}
        elif data.draw(st.booleans()):
            chosen["min_blocks"] = data.draw(st.integers(1, 3))
        if data.draw(st.booleans()):
            chosen["duration"] = data.draw(st.integers(1, 6))
        generation = self.generations.get(claim, 0) + (data.draw(st.integers(0, 7)) < 7)
        self.generations[claim] = chosen["generation"] = max(1, generation)
        return chosen

    def _claim(self, data: st.DataObject) -> dict[str, Any]:
        """A claim in force, now and then any."""
        seen = self.supervisor.seen.claims if self.supervisor else {}
        in_force = [name for name, claim in seen.items() if claim.phase in RESPONSIBLE]
        any_one = not in_force or data.draw(st.integers(0, 7)) == 7
        return {"claim": data.draw(st.sampled_from(_CLAIMS if any_one else in_force))}

    def _renewal(self, data: st.DataObject) -> dict[str, Any]:
        return {**self._claim(data), "duration": data.draw(st.integers(1, 6))}

    def _request(self, data: st.DataObject) -> dict[str, Any]:
        """A request that waits or runs, now and then any."""
        seen = self.supervisor.seen.requests if self.supervisor else {}
        active = [name for name, request in seen.items() if request.state != "finished"]
        if active and data.draw(st.integers(0, 7)) < 7:
            return {"request": data.draw(st.sampled_from(active))}
        return {"request": f"r{data.draw(st.integers(1, 1 + self.requests))}"}

    def _loss(self, data: st.DataObject) -> dict[str, Any]:
        return {"content": self._content(data), "position": data.draw(st.integers(0, 3))}

    def _times(self, data: st.DataObject) -> dict[str, Any]:
        return {"times": data.draw(st.sampled_from((1, 1, 1, 2, 3, 6)))}

    def _ticks(self, data: st.DataObject) -> dict[str, Any]:
        return {"ticks": data.draw(st.integers(1, 4))}

    _choices: ClassVar[dict[str, Callable[[Any, st.DataObject], dict[str, Any]]]] = {
        "submit": _submit,
        "declare": _declare,
        "release": _claim,
        "demote": _claim,
        "renew": _renewal,
        "abort": _request,
        "lose": _loss,
        "step": _times,
        "advance": _ticks,
    }

    def teardown(self) -> None:
        supervisor = self.supervisor
        if supervisor is None:
            return
        self.supervisor = None
        self.session.ended(supervisor)
        if supervisor.findings:
            return
        counted_events = Counter(event.event for event in supervisor.runtime.events())
        target(float(sum(PRESSURE.get(e, 0) * n for e, n in counted_events.items())))
        self._judge(supervisor.close())


def _machine_for(session: _Session, seed: int) -> type[_Machine]:
    machine = type("Fuzzing", (_Machine,), {"session": session})
    return hypothesis.seed(seed)(machine)


# --- the command -------------------------------------------------------------------------


@dataclass(frozen=True)
class FuzzReport:
    """What was done to an engine and what it broke."""

    engine: EngineInfo
    seed: int
    operations: int
    steps: int
    runs: int
    events: int
    monitored: int
    never_fired: tuple[str, ...]
    not_exposed: tuple[str, ...]
    seconds: float
    program: Program | None = None
    finding: Finding | None = None
    file: Path | None = None

    @property
    def verdict(self) -> Verdict:
        if self.finding is not None:
            return Verdict.VIOLATED
        return Verdict.HOLDS if self.operations else Verdict.VACUOUS

    def to_json(self) -> dict[str, Any]:
        violations = []
        if self.finding is not None and self.program is not None:
            violations.append(
                {
                    **self.finding.to_json(),
                    "operations": operations_json(self.program.operations),
                    "file": str(self.file),
                }
            )
        return {
            "engine": vars(self.engine),
            "seed": self.seed,
            "runs": self.runs,
            "operations": self.operations,
            "steps": self.steps,
            "events": self.events,
            "monitored_steps": self.monitored,
            "never_fired": list(self.never_fired),
            "violations": violations,
            "not_exposed": list(self.not_exposed),
        }

    def lines(self) -> Iterator[str]:
        yield f"{self.engine.name} {self.engine.version} ({self.engine.path})"
        speed = self.operations / self.seconds if self.seconds else 0
        yield (
            f"  {counted(self.operations, 'operation')} in {counted(self.runs, 'run')}, "
            f"{counted(self.steps, 'step')}, {counted(self.events, 'event')}, "
            f"{counted(self.monitored, 'monitored step')}, seed {self.seed}, "
            f"{speed:,.0f} operations/s"
        )
        if self.never_fired:
            yield f"  never taken: {', '.join(self.never_fired)}"
        for name in self.not_exposed:
            yield f"  {Verdict.NOT_EXPOSED}: {name}"
        if self.finding is not None and self.program is not None:
            yield from shown(self.finding, self.program)
            yield f"  run it again: kvclaims replay {self.file}"
        yield f"{self.verdict}"


def shown(finding: Finding, program: Program) -> Iterator[str]:
    """A violation for people: the rule, the step, the operations, before and after."""
    yield f"  {Verdict.VIOLATED} {finding}"
    config = program.config
    yield (
        f"  pool of {config.usable} blocks of {config.block_size} tokens, "
        f"defer limit {config.defer_limit}; broken in operation {finding.operation} of:"
    )
    yield from (f"    {line}" for line in described(program))
    for name in {**finding.before, **finding.after}:
        before, after = finding.before.get(name, "-"), finding.after.get(name, "-")
        yield f"    {name}: {before} → {after}"


def fuzz(
    engine: Engine,
    steps: int | None,
    seconds: float | None,
    seed: int,
    progress: Progress,
    folder: Path = FOLDER,
) -> FuzzReport:
    """Do `steps` operations, or as many as fit in `seconds`; stop at the first broken rule.

    The same seed and steps make the same run.  A counterexample is written into `folder`.
    """
    progress(f"starting {engine.name}")
    warm_up(engine, getattr(engine, "block_size", SMALL_BLOCK))
    started = time.monotonic()
    session = _session(engine, steps, seconds, progress)
    search(session, seed)
    spent = time.monotonic() - started
    program = finding = file = None
    if session.failure is not None:
        progress("making the counterexample shorter")
        program, finding = reduced(session)
        example = Counterexample(engine.name, program, finding.rule, finding.message, seed)
        file = example.write(folder)
    never = (action.name for action in pool.ACTIONS if not session.fired[action.name])
    return FuzzReport(
        engine=engine.info(),
        seed=seed,
        operations=session.operations,
        steps=session.steps,
        runs=session.runs,
        events=session.events,
        monitored=session.monitored,
        never_fired=tuple(never),
        not_exposed=tuple(session.not_exposed),
        seconds=spent,
        program=program,
        finding=finding,
        file=file,
    )


def hunt(engine: Engine, steps: int, seed: int) -> Program | None:
    """A program that breaks a rule, as short as it could be made; None if none was found."""
    session = _session(engine, steps, None, lambda _: None)
    search(session, seed)
    return reduced(session)[0] if session.failure is not None else None


def _session(
    engine: Engine, steps: int | None, seconds: float | None, progress: Progress
) -> _Session:
    return _Session(
        engine=engine,
        oracle=oracle_for(engine),
        block_size=getattr(engine, "block_size", SMALL_BLOCK),
        limit=DEFAULT_STEPS if steps is None and seconds is None else steps,
        until=time.monotonic() + seconds if seconds is not None else None,
        progress=progress,
    )


def search(session: _Session, seed: int) -> None:
    """Let hypothesis look for a failure until the session's budget is spent."""
    chosen = settings(
        max_examples=EXAMPLES,
        stateful_step_count=LENGTH,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.target, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        verbosity=Verbosity.quiet,
        print_blob=False,
        report_multiple_bugs=False,
    )
    with _own_storage():
        for batch in count():
            machine = _machine_for(session, seed * 1_000_003 + batch)
            try:
                run_state_machine_as_test(machine, settings=chosen)
            except _Enough:
                return
            except Exception:
                # Hypothesis complains in its own way of a run that was cut short.
                if session.has_ended:
                    return
                raise


@contextmanager
def _own_storage() -> Iterator[None]:
    """Hypothesis keeps files of its own; they go where nobody sees them."""
    with tempfile.TemporaryDirectory(prefix="kvclaims-fuzz-") as folder:
        set_hypothesis_home_dir(folder)
        try:
            yield
        finally:
            set_hypothesis_home_dir(None)


def reduced(session: _Session) -> tuple[Program, Finding]:
    """The failure with every operation left out that it does not need."""
    assert session.failure is not None
    rule = session.failure.finding.rule

    def breaks(program: Program) -> tuple[Finding, ...]:
        return supervise(session.engine, session.oracle, program)

    program = shortest(session.failure.program, rule, breaks)
    found = breaks(program)
    if found and found[0].rule == rule:
        return program, found[0]
    return session.failure.program, session.failure.finding
