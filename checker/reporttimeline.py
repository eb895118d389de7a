"""A run's trace as a timeline of its pool: what every step did to blocks, claims and requests.

Events are folded by `kvclaims.checker.audit.Fold`; here only the differences that each event makes
are written down, so that a page can show any of 100,000 steps.  Events that tell one thing
together (sixty blocks covered one after the other) are one step.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from kvclaims.checker.audit import ClaimLife, Fold
from kvclaims.checker.reportwords import FOLLOWS, REPEATS, TEMPLATES, arguments, one_block
from kvclaims.checker.verdicts import Violation
from kvclaims.spec.telemetry import Event
from kvclaims.spec.vocabulary import TERMINAL


class Use(IntEnum):
    """What a block is used for; the numbers are those of the page's data."""

    FREE = 0
    CACHED = 1
    """Content for reuse that nobody is promised: it may be evicted."""
    ACTIVE = 2
    PROTECTED = 3
    BOTH = 4
    """Protected and held by an active request: it counts once (F1)."""


@dataclass(frozen=True)
class Counts:
    """The pool after a step, in blocks; the first five add up to `usable` while F2 holds."""

    active: int
    protected: int
    reserved: int
    cached: int
    free: int
    usable: int

    @property
    def headroom(self) -> int:
        """Free unprotected blocks less what claims were promised (F2)."""
        return self.usable - self.active - self.protected - self.reserved


@dataclass(frozen=True)
class Operation:
    """What was done to the runtime: in words, and the number of events told by its end."""

    text: str
    events: int
    resident: frozenset[int] | None = None
    """Blocks that hold reusable content afterwards; None where nobody looked."""


@dataclass
class Step:
    """One step: its template and arguments, the first event it stands for, and what changed.

    `blocks` are stretches of blocks with their new use; `reserved` is what is promised after it.
    """

    kind: str
    subject: str
    words: list[Any]
    seq: int
    operation: int
    blocks: list[tuple[int, int, int]] = field(default_factory=list)
    reserved: int = 0


@dataclass
class Bar:
    """A claim's or a request's life: from each step on it is in this phase or state."""

    name: str
    told: dict[str, Any]
    spans: list[tuple[int, str]] = field(default_factory=list)

    def goes(self, step: int, to: str) -> None:
        if self.spans and self.spans[-1][0] == step:
            self.spans.pop()
        if not self.spans or self.spans[-1][1] != to:
            self.spans.append((step, to))


@dataclass(frozen=True)
class Door:
    """A request that was deferred or refused, with the numbers of the answer (F4)."""

    step: int
    request: str
    outcome: str
    wants: int
    need: int
    drawn: int
    """Of the need: what it would compute for claims, on their reserves."""
    protected: int
    active: int
    headroom: int
    missing: int
    shortfall: int
    blockers: tuple[str, ...]
    waits_on: tuple[str, ...]
    usable: int

    @property
    def sums(self) -> list[str]:
        """The arithmetic of the answer, a line for each number."""
        whole = f"{self.request} wants {self.wants} blocks"
        if self.need != self.wants:
            whole += f", {self.wants - self.need} of them are there: {self.need} to find"
        lines = [whole]
        if self.outcome == "capacity_required":
            lines.append(
                f"{self.wants} wanted > {self.usable} usable: {self.shortfall} short, "
                "whatever else ends"
            )
            return lines
        drawn = f"{self.drawn} on the reserve of claims − " if self.drawn else ""
        lines.append(
            f"{self.need} wanted − {drawn}{self.headroom} headroom = {self.missing} missing at "
            "this moment"
        )
        if self.shortfall and self.protected + self.need == self.usable + self.shortfall:
            lines.append(
                f"{self.protected} protected + {self.need} wanted = {self.protected + self.need} > "
                f"{self.usable} usable: {self.shortfall} short, even once others have finished"
            )
        elif self.shortfall:
            together = self.usable + self.shortfall
            lines.append(
                f"{together} with all promises kept − {self.usable} usable = {self.shortfall} "
                "short, even once other requests have finished"
            )
        return lines


@dataclass(frozen=True)
class Timeline:
    """A run, step by step."""

    run_id: str
    engine: str
    usable: int
    block_size: int
    first_block: int
    rows: int
    """Blocks that were named, or are known to be there: ids from `first_block` on."""
    steps: tuple[Step, ...]
    claims: tuple[Bar, ...]
    requests: tuple[Bar, ...]
    doors: tuple[Door, ...]
    operations: tuple[str, ...]
    events: int
    broken: tuple[tuple[int, Violation], ...]
    """Step and what was broken in it."""

    def counts(self) -> Iterator[Counts]:
        """The pool after each step."""
        uses = [0] * self.rows
        tally: Counter[int] = Counter({int(Use.FREE): self.rows})
        for step in self.steps:
            for first, last, use in step.blocks:
                for block in range(first - self.first_block, last - self.first_block + 1):
                    tally[uses[block]] -= 1
                    tally[use] += 1
                    uses[block] = use
            yield _counts(tally, step.reserved, self.usable)

    def step_of(self, seq: int) -> int:
        """The step that an event is told in."""
        return max(0, bisect_right([step.seq for step in self.steps], seq) - 1)

    def text(self, step: int) -> str:
        kind, *words = self.steps[step].words
        return one_block(TEMPLATES[kind].text.format(*words))

    def data(self) -> str:
        """Everything a page needs, as JSON that may stand in one."""
        kinds = {kind: i for i, kind in enumerate(dict.fromkeys(s.words[0] for s in self.steps))}
        whole = {
            "run": self.run_id,
            "engine": self.engine,
            "usable": self.usable,
            "first": self.first_block,
            "rows": self.rows,
            "events": self.events,
            "kinds": [[TEMPLATES[kind].text, list(TEMPLATES[kind].rules)] for kind in kinds],
            "words": [[kinds[s.words[0]], *s.words[1:]] for s in self.steps],
            "seqs": [s.seq for s in self.steps],
            "blocks": [[n for stretch in s.blocks for n in stretch] for s in self.steps],
            "reserved": [s.reserved for s in self.steps],
            "at": [s.operation for s in self.steps] if self.operations else [],
            "operations": self.operations,
            "claims": [[bar.name, bar.told, bar.spans] for bar in self.claims],
            "requests": [[bar.name, bar.told, bar.spans] for bar in self.requests],
            "doors": [{**vars(door), "sums": door.sums} for door in self.doors],
            "broken": [[step, v.rule, v.message] for step, v in self.broken],
        }
        return embedded(whole)


def embedded(whole: object) -> str:
    """JSON that may stand inside a page's script element."""
    text = json.dumps(whole, separators=(",", ":"), ensure_ascii=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _counts(tally: Mapping[int, int], reserved: int, usable: int) -> Counts:
    """Promises are kept out of blank blocks first, then out of cached ones."""
    blank = tally.get(Use.FREE, 0)
    from_blank = min(reserved, blank)
    from_cached = min(reserved - from_blank, tally.get(Use.CACHED, 0))
    return Counts(
        active=tally.get(Use.ACTIVE, 0) + tally.get(Use.BOTH, 0),
        protected=tally.get(Use.PROTECTED, 0),
        reserved=reserved,
        cached=tally.get(Use.CACHED, 0) - from_cached,
        free=blank - from_blank,
        usable=usable,
    )


def timeline(
    events: Sequence[Event],
    operations: Sequence[Operation] = (),
    found: Iterable[Violation] = (),
) -> Timeline:
    """The timeline of one run; `found` are violations known beside those of the fold.

    With `operations` (the opening first) every step names the one it belongs to, and an operation
    that told nothing has a step of its own.
    """
    builder = _Builder(operations)
    for event in events:
        builder.take(event)
    builder.end()
    return builder.built(events, found)


class _Builder:
    """Folds events and notes what each changes."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        self.fold = Fold(())
        self.steps: list[Step] = []
        self.claims: dict[str, Bar] = {}
        self.requests: dict[str, Bar] = {}
        self.doors: list[Door] = []
        self._operations = operations
        self._ended = 0
        """Operations that are over."""
        self._told = 0
        self._holders: Counter[int] = Counter()
        self._guards: Counter[int] = Counter()
        """Block → responsible hard claims that cover it."""
        self._covered: dict[str, set[int]] = {}
        self._held: dict[str, tuple[int, ...]] = {}
        self._left: dict[str, tuple[int, ...]] = {}
        """The last table of a request that has just ended: some of it stays for reuse."""
        self._lenders: set[str] = set()
        self._hits: dict[str, int] = {}
        self._found: dict[str, tuple[int, int]] = {}
        """Request → blocks that it hits, and blocks that it would compute for claims."""
        self._cached: set[int] = set()
        self._uses: dict[int, int] = {}
        self._reserves: dict[str, int] = {}
        self._reserved = 0
        self._touched: set[int] = set()

    # -- events

    def take(self, event: Event) -> None:
        while self._ended < len(self._operations) - 1 and (
            self._told >= self._operations[self._ended].events
        ):
            self._end_operation()
        self.fold.take(event)
        self._told += 1
        is_new = not self._joins(event)
        if is_new:
            self.steps.append(
                Step(event.event, _subject(event), [], event.seq, self._ended, reserved=0)
            )
        step = self.steps[-1]
        step.words = arguments(event, None if is_new else step.words)
        step.kind = event.event
        if event.claim_id is not None:
            self._claim(event)
        if event.request_id is not None:
            self._request(event)
        self._content(event)
        self._settle()

    def _joins(self, event: Event) -> bool:
        """Whether the event only goes on with what the last step tells."""
        if not self.steps:
            return False
        last = self.steps[-1]
        same = last.subject == _subject(event) and last.operation == self._ended
        pair = (last.kind, event.event)
        return same and (pair in FOLLOWS or (last.kind == event.event and event.event in REPEATS))

    def end(self) -> None:
        while self._ended < len(self._operations):
            self._end_operation()

    def _end_operation(self) -> None:
        """What only a look at the whole pool shows stands with the operation's last step."""
        operation = self._operations[self._ended]
        if not self.steps or self.steps[-1].operation != self._ended:
            words = ["nothing told", operation.text]
            self.steps.append(Step("nothing told", "", words, self._told, self._ended))
        if operation.resident is not None:
            self._touched |= self._cached ^ operation.resident
            self._cached = set(operation.resident)
        self._settle()
        self._ended += 1

    # -- what they change

    def _claim(self, event: Event) -> None:
        name = event.claim_id or ""
        life = self.fold.claims.get(name)
        if life is None:
            return
        if event.event == "resident_block_materialized":
            self._covers(name, life, event.data["block_id"])
        else:
            now = set(life.blocks.values()) if is_owed(life) else set()
            was = self._covered.get(name, set())
            self._guards.update(now - was)
            self._guards.subtract(was - now)
            self._touched |= now ^ was
            self._covered[name] = now
        self._promise(name)
        key = f"{name}#{life.generation}"
        bar = self.claims.get(key)
        if bar is None:
            told = {
                "claim": name,
                "protection": life.protection.value,
                "owner": event.data.get("owner", ""),
                "footprint": event.data.get("footprint", 0),
            }
            bar = self.claims[key] = Bar(key, told)
        bar.goes(len(self.steps) - 1, life.phase.value)

    def _covers(self, name: str, life: ClaimLife, block: int) -> None:
        was = self._covered.setdefault(name, set())
        if is_owed(life) and block not in was:
            was.add(block)
            self._guards[block] += 1
            self._touched.add(block)

    def _promise(self, name: str) -> None:
        """Reserve(c) after the event: granted, not covered and not on loan."""
        life = self.fold.claims.get(name)
        self._reserved -= self._reserves.pop(name, 0)
        if life is not None and is_owed(life):
            self._reserves[name] = reserve_of(life, self.fold.tables.lent)
            self._reserved += self._reserves[name]

    def _request(self, event: Event) -> None:
        name, data, step = event.request_id or "", event.data, len(self.steps) - 1
        bar = self.requests.get(name)
        if bar is None:
            wants = data.get("active_live_blocks_required", 0)
            bar = self.requests[name] = Bar(name, {"wants": wants})
        life = self.fold.requests.get(name)
        self._table(name)
        match event.event:
            case "active_request_admitted":
                self._hits[name] = data["hit_blocks"]
            case "active_request_finished":
                self._cache(self._left.get(name, ())[: self._hits.get(name, 0)])
            case "future_reuse_admitted":
                whole = self._left.pop(name, ())
                self._cache(whole[: self._hits.get(name, 0) + data["blocks"]])
            case "active_request_found":
                self._found[name] = (len(data["hits"]), len(data["draws"]))
            case "active_request_deferred" | "active_request_refused":
                self._door(event)
        if event.event == "active_request_deferred":
            bar.goes(step, "deferred")
        elif life is not None:
            is_over = life.state == "finished"
            bar.goes(step, life.outcome.value if is_over else life.state)

    def _table(self, name: str) -> None:
        """The blocks that the request holds now, against those before."""
        tables = self.fold.tables
        now, was = tables.blocks.get(name, ()), self._held.get(name, ())
        if now == was:
            return
        self._holders.update(now)
        self._holders.subtract(was)
        self._touched.update(now, was)
        self._held[name] = now
        if not now:
            self._left[name] = was
        lenders = set(tables.lent.values())
        for claim in lenders | self._lenders:
            self._promise(claim)
        self._lenders = lenders

    def _door(self, event: Event) -> None:
        data, name = event.data, event.request_id or ""
        wants = data["active_live_blocks_required"]
        hits, drawn = self._found.get(name, (0, 0))
        need = max(0, wants - hits)
        self.doors.append(
            Door(
                step=len(self.steps) - 1,
                request=name,
                outcome=data["outcome"],
                wants=wants,
                need=need,
                drawn=drawn,
                protected=data["protected_resident_blocks"],
                active=data["active_live_blocks_current"],
                headroom=need - drawn - data["missing_now"],
                missing=data["missing_now"],
                shortfall=data["capacity_shortfall_blocks"],
                blockers=tuple(data["blocking_claim_ids"]),
                waits_on=tuple(data["waits_on"]),
                usable=event.usable_blocks,
            )
        )

    def _cache(self, blocks: Iterable[int]) -> None:
        found = set(blocks)
        self._cached |= found
        self._touched |= found

    def _content(self, event: Event) -> None:
        """Content that goes."""
        gone: set[int] = set()
        if "block_id" in event.data and event.event != "resident_block_materialized":
            gone = {event.data["block_id"]}
        elif event.event in ("pool_reset", "pool_slept") and event.data["succeeded"]:
            gone = set(self._cached)
        elif event.event == "resident_block_materialized":
            self._cache([event.data["block_id"]])
        self._cached -= gone
        self._touched |= gone

    def _settle(self) -> None:
        """Write down the new use of every block that was touched."""
        changed: dict[int, int] = {}
        for block in self._touched:
            use = self._use(block)
            if use != self._uses.get(block, Use.FREE):
                changed[block] = self._uses[block] = use
        self._touched.clear()
        step = self.steps[-1]
        _add(step.blocks, changed)
        step.reserved = self._reserved

    def _use(self, block: int) -> int:
        held, guarded = self._holders[block] > 0, self._guards[block] > 0
        if held and guarded:
            return Use.BOTH
        if held or guarded:
            return Use.ACTIVE if held else Use.PROTECTED
        return Use.CACHED if block in self._cached else Use.FREE

    # -- the end

    def built(self, events: Sequence[Event], found: Iterable[Violation]) -> Timeline:
        opened = events[0] if events else None
        usable = opened.usable_blocks if opened else 0
        first = min([1, *self._uses])
        last = max([first + usable - 1, *self._uses])
        told = opened.data if opened is not None and opened.event == "trace_opened" else {}
        line = Timeline(
            run_id=opened.run_id if opened else "",
            engine=told.get("engine", ""),
            usable=usable,
            block_size=told.get("block_size", 0),
            first_block=first,
            rows=last - first + 1,
            steps=tuple(self.steps),
            claims=tuple(self.claims.values()),
            requests=tuple(self.requests.values()),
            doors=tuple(self.doors),
            operations=tuple(operation.text for operation in self._operations),
            events=len(events),
            broken=(),
        )
        folded = {(v.rule, v.message) for v in self.fold.violations}
        apart = {
            (v.rule, v.message, v.seq): v
            for v in [*found, *self.fold.violations]
            if v.seq is not None or (v.rule, v.message) not in folded  # the fold knows where
        }
        placed = ((self._step_of(line, v), v) for v in apart.values())
        broken = tuple(sorted(placed, key=lambda one: one[0]))
        return Timeline(**{**vars(line), "broken": broken})

    def _step_of(self, line: Timeline, violation: Violation) -> int:
        """By event, else the last step of the operation, else the last of all."""
        if violation.seq is not None:
            return line.step_of(violation.seq)
        if violation.operation is not None and self._operations:
            at = bisect_left([s.operation for s in self.steps], violation.operation + 1)
            return max(0, at - 1)
        return max(0, len(self.steps) - 1)


def reserve_of(life: ClaimLife, lent: Mapping[int, str]) -> int:
    """Blocks that a claim was granted, does not cover yet and has not on loan: Reserve(c)."""
    covered = life.blocks.values()
    on_loan = sum(claim == life.claim_id and b not in covered for b, claim in lent.items())
    granted: int = (life.granted or life.asked)["n"]
    return max(0, granted - len(life.blocks) - on_loan)


def _subject(event: Event) -> str:
    return event.claim_id or event.request_id or ""


def is_owed(life: ClaimLife) -> bool:
    """Its blocks are protected: it is hard, and the runtime is responsible."""
    return life.hard and life.responsible and life.phase not in TERMINAL


def _add(stretches: list[tuple[int, int, int]], changed: Mapping[int, int]) -> None:
    """Append the changes, as stretches of neighbours with the same use."""
    for block, use in sorted(changed.items()):
        if stretches and stretches[-1][1:] == (block - 1, use):
            stretches[-1] = (stretches[-1][0], block, use)
        else:
            stretches.append((block, block, use))
