"""What a supervisor knows of a run by itself: from the operations it did, not from answers.

Claims with their contents, requests with their tokens and their order, time, and which steps are
under way.  Only the lengths of requests that decode are read from observations.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from kvclaims.spec.content import GENERATED_TOKEN, content_ids, tokens_of
from kvclaims.spec.fidelity import may_be_cut
from kvclaims.spec.interface import (
    PRIORITY,
    BadOperation,
    ClaimSpec,
    Observation,
    PoolConfig,
    RequestSpec,
    RequestView,
)
from kvclaims.spec.operations import Operation, claim_spec, domain_of, request_spec
from kvclaims.spec.telemetry import Event
from kvclaims.spec.vocabulary import RESPONSIBLE, TERMINAL, Phase

_LEAVES_QUEUE: Final = (
    "active_request_admitted",
    "active_request_refused",
    "active_request_aborted",
)

DISPATCHING: Final = ("step", "dispatch")


@dataclass
class KnownRequest:
    """A request: `keys` are the contents of all blocks it can ever fill, `length` its tokens so
    far."""

    spec: RequestSpec
    tokens: tuple[int, ...]
    keys: tuple[str, ...]
    length: int
    arrival: int
    deferrals: int = 0
    """How often claims alone were in its way."""
    hits: int = 0
    loads: int = 0
    """Blocks that a transfer under way is to bring."""
    failed: range = range(0)
    """Positions whose transfer failed: whoever reads them before they are computed reads what
    was never loaded (O2)."""
    is_measured: bool = True
    """Its length is known: it was not preempted unseen."""

    @property
    def name(self) -> str:
        return self.spec.request_id

    @property
    def prompt(self) -> int:
        return len(self.spec.tokens)


@dataclass(frozen=True)
class KnownClaim:
    """One generation of a claim: its name in the machine, and its contents by position."""

    name: str
    spec: ClaimSpec
    keys: Mapping[int, str]
    fields: Mapping[str, Any] = field(default_factory=dict)


class Knowledge:
    """The supervisor's own book of one run."""

    def __init__(self, config: PoolConfig, longest: int | None = None) -> None:
        self.config = config
        self._longest = longest
        """Tokens at which every request ends, if there is such a limit."""
        self.now = 0
        self.is_asleep = False
        self.under_way: deque[frozenset[str]] = deque()
        """For each step dispatched and not complete, the requests that it computes for."""
        self.requests: dict[str, KnownRequest] = {}
        self.aborted: set[str] = set()
        self.taken: set[str] = set()
        """Contents that a fault took at some time."""
        self.claims: dict[str, KnownClaim] = {}
        self.ends: dict[str, int] = {}
        self._queue: list[str] = []
        self._tells_computed = True

    @property
    def has_windows(self) -> bool:
        """Whether requests let go of blocks while they run, or have several KV groups."""
        return self.config.windows != (0,)

    def blocks(self, tokens: int) -> int:
        """How many blocks that many tokens take, in all KV groups, none let go of."""
        return -(-tokens // self.config.block_size) * len(self.config.windows)

    # -- what is legal

    def is_legal(self, operation: Operation, before: Observation) -> bool:
        """Whether a runtime in this state has to accept the operation."""
        fields = operation.fields
        match operation.op:
            case "release" | "demote" | "renew":
                claim = before.claims.get(fields["claim"])
                return claim is not None and claim.phase in RESPONSIBLE
            case "abort" | "load":
                return self._may_end(operation, before.requests.get(fields["request"]))
            case "submit":
                known = fields["request"] in before.requests
                return not known and bool(tokens_of(fields["content"], self.config.block_size))
            case "lose":
                tokens = tokens_of(fields["content"], self.config.block_size)
                return bool(fields["position"] < len(tokens) // self.config.block_size)
            case "declare":
                return self._may_declare(fields, before)
            case "step" | "sleep":
                return not self.is_asleep
            case "dispatch":
                return not self.is_asleep and len(self.under_way) < self.config.in_flight
            case "complete":
                return bool(self.under_way)
            case "wake":
                return self.is_asleep
        return True

    def _may_end(self, operation: Operation, view: RequestView | None) -> bool:
        if view is None:
            return False
        if operation.op == "abort":
            return view.state not in ("finished", "ending")
        request = self.requests[operation.fields["request"]]
        may = view.state in ("loading", "ending") and request.loads > 0
        return may and bool(operation.fields["blocks"] <= request.loads)

    def _may_declare(self, fields: Mapping[str, Any], before: Observation) -> bool:
        try:
            spec = claim_spec(fields, self.config.block_size)
        except BadOperation:
            return False
        full = len(spec.tokens) // self.config.block_size
        if spec.predicate.positions.stop > full:
            return False
        if not may_be_cut(spec.predicate.fidelity) and (spec.predicate.n, spec.min_blocks) != (
            full,
            None,
        ):
            return False
        last = before.claims.get(spec.claim_id)
        return last is None or (last.phase in TERMINAL and spec.generation > last.generation)

    # -- what an accepted operation brings

    def meet(self, operation: Operation, answer: Any = None) -> None:
        fields, size = operation.fields, self.config.block_size
        match operation.op:
            case "declare":
                self._meet_claim(claim_spec(fields, size), fields)
            case "submit":
                self._meet_request(request_spec(fields, size))
            case "advance":
                self.now += fields["ticks"]
            case "renew":
                self.ends[fields["claim"]] = self.now + fields["duration"]
            case "abort":
                self.aborted.add(fields["request"])
            case "lose":
                self.taken.add(self.lost_key(operation))
            case "load":
                request = self.requests[fields["request"]]
                first = request.hits + fields["blocks"]
                request.failed = range(first, request.hits + request.loads)
                request.loads = 0
            case "sleep":
                self.is_asleep = bool(answer)
            case "wake":
                self.is_asleep = False
            case "step":
                self.under_way.clear()
            case "complete" if self.under_way:
                self.under_way.popleft()
            case "dispatch":
                self.under_way.append(frozenset())

    def _meet_claim(self, spec: ClaimSpec, fields: Mapping[str, Any]) -> None:
        keys = content_ids(spec.tokens, self.config.block_size, spec.domain)
        name = f"{spec.claim_id}#{spec.generation}"
        self.claims.pop(spec.claim_id, None)
        places = {p: keys[p] for p in spec.predicate.positions}
        self.claims[spec.claim_id] = KnownClaim(name, spec, places, fields)
        self.ends.pop(spec.claim_id, None)
        if spec.duration is not None:
            self.ends[spec.claim_id] = self.now + spec.duration

    def _meet_request(self, spec: RequestSpec) -> None:
        new = spec.max_new_tokens
        if self._longest is not None:
            new = max(1, min(new, self._longest - len(spec.tokens)))
        tokens = spec.tokens + (GENERATED_TOKEN,) * new
        keys = content_ids(tokens, self.config.block_size, spec.domain)
        request = KnownRequest(spec, tokens, keys, len(spec.tokens), len(self.requests))
        self.requests[spec.request_id] = request
        self._queue.append(spec.request_id)

    def is_cut(self, request_id: str) -> bool:
        """Whether the request ends before it has generated all that it asked for."""
        request = self.requests[request_id]
        return len(request.tokens) < request.prompt + request.spec.max_new_tokens

    def wanted(self, claim_id: str, footprint: int) -> Mapping[int, str]:
        """The contents of a claim's positions as granted: clipping leaves the first ones."""
        claim = self.claims[claim_id]
        return {p: claim.keys[p] for p in list(claim.keys)[:footprint]}

    def lost_key(self, operation: Operation) -> str:
        """The content that a `lose` operation takes."""
        tokens = tokens_of(operation.fields["content"], self.config.block_size)
        keys = content_ids(tokens, self.config.block_size, domain_of(operation.fields))
        position: int = operation.fields["position"]
        return keys[position]

    # -- what events and observations say

    def note(self, events: Iterable[Event]) -> None:
        """Remember what events say of the order and the patience of waiting requests."""
        for event in events:
            request = self.requests.get(event.request_id or "")
            if request is None:
                continue
            if event.event in _LEAVES_QUEUE and request.name in self._queue:
                self._queue.remove(request.name)
            match event.event:
                case "active_request_preempted":
                    # A step before this one may still bring it a token while it waits.
                    request.is_measured = self._tells_computed and len(self.under_way) <= 1
                    self._queue.insert(0, request.name)
                case "active_request_admitted":
                    request.hits = event.data["hit_blocks"]
                case "external_load_started":
                    request.loads = event.data["blocks"]
                case "active_request_deferred" if event.data["blocking_claim_ids"]:
                    request.deferrals += 1

    def measure(self, seen: Observation) -> None:
        """How long requests that decode have become."""
        for name, view in seen.requests.items():
            known = self.requests.get(name)
            if known is None or view.state != "running":
                continue
            if view.computed is None:
                self._tells_computed = False
                continue
            if view.computed >= known.length:
                known.length = min(view.computed + 1, len(known.tokens))

    def head(self, seen: Observation) -> KnownRequest | None:
        """The request that a scheduling step looks at first."""
        waiting = [self.requests[r] for r in self._queue if seen.requests[r].state == "waiting"]
        if not waiting:
            return None
        if self.config.policy == PRIORITY:
            return min(waiting, key=lambda r: (r.spec.priority, r.arrival))
        return waiting[0]

    def next_tokens(self, request: KnownRequest, view: RequestView) -> int:
        """What a running request computes next, where nothing is under way."""
        return request.length - (view.computed or 0) + self.config.drafts

    def growth(self, seen: Observation) -> tuple[int, int]:
        """Tokens and blocks that all running requests together want next, at most."""
        tokens = blocks = 0
        for name, view in seen.requests.items():
            request = self.requests.get(name)
            if view.state != "running" or request is None:
                continue
            new = self.next_tokens(request, view)
            tokens += new
            end = (view.computed or 0) + new
            blocks += max(0, -(-end // self.config.block_size) - len(view.blocks))
        return tokens, blocks

    def is_due(self, claim_id: str) -> bool:
        """The claim's time is up (L6)."""
        end = self.ends.get(claim_id)
        return end is not None and end <= self.now


def is_over(phase: Phase) -> bool:
    """Ended in a way that leaves content behind which may be lost later (L4)."""
    return phase in (Phase.DEMOTED, Phase.EXPIRED, Phase.RELEASED)
