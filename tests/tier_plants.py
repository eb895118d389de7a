"""What can be wrong with a tier of offloadable claims, planted by a patch that is taken back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest


def no_look(patch: pytest.MonkeyPatch) -> None:
    """A copy is served without a look at its checksum."""
    from kvclaims.bridge.serving.tierfiles import TierFiles

    patch.setattr(TierFiles, "_check", lambda *_: None)


def counted_at_once(patch: pytest.MonkeyPatch) -> None:
    """A copy counts when it is ordered, not when it is published."""
    from kvclaims.bridge.vllm.tier import Saved, Tier

    orders = Tier.orders

    def hasty(self: Tier, *args: Any) -> Any:
        told = orders(self, *args)
        from kvclaims.bridge.vllm.tier import Results

        self.saved(Results(self.life, {move.name: Saved() for move in told[0].saves}))
        return told

    patch.setattr(Tier, "orders", hasty)


def copied_late(patch: pytest.MonkeyPatch) -> None:
    """A block is copied off the device when its file is written, not in its step."""
    from kvclaims.bridge.vllm.tierworker import TierWorker

    def late(self: Any, moves: Sequence[Any]) -> None:
        for move in moves:
            self.queue.write(move.name, Late(self._device, move.block))

    patch.setattr(TierWorker, "save", late)


class Late(list[Any]):
    """The content of a block, looked up when somebody asks."""

    def __init__(self, device: Any, block: int) -> None:
        super().__init__()
        self._look: Callable[[], Any] = lambda: device.take([block])[0]

    def __iter__(self) -> Any:
        return iter(self._look())


def any_room(patch: pytest.MonkeyPatch) -> None:
    """More is promised than the tier has room for."""
    from kvclaims.bridge.vllm.tier import Tier

    patch.setattr(Tier, "fits", lambda _, contents: len(contents))


def promised_copies_go(patch: pytest.MonkeyPatch) -> None:
    """Room is made of copies that are promised."""
    from kvclaims.bridge.vllm.tier import Tier

    spare = Tier._spare
    patch.setattr(Tier, "_spare", lambda self: next(iter(self._copies), None) or spare(self))


def no_quota(patch: pytest.MonkeyPatch) -> None:
    """What an owner was promised is forgotten."""
    from kvclaims.bridge.vllm.limits import TierShare

    patch.setattr(TierShare, "take", lambda *_: None)
    patch.setattr(TierShare, "give", lambda *_: None)


def no_limit(patch: pytest.MonkeyPatch) -> None:
    """The limit in bytes is not looked at."""
    from kvclaims.bridge.serving.tierfiles import TierFiles

    patch.setattr(TierFiles, "_check_limit", lambda *_: None)


def loads_are_good(patch: pytest.MonkeyPatch) -> None:
    """A load that failed is told to be good."""
    from kvclaims.bridge.vllm.tierworker import TierWorker

    end = TierWorker._end

    def good(self: Any, number: int, load: Any, _: int, reason: str = "") -> None:
        end(self, number, load, len(load.moves), reason)

    patch.setattr(TierWorker, "_end", good)


def blamed_on_all(patch: pytest.MonkeyPatch) -> None:
    """A restore that failed is told of every claim that is being restored."""
    from kvclaims.bridge.vllm.offloading import Offloading
    from kvclaims.spec.vocabulary import Phase

    def everybody(self: Any, contents: list[str], phase: Phase) -> list[str]:
        return [c for c, claim in self._book.claims.items() if claim.phase is phase]

    patch.setattr(Offloading, "_owners", everybody)


def rests_stay(patch: pytest.MonkeyPatch) -> None:
    """An engine that starts keeps what another has left."""
    from kvclaims.bridge.serving.tierfiles import TierFiles

    clear = TierFiles.clear
    patch.setattr(TierFiles, "clear", lambda self: clear(self) if self.life else None)


def a_reset_spares_the_tier(patch: pytest.MonkeyPatch) -> None:
    """A reset of the prefix cache leaves the tier as it is."""
    from kvclaims.bridge.vllm.offloading import Offloading

    patch.setattr(Offloading, "cleared", lambda _: None)


def computed_is_restored(patch: pytest.MonkeyPatch) -> None:
    """Content that was computed anew is told to be restored."""
    from kvclaims.bridge.vllm.claims import ClaimBook

    def restored(self: Any, claim: Any) -> None:
        claim.away.clear()
        claim.returned = max(1, claim.returned)
        is_back(self, claim)

    is_back = ClaimBook._restored
    patch.setattr(ClaimBook, "_restored", restored)


def offloaded_without_copies(patch: pytest.MonkeyPatch) -> None:
    """A claim is offloaded though the tier lacks some of it."""
    from kvclaims.bridge.vllm.claims import ClaimBook

    patch.setattr(ClaimBook, "_is_kept", lambda *_: True)


def silent_before_kept(patch: pytest.MonkeyPatch) -> None:
    """What an accepted claim loses before a tier keeps it is not told."""
    from kvclaims.bridge.vllm.claims import ClaimBook
    from kvclaims.spec.vocabulary import Phase

    broken = ClaimBook._is_broken
    patch.setattr(
        ClaimBook,
        "_is_broken",
        lambda self, claim: claim.phase is not Phase.ACCEPTED and broken(self, claim),
    )


def failed_on_all(patch: pytest.MonkeyPatch) -> None:
    """A copy that could not be written is told of every claim in force."""
    from kvclaims.bridge.vllm.claims import ClaimBook

    def everybody(self: Any, failed: Any, known: Any) -> list[str]:
        told = unsaved(self, failed, known)
        for claim in self.claims.values():
            if claim.offloadable and claim.responsible and "full" not in claim.unsaved:
                key, more = claim.keys[0], {"tier": "files", "blocks": 1, "reason": "full"}
                self._emit("resident_claim_unsaved", claim, prefix_id=key, **more)
        return told

    unsaved = ClaimBook.unsaved
    patch.setattr(ClaimBook, "unsaved", everybody)


def every_copy_is_written(patch: pytest.MonkeyPatch) -> None:
    """What one step has written counts as written wherever it stands."""
    from kvclaims.bridge.vllm.scheduler import ClaimEnforcer

    written = ClaimEnforcer.written

    def all_of_them(self: Any) -> None:
        ended = list(self._in_flight[0]) if self._in_flight else []
        written(self)
        for key, _ in ended:
            self._unwritten.difference_update(self.observer.where.get(key, ()))

    patch.setattr(ClaimEnforcer, "written", all_of_them)
