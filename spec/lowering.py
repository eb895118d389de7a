"""Fail-closed lowering of claims onto runtimes: obligations, depths, evidence and verdicts.

A protection mode is supported at an adapter depth only if every obligation of the mode has
evidence that is anchored (a probe, a trace, a document with its version) and allowed at that
depth; anything not shown is unknown (arXiv 2606.01387).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum, StrEnum
from typing import Final

from kvclaims.spec.vocabulary import Protection


class Lowering(StrEnum):
    """How far a runtime keeps what a mode owes."""

    NATIVE = "native"
    OBSERVATIONAL = "adapter (observational)"
    POLICY = "adapter (policy)"
    APPROXIMATE = "approximate"
    REJECTED = "rejected"
    UNKNOWN = "unknown"


class Depth(IntEnum):
    """How deep an adapter reaches into the runtime; each depth includes those before it."""

    NONE = 0
    TELEMETRY = 1
    POLICY = 2
    PATCH = 3


class Obligation(StrEnum):
    """What a mode needs of the runtime beneath it."""

    IDENTITY = "claim_identity"
    """The claim has an id of its own before anything is decided about it."""
    ACCEPTANCE = "explicit_acceptance"
    """Acceptance or refusal is an answer, not the absence of an error."""
    PREDICATE = "materialization_predicate"
    """Whether the predicate holds can be decided from what is observed."""
    ORDER = "ordered_lifecycle_events"
    """Lifecycle events come in an order that a reader can rely on."""
    EVICTION_ORDER = "eviction_order"
    """What is preferred goes later than what is not."""
    PROTECTION = "no_loss_by_own_choice"
    """The runtime never evicts protected blocks by its own choice."""
    REFUSAL = "refusal_with_blame"
    """A request that claims block is refused and told which."""
    EXPIRY = "end_by_time"
    """Protection ends by itself at a known time."""
    RELEASE = "release_before_loss"
    """Protection can be given up before blocks are lost."""
    REGISTERED = "claim_registered_beforehand"
    """The tier knows the claim before the restore it is for."""
    OBJECT = "reusable_object_id"
    CACHE_IDENTITY = "fixed_cache_identity_and_token_map"
    RESTORE = "restorability"
    """What is offloaded is there to be restored: a lookup promises nothing (O3)."""
    RESTORE_FAILURE = "restoration_failure_outcome"
    """A failed restore has an outcome of its own, blamed on its own claim (O2)."""


_EVERY_CLAIM: Final = frozenset(
    {Obligation.IDENTITY, Obligation.ACCEPTANCE, Obligation.PREDICATE, Obligation.ORDER}
)

OWED: Final[Mapping[Protection, frozenset[Obligation]]] = {
    Protection.BEST_EFFORT: frozenset({Obligation.IDENTITY, Obligation.PREDICATE}),
    Protection.SOFT: _EVERY_CLAIM | {Obligation.EVICTION_ORDER},
    Protection.EXPIRING: _EVERY_CLAIM | {Obligation.PROTECTION, Obligation.EXPIRY},
    Protection.DEMOTABLE: _EVERY_CLAIM | {Obligation.PROTECTION, Obligation.RELEASE},
    Protection.HARD: _EVERY_CLAIM | {Obligation.PROTECTION, Obligation.REFUSAL},
    Protection.OFFLOADABLE: _EVERY_CLAIM
    | {
        Obligation.REGISTERED,
        Obligation.OBJECT,
        Obligation.CACHE_IDENTITY,
        Obligation.RESTORE,
        Obligation.RESTORE_FAILURE,
    },
}
"""The obligations of each mode."""


class Way(StrEnum):
    """How the runtime comes to meet an obligation."""

    OWN = "own"
    """Its own code does it, no adapter needed."""
    JOINED = "joined"
    """An adapter joins what the runtime emits; it changes nothing."""
    STEERED = "steered"
    """An adapter uses a policy knob; it holds under the pressure it was shown under."""
    PATCHED = "patched"
    """An adapter replaces a part of the runtime."""
    NEARLY = "nearly"
    """Only in part: the difference is stated."""


DEPTH_OF: Final[Mapping[Way, Depth]] = {
    Way.OWN: Depth.NONE,
    Way.JOINED: Depth.TELEMETRY,
    Way.STEERED: Depth.POLICY,
    Way.PATCHED: Depth.PATCH,
    Way.NEARLY: Depth.NONE,
}
"""The least adapter depth at which evidence of a kind is allowed."""


class Anchor(StrEnum):
    """Where evidence can be looked up again."""

    PROBE = "probe"
    """A run of this project, done again each time the profile is lowered."""
    TRACE = "trace"
    """A recorded trace that the audit reads."""
    DOCUMENT = "document"
    """A document with its version and place."""
