"""Claims over SGLang's pool: locks for hard ones, evictions told, reserves lent and given back.

A hard claim protects by SGLang's own means: it holds `lock_ref` on the path of its prefix, as a
running request does, and `evict` passes locked nodes over.  What SGLang has no word for, blocks
promised and not there yet, is the claim book's: the scheduler admits nothing into them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from kvclaims.bridge.sglang.pool import RadixPool
from kvclaims.bridge.sglang.teller import Teller
from kvclaims.bridge.vllm.claims import ClaimBook
from kvclaims.checker.litmus import WITH_ITS_LEAF
from kvclaims.spec.telemetry import Recorder
from kvclaims.spec.vocabulary import Cause

REUSED: Final = "cached_prefix_reuse"
"""Why a slot was evicted: a request takes it (else it went with its leaf)."""


class Residency:
    """What is visible and who is owed it.  It is the pool that the claim book asks."""

    def __init__(self, pool: RadixPool, teller: Teller, recorder: Recorder) -> None:
        self.pool = pool
        self.teller = teller
        self.book = ClaimBook(self, recorder)
        self._recorder = recorder
        self._visible: dict[int, str] = {}
        """Slot → the content that it was told to be found under."""
        self._where: dict[str, int] = {}
        self._fresh: dict[str, None] = {}
        """Contents that became visible and that no claim has covered yet."""
        self._lent: dict[int, tuple[str, str]] = {}
        """Slot → the claim on whose reserve it was taken, and the content it is for."""

    # -- the pool as the claim book sees it ------------------------------------------------------

    def lookup(self, key: str, only: int | None = None) -> int | None:  # noqa: ARG002
        """SGLang makes content visible when its KV is written, and not before; and it keeps one
        copy, so who fills a slot that was lent for it gives that back."""
        return self._where.get(key)

    def is_visible(self, key: str) -> bool:
        return key in self._where

    survives = is_visible

    def ref(self, block: int) -> int:
        return self.pool.facts((block,))[block].ref

    def queue_length(self) -> int:
        return self.pool.counter()

    def pin(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.pool.lock(block)

    def unpin(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.pool.unlock(block)

    def tell(self, action: str, **args: Any) -> None:
        self.teller.tell(action, **args)

    # -- slots for requests ----------------------------------------------------------------------

    def headroom(self) -> int:
        return self.book.headroom()

    def allocate(self, takers: Sequence[str]) -> list[int]:
        """One slot for each taker (a request may stand there often), evicting what is missing."""
        count = len(takers)
        missing = count - int(self.pool.allocator.available_size())
        if missing > 0:
            if self.book.has_preferred:
                self.pool.refresh(slot for slot in self._visible if self.book.prefers(slot))
            self.pool.tree.evict(missing)
            ahead = self.pool.free_list()[:count]
            self._evicted(dict(zip(ahead, takers, strict=False)), takers[0])
        slots = self.pool.allocator.alloc(count)
        if slots is None:
            raise RuntimeError(f"SGLang's allocator has no {count} slots: {self.pool.counter()}")
        taken: list[int] = slots.tolist()
        return taken

    def draws(self, keys: Sequence[str], first: int) -> dict[int, str]:
        """Position from `first` on → the claim that lends a slot for the content there (F3)."""
        lending = {(claim, key) for claim, key in self._loans().values()}
        found = {}
        for position, claims in self.book.draws(keys, first).items():
            able = [c for c in claims if (c, keys[position]) not in lending]
            if able:
                found[position] = able[0]
        return found

    def wanted_by(self, keys: Sequence[str], first: int) -> dict[str, frozenset[int]]:
        """Claim → positions that it was promised room for and lends none for yet."""
        lending = {(claim, key) for claim, key in self._loans().values()}
        found: dict[str, set[int]] = {}
        for position, claims in self.book.draws(keys, first).items():
            for claim in claims:
                if (claim, keys[position]) not in lending:
                    found.setdefault(claim, set()).add(position)
        return {claim: frozenset(places) for claim, places in found.items()}

    def take(self, request: str, slot: int, key: str, lender: str | None) -> None:
        """The request takes a slot, on the lender's reserve if there is one."""
        if lender is None:
            self.tell("take", r=request, b=slot)
            return
        self.tell("draw", r=request, c=self.book.claims[lender].name, b=slot)
        self.book.lend(lender, slot, key)
        self._lent[slot] = (lender, key)

    def release(self, request: str, slots: Sequence[int]) -> None:
        """The request has let go of these slots, the last one first; loans go back."""
        facts = self.pool.facts(slots)
        for slot in reversed(slots):
            lender = self.book.freed(slot) if facts[slot].ref == 0 else None
            if lender is None:
                self.tell("drop", r=request, b=slot)
            else:
                self.tell("give_back", r=request, c=lender, b=slot)

    def _loans(self) -> dict[int, tuple[str, str]]:
        """The loans that still stand: neither given back nor covered by their claim."""
        claims = self.book.claims
        self._lent = {
            slot: (claim, key)
            for slot, (claim, key) in self._lent.items()
            if claim in claims and slot in claims[claim].loans
        }
        return self._lent

    # -- what becomes visible, and what goes -----------------------------------------------------

    def registered(self, request: str, keys: Sequence[str]) -> None:
        """Tell which content the tree has gained by this request, in the order of `keys`."""
        found = {place.key: place.slot for place in self.pool.places()}
        new = [key for key in keys if key in found and key not in self._where]
        new += [key for key in found if key not in self._where and key not in keys]
        for key in new:
            self._where[key], self._visible[found[key]] = found[key], key
            self._fresh[key] = None
            self.tell("register", r=request, b=found[key], k=key)

    def cover_written(self) -> None:
        """Claims cover what became visible (L7); what a claim lent a slot for waits for that one,
        as long as the loan stands."""
        loans = self._loans()
        waiting = {key for slot, (_, key) in loans.items() if self._where.get(key) != slot}
        ready = [key for key in self._fresh if key in self._where and key not in waiting]
        self._fresh = {key: None for key in self._fresh if key in waiting}
        self.book.written(ready)

    def reset(self) -> bool:
        """SGLang's flush: the tree, the allocator and the rows as new; only while all is free."""
        idle = self.pool.counter() == self.pool.usable
        self._recorder.emit("pool_reset", succeeded=idle)
        if idle:
            self.pool.clear()
            self._lost(self._gone(), "lose", Cause.FAULT)
        return idle

    def _evicted(self, takers: Mapping[int, str], first: str) -> None:
        """Tell what SGLang has just evicted; `takers` says who takes a slot next."""
        gone = self._gone()
        for slot, key in gone.items():
            self._recorder.emit(
                "allocation_victim_selected",
                request_id=takers.get(slot, first),
                prefix_id=key,
                block_id=slot,
                hash=key,
                ref_count=0,
                protected=False,
                reason=REUSED if slot in takers else WITH_ITS_LEAF,
            )
        self._lost(gone, "evict", Cause.OWN_CHOICE)

    def _gone(self) -> dict[int, str]:
        """Slots that are no longer found under the content they were told to hold."""
        now = {(place.slot, place.key) for place in self.pool.places()}
        return {slot: key for slot, key in self._visible.items() if (slot, key) not in now}

    def _lost(self, gone: Mapping[int, str], action: str, cause: Cause) -> None:
        self.book.expect_loss(gone, dict.fromkeys(gone.values(), ()))
        for slot, key in gone.items():
            del self._visible[slot]
            self._where.pop(key, None)
            self._fresh.pop(key, None)
            self.tell(action, b=slot, k=key)
        self.book.lost(gone, cause)
