"""What an event says in plain words, and the rules it stands under.

A page holds each sentence once, as a template, and for every step only what fills it in.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

from kvclaims.spec.telemetry import Event


@dataclass(frozen=True)
class Template:
    """A sentence with numbered gaps, and the rules that govern such a step."""

    text: str
    rules: tuple[str, ...]


TEMPLATES: Final = {
    "trace_opened": Template("the pool opens with {0} blocks of {1} tokens on {2}", ("T1",)),
    "trace_closed": Template("the trace closes", ("T3",)),
    "resident_claim_submitted": Template(
        "{1} submits claim {0}: keep {2} blocks, {3}", ("L1", "L2")
    ),
    "resident_claim_accepted": Template(
        "claim {0} is {1}: it costs {2} blocks, headroom is {3}", ("L2", "F2")
    ),
    "resident_claim_refused": Template(
        "claim {0} is refused: it costs {1} blocks, headroom is {2}", ("L2", "F2")
    ),
    "resident_block_materialized": Template("claim {0} covers {1} blocks", ("L2", "P1")),
    "one block": Template("claim {0} covers block {1}", ("L2", "P1")),
    "resident_claim_materialized": Template(
        "claim {0} is materialized: {1} blocks are there", ("L7",)
    ),
    "resident_claim_demoted": Template("claim {0} is demoted", ("L1", "P2")),
    "resident_claim_expired": Template("claim {0} expires", ("L6", "P2")),
    "resident_claim_released": Template("claim {0} is released by its owner", ("L1", "P2")),
    "resident_claim_renewed": Template("claim {0} is renewed for {1}", ("L6",)),
    "resident_claim_harmed": Template(
        "claim {0} is harmed by {1}: {3} of {2} blocks survive", ("L3", "L5")
    ),
    "resident_block_lost": Template("claim {0} loses {1} blocks", ("L3",)),
    "block_lost_after_release": Template("of ended claim {0}, {1} blocks are lost", ("L4",)),
    "allocation_victim_selected": Template("{1} blocks are evicted", ("B3", "P1")),
    "active_request_submitted": Template("request {0} arrives and wants {1} blocks", ("F3",)),
    "active_request_admitted": Template(
        "request {0} is admitted: {1} blocks are there already, {2} are taken", ("F3", "P5")
    ),
    "active_request_blocks": Template("request {0} grows to {1} blocks", ("F3",)),
    "active_request_found": Template("request {0} looks for room: {1} blocks are there", ("P5",)),
    "active_request_deferred": Template(
        "request {0} has to wait for {1}: {2} blocks are missing", ("F4", "F5")
    ),
    "active_request_refused": Template(
        "request {0} is refused because of {1}: {2} blocks short", ("F4", "F5")
    ),
    "capacity_required": Template(
        "request {0} exceeds the pool by itself: {2} blocks short", ("F4", "F5")
    ),
    "active_request_preempted": Template(
        "request {0} gives way and returns {1} blocks", ("F3", "B7")
    ),
    "active_request_finished": Template("request {0} is {1} and returns {2} blocks", ("B7",)),
    "active_request_aborted": Template("request {0} is aborted and returns {1} blocks", ("B7",)),
    "future_reuse_admitted": Template(
        "request {0} is {1} and returns {2} blocks; {3} new ones stay for reuse", ("B7", "P4")
    ),
    "future_reuse_denied": Template(
        "request {0} is {1} and returns {2} blocks; nothing new stays for reuse", ("B7", "P4")
    ),
    "pool_reset": Template("the pool is told to drop its content: {0}", ("B10",)),
    "pool_slept": Template("the pool is put to sleep: {0}", ("B10",)),
    "pool_woken": Template("the pool wakes, its memory blank", ("B10",)),
    "resident_claim_offloaded": Template("claim {0} moves {2} blocks to {1}", ("O1",)),
    "restoration_required": Template("claim {0} needs {2} blocks back from {1}", ("O1",)),
    "resident_claim_restored": Template("claim {0} has {2} blocks back from {1}", ("O1", "O3")),
    "restoration_failed": Template("claim {0} is not restored from {1}: {2}", ("O2",)),
    "resident_claim_unsaved": Template(
        "of claim {0}, {2} blocks are not kept in {1}: {3}", ("O1", "O2")
    ),
    "external_load_started": Template("request {0} loads {1} blocks from elsewhere", ("O3",)),
    "external_load_finished": Template("of {1} blocks request {0} loads {2}", ("O2",)),
    "nothing told": Template("{0}: no event", ()),
}
"""By kind of event, and by the few other names that `arguments` gives."""

REPEATS: Final = frozenset(
    {
        "resident_block_materialized",
        "resident_block_lost",
        "block_lost_after_release",
        "allocation_victim_selected",
    }
)
"""Kinds that come once for each block: neighbours are one step."""

FOLLOWS: Final = frozenset(
    {
        ("active_request_admitted", "active_request_blocks"),
        ("active_request_finished", "future_reuse_admitted"),
        ("active_request_finished", "future_reuse_denied"),
        ("active_request_found", "active_request_deferred"),
        ("active_request_found", "active_request_refused"),
    }
)
"""Pairs of kinds of which the second only goes on with the first."""

_FIELDS: Final = {
    "resident_claim_accepted": ("decision", "cost_blocks", "headroom_before"),
    "resident_claim_refused": ("cost_blocks", "headroom_before"),
    "resident_claim_materialized": ("survivors",),
    "resident_claim_renewed": ("duration",),
    "active_request_submitted": ("active_live_blocks_required",),
    "active_request_preempted": ("blocks",),
    "active_request_finished": ("outcome", "blocks"),
    "active_request_aborted": ("blocks",),
    "resident_claim_offloaded": ("tier", "blocks"),
    "restoration_required": ("tier", "blocks"),
    "resident_claim_restored": ("tier", "blocks"),
    "restoration_failed": ("tier", "reason"),
    "resident_claim_unsaved": ("tier", "blocks", "reason"),
    "external_load_started": ("blocks",),
    "external_load_finished": ("blocks", "loaded"),
}
"""Fields of an event that fill its template after the name of its claim or request."""


def one_block(text: str) -> str:
    """Good English for a sentence that was filled in (the page's script does the same)."""
    return re.sub(r"(?<![\d,])1 blocks\b", "1 block", text)


def arguments(event: Event, joined: list[Any] | None) -> list[Any]:
    """The template's name and what fills it; `joined` is what the step said before this event."""
    kind, data = event.event, event.data
    who = event.claim_id or event.request_id or ""
    if kind in REPEATS:
        return _repeated(event, who, joined)
    if kind in ("future_reuse_admitted", "future_reuse_denied") and joined:
        return [kind, *joined[1:], data["blocks"]]
    match kind:
        case "trace_opened":
            return [kind, event.usable_blocks, data["block_size"], data["engine"]]
        case "resident_claim_submitted":
            return [kind, who, data["owner"], data["footprint"], _plain(data["protection"])]
        case "resident_claim_harmed":
            survivors = (data["before"]["survivors"], data["after"]["survivors"])
            return [kind, who, _plain(data["cause"]), *survivors]
        case "active_request_admitted":
            return [kind, who, data["hit_blocks"], data["new_blocks"]]
        case "active_request_blocks":
            return list(joined) if joined else [kind, who, len(data["blocks"])]
        case "active_request_found":
            return [kind, who, len(data["hits"])]
        case "active_request_deferred":
            return [kind, who, _names(data), data["missing_now"]]
        case "active_request_refused":
            alone = data["outcome"] == "capacity_required"
            name = "capacity_required" if alone else kind
            return [name, who, _names(data), data["capacity_shortfall_blocks"]]
        case "pool_reset" | "pool_slept":
            return [kind, "done" if data["succeeded"] else "not done"]
        case "future_reuse_admitted" | "future_reuse_denied":
            return [kind, who, "over", 0, data["blocks"]]
    return [kind, who, *(_plain(data[name]) for name in _FIELDS.get(kind, ()))]


def _repeated(event: Event, who: str, joined: list[Any] | None) -> list[Any]:
    if joined is None and event.event == "resident_block_materialized":
        return ["one block", who, event.data["block_id"]]
    number = 2 if joined and joined[0] == "one block" else joined[2] + 1 if joined else 1
    return [event.event, who, number]


def _names(data: Any) -> str:
    claims = [f"claim {name}" for name in data["blocking_claim_ids"]]
    return ", ".join([*claims, *(f"request {name}" for name in data["waits_on"])]) or "nobody"


def _plain(value: object) -> object:
    return value.replace("_", " ") if isinstance(value, str) else value
