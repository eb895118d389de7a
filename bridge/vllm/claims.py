"""The book of claims on one pool: who is owed which blocks, and what becomes of them.

Pure bookkeeping.  It knows content ids and block numbers, asks a `Pool` for the rest, writes
events through a `Recorder` and tells the claim actions of the machine in `spec.pool`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any, Final, Protocol

from kvclaims.bridge.vllm.limits import HardShare, TierShare
from kvclaims.bridge.vllm.tier import FILES, Tier
from kvclaims.spec.feasibility import Promise
from kvclaims.spec.fidelity import Fidelity, may_be_cut, satisfies
from kvclaims.spec.interface import (
    BadOperation,
    ClaimAnswer,
    ClaimSpec,
    ClaimView,
    Predicate,
    PredicateKind,
)
from kvclaims.spec.telemetry import Recorder
from kvclaims.spec.vocabulary import (
    PREFERRED,
    RESPONSIBLE,
    TERMINAL,
    Cause,
    Decision,
    Phase,
    Protection,
)

_ENDINGS: Final = {
    Phase.DEMOTED: "resident_claim_demoted",
    Phase.EXPIRED: "resident_claim_expired",
    Phase.RELEASED: "resident_claim_released",
}


NO_CONTENT: Final = ""
"""What a block is for that nobody will find: of a request that shares nothing, or not full."""

NO_BLOCK: Final = 0
"""The block of a loss that was of a copy in a tier: the null block, which holds nothing (B6)."""


class Pool(Protocol):
    """What the book asks of a block pool."""

    def lookup(self, key: str, only: int | None = None) -> int | None:
        """The block that a visible and written content is found in, and no other than `only` where
        one is named."""

    def is_visible(self, key: str) -> bool:
        """Whether the content is visible, written or not yet."""

    def survives(self, key: str) -> bool:
        """Whether the content is visible and written."""

    def ref(self, block: int) -> int: ...
    def queue_length(self) -> int: ...
    def pin(self, blocks: Iterable[int]) -> None: ...
    def unpin(self, blocks: Iterable[int]) -> None: ...
    def tell(self, action: str, **args: Any) -> None: ...


@dataclass
class Claim:
    """One generation of a claim.  `cover` maps positions to the blocks that stand for them."""

    spec: ClaimSpec
    order: int
    keys: tuple[str, ...]
    """The content ids of the positions of the predicate as submitted."""
    granted: Predicate
    phase: Phase = Phase.SUBMITTED
    end: int | None = None
    cover: dict[int, int] = field(default_factory=dict)
    loans: dict[int, str] = field(default_factory=dict)
    """Blocks that requests took on this claim's reserve and that it does not cover yet, each with
    the content that is to come into it."""
    departed: bool = False
    """It was offloaded once: in the machine of the pool it ended then (`spec.composed`)."""
    away: set[int] = field(default_factory=set)
    """Positions whose content left the device since, and that no load has brought back."""
    returned: int = 0
    """How many a load has brought back since it was last offloaded."""
    whole: bool = False
    """Its predicate has come to hold: from then on a loss is harm (L3), be it materialized yet or
    not."""
    cause: Cause = Cause.NONE
    """Why it was harmed."""
    unsaved: str = ""
    """Why some of its content could not be kept in a tier, the last time."""

    @property
    def name(self) -> str:
        """The claim as the machine knows it: each generation is its own."""
        return f"{self.spec.claim_id}#{self.spec.generation}"

    @property
    def hard(self) -> bool:
        return self.spec.protection is Protection.HARD

    @property
    def offloadable(self) -> bool:
        return self.spec.protection is Protection.OFFLOADABLE

    @property
    def responsible(self) -> bool:
        return self.phase in RESPONSIBLE

    @property
    def positions(self) -> dict[str, int]:
        """Its contents, each with its position."""
        return {self.key_at(position): position for position in self.granted.positions}

    @property
    def footprint(self) -> int:
        return self.granted.n

    @property
    def reserve(self) -> int:
        """Blocks promised and not covered yet."""
        return self.footprint - len(self.cover) if self.hard and self.responsible else 0

    @property
    def owed(self) -> int:
        """Blocks that must stay free for this claim: the reserve less what is on loan."""
        return self.reserve - len(self.loans)

    def has_lent_for(self, key: str) -> int | None:
        """The block that somebody fills with this content on the claim's reserve."""
        return next((block for block, content in self.loans.items() if content == key), None)

    def key_at(self, position: int) -> str:
        return self.keys[position - self.granted.start]

    def record(self, leading: int, survivors: int) -> dict[str, Any]:
        """A predicate record for events."""
        return {"holds": survivors == self.footprint, "leading": leading, "survivors": survivors}


class ClaimBook:
    """All claims on one pool, each claim id with its latest generation."""

    def __init__(self, pool: Pool, recorder: Recorder) -> None:
        self._pool = pool
        self.tier: Tier | None = None
        """Where offloadable claims are kept; without it there are none."""
        self.share = HardShare()
        self.tier_share = TierShare()
        self.granted: Callable[[], Counter[str]] = Counter
        """How many blocks active requests were admitted with and have yet to take, by the content
        that they compute into them, and by `NO_CONTENT` for what has none; none where prompts are
        computed in one piece."""
        self._ended: dict[str, None] = {}
        """Claims in a terminal phase, in the order in which they ended."""
        self._in_force: Counter[str] = Counter()
        self._preferring = 0
        """Responsible claims that prefer their blocks."""
        self._generations: dict[str, int] = {}
        """Claim ids that are no longer in `claims`, with their last generation (L1)."""
        self._recorder = recorder
        self._order = 0
        self.now = 0
        self.claims: dict[str, Claim] = {}
        self._wanted: dict[str, dict[str, int]] = {}
        """Content → accepted claims that do not cover it yet, with the position it has there."""
        self._concerns: dict[int, set[str]] = {}
        """Block → claims whose `cover` it is in, ended ones too: its loss is still told once."""
        self._after: dict[str, dict[str, int]] = {}
        """Content in a tier → claims that ended, with its position: its loss is still told once."""
        self._timed: dict[str, Claim] = {}
        self._ends: list[tuple[int, int, str]] = []
        """A heap of ends; an entry that a renewal or an end overtook is skipped."""
        self._come_back: dict[str, None] = {}
        """Content for which a block was lent and has come back: others may have it by now."""
        self._lender: dict[int, Claim] = {}
        """Block on loan → the claim whose reserve it came from."""
        self.owed = 0
        """Σ owed over all responsible hard claims, kept as they change."""
        self._guards: Counter[int] = Counter()
        """Protected block → how many responsible hard claims cover it, kept as they change."""
        self.version = 0
        """Another number whenever something may have changed for requests."""

    # -- operations ------------------------------------------------------------------------

    def declare(self, spec: ClaimSpec, keys: Sequence[str]) -> ClaimAnswer:
        """Decide a claim; `keys` are the content ids of the full blocks of its tokens."""
        self._check(spec, keys)
        positions = spec.predicate.positions
        if spec.claim_id in self.claims:
            self._forget(self.claims[spec.claim_id])
        self._ended.pop(spec.claim_id, None)
        self._order += 1
        claim = Claim(spec, self._order, tuple(keys[p] for p in positions), spec.predicate)
        self.claims[spec.claim_id] = claim
        self._emit_submitted(claim)
        self._pool.tell("submit", c=claim.name)
        return self._decide(claim)

    def end(self, claim_id: str, how: Phase) -> None:
        """Demote or release a claim; raises `BadOperation` unless it is responsible."""
        self._finish(self._responsible(claim_id), how)

    def renew(self, claim_id: str, duration: int) -> None:
        """A responsible claim ends `duration` from now."""
        claim = self._responsible(claim_id)
        if duration <= 0:
            raise BadOperation("a duration is positive")
        self._ends_in(claim, duration)
        self._emit("resident_claim_renewed", claim, duration=duration)

    def is_due(self, ticks: int) -> bool:
        """Whether something may be to do when so much more time has passed."""
        return bool(self._ends) and self._ends[0][0] <= self.now + ticks

    def advance(self, ticks: int) -> None:
        """Let time pass; claims whose time is up expire in order of their end (L6)."""
        self.now += ticks
        while self._ends and self._ends[0][0] <= self.now:
            end, order, claim_id = heappop(self._ends)
            claim = self._timed.get(claim_id)
            if claim is not None and (claim.end, claim.order) == (end, order):
                self._finish(claim, Phase.EXPIRED)

    def _ends_in(self, claim: Claim, duration: int) -> None:
        claim.end = self.now + duration
        self._timed[claim.spec.claim_id] = claim
        heappush(self._ends, (claim.end, claim.order, claim.spec.claim_id))

    def generation(self, claim_id: str) -> int:
        """The last generation of this id, 0 for an id that was never used."""
        known = self.claims.get(claim_id)
        return known.spec.generation if known else self._generations.get(claim_id, 0)

    def in_force(self, owner: str) -> int:
        """How many claims of this owner are responsible."""
        return self._in_force.get(owner, 0)

    def tidy(self, keep: int) -> None:
        """Drop what is known of ended claims but for the `keep` that ended last; of the others
        the generation stays, so that none returns (L1)."""
        while len(self._ended) > keep:
            claim_id = next(iter(self._ended))
            del self._ended[claim_id]
            claim = self.claims.pop(claim_id)
            self._forget(claim)
            self._generations[claim_id] = claim.spec.generation

    # -- what requests need to know ----------------------------------------------------------

    def headroom(self) -> int:
        """Free blocks less every promise (F2)."""
        return self._pool.queue_length() - self.owed

    def promises(self) -> dict[str, Promise]:
        """What every responsible hard claim is owed, for `spec.feasibility`."""
        return {
            claim_id: Promise(frozenset(claim.cover.values()), claim.owed)
            for claim_id, claim in self.claims.items()
            if claim.hard and claim.responsible
        }

    def all_together(self) -> Promise:
        """What all of them are owed, as if it were one claim's: it fits or not as theirs do."""
        return Promise(frozenset(self._guards), self.owed)

    def draws(self, keys: Sequence[str], first: int) -> dict[int, list[str]]:
        """Positions from `first` on whose content hard claims were promised room for.

        A request that computes `keys` takes such a block on the reserve of the first claim
        named, which is the earliest declared (F3).
        """
        if self.owed <= 0:
            return {}
        found = {}
        for position in range(first, len(keys)):
            wanting = self._wanted.get(keys[position])
            if wanting and not self._pool.is_visible(keys[position]):
                claims = (c for c in self._in_order(wanting) if c.hard)
                key = keys[position]
                hard = [c.spec.claim_id for c in claims if c.has_lent_for(key) is None]
                if hard:
                    found[position] = hard
        return found

    def lent(self, blocks: Iterable[int]) -> list[list[Any]]:
        """Which of these blocks are on loan, each with its claim."""
        lenders = ((self._lender.get(block), block) for block in blocks)
        return [[claim.spec.claim_id, block] for claim, block in lenders if claim is not None]

    @property
    def has_preferred(self) -> bool:
        """Whether some content may be evicted, after all other."""
        return self._preferring > 0 or (self.tier is not None and self.tier.lacks_copies)

    def prefers(self, block: int, contents: Iterable[str] = ()) -> bool:
        """Whether a responsible claim covers the block that may lose it, after all other; or what
        it is found under, `contents`, was promised to be kept in a tier, and is not yet."""
        if self.tier is not None and any(map(self.tier.lacks, contents)):
            return True
        concerned = (self.claims[claim] for claim in self._concerns.get(block, ()))
        return any(c.responsible and c.spec.protection in PREFERRED for c in concerned)

    def wants(self, key: str) -> bool:
        """Whether a hard claim was promised this content and does not cover it yet."""
        return any(self.claims[c].hard for c in self._wanted.get(key, ()))

    # -- what happens to blocks ----------------------------------------------------------------

    @property
    def awaits_content(self) -> bool:
        """Whether it matters what was written: a claim wants some content, or has lent for it."""
        return bool(self._wanted or self._come_back)

    def lend(self, claim_id: str, block: int, key: str) -> None:
        """A request took `block` on the claim's reserve, for this content."""
        claim = self.claims[claim_id]
        claim.loans[block] = key
        self._lender[block] = claim
        self.owed -= 1
        self.version += 1

    def freed(self, block: int) -> str | None:
        """Nobody refers to `block` any more: a loan goes back to the reserve of its claim."""
        claim = self._lender.pop(block, None)
        if claim is None:
            return None
        self._come_back[claim.loans.pop(block)] = None
        self.owed += 1
        self.version += 1
        return claim.name

    def written(self, keys: Iterable[str]) -> None:
        """New content is resident and written: accepted claims cover it, in their order.  One that
        has lent a block for it covers that block, and waits for it."""
        wanting: dict[str, set[int]] = {}
        back, self._come_back = self._come_back, {}
        for key in {**dict.fromkeys(keys), **back}:
            for claim_id, position in self._wanted.get(key, {}).items():
                wanting.setdefault(claim_id, set()).add(position)
        for claim in self._in_order(wanting):
            for position in sorted(wanting[claim.spec.claim_id]):
                block = self._standing(claim, position)
                if block is not None:
                    self._cover(claim, position, block)
            self._look_whole(claim)
            self._materialize(claim)

    def minds(self, lost: Mapping[int, str]) -> bool:
        """Whether the loss of these blocks may mean anything to a claim: one, in force or ended,
        has such a block in its cover, or claims are kept in a tier, by content."""
        return self.tier is not None or not self._concerns.keys().isdisjoint(lost)

    def expect_loss(self, lost: Mapping[int, str], copies: Mapping[str, Sequence[int]]) -> None:
        """Blocks are about to lose their content; `copies` are the blocks that keep it.

        Soft claims move to a copy; of those that have none, an offloadable one that a tier keeps is
        offloaded, and a demotable one demoted, before the loss.
        """
        for claim in self._concerned(lost):
            if not claim.responsible:
                continue
            for position, block in list(claim.cover.items()):
                if block in lost and copies[lost[block]]:
                    self._move(claim, position, copies[lost[block]][0])
            exposed = any(block in lost for block in claim.cover.values())
            if not exposed or claim.phase is not Phase.MATERIALIZED:
                continue
            if claim.spec.protection is Protection.DEMOTABLE:
                self._finish(claim, Phase.DEMOTED)
            elif claim.offloadable and all(map(self._is_kept, claim.keys)):
                self._offload(claim)

    def lost(self, lost: Mapping[int, str], cause: Cause) -> None:
        """Blocks have lost their content: harm, less cover, or a loss after the end."""
        if not self.minds(lost):  # there is no claim that any line below would speak of
            return
        for claim in self._concerned(lost):
            gone = sorted(p for p, block in claim.cover.items() if block in lost)
            if not claim.responsible:
                self._tell_late_loss(claim, gone)
                continue
            for position in gone:
                self._emit(
                    "resident_block_lost",
                    claim,
                    position=position,
                    block_id=claim.cover[position],
                    cause=cause.value,
                )
            if claim.phase is Phase.MATERIALIZED:
                self._harm(claim, cause)
            else:
                for position in gone:
                    self._forsake(claim, position)
        self._miss(lost)
        for claim in self._owed(lost.values()):
            if self._is_broken(claim):
                self._tell_bare_losses(claim, lost, cause)
                self._harm(claim, cause)
            else:
                self._materialize(claim)  # the tier may keep all of it already

    # -- claims in a tier ----------------------------------------------------------------------

    def required(self, claim_id: str, request: str) -> None:
        """`request` loads content of an offloaded claim: all of it is wanted back (O1)."""
        claim = self.claims[claim_id]
        if claim.phase is not Phase.OFFLOADED:
            return
        claim.phase = Phase.RESTORING
        away = len(claim.away)
        self._emit("restoration_required", claim, tier=FILES, blocks=away, request_id=request)
        for position in claim.granted.positions:
            self._want(claim, position)
        for position in claim.granted.positions:
            block = self._standing(claim, position)
            if block is not None:
                self._cover(claim, position, block)

    def brought_back(self, owners: Mapping[str, int]) -> None:
        """A load has made content visible that these claims are owed, each at a position.  Content
        that was computed anew is not restored, nor is what a load brought that began before the
        claim was there to be required back (O3)."""
        for claim_id, position in owners.items():
            claim = self.claims[claim_id]
            if position in claim.away:
                claim.away.discard(position)
                claim.returned += claim.phase is Phase.RESTORING

    def restore_failed(self, claim_id: str, request: str, key: str, reason: str) -> None:
        """The load of a content for the claim has failed: the claim ends, and is told to be the
        one concerned (O2)."""
        claim = self.claims[claim_id]
        told = {"request_id": request, "prefix_id": key}
        self._emit("restoration_failed", claim, tier=FILES, reason=reason, **told)
        _, survivors = self._survival(claim)
        if survivors == claim.footprint:  # computed again meanwhile: kept, but not restored
            self._finish(claim, Phase.DEMOTED)
        else:
            self._harm(claim, Cause.FAULT)

    def unsaved(self, failed: Mapping[str, str], known: Container[str]) -> list[str]:
        """The tier does not have these contents, each with the reason: copies that could not be
        written, or are not right.  Claims that are owed one are told, but for what is `known`; a
        fault harms those of which nothing else keeps it (O2).  The claims harmed."""
        harmed = []
        for claim in self._owed(failed):
            mine = [key for key in claim.keys if key in failed]
            gone = self._is_broken(claim)
            claim.unsaved = failed[mine[0]]
            if gone or any(key not in known for key in mine):
                told = {"tier": FILES, "blocks": len(mine), "reason": claim.unsaved}
                self._emit("resident_claim_unsaved", claim, prefix_id=mine[0], **told)
            if gone:
                self._harm(claim, Cause.FAULT)
                harmed.append(claim.spec.claim_id)
        return harmed

    def _owed(self, keys: Iterable[str]) -> list[Claim]:
        """The claims that a tier owes any of these contents, in their order."""
        if self.tier is None:
            return []
        return self._in_order({claim for key in keys for claim in self.tier.owners(key)})

    def _is_broken(self, claim: Claim) -> bool:
        """Whether an offloadable claim was whole, and some of its content is nowhere.  What the
        tier has taken, and still writes, it answers for: when that fails the claim is told."""
        return claim.whole and not all(map(self._is_left, claim.keys))

    def _is_left(self, key: str) -> bool:
        return self._is_safe(key) or self._pool.is_visible(key)

    def _is_safe(self, key: str) -> bool:
        return self.tier is not None and self.tier.is_safe(key)

    def _look_whole(self, claim: Claim) -> None:
        """Note when an offloadable claim has all of its content: written, or in the tier."""
        if claim.offloadable and not claim.whole:
            claim.whole = all(map(self._is_there, claim.keys))

    def _is_there(self, key: str) -> bool:
        """What the tier takes from a step that still writes it is not there yet."""
        if self._is_kept(key) or self._pool.survives(key):
            return True
        return self._is_safe(key) and not self._pool.is_visible(key)

    def _tell_bare_losses(self, claim: Claim, lost: Mapping[int, str], cause: Cause) -> None:
        """Which blocks the claim lost that it had, and did not cover yet."""
        positions = claim.positions
        for block, key in lost.items():
            if key in positions and positions[key] not in claim.cover and not self._is_left(key):
                told = {"position": positions[key], "block_id": block, "cause": cause.value}
                self._emit("resident_block_lost", claim, **told)

    def given_up(self, keys: Iterable[str]) -> None:
        """The tier no longer keeps these: claims that ended before are told of the loss (L4)."""
        for key in keys:
            for claim_id, position in self._after.pop(key, {}).items():
                if not self._pool.is_visible(key):
                    self._tell_one_late_loss(self.claims[claim_id], position, NO_BLOCK)

    def _offload(self, claim: Claim) -> None:
        """Its blocks may go: a tier keeps every one of them (O1)."""
        self._emit("resident_claim_offloaded", claim, tier=FILES, blocks=claim.footprint)
        self._depart(claim)
        claim.phase = Phase.OFFLOADED
        claim.returned = 0
        claim.away.clear()
        self._forget(claim)

    def _depart(self, claim: Claim) -> None:
        """The machine of the pool has nothing more to do with it."""
        self._tell(claim, "finish", how=Phase.DEMOTED.value)
        claim.departed = True

    def _awaits_block(self, claim: Claim) -> bool:
        """Whether it may come to cover a block that a step still writes."""
        uncovered = (claim.key_at(p) for p in claim.granted.positions if p not in claim.cover)
        return any(map(self._pool.is_visible, uncovered))

    def _settle_in_tier(self, claim: Claim) -> None:
        """The tier keeps all of an accepted claim, whose blocks were taken before it did: it is
        materialized there, and offloaded at once (O1)."""
        for position in claim.granted.positions:
            if position not in claim.cover:
                self._unwant(claim, position)
                self._tell_covered(claim, position, NO_BLOCK)
        self._depart(claim)
        self._tell_materialized(claim)
        self._offload(claim)
        claim.away.update(p for k, p in claim.positions.items() if not self._pool.is_visible(k))

    def _miss(self, lost: Mapping[int, str]) -> None:
        """Contents that claims in a tier lack on the device from now on."""
        if self.tier is None:
            return
        for key in lost.values():
            if self._pool.is_visible(key):
                continue
            for claim_id, position in self.tier.owners(key).items():
                claim = self.claims[claim_id]
                if claim.phase in (Phase.OFFLOADED, Phase.RESTORING):
                    claim.away.add(position)

    def _restored(self, claim: Claim) -> None:
        """Back on the device, if a load brought back all that had left it (O3)."""
        if claim.away or not claim.returned:
            return
        claim.phase = Phase.MATERIALIZED
        self._emit("resident_claim_restored", claim, tier=FILES, blocks=claim.returned)

    def unsaved_of(self, claim: Claim) -> list[str]:
        """Why contents of an offloadable claim have no copy: of those that could not be written."""
        told = {} if self.tier is None else self.tier.unsaved
        return [told[key] for key in claim.keys if key in told]

    def _is_kept(self, key: str) -> bool:
        return self.tier is not None and self.tier.keeps(key)

    # -- views ---------------------------------------------------------------------------------

    def view(self, claim: Claim) -> ClaimView:
        leading, survivors = self._survival(claim)
        return ClaimView(
            phase=claim.phase,
            generation=claim.spec.generation,
            protection=claim.spec.protection,
            footprint=claim.footprint,
            leading=leading,
            survivors=survivors,
            covered=len(claim.cover) if claim.responsible else 0,
            reserve=claim.reserve,
        )

    def pins(self) -> dict[str, tuple[int, ...]]:
        """The references that claims hold, by the machine's name of the claim."""
        return {
            claim.name: tuple(claim.cover[p] for p in sorted(claim.cover))
            for claim in self.claims.values()
            if claim.hard and claim.responsible and claim.cover
        }

    # -- deciding --------------------------------------------------------------------------------

    def _check(self, spec: ClaimSpec, keys: Sequence[str]) -> None:
        if not spec.claim_id:
            raise BadOperation("a claim needs an id")
        if spec.generation < 1:
            raise BadOperation("generations count from 1")
        if spec.predicate.start + spec.predicate.n > len(keys):
            raise BadOperation("the predicate reaches beyond the full blocks of the content")
        if spec.duration is not None and spec.duration <= 0:
            raise BadOperation("a duration is positive")
        if spec.min_blocks is not None and spec.min_blocks <= 0:
            raise BadOperation("min_blocks is positive")
        whole = spec.predicate.n == len(keys) and spec.min_blocks is None
        if not whole and not may_be_cut(spec.predicate.fidelity):
            raise BadOperation("a state is claimed whole")
        known = self.claims.get(spec.claim_id)
        last = self.generation(spec.claim_id)
        responsible = known is not None and known.phase not in TERMINAL
        if responsible or spec.generation <= last:
            raise BadOperation(
                f"claim {spec.claim_id!r} returns only after its end, with a higher generation"
            )

    def _decide(self, claim: Claim) -> ClaimAnswer:
        headroom = self.headroom()
        asked = claim.spec.predicate.fidelity
        if not satisfies(Fidelity.EXACT, asked):
            return self._refuse(claim, f"{asked} is asked, exact survives", 0, headroom)
        if claim.offloadable:
            return self._decide_offloadable(claim, headroom)
        if not claim.hard:
            return self._accept(
                claim, Decision.ACCEPTED, "soft claims reserve nothing", 0, headroom
            )
        needs = self.granted()
        headroom = max(0, headroom - needs.total())
        cost = self._cost(claim, claim.footprint)
        most, limit = self.share.room(claim.spec.owner)
        whole = headroom + self._met_by(claim, claim.footprint, needs)
        if cost <= whole and claim.footprint <= most:
            return self._accept(claim, Decision.ACCEPTED, "fits the headroom", cost, whole)
        granted = self._clipped(claim, headroom, most, needs)
        if granted is None:
            reason = "exceeds the headroom" if cost > whole else limit
            return self._refuse(claim, reason, cost, whole)
        claim.granted = claim.granted.clipped(granted)
        claim.keys = claim.keys[:granted]
        cost = self._cost(claim, granted)
        headroom += self._met_by(claim, granted, needs)
        reason = "clipped to the headroom" if granted < most else f"clipped: more {limit}"
        return self._accept(claim, Decision.CLIPPED, reason, cost, headroom)

    def _decide_offloadable(self, claim: Claim, headroom: int) -> ClaimAnswer:
        """Room in the tier is promised, and none on the device: it is the tier that keeps it."""
        if self.tier is None:
            return self._refuse(claim, "no tier", 0, headroom)
        fits = self.tier.fits(claim.keys)
        most, limit = self.tier_share.room(claim.spec.owner)
        room = min(fits, most)
        if room >= claim.footprint:
            return self._accept(claim, Decision.ACCEPTED, "fits the tier", 0, headroom)
        if fits <= most:
            whole = self.tier.blocks
            limit = f"needs {claim.footprint} blocks, and the tier has room for {fits} of {whole}"
        else:
            limit = f"{limit}: {claim.footprint} are asked and {most} left"
        least = claim.spec.min_blocks
        if least is None or room < least or claim.granted.kind is not PredicateKind.LEADING:
            return self._refuse(claim, limit, 0, headroom)
        claim.granted = claim.granted.clipped(room)
        claim.keys = claim.keys[:room]
        return self._accept(claim, Decision.CLIPPED, f"clipped: {limit}", 0, headroom)

    def _cost(self, claim: Claim, n: int) -> int:
        """Blocks of the first `n` positions that would have to come from the free queue."""
        return sum(self._costs(key) for key in claim.keys[:n]) if claim.hard else 0

    def _costs(self, key: str) -> bool:
        block = self._pool.lookup(key)
        return block is None or self._pool.ref(block) == 0

    def _met_by(self, claim: Claim, n: int, needs: Counter[str]) -> int:
        """How much of what active requests have yet to take they will draw on the reserve that the
        first `n` positions get: that room is not promised twice (F3)."""
        return sum(self._is_met(key, needs) for key in claim.keys[:n]) if needs else 0

    def _is_met(self, key: str, needs: Counter[str]) -> bool:
        return key in needs and not self._pool.is_visible(key) and not self.wants(key)

    def _clipped(self, claim: Claim, headroom: int, most: int, needs: Counter[str]) -> int | None:
        """The longest prefix that costs at most `headroom` and is at most `most` blocks long."""
        least = claim.spec.min_blocks
        if least is None or claim.granted.kind is not PredicateKind.LEADING:
            return None
        cost = 0
        for n, key in enumerate(claim.keys):
            cost += self._costs(key) - self._is_met(key, needs)
            if cost > headroom or n >= most:
                return n if n >= least else None
        raise AssertionError("a claim that fits whole is not clipped")

    def _refuse(self, claim: Claim, reason: str, cost: int, headroom: int) -> ClaimAnswer:
        claim.phase = Phase.REFUSED
        self._ended[claim.spec.claim_id] = None
        self._emit(
            "resident_claim_refused",
            claim,
            decision=Decision.REFUSED.value,
            reason=reason,
            cost_blocks=cost,
            headroom_before=headroom,
        )
        self._pool.tell("refuse", c=claim.name)
        return ClaimAnswer(Decision.REFUSED, reason, cost, headroom, None)

    def _accept(
        self, claim: Claim, decision: Decision, reason: str, cost: int, headroom: int
    ) -> ClaimAnswer:
        claim.phase = Phase.ACCEPTED
        if claim.spec.duration is not None:
            self._ends_in(claim, claim.spec.duration)
        self.owed += claim.reserve
        self._in_force[claim.spec.owner] += 1
        self._preferring += claim.spec.protection in PREFERRED
        if claim.hard:
            self.share.take(claim.spec.owner, claim.footprint)
        if claim.offloadable:
            self.tier_share.take(claim.spec.owner, claim.footprint)
        self._emit(
            "resident_claim_accepted",
            claim,
            decision=decision.value,
            reason=reason,
            granted=claim.granted.to_json(),
            cost_blocks=cost,
            headroom_before=headroom,
        )
        self._pool.tell("accept", c=claim.name, n=cost)
        if claim.offloadable and self.tier is not None:
            self.tier.promise(claim.spec.claim_id, claim.positions)
        for position in claim.granted.positions:
            self._want(claim, position)
        for position in claim.granted.positions:
            block = self._standing(claim, position)
            if block is not None:
                self._cover(claim, position, block, at_acceptance=True)
        self._look_whole(claim)
        self._materialize(claim)
        return ClaimAnswer(decision, reason, cost, headroom, claim.granted)

    # -- covering --------------------------------------------------------------------------------

    def _want(self, claim: Claim, position: int) -> None:
        self._wanted.setdefault(claim.key_at(position), {})[claim.spec.claim_id] = position

    def _unwant(self, claim: Claim, position: int) -> None:
        key = claim.key_at(position)
        self._wanted[key].pop(claim.spec.claim_id, None)
        if not self._wanted[key]:
            del self._wanted[key]

    def _standing(self, claim: Claim, position: int) -> int | None:
        """The block that may stand for a position.  What is to be kept in a tier counts once it is
        there: from then on its blocks may be taken at any time."""
        key = claim.key_at(position)
        if claim.offloadable and not self._is_kept(key):
            return None
        return self._pool.lookup(key, claim.has_lent_for(key))

    def _tell(self, claim: Claim, action: str, **args: Any) -> None:
        """Tell the machine of the pool, which knows the claim until it is first offloaded."""
        if not claim.departed:
            self._pool.tell(action, c=claim.name, **args)

    def _cover(self, claim: Claim, position: int, block: int, at_acceptance: bool = False) -> None:
        """The claim protects `block` for `position`; a hard one takes a reference to it."""
        pays = False
        if claim.hard:
            drawn = block in claim.loans
            pays = not drawn and (not at_acceptance or self._pool.ref(block) == 0)
            if drawn:
                del claim.loans[block], self._lender[block]
            else:
                self.owed -= 1
            self._pool.pin((block,))
        claim.cover[position] = block
        self._link(claim, block)
        self._unwant(claim, position)
        self._tell(claim, "cover", b=block, pays=pays)
        self._tell_covered(claim, position, block)

    def _move(self, claim: Claim, position: int, copy: int) -> None:
        """A position stands on another copy of its content from now on."""
        self._unlink(claim, claim.cover[position])
        claim.cover[position] = copy
        self._link(claim, copy)
        self._tell(claim, "cover", b=copy, pays=False)
        self._tell_covered(claim, position, copy)

    def _tell_covered(self, claim: Claim, position: int, block: int) -> None:
        """Of what a tier keeps, with the content: a failed restore is told by it."""
        named = {"prefix_id": claim.key_at(position)} if claim.offloadable else {}
        told = {"position": position, "block_id": block, **named}
        self._emit("resident_block_materialized", claim, **told)

    def _uncover(self, claim: Claim, position: int) -> None:
        """A responsible claim no longer covers `position`, and wants it again."""
        self._unlink(claim, claim.cover.pop(position))
        self._want(claim, position)

    def _link(self, claim: Claim, block: int) -> None:
        self._concerns.setdefault(block, set()).add(claim.spec.claim_id)
        self._guard(claim, block, 1)

    def _unlink(self, claim: Claim, block: int) -> None:
        self._concerns[block].discard(claim.spec.claim_id)
        if not self._concerns[block]:
            del self._concerns[block]
        self._guard(claim, block, -1)

    def _guard(self, claim: Claim, block: int, by: int) -> None:
        if claim.hard and claim.responsible:
            self._guards[block] += by
            if not self._guards[block]:
                del self._guards[block]

    def _concerned(self, lost: Mapping[int, str]) -> list[Claim]:
        """The claims that have one of these blocks in their cover, in order of declaration."""
        return self._in_order({c for block in lost for c in self._concerns.get(block, ())})

    def _in_order(self, claim_ids: Iterable[str]) -> list[Claim]:
        return sorted((self.claims[c] for c in claim_ids), key=lambda claim: claim.order)

    def _materialize(self, claim: Claim) -> None:
        if len(claim.cover) < claim.footprint:
            waits = claim.offloadable and claim.phase is Phase.ACCEPTED
            if waits and all(map(self._is_kept, claim.keys)) and not self._awaits_block(claim):
                self._settle_in_tier(claim)
            return
        if claim.phase is Phase.RESTORING:
            self._restored(claim)
        if claim.phase is not Phase.ACCEPTED:
            return
        self._tell_materialized(claim)
        self._pool.tell("materialize", c=claim.name)

    def _tell_materialized(self, claim: Claim) -> None:
        claim.phase, claim.whole, claim.unsaved = Phase.MATERIALIZED, True, ""
        leading, survivors = self._survival(claim)
        self._emit("resident_claim_materialized", claim, leading=leading, survivors=survivors)

    # -- losing and ending -------------------------------------------------------------------------

    def _harm(self, claim: Claim, cause: Cause) -> None:
        before, phase = claim.record(claim.footprint, claim.footprint), claim.phase
        claim.cause = cause
        self._leave(claim, Phase.HARMED)
        after = claim.record(*self._survival(claim, self._pool.survives))
        if phase is Phase.ACCEPTED:
            self._depart(claim)
        self._emit("resident_claim_harmed", claim, cause=cause.value, before=before, after=after)
        self._drop_pins(claim)
        self._forget(claim)

    def _forsake(self, claim: Claim, position: int) -> None:
        """An accepted claim loses a block before it was materialized; a hard one by a fault.

        It is promised another block; where none is left to promise, it is demoted.
        """
        if not claim.responsible:  # demoted for an earlier position
            self._unlink(claim, claim.cover.pop(position))
        elif not claim.hard:
            self._uncover(claim, position)
        elif self._pool.ref(claim.cover[position]) > 1 and self.headroom() < 1:
            self._finish(claim, Phase.DEMOTED)
            self._unlink(claim, claim.cover.pop(position))
        else:
            block = claim.cover[position]
            self._uncover(claim, position)
            self._pool.unpin((block,))
            self.owed += 1
            self._pool.tell("forsake", c=claim.name, b=block)

    def _tell_late_loss(self, claim: Claim, gone: Sequence[int]) -> None:
        for position in gone:
            block = claim.cover.pop(position)
            self._unlink(claim, block)
            key = claim.key_at(position)
            if claim.offloadable and self._is_kept(key):
                self._after.setdefault(key, {})[claim.spec.claim_id] = position
            else:
                self._tell_one_late_loss(claim, position, block)

    def _tell_one_late_loss(self, claim: Claim, position: int, block: int) -> None:
        self._emit(
            "block_lost_after_release",
            claim,
            position=position,
            block_id=block,
            phase=claim.phase.value,
        )

    def _finish(self, claim: Claim, how: Phase) -> None:
        """Demotion, expiry or release: protection ends, content stays (L6)."""
        before = claim.phase
        covered = len(claim.cover)
        self._leave(claim, how)
        self._emit(_ENDINGS[how], claim, phase_before=before.value, covered=covered)
        self._tell(claim, "finish", how=how.value)
        self._drop_pins(claim)
        if claim.departed:
            for position in claim.granted.positions:
                if position not in claim.cover:
                    self._after.setdefault(claim.key_at(position), {})[claim.spec.claim_id] = (
                        position
                    )

    def _leave(self, claim: Claim, to: Phase) -> None:
        """Out of responsibility: nothing is owed or wanted any more."""
        self.owed -= claim.owed
        for block in claim.cover.values():
            self._guard(claim, block, -1)
        if claim.hard:
            self.share.give(claim.spec.owner, claim.footprint)
        if claim.offloadable:
            self.tier_share.give(claim.spec.owner, claim.footprint)
        self._in_force[claim.spec.owner] -= 1
        self._preferring -= claim.spec.protection in PREFERRED
        if not self._in_force[claim.spec.owner]:
            del self._in_force[claim.spec.owner]
        self._ended[claim.spec.claim_id] = None
        if claim.offloadable and self.tier is not None:
            self.tier.release(claim.spec.claim_id, claim.keys)
        for position in claim.granted.positions:
            if position not in claim.cover and claim.phase is not Phase.OFFLOADED:
                self._unwant(claim, position)
        for block in claim.loans:
            del self._lender[block]
        claim.loans.clear()
        claim.phase = to
        self._timed.pop(claim.spec.claim_id, None)

    def _drop_pins(self, claim: Claim) -> None:
        """An ended hard claim lets go of its blocks, the last position first."""
        if not claim.hard or not claim.cover:
            return
        blocks = [claim.cover[p] for p in sorted(claim.cover, reverse=True)]
        self._pool.unpin(blocks)
        for block in blocks:
            self._pool.tell("uncover", c=claim.name, b=block)

    def _forget(self, claim: Claim) -> None:
        """What the claim covers, or had covered, is no longer followed."""
        for block in claim.cover.values():
            self._unlink(claim, block)
        claim.cover.clear()
        for key in claim.keys if self._after else ():
            self._after.get(key, {}).pop(claim.spec.claim_id, None)

    # -- small helpers ---------------------------------------------------------------------------

    def _responsible(self, claim_id: str) -> Claim:
        claim = self.claims.get(claim_id)
        if claim is None or not claim.responsible:
            raise BadOperation(f"no claim {claim_id!r} is in force")
        return claim

    def _survival(
        self, claim: Claim, is_there: Callable[[str], bool] | None = None
    ) -> tuple[int, int]:
        """Surviving positions: in a row from the start, and in all.  What is to be kept in a tier
        survives there."""
        tier = self._is_kept if claim.offloadable else lambda _: False
        found = is_there or self._pool.is_visible
        present = [found(key) or tier(key) for key in claim.keys]
        leading = present.index(False) if False in present else len(present)
        return leading, sum(present)

    def _emit_submitted(self, claim: Claim) -> None:
        spec = claim.spec
        self._emit(
            "resident_claim_submitted",
            claim,
            owner=spec.owner,
            protection=spec.protection.value,
            predicate=spec.predicate.to_json(),
            footprint=claim.footprint,
            duration=spec.duration,
        )

    def _emit(self, event: str, claim: Claim, **data: Any) -> None:
        self.version += 1  # whatever changes is told (T1), but for what is lent and comes back
        data.setdefault("prefix_id", claim.key_at(claim.granted.positions[-1]))
        self._recorder.emit(
            event, claim_id=claim.spec.claim_id, generation=claim.spec.generation, **data
        )
