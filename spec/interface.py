"""What a conforming runtime can be told and asked.

Litmus programs, the fuzzer, the reference and the adapters of live engines meet here, so that
a program means the same everywhere.  An engine registers an `Engine` under the entry point
group `kvclaims.engines`; what it cannot express it raises as `NotExposed`, which is reported
as such and never counted as passed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, Protocol

from kvclaims.spec.telemetry import Event
from kvclaims.spec.vocabulary import Decision, Outcome, Phase, Protection


class NotExposed(Exception):
    """The engine has no such feature, or none that can be observed."""


class EngineMissing(Exception):
    """The engine cannot run here; the message says what is missing and how to install it."""


class BadOperation(ValueError):
    """An operation that no runtime accepts (unknown id, negative size); nothing has changed."""


class PredicateKind(StrEnum):
    LEADING = "leading_prefix_at_least"
    RANGE = "contiguous_range"


@dataclass(frozen=True)
class Predicate:
    """Which logical block positions must survive: `start` to `start + n` (start 0 if leading)."""

    kind: PredicateKind
    n: int
    start: int = 0

    def __post_init__(self) -> None:
        if self.n <= 0 or self.start < 0:
            raise BadOperation("a predicate needs n > 0 blocks and a start of at least 0")
        if self.kind is PredicateKind.LEADING and self.start != 0:
            raise BadOperation("a leading prefix starts at position 0")

    @property
    def positions(self) -> range:
        return range(self.start, self.start + self.n)


MOST_BLOCKS: Final = 1_000_000
"""Larger pools are taken for a slip of the pen: no check here could cover one."""


@dataclass(frozen=True)
class PoolConfig:
    """The pool a runtime opens.  `usable` blocks (null block excluded) of `block_size` tokens."""

    usable: int
    block_size: int = 16
    defer_limit: int = 1
    """How often a structurally blocked request is deferred before it is refused (F4)."""

    def __post_init__(self) -> None:
        if self.usable <= 0 or self.block_size <= 0 or self.defer_limit < 0:
            raise BadOperation("a pool needs usable > 0, block_size > 0 and defer_limit >= 0")
        if self.usable > MOST_BLOCKS or self.block_size > MOST_BLOCKS:
            raise BadOperation(f"a pool of more than {MOST_BLOCKS:,} blocks or tokens a block")


@dataclass(frozen=True)
class ClaimSpec:
    """A claim as its owner submits it.  `tokens` is the content that the predicate speaks of.

    `duration` is in time units (`Runtime.advance`), None for no end; `min_blocks` lets the
    runtime clip a leading prefix down to that many blocks (L2), None asks for all or nothing.
    """

    claim_id: str
    tokens: tuple[int, ...]
    predicate: Predicate
    protection: Protection = Protection.HARD
    generation: int = 1
    owner: str = "owner"
    duration: int | None = None
    min_blocks: int | None = None
    salt: str = ""


@dataclass(frozen=True)
class ClaimAnswer:
    """The decision on a claim, with its numbers in blocks (L2).

    `cost` is what the claim would take from the headroom: its footprint less the blocks that
    are protected or held already.  `granted` is the predicate in force, None if refused.
    """

    decision: Decision
    reason: str
    cost: int
    headroom: int
    granted: Predicate | None


@dataclass(frozen=True)
class RequestSpec:
    """An active request: prompt `tokens`, then `max_new_tokens` decoded (at least 1).

    `admit_reuse` False is write no-admit: it may read the cache and registers nothing (P4).
    """

    request_id: str
    tokens: tuple[int, ...]
    max_new_tokens: int = 1
    admit_reuse: bool = True
    salt: str = ""


@dataclass(frozen=True)
class ClaimView:
    """`leading` counts surviving positions from the predicate's start, `survivors` all of them;
    `covered` blocks are protected by this claim, `reserve` are promised and not yet covered."""

    phase: Phase
    generation: int
    protection: Protection
    footprint: int
    leading: int
    survivors: int
    covered: int
    reserve: int


@dataclass(frozen=True)
class RequestView:
    """`state` is waiting, running or finished; `outcome` is PENDING until there is one;
    `blocks` are the block ids it holds, in logical order; blame and shortfall as in F4."""

    state: str
    outcome: Outcome
    blocks: tuple[int, ...] = ()
    hit_blocks: int = 0
    shortfall: int = 0
    blocking_claims: tuple[str, ...] = ()


@dataclass(frozen=True)
class Observation:
    """The whole visible state.  `free` counts blocks in the free queue; `headroom` is F2's;
    `resident` maps the content id (`spec.content.content_ids`) of every visible hash to a block."""

    usable: int
    free: int
    headroom: int
    claims: Mapping[str, ClaimView]
    requests: Mapping[str, RequestView]
    resident: Mapping[str, int]


@dataclass(frozen=True)
class BlockFacts:
    """What the engine's own data says of a block after a step (B1 to B3)."""

    ref: int
    queued: bool
    keys: tuple[str, ...]
    """Content ids (or the engine's hashes) that this block is found under."""


@dataclass(frozen=True)
class PoolStep:
    """One allocator step, told as an action of the machine in `spec.pool`.

    `args` names the machine's parameters (request and claim ids as text, block ids as int,
    content as text); `facts` is what the engine holds of the touched blocks afterwards, and
    `free` its free-block counter then, None in the midst of an operation.
    """

    action: str
    args: Mapping[str, Any]
    facts: Mapping[int, BlockFacts] = field(default_factory=dict)
    free: int | None = None


@dataclass(frozen=True)
class PoolSnapshot:
    """The whole pool, read from the engine's own structures, for a deep audit.

    `queue` walks the free queue from its head; `counter` is what the queue says of itself;
    `facts` covers every block but the null block; `holders` maps requests to their blocks;
    `lookup` maps content to the blocks found under it.
    """

    null_block: int | None
    queue: tuple[int, ...]
    counter: int
    facts: Mapping[int, BlockFacts]
    holders: Mapping[str, tuple[int, ...]]
    pins: Mapping[str, tuple[int, ...]]
    lookup: Mapping[str, tuple[int, ...]]


class Runtime(Protocol):
    """A pool with its scheduler, open for one run.  Operations raise `BadOperation` on wrong
    input and then change nothing; `step` runs one scheduling step to its end."""

    config: PoolConfig

    def declare(self, claim: ClaimSpec) -> ClaimAnswer: ...
    def release(self, claim_id: str) -> None: ...
    def demote(self, claim_id: str) -> None: ...
    def renew(self, claim_id: str, duration: int) -> None: ...
    def submit(self, request: RequestSpec) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def step(self) -> None: ...
    def advance(self, ticks: int) -> None:
        """Let time pass; claims whose duration ends expire (L6)."""

    def reset(self) -> bool:
        """Drop all cached content; False, changing nothing, while any block is in use (B10)."""

    def lose(self, tokens: tuple[int, ...], position: int, salt: str = "") -> bool:
        """A device fault takes the resident block at `position`; False if it was not resident."""

    def locate(self, tokens: tuple[int, ...], salt: str = "") -> tuple[int | None, ...]:
        """The block id that each full block of `tokens` would be found in, None where absent."""

    def fingerprint(self, blocks: tuple[int, ...]) -> tuple[int, ...]:
        """A digest of the KV bytes in each block, from memory, not from bookkeeping."""

    def observe(self) -> Observation: ...
    def snapshot(self) -> PoolSnapshot: ...
    def events(self) -> tuple[Event, ...]:
        """The trace since the runtime was opened."""

    def listen(self, listener: Callable[[PoolStep], None]) -> None:
        """Tell `listener` every allocator step from now on."""

    def close(self) -> None:
        """End the trace.  No operation is allowed afterwards."""


@dataclass(frozen=True)
class EngineInfo:
    """Which engine judged what: `path` is where its code was imported from."""

    name: str
    version: str
    path: str


class Engine(Protocol):
    """The object behind an entry point of the group `kvclaims.engines`.

    `block_size` is the one it runs programs with, in tokens; `package` the import package whose
    code is under test, None for an engine that is part of `kvclaims`; `faults` the file of the
    faults that can be planted in it, None where there are none.
    """

    @property
    def name(self) -> str: ...

    @property
    def block_size(self) -> int: ...

    @property
    def package(self) -> str | None: ...

    @property
    def faults(self) -> Path | None: ...

    def info(self) -> EngineInfo:
        """Raises `EngineMissing` where it cannot run."""

    def open(self, config: PoolConfig, run_id: str) -> Runtime: ...


class Stepper(Protocol):
    """A runtime driven one machine action at a time, for conformance in both directions.

    Only a runtime written for it (the reference) offers one, through `Engine.stepper`.
    """

    def apply(self, action: str, args: Mapping[str, Any]) -> bool:
        """Take the step; False, changing nothing, where the runtime refuses it."""

    def state(self) -> Mapping[str, Any]:
        """The whole state under the machine's names: relation or function to its graph."""

    def clone(self) -> Stepper: ...
