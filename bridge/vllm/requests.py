"""What is known of every request on one pool, and how each one faces it (rule F4)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvclaims.spec.feasibility import Judgement, Situation
from kvclaims.spec.interface import RequestView
from kvclaims.spec.telemetry import Recorder
from kvclaims.spec.vocabulary import Feasibility, Outcome

_NO_ARBITER: Final = "none"


@dataclass(frozen=True)
class Blocked:
    """A waiting request that did not fit, as it was found and judged: `free` blocks were in the
    queue, and `drawn` blocks it would have taken on the reserves of claims.
    `hits` are in their order."""

    request: Any
    situation: Situation
    judgement: Judgement
    free: int
    drawn: int
    hits: tuple[int, ...] = ()
    seen: tuple[Any, ...] = ()
    """What it was judged by: as long as that stays the same, so does the judgement."""

    def draws(self, order: Mapping[str, int]) -> list[list[Any]]:
        """Each promised content that the request would compute: its claim and position, the claims
        by this order."""
        drawn: Mapping[str, Iterable[Any]] = self.situation.materializes
        return [[c, p] for c in sorted(drawn, key=order.__getitem__) for p in sorted(drawn[c])]

    @property
    def protected(self) -> frozenset[Any]:
        return _union(p.covered for p in self.situation.promises.values())


@dataclass
class RequestRecord:
    """One request from its arrival to its end.  `prefix_id` names its last full block."""

    request_id: str
    admit_reuse: bool
    prefix_id: str | None = None
    state: str = "waiting"
    outcome: Outcome = Outcome.PENDING
    hit_blocks: int = 0
    shortfall: int = 0
    blocking_claims: tuple[str, ...] = ()
    deferrals: int = 0
    """How often claims alone were in its way."""
    told_waits_on: tuple[str, ...] = ()
    _seen: tuple[Any, ...] = ()
    _view: RequestView | None = None

    def view(
        self,
        blocks: tuple[int, ...],
        computed: int | None,
        tables: tuple[tuple[int, ...], ...] = (),
    ) -> RequestView:
        """What an observer sees; the same object as long as it is the same."""
        seen = (
            *(self.state, self.outcome, blocks, self.hit_blocks),
            *(self.shortfall, self.blocking_claims, computed, tables),
        )
        if seen != self._seen:
            self._seen, self._view = seen, RequestView(*seen)
        assert self._view is not None
        return self._view


class RequestLog:
    """The records of one run, and the events that tell their story."""

    def __init__(self, recorder: Recorder, defer_limit: int) -> None:
        self._recorder = recorder
        self._defer_limit = defer_limit
        self.records: dict[str, RequestRecord] = {}

    def arrived(self, record: RequestRecord, blocks: int) -> None:
        """A request of `blocks` blocks waits."""
        self.records[record.request_id] = record
        self._emit(
            "active_request_submitted",
            record,
            admit_reuse=record.admit_reuse,
            active_live_blocks_required=blocks,
        )

    def admitted(self, record: RequestRecord, hits: int, new: int, free: int) -> None:
        record.state, record.outcome = "running", Outcome.PENDING
        record.shortfall, record.blocking_claims = 0, ()
        record.told_waits_on = ()  # if it gives way and waits once more, it is told so anew
        record.hit_blocks = hits
        self._emit(
            "active_request_admitted",
            record,
            hit_blocks=hits,
            new_blocks=new,
            free_blocks_before_allocate=free,
        )

    def loading(self, record: RequestRecord, blocks: int) -> None:
        """A transfer fills `blocks` of the request's blocks; until it has ended nothing runs."""
        record.state = "loading"
        self._emit("external_load_started", record, blocks=blocks)

    def loaded(
        self, record: RequestRecord, blocks: int, good: int, failed: str | None = None
    ) -> None:
        """Of the blocks that a transfer was to fill, `good` ones in a row are right.  A request
        that still wants them goes on as one that runs."""
        if record.state == "loading":
            record.state = "running"
        data = {} if failed is None else {"prefix_id": failed}
        self._emit("external_load_finished", record, blocks=blocks, loaded=good, **data)

    def grew(self, record: RequestRecord, blocks: list[int], lent: list[list[Any]]) -> None:
        """The request's whole table, and the blocks in it that claims lent."""
        self._emit("active_request_blocks", record, blocks=blocks, lent=lent)

    def preempted(self, record: RequestRecord, blocks: int) -> None:
        record.state = "waiting"
        self._emit("active_request_preempted", record, blocks=blocks)

    def finished(self, record: RequestRecord, blocks: int, computed: int) -> None:
        """The request was served; it held `blocks` and computed `computed` full ones itself."""
        record.state = "finished"
        record.outcome = Outcome.SERVED if record.admit_reuse else Outcome.SERVED_NO_ADMIT
        self._emit("active_request_finished", record, outcome=record.outcome.value, blocks=blocks)
        reuse = "future_reuse_admitted" if record.admit_reuse else "future_reuse_denied"
        self._emit(reuse, record, blocks=computed)

    def aborted(self, record: RequestRecord, blocks: int) -> None:
        record.state, record.outcome = "finished", Outcome.ABORTED
        self._emit("active_request_aborted", record, blocks=blocks)

    def judged(self, record: RequestRecord, blocked: Blocked, order: Mapping[str, int]) -> bool:
        """Act on a judgement that is not SERVED (F4); False if it was told before.

        A block by claims alone is a deferral until `defer_limit` is used up, then a refusal.
        `order` is that of the claims' declaration.
        """
        judgement = blocked.judgement
        structural = judgement.outcome is Outcome.REFUSED
        if structural and record.deferrals < self._defer_limit:
            record.deferrals += 1
            record.outcome = Outcome.DEFERRED
        elif judgement.outcome is Outcome.DEFERRED:
            record.outcome = Outcome.DEFERRED
            if record.told_waits_on == judgement.waits_on:
                return False
            record.told_waits_on = judgement.waits_on
        else:
            record.state, record.outcome = "finished", judgement.outcome
            record.shortfall = judgement.shortfall
            record.blocking_claims = judgement.blocking_claims
        draws = blocked.draws(order)
        self._emit("active_request_found", record, hits=list(blocked.hits), draws=draws)
        self._emit(
            f"active_request_{'deferred' if record.state == 'waiting' else 'refused'}",
            record,
            **_feasibility(record.outcome, blocked),
        )
        return True

    def _emit(self, event: str, record: RequestRecord, **data: Any) -> None:
        data.setdefault("prefix_id", record.prefix_id)
        self._recorder.emit(event, request_id=record.request_id, **data)


def _feasibility(outcome: Outcome, blocked: Blocked) -> dict[str, Any]:
    """The numbers behind a verdict, in blocks, as traces carry them."""
    situation, judgement = blocked.situation, blocked.judgement
    reserves = sum(p.reserve for p in situation.promises.values())
    together = len(blocked.protected | situation.holds) + situation.need + reserves
    return {
        "outcome": outcome.value,
        "feasibility": _label(outcome, judgement).value,
        "blocking_claim_ids": list(judgement.blocking_claims),
        "waits_on": list(judgement.waits_on),
        "protected_resident_blocks": len(blocked.protected),
        "resident_plus_active_blocks": together - blocked.drawn,
        "capacity_shortfall_blocks": judgement.shortfall,
        "missing_now": judgement.missing_now,
        "free_blocks_before_allocate": blocked.free,
        "active_live_blocks_required": len(situation.holds) + situation.need,
        "active_live_blocks_current": len(_union(situation.active.values())),
        "arbiter_action": _NO_ARBITER,
    }


def _label(outcome: Outcome, judgement: Judgement) -> Feasibility:
    if judgement.outcome is Outcome.CAPACITY_REQUIRED:
        return Feasibility.CAPACITY_INFEASIBLE
    if judgement.outcome is Outcome.DEFERRED:
        return Feasibility.ACTIVE_ACCUMULATION
    if outcome is Outcome.DEFERRED:
        return Feasibility.REQUIRES_DEFERRAL
    return Feasibility.HEADROOM_EXHAUSTED


def _union(sets: Iterable[frozenset[Any]]) -> frozenset[Any]:
    return frozenset().union(*sets)
