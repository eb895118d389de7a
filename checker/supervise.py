"""Drives a runtime operation by operation and judges each one by everything there is to judge by.

The monitor hears every allocator step; observations are checked by themselves and against the
one before; the request at the door is foretold; the pool is audited; the trace is folded at the
end.  Where the engine under test is not the reference, the reference does the same operations
beside it and must show the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvclaims.checker import observing
from kvclaims.checker.audit import Fold, read_runs
from kvclaims.checker.door import (
    Foretold,
    Visitor,
    Wanted,
    foretell,
    judged,
    nothing_grew,
    phase_of,
)
from kvclaims.checker.engines import REFERENCE, find, first_line
from kvclaims.checker.monitor import Monitor
from kvclaims.checker.observing import Broken
from kvclaims.checker.watching import introduce
from kvclaims.spec import pool
from kvclaims.spec.claims import hard
from kvclaims.spec.content import GENERATED_TOKEN, content_ids, tokens_of
from kvclaims.spec.interface import (
    BadOperation,
    ClaimAnswer,
    Engine,
    EngineMissing,
    NotExposed,
    Observation,
    PoolConfig,
    PoolStep,
    RequestSpec,
    Runtime,
)
from kvclaims.spec.operations import Operation, claim_spec, perform
from kvclaims.spec.telemetry import Event, TraceError
from kvclaims.spec.vocabulary import RESPONSIBLE, RULES, TERMINAL, Phase

DRAIN_STEPS: Final = 500
"""Steps after which a drain has made no progress (B11): far more than any pool here takes."""

_RELEASED: Final = (Phase.DEMOTED, Phase.EXPIRED, Phase.RELEASED)


@dataclass(frozen=True)
class Finding:
    """A broken rule: what was seen, in which operation (from 1; 0 is the opening), at which
    allocator step, and what changed there."""

    rule: str
    message: str
    operation: int
    step: str = ""
    before: Mapping[str, Any] = field(default_factory=dict)
    after: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "rule": self.rule,
            "meaning": RULES[self.rule].meaning,
            "message": self.message,
            "operation": self.operation,
            "step": self.step or None,
            "before": dict(self.before),
            "after": dict(self.after),
        }

    def __str__(self) -> str:
        at = f", at {self.step}" if self.step else ""
        return f"{self.rule} {RULES[self.rule].meaning}: {self.message}{at}"


class Crash(Exception):
    """The runtime raised what no runtime may raise; the message says what."""


Told = tuple[str, str, str]
"""A rule, what was seen, and the allocator step (empty where it was no single step)."""


@dataclass
class _Answer:
    """What a runtime answered: a value, or the words with which it turned the operation down."""

    value: Any = None
    refusal: str | None = None


class Supervisor:
    """One run of one runtime.  `findings` holds what was found, in order of discovery.

    `audit_every`: how often, in operations, the whole pool is compared with the shadow.
    """

    def __init__(
        self, runtime: Runtime, oracle: Runtime | None = None, *, audit_every: int = 1
    ) -> None:
        self.runtime = runtime
        self.oracle = oracle
        self.findings: list[Finding] = []
        self.not_exposed: dict[str, None] = {}
        self.operations = 0
        self.steps = 0
        """Scheduling steps done."""
        self.is_alive = True
        self._audit_every = audit_every
        self._size = runtime.config.block_size
        self._heard: list[PoolStep] = []
        self._told: list[int] = []
        """Number of events in the trace after each operation."""
        self._now = 0
        self._ends: dict[str, int] = {}
        self._wanted: dict[str, Wanted] = {}
        self._visitors: dict[str, tuple[tuple[str, ...], int, bool]] = {}
        self._contents: dict[str, tuple[str, ...]] = {}
        """Request → the contents of its blocks, also of those that decoding fills."""
        self._tables: dict[str, list[int]] = {}
        """Request → the blocks it took, in order."""
        self._deferrals: dict[str, int] = {}
        self._preempted: set[str] = set()
        self._left: dict[str, dict[int, int]] = {}
        """Claim in the machine → position → the block that stands for it, also once it ended."""
        self._digests: dict[tuple[str, int], int] = {}
        snapshot = runtime.snapshot()
        self.monitor = Monitor(snapshot.facts, snapshot.null_block)
        runtime.listen(self._heard.append)
        self._seen = runtime.observe()
        self._can_read_memory = self._reads_memory()
        self._collect([*self._audited(), *_unstepped(self._whole(self._seen))], 0)
        self._told.append(len(runtime.events()))

    @property
    def seen(self) -> Observation:
        """The state after the last operation."""
        return self._seen

    @property
    def events(self) -> int:
        return self._told[-1]

    def do(self, operation: Operation) -> Sequence[Finding]:
        """Do one operation and judge it; what was found in it."""
        known = len(self.findings)
        self.operations += 1
        match operation.op:
            case "step":
                for _ in range(operation.fields.get("times", 1)):
                    self._one(Operation("step", {}))
            case "drain":
                self._drain()
            case "mark":
                pass
            case _:
                self._one(operation)
        self._told.append(len(self.runtime.events()) if self.is_alive else self._told[-1])
        return self.findings[known:]

    def close(self) -> Sequence[Finding]:
        """End the run: a last deep audit, then the whole trace is read back and folded."""
        known = len(self.findings)
        if not self.is_alive:
            return ()
        self.is_alive = False
        try:
            self._collect(self._audited(), self.operations)
            _call("close", self.runtime.close)
        except Crash as crash:
            self._crashed(crash)
            return self.findings[known:]
        if self.oracle is not None:
            self.oracle.close()
        self._fold(self.runtime.events())
        return self.findings[known:]

    # -- one operation

    def _drain(self) -> None:
        for _ in range(DRAIN_STEPS):
            idle = all(r.state == "finished" for r in self._seen.requests.values())
            if idle or not self.is_alive:
                return
            self._one(Operation("step", {}))
        self._collect([("B11", f"requests still wait or run after {DRAIN_STEPS} steps", "")])

    def _one(self, operation: Operation) -> None:
        """Do an operation of one call, on the runtime and beside it on the oracle."""
        if not self.is_alive:
            return
        before, told = self._seen, len(self.runtime.events())
        foretold = self._foretell(before) if operation.op == "step" else None
        legal = self._is_legal(operation, before)
        try:
            answer = self._perform(operation)
            if answer is None:
                return
            self._seen = after = _call("observe", self.runtime.observe)
            self.steps += operation.op == "step"
            if answer.refusal is None:
                self._meet(operation)
            events, steps = self.runtime.events()[told:], tuple(self._heard)
            found = self._monitored()
            judged_so = self._judge(operation, answer, legal, before, after, events, steps)
            found += _unstepped(judged_so)
            if foretold is not None and nothing_grew(before, steps, events):
                limit = self.runtime.config.defer_limit
                found += _unstepped(judged(foretold, before, after, events, steps, limit))
            if self.operations % self._audit_every == 0:
                found += self._audited()
            found += _unstepped(self._compare(operation, answer, after))
            self._collect(found, before=before)
        except Crash as crash:
            self._meet(operation)
            self._collect(self._monitored())
            self._crashed(crash)

    def _perform(self, operation: Operation) -> _Answer | None:
        """The runtime's answer; None where it has no such feature."""
        try:
            return _Answer(_call(str(operation), perform, self.runtime, operation))
        except BadOperation as error:
            return _Answer(refusal=first_line(error))
        except NotExposed as error:
            self.not_exposed[f"{operation.op}: {first_line(error)}"] = None
            return None

    def _crashed(self, crash: Crash) -> None:
        self.is_alive = False
        self._collect([("B9", str(crash), "")])

    def _meet(self, operation: Operation) -> None:
        """Take note of the claim or request that an accepted operation brought."""
        fields = operation.fields
        introduce(self.monitor, operation)
        if operation.op == "declare":
            spec = claim_spec(fields, self._size)
            keys = content_ids(spec.tokens, self._size, spec.salt)
            name = f"{spec.claim_id}#{spec.generation}"
            self._wanted.pop(spec.claim_id, None)
            self._wanted[spec.claim_id] = Wanted(name, keys[spec.predicate.start :])
            self._left = {n: b for n, b in self._left.items() if _claim_id(n) != spec.claim_id}
        elif operation.op == "submit":
            request = RequestSpec(
                fields["request"],
                tokens_of(fields["content"], self._size),
                fields.get("max_new_tokens", 1),
                fields.get("admit_reuse", True),
                fields.get("salt", ""),
            )
            name, tokens = request.request_id, request.tokens
            keys = content_ids(tokens, self._size, request.salt)
            self._visitors[name] = (keys, len(tokens), request.admit_reuse)
            grown = tokens + (GENERATED_TOKEN,) * request.max_new_tokens
            self._contents[name] = content_ids(grown, self._size, request.salt)

    def _is_legal(self, operation: Operation, before: Observation) -> bool:
        """Whether a runtime in this state has to accept the operation, known from outside."""
        fields = operation.fields
        match operation.op:
            case "release" | "demote" | "renew":
                claim = before.claims.get(fields["claim"])
                return claim is not None and claim.phase in RESPONSIBLE
            case "abort":
                request = before.requests.get(fields["request"])
                return request is not None and request.state != "finished"
            case "submit":
                known = fields["request"] in before.requests
                return not known and bool(tokens_of(fields["content"], self._size))
            case "lose":
                tokens = tokens_of(fields["content"], self._size)
                return bool(fields["position"] < len(tokens) // self._size)
            case "declare":
                return self._may_declare(fields, before)
        return True

    def _may_declare(self, fields: Mapping[str, Any], before: Observation) -> bool:
        try:
            spec = claim_spec(fields, self._size)
        except BadOperation:
            return False
        if spec.predicate.positions.stop > len(spec.tokens) // self._size:
            return False
        last = before.claims.get(spec.claim_id)
        return last is None or (last.phase in TERMINAL and spec.generation > last.generation)

    # -- judging

    def _judge(
        self,
        operation: Operation,
        answer: _Answer,
        legal: bool,
        before: Observation,
        after: Observation,
        events: Sequence[Event],
        steps: Sequence[PoolStep],
    ) -> Iterator[Broken]:
        yield from self._whole(after)
        yield from self._registered(steps)
        if answer.refusal is not None:
            if legal:
                yield "B9", f"{operation} was turned down: {answer.refusal}"
            if after != before or events:
                yield "B9", f"{operation} was turned down, and changed the state"
            return
        if not legal:
            rule = {"declare": "L1", "renew": "L6"}.get(operation.op, "B9")
            yield rule, f"{operation} was accepted in a state that does not allow it"
        yield from observing.moves(operation, before, after)
        yield from observing.standing(after)
        if isinstance(answer.value, ClaimAnswer):
            yield from observing.answered(operation, answer.value)
        yield from self._time(operation, before, after)
        yield from self._shadow_agrees(after)
        yield from self._late_losses(events, steps, before, after)
        yield from self._content(operation, answer, before, after)
        yield from self._memory(after, steps)
        for event in events:
            self._note(event)

    def _whole(self, seen: Observation) -> Iterator[Broken]:
        """Protected, active and free blocks, each counted once, are no more than the pool (F1)."""
        pins = self.monitor.shadow.values[hard]
        pinned = {b for c, b in self.monitor.shadow.values[pool.covers] if (c,) in pins}
        used = pinned.union(*(view.blocks for view in seen.requests.values()))
        if len(used) + seen.free > seen.usable:
            yield (
                "F1",
                f"{len(used)} blocks are protected or active and {seen.free} free, "
                f"{seen.usable} are usable",
            )

    def _time(
        self, operation: Operation, before: Observation, after: Observation
    ) -> Iterator[Broken]:
        """Claims expire on time, neither earlier nor later (L6)."""
        fields = operation.fields
        if operation.op == "advance":
            self._now += fields["ticks"]
        elif operation.op == "renew":
            self._ends[fields["claim"]] = self._now + fields["duration"]
        elif operation.op == "declare":
            self._ends.pop(fields["claim"], None)
            if "duration" in fields:
                self._ends[fields["claim"]] = self._now + fields["duration"]
        for name, claim in after.claims.items():
            end = self._ends.get(name)
            due = end is not None and end <= self._now
            if claim.phase in RESPONSIBLE and due:
                yield "L6", f"claim {name} was to end at {end}, it is {self._now} now"
            was = before.claims.get(name)
            fresh = was is None or was.phase is not Phase.EXPIRED
            if claim.phase is Phase.EXPIRED and fresh and not due:
                yield "L6", f"claim {name} expired at {self._now}, before its end {end}"

    def _shadow_agrees(self, after: Observation) -> Iterator[Broken]:
        """What a runtime says of claims and requests is what its own steps made of them."""
        pins = self.monitor.shadow.values[hard]
        for name, claim in after.claims.items():
            told = phase_of(self.monitor, f"{name}#{claim.generation}")
            if told is not claim.phase:
                rule = "L1"
                if Phase.HARMED in (told, claim.phase):
                    silent = told is Phase.HARMED and claim.protection.value != "hard_protected"
                    rule = "P3" if silent else "L3"
                yield rule, f"claim {name} is {claim.phase}, its blocks make it {told}"
        for claim_name, block in self.monitor.shadow.values[pool.covers]:
            ended = phase_of(self.monitor, claim_name) not in RESPONSIBLE
            if ended and (claim_name,) in pins:
                yield "P2", f"claim {claim_name} has ended and still refers to block {block}"
        for name, block in self.monitor.shadow.values[pool.held]:
            request = after.requests.get(name)
            if request is not None and request.state == "finished":
                yield "B7", f"request {name} has ended, and block {block} did not come back"

    def _late_losses(
        self,
        events: Sequence[Event],
        steps: Sequence[PoolStep],
        before: Observation,
        after: Observation,
    ) -> Iterator[Broken]:
        """Content that an ended claim leaves behind and that is lost then is told, once (L4)."""
        told: list[tuple[str, int]] = []
        for event in events:
            claim, position = f"{event.claim_id}#{event.generation}", event.data.get("position", 0)
            if event.event == "resident_block_materialized":
                self._left.setdefault(claim, {})[position] = event.data["block_id"]
            elif event.event == "resident_block_lost" and event.claim_id is not None:
                was = before.claims.get(event.claim_id)
                if was is not None and was.phase in _RELEASED:
                    continue  # a claim that has ended is told of its losses by another event
                self._left.get(claim, {}).pop(position, None)
            elif event.event == "block_lost_after_release":
                told.append((claim, position))
        lost = {step.args["b"] for step in steps if step.action in ("evict", "lose")}
        due = []
        for claim_id, view in after.claims.items():
            if view.phase not in _RELEASED:
                continue
            claim = f"{claim_id}#{view.generation}"
            places = self._left.get(claim, {})
            due += [(claim, position) for position, block in places.items() if block in lost]
        for claim, position in sorted(set(due) - set(told)):
            yield "L4", f"claim {claim}, ended, lost position {position} and nothing was told"
        for claim, position in sorted(set(told) - set(due)):
            yield "L4", f"claim {claim} is told to have lost position {position}, it had not"
        if len(told) != len(set(told)):
            yield "L4", "a loss after the end of a claim was told twice"
        for claim, position in told:
            self._left.get(claim, {}).pop(position, None)

    def _content(
        self, operation: Operation, answer: _Answer, before: Observation, after: Observation
    ) -> Iterator[Broken]:
        """What may come and go in the cache (P4, B4, B10)."""
        new = after.resident.keys() - before.resident.keys()
        if new and operation.op == "step":
            yield from self._new_content(new, before)
        gone = before.resident.keys() - after.resident.keys()
        if operation.op == "lose":
            tokens = tokens_of(operation.fields["content"], self._size)
            keys = content_ids(tokens, self._size, operation.fields.get("salt", ""))
            key = keys[operation.fields["position"]]
            wanted = {key} & before.resident.keys()
            if new or gone != wanted or answer.value is not bool(wanted):
                yield "B3", f"{operation} answered {answer.value} and took {len(gone)} contents"
        if operation.op == "reset":
            idle = before.free == before.usable
            if answer.value is not idle:
                yield "B10", f"reset answered {answer.value} with {before.free} blocks free"
            if after.resident and answer.value:
                yield "B10", f"{len(after.resident)} contents can be found after a reset"
            if (gone or new) and not answer.value:
                yield "B10", f"a reset that failed dropped {len(gone)} contents"

    def _new_content(self, new: Iterable[str], before: Observation) -> Iterator[Broken]:
        """New content was computed by a request that runs and may leave it behind."""
        ours, others = set[str](), set[str]()
        for name, view in before.requests.items():
            if view.state != "finished" and name in self._contents:
                (ours if self._visitors[name][2] else others).update(self._contents[name])
        for key in sorted(set(new) - ours):
            if key in others:
                yield "P4", f"a no-admit request left content {key} behind"
            else:
                yield "B4", f"content {key} became visible, and no request computed it"

    def _registered(self, steps: Sequence[PoolStep]) -> Iterator[Broken]:
        """A block becomes visible under the content of its place in the request's table (B4)."""
        for step in steps:
            request = step.args.get("r", "")
            table = self._tables.setdefault(request, [])
            match step.action:
                case "take" | "draw" | "share":
                    table.append(step.args["b"])
                case "drop" | "give_back" if step.args["b"] in table:
                    table.remove(step.args["b"])
                case "retire":
                    table.clear()
                case "register" if step.args["b"] in table and request in self._contents:
                    position, key = table.index(step.args["b"]), step.args["k"]
                    if self._contents[request][position : position + 1] != (key,):
                        yield "B4", f"block {position} of request {request} is named {key}"

    def _memory(self, after: Observation, steps: Sequence[PoolStep]) -> Iterator[Broken]:
        """Resident KV stays as it was written: only a newly registered block may differ."""
        if not self._can_read_memory:
            return
        places = [(key, block) for key, block in after.resident.items()]
        blocks = tuple(block for _, block in places)
        digests = _call("fingerprint", self.runtime.fingerprint, blocks)
        fresh = {(s.args["k"], s.args["b"]) for s in steps if s.action == "register"}
        now = dict(zip(places, digests, strict=True))
        for place, digest in now.items():
            known = self._digests.get(place)
            if known not in (None, digest) and place not in fresh:
                key, block = place
                covers = self.monitor.shadow.index[pool.covers, 1].get(block)
                rule = "P1" if covers else "B4"
                yield rule, f"block {block} holds content {key} and was written over"
        self._digests = now

    def _reads_memory(self) -> bool:
        try:
            self.runtime.fingerprint(())
        except NotExposed as error:
            self.not_exposed[f"fingerprint: {first_line(error)}"] = None
            return False
        return True

    # -- the request at the door

    def _foretell(self, before: Observation) -> Foretold | None:
        """The first waiting request, judged; None where the order of waiting is not known."""
        waiting = [name for name, r in before.requests.items() if r.state == "waiting"]
        if not waiting or self._preempted.intersection(waiting):
            return None
        name = waiting[0]
        keys, tokens, admit_reuse = self._visitors[name]
        visitor = Visitor(name, keys, tokens, admit_reuse, self._deferrals.get(name, 0))
        wanted = []
        for claim_id, claim in self._wanted.items():
            footprint = before.claims[claim_id].footprint
            wanted.append(Wanted(claim.name, claim.keys[:footprint]))
        return foretell(visitor, self.monitor, before, wanted, self._size)

    def _note(self, event: Event) -> None:
        """Remember what events say of the order and the patience of waiting requests."""
        name = event.request_id or ""
        if event.event == "active_request_preempted":
            self._preempted.add(name)
        elif event.event == "active_request_deferred" and event.data["blocking_claim_ids"]:
            self._deferrals[name] = self._deferrals.get(name, 0) + 1

    # -- the oracle, the audits, the findings

    def _compare(
        self, operation: Operation, answer: _Answer, after: Observation
    ) -> Iterator[Broken]:
        if self.oracle is None:
            return
        theirs = _Answer()
        try:
            theirs.value = perform(self.oracle, operation)
        except BadOperation as error:
            theirs.refusal = first_line(error)
        if (answer.refusal is None) != (theirs.refusal is None):
            rule = observing.DIFFERENCES["turned down"]
            said = theirs.refusal or "accepted it"
            yield rule, f"{operation}: the reference says {said}, the engine {answer.refusal}"
        elif _plain(answer.value) != _plain(theirs.value):
            rule = observing.DIFFERENCES.get(operation.op, observing.DIFFERENCES["answer"])
            yield (
                rule,
                f"{operation}: the reference answers {_plain(theirs.value)}, "
                f"the engine {_plain(answer.value)}",
            )
        yield from observing.differences(after, self.oracle.observe())

    def _monitored(self) -> list[Told]:
        """Tell the monitor what was heard; its new violations."""
        known = len(self.monitor.violations)
        heard = list(self._heard)
        self._heard.clear()
        for step in heard:
            self.monitor(step)
        return [(v.rule, v.message, v.step) for v in self.monitor.violations[known:]]

    def _audited(self) -> list[Told]:
        known = len(self.monitor.violations)
        self.monitor.audit(_call("snapshot", self.runtime.snapshot))
        return [(v.rule, v.message, v.step) for v in self.monitor.violations[known:]]

    def _collect(
        self,
        found: Sequence[Told],
        operation: int | None = None,
        before: Observation | None = None,
    ) -> None:
        if not found:
            return
        number = self.operations if operation is None else operation
        changed = observing.changed_fields(before, self._seen) if before else ({}, {})
        for rule, message, step in found:
            self.findings.append(Finding(rule, message, number, step, *changed))

    def _fold(self, events: Sequence[Event]) -> None:
        """Read the trace back and judge it (T1 to T3 and what events can decide)."""
        try:
            (run,) = read_runs([event.to_json() for event in events])
        except (TraceError, ValueError) as error:
            self._collect([("T3", f"the trace is rejected: {first_line(error)}", "")])
            return
        fold = Fold(run)
        for found in fold.violations:
            seq = found.seq or 0
            number = next((n for n, told in enumerate(self._told) if seq < told), None)
            self._collect([(found.rule, found.message, "")], number)
        self._collect(_unstepped(self._folded_otherwise(fold)))

    def _folded_otherwise(self, fold: Fold) -> Iterator[Broken]:
        """Folding the trace yields the runtime's state and every outcome (T2)."""
        for name, view in self._seen.claims.items():
            life = fold.claims.get(name)
            if life is None or (life.phase, life.generation) != (view.phase, view.generation):
                yield "T2", f"claim {name} is {view.phase}, the trace: {life and life.phase}"
        for name, seen in self._seen.requests.items():
            request = fold.requests.get(name)
            if request is None or request.state != seen.state:
                yield (
                    "T2",
                    f"request {name} is {seen.state}, the trace: {request and request.state}",
                )
            elif seen.state == "finished" and (
                (seen.outcome, seen.shortfall, seen.blocking_claims)
                != (request.outcome, request.shortfall, request.blocking_claims)
            ):
                yield "T2", f"request {name} ended {seen.outcome}, the trace: {request.outcome}"


def _unstepped(found: Iterable[Broken]) -> list[Told]:
    return [(rule, message, "") for rule, message in found]


def _call(doing: str, function: Callable[..., Any], *args: Any) -> Any:
    """Ask the runtime; whatever else than an answer or an agreed error comes is a `Crash`."""
    try:
        return function(*args)
    except (BadOperation, NotExposed, EngineMissing):
        raise
    except Exception as error:
        raise Crash(f"{doing} raised {type(error).__name__}: {first_line(error)}") from error


def _plain(answer: Any) -> Any:
    """An answer without the wording of its reason."""
    if isinstance(answer, ClaimAnswer):
        granted = answer.granted.n if answer.granted else None
        return (answer.decision.value, answer.cost, answer.headroom, granted)
    return answer


def _claim_id(name: str) -> str:
    return name.rpartition("#")[0]


# --- whole runs --------------------------------------------------------------------------


@dataclass(frozen=True)
class Program:
    """A pool and what is done to it."""

    config: PoolConfig
    operations: tuple[Operation, ...]


def oracle_for(engine: Engine) -> Engine | None:
    """The reference, unless it is what is under test."""
    return None if engine.name == REFERENCE else find(REFERENCE)


def warm_up(engine: Engine, block_size: int) -> None:
    """Open and close a pool once, so that what an engine imports and boots is not timed."""
    engine.open(PoolConfig(4, block_size), "warm-up").close()


def open_supervised(
    engine: Engine, oracle: Engine | None, config: PoolConfig, *, audit_every: int = 1
) -> Supervisor:
    """A fresh runtime under supervision.  `Crash` if it cannot even be opened."""
    try:
        runtime = engine.open(config, "supervised")
        beside = oracle.open(config, "oracle") if oracle else None
        return Supervisor(runtime, beside, audit_every=audit_every)
    except (EngineMissing, BadOperation, NotExposed):
        raise
    except Exception as error:
        raise Crash(f"opening the pool raised {type(error).__name__}: {error}") from error


def supervise(engine: Engine, oracle: Engine | None, program: Program) -> tuple[Finding, ...]:
    """Run a program until the first operation that breaks a rule; what it broke."""
    try:
        supervisor = open_supervised(engine, oracle, program.config)
    except Crash as crash:
        return (Finding("B9", str(crash), 0),)
    for operation in program.operations:
        if supervisor.findings:
            break
        supervisor.do(operation)
    if not supervisor.findings:
        supervisor.close()
    return tuple(supervisor.findings)
