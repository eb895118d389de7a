"""The request at the door, judged by `spec.feasibility` from the monitor's shadow (F3, F4, F5, P5).

A scheduling step looks at the first waiting request when the running ones have grown.  Where
none of them had to, the state it finds is the state before the step, so its answer can be
foretold: whether it is admitted, with how many hits, and else what it is told and whom it blames.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from kvclaims.checker.monitor import Monitor
from kvclaims.checker.observing import Broken
from kvclaims.spec import pool
from kvclaims.spec.claims import PHASE, hard, phase
from kvclaims.spec.feasibility import Judgement, Promise, Situation, judge
from kvclaims.spec.interface import Observation, PoolConfig, PoolStep, RequestView
from kvclaims.spec.telemetry import Event
from kvclaims.spec.vocabulary import RESPONSIBLE, Outcome, Phase

_CHANGING: Final = frozenset({"admit", "take", "draw", "share", "register"})
_RESPONSIBLE: Final = frozenset(PHASE.values.index(p) for p in RESPONSIBLE)


@dataclass(frozen=True)
class Wanted:
    """What a declared claim speaks of: its name in the machine and its contents in order."""

    name: str
    keys: tuple[str, ...]


@dataclass(frozen=True)
class Visitor:
    """The first waiting request: the contents of its full prompt blocks, and its size."""

    name: str
    keys: tuple[str, ...]
    tokens: int
    admit_reuse: bool
    deferrals: int
    """How often claims alone were in its way so far."""


@dataclass(frozen=True)
class Foretold:
    """What the step must tell the visitor."""

    visitor: Visitor
    hits: int
    need: int
    judgement: Judgement


def foretell(
    visitor: Visitor, monitor: Monitor, seen: Observation, claims: Iterable[Wanted], size: int
) -> Foretold:
    """Judge the visitor in the state before the step.  `size` is the tokens in a block."""
    shadow = monitor.shadow
    hits: list[int] = []
    for key in visitor.keys[: (visitor.tokens - 1) // size]:
        if key not in seen.resident:
            break
        hits.append(seen.resident[key])
    missing = [k for k in visitor.keys[len(hits) :] if k not in seen.resident]
    promises: dict[str, Promise] = {}
    materializes: dict[str, frozenset[str]] = {}
    for claim in claims:
        place = (claim.name,)
        if not shadow.get(hard, place) or shadow.get(phase, place) not in _RESPONSIBLE:
            continue
        covered = frozenset(b for _, b in shadow.index[pool.covers, 0].get(claim.name, ()))
        claim_id = claim.name.rpartition("#")[0]
        promises[claim_id] = Promise(covered, shadow.get(pool.reserve, place))
        has = {k for b in covered for _, k in shadow.index[pool.key, 0].get(b, ())}
        if visitor.admit_reuse:
            materializes[claim_id] = frozenset(k for k in claim.keys if k in missing) - has
    active: dict[str, set[int]] = {}
    for request, block in shadow.values[pool.held]:
        active.setdefault(request, set()).add(block)
    need = -(-visitor.tokens // size) - len(hits)
    situation = Situation(
        usable=seen.usable,
        promises=promises,
        active={request: frozenset(blocks) for request, blocks in active.items()},
        need=need,
        holds=frozenset(hits),
        materializes=materializes,
    )
    return Foretold(visitor, len(hits), need, judge(situation))


def nothing_grew(before: Observation, steps: Sequence[PoolStep], events: Sequence[Event]) -> bool:
    """Whether no running request took a block, made one visible or was preempted in this step."""
    running = {name for name, view in before.requests.items() if view.state == "running"}
    grew = any(s.action in _CHANGING and s.args["r"] in running for s in steps)
    return not grew and all(event.event != "active_request_preempted" for event in events)


def judged(
    foretold: Foretold,
    before: Observation,
    after: Observation,
    events: Sequence[Event],
    steps: Sequence[PoolStep],
    config: PoolConfig,
    given_up: frozenset[str] = frozenset(),
) -> Iterator[Broken]:
    """Compare what was foretold with what the step did.  What a return of lent memory had to give
    up is `given_up`."""
    visitor, wanted = foretold.visitor, foretold.judgement
    view = after.requests[visitor.name]
    mine = [event for event in events if event.request_id == visitor.name]
    admitted = any(event.event == "active_request_admitted" for event in mine)
    name = f"request {visitor.name}"
    if wanted.outcome is Outcome.SERVED:
        if not admitted:
            yield "F3", f"{name} fits, and was not admitted"
        elif view.hit_blocks != foretold.hits:
            yield (
                "P5",
                f"{name} finds {foretold.hits} leading blocks resident, and was served "
                f"{view.hit_blocks}",
            )
        taken = sum(s.action in ("take", "draw") and s.args["r"] == visitor.name for s in steps)
        short = taken < foretold.need and config.token_budget  # the rest comes chunk by chunk
        if admitted and taken != foretold.need and not short:
            yield "B11", f"{name} needs {foretold.need} new blocks, and took {taken}"
        return
    if admitted:
        yield "F3", f"{name} was admitted with {wanted.missing_now} blocks missing"
        return
    if gone := before.resident.keys() - after.resident.keys() - given_up:
        yield "F5", f"{name} was not admitted, and {len(gone)} contents were dropped"
    yield from _answer(foretold, view, mine, config.defer_limit)


def _answer(
    foretold: Foretold, view: RequestView, mine: Sequence[Event], limit: int
) -> Iterator[Broken]:
    visitor, wanted = foretold.visitor, foretold.judgement
    deferred = wanted.outcome is Outcome.DEFERRED or (
        wanted.outcome is Outcome.REFUSED and visitor.deferrals < limit
    )
    outcome = Outcome.DEFERRED if deferred else wanted.outcome
    if view.outcome is not outcome:
        yield "F4", f"request {visitor.name} is told {view.outcome}, should be {outcome}"
        return
    numbers: dict[str, object] = {
        "capacity_shortfall_blocks": wanted.shortfall,
        "missing_now": wanted.missing_now,
        "waits_on": list(wanted.waits_on),
        "blocking_claim_ids": list(wanted.blocking_claims),
    }
    for event in mine:
        if event.event not in ("active_request_deferred", "active_request_refused"):
            continue
        for what, number in numbers.items():
            if event.data[what] != number:
                yield (
                    "F4",
                    f"request {visitor.name} is told {what} {event.data[what]}, should be {number}",
                )
    if not deferred and view.shortfall != wanted.shortfall:
        yield "F4", f"request {visitor.name} lacks {wanted.shortfall}, is told {view.shortfall}"


def phase_of(monitor: Monitor, claim: str) -> Phase:
    """Where the shadow has a claim (its name in the machine)."""
    return Phase(PHASE.values[monitor.shadow.get(phase, (claim,))])
