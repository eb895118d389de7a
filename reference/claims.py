"""The claim book: which claims there are, how they were answered, where they stand (L1)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import itemgetter

from kvclaims.reference.pool import require
from kvclaims.spec.interface import BadOperation, ClaimSpec, ClaimView, Predicate
from kvclaims.spec.vocabulary import RESPONSIBLE, TERMINAL, Phase, Protection

RELEASED_PHASES = frozenset({Phase.DEMOTED, Phase.EXPIRED, Phase.RELEASED})
"""The ends after which a loss is told as `block_lost_after_release` (L4)."""


class ClaimBook:
    """The phases of all claims by name, one generation each a name of its own."""

    def __init__(self) -> None:
        self.phase: dict[str, Phase] = {}
        self.hard: dict[str, bool] = {}

    def submit(self, claim: str, *, hard: bool) -> None:
        require(self.phase.get(claim, Phase.ABSENT) is Phase.ABSENT, "the claim has been submitted")
        self.phase[claim] = Phase.SUBMITTED
        self.hard[claim] = hard

    def answer(self, claim: str, phase: Phase) -> None:
        """Accept or refuse a submitted claim (L2)."""
        self.require_phase(claim, Phase.SUBMITTED)
        self.phase[claim] = phase

    def materialize(self, claim: str) -> None:
        self.require_phase(claim, Phase.ACCEPTED)
        self.phase[claim] = Phase.MATERIALIZED

    def end(self, claim: str, phase: Phase) -> None:
        """A responsible claim reaches a terminal phase and stays there (L1)."""
        require(self.is_responsible(claim), "the runtime owes this claim nothing")
        self.phase[claim] = phase

    def is_responsible(self, claim: str) -> bool:
        return self.phase.get(claim) in RESPONSIBLE

    def has_ended(self, claim: str) -> bool:
        return self.phase.get(claim) in TERMINAL

    def require_phase(self, claim: str, *phases: Phase) -> None:
        require(self.phase.get(claim, Phase.ABSENT) in phases, f"the claim is not {phases[0]}")


@dataclass
class Claim:
    """A claim as declared to a runtime: the content it speaks of and the blocks it has.

    `keys` are the contents of its positions in order; `places` maps a position to the block
    that covers it, for an ended claim to the block that last did (until that one is lost).
    """

    spec: ClaimSpec
    granted: Predicate
    keys: dict[int, str]
    ends: int | None = None
    places: dict[int, int] = field(default_factory=dict)
    lent: dict[int, str] = field(default_factory=dict)
    """Block taken on its reserve → the content that a request computes there, while on loan."""

    @property
    def name(self) -> str:
        """The name of this generation in the claim book and in allocator steps."""
        return f"{self.spec.claim_id}#{self.spec.generation}"

    @property
    def hard(self) -> bool:
        return self.spec.protection is Protection.HARD

    def clip(self, blocks: int) -> None:
        """Speak of the first `blocks` positions only."""
        self.granted = self.granted.clipped(blocks)
        self.keys = {p: self.keys[p] for p in self.granted.positions}


class Declared:
    """The declared claims in order of declaration; of each id the latest generation counts."""

    def __init__(self) -> None:
        self._claims: dict[str, Claim] = {}

    def __iter__(self) -> Iterator[Claim]:
        return iter(list(self._claims.values()))

    def get(self, claim_id: str) -> Claim:
        if claim_id not in self._claims:
            raise BadOperation(f"no claim {claim_id!r}")
        return self._claims[claim_id]

    def named(self, name: str) -> Claim:
        """The claim of this name in the claim book."""
        return self._claims[name.rpartition("#")[0]]

    def check_new(self, spec: ClaimSpec, book: ClaimBook) -> None:
        """An id returns only when its last generation has ended, with a higher one (L1)."""
        last = self._claims.get(spec.claim_id)
        if last is None:
            return
        if not book.has_ended(last.name):
            raise BadOperation(f"claim {spec.claim_id!r} has not ended")
        if spec.generation <= last.spec.generation:
            raise BadOperation(f"claim {spec.claim_id!r} needs a higher generation")

    def add(self, claim: Claim) -> None:
        self._claims.pop(claim.spec.claim_id, None)
        self._claims[claim.spec.claim_id] = claim

    def due(self, now: int, book: ClaimBook) -> list[Claim]:
        """Responsible claims whose time is up, in order of their end, then of declaration (L6)."""
        responsible = [c for c in self if book.is_responsible(c.name)]
        timed = [(c.ends, c) for c in responsible if c.ends is not None and c.ends <= now]
        return [claim for _, claim in sorted(timed, key=itemgetter(0))]


def view(claim: Claim, phase: Phase, leading: int, survivors: int, reserve: int) -> ClaimView:
    """What an observer sees of a claim."""
    return ClaimView(
        phase=phase,
        generation=claim.spec.generation,
        protection=claim.spec.protection,
        footprint=claim.granted.n,
        leading=leading,
        survivors=survivors,
        covered=len(claim.places) if phase in RESPONSIBLE else 0,
        reserve=reserve,
    )
