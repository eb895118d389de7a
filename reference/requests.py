"""A request as the reference knows it, and what one step computes for it."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvclaims.spec.content import GENERATED_TOKEN, content_ids
from kvclaims.spec.interface import RequestSpec, RequestView
from kvclaims.spec.vocabulary import Outcome


@dataclass(eq=False)
class Request:
    """An active request.

    `computed` tokens have KV or get it in a step that is under way, `written` ones have it;
    `pending` output tokens are sampled by steps under way and not known yet.  What it computed,
    loads and made visible counts from its admission on.
    """

    spec: RequestSpec
    tokens: list[int]
    keys: tuple[str, ...]
    arrival: int
    state: str = "waiting"
    outcome: Outcome = Outcome.PENDING
    computed: int = field(init=False)
    written: int = field(init=False)
    pending: int = 0
    has_drafts: bool = False
    """It has sampled in this life: guesses follow its tokens."""
    life: object = field(default_factory=object)
    """Another one after each preemption: what a step computes for an earlier life is thrown
    away."""
    hits: int = 0
    loads: int = field(init=False)
    """Blocks that a transfer was asked to bring, beyond the hits."""
    registered: int = field(init=False)
    """Leading blocks whose content was found or made visible."""
    deferrals: int = 0
    waits_on: tuple[str, ...] = ()
    shortfall: int = 0
    blocking: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.spec.request_id

    @property
    def last(self) -> int:
        """How many tokens it has when it is done."""
        return len(self.spec.tokens) + self.spec.max_new_tokens

    @property
    def is_done(self) -> bool:
        return len(self.tokens) >= self.last

    @property
    def rank(self) -> tuple[int, int]:
        """Under the policy `priority`, the lowest comes first."""
        return (self.spec.priority, self.arrival)

    def keys_of(self, tokens: list[int], block_size: int) -> tuple[str, ...]:
        """The contents that these tokens fill in its cache domain."""
        return content_ids(tuple(tokens), block_size, self.spec.domain)

    def append(self, count: int, block_size: int) -> None:
        """Sampled tokens become known, as many as it still wants."""
        for _ in range(min(count, self.last - len(self.tokens))):
            self.tokens.append(GENERATED_TOKEN)
            if len(self.tokens) % block_size == 0:
                self.keys = self.keys_of(self.tokens, block_size)

    def view(self, blocks: tuple[int, ...]) -> RequestView:
        return RequestView(
            state=self.state,
            outcome=self.outcome,
            blocks=blocks,
            hit_blocks=self.hits,
            shortfall=self.shortfall,
            blocking_claims=self.blocking,
            computed=self.written if blocks else 0,
        )


@dataclass
class Scheduled:
    """What one step computes for a request: its tokens `start` to `end` into `blocks`.

    The last `drafts` of them are guesses.  `fresh` are the blocks that were made visible for it
    and are written only when the step is over.
    """

    request: Request
    start: int
    end: int
    blocks: tuple[int, ...]
    samples: bool
    life: object
    drafts: int
    fresh: list[tuple[int, str]] = field(default_factory=list)

    @property
    def counts(self) -> bool:
        """The request still runs and was not preempted meanwhile."""
        return self.request.state == "running" and self.request.life is self.life
