"""The trace: one JSON line per transition (rules T1 to T3), names after arXiv 2605.24259.

Every event carries the base fields; `EVENTS` says which further fields each kind must have.
`parse_event` rejects what does not conform, it never repairs (T3).
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

SCHEMA_VERSION: Final = 1

BASE_FIELDS: Final = (
    "schema_version",
    "seq",
    "timestamp_ns",
    "run_id",
    "event",
    "request_id",
    "claim_id",
    "generation",
    "prefix_id",
    "policy",
    "usable_blocks",
)

_FEASIBILITY_FIELDS: Final = (
    "outcome",
    "feasibility",
    "blocking_claim_ids",
    "waits_on",
    "protected_resident_blocks",
    "resident_plus_active_blocks",
    "capacity_shortfall_blocks",
    "missing_now",
    "free_blocks_before_allocate",
    "active_live_blocks_required",
    "active_live_blocks_current",
    "arbiter_action",
)

EVENTS: Final[dict[str, tuple[str, ...]]] = {
    "trace_opened": ("engine", "block_size", "defer_limit"),
    "trace_closed": ("events",),
    "resident_claim_submitted": ("owner", "protection", "predicate", "footprint", "duration"),
    "resident_claim_accepted": ("decision", "reason", "granted", "cost_blocks", "headroom_before"),
    "resident_claim_refused": ("decision", "reason", "cost_blocks", "headroom_before"),
    "resident_block_materialized": ("position", "block_id"),
    "resident_claim_materialized": ("leading", "survivors"),
    "resident_claim_demoted": ("phase_before", "covered"),
    "resident_claim_expired": ("phase_before", "covered"),
    "resident_claim_released": ("phase_before", "covered"),
    "resident_claim_renewed": ("duration",),
    "resident_claim_harmed": ("cause", "before", "after"),
    "resident_block_lost": ("position", "block_id", "cause"),
    "block_lost_after_release": ("position", "block_id", "phase"),
    "allocation_victim_selected": ("block_id", "hash", "ref_count", "protected", "reason"),
    "active_request_submitted": ("admit_reuse", "active_live_blocks_required"),
    "active_request_admitted": ("hit_blocks", "new_blocks", "free_blocks_before_allocate"),
    "active_request_deferred": _FEASIBILITY_FIELDS,
    "active_request_refused": _FEASIBILITY_FIELDS,
    "active_request_blocks": ("blocks", "lent"),
    "active_request_found": ("hits", "draws"),
    "active_request_preempted": ("blocks",),
    "active_request_finished": ("outcome", "blocks"),
    "active_request_aborted": ("blocks",),
    "future_reuse_admitted": ("blocks",),
    "future_reuse_denied": ("blocks",),
    "pool_reset": ("succeeded",),
    "resident_claim_offloaded": ("tier", "blocks"),
    "restoration_required": ("tier", "blocks"),
    "resident_claim_restored": ("tier", "blocks"),
    "restoration_failed": ("tier", "reason"),
    "resident_claim_unsaved": ("tier", "blocks", "reason"),
    "external_load_started": ("blocks",),
    "external_load_finished": ("blocks", "loaded"),
    "pool_slept": ("succeeded",),
    "pool_woken": (),
}
"""Kinds of event and the fields each must carry beside the base fields.

`active_request_blocks` tells a request's whole table whenever it grew, and which of its blocks are
on loan from which claim; `active_request_found` comes before a deferral or refusal and says which
blocks it hits and which promised contents it would compute, as pairs of claim and position.
`prefix_id` of a load that fell short, and of `restoration_failed`, is the first content that was
not right; an offloadable claim tells with each block which content it stands for.
`resident_claim_unsaved` says how many blocks of a claim could not be kept in its tier and why; its
`prefix_id` is the first of them.  Block 0, which holds nothing, stands for a place in a tier.
`before` and `after` of a harm are predicate records `{"holds", "leading", "survivors"}`;
`predicate` and `granted` are `{"kind", "start", "n"}`; block counts are in blocks, `duration`
in the runtime's time units (null: no end)."""


OPTIONAL: Final[dict[str, tuple[str, ...]]] = {"trace_opened": ("engine_version",)}
"""Fields that an event of a kind may carry beside those: what was recorded before there were such
stays readable."""

_NEEDED: Final = {event: frozenset(fields) for event, fields in EVENTS.items()}


def odd_fields(event: str, data: Mapping[str, object]) -> list[str]:
    """The fields that the data of a known kind of event lack or cannot have, sorted."""
    given, needed = data.keys(), _NEEDED[event]
    if given == needed:  # as almost always: every event that is told or read comes by here
        return []
    return sorted((needed - given) | (given - needed - set(OPTIONAL.get(event, ()))))


_ENCODER: Final = json.JSONEncoder(separators=(",", ":"))


class TraceError(ValueError):
    """A trace or an event that does not conform; the message says what and where."""


@dataclass(frozen=True)
class Event:
    """One line of a trace.  `data` holds the fields that its kind must carry, may hold those that
    it may, and no others."""

    seq: int
    timestamp_ns: int
    run_id: str
    event: str
    policy: str
    usable_blocks: int
    request_id: str | None = None
    claim_id: str | None = None
    generation: int | None = None
    prefix_id: str | None = None
    data: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """One line of a trace, without its end."""
        base = {name: getattr(self, name) for name in BASE_FIELDS if name != "schema_version"}
        line = {"schema_version": SCHEMA_VERSION, **base, **self.data}
        return _ENCODER.encode(line)


def parse_event(line: str) -> Event:
    """Read one line; raises `TraceError` unless it is exactly a known event."""
    try:
        raw = json.loads(line)
    except json.JSONDecodeError as error:
        raise TraceError(f"not JSON: {error.msg}") from None
    except (RecursionError, ValueError):  # nested without end, or a number of thousands of digits
        raise TraceError("not JSON that anyone can read") from None
    if not isinstance(raw, dict):
        raise TraceError("not a JSON object")
    missing = [name for name in BASE_FIELDS if name not in raw]
    if missing:
        raise TraceError(f"lacks {', '.join(missing)}")
    if raw.pop("schema_version") != SCHEMA_VERSION:
        raise TraceError("unknown schema version")
    kind = raw["event"]
    if not isinstance(kind, str) or kind not in EVENTS:
        raise TraceError(f"unknown event {kind!r}")
    base = {name: raw.pop(name) for name in BASE_FIELDS if name != "schema_version"}
    for name in ("seq", "timestamp_ns", "usable_blocks"):
        if type(base[name]) is not int:
            raise TraceError(f"{name} is not an integer")
    if odd := odd_fields(kind, raw):
        raise TraceError(f"{kind} has the wrong fields: {', '.join(odd)}")
    return Event(**base, data=raw)


class Recorder:
    """Numbers and stamps the events of one run (T1).

    `clock` gives the time in nanoseconds; a clock that runs back raises `TraceError`.  Each event
    goes to `sink` as it happens (a file, say); a long run then keeps only the last `keep` of them.
    """

    def __init__(
        self,
        run_id: str,
        policy: str,
        usable_blocks: int,
        clock: Callable[[], int],
        sink: Callable[[Event], None] | None = None,
        keep: int | None = None,
    ) -> None:
        self.run_id = run_id
        self.policy = policy
        self.usable_blocks = usable_blocks
        self.count = 0
        """Events emitted so far."""
        self._clock = clock
        self._sink = sink
        self._last = 0
        self.events: list[Event] | deque[Event] = [] if keep is None else deque(maxlen=keep)
        """All events, or the last `keep` of them."""

    def emit(
        self,
        event: str,
        *,
        request_id: str | None = None,
        claim_id: str | None = None,
        generation: int | None = None,
        prefix_id: str | None = None,
        **data: Any,
    ) -> None:
        """Tell the next event, with the fields of its kind; else `TraceError`."""
        if odd := odd_fields(event, data):
            raise TraceError(f"{event} has the wrong fields: {', '.join(odd)}")
        now = self._clock()
        if self.count and now < self._last:
            raise TraceError("time runs back")
        told = Event.__new__(Event)  # a frozen class is filled by a call for each field, else
        filled = {
            "seq": self.count,
            "timestamp_ns": now,
            "run_id": self.run_id,
            "event": event,
            "policy": self.policy,
            "usable_blocks": self.usable_blocks,
            "request_id": request_id,
            "claim_id": claim_id,
            "generation": generation,
            "prefix_id": prefix_id,
            "data": data,
        }
        object.__setattr__(told, "__dict__", filled)
        self._last = now
        self.count += 1
        self.events.append(told)
        if self._sink is not None:
            self._sink(told)
