"""What observations alone can show: facts that must hold in one, moves between two, differences.

Nothing here knows an engine or keeps anything.  Each function yields findings: a rule of the
contract and one sentence about what was seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from kvclaims.spec.claims import TABLE
from kvclaims.spec.interface import ClaimAnswer, ClaimView, Observation, PoolConfig, RequestView
from kvclaims.spec.operations import Operation, claim_spec
from kvclaims.spec.vocabulary import RESPONSIBLE, TERMINAL, Decision, Outcome, Phase, Protection

Broken = tuple[str, str]
"""A rule's number and what was seen."""

FAULTS: Final = ("lose", "reset", "sleep", "restore")
"""Operations that stand for something outside the runtime's control (L5)."""

STEPPING: Final = ("step", "dispatch", "complete", "load")
"""Operations in which requests move on."""

KEEPS_CONTENT: Final = {
    "declare": "B3",
    "release": "P2",
    "demote": "P2",
    "renew": "L6",
    "advance": "L6",
    "submit": "B3",
    "abort": "B7",
    "wake": "B10",
}
"""Operations that never change what is resident, with the rule that would be broken."""


# --- one observation ---------------------------------------------------------------------


def standing(seen: Observation) -> Iterator[Broken]:
    """Facts that hold in every observation between two operations."""
    if seen.headroom < 0:
        yield "F2", f"headroom is {seen.headroom}"
    if not 0 <= seen.free <= seen.usable:
        yield "F1", f"{seen.free} blocks are free in a pool of {seen.usable}"
    for name, claim in seen.claims.items():
        yield from _claim_stands(name, claim)
    for name, request in seen.requests.items():
        if request.state in ("waiting", "finished") and request.blocks:
            yield "B7", f"{request.state} request {name} still holds {len(request.blocks)} blocks"
        if (request.state == "finished") != (request.outcome in _FINAL):
            yield "F4", f"request {name} is {request.state} with outcome {request.outcome}"


def _claim_stands(name: str, claim: ClaimView) -> Iterator[Broken]:
    if claim.phase not in RESPONSIBLE and claim.reserve:
        yield "F2", f"claim {name} is {claim.phase} and still promised {claim.reserve} blocks"
    if claim.phase is not Phase.MATERIALIZED:
        return
    if claim.survivors < claim.footprint:
        rule = "L5" if claim.protection is Protection.HARD else "P3"
        yield (
            rule,
            f"claim {name} is materialized with {claim.survivors} of {claim.footprint} blocks",
        )
    elif claim.covered != claim.footprint or claim.reserve:
        yield (
            "L7",
            f"claim {name} is materialized, but covers {claim.covered} of {claim.footprint} "
            f"blocks and is promised {claim.reserve} more",
        )


_FINAL: Final = (
    Outcome.SERVED,
    Outcome.SERVED_NO_ADMIT,
    Outcome.REFUSED,
    Outcome.CAPACITY_REQUIRED,
    Outcome.ABORTED,
)


def answered(asked: Operation, answer: ClaimAnswer, config: PoolConfig) -> Iterator[Broken]:
    """A decision on a claim has a reason and numbers that agree with it (L2, F2); no claim gets
    more than what survives in the pool."""
    name, hard = asked.fields["claim"], _protection(asked) is Protection.HARD
    if not answer.reason:
        yield "L2", f"claim {name} was answered {answer.decision} without a reason"
    if (answer.decision is Decision.REFUSED) != (answer.granted is None):
        yield "L2", f"claim {name} was answered {answer.decision} and granted {answer.granted}"
    spec = claim_spec(asked.fields, config.block_size).predicate
    if not config.gives(spec):
        if answer.granted is not None:
            yield "L2", f"claim {name} was granted {spec.fidelity} where {config.fidelity} survives"
        return
    if answer.granted is not None:
        if (answer.granted.fidelity, answer.granted.bound) != (spec.fidelity, spec.bound):
            yield "L2", f"claim {name} asked for {spec}, was granted {answer.granted}"
        clipped = answer.granted.n != asked.fields["n"]
        if clipped != (answer.decision is Decision.CLIPPED):
            yield (
                "L2",
                f"claim {name} asked for {asked.fields['n']} blocks, was granted "
                f"{answer.granted.n} and told {answer.decision}",
            )
        if hard and answer.cost > answer.headroom:
            yield (
                "F2",
                f"claim {name} was accepted for {answer.cost} blocks with headroom "
                f"{answer.headroom}",
            )
    if answer.decision is Decision.REFUSED and hard and answer.cost <= answer.headroom:
        yield (
            "F2",
            f"claim {name} costs {answer.cost} blocks, headroom is {answer.headroom}, yet refused",
        )


def _protection(asked: Operation) -> Protection:
    return Protection(asked.fields.get("protection", Protection.HARD))


# --- two observations --------------------------------------------------------------------


def moves(operation: Operation, before: Observation, after: Observation) -> Iterator[Broken]:
    """What an operation may do to claims, requests and content, seen from outside."""
    for name, claim in after.claims.items():
        yield from _claim_moves(operation, name, before.claims.get(name), claim)
    for name in before.claims.keys() - after.claims.keys():
        yield "L1", f"claim {name} is gone"
    for name, request in before.requests.items():
        now = after.requests.get(name)
        if now is None or (
            request.state == "finished"
            and (now.state, now.outcome) != ("finished", request.outcome)
        ):
            yield "F4", f"request {name} had ended {request.outcome} and is heard of again"
    if operation.op in KEEPS_CONTENT and before.resident.keys() != after.resident.keys():
        rule = KEEPS_CONTENT[operation.op]
        yield rule, f"{operation.op} changed what is resident: {_changed(before, after)}"


def let_go(
    operation: Operation, before: Observation, after: Observation, *, under_way: bool = False
) -> Iterator[Broken]:
    """What may not be given up: blocks that a transfer writes, a promise that could be kept; and
    what has to be: the blocks of a request that was aborted, as no step writes for it later.

    An engine may keep those until the steps that are `under_way` have ended."""
    if operation.op == "abort":
        name = operation.fields["request"]
        was, now = before.requests.get(name), after.requests[name]
        if was is not None and was.state == "loading":
            if not now.blocks:
                yield "B5", f"request {name} was aborted, and its blocks freed under a transfer"
        elif now.state != "finished" and not (under_way and now.state == "ending"):
            yield (
                "B7",
                f"request {name} was aborted, is {now.state} and keeps {len(now.blocks)} blocks",
            )
    if operation.op in FAULTS:
        for name, claim in after.claims.items():
            last = before.claims.get(name)
            if last is None or claim.phase is not Phase.DEMOTED or last.phase is not Phase.ACCEPTED:
                continue
            if claim.protection is Protection.HARD and before.headroom >= last.covered:
                yield (
                    "F6",
                    f"claim {name} was demoted for a fault, and {before.headroom} blocks could "
                    "be promised in place of what it lost",
                )


def _claim_moves(
    operation: Operation, name: str, was: ClaimView | None, claim: ClaimView
) -> Iterator[Broken]:
    own = operation.fields.get("claim") == name
    reborn = was is None or was.generation != claim.generation
    if reborn and not (own and operation.op == "declare"):
        yield "L1", f"generation {claim.generation} of claim {name} appeared out of nowhere"
        return
    if (
        was is not None
        and reborn
        and (was.phase not in TERMINAL or claim.generation <= was.generation)
    ):
        yield (
            "L1",
            f"generation {claim.generation} of claim {name} began while {was.generation} "
            f"was {was.phase}",
        )
        return
    start = Phase.ABSENT if was is None or reborn else was.phase
    if claim.phase is start:
        return
    if claim.phase not in _reachable(start):
        rule = "L4" if claim.phase is Phase.HARMED else "L1"
        yield rule, f"claim {name} went from {start} to {claim.phase}"
        return
    yield from _claim_ends(operation, own, name, start, claim)


def _claim_ends(
    operation: Operation, own: bool, name: str, start: Phase, claim: ClaimView
) -> Iterator[Broken]:
    """A claim's phase changed: was this operation one that may do so?"""
    hard = claim.protection is Protection.HARD
    match claim.phase:
        case Phase.MATERIALIZED if claim.survivors < claim.footprint:
            yield (
                "L7",
                f"claim {name} was materialized with {claim.survivors} of {claim.footprint} blocks",
            )
        case Phase.HARMED:
            if hard and operation.op not in FAULTS:
                yield "L5", f"hard claim {name} was harmed by {operation.op}"
            elif claim.survivors == claim.footprint and operation.op not in STEPPING:
                # A step may take the content from one request and compute it for another.
                yield "L3", f"claim {name} is harmed, and its predicate holds"
            elif start is not Phase.MATERIALIZED:
                yield "L3", f"claim {name} was {start}, its predicate did not hold before the harm"
        case Phase.EXPIRED if operation.op != "advance":
            yield "L6", f"claim {name} expired by {operation.op}"
        case Phase.RELEASED if not (own and operation.op == "release"):
            yield "L1", f"claim {name} was released by {operation.op}"
        case Phase.DEMOTED:
            asked = own and operation.op == "demote"
            yields = claim.protection is Protection.DEMOTABLE or operation.op in FAULTS
            if not (asked or yields):
                yield "F6", f"claim {name} was demoted by {operation.op}"


def _reachable(start: Phase) -> frozenset[Phase]:
    """The phases that one generation can reach from a phase along the table (L1)."""
    found: set[Phase] = set()
    ahead = [start]
    while ahead:
        for phase in TABLE[ahead.pop()]:
            if phase not in found and not (phase is Phase.SUBMITTED and start is not Phase.ABSENT):
                found.add(phase)
                if phase not in TERMINAL:
                    ahead.append(phase)
    return frozenset(found)


def _changed(before: Observation, after: Observation) -> str:
    gone, new = before.resident.keys() - after.resident.keys(), after.resident.keys()
    parts = [f"{len(gone)} contents gone", f"{len(new - before.resident.keys())} new"]
    return ", ".join(parts)


# --- two runtimes ------------------------------------------------------------------------

DIFFERENCES: Final = {
    "free": "B1",
    "headroom": "F2",
    "resident": "B3",
    "claims": "L1",
    "phase": "L1",
    "generation": "L1",
    "protection": "L2",
    "footprint": "L2",
    "leading": "L3",
    "survivors": "L3",
    "covered": "P2",
    "reserve": "F2",
    "requests": "F4",
    "state": "F3",
    "outcome": "F4",
    "blocks": "B11",
    "tables": "B11",
    "hit_blocks": "P5",
    "shortfall": "F4",
    "blocking_claims": "F4",
    "computed": "B11",
    "answer": "L2",
    "reset": "B10",
    "lose": "B3",
    "sleep": "B10",
    "turned down": "B9",
}
"""What two runtimes can disagree about after the same operations, with the rule at stake.

`blocks` is how many blocks a request holds (ids are the engine's own business), `answer` the
decision on a claim without the wording of its reason.  A phase is told more precisely by
`_PHASES` where one of the two is there."""

_PHASES: Final = (
    (Phase.HARMED, "L3"),
    (Phase.EXPIRED, "L6"),
    (Phase.MATERIALIZED, "L7"),
    (Phase.REFUSED, "F2"),
)


def differences(ours: Observation, theirs: Observation) -> Iterator[Broken]:
    """Where an engine's observation differs from the reference's, block ids left out."""
    if _alike(ours, theirs):
        return
    pairs: list[tuple[str, str, Any, Any]] = [
        ("requests", "", sorted(ours.requests), sorted(theirs.requests)),
        ("claims", "", sorted(ours.claims), sorted(theirs.claims)),
    ]
    for name in ours.requests.keys() & theirs.requests.keys():
        pairs += _fields(f"request {name}", _request(ours, name), _request(theirs, name))
    for name in ours.claims.keys() & theirs.claims.keys():
        pairs += _fields(f"claim {name}", vars(ours.claims[name]), vars(theirs.claims[name]))
    pairs += [
        ("resident", "", sorted(ours.resident), sorted(theirs.resident)),
        ("free", "", ours.free, theirs.free),
        ("headroom", "", ours.headroom, theirs.headroom),
    ]
    for what, of, mine, other in pairs:
        if mine != other and not (what == "computed" and None in (mine, other)):
            yield _differs(what, of, mine, other)


def _alike(ours: Observation, theirs: Observation) -> bool:
    """The usual case, told quickly."""
    return (
        ours.free == theirs.free
        and ours.headroom == theirs.headroom
        and ours.claims == theirs.claims
        and ours.resident.keys() == theirs.resident.keys()
        and ours.requests.keys() == theirs.requests.keys()
        and all(_same_request(ours.requests[r], theirs.requests[r]) for r in ours.requests)
    )


def _same_request(ours: RequestView, theirs: RequestView) -> bool:
    return (
        ours.state == theirs.state
        and ours.outcome is theirs.outcome
        and len(ours.blocks) == len(theirs.blocks)
        and ours.hit_blocks == theirs.hit_blocks
        and ours.shortfall == theirs.shortfall
        and ours.blocking_claims == theirs.blocking_claims
        and ours.computed == theirs.computed
    )


def _fields(
    of: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]
) -> Iterable[tuple[str, str, Any, Any]]:
    return [(what, of, ours[what], theirs[what]) for what in ours]


def _request(seen: Observation, name: str) -> dict[str, Any]:
    view: RequestView = seen.requests[name]
    return {**vars(view), "blocks": len(view.blocks)}


def _differs(what: str, of: str, ours: Any, theirs: Any) -> Broken:
    rule = DIFFERENCES[what]
    if what == "phase":
        rule = next((r for phase, r in _PHASES if phase in (ours, theirs)), rule)
    if what == "resident":
        mine, other = set(ours), set(theirs)
        ours, theirs = f"also {sorted(mine - other)}", f"also {sorted(other - mine)}"
    name = f"{what} of {of}" if of else what
    return rule, f"{name}: the reference says {theirs}, the engine {ours}"


# --- showing -----------------------------------------------------------------------------


def changed_fields(
    before: Observation, after: Observation
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What changed between two observations, before and after."""
    old, new = _flat(before), _flat(after)
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    return {n: old[n] for n in names if n in old}, {n: new[n] for n in names if n in new}


def _flat(seen: Observation) -> dict[str, Any]:
    flat: dict[str, Any] = {"free": seen.free, "headroom": seen.headroom}
    for kind, views in (("claim", seen.claims), ("request", seen.requests)):
        for name, view in views.items():
            for what, value in vars(view).items():
                flat[f"{kind} {name}: {what}"] = list(value) if type(value) is tuple else value
    flat |= {f"content {key}: block": block for key, block in seen.resident.items()}
    return flat
