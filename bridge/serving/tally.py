"""What the events of a run add up to: the counters behind `/metrics`, in bounded memory."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, OrderedDict
from typing import Any, Final

from kvclaims.spec.telemetry import Event
from kvclaims.spec.vocabulary import Outcome, Protection

AGES: Final = (1, 10, 60, 300, 1800, 7200, 43200, 172800)
"""Upper bounds of the histogram of ages at loss, in seconds."""

MOST_LABELS: Final = 1000
"""Claims that have a counter of their own; later ones are counted together."""

OTHERS: Final = "(others)"

_REMEMBERED: Final = 100_000
_NANOSECONDS: Final = 1_000_000_000


class Tally:
    """Counters over one run; `heard` takes each event as it happens."""

    def __init__(self) -> None:
        self.refusals: Counter[tuple[str, str]] = Counter()
        """By claim and outcome (refused or deferred)."""
        self.harms: Counter[tuple[str, str]] = Counter()
        """By claim and cause."""
        self.unsaved: Counter[tuple[str, str]] = Counter()
        """Blocks that could not be kept in a tier, by claim and tier."""
        self.outcomes: Counter[str] = Counter()
        self.shortfall = 0
        self.ages = [0] * (len(AGES) + 1)
        self.age_sum = 0.0
        self._accepted: OrderedDict[str, int] = OrderedDict()
        """When claims that have lost nothing yet were accepted, in nanoseconds."""
        self._in_tier: set[str] = set()
        """Those of them whose content does not go with a block of the device."""

    def heard(self, event: Event) -> None:
        react = _REACTIONS.get(event.event)
        if react is not None:
            react(self, event)

    def _label(self, claim: str, what: str, counter: Counter[tuple[str, str]]) -> tuple[str, str]:
        known = (claim, what) in counter or len(counter) < MOST_LABELS
        return (claim if known else OTHERS, what)

    def _blocked(self, event: Event) -> None:
        outcome = str(event.data["outcome"])
        for claim in event.data["blocking_claim_ids"]:
            self.refusals[self._label(claim, outcome, self.refusals)] += 1
        if outcome != Outcome.DEFERRED:
            self.outcomes[outcome] += 1
            self.shortfall += event.data["capacity_shortfall_blocks"]

    def _finished(self, event: Event) -> None:
        self.outcomes[str(event.data["outcome"])] += 1

    def _aborted(self, _: Event) -> None:
        self.outcomes[Outcome.ABORTED.value] += 1

    def _submitted(self, event: Event) -> None:
        self._in_tier.discard(str(event.claim_id))
        if event.data["protection"] == Protection.OFFLOADABLE:
            self._in_tier.add(str(event.claim_id))

    def _refused(self, event: Event) -> None:
        self._in_tier.discard(str(event.claim_id))

    def _begins(self, event: Event) -> None:
        self._accepted[str(event.claim_id)] = event.timestamp_ns
        if len(self._accepted) > _REMEMBERED:
            oldest, _ = self._accepted.popitem(last=False)
            self._in_tier.discard(oldest)

    def _harmed(self, event: Event) -> None:
        key = self._label(str(event.claim_id), str(event.data["cause"]), self.harms)
        self.harms[key] += 1
        self._lost(event)

    def _not_saved(self, event: Event) -> None:
        key = self._label(str(event.claim_id), str(event.data["tier"]), self.unsaved)
        self.unsaved[key] += event.data["blocks"]

    def _block_lost(self, event: Event) -> None:
        if str(event.claim_id) not in self._in_tier:
            self._lost(event)

    def _lost(self, event: Event) -> None:
        """Content that was claimed is gone; the first loss of a claim gives its age."""
        self._in_tier.discard(str(event.claim_id))
        since = self._accepted.pop(str(event.claim_id), None)
        if since is not None:
            age = (event.timestamp_ns - since) / _NANOSECONDS
            self.ages[bisect_left(AGES, age)] += 1
            self.age_sum += age


_REACTIONS: Final[dict[str, Any]] = {
    "active_request_deferred": Tally._blocked,
    "active_request_refused": Tally._blocked,
    "active_request_finished": Tally._finished,
    "active_request_aborted": Tally._aborted,
    "resident_claim_submitted": Tally._submitted,
    "resident_claim_refused": Tally._refused,
    "resident_claim_accepted": Tally._begins,
    "resident_block_lost": Tally._block_lost,
    "resident_claim_harmed": Tally._harmed,
    "resident_claim_unsaved": Tally._not_saved,
    "block_lost_after_release": Tally._lost,
}
