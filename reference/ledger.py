"""Pool and claim book moved together: one method for each step that the machine knows.

The runtime and the stepper both work through this class and no other, so what conformance
checks is what runs.  A method that raises `Refused` has changed nothing (B9).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvclaims.reference.claims import ClaimBook
from kvclaims.reference.pool import Pool, require
from kvclaims.spec.vocabulary import Outcome, Phase


class Ledger:
    """The whole state that the contract speaks of, and every step that changes it.

    `told` hears each step after it was taken, with the machine's names for its parameters.
    """

    def __init__(self, pool: Pool, told: Callable[[str, dict[str, Any]], None]) -> None:
        self.pool = pool
        self.book = ClaimBook()
        self.outcome: dict[str, Outcome] = {}
        self.admits: dict[str, bool] = {}
        """Request → whether what it computes may be reused (P4)."""
        self._told = told

    def enter(self, request: str, *, admit_reuse: bool) -> None:
        """A request is known from now on; it has nothing and no outcome."""
        self.outcome[request] = Outcome.PENDING
        self.admits[request] = admit_reuse

    # Requests.

    def admit(self, r: str, n: int) -> None:
        require(not self._was_turned_away(r), "the request was answered for good")
        self.pool.admit(r, n)
        self.outcome[r] = Outcome.SERVED
        self._tell("admit", r=r, n=n)

    def evict(self, b: int, k: str) -> None:
        require(not self.pool.is_held(b), "a request holds the block")
        require(not self._is_protected(b), "a hard claim protects the block")
        self.pool.forget(b, k)
        self._content_gone(b, k)
        self._tell("evict", b=b, k=k)

    def take(self, r: str, b: int) -> None:
        self.pool.take(r, b)
        self._tell("take", r=r, b=b)

    def draw(self, r: str, c: str, b: int) -> None:
        self.pool.draw(r, c, b)
        self._tell("draw", r=r, c=c, b=b)

    def share(self, r: str, b: int, k: str) -> None:
        self.pool.share(r, b, k)
        self._tell("share", r=r, b=b, k=k)

    def drop(self, r: str, b: int) -> None:
        self.pool.drop(r, b)
        self._tell("drop", r=r, b=b)

    def give_back(self, r: str, c: str, b: int) -> None:
        self.pool.give_back(r, c, b)
        self._tell("give_back", r=r, c=c, b=b)

    def retire(self, r: str) -> None:
        self.pool.retire(r)
        self._tell("retire", r=r)

    def register(self, r: str, b: int, k: str) -> None:
        require(self.admits[r], "a no-admit request registers nothing")
        self.pool.register(r, b, k)
        self._tell("register", r=r, b=b, k=k)

    def defer(self, r: str, n: int) -> None:
        """A waiting request that would have to draw n blocks goes on waiting."""
        require(n > self.pool.headroom, "the request fits")
        require(n <= self.pool.usable, "the request can never fit")
        self._answer(r, Outcome.DEFERRED)
        self._tell("defer", r=r, n=n)

    def turn_away(self, r: str, n: int) -> None:
        """A waiting request of n unprotected blocks is refused: claims are in its way (F4)."""
        require(n > self._reclaimable, "the request would fit once the others have finished")
        require(n <= self.pool.usable, "the request can never fit")
        self._answer(r, Outcome.REFUSED)
        self._tell("turn_away", r=r, n=n)

    def overflow(self, r: str, n: int) -> None:
        """A waiting request of n blocks in all exceeds the pool by itself (F4)."""
        require(n > self.pool.usable, "the request fits the pool by itself")
        self._answer(r, Outcome.CAPACITY_REQUIRED)
        self._tell("overflow", r=r, n=n)

    # Claims.

    def submit(self, c: str, *, hard: bool) -> None:
        self.book.submit(c, hard=hard)
        self._tell("submit", c=c)

    def accept(self, c: str, n: int) -> None:
        self.book.require_phase(c, Phase.SUBMITTED)
        if self.book.hard[c]:
            self.pool.promise(c, n)
        else:
            require(n == 0, "a soft claim is promised nothing")
        self.book.answer(c, Phase.ACCEPTED)
        self._tell("accept", c=c, n=n)

    def refuse(self, c: str) -> None:
        self.book.answer(c, Phase.REFUSED)
        self._tell("refuse", c=c)

    def cover(self, c: str, b: int, pays: bool) -> None:
        require(self.book.is_responsible(c), "the runtime owes this claim nothing")
        self.pool.cover(c, b, pin=self.book.hard[c], pays=pays)
        self._tell("cover", c=c, b=b, pays=pays)

    def uncover(self, c: str, b: int) -> None:
        """An ended hard claim drops a pin.  Soft cover is no reference: it falls with the
        content."""
        require(self.book.has_ended(c) and self.book.hard[c], "the claim has no pin to drop")
        self.pool.uncover(c, b, pin=True)
        self._tell("uncover", c=c, b=b)

    def forsake(self, c: str, b: int) -> None:
        self.book.require_phase(c, Phase.ACCEPTED)
        self.pool.forsake(c, b)
        self._tell("forsake", c=c, b=b)

    def materialize(self, c: str) -> None:
        blocks = self.pool.covers.get(c, ())
        require(all(b in self.pool.key for b in blocks), "a covered block lost its content")
        require(self.pool.reserve.get(c, 0) == 0, "the claim is still owed blocks")
        require(c not in self.pool.drawn.values(), "a block of the claim is still on loan")
        self.book.materialize(c)
        self._tell("materialize", c=c)

    def finish(self, c: str, how: str) -> None:
        self.book.end(c, Phase(how))
        self.pool.lapse(c)
        self._tell("finish", c=c, how=how)

    def lose(self, b: int, k: str) -> None:
        """A fault takes the content of a block, wherever the block is (L5)."""
        self.pool.forget(b, k)
        self._content_gone(b, k)
        self._tell("lose", b=b, k=k)

    @property
    def _reclaimable(self) -> int:
        """Blocks that nobody protects or was promised, as if no other request were active."""
        protected = sum(1 for b in self.pool.ref if self._is_protected(b))
        return self.pool.usable - protected - sum(self.pool.reserve.values())

    def _is_protected(self, b: int) -> bool:
        coverers = self.pool.coverers(b)
        return any(self.book.hard[c] and self.book.is_responsible(c) for c in coverers)

    def _content_gone(self, b: int, k: str) -> None:
        """A materialized claim that covered the content is harmed, unless it is soft and covers
        another copy (L3).  Soft cover falls; a pin stays until it is forsaken or uncovered."""
        for c in self.pool.coverers(b):
            copies = [o for o in self.pool.covers[c] if self.pool.key.get(o) == k]
            safe = bool(copies) and not self.book.hard[c]
            if self.book.phase[c] is Phase.MATERIALIZED and not safe:
                self.book.end(c, Phase.HARMED)
            if not self.book.hard[c]:
                self.pool.uncover(c, b, pin=False)

    def _answer(self, r: str, outcome: Outcome) -> None:
        require(r not in self.pool.held, "the request is active")
        require(not self._was_turned_away(r), "the request was answered for good")
        self.outcome[r] = outcome

    def _was_turned_away(self, r: str) -> bool:
        return self.outcome.get(r) in (Outcome.REFUSED, Outcome.CAPACITY_REQUIRED)

    def _tell(self, action: str, **args: Any) -> None:
        self._told(action, args)
