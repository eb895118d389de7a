"""Rules F1 to F4 as one pure function: does a request fit, and if not, who is in its way.

Counting is by union (F1): a block that is both protected and held counts once.  The
function knows block ids and claim ids, no engine; enforcement in the bridge and the
checks in the checker read it.  The reference computes its own answer independently.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from kvclaims.spec.fewest import Gains, fewest
from kvclaims.spec.vocabulary import Outcome

Block = Hashable


@dataclass(frozen=True)
class Promise:
    """What one responsible hard claim is owed.

    `covered` are the blocks it protects now; `reserve` is how many more it was promised and
    does not yet cover (contract, *Terms*).
    """

    covered: frozenset[Block]
    reserve: int = 0


@dataclass(frozen=True)
class Situation:
    """A pool as a request finds it.

    `usable` physical blocks; `promises` by claim id (responsible hard claims only); `active`
    maps every *other* active request to the blocks it holds; `granted` is what each of
    those was granted and has not drawn yet; `holds` are the resident blocks the request holds or
    would hit; `need` is how many blocks more it needs; `materializes` names, by claim, the promised
    contents that the request itself will compute: for each of them one block comes out of a
    reserve (F3), once, even where several claims were promised the same content.
    """

    usable: int
    promises: Mapping[str, Promise]
    active: Mapping[str, frozenset[Block]]
    need: int
    holds: frozenset[Block] = frozenset()
    granted: Mapping[str, int] = field(default_factory=dict)
    materializes: Mapping[str, frozenset[Hashable]] = field(default_factory=dict)


@dataclass(frozen=True)
class Judgement:
    """The outcome with its numbers, in blocks (F4).

    `shortfall` is what is missing with every other active request finished, `missing_now`
    what is missing at this moment; at most one of `blocking_claims` and `waits_on` is filled.
    """

    outcome: Outcome
    shortfall: int
    missing_now: int
    blocking_claims: tuple[str, ...] = ()
    waits_on: tuple[str, ...] = ()


def headroom(situation: Situation) -> int:
    """Free unprotected blocks minus every promise and granted need (F2), before the request."""
    occupied = _protected(situation.promises) | _union(situation.active) | situation.holds
    return situation.usable - len(occupied) - _owed(situation) - sum(situation.granted.values())


def judge(situation: Situation) -> Judgement:
    """Decide one request (F3, F4).  Same situation, same answer.

    The blockers are a set of fewest claims whose end makes the request fit once the others
    finish; among several such sets, the first in the order of claim ids.  No proper subset of
    a set of fewest claims suffices, so it is minimal by inclusion too.  Finding it is hard where
    many claims overlap; past `kvclaims.spec.fewest.LIMIT` steps the set is minimal by
    inclusion, which is what F4 asks for, and still the same for the same situation.

    What makes sets minimal by inclusion easy to find is that ending more claims never makes the
    request fit less: `kvclaims.spec.arbitration` proves it for any number of blocks and claims.

    That no set of fewer claims suffices is a question of exact counts, and is held against Z3's
    optimum up to a bound (`kvclaims.checker.blame`: 9 claims, 14 blocks).  Why larger situations
    bring no new case: blocks that the same claims cover count by their number alone; and of two
    sets of claims, the blamed one and a smaller one, every claim in neither may be taken to stay
    in force, its blocks and reserve taken off `usable`.  So a smaller set that would do shows in
    a situation of the claims of those two sets, and 9 claims hold any two that have 9 together:
    5 blamed where 4 others would do.  This is an argument about the rule; that the search goes
    the same way in the smaller situation is what the comparison on random ones is for.
    """
    missing_now = max(0, situation.need - headroom(situation))
    demand = len(situation.holds) + situation.need
    if demand > situation.usable:
        return Judgement(Outcome.CAPACITY_REQUIRED, demand - situation.usable, missing_now)
    shortfall = _missing_alone(situation, frozenset(situation.promises))
    if shortfall > 0:
        return Judgement(
            Outcome.REFUSED, shortfall, missing_now, blocking_claims=_blockers(situation)
        )
    if missing_now > 0:
        return Judgement(Outcome.DEFERRED, 0, missing_now, waits_on=_waits_on(situation))
    return Judgement(Outcome.SERVED, 0, 0)


def _union(sets: Mapping[str, frozenset[Block]]) -> frozenset[Block]:
    return frozenset().union(*sets.values())


def _protected(promises: Mapping[str, Promise]) -> frozenset[Block]:
    return frozenset().union(*(promise.covered for promise in promises.values()))


def _owed(situation: Situation, kept: frozenset[str] | None = None) -> int:
    """Reserves of the kept claims, less what this very request draws from them."""
    claims = situation.promises.keys() if kept is None else kept
    drawn = frozenset().union(*(situation.materializes.get(c, frozenset()) for c in claims))
    return sum(situation.promises[c].reserve for c in claims) - len(drawn)


def _missing_alone(situation: Situation, kept: frozenset[str]) -> int:
    """Blocks missing with only the `kept` claims in force and every other request finished."""
    protected = _protected({c: p for c, p in situation.promises.items() if c in kept})
    occupied = len(protected | situation.holds) + situation.need + _owed(situation, kept)
    return max(0, occupied - situation.usable)


def _blockers(situation: Situation) -> tuple[str, ...]:
    everyone = frozenset(situation.promises)
    return fewest(_gains(situation), _missing_alone(situation, everyone))


def _gains(situation: Situation) -> Gains:
    """What ending claims frees, told apart by who has to end for it.

    A block is free when every claim that covers it has ended; a content that several claims
    were promised, and that the request would compute, is drawn from a reserve while one of
    them is in force.
    """
    covers: dict[Block, set[str]] = {}
    draws: dict[Hashable, set[str]] = {}
    for claim, promise in situation.promises.items():
        for block in promise.covered - situation.holds:
            covers.setdefault(block, set()).add(claim)
        for content in situation.materializes.get(claim, frozenset()):
            draws.setdefault(content, set()).add(claim)
    together = Counter(frozenset(claims) for claims in covers.values())
    together.subtract(Counter(frozenset(claims) for claims in draws.values()))
    alone = {claim: promise.reserve for claim, promise in situation.promises.items()}
    return Gains(alone, {claims: gain for claims, gain in together.items() if gain})


def _waits_on(situation: Situation) -> tuple[str, ...]:
    """The other requests whose end returns at least one block to this one, held or granted."""
    kept = _protected(situation.promises) | situation.holds
    holders = {r for r, blocks in situation.active.items() if blocks - kept}
    return tuple(sorted(holders.union(r for r, more in situation.granted.items() if more > 0)))
