"""A refusal's numbers, counted again from the fold alone (T2, F4).

The fold knows which blocks every claim covers and every request holds; from those it asks
`spec.feasibility` anew and compares.  Without the events that tell block tables only bounds can
be judged.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvclaims.spec.feasibility import Judgement, Promise, Situation, judge
from kvclaims.spec.vocabulary import Outcome


@dataclass(frozen=True)
class Held:
    """What the fold knows of one responsible hard claim: the blocks it covers, how many it was
    granted, and the positions of those it covers."""

    covered: frozenset[int]
    granted: int


@dataclass
class Tables:
    """Block tables of active requests as the trace tells them; `exact` once it tells any."""

    exact: bool = False
    blocks: dict[str, tuple[int, ...]] = field(default_factory=dict)
    lent: dict[int, str] = field(default_factory=dict)
    """Block → the claim on whose reserve a request took it."""
    found: dict[str, tuple[tuple[int, ...], tuple[tuple[str, int], ...]]] = field(
        default_factory=dict
    )

    def grew(self, request: str, data: Mapping[str, Any]) -> None:
        self.exact = True
        self.blocks[request] = tuple(data["blocks"])
        self.lent.update({block: claim for claim, block in data["lent"]})

    def asked(self, request: str, data: Mapping[str, Any]) -> None:
        self.exact = True
        draws = tuple((str(claim), int(position)) for claim, position in data["draws"])
        self.found[request] = (tuple(data["hits"]), draws)

    def born(self, claim: str) -> None:
        """A new generation of a claim has lent nothing."""
        self.lent = {block: c for block, c in self.lent.items() if c != claim}

    def covered(self, claim: str, block: int) -> None:
        """What a claim lent and covers now is a loan no more, also once it loses the block."""
        if self.lent.get(block) == claim:
            del self.lent[block]

    def left(self, request: str) -> None:
        self.blocks.pop(request, None)
        held = set().union(*self.blocks.values())
        self.lent = {block: claim for block, claim in self.lent.items() if block in held}

    @property
    def used(self) -> frozenset[int]:
        return frozenset().union(*self.blocks.values())


def recount(
    event: Mapping[str, Any],
    request: str,
    usable: int,
    claims: Mapping[str, Held],
    tables: Tables,
) -> Iterator[str]:
    """Where the numbers of a deferral or refusal differ from those of the fold."""
    protected = frozenset().union(*(held.covered for held in claims.values()))
    wanted: dict[str, Any] = {"protected_resident_blocks": len(protected)}
    if tables.exact:
        if request not in tables.found:
            yield f"request {request} was answered, and nothing says what it found"
            return
        situation = _situation(event, request, usable, claims, tables)
        answer = judge(situation)
        wanted |= _numbers(situation, answer, protected, tables.used)
        if (told := _outcome(event)) is not answer.outcome:
            yield f"request {request} is told {told}, the fold makes it {answer.outcome}"
            return
    else:
        yield from _bounds(event, request, usable)
    for name, value in wanted.items():
        if event[name] != value:
            yield f"request {request} is told {name} {event[name]}, the fold makes it {value}"


def _outcome(event: Mapping[str, Any]) -> Outcome:
    """What the arithmetic said: a deferral by claims is a refusal that is put off."""
    told = Outcome(event["outcome"])
    put_off = told is Outcome.DEFERRED and event["blocking_claim_ids"]
    return Outcome.REFUSED if put_off else told


def _situation(
    event: Mapping[str, Any],
    request: str,
    usable: int,
    claims: Mapping[str, Held],
    tables: Tables,
) -> Situation:
    hits, draws = tables.found[request]
    on_loan: dict[str, int] = {}
    for block, claim in tables.lent.items():
        if claim in claims and block not in claims[claim].covered:
            on_loan[claim] = on_loan.get(claim, 0) + 1
    promises: dict[str, Promise] = {}
    materializes: dict[str, frozenset[Hashable]] = {}
    for claim, held in claims.items():
        reserve = held.granted - len(held.covered) - on_loan.get(claim, 0)
        promises[claim] = Promise(held.covered, reserve)
        materializes[claim] = frozenset(position for c, position in draws if c == claim)
    others = {r: frozenset(b) for r, b in tables.blocks.items() if r != request}
    return Situation(
        usable=usable,
        promises=promises,
        active=others,
        need=event["active_live_blocks_required"] - len(hits),
        holds=frozenset(hits),
        materializes=materializes,
    )


def _numbers(
    situation: Situation, answer: Judgement, protected: frozenset[int], used: frozenset[int]
) -> dict[str, Any]:
    drawn: frozenset[Hashable] = frozenset().union(*situation.materializes.values())
    reserves = sum(promise.reserve for promise in situation.promises.values())
    together = len(protected | situation.holds) + situation.need + reserves - len(drawn)
    return {
        "capacity_shortfall_blocks": answer.shortfall,
        "missing_now": answer.missing_now,
        "blocking_claim_ids": list(answer.blocking_claims),
        "waits_on": list(answer.waits_on),
        "resident_plus_active_blocks": together,
        "free_blocks_before_allocate": situation.usable - len(protected | used),
        "active_live_blocks_current": len(used),
    }


def _bounds(event: Mapping[str, Any], request: str, usable: int) -> Iterator[str]:
    """What must hold between the numbers whatever the tables are."""
    together, required = event["resident_plus_active_blocks"], event["active_live_blocks_required"]
    outcome = _outcome(event)
    short = {
        Outcome.REFUSED: max(0, together - usable),
        Outcome.CAPACITY_REQUIRED: max(0, required - usable),
    }.get(outcome, 0)
    if event["capacity_shortfall_blocks"] != short:
        told = event["capacity_shortfall_blocks"]
        yield f"request {request} is told a shortfall of {told}, not {short}"
    protected, current = event["protected_resident_blocks"], event["active_live_blocks_current"]
    least, most = usable - protected - current, usable - max(protected, current)
    if not max(0, least) <= event["free_blocks_before_allocate"] <= most:
        yield (
            f"request {request} met {event['free_blocks_before_allocate']} free blocks, between "
            f"{max(0, least)} and {most} are possible"
        )
