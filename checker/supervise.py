"""Drives a runtime operation by operation and judges each one by everything there is to judge by.

The monitor hears every allocator step; observations are checked by themselves and against the
one before; the request at the door is foretold; what requests are served is read from memory;
every event is compared with the steps; the pool is audited; the trace is folded at the end.
Where the engine under test is not the reference, the reference does the same operations beside
it and must show the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from kvclaims.checker import observing, windowed
from kvclaims.checker.audit import Fold, check_runs
from kvclaims.checker.baseline import Allowed, allowing
from kvclaims.checker.behaviour import Behaviour
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
from kvclaims.checker.knowledge import DISPATCHING, Knowledge, KnownRequest, is_over
from kvclaims.checker.lending import LendingMonitor
from kvclaims.checker.observing import Broken
from kvclaims.checker.serving import Serving
from kvclaims.checker.stranded import stranded
from kvclaims.checker.telling import Told, decided, judged_events, survival
from kvclaims.checker.verdicts import Violation
from kvclaims.checker.watching import Heard, introduce
from kvclaims.checker.watching import judged as judge_step
from kvclaims.spec import pool
from kvclaims.spec.claims import hard
from kvclaims.spec.interface import (
    BadOperation,
    ClaimAnswer,
    Engine,
    EngineMissing,
    Feature,
    MemoryStep,
    NotExposed,
    Observation,
    PoolConfig,
    PoolStep,
    Runtime,
)
from kvclaims.spec.operations import Operation, perform
from kvclaims.spec.telemetry import Event, TraceError
from kvclaims.spec.vocabulary import RESPONSIBLE, Outcome, Phase

DRAIN_STEPS: Final = 500
"""Steps after which a drain has made no progress (B11): far more than any pool here takes."""

STALLED: Final = 4
"""Steps that change nothing after which a drain waits for the world outside (a transfer)."""

PLAIN: Final[frozenset[Feature]] = frozenset()


class Crash(Exception):
    """The runtime raised what no runtime may raise; the message says what."""


Shown = tuple[str, str, str]
"""A rule, what was seen, and the allocator step (empty where it was no single step)."""


@dataclass
class _Answer:
    """What a runtime answered: a value, or the words with which it turned the operation down."""

    value: Any = None
    refusal: str | None = None


class Supervisor:
    """One run of one runtime.  `findings` holds what was found, in order of discovery.

    `audit_every`: how often, in operations, the whole pool is compared with the shadow.
    `features`: what the engine says it has.  `allowed`: what it is known to break; that is counted
    in `known_findings`, and the run goes on, or ends where its state is not sound any more.
    """

    def __init__(
        self,
        runtime: Runtime,
        oracle: Runtime | None = None,
        *,
        audit_every: int = 1,
        features: frozenset[Feature] = PLAIN,
        allowed: Allowed | None = None,
    ) -> None:
        self.runtime = runtime
        self.oracle = oracle
        self.findings: list[Violation] = []
        self.not_exposed: dict[str, None] = {}
        self.operations = 0
        self.steps = 0
        """Scheduling steps done."""
        self.is_alive = True
        self.edges: Counter[tuple[str, str]] = Counter()
        """Allocator step × the situation in which the operation found the pool."""
        self.event_kinds: Counter[str] = Counter()
        self.known_findings: Counter[str] = Counter()
        self._allowed = allowed
        self._audit_every = audit_every
        self._features = features
        self._heard = Heard()
        self._told: list[int] = []
        """Number of events in the trace after each operation."""
        self._doing = "open"
        self._settled = True
        """No step was under way when the last operation began."""
        self._on_loan = self._to_lend = 0
        """Lent blocks that requests held when it began, and that they might still take."""
        self._left: dict[str, dict[int, int]] = {}
        """Claim in the machine → position → the block that stands for it, also once it ended."""
        self.monitor = self._heard.monitor_of(runtime)
        self.lending = self.monitor if isinstance(self.monitor, LendingMonitor) else None
        longest = None if self.lending is None else self.lending.longest
        self.known = Knowledge(runtime.config, longest)
        self.behaviour = Behaviour(self.monitor)
        exact = Feature.FINGERPRINTS in features
        self.serving = Serving(self.known, self.monitor.shadow, exact=exact)
        self._seen = runtime.observe()
        if Feature.KV_EVENTS in features:
            runtime.kv_events()  # some engines tell none before they were asked
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

    def do(self, operation: Operation) -> Sequence[Violation]:
        """Do one operation and judge it; what was found in it."""
        known = len(self.findings)
        self.operations += 1
        match operation.op:
            case "step":
                self._complete()
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

    def close(self) -> Sequence[Violation]:
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

    def _complete(self) -> None:
        """What is under way ends on its own, so that each of the two can be judged."""
        while self.known.under_way and self.is_alive:
            self._one(Operation("complete", {}))

    def _drain(self) -> None:
        self._complete()
        stalled = 0
        for _ in range(DRAIN_STEPS):
            states = {r.state for r in self._seen.requests.values()}
            outside = bool(states & {"loading", "ending"}) or self.known.is_asleep
            if not self.is_alive or states <= {"finished", "loading", "ending"}:
                return
            if outside and stalled >= STALLED:
                return
            before = self._seen
            self._one(Operation("step", {}))
            stalled = stalled + 1 if self._seen == before else 0
        message = f"requests still wait or run after {DRAIN_STEPS} steps"
        held = stranded(self.known, self._seen) if stalled else None
        self._collect([("B11", f"{message}; {held}" if held else message, "")])

    def _one(self, operation: Operation) -> None:
        """Do an operation of one call, on the runtime and beside it on the oracle."""
        if not self.is_alive:
            return
        self._doing = operation.op
        before, told = self._seen, len(self.runtime.events())
        legal = self.known.is_legal(operation, before)
        foretold = self._foretell(operation, before) if legal else None
        head = self._head_of_windows(operation, before) if legal else None
        self._settled = not self.known.under_way
        if self.lending is not None:
            self._on_loan, self._to_lend = self.lending.lent_held, self.lending.lent_free
        situation, found = self._situation(before), list[Shown]()
        refs = self._references() if operation.op == "declare" else {}
        lasting = self._lasting(before) if operation.op == "declare" else {}
        try:
            answer = self._perform(operation)
            if answer is None:
                return
            self._seen = after = _call("observe", self.runtime.observe)
            self.steps += operation.op in DISPATCHING
            if answer.refusal is None:
                self._meet(operation, answer.value)
            events, heard = self.runtime.events()[told:], tuple(self._heard.steps)
            steps = tuple(step for step in heard if isinstance(step, PoolStep))
            self._notice_lending(heard)
            self.event_kinds.update(event.event for event in events)
            self.edges.update((step.action, situation) for step in steps)
            found += self._monitored(operation, events)
            returned = _returned(heard)
            one = Told(operation, before, after, events, steps, answer.value, lasting, returned)
            found += _unstepped(self._judge(one, answer, legal, refs))
            if foretold is not None and nothing_grew(before, steps, events):
                config = self.runtime.config
                given_up = self._given_up(heard)
                door = judged(foretold, before, after, events, steps, config, given_up)
                found += _unstepped(door)
            if head is not None and nothing_grew(before, steps, events):
                alone = operation.op == "dispatch"
                windows = windowed.judged(
                    self.known, head, before, after, steps, events, dispatched=alone
                )
                found += _unstepped(windows)
            if self.operations % self._audit_every == 0:
                found += self._audited()
            found += _unstepped(self._compare(operation, answer, after))
            found += self._strange()
            found += _unstepped(self._routed(one))  # after what its events are wrong because of
            self._collect(found, before=before)
        except Crash as crash:
            self._meet(operation, None)
            self._collect([*found, *self._monitored()])
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

    def _meet(self, operation: Operation, answer: Any) -> None:
        """Take note of what an accepted operation brought."""
        introduce(self.monitor, operation)
        self.known.meet(operation, answer)
        if operation.op == "declare":
            claim = operation.fields["claim"]
            self._left = {n: b for n, b in self._left.items() if _claim_id(n) != claim}
        elif operation.op == "submit" and operation.fields.get("external"):
            self._part_from_oracle("how a transfer holds its blocks is each engine's own")
        elif operation.op == "submit" and self.known.is_cut(operation.fields["request"]):
            self._part_from_oracle("a request that outgrows the base ends there, on this engine")

    def _part_from_oracle(self, why: str) -> None:
        """From here on the reference and the engine may differ and both be right."""
        if self.oracle is not None:
            self.not_exposed[f"comparison with the reference: {why}"] = None
            self.oracle = None

    def _notice_lending(self, heard: Sequence[PoolStep | MemoryStep]) -> None:
        if any(isinstance(step, MemoryStep) and step.action == "arrive_lent" for step in heard):
            self._part_from_oracle("what is lent, and when, is each engine's own")

    def _given_up(self, heard: Sequence[PoolStep | MemoryStep]) -> frozenset[str]:
        """Content of lent blocks that was dropped because they were taken back (E4)."""
        if self.lending is None or not _returned(heard):
            return frozenset()
        return frozenset(
            step.args["k"]
            for step in heard
            if step.action == "evict" and step.args["b"] in self.lending.reserve
        )

    def _lasting(self, seen: Observation) -> Mapping[str, int]:
        """What a hard claim can find: content in blocks that are always there (E3)."""
        return seen.resident if self.lending is None else self.lending.in_base()

    def _situation(self, seen: Observation) -> str:
        """The state in few words, for the coverage of machine edges."""
        waiting = any(r.state == "waiting" for r in seen.requests.values())
        words = (
            "full" if seen.free == 0 else "tight" if seen.headroom <= 1 else "roomy",
            "promised" if seen.free > seen.headroom else "",
            "waiting" if waiting else "",
            "under way" if self.known.under_way else "",
        )
        return " ".join(filter(None, words))

    def _references(self) -> dict[int, int]:
        return {place[0]: n for place, n in self.monitor.shadow.values[pool.ref].items()}

    # -- judging

    def _judge(
        self, one: Told, answer: _Answer, legal: bool, refs: dict[int, int]
    ) -> Iterator[Broken]:
        operation, before, after = one.operation, one.before, one.after
        yield from self._whole(after)
        yield from self.serving.registered(one.steps)
        if answer.refusal is not None:
            if legal:
                yield "B9", f"{operation} was turned down: {answer.refusal}"
            if after != before or one.events:
                yield "B9", f"{operation} was turned down, and changed the state"
            return
        if not legal:
            rule = {"declare": "L1", "renew": "L6"}.get(operation.op, "B9")
            yield rule, f"{operation} was accepted in a state that does not allow it"
            return
        unwritten = self.serving.unwritten()
        self.serving.under_way(operation, one.steps)
        yield from observing.moves(operation, before, after)
        yield from observing.standing(after)
        yield from self._capacity(after)
        if isinstance(answer.value, ClaimAnswer):
            yield from observing.answered(operation, answer.value, self.runtime.config)
            yield from decided(one, self.known, refs, unwritten)
        yield from self._time(before, after)
        yield from self._shadow_agrees(after)
        yield from self._late_losses(one)
        yield from self._content(one)
        yield from self._forced(one)
        yield from observing.let_go(operation, before, after, under_way=bool(self.known.under_way))
        yield from self._came_back(one)
        yield from self._given_up_on(one)
        exact = not self.known.config.drafts  # else the last may not be left
        if self.known.has_windows and exact:
            yield from windowed.left_behind(self.known, before, after, one.events, one.steps)
        yield from judged_events(one, self.known)
        yield from survival(after, self.known, self.serving.unwritten(), self._lasting(after))
        self.known.note(one.events)
        self.known.measure(after)

    def _content(self, one: Told) -> Iterator[Broken]:
        """What may come and go in the cache, and what its blocks hold (P4, B4, B5, B10)."""
        if one.operation.op in observing.STEPPING:
            yield from self.serving.new_content(one.before, one.after)
        yield from self.serving.coming_and_going(one.operation, one.answer, one.before, one.after)
        told = (e.request_id for e in one.events if e.event == "active_request_preempted")
        self.serving.left_out(frozenset(filter(None, told)), one.steps)
        if self._can_read_memory:
            read = lambda blocks: _call("fingerprint", self.runtime.fingerprint, blocks)  # noqa: E731
            yield from self.serving.memory(one.after, read)

    def _routed(self, one: Told) -> Iterator[Broken]:
        """What the engine's own KV events add up to (B8)."""
        if Feature.KV_EVENTS in self._features:
            told = _call("kv_events", self.runtime.kv_events)
            yield from self.serving.routed(told, one.steps, one.after)

    def _forced(self, one: Told) -> Iterator[Broken]:
        """A request gives way only if what runs does not fit (F3)."""
        told = (e.request_id for e in one.events if e.event == "active_request_preempted")
        preempted = [r for r in told if r and not self.known.requests[r].failed]
        if not preempted or not self._settled or self.runtime.config.windows != (0,):
            return
        views = one.before.requests.values()
        if any(view.computed is None for view in views):
            return
        _, blocks = self.known.growth(one.before)
        room = one.before.headroom
        if one.returned:
            blocks += self._on_loan  # which had to find room in the base
        else:
            room += self._to_lend
        if blocks <= room:
            yield (
                "F3",
                f"request {preempted[0]} was preempted with room for {room} blocks, and all that "
                f"runs together wants {blocks}",
            )

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

    def _capacity(self, after: Observation) -> Iterator[Broken]:
        """What is said to be lent is, and headroom counts the base alone (E2, E3)."""
        if self.lending is None:
            return
        lent = len(self.lending.reserve) if self.lending.is_lent else 0
        if len(after.lent) != lent or after.usable != self.runtime.config.usable + lent:
            yield (
                "E2",
                f"{len(after.lent)} of {after.usable} blocks are said to be lent, not {lent}",
            )
        if after.headroom != self.lending.headroom:
            yield (
                "E3",
                f"headroom is said to be {after.headroom}, the base has {self.lending.headroom}",
            )

    def _time(self, before: Observation, after: Observation) -> Iterator[Broken]:
        """Claims expire on time, neither earlier nor later (L6)."""
        now = self.known.now
        for name, claim in after.claims.items():
            due, end = self.known.is_due(name), self.known.ends.get(name)
            if claim.phase in RESPONSIBLE and due:
                yield "L6", f"claim {name} was to end at {end}, it is {now} now"
            was = before.claims.get(name)
            fresh = was is None or was.phase is not Phase.EXPIRED
            if claim.phase is Phase.EXPIRED and fresh and not due:
                yield "L6", f"claim {name} expired at {now}, before its end {end}"

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

    def _given_up_on(self, one: Told) -> Iterator[Broken]:
        """No request ends as aborted that nobody aborted, and of which nothing failed to load."""
        for name, now in one.after.requests.items():
            if now.outcome is not Outcome.ABORTED or name in self.known.aborted:
                continue
            if name in self.known.requests and not self.known.requests[name].failed:
                yield "F4", f"request {name} ended as aborted, and nobody had aborted it"

    def _came_back(self, one: Told) -> Iterator[Broken]:
        """A request that is over gives its blocks back when the steps that were in flight have
        ended, or with the step after it where they are sent; a load ends when it ends (B7)."""
        if one.operation.op not in ("step", "complete") or self.known.under_way:
            return
        for name, was in one.before.requests.items():
            late = one.after.requests[name].state == "ending"
            late = late and (was.state == "ending" or self.known.config.connector < 2)
            if late and name in self.known.requests and not self.known.requests[name].loads:
                yield "B7", f"request {name} is over, and its blocks do not come back"

    def _late_losses(self, one: Told) -> Iterator[Broken]:
        """Content that an ended claim leaves behind and that is lost then is told, once (L4)."""
        told: list[tuple[str, int]] = []
        for event in one.events:
            claim, position = f"{event.claim_id}#{event.generation}", event.data.get("position", 0)
            if event.event == "resident_block_materialized":
                self._left.setdefault(claim, {})[position] = event.data["block_id"]
            elif event.event == "resident_block_lost" and event.claim_id is not None:
                was = one.before.claims.get(event.claim_id)
                if was is not None and is_over(was.phase):
                    continue  # a claim that has ended is told of its losses by another event
                self._left.get(claim, {}).pop(position, None)
            elif event.event == "block_lost_after_release":
                told.append((claim, position))
        lost = {step.args["b"] for step in one.steps if step.action in ("evict", "lose")}
        due = []
        for claim_id, view in one.after.claims.items():
            if not is_over(view.phase):
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

    def _reads_memory(self) -> bool:
        try:
            self.runtime.fingerprint(())
        except NotExposed as error:
            self.not_exposed[f"fingerprint: {first_line(error)}"] = None
            return False
        return True

    # -- the request at the door

    def _head_of_windows(self, operation: Operation, before: Observation) -> KnownRequest | None:
        """The first waiting request of a pool with windows; None where what it meets is not known
        before the step."""
        known = self.known
        if operation.op not in DISPATCHING or not known.has_windows:
            return None
        if known.under_way and (operation.op == "step" or known.config.token_budget):
            return None
        if any(view.state == "ending" for view in before.requests.values()):
            return None
        tokens, _ = known.growth(before)
        if known.config.token_budget and tokens >= known.config.token_budget:
            return None
        head = known.head(before)
        return replace(head) if head is not None and head.is_measured else None  # as it is now

    def _foretell(self, operation: Operation, before: Observation) -> Foretold | None:
        """The first waiting request, judged; None where it is not known what it will meet."""
        config, known = self.runtime.config, self.known
        if operation.op not in DISPATCHING or known.has_windows:
            return None
        if known.under_way and (operation.op == "step" or config.token_budget):
            return None  # what is under way ends first, or has its part in the budget
        request = known.head(before)
        if request is None or request.loads or not request.is_measured:
            return None
        if request.spec.external and (known.under_way or request.spec.external > 0):
            return None
        if any(r.state in ("loading", "ending") for r in before.requests.values()):
            return None
        transfers = (n for n, r in known.requests.items() if r.spec.external)
        if any(before.requests[name].state in ("running", "waiting") for name in transfers):
            return None  # loaded, or put aside, it may come before all others
        tokens, _ = known.growth(before)
        if config.token_budget and tokens >= config.token_budget:
            return None
        keys = request.keys[: request.length // config.block_size]
        visitor = Visitor(
            request.name, keys, request.length, request.spec.admit_reuse, request.deferrals
        )
        on_loan = self.serving.on_loan()
        wanted = []
        for name, claim in known.claims.items():
            owed = known.wanted(name, before.claims[name].footprint).values()
            lent = on_loan.get(claim.name, ())
            wanted.append(Wanted(claim.name, tuple(key for key in owed if key not in lent)))
        lasting = self._lasting(before)
        if any(key in before.resident and key not in lasting for key in keys):
            return None  # what a return leaves of it is the engine's own choice
        base = replace(before, usable=config.usable, resident=lasting)
        return foretell(visitor, self.monitor, base, wanted, config.block_size)

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
        except NotExposed as error:
            self._part_from_oracle(first_line(error))
            return
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

    def _monitored(
        self, operation: Operation | None = None, events: Sequence[Event] = ()
    ) -> list[Shown]:
        """Tell the monitor what was heard; its new violations.  Of an operation that crashed only
        the steps are judged, not whether they are moves of the whole."""
        known = len(self.monitor.violations)
        heard = list(self._heard.steps)
        self._heard.steps.clear()
        if operation is not None:
            self.behaviour.begin(operation.fields.get("ticks", 0), events)
        for step in heard:
            if operation is not None and isinstance(step, PoolStep):
                self.behaviour(step)
            judge_step(self.monitor, step)
        if operation is not None:
            self.behaviour.end()
        return [(v.rule, v.message, v.step) for v in self.monitor.violations[known:]]

    def _strange(self) -> list[Shown]:
        """What in the operation was no move of the composed machine."""
        strange = self.behaviour.violations
        found = [(v.rule, v.message, v.step) for v in strange]
        strange.clear()
        return found

    def _audited(self) -> list[Shown]:
        known = len(self.monitor.violations)
        self.monitor.audit(_call("snapshot", self.runtime.snapshot))
        return [(v.rule, v.message, v.step) for v in self.monitor.violations[known:]]

    def _collect(
        self,
        found: Sequence[Shown],
        operation: int | None = None,
        before: Observation | None = None,
    ) -> None:
        if not found:
            return
        number = self.operations if operation is None else operation
        changed = observing.changed_fields(before, self._seen) if before else ({}, {})
        for rule, message, step in found:
            known = self._allowed and self._allowed(rule, f"{self._doing}: {message}")
            if known:
                self.known_findings[known.name] += 1
                if not known.goes_on:
                    self.is_alive = False  # what comes of it is no news either
                    return
                continue
            self.findings.append(Violation(rule, message, step, *changed, operation=number))

    def _fold(self, events: Sequence[Event]) -> None:
        """Read the trace back and judge it (T1 to T3 and what events can decide)."""
        try:
            (run,) = check_runs(events)
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
            # Whose blocks are in flight when it is over is so in the trace when they are back.
            told = ("loading", "running") if seen.state == "ending" else (seen.state,)
            if request is None or request.state not in told:
                yield (
                    "T2",
                    f"request {name} is {seen.state}, the trace: {request and request.state}",
                )
            elif seen.state == "finished" and (
                (seen.outcome, seen.shortfall, seen.blocking_claims)
                != (request.outcome, request.shortfall, request.blocking_claims)
            ):
                yield "T2", f"request {name} ended {seen.outcome}, the trace: {request.outcome}"


def _returned(heard: Iterable[PoolStep | MemoryStep]) -> bool:
    """Whether lent memory was taken back in between."""
    return any(isinstance(step, MemoryStep) and step.action == "give_back" for step in heard)


def _unstepped(found: Iterable[Broken]) -> list[Shown]:
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


def features_of(engine: Engine) -> frozenset[Feature]:
    """What an engine says it has beyond the plain pool; an older adapter says nothing."""
    return frozenset(getattr(engine, "features", PLAIN))


def comparable(config: PoolConfig, engine: Engine | None = None) -> bool:
    """Whether the reference, asked the same, has to show the same: with one full-attention group,
    without asynchronous steps, whose order of work is each engine's own, and where nothing is sent
    when a request ends.  An engine may say that it gives drafts room in a way of its own."""
    if config.drafts and not getattr(engine, "drafts_like_reference", True):
        return False
    return config.windows == (0,) and config.in_flight == 1 and config.connector < 2


def oracle_for(engine: Engine) -> Engine | None:
    """The reference, unless it is what is under test, or the engine says that it evicts and makes
    visible in an order of its own (`follows_reference` is False)."""
    alike = getattr(engine, "follows_reference", True)
    return find(REFERENCE) if alike and engine.name != REFERENCE else None


def warm_up(engine: Engine, block_size: int) -> None:
    """Open and close a pool once, so that what an engine imports and boots is not timed."""
    engine.open(PoolConfig(4, block_size), "warm-up").close()


def open_supervised(
    engine: Engine,
    oracle: Engine | None,
    config: PoolConfig,
    *,
    audit_every: int = 1,
    allowed: Allowed | None = None,
) -> Supervisor:
    """A fresh runtime under supervision.  `Crash` if it cannot even be opened.

    What the engine's own file says is known of it is allowed, unless `allowed` says otherwise.
    """
    allowed = allowed or allowing(engine)
    try:
        runtime = engine.open(config, "supervised")
        alike = comparable(config, engine)
        beside = oracle.open(config, "oracle") if oracle and alike else None
        features = features_of(engine)
        return Supervisor(
            runtime, beside, audit_every=audit_every, features=features, allowed=allowed
        )
    except (EngineMissing, BadOperation, NotExposed):
        raise
    except Exception as error:
        raise Crash(f"opening the pool raised {type(error).__name__}: {error}") from error


def supervise(
    engine: Engine, oracle: Engine | None, program: Program, allowed: Allowed | None = None
) -> tuple[Violation, ...]:
    """Run a program until the first operation that breaks a rule; what it broke (`allowed` as in
    `open_supervised`)."""
    try:
        supervisor = open_supervised(engine, oracle, program.config, allowed=allowed)
    except Crash as crash:
        return (Violation("B9", str(crash), operation=0),)
    for operation in program.operations:
        if supervisor.findings:
            break
        supervisor.do(operation)
    if not supervisor.findings:
        supervisor.close()
    return tuple(supervisor.findings)
