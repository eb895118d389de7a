"""The words of the contract: phases, protections, outcomes, causes, and the numbered rules.

Every other module speaks these words.  Nothing here decides anything; the machines in
`kvclaims.spec.claims` and `kvclaims.spec.pool` do.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Phase(StrEnum):
    """Where a claim stands in its life (rule L1)."""

    ABSENT = "absent"
    SUBMITTED = "submitted"
    ACCEPTED = "accepted"
    MATERIALIZED = "materialized"
    OFFLOADED = "offloaded"
    RESTORING = "restoring"
    REFUSED = "refused"
    DEMOTED = "demoted"
    EXPIRED = "expired"
    RELEASED = "released"
    HARMED = "harmed"


RESPONSIBLE: Final = frozenset(
    {Phase.ACCEPTED, Phase.MATERIALIZED, Phase.OFFLOADED, Phase.RESTORING}
)
"""The phases in which the runtime owes the claim something."""

TERMINAL: Final = frozenset(
    {Phase.REFUSED, Phase.DEMOTED, Phase.EXPIRED, Phase.RELEASED, Phase.HARMED}
)
"""The phases that end a generation of a claim; they absorb (rule L1)."""


class Protection(StrEnum):
    """What the runtime promises about the blocks of a claim."""

    HARD = "hard_protected"
    SOFT = "soft_priority"
    DEMOTABLE = "demotable"
    OFFLOADABLE = "offloadable"
    EXPIRING = "expiring"
    BEST_EFFORT = "best_effort"


PREFERRED: Final = frozenset({Protection.SOFT, Protection.DEMOTABLE, Protection.EXPIRING})
"""Protections whose content may be evicted, after all that no such claim covers."""


class Decision(StrEnum):
    """The reasoned answer to a submitted claim (rule L2)."""

    NONE = "none"
    ACCEPTED = "accepted"
    CLIPPED = "conditionally_accepted"
    REFUSED = "refused"


class Outcome(StrEnum):
    """How an active request facing the pool ends, or stands (rule F4)."""

    PENDING = "pending"
    SERVED = "served"
    SERVED_NO_ADMIT = "served_no_admit"
    DEFERRED = "deferred"
    REFUSED = "refused"
    CAPACITY_REQUIRED = "capacity_required"
    ABORTED = "aborted"


class Cause(StrEnum):
    """Why a predicate stopped holding (rules L3, L5)."""

    NONE = "none"
    OWN_CHOICE = "own_choice"
    """Allocation, eviction or the return of lent memory: the runtime's own doing."""
    FAULT = "fault"
    """Failed restore, device loss or operator reset: outside the runtime's control."""


class Feasibility(StrEnum):
    """Labels of the feasibility verdicts in traces (arXiv 2605.24259)."""

    FITS = "fits"
    ACTIVE_ACCUMULATION = "active_live_kv_accumulation"
    HEADROOM_EXHAUSTED = "protected_resident_headroom_exhausted"
    REQUIRES_DEFERRAL = "resident_protection_requires_deferral"
    CAPACITY_INFEASIBLE = "physical_capacity_infeasible"


class Verdict(StrEnum):
    """What a check found.  A verdict never rounds up."""

    PROVED = "PROVED"
    """For any number of blocks, claims and requests."""
    HOLDS = "HOLDS"
    """On this instance or in this run, completely."""
    VIOLATED = "VIOLATED"
    NOT_INDUCTIVE = "NOT INDUCTIVE"
    VACUOUS = "VACUOUS"
    UNKNOWN = "UNKNOWN"
    NOT_EXPOSED = "not_exposed"
    """The engine has no such thing; never counted as passed."""


EXIT_CODES: Final = {
    Verdict.PROVED: 0,
    Verdict.HOLDS: 0,
    Verdict.NOT_EXPOSED: 0,
    Verdict.VIOLATED: 1,
    Verdict.NOT_INDUCTIVE: 3,
    Verdict.VACUOUS: 3,
    Verdict.UNKNOWN: 3,
}
"""Process exit codes; 2 is kept for wrong usage and missing parts."""


@dataclass(frozen=True)
class Rule:
    """One numbered rule of the contract, with its one-line meaning."""

    number: str
    meaning: str


RULES: Final[dict[str, Rule]] = {
    number: Rule(number, meaning)
    for number, meaning in (
        ("L1", "a claim moves only along the transition table; ended generations stay ended"),
        ("L2", "acceptance comes before the first protected block, and is a reasoned decision"),
        ("L3", "harmed exactly when a responsible claim's predicate held and stopped holding"),
        ("L4", "no harm without acceptance, none after release; a later loss is its own event"),
        ("L5", "the runtime's own choice never harms a responsible hard claim"),
        ("L6", "expiry ends protection on time, deletes nothing, and nothing revives the claim"),
        ("L7", "materialized only while the predicate holds on blocks whose KV was written"),
        ("F1", "protected and active blocks, counted once each, fit the pool"),
        ("F2", "free unprotected blocks always cover every promise and every granted need"),
        ("F3", "an allocation is granted exactly when headroom stays at or above zero after it"),
        ("F4", "deferred, refused and capacity_required are told apart, with minimal blame"),
        ("F5", "a refusal or deferral changes no residency"),
        ("F6", "arbitration takes no more claims than it needs, and none that does not help"),
        ("P1", "a protected block is never given away, never loses its hash, never overwritten"),
        ("P2", "ending one claim frees exactly the blocks that no other claim protects"),
        ("P3", "a soft claim may lose blocks, but never silently"),
        ("P4", "a no-admit request never registers content"),
        ("P5", "a prefix claim is served as a prefix: a hit is the longest run from position 0"),
        ("B1", "a block is in the free queue exactly when nobody refers to it; the counter agrees"),
        ("B2", "the reference count equals the holders that can be named"),
        ("B3", "hash map and blocks agree both ways; a reused block keeps no hash"),
        ("B4", "a visible hash belongs to fully written KV of the content it names"),
        ("B5", "no block is reused while a reader or writer may touch it"),
        ("B6", "the null block is never allocated, freed, hashed or protected"),
        ("B7", "every end of a request returns its blocks in a bounded number of steps"),
        ("B8", "replaying the engine's KV events yields the resident hash set"),
        ("B9", "an operation that fails leaves the state as it was"),
        ("B10", "a reset that reports success leaves no visible hash in any tier"),
        ("B11", "admission is sound, and some request makes progress whenever one could"),
        ("Q1", "only its owner or the operator changes or reads a claim"),
        ("Q2", "an owner's hard claims stay within quota, all of them within the cap"),
        ("Q3", "blame reaches the operator in full, other owners as an opaque id and a size"),
        ("O1", "tier states come in order, and a restored claim names the tier"),
        ("O2", "a failed restore is never served"),
        ("O3", "recomputing is not restoring; a lookup promises nothing without a reservation"),
        ("E1", "memory is lent only while no prefill needs the reserve"),
        ("E2", "an unmapped block is not free, held, hashed or protected"),
        ("E3", "hard claims are accepted against the base alone"),
        ("E4", "lent memory returns in order: fence, drain, wait, unmap, map, set access"),
        ("E5", "lend and return are atomic, idempotent, and roll back on failure"),
        ("T1", "each transition emits one event; sequence numbers are dense; time never runs back"),
        ("T2", "folding the trace yields the state and every outcome with its attribution"),
        ("T3", "a trace that lacks a needed event is rejected, not repaired"),
        ("V1", "every submitted claim is decided"),
        ("V2", "every claim with a duration ends"),
        ("V3", "every deferred request ends"),
        ("V4", "a return of lent memory completes"),
    )
}
