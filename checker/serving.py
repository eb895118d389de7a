"""What requests are served: every block read is checked against what it should hold (B4, B5, L7).

The content of a block is a pure function of the tokens up to it and of the cache key.  So what
memory must read as is known without asking the engine: by `spec.content.fingerprint` where the
engine's memory keeps those, else by the bytes that the same content had before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from kvclaims.checker.knowledge import Knowledge, KnownRequest
from kvclaims.checker.observing import Broken
from kvclaims.checker.stepcode import Shadow
from kvclaims.spec import pool
from kvclaims.spec.claims import PHASE, phase
from kvclaims.spec.content import fingerprint, in_any_group, in_group, partial_content
from kvclaims.spec.interface import KvEvent, Observation, PoolStep, RequestView
from kvclaims.spec.operations import Operation
from kvclaims.spec.vocabulary import Phase

Read = Callable[[tuple[int, ...]], Sequence[int]]
"""Digests of blocks, from memory."""

_MATERIALIZED = PHASE.values.index(Phase.MATERIALIZED)


class Serving:
    """Follows block tables, and compares memory with what tables and lookups promise.

    `exact`: memory keeps fingerprints of content names; else digests are learned.
    """

    def __init__(self, known: Knowledge, shadow: Shadow, *, exact: bool) -> None:
        self._known = known
        self._shadow = shadow
        self._exact = exact
        self._tables: dict[str, list[int]] = {}
        """Request → the blocks it took, in order."""
        self._fresh: deque[set[tuple[str, int]]] = deque()
        """For each step under way, content that it made visible and has not written yet."""
        self._right: set[tuple[str, int]] = set()
        """Content and block, as it was read last time."""
        self._learned: dict[str, int] = {}
        self._left_out: dict[tuple[str, int], str] = {}
        """Content and block that a step made visible for a request, and preempted it then: no
        step computes it."""
        self._routed: set[str] = set()
        """The resident content that an engine's KV events add up to."""
        self.reads = 0
        """Blocks whose memory was compared."""

    # -- steps and observations

    def registered(self, steps: Sequence[PoolStep]) -> Iterator[Broken]:
        """A block becomes visible under the content of its place in the request's table (B4)."""
        for step in steps:
            request = step.args.get("r", "")
            table = self._tables.setdefault(request, [])
            match step.action:
                case "take" | "share" if step.args.get("of") in table:
                    table.insert(table.index(step.args["of"]), step.args["b"])
                case "take" | "draw" | "share":
                    table.append(step.args["b"])
                case "drop" | "give_back" if step.args["b"] in table:
                    table.remove(step.args["b"])
                case "retire":
                    table.clear()
                case "register" if step.args["b"] in table and request in self._known.requests:
                    yield from self._named(request, table.index(step.args["b"]), step.args["k"])

    def _named(self, request: str, position: int, key: str) -> Iterator[Broken]:
        keys = self._known.requests[request].keys
        if self._known.has_windows:  # a block's place in its group's table is not told
            if in_any_group(key) not in keys:
                yield "B4", f"a block of request {request} is named {key}"
        elif keys[position : position + 1] != (key,):
            yield "B4", f"block {position} of request {request} is named {key}"

    def on_loan(self) -> dict[str, set[str]]:
        """Claim in the machine → the contents that requests compute on its reserve now."""
        loans: dict[str, set[str]] = {}
        for claim, block in self._shadow.values[pool.drawn]:
            for name, table in self._tables.items():
                request = self._known.requests.get(name)
                if block in table and request is not None:
                    loans.setdefault(claim, set()).update(
                        request.keys[table.index(block) : table.index(block) + 1]
                    )
        return loans

    def under_way(self, operation: Operation, steps: Sequence[PoolStep]) -> None:
        """Which visible content a step that is not complete has still to write."""
        fresh = {(s.args["k"], s.args["b"]) for s in steps if s.action == "register"}
        match operation.op:
            case "dispatch":
                self._fresh.append(fresh)
            case "complete" if self._fresh:
                self._fresh.popleft()
                if self._fresh:  # a token that is known now names what the next step still writes
                    self._fresh[-1] |= fresh
            case "step":
                self._fresh.clear()

    def unwritten(self) -> set[tuple[str, int]]:
        return set().union(*self._fresh)

    def new_content(self, before: Observation, after: Observation) -> Iterator[Broken]:
        """New content was computed by a request that runs and may leave it behind (P4, B4)."""
        new = set(map(in_any_group, after.resident.keys() - before.resident.keys()))
        if not new:
            return
        ours, others = set[str](), set[str]()
        for name, view in before.requests.items():
            request = self._known.requests.get(name)
            if view.state != "finished" and request is not None:
                (ours if request.spec.admit_reuse else others).update(request.keys)
        for key in sorted(new - ours):
            if key in others:
                yield "P4", f"a no-admit request left content {key} behind"
            else:
                yield "B4", f"content {key} became visible, and no request computed it"

    # -- memory

    def left_out(self, preempted: frozenset[str], steps: Sequence[PoolStep]) -> None:
        """Note what became visible for requests that gave way in the same scheduling step."""
        for step in steps:
            place = (step.args.get("k", ""), step.args.get("b", 0))
            if step.action in ("evict", "lose"):
                self._left_out.pop(place, None)
            elif step.action == "register" and step.args["r"] in preempted:
                self._left_out[place] = step.args["r"]

    def _never(self, key: str, block: int) -> Broken | None:
        """What is wrong with a block because the step that was to write it did not."""
        request = self._left_out.get((key, block))
        if request is None:
            return None
        return (
            "B4",
            f"block {block} is found under content {key}, and the step that was to compute it "
            f"left request {request} out",
        )

    def memory(self, after: Observation, read: Read) -> Iterator[Broken]:
        """Visible content and the tables of requests read as what they stand for."""
        visible = [place for place in self._shadow.values[pool.entry] if place[1]]
        unwritten = self.unwritten()
        tables = [
            (self._known.requests[name], view)
            for name, view in after.requests.items()
            if view.blocks and name in self._known.requests
        ]
        blocks = sorted({b for _, b in visible}.union(*(view.blocks for _, view in tables)))
        digests = dict(zip(blocks, read(tuple(blocks)), strict=True))
        right = set()
        for key, block in visible:
            if (key, block) in unwritten:
                continue
            self.reads += 1
            if self._holds(key, digests[block]):
                right.add((key, block))
            else:
                yield self._never(key, block) or self._wrong(key, block, digests[block])
        self._right = right
        yield from self._too_early(unwritten)
        for request, view in tables:
            yield from self._served(request, view, digests, unwritten)

    def _too_early(self, unwritten: set[tuple[str, int]]) -> Iterator[Broken]:
        """What is visible and not written yet materializes nothing (L7)."""
        for key, block in sorted(unwritten):
            for claim, _ in self._shadow.index[pool.covers, 1].get(block, ()):
                if self._shadow.get(phase, (claim,)) == _MATERIALIZED:
                    yield (
                        "L7",
                        f"claim {claim} is materialized, {key} in block {block} is not written",
                    )

    def _holds(self, key: str, digest: int) -> bool:
        if self._exact:
            return digest == fingerprint(key)
        return self._learned.setdefault(key, digest) == digest

    def _wrong(self, key: str, block: int, digest: int) -> Broken:
        covering = [p[0] for p in self._shadow.index[pool.covers, 1].get(block, ())]
        if (key, block) in self._right:
            rule = "P1" if covering else "B4"
            return rule, f"block {block} holds content {key} and was written over"
        if any(self._shadow.get(phase, (c,)) == _MATERIALIZED for c in covering):
            return "L7", f"block {block} of a materialized claim does not hold content {key}"
        state = "was never written" if digest == 0 else "holds something else"
        return "B4", f"block {block} is found under content {key} and {state}"

    def _served(
        self,
        request: KnownRequest,
        view: RequestView,
        digests: Mapping[int, int],
        unwritten: set[tuple[str, int]],
    ) -> Iterator[Broken]:
        """The next step of the request reads its blocks up to the tokens it has computed."""
        if view.computed is None:
            return
        if view.computed > len(request.tokens):
            yield (
                "B11",
                f"request {request.name} is said to have computed {view.computed} tokens, and will "
                f"never have more than {len(request.tokens)}",
            )
            return
        for group, table in enumerate(view.tables or (view.blocks,)):
            yield from self._reads(request, view.computed, group, table, digests, unwritten)

    def _reads(
        self,
        request: KnownRequest,
        computed: int,
        group: int,
        table: Sequence[int],
        digests: Mapping[int, int],
        unwritten: set[tuple[str, int]],
    ) -> Iterator[Broken]:
        """What the next step reads in one KV group: within its window, if it has one."""
        size, window = self._known.config.block_size, self._known.config.windows[group]
        first = max(0, computed - window + 1) // size if window else 0
        for position in range(first, -(-computed // size)):
            if not any(table[position : position + 1]):
                yield "B5", f"request {request.name} has no block at position {position} to read"
                return
            wanted = self._wanted(request, position, computed)
            if wanted is None:
                continue
            if (position + 1) * size <= computed:
                wanted = in_group(wanted, group)
            block = table[position]
            if (wanted, block) in unwritten:
                continue  # a hit on what the step under way writes before it reads
            self.reads += 1
            if not self._holds(wanted, digests[block]):
                if left := self._never(wanted, block):
                    yield left
                    return
                never = digests[block] == 0
                failed = position in request.failed
                yield (
                    "O2" if failed else "B4" if never else "B5",
                    f"request {request.name} reads block {block} at position {position}, which "
                    f"{'was never written' if never else 'holds something else'}",
                )
                return

    def _wanted(self, request: KnownRequest, position: int, computed: int) -> str | None:
        """What the block must hold; None where a part of a block cannot be foretold."""
        size = self._known.config.block_size
        if (position + 1) * size <= computed:
            return request.keys[position]
        if not self._exact or self._known.config.drafts or self._known.under_way:
            return None  # guesses lie behind, or a step under way writes on
        parent = request.keys[position - 1] if position else request.spec.domain
        return partial_content(parent, request.tokens[position * size : computed])

    # -- what comes and goes

    def coming_and_going(
        self, operation: Operation, answer: Any, before: Observation, after: Observation
    ) -> Iterator[Broken]:
        """A fault takes one content, every copy of it; a reset or a sleep takes all or says no."""
        gone = before.resident.keys() - after.resident.keys()
        new = after.resident.keys() - before.resident.keys()
        if operation.op == "lose":
            wanted = {self._known.lost_key(operation)} & before.resident.keys()
            if new or gone != wanted or answer is not bool(wanted):
                yield "B3", f"{operation} answered {answer} and took {len(gone)} contents"
        if operation.op in ("reset", "sleep"):
            idle = before.free == before.usable
            if answer is not idle:
                yield (
                    "B10",
                    f"{operation.op} answered {answer} with {before.free} blocks free",
                )
            if after.resident and answer:
                yield (
                    "B10",
                    f"{len(after.resident)} contents can be found after a {operation.op}",
                )
            if (gone or new) and not answer:
                yield "B10", f"a {operation.op} that failed dropped {len(gone)} contents"

    def routed(
        self, told: Iterable[KvEvent], steps: Sequence[PoolStep], after: Observation
    ) -> Iterator[Broken]:
        """Replaying the engine's KV events yields what is resident (B8)."""
        removed: set[str] = set()
        for event in told:
            if event.tier != "device":
                continue
            match event.kind:
                case "stored":
                    self._routed.update(event.keys)
                case "removed":
                    self._routed.difference_update(event.keys)
                    removed.update(event.keys)
                case "cleared":
                    self._routed.clear()
        resident = set(after.resident)
        if self._routed == resident:
            return
        gone = {step.args["k"] for step in steps if step.action in ("evict", "lose")}
        for key in sorted(resident - self._routed):
            if key in removed & gone:
                yield "B8", f"another copy of content {key} is resident, its events say removed"
            elif key in removed:
                yield "B8", f"content {key} is said to be removed, and no copy of it went"
            else:
                yield "B8", f"content {key} is resident, and no event tells of it"
        for key in sorted(self._routed - resident):
            yield "B8", f"content {key} is not resident, its events say it is"
        self._routed = resident
