"""What events say, compared with the steps that were heard and with what is known (T1, T2).

Each transition emits one event, and every field of it is judged against something that does not
come from the event: the steps, the observations, or the supervisor's own book.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvclaims.checker.knowledge import Knowledge
from kvclaims.checker.observing import FAULTS, Broken
from kvclaims.spec.interface import (
    ClaimAnswer,
    Observation,
    PoolStep,
    Predicate,
    PredicateKind,
    RequestView,
)
from kvclaims.spec.operations import Operation
from kvclaims.spec.telemetry import Event
from kvclaims.spec.vocabulary import Cause, Feasibility, Outcome, Protection

_ONE_EACH: Final = {
    "submit": ("resident_claim_submitted",),
    "accept": ("resident_claim_accepted",),
    "refuse": ("resident_claim_refused",),
    "materialize": ("resident_claim_materialized",),
    "evict": ("allocation_victim_selected",),
    "finish": (
        "resident_claim_demoted",
        "resident_claim_expired",
        "resident_claim_released",
    ),
    "defer": ("active_request_deferred",),
}
"""Allocator step → the events that tell of it, one for each step (T1)."""

_TURNED_AWAY: Final = ("turn_away", "overflow")

_LABELS: Final = {
    Outcome.DEFERRED.value: Feasibility.ACTIVE_ACCUMULATION,
    Outcome.REFUSED.value: Feasibility.HEADROOM_EXHAUSTED,
    Outcome.CAPACITY_REQUIRED.value: Feasibility.CAPACITY_INFEASIBLE,
}


@dataclass(frozen=True)
class Told:
    """One operation with everything that was told in it."""

    operation: Operation
    before: Observation
    after: Observation
    events: Sequence[Event]
    steps: Sequence[PoolStep]
    answer: Any
    lasting: Mapping[str, int] = field(default_factory=dict)
    """Content → block, as a hard claim that was declared in this operation could find it (E3)."""
    returned: bool = False
    """Lent memory was taken back."""


def judged_events(told: Told, known: Knowledge) -> Iterator[Broken]:
    """Every event of an operation that was accepted."""
    if not told.steps and not told.events:
        return
    yield from _counts(told)
    for event in told.events:
        judge = _JUDGES.get(event.event)
        if judge is not None:
            yield from judge(event, told, known)
    yield from _returns(told, known)
    yield from _reuse(told, known)
    yield from _losses(told)


def _counts(told: Told) -> Iterator[Broken]:
    steps = Counter(step.action for step in told.steps)
    events = Counter(event.event for event in told.events)
    for action, kinds in _ONE_EACH.items():
        number = sum(events[kind] for kind in kinds)
        if number != steps[action]:
            yield "T1", f"{steps[action]} steps {action}, and {number} events tell of them"
    away = sum(steps[action] for action in _TURNED_AWAY)
    if away != events["active_request_refused"]:
        yield "T1", f"{away} requests were turned away, {events['active_request_refused']} told"


def _same(rule: str, event: Event, wanted: Mapping[str, Any]) -> Iterator[Broken]:
    for name, value in wanted.items():
        if event.data[name] != value:
            of = event.claim_id or event.request_id or "the pool"
            yield rule, f"{event.event} of {of}: {name} is {event.data[name]}, should be {value}"


# -- claims


def _record(predicate: Predicate | None) -> dict[str, Any] | None:
    return None if predicate is None else predicate.to_json()


def _submitted(event: Event, told: Told, known: Knowledge) -> Iterator[Broken]:
    spec = known.claims[told.operation.fields["claim"]].spec
    wanted = {
        "owner": spec.owner,
        "protection": spec.protection.value,
        "predicate": _record(spec.predicate),
        "footprint": spec.predicate.n,
        "duration": spec.duration,
    }
    yield from _same("T2", event, wanted)


def _decided(event: Event, told: Told, _known: Knowledge) -> Iterator[Broken]:
    answer = told.answer
    if not isinstance(answer, ClaimAnswer):
        yield "L2", f"{event.event} of {event.claim_id} by {told.operation.op}"
        return
    wanted: dict[str, Any] = {
        "decision": answer.decision.value,
        "reason": answer.reason,
        "cost_blocks": answer.cost,
        "headroom_before": answer.headroom,
    }
    if "granted" in event.data:
        wanted["granted"] = _record(answer.granted)
    yield from _same("T2", event, wanted)


def decided(
    told: Told, known: Knowledge, refs: Mapping[int, int], unwritten: set[tuple[str, int]]
) -> Iterator[Broken]:
    """The decision on a claim is the one that headroom allows, clipped as little as can be
    (L2, F2).  `refs` are the references to blocks before the operation."""
    answer: ClaimAnswer = told.answer
    spec = known.claims[told.operation.fields["claim"]].spec
    name, before = spec.claim_id, told.before
    if answer.headroom != before.headroom:
        yield "F2", f"claim {name} was told headroom {answer.headroom}, it is {before.headroom}"
    keys = list(known.claims[name].keys.values())
    costs = [0]
    found = told.lasting if spec.protection is Protection.HARD else before.resident
    for key in keys:
        block = found.get(key)
        free = block is None or not refs.get(block) or (key, block) in unwritten
        costs.append(costs[-1] + free)
    wanted = _granted(spec.protection, spec.predicate, spec.min_blocks, costs, before.headroom)
    if spec.protection is Protection.OFFLOADABLE and not known.config.host_blocks:
        wanted = None
    if not known.config.gives(spec.predicate):
        wanted, costs = None, [0]
    got = answer.granted
    if got != wanted:
        rule = "F2" if got is not None and (wanted is None or got.n > wanted.n) else "L2"
        yield rule, f"claim {name} was granted {_record(got)}, should be {_record(wanted)}"
        return
    cost = costs[wanted.n] if wanted else costs[-1]
    if spec.protection is Protection.HARD and answer.cost != cost:
        yield "F2", f"claim {name} was told to cost {answer.cost} blocks, it costs {cost}"


def _granted(
    protection: Protection,
    asked: Predicate,
    least: int | None,
    costs: Sequence[int],
    headroom: int,
) -> Predicate | None:
    if protection is not Protection.HARD or costs[-1] <= headroom:
        return asked
    if least is None or asked.kind is not PredicateKind.LEADING:
        return None
    most = max(n for n, cost in enumerate(costs) if cost <= headroom)
    return asked.clipped(most) if most >= least else None


def _ended(event: Event, told: Told, _known: Knowledge) -> Iterator[Broken]:
    if told.operation.op not in ("release", "demote", "advance"):
        return  # what it covered when it had to give way was lost in the same step
    was = told.before.claims.get(event.claim_id or "")
    if was is not None:
        yield from _same("T2", event, {"covered": was.covered})


def _renewed(event: Event, told: Told, _known: Knowledge) -> Iterator[Broken]:
    yield from _same("T2", event, {"duration": told.operation.fields.get("duration")})


def _cause(event: Event, told: Told, _known: Knowledge) -> Iterator[Broken]:
    fault = told.operation.op in FAULTS
    yield from _same("L3", event, {"cause": (Cause.FAULT if fault else Cause.OWN_CHOICE).value})


def _harmed(event: Event, told: Told, known: Knowledge) -> Iterator[Broken]:
    yield from _cause(event, told, known)
    now = told.after.claims.get(event.claim_id or "")
    before, after = event.data["before"], event.data["after"]
    if now is None:
        return
    if before != {"holds": True, "leading": now.footprint, "survivors": now.footprint}:
        yield "L3", f"claim {event.claim_id} is harmed, and before that {before}"
    if told.operation.op in FAULTS and not known.under_way:
        survivors = {"holds": False, "leading": now.leading, "survivors": now.survivors}
        yield from _same("L3", event, {"after": survivors})
    elif after["holds"] or after["survivors"] >= now.footprint:
        yield "L3", f"claim {event.claim_id} is harmed, and after that {after}"


def survival(
    after: Observation,
    known: Knowledge,
    unwritten: set[tuple[str, int]],
    lasting: Mapping[str, int],
) -> Iterator[Broken]:
    """What is said to survive of a claim is what can be found of its own positions (L3).

    Content that a step under way still writes may count already or not yet.  A hard claim finds
    what is `lasting` (E3).
    """
    pending = {key for key, _ in unwritten}
    for name, view in after.claims.items():
        keys = known.wanted(name, view.footprint)
        if pending.intersection(keys.values()):
            continue
        there = lasting if view.protection is Protection.HARD else after.resident
        found = [key in there for key in keys.values()]
        leading = found.index(False) if False in found else len(found)
        if (view.leading, view.survivors) != (leading, sum(found)):
            yield (
                "L3",
                f"claim {name} is said to have {view.leading} leading of {view.survivors} blocks, "
                f"{leading} of {sum(found)} are found",
            )


def _covered(event: Event, _told: Told, known: Knowledge) -> Iterator[Broken]:
    claim = known.claims.get(event.claim_id or "")
    position = event.data["position"]
    if claim is None or position not in claim.keys:
        yield "L2", f"claim {event.claim_id} covers position {position}, which it did not ask for"


# -- requests


def _arrived(event: Event, told: Told, known: Knowledge) -> Iterator[Broken]:
    request = known.requests[told.operation.fields["request"]]
    blocks = known.blocks(request.prompt)
    wanted = {"admit_reuse": request.spec.admit_reuse, "active_live_blocks_required": blocks}
    yield from _same("T2", event, wanted)


def _admitted(event: Event, told: Told, known: Knowledge) -> Iterator[Broken]:
    request = known.requests[event.request_id or ""]
    hits = _hits(told.steps, request.name)
    blocks = known.blocks(request.length)
    yield from _same("P5", event, {"hit_blocks": hits})
    if request.is_measured:
        yield from _same("T2", event, {"new_blocks": blocks - hits})
    view: RequestView = told.after.requests[request.name]
    if view.hit_blocks != hits:
        yield "P5", f"request {request.name} hit {hits} blocks, is said to have {view.hit_blocks}"


def _hits(steps: Sequence[PoolStep], request: str) -> int:
    """Blocks that the request found: those it shares before it takes any of its own.  An engine
    that keeps one copy of each content lets it share others later, in the place of its own."""
    hits = 0
    for step in steps:
        if step.args.get("r") == request and not _moves(step):
            if step.action in ("take", "draw"):
                break
            hits += step.action == "share"
    return hits


def _moves(step: PoolStep) -> bool:
    """Whether the request takes this block in the place of another that it lets go of."""
    return "of" in step.args


def _answered(event: Event, _told: Told, _known: Knowledge) -> Iterator[Broken]:
    label = _LABELS.get(event.data["outcome"])
    if event.data["outcome"] == Outcome.DEFERRED.value and event.data["blocking_claim_ids"]:
        label = Feasibility.REQUIRES_DEFERRAL
    yield from _same("F4", event, {"feasibility": label.value if label else None})
    yield from _same("T2", event, {"arbiter_action": "none"})


def _returns(told: Told, known: Knowledge) -> Iterator[Broken]:
    """A request that ends or gives way tells how many blocks it gives back, and they come back:
    beside those, where there are windows, that left their window before."""
    back = Counter(s.args["r"] for s in told.steps if s.action in ("drop", "give_back"))
    back.subtract(s.args["r"] for s in told.steps if _moves(s))
    plain = (s for s in told.steps if not _moves(s))
    shared = Counter(s.args["r"] for s in plain if s.action == "share")
    for name, number in shared.items():
        back[name] -= number - _hits(told.steps, name)  # blocks that others came in the place of
    said: Counter[str] = Counter()
    for event in told.events:
        if event.event in _LEAVING:
            said[event.request_id or ""] += event.data["blocks"]
    for name in sorted(said.keys() | back.keys()):
        if said[name] > back[name] or (said[name] < back[name] and not known.has_windows):
            yield "T2", f"request {name} is said to return {said[name]} blocks, {back[name]} came"


_LEAVING: Final = (
    "active_request_finished",
    "active_request_aborted",
    "active_request_preempted",
)


def _reuse(told: Told, known: Knowledge) -> Iterator[Broken]:
    """Every request that was served leaves its content for reuse or is denied that, once (P4)."""
    for event in told.events:
        if event.event != "active_request_finished":
            continue
        request = known.requests[event.request_id or ""]
        kind = "future_reuse_admitted" if request.spec.admit_reuse else "future_reuse_denied"
        reuse = [
            e
            for e in told.events
            if e.request_id == request.name and e.event.startswith("future_reuse_")
        ]
        if [e.event for e in reuse] != [kind]:
            yield "P4", f"request {request.name} ended with {[e.event for e in reuse]}, not {kind}"
            continue
        hits = told.after.requests[request.name].hit_blocks
        exact = (
            not known.config.drafts and known.config.in_flight == 1
        )  # else the last may be there
        if exact and not known.has_windows:
            full = (len(request.tokens) - 1) // known.config.block_size - hits
            yield from _same("T2", reuse[0], {"blocks": full})


# -- blocks


def _victim(event: Event, told: Told, _known: Knowledge) -> Iterator[Broken]:
    yield from _same("T2", event, {"ref_count": 0, "protected": False})
    gone = {(s.args["b"], s.args["k"]) for s in told.steps if s.action == "evict"}
    if (event.data["block_id"], event.data["hash"]) not in gone:
        yield "T2", f"block {event.data['block_id']} is called a victim, and was not evicted"


def _losses(told: Told) -> Iterator[Broken]:
    """A fault is told of every block that it took, and nothing else takes content like one."""
    if told.operation.op not in FAULTS:
        moved = told.after.resident
        gone = {s.args["k"] for s in told.steps if s.action == "lose"} - moved.keys()
        if gone:
            yield "L3", f"{told.operation.op} lost {len(gone)} contents as if by a fault"
    if told.operation.op != "lose":
        return
    lost = {step.args["b"] for step in told.steps if step.action == "lose"}
    said = {e.data["block_id"] for e in told.events if e.event == "resident_block_lost"}
    if not lost <= said:
        yield "T1", f"blocks {sorted(lost - said)} lost their content, and nothing was told"


def _dropped(event: Event, told: Told, _known: Knowledge) -> Iterator[Broken]:
    yield from _same("B10", event, {"succeeded": told.answer})


_JUDGES: Final = {
    "resident_claim_submitted": _submitted,
    "resident_claim_accepted": _decided,
    "resident_claim_refused": _decided,
    "resident_claim_demoted": _ended,
    "resident_claim_expired": _ended,
    "resident_claim_released": _ended,
    "resident_claim_renewed": _renewed,
    "resident_claim_harmed": _harmed,
    "resident_block_lost": _cause,
    "resident_block_materialized": _covered,
    "active_request_submitted": _arrived,
    "active_request_admitted": _admitted,
    "active_request_deferred": _answered,
    "active_request_refused": _answered,
    "allocation_victim_selected": _victim,
    "pool_reset": _dropped,
    "pool_slept": _dropped,
}
