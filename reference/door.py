"""The request at the door: what it hits, whether it fits, and what it is told if not (F3 to F5)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvclaims.reference.arbiter import Answer, Owed, Question, decide
from kvclaims.reference.ledger import Ledger
from kvclaims.reference.narrator import Narrator
from kvclaims.reference.requests import Request
from kvclaims.reference.residency import Residency
from kvclaims.spec.interface import PoolConfig
from kvclaims.spec.vocabulary import Feasibility, Outcome


class Door:
    """Questions about requests and the pool, and the answers told to them."""

    def __init__(
        self, config: PoolConfig, ledger: Ledger, residency: Residency, narrator: Narrator
    ) -> None:
        self._config = config
        self._ledger = ledger
        self._pool = ledger.pool
        self._residency = residency
        self._narrator = narrator

    def hits(self, request: Request) -> dict[int, str]:
        """The longest cached run from position 0, short of the last token (P5)."""
        found: dict[int, str] = {}
        for key in request.keys[: (len(request.tokens) - 1) // self._config.block_size]:
            block = self._pool.find(key)
            if block is None:
                break
            found[block] = key
        return found

    def loads(self, request: Request, hits: int) -> int:
        """Blocks beyond the hits that a connector brings, short of the last token."""
        most = (len(request.tokens) - 1) // self._config.block_size
        return max(0, min(request.spec.external, most) - hits)

    def ask(self, request: Request, hits: Mapping[int, str]) -> Answer:
        """Does the whole of the request fit?"""
        return decide(self._question(request, hits))

    def _question(self, request: Request, hits: Mapping[int, str]) -> Question:
        end = len(request.tokens)
        missing = self.missing_positions(request, hits, end)
        computes = self.computes(request, missing)
        return Question(
            usable=self._config.usable,
            claims={
                entry.spec.claim_id: Owed(
                    covered=frozenset(entry.places.values()),
                    reserve=self._pool.reserve[entry.name],
                    lends=frozenset(self._residency.lends(entry, computes)),
                )
                for entry in self._residency.hard_claims()
            },
            active={name: frozenset(blocks) for name, blocks in self._pool.held.items()},
            hits=frozenset(hits),
            need=len(missing),
        )

    def missing_positions(self, request: Request, hits: Iterable[int], end: int) -> range:
        """The positions up to token `end` for which the request has no block yet."""
        have = len(self._pool.held.get(request.name, ())) + len(tuple(hits))
        return range(have, max(have, self.blocks(end)))

    def computes(self, request: Request, missing: range) -> dict[str, int]:
        """The contents, not resident yet, that new blocks will hold, now or in a later step."""
        if not request.spec.admit_reuse:
            return {}
        known = len(request.tokens) // self._config.block_size
        full = range(missing.start, min(missing.stop, known))
        return {request.keys[p]: p for p in full if self._pool.find(request.keys[p]) is None}

    def loans(self, request: Request, missing: range) -> dict[int, str]:
        """Missing position → the claim that lends its block (F3)."""
        return self._residency.loans(self.computes(request, missing))

    def turn_down(self, request: Request, hits: Mapping[int, str], answer: Answer) -> bool:
        """Tell a request that it waits or is refused; no block changes (F4, F5).

        True if that is final.
        """
        structural = answer.outcome is Outcome.REFUSED
        deferred = answer.outcome is Outcome.DEFERRED or (
            structural and request.deferrals < self._config.defer_limit
        )
        news = structural or answer.waits_on != request.waits_on or not deferred
        if deferred:
            request.outcome = Outcome.DEFERRED
            request.deferrals += structural
            request.waits_on = answer.waits_on or request.waits_on
        else:
            request.state, request.outcome = "finished", answer.outcome
            request.shortfall, request.blocking = answer.shortfall, answer.blocking
        if news:
            self._tell_answer(request, hits, answer)
            self._tell_found(request, hits)
            self._emit_answer(request, answer, deferred=deferred)
        self._narrator.flush()
        return not deferred

    def _tell_answer(self, request: Request, hits: Mapping[int, str], answer: Answer) -> None:
        if request.outcome is Outcome.DEFERRED:
            self._ledger.defer(request.name, self._pool.headroom + answer.missing_now)
        elif request.outcome is Outcome.REFUSED:
            promised = sum(self._pool.reserve.values())
            self._ledger.turn_away(request.name, answer.together - answer.protected - promised)
        else:
            missing = self.missing_positions(request, hits, len(request.tokens))
            self._ledger.overflow(request.name, len(hits) + len(missing))

    def _tell_found(self, request: Request, hits: Mapping[int, str]) -> None:
        """What the answer rests on: the hits, and promised contents that it would compute."""
        end = len(request.tokens)
        computes = self.computes(request, self.missing_positions(request, hits, end))
        draws = [
            [entry.spec.claim_id, position]
            for entry in self._residency.hard_claims()
            for position, key in entry.keys.items()
            if key in self._residency.lends(entry, computes)
        ]
        self.tell("active_request_found", request, hits=list(hits), draws=draws)

    def _emit_answer(self, request: Request, answer: Answer, *, deferred: bool) -> None:
        label = {
            Outcome.DEFERRED: Feasibility.ACTIVE_ACCUMULATION,
            Outcome.REFUSED: Feasibility.HEADROOM_EXHAUSTED,
            Outcome.CAPACITY_REQUIRED: Feasibility.CAPACITY_INFEASIBLE,
        }[answer.outcome]
        if deferred and answer.blocking:
            label = Feasibility.REQUIRES_DEFERRAL
        active = {b for blocks in self._pool.held.values() for b in blocks}
        self.tell(
            "active_request_deferred" if deferred else "active_request_refused",
            request,
            outcome=request.outcome.value,
            feasibility=label.value,
            blocking_claim_ids=list(answer.blocking),
            waits_on=list(answer.waits_on),
            protected_resident_blocks=answer.protected,
            resident_plus_active_blocks=answer.together,
            capacity_shortfall_blocks=answer.shortfall,
            missing_now=answer.missing_now,
            free_blocks_before_allocate=self._pool.queue.count,
            active_live_blocks_required=self.blocks(len(request.tokens)),
            active_live_blocks_current=len(active),
            arbiter_action="none",
        )

    def blocks(self, tokens: int) -> int:
        """How many blocks that many tokens take."""
        return -(-tokens // self._config.block_size)

    def tell(self, event: str, request: Request, **data: Any) -> None:
        """Emit an event about a request."""
        prefix = request.keys[-1] if request.keys else None
        self._narrator.emit(event, request_id=request.name, prefix_id=prefix, **data)
