"""What is owed to claims: accepting, covering, ending, and losing content.

Start at `Residency.declare`.  The scheduler in `kvclaims.reference.runtime` asks it for victims,
loans and cover; every change of state goes through the ledger.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvclaims.reference.claims import RELEASED_PHASES, Claim, Declared, view
from kvclaims.reference.ledger import Ledger
from kvclaims.reference.memory import Memory
from kvclaims.reference.narrator import Narrator
from kvclaims.reference.pool import Refused
from kvclaims.spec.content import content_ids
from kvclaims.spec.fidelity import may_be_cut
from kvclaims.spec.interface import (
    BadOperation,
    ClaimAnswer,
    ClaimSpec,
    ClaimView,
    PoolConfig,
    Predicate,
    PredicateKind,
)
from kvclaims.spec.vocabulary import PREFERRED, Cause, Decision, Phase, Protection


@dataclass
class Loss:
    """Blocks about to lose their content, and the predicate records of claims before that."""

    cause: Cause
    blocks: dict[int, str]
    before: dict[str, dict[str, Any]] = field(default_factory=dict)


class Residency:
    """The claims on one pool and the blocks that stand for them."""

    def __init__(
        self, ledger: Ledger, narrator: Narrator, memory: Memory, config: PoolConfig
    ) -> None:
        self._ledger = ledger
        self._memory = memory
        self._pool = ledger.pool
        self._narrator = narrator
        self._block_size = config.block_size
        self._config = config
        self._claims = Declared()

    # --- what owners and time do ------------------------------------------------------------

    def declare(self, claim: ClaimSpec) -> ClaimAnswer:
        """Answer a claim (L2, F2): whole, clipped to a shorter prefix, or not at all."""
        entry = self._read_claim(claim)
        self._claims.add(entry)
        self._ledger.submit(entry.name, hard=entry.hard)
        self._emit_claim(
            "resident_claim_submitted",
            entry,
            owner=claim.owner,
            protection=claim.protection.value,
            predicate=claim.predicate.to_json(),
            footprint=claim.predicate.n,
            duration=claim.duration,
        )
        answer = self._decide_claim(entry)
        if answer.granted is None:
            self._ledger.refuse(entry.name)
            self._emit_claim(
                "resident_claim_refused",
                entry,
                decision=answer.decision.value,
                reason=answer.reason,
                cost_blocks=answer.cost,
                headroom_before=answer.headroom,
            )
        else:
            self._accept(entry, answer, answer.granted)
        return answer

    def end(self, claim_id: str, how: Phase) -> None:
        """Release or demote a responsible claim."""
        self._end(self._responsible(claim_id), how)

    def renew(self, claim_id: str, duration: int) -> None:
        """The claim ends `duration` time units from now; an ended claim stays ended (L6)."""
        entry = self._responsible(claim_id)
        if duration <= 0:
            raise BadOperation("a duration is positive")
        entry.ends = self._narrator.now + duration
        self._emit_claim("resident_claim_renewed", entry, duration=duration)

    def expire(self) -> None:
        """End the claims whose time is up (L6)."""
        for entry in self._claims.due(self._narrator.now, self._ledger.book):
            self._end(entry, Phase.EXPIRED)

    def lose(self, tokens: tuple[int, ...], position: int, salt: str = "") -> bool:
        """A fault takes every copy of the content at `position`; False if there is none."""
        keys = content_ids(tokens, self._block_size, salt)
        if not 0 <= position < len(keys):
            raise BadOperation("the tokens do not fill a block at that position")
        blocks = dict.fromkeys(self._pool.entry.get(keys[position], ()), keys[position])
        for block, key in blocks.items():
            self._narrator.emit(
                "resident_block_lost",
                prefix_id=key,
                position=position,
                block_id=block,
                cause=Cause.FAULT.value,
            )
        self._lose_all(blocks)
        return bool(blocks)

    def reset(self) -> bool:
        """Drop all cached content; changes nothing while a block is in use (B10)."""
        return self._drop_all("pool_reset")

    def sleep(self) -> bool:
        """Give all memory up, and with it all content; changes nothing while a block is in use."""
        succeeded = self._drop_all("pool_slept")
        if succeeded:
            self._memory.discard()
        return succeeded

    def _drop_all(self, event: str) -> bool:
        succeeded = not any(self._pool.ref.values())
        self._narrator.emit(event, succeeded=succeeded)
        if succeeded:
            self._lose_all(dict(sorted(self._pool.key.items())))
        return succeeded

    # --- what the scheduler asks ------------------------------------------------------------

    def spare(self, count: int) -> None:
        """Before `count` free blocks are reused, the longest unused first: those among them that a
        preferred claim covers go to the tail.  They are reused all the same where the others do
        not suffice."""
        preferred = {
            block
            for entry in self._claims
            if entry.spec.protection in PREFERRED and self._ledger.book.is_responsible(entry.name)
            for block in self._pool.covers.get(entry.name, ())
        }
        for block in list(self._pool.queue):
            if count == 0:
                break
            if block in preferred:
                self._pool.queue.last(block)
            else:
                count -= 1

    def evict(self, block: int, request: str, reason: str = "cached_prefix_reuse") -> None:
        """Make a free block blank; claims that it belonged to are told (P3, L4)."""
        key = self._pool.key.get(block)
        if key is None:
            return
        loss = self._expect_loss({block: key}, Cause.OWN_CHOICE)
        self._narrator.emit(
            "allocation_victim_selected",
            request_id=request,
            prefix_id=key,
            block_id=block,
            hash=key,
            ref_count=self._pool.ref[block],
            protected=False,
            reason=reason,
        )
        self._ledger.evict(block, key)
        self._after_loss(loss)

    def cover_written(self) -> None:
        """Accepted claims, in order of declaration, cover what has been written."""
        for entry in self._claims:
            if self._phase(entry) is not Phase.ACCEPTED:
                continue
            for position, key in entry.keys.items():
                block = self._written(self._standing_for(entry, key), key)
                if block is not None and position not in entry.places:
                    on_loan = self._pool.drawn.get(block) == entry.name
                    self._cover(entry, position, block, pays=entry.hard and not on_loan)
            self._materialize(entry)

    def _standing_for(self, entry: Claim, key: str) -> int | None:
        """The block that a claim covers for a content: the one it lent, once that is visible."""
        for block in self._on_loan(entry, key):
            return block if block in self._pool.entry.get(key, ()) else None
        return self._pool.find(key)

    def _on_loan(self, entry: Claim, key: str) -> list[int]:
        return [
            b for b, k in entry.lent.items() if k == key and self._pool.drawn.get(b) == entry.name
        ]

    def hard_claims(self) -> list[Claim]:
        """The responsible hard claims, in order of declaration."""
        return [c for c in self._claims if c.hard and self._ledger.book.is_responsible(c.name)]

    def lends(self, entry: Claim, contents: Mapping[str, int]) -> set[str]:
        """Those of the contents, none of them resident, that the claim speaks of and has lent no
        block for: what it covers is resident."""
        return {k for k in entry.keys.values() if k in contents and not self._on_loan(entry, k)}

    def lend(self, request: str, claim: str, block: int, key: str) -> None:
        """A request takes a block on the claim's reserve to compute this content."""
        self._ledger.draw(request, claim, block)
        self._claims.named(claim).lent[block] = key

    def loans(self, contents: Mapping[str, int]) -> dict[int, str]:
        """Position → the first claim declared that is owed this content and lends a block (F3).

        `contents` maps what a request is about to compute to the position it has there.
        """
        loans: dict[int, str] = {}
        for entry in self.hard_claims():
            for key in self.lends(entry, contents):
                loans.setdefault(contents[key], entry.name)
        return loans

    def order_of_return(self, blocks: list[int]) -> list[int]:
        """The order in which blocks, given in logical order, go back to the queue.

        Together they end up as vLLM leaves them: cached ones at the tail, the rest at the head,
        in both groups the end of the chain first (at the head each goes before the last one).
        """
        cached = [b for b in reversed(blocks) if b in self._pool.key]
        return cached + [b for b in blocks if b not in self._pool.key]

    def views(self) -> dict[str, ClaimView]:
        """What an observer sees of each claim."""
        return {
            entry.spec.claim_id: view(
                entry,
                self._phase(entry),
                *self._survival(entry),
                self._pool.promised(entry.name),
            )
            for entry in self._claims
        }

    # --- accepting and covering -------------------------------------------------------------

    def _read_claim(self, spec: ClaimSpec) -> Claim:
        keys = content_ids(spec.tokens, self._block_size, spec.domain)
        if not spec.claim_id:
            raise BadOperation("a claim needs an id")
        if spec.generation < 1:
            raise BadOperation("generations count from 1")
        if spec.duration is not None and spec.duration <= 0:
            raise BadOperation("a duration is positive")
        if spec.min_blocks is not None and spec.min_blocks < 1:
            raise BadOperation("a claim cannot be clipped to less than one block")
        if spec.predicate.positions.stop > len(keys):
            raise BadOperation("the predicate speaks of blocks that the tokens do not fill")
        whole = spec.predicate.n == len(keys) and spec.min_blocks is None
        if not whole and not may_be_cut(spec.predicate.fidelity):
            raise BadOperation("a state is claimed whole")
        self._claims.check_new(spec, self._ledger.book)
        return Claim(spec, spec.predicate, {p: keys[p] for p in spec.predicate.positions})

    def _decide_claim(self, entry: Claim) -> ClaimAnswer:
        spec, headroom = entry.spec, self._pool.headroom
        if spec.protection is Protection.OFFLOADABLE:
            return ClaimAnswer(Decision.REFUSED, "no tier", 0, headroom, None)
        if not self._survives(spec.predicate):
            reason = f"{spec.predicate.fidelity} is asked, {self._config.fidelity} survives"
            return ClaimAnswer(Decision.REFUSED, reason, 0, headroom, None)
        if not entry.hard:
            return ClaimAnswer(
                Decision.ACCEPTED, "soft claims reserve nothing", 0, headroom, entry.granted
            )
        cost = self._cost(entry, spec.predicate.n)
        if cost <= headroom:
            return ClaimAnswer(
                Decision.ACCEPTED, "fits the headroom", cost, headroom, entry.granted
            )
        if spec.min_blocks is not None and spec.predicate.kind is PredicateKind.LEADING:
            for blocks in range(spec.predicate.n - 1, spec.min_blocks - 1, -1):
                less = self._cost(entry, blocks)
                if less <= headroom:
                    granted = spec.predicate.clipped(blocks)
                    return ClaimAnswer(
                        Decision.CLIPPED, "clipped to the headroom", less, headroom, granted
                    )
        return ClaimAnswer(Decision.REFUSED, "exceeds the headroom", cost, headroom, None)

    def _survives(self, asked: Predicate) -> bool:
        """What is asked for is what survives in this pool."""
        return self._config.gives(asked)

    def _cost(self, entry: Claim, blocks: int) -> int:
        """What the first `blocks` positions take from the headroom (F1: used blocks are free)."""
        return sum(1 for key in list(entry.keys.values())[:blocks] if self._costs(key))

    def _costs(self, key: str) -> bool:
        """Only what is written and in use already is there for nothing."""
        block = self._written(self._pool.find(key), key)
        return block is None or self._pool.ref[block] == 0

    def _accept(self, entry: Claim, answer: ClaimAnswer, granted: Predicate) -> None:
        entry.clip(granted.n)
        if entry.spec.duration is not None:
            entry.ends = self._narrator.now + entry.spec.duration
        self._ledger.accept(entry.name, answer.cost)
        self._emit_claim(
            "resident_claim_accepted",
            entry,
            decision=answer.decision.value,
            reason=answer.reason,
            granted=granted.to_json(),
            cost_blocks=answer.cost,
            headroom_before=answer.headroom,
        )
        for position, key in entry.keys.items():
            block = self._written(self._pool.find(key), key)
            if block is not None:
                pays = entry.hard and block in self._pool.queue
                self._cover(entry, position, block, pays=pays)
        self._materialize(entry)

    def _written(self, block: int | None, key: str) -> int | None:
        """The block, if its content is there.  Visible is not enough: a step under way may still
        have to write it (L7)."""
        return block if self._memory.is_written(block, key) else None

    def _cover(self, entry: Claim, position: int, block: int, *, pays: bool) -> None:
        self._ledger.cover(entry.name, block, pays)
        entry.places[position] = block
        self._emit_claim("resident_block_materialized", entry, position=position, block_id=block)

    def _materialize(self, entry: Claim) -> None:
        """Only when every position is covered, and so written (L7)."""
        if len(entry.places) == entry.granted.n:
            self._ledger.materialize(entry.name)
            leading, survivors = self._survival(entry)
            self._emit_claim(
                "resident_claim_materialized", entry, leading=leading, survivors=survivors
            )

    # --- ending and losing ------------------------------------------------------------------

    def _end(self, entry: Claim, how: Phase) -> None:
        """End a responsible claim.  Its content stays where it is (L6)."""
        before = self._phase(entry)
        self._ledger.finish(entry.name, how.value)
        self._emit_claim(
            f"resident_claim_{how.value}",
            entry,
            phase_before=before.value,
            covered=len(entry.places),
        )
        self._unpin(entry)

    def _unpin(self, entry: Claim) -> None:
        """Drop an ended claim's references; blocks that others refer to stay (P2)."""
        if entry.hard:
            blocks = [block for _, block in sorted(entry.places.items())]
            for block in self.order_of_return(blocks):
                self._ledger.uncover(entry.name, block)

    def _lose_all(self, blocks: dict[int, str]) -> None:
        loss = self._expect_loss(blocks, Cause.FAULT)
        for block, key in blocks.items():
            self._ledger.lose(block, key)
        self._after_loss(loss)

    def _expect_loss(self, blocks: dict[int, str], cause: Cause) -> Loss:
        """Before blocks lose their content: note what holds, move cover to copies that stay,
        and demote materialized demotable claims that would be harmed."""
        loss = Loss(cause, blocks)
        for entry in self._claims:
            if not self._ledger.book.is_responsible(entry.name):
                continue
            loss.before[entry.name] = self._record(entry)
            for position in [p for p, b in entry.places.items() if b in blocks]:
                self._move_to_copy(entry, position, blocks)
            demotable = entry.spec.protection is Protection.DEMOTABLE
            exposed = any(b in blocks for b in entry.places.values())
            if demotable and exposed and self._phase(entry) is Phase.MATERIALIZED:
                self._end(entry, Phase.DEMOTED)
        return loss

    def _move_to_copy(self, entry: Claim, position: int, blocks: Mapping[int, str]) -> None:
        """If the content is written in a block that stays, that is the claim's from now on."""
        key = entry.keys[position]
        copies = (b for b in self._pool.entry[key] if b not in blocks and self._written(b, key))
        copy = next(copies, None)
        if copy is not None:
            self._cover(entry, position, copy, pays=False)

    def _after_loss(self, loss: Loss) -> None:
        """Tell each claim what it lost: harm (L3), a block (accepted), or a later loss (L4)."""
        for entry in self._claims:
            gone = sorted(p for p, b in entry.places.items() if b in loss.blocks)
            phase = self._phase(entry)
            if phase in RELEASED_PHASES:
                for position in gone:
                    self._emit_claim(
                        "block_lost_after_release",
                        entry,
                        position=position,
                        block_id=entry.places.pop(position),
                        phase=phase.value,
                    )
            elif gone:
                self._lose_cover(entry, gone, loss)

    def _lose_cover(self, entry: Claim, gone: list[int], loss: Loss) -> None:
        for position in gone:
            self._emit_claim(
                "resident_block_lost",
                entry,
                position=position,
                block_id=entry.places[position],
                cause=loss.cause.value,
            )
        if self._phase(entry) is Phase.HARMED:
            self._emit_claim(
                "resident_claim_harmed",
                entry,
                cause=loss.cause.value,
                before=loss.before[entry.name],
                after=self._record(entry),
            )
            self._unpin(entry)
            entry.places.clear()
            return
        for position in gone:
            if entry.hard:
                self._forsake(entry, entry.places[position])
            del entry.places[position]

    def _forsake(self, entry: Claim, block: int) -> None:
        """A fault emptied a block of an accepted claim: promise it another one, or, where no
        block is left to promise, demote it."""
        try:
            self._ledger.forsake(entry.name, block)
        except Refused:
            self._end(entry, Phase.DEMOTED)

    # --- small helpers ----------------------------------------------------------------------

    def _responsible(self, claim_id: str) -> Claim:
        entry = self._claims.get(claim_id)
        if not self._ledger.book.is_responsible(entry.name):
            raise BadOperation(f"claim {claim_id!r} is {self._phase(entry)}")
        return entry

    def _phase(self, entry: Claim) -> Phase:
        return self._ledger.book.phase[entry.name]

    def _survival(self, entry: Claim) -> tuple[int, int]:
        """Surviving positions: the run from the predicate's start, and all of them."""
        return _run([self._pool.find(key) is not None for key in entry.keys.values()])

    def _record(self, entry: Claim) -> dict[str, Any]:
        """Whether the predicate holds: on what is written, not on what a step still writes (L7)."""
        leading, survivors = _run(
            [
                any(self._written(block, key) for block in self._pool.entry.get(key, ()))
                for key in entry.keys.values()
            ]
        )
        holds = survivors == entry.granted.n
        return {"holds": holds, "leading": leading, "survivors": survivors}

    def _emit_claim(self, event: str, entry: Claim, **data: Any) -> None:
        self._narrator.emit(
            event,
            claim_id=entry.spec.claim_id,
            generation=entry.spec.generation,
            prefix_id=entry.keys[entry.granted.positions[-1]],
            **data,
        )


def _run(present: list[bool]) -> tuple[int, int]:
    """How many come first without a gap, and how many there are."""
    return present.index(False) if False in present else len(present), sum(present)
