"""Does a request fit, and if not, who is in its way?  Exact, by union, in plain sets (F1 to F4)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations

from kvclaims.spec.vocabulary import Outcome


@dataclass(frozen=True)
class Owed:
    """What one responsible hard claim has and is owed.

    `lends` are the contents that the claim is still owed and that the request at hand would
    compute itself: for these it draws on the claim's reserve (F3).
    """

    covered: frozenset[int]
    reserve: int
    lends: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Question:
    """A request at the door: it hits the blocks `hits` and needs `need` blocks more.

    `claims` are the responsible hard claims by id, `active` the blocks of the other requests.
    """

    usable: int
    claims: Mapping[str, Owed]
    active: Mapping[str, frozenset[int]]
    hits: frozenset[int]
    need: int


@dataclass(frozen=True)
class Answer:
    """The outcome and its arithmetic in blocks.

    `protected` + the request + every reserve is `together`; `shortfall` is what that exceeds
    the pool by with the other requests finished, `missing_now` with them as they are.
    """

    outcome: Outcome
    shortfall: int
    missing_now: int
    protected: int
    together: int
    blocking: tuple[str, ...] = ()
    waits_on: tuple[str, ...] = ()


def decide(question: Question) -> Answer:
    """Keep the outcomes apart (F4).  The same question has the same answer."""
    everyone = sorted(question.claims)
    protected = _protected(question, everyone)
    together = _demand(question, everyone)
    others = frozenset().union(*question.active.values())
    now = together + len(others - protected - question.hits)
    alone = len(question.hits) + question.need

    def answer(outcome: Outcome, shortfall: int, **named: tuple[str, ...]) -> Answer:
        missing_now = max(0, now - question.usable)
        return Answer(outcome, shortfall, missing_now, len(protected), together, **named)

    if alone > question.usable:
        return answer(Outcome.CAPACITY_REQUIRED, alone - question.usable)
    if together > question.usable:
        shortfall = together - question.usable
        return answer(Outcome.REFUSED, shortfall, blocking=_blame(question, everyone))
    if now > question.usable:
        return answer(Outcome.DEFERRED, 0, waits_on=_waits_on(question, protected))
    return answer(Outcome.SERVED, 0)


def _blame(question: Question, everyone: list[str]) -> tuple[str, ...]:
    """The fewest claims whose end lets the request fit, the first such set in order of ids."""
    for size in range(1, len(everyone) + 1):
        for ended in combinations(everyone, size):
            if _demand(question, [c for c in everyone if c not in ended]) <= question.usable:
                return ended
    raise AssertionError("without claims, a request within the pool fits")


def _waits_on(question: Question, protected: frozenset[int]) -> tuple[str, ...]:
    """The requests whose end brings back at least one block."""
    kept = protected | question.hits
    return tuple(sorted(r for r, blocks in question.active.items() if blocks - kept))


def _demand(question: Question, kept: Iterable[str]) -> int:
    """Blocks needed by the request and the `kept` claims together, each block once (F1).

    A content that several claims are owed is computed once and lent by one of them.
    """
    claims = [question.claims[c] for c in kept]
    lent = frozenset().union(*(c.lends for c in claims))
    reserves = sum(c.reserve for c in claims)
    blocks = _protected(question, kept) | question.hits
    return len(blocks) + question.need + reserves - len(lent)


def _protected(question: Question, kept: Iterable[str]) -> frozenset[int]:
    return frozenset().union(*(question.claims[c].covered for c in kept))
