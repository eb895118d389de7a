"""Offloadable claims on one live scheduler: what its connector is asked, for which claims.

It stands between vLLM's connector interface, which speaks of requests and blocks, the `Tier`,
which speaks of contents, and the `ClaimBook`.  Everything is called in the scheduler's thread.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any, Final

from kvclaims.bridge.vllm.tier import Answers, Load, Loaded, Move, Orders, Results, Tier
from kvclaims.spec.vocabulary import Phase

_LOG: Final = logging.getLogger("kvclaims.tier")
EMPTIED: Final = "the tier was emptied"
"""What claims are told whose copies went with a reset."""

_FIRST_GROUP: Final = bytes(4)


class Offloading:
    """`enforcer` is the claim layer; `blocks` is how many copies the tier has room for, which take
    at most `copy_bytes` each in every one of `workers` workers."""

    def __init__(self, enforcer: Any, blocks: int, workers: int, copy_bytes: int) -> None:
        self._enforcer = enforcer
        self.tier = Tier(blocks)
        self.copy_bytes = workers * copy_bytes
        """Bytes of a block in the tier, at most, over all workers."""
        self._answers = Answers(workers)
        self._book = enforcer.book
        self._book.tier = self.tier
        self.unrestored: dict[str, list[Any]] = {}
        """Requests whose load failed → the claims that were concerned, as they are to be told."""

    # -- what vLLM's scheduler asks its connector ------------------------------------------------

    def matched(self, request: Any, computed: int) -> int | None:
        """Tokens beyond the first `computed` that can be loaded; None to be asked again later.

        A request that leaves nothing behind computes for itself (P4), and at least one token is
        left to compute, as with a hit on the device.
        """
        enforcer = self._enforcer
        if not enforcer.admits(request):
            return 0
        size, first = enforcer.block_size, computed // enforcer.block_size
        last = (request.num_tokens - 1) // size
        contents = enforcer.names.of_request(request)[first:last]
        names = [_name(known) for known in request.block_hashes[first : first + len(contents)]]
        found = self.tier.matching(contents, names)
        return None if found is None else found * size

    def allocated(self, request: Any, blocks: list[int], tokens: int) -> None:
        """The request has `blocks`; `tokens` of it are to be loaded.  Only now is it certain that
        they will be, and claims are told so (O3)."""
        if not tokens:
            return
        enforcer = self._enforcer
        size = enforcer.block_size
        count = tokens // size
        first = enforcer.adopted
        contents = enforcer.names.of_request(request)[first : first + count]
        self.tier.begin(request.request_id, contents, blocks[first : first + count])
        name = enforcer.alias(request.request_id)
        for claim_id in self._owners(contents, Phase.OFFLOADED):
            self._book.required(claim_id, name)
        enforcer.load_started(request, count)

    def orders(self, idle: bool = False) -> Orders:
        """What the worker does in the step that was just scheduled."""
        orders, gone = self.tier.orders(self._source, idle)
        self._book.given_up(gone)
        return orders

    @property
    def is_busy(self) -> bool:
        return self.tier.is_busy

    def done(self, results: Results) -> None:
        """Workers have done some of what they were told."""
        if results.life != self.tier.life:
            return
        results = self._answers.take(results)
        failing, known = self.tier.failing(results), set(self.tier.unsaved)
        published = self.tier.saved(results)
        self._tell_unsaved(results)
        if failing:
            with self._enforcer.observer.operation():
                self._book.unsaved(failing, known)
        for request_id, found in results.loaded.items():
            load = self.tier.ended(request_id, found.good)
            if load is not None:
                self._load_ended(load, found)
        with self._enforcer.observer.operation():
            self._book.written(published)

    def _tell_unsaved(self, results: Results) -> None:
        """Whose claims go without copies for now, and why."""
        reasons = Counter(told.reason for told in results.saved.values() if told.reason)
        for reason, blocks in reasons.items():
            waiting = [content for content, why in self.tier.unsaved.items() if why == reason]
            claims = sorted({claim for content in waiting for claim in self.tier.owners(content)})
            told = ", ".join(claims) or "nobody"
            _LOG.warning(
                "%d blocks were not kept in the tier: %s; they wait: %s", blocks, reason, told
            )

    def _load_ended(self, load: Load, found: Loaded) -> None:
        good = found.good
        enforcer = self._enforcer
        name = enforcer.alias(load.request_id)
        record = enforcer.requests.records.get(name)
        content = None if good == len(load.moves) else load.contents[good]
        if record is not None and record.state in ("loading", "ending"):
            enforcer.requests.loaded(record, len(load.moves), good, content)
        if content is None:
            return
        reason = found.reason or "the copy was not loaded"
        _LOG.warning("a copy is refused (%s): %s", load.moves[good].name[:16], reason)
        concerned = self._owners([content], Phase.RESTORING)
        self.tier.lost(content)
        with enforcer.observer.operation():
            for claim_id in concerned:
                self._book.restore_failed(claim_id, name, content, reason)
            concerned += self._book.unsaved({content: reason}, ())
            self._book.given_up([content])
        self.tier.appeared(content)  # what the device still has of it gets another copy
        self.unrestored[load.request_id] = enforcer.blamed(load.request_id, concerned)

    # -- what the enforcer tells -----------------------------------------------------------------

    def registered(self, block: int, content: str) -> None:
        """The content became visible in `block`."""
        if self.tier.arrived(block, content):
            self._book.brought_back(self.tier.owners(content))
        self.tier.appeared(content)

    def freed(self, block: int) -> None:
        self.tier.abandoned((block,))

    def cleared(self) -> None:
        """The prefix cache was reset, and with it every tier (B10)."""
        under_way = self.tier.under_way
        gone = self.tier.clear()
        self._book.unsaved(dict.fromkeys((*gone, *under_way), EMPTIED), ())
        self._book.given_up(gone)

    # -- small helpers ---------------------------------------------------------------------------

    def _source(self, content: str) -> Move | None:
        """A block that holds the content when the step that was just scheduled has ended.  One
        that no step has written yet must have a holder: then that step writes it."""
        enforcer = self._enforcer
        block = enforcer.observer.lookup(content)
        if block is None or not (enforcer.is_written(block) or enforcer.ref(block)):
            return None
        raw = next(k for k, name in enforcer.observer.keys[block].items() if name == content)
        return Move(bytes(raw).hex(), block)

    def _owners(self, contents: list[str], phase: Phase) -> list[str]:
        """The claims in this phase that are owed any of the contents, in their order."""
        found = {c for content in contents for c in self.tier.owners(content)}
        claims = [self._book.claims[c] for c in found]
        return [
            claim.spec.claim_id
            for claim in sorted(claims, key=lambda claim: claim.order)
            if claim.phase is phase
        ]


def _name(block_hash: bytes) -> str:
    """What the copy of a block with this hash is called: its key in vLLM's map."""
    return (bytes(block_hash) + _FIRST_GROUP).hex()
