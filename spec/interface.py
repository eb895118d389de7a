"""What a conforming runtime can be told and asked.

Litmus programs, the fuzzer, the reference and the adapters of live engines meet here, so that
a program means the same everywhere.  An engine registers an `Engine` under the entry point
group `kvclaims.engines`; what it cannot express it raises as `NotExposed`, which is reported
as such and never counted as passed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

from kvclaims.spec.content import cache_domain
from kvclaims.spec.fidelity import Fidelity, satisfies
from kvclaims.spec.telemetry import Event
from kvclaims.spec.vocabulary import Decision, Outcome, Phase, Protection


class NotExposed(Exception):
    """The engine has no such feature, or none that can be observed."""


class EngineMissing(Exception):
    """The engine cannot run here; the message says what is missing and how to install it."""


class BadOperation(ValueError):
    """An operation that no runtime accepts (unknown id, negative size); nothing has changed."""


class PredicateKind(StrEnum):
    """Which surviving positions a claim asks for: a prefix, or a range anywhere."""

    LEADING = "leading_prefix_at_least"
    RANGE = "contiguous_range"


@dataclass(frozen=True)
class Predicate:
    """Which logical block positions must survive: `start` to `start + n` (start 0 if leading)."""

    kind: PredicateKind
    n: int
    start: int = 0
    fidelity: Fidelity = Fidelity.EXACT
    """What "survive" means (contract, *Terms*)."""
    bound: float | None = None
    """The largest error of an element that `bounded_loss` may have; None for whatever bound was
    fixed when it was stored."""

    def __post_init__(self) -> None:
        if self.n <= 0 or self.start < 0:
            raise BadOperation("a predicate needs n > 0 blocks and a start of at least 0")
        if self.bound is not None and (
            self.fidelity is not Fidelity.BOUNDED_LOSS or not 0 < self.bound < math.inf
        ):
            raise BadOperation("a bound is a positive number, and goes with bounded_loss")
        if self.kind is PredicateKind.LEADING and self.start != 0:
            raise BadOperation("a leading prefix starts at position 0")

    @property
    def positions(self) -> range:
        """Logical positions of blocks that have to survive."""
        return range(self.start, self.start + self.n)

    def clipped(self, n: int) -> Predicate:
        """The same of fewer positions (L2)."""
        return replace(self, n=n)

    def to_json(self) -> dict[str, Any]:
        """As events carry it: `fidelity` only where it is not exact, `bound` where there is one."""
        record: dict[str, Any] = {"kind": self.kind.value, "start": self.start, "n": self.n}
        if self.fidelity is not Fidelity.EXACT:
            record["fidelity"] = self.fidelity.value
        if self.bound is not None:
            record["bound"] = self.bound
        return record


MOST_BLOCKS: Final = 1_000_000
"""Larger pools are taken for a slip of the pen: no check here could cover one."""


FCFS: Final = "fcfs"
PRIORITY: Final = "priority"


class Feature(StrEnum):
    """What an engine may have beyond the plain pool (`Engine.features`); others are not drawn by
    the fuzzer and reported as `not_exposed`."""

    CHUNKING = "chunking"
    """`PoolConfig.token_budget`."""
    PRIORITY = "priority"
    """`PoolConfig.policy` may be `priority`."""
    DISPATCH = "dispatch"
    """`Runtime.dispatch` and `Runtime.complete` in place of `step`."""
    IN_FLIGHT = "in_flight"
    """`PoolConfig.in_flight` may be 2."""
    EXTERNAL = "external"
    """`PoolConfig.connector`, `RequestSpec.external` and `Runtime.load`."""
    ADAPTER = "adapter"
    MODALITY = "modality"
    SLEEP = "sleep"
    """`Runtime.sleep` and `Runtime.wake`."""
    OFFLOAD = "offload"
    """`PoolConfig.host_blocks`, `Runtime.offload` and `Runtime.restore`."""
    DRAFTS = "drafts"
    """`PoolConfig.drafts`."""
    WINDOWS = "windows"
    """`PoolConfig.windows` may be other than one full-attention group."""
    KV_EVENTS = "kv_events"
    """`Runtime.kv_events`."""
    LENDING = "lending"
    """Its runtimes are `Lender`: part of the pool comes and goes."""
    FINGERPRINTS = "fingerprints"
    """Memory holds `spec.content.fingerprint` values; without it, digests are learned."""
    FIDELITY = "fidelity"
    """`PoolConfig.fidelity` may be other than exact."""


@dataclass(frozen=True)
class PoolConfig:
    """The pool a runtime opens.  `usable` blocks (null block excluded) of `block_size` tokens."""

    usable: int
    block_size: int = 16
    defer_limit: int = 1
    """How often a structurally blocked request is deferred before it is refused (F4)."""
    token_budget: int = 0
    """Tokens that one step may compute (chunked prefill); 0 for no limit."""
    policy: str = FCFS
    """Order of waiting: `fcfs`, or `priority` (the lower number first, then arrival)."""
    in_flight: int = 1
    """Steps that may be dispatched and not complete; more than 1 is asynchronous scheduling."""
    host_blocks: int = 0
    """Blocks of a host tier that offloaded claims may use; 0 for none (O1)."""
    drafts: int = 0
    """Speculative tokens that each decode step drafts; a request says how many are accepted."""
    windows: tuple[int, ...] = (0,)
    """One KV group each: 0 for full attention, else the tokens of its sliding window."""
    fidelity: Fidelity = Fidelity.EXACT
    """What is served of a block that survives: the class of the mechanism that keeps its KV.  A
    claim that asks for more than this class gives is refused (L2)."""
    bound: float | None = None
    """With `bounded_loss`, the largest error of an element; None where none is known."""
    connector: int = 0
    """1: a connector loads what requests are offered (`RequestSpec.external`); 2: it may also send
    what a request leaves, whose blocks stay (`ending`) until that is done; 0: there is none."""

    def gives(self, asked: Predicate) -> bool:
        """Whether what survives in this pool is what the predicate asks for."""
        if not satisfies(self.fidelity, asked.fidelity):
            return False
        if asked.bound is None or self.fidelity is not Fidelity.BOUNDED_LOSS:
            return True
        return self.bound is not None and self.bound <= asked.bound

    def __post_init__(self) -> None:
        if self.policy not in (FCFS, PRIORITY) or not self.windows or min(self.windows) < 0:
            raise BadOperation("a policy is fcfs or priority, and there is at least one KV group")
        if self.token_budget < 0 or self.in_flight < 1 or self.host_blocks < 0 or self.drafts < 0:
            raise BadOperation(
                "token_budget, host_blocks and drafts count from 0, in_flight from 1"
            )
        if self.bound is not None and (
            self.fidelity is not Fidelity.BOUNDED_LOSS or not 0 <= self.bound < math.inf
        ):
            raise BadOperation("the bound of a pool is 0 or more, and goes with bounded_loss")
        if self.connector not in (0, 1, 2):
            raise BadOperation("a connector is 0 (none), 1 (loads) or 2 (sends as well)")
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
    adapter: str = ""
    modality: str = ""

    @property
    def domain(self) -> str:
        """Everything but tokens that the content's identity depends on."""
        return cache_domain(self.salt, self.adapter, self.modality)


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
    adapter: str = ""
    """The adapter (LoRA) that computes it: other KV for the same tokens."""
    modality: str = ""
    """The input (an image, say) that the tokens of the first block stand for."""
    priority: int = 0
    external: int = 0
    """Full blocks from position 0 that the pool's connector offers to load (asynchronously)."""
    accepts: int = 0
    """Drafts of each decode step that turn out right (`PoolConfig.drafts`)."""

    @property
    def domain(self) -> str:
        """Everything but tokens that the content's identity depends on."""
        return cache_domain(self.salt, self.adapter, self.modality)


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
    """`state` is waiting, loading (it holds blocks that a transfer fills), running, ending (it is
    over, and something in flight still reads or writes its blocks) or finished;
    `outcome` is PENDING until there is one; `blocks` are the block ids it holds, in logical
    order; blame and shortfall as in F4.

    `computed` counts the leading tokens whose KV the next step may read from these blocks (those
    of completed steps, loads and hits); None where the engine does not tell.
    """

    state: str
    outcome: Outcome
    blocks: tuple[int, ...] = ()
    hit_blocks: int = 0
    shortfall: int = 0
    blocking_claims: tuple[str, ...] = ()
    computed: int | None = None
    tables: tuple[tuple[int, ...], ...] = ()
    """In a pool with windows the table of each KV group, 0 for a block that left its window;
    `blocks` are all of them then, in no order."""


@dataclass(frozen=True)
class Observation:
    """The whole visible state.  `free` counts blocks in the free queue; `headroom` is F2's;
    `resident` maps the content id (`spec.content.content_ids`) of every visible hash to a block.

    `lent` are the blocks of a `Lender` that are mapped as KV now.  `usable` and `free` count them;
    `headroom`, which hard claims are accepted against, does not (E3)."""

    usable: int
    free: int
    headroom: int
    claims: Mapping[str, ClaimView]
    requests: Mapping[str, RequestView]
    resident: Mapping[str, int]
    lent: tuple[int, ...] = ()


class BlockFacts(NamedTuple):  # this and the next are made in every step: tuples are made fast
    """What the engine's own data says of a block after a step (B1 to B3)."""

    ref: int
    queued: bool
    keys: tuple[str, ...]
    """Content ids (or the engine's hashes) that this block is found under."""


_NO_FACTS: Final[Mapping[int, BlockFacts]] = {}


class PoolStep(NamedTuple):
    """One allocator step, told as an action of the machine in `spec.pool`.

    `args` names the machine's parameters (request and claim ids as text, block ids as int,
    content as text), and `of` the block in whose place in the request's table this one comes,
    where a request's content is moved; `facts` is what the engine holds of the touched blocks
    afterwards, and `free` its free-block counter then, None in the midst of an operation.
    """

    action: str
    args: Mapping[str, Any]
    facts: Mapping[int, BlockFacts] = _NO_FACTS
    free: int | None = None


@dataclass(frozen=True)
class MemoryStep:
    """One step of the machine in `spec.elastic`, told in its place among the allocator's steps.

    Of the steps on blocks only those are told that no allocator step implies: `list`, `drain`,
    `touch` and `done`.
    """

    action: str
    args: Mapping[str, Any]


@dataclass(frozen=True)
class Reserve:
    """What a `Lender` may lend: `blocks`, whose memory each of the `layers` has one stretch of.

    A request ends when it is `longest` tokens long: what more it needs would not fit without what
    is lent.
    """

    layers: int
    blocks: tuple[int, ...]
    longest: int


@dataclass(frozen=True)
class KvEvent:
    """What an engine tells routers of its cache (B8): `kind` is stored, removed or cleared;
    `keys` are content ids, empty for cleared; `tier` is device or host."""

    kind: str
    keys: tuple[str, ...] = ()
    tier: str = "device"


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

    def declare(self, claim: ClaimSpec) -> ClaimAnswer:
        """Decide on a claim at once, against every promise and need of this moment (L2, F2)."""

    def release(self, claim_id: str) -> None:
        """Its owner lets go: protection ends, content stays until it is evicted (P2)."""

    def demote(self, claim_id: str) -> None:
        """The runtime ends the claim's protection, and says so first (L3, L4)."""

    def renew(self, claim_id: str, duration: int) -> None:
        """The claim ends `duration` ticks from now.  `BadOperation` once it has ended (L6)."""

    def submit(self, request: RequestSpec) -> None:
        """A request arrives and waits; nothing is decided before the next step."""

    def abort(self, request_id: str) -> None:
        """The request ends; its blocks come back when nothing in flight touches them (B5, B7)."""

    def step(self) -> None:
        """Complete what is in flight, then one scheduling step to its end."""

    def dispatch(self) -> None:
        """Schedule a step and start it.  `BadOperation` while `in_flight` steps are running."""

    def complete(self) -> None:
        """The oldest step in flight ends: its KV is written, its tokens are known, requests
        finish, claims cover what was written (L7).  `BadOperation` where none is in flight."""

    def load(self, request_id: str, blocks: int) -> None:
        """A transfer for a loading request ends: the first `blocks` of those that it was to load
        were written, the rest failed and will be computed (O2).  `BadOperation` for a request
        that is not loading, or for more blocks than it loads."""

    def offload(self, claim_id: str) -> bool:
        """Copy a materialized offloadable claim to the host tier, then let go of its blocks (O1);
        False, changing nothing, where the tier has no room."""

    def restore(self, claim_id: str, succeeds: bool = True) -> bool:
        """Bring an offloaded claim back.  False, changing nothing, where there is no headroom
        for it.  A transfer that fails harms the claim by a fault, and nothing is served (O2)."""

    def sleep(self) -> bool:
        """Discard all KV and give the memory up; False, changing nothing, while a block is in
        use.  Asleep, no step begins."""

    def wake(self) -> None:
        """Memory is back, blank: nothing is visible until it is computed again (B10, B4)."""

    def kv_events(self) -> tuple[KvEvent, ...]:
        """What was told to routers since the last call."""

    def advance(self, ticks: int) -> None:
        """Let time pass; claims whose duration ends expire (L6)."""

    def reset(self) -> bool:
        """Drop all cached content; False, changing nothing, while any block is in use (B10)."""

    def lose(self, tokens: tuple[int, ...], position: int, salt: str = "") -> bool:
        """A device fault takes the resident block at `position`; False if it was not resident."""

    def locate(self, tokens: tuple[int, ...], salt: str = "") -> tuple[int | None, ...]:
        """`salt` is a whole cache domain here and in `lose` (`spec.content.cache_domain`).  The
        block id that each full block of `tokens` would be found in, None where absent."""

    def fingerprint(self, blocks: tuple[int, ...]) -> tuple[int, ...]:
        """A digest of the KV bytes in each block, from memory, not from bookkeeping.

        With `Feature.FINGERPRINTS` it is `spec.content.fingerprint` of what was last written
        there: the id of a full block's content, `partial_content` of one that is not full, or
        the empty text for memory that was never written.
        """

    def observe(self) -> Observation:
        """The whole state as anybody may see it: claims, requests, free blocks, content."""

    def snapshot(self) -> PoolSnapshot:
        """The whole pool from the engine's own structures, to compare what was told with."""

    def events(self) -> tuple[Event, ...]:
        """The trace since the runtime was opened."""

    def listen(self, listener: Callable[[PoolStep], None]) -> None:
        """Tell `listener` every allocator step from now on."""

    def close(self) -> None:
        """End the trace.  No operation is allowed afterwards."""


@runtime_checkable
class Lender(Protocol):
    """A runtime that lends a reserve to its pool and takes it back (E1 to E5)."""

    def lending(self, listener: Callable[[MemoryStep], None]) -> Reserve:
        """Tell `listener` every step of the memory from now on; nothing is lent yet."""


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
    def name(self) -> str:
        """As on the command line."""

    @property
    def block_size(self) -> int:
        """Tokens of a block."""

    @property
    def package(self) -> str | None:
        """The import package under test."""

    @property
    def faults(self) -> Path | None:
        """The file of faults that can be planted."""

    @property
    def features(self) -> frozenset[Feature]:
        """What its runtimes have beyond the plain pool."""

    def info(self) -> EngineInfo:
        """Raises `EngineMissing` where it cannot run."""

    def open(self, config: PoolConfig, run_id: str) -> Runtime:
        """A new pool with its scheduler, empty.  `BadOperation` for one that it cannot have."""


class Stepper(Protocol):
    """A runtime driven one machine action at a time, for conformance in both directions.

    Only a runtime written for it (the reference) offers one, through `Engine.stepper`.
    """

    def apply(self, action: str, args: Mapping[str, Any]) -> bool:
        """Take the step; False, changing nothing, where the runtime refuses it."""

    def state(self) -> Mapping[str, Any]:
        """The whole state under the machine's names: relation or function to its graph."""

    def clone(self) -> Stepper:
        """An independent one in the same state."""
