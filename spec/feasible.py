"""The feasibility rule alone: rules F1 to F4 over counts, with no block, claim or request in sight.

A pool is `usable` blocks.  Of these, `protected` are covered by a hard claim in force; together
with those that only active requests hold they are the `committed` ones, each counted once (F1).
`leaving` blocks are neither, and not back in the queue yet.  The rest is free.  Of the free blocks
`promised` are owed to claims (Σ Reserve) and `granted` to requests.

    free      = usable − committed − leaving
    headroom  = free − promised − granted               what a request can have now
    patience  = usable − protected − promised           what it can have once all others finished
    usable                                              what it can have once all claims ended

The three bounds grow, headroom ≤ patience ≤ usable, so a need of n blocks meets exactly one of
four answers: it is granted, deferred, refused, or told that it takes a larger pool (F4).

`kvclaims.spec.pool` refines this machine, its counts being the images of these
(`kvclaims.spec.abstractions`).  That one block at a time is moved makes one step of the pool
several steps here, such as `draw` and then `protect`.
"""

from __future__ import annotations

from typing import Final

from kvclaims.spec.language import (
    NAT,
    Action,
    Guard,
    Machine,
    Property,
    Symbol,
    Term,
    Update,
    Var,
    becomes,
    both,
    eq,
    every,
    ite,
    new,
    value,
)
from kvclaims.spec.pool import OUTCOME
from kvclaims.spec.vocabulary import Outcome

usable: Final = Symbol("usable", (), NAT, rigid=True, meaning="blocks in the pool")
protected: Final = Symbol("protected", (), NAT, meaning="blocks that a hard claim protects")
committed: Final = Symbol("committed", (), NAT, meaning="blocks protected or active, by union")
leaving: Final = Symbol("leaving", (), NAT, meaning="blocks on their way back to the queue")
promised: Final = Symbol("promised", (), NAT, meaning="Σ Reserve: promised, not yet covered")
granted: Final = Symbol("granted", (), NAT, meaning="granted to requests, not yet taken")
answer: Final = Symbol("answer", (), OUTCOME, meaning="what the last request was told")

n: Final = Var("n", NAT)

free: Final = usable() - committed() - leaving()
headroom: Final = free - promised() - granted()
patience: Final = usable() - protected() - promised()


def _at_most(bound: Term, why: str, *protects: str) -> Guard:
    return Guard(protects, n <= bound, why)


def _told(outcome: Outcome) -> Update:
    return becomes(answer(), value(OUTCOME, outcome))


_SOME: Final = "some block is on its way"

ACTIONS: Final = (
    Action(
        "admit",
        (n,),
        (_at_most(headroom, "headroom covers the need", "F3", "F2"),),
        (becomes(granted(), granted() + n), _told(Outcome.SERVED)),
        "a request is granted n blocks",
    ),
    Action(
        "lapse",
        (n,),
        (_at_most(granted(), "so much was granted", "F2", "F4"),),
        (becomes(granted(), granted() - n),),
        "what was granted and not taken lapses",
    ),
    Action(
        "accept",
        (n,),
        (_at_most(headroom, "headroom covers the promise", "F2"),),
        (becomes(promised(), promised() + n),),
        "a hard claim is promised n blocks",
    ),
    Action(
        "forgive",
        (n,),
        (_at_most(promised(), "so much was promised", "F2", "F4"),),
        (becomes(promised(), promised() - n),),
        "a claim needs n blocks less, or has ended",
    ),
    Action(
        "take",
        (),
        (Guard(("F2", "F1"), granted() > 0, "the request has blocks left of its grant"),),
        (becomes(granted(), granted() - 1), becomes(committed(), committed() + 1)),
        "a request takes a free block that it was granted",
    ),
    Action(
        "draw",
        (),
        (Guard(("F2", "F1", "F4"), promised() > 0, "the claim has reserve left"),),
        (becomes(promised(), promised() - 1), becomes(committed(), committed() + 1)),
        "a free block is taken on a claim's reserve, by the claim or by a request for it",
    ),
    Action(
        "protect",
        (),
        (Guard(("F1", "F4"), protected() < committed(), "some block is in use only"),),
        (becomes(protected(), protected() + 1),),
        "a block in use is protected too: it counts once",
    ),
    Action(
        "expose",
        (n,),
        (_at_most(protected(), "so many are protected", "F2", "F4"),),
        (becomes(protected(), protected() - n),),
        "n blocks lose their protection: their last claim ended",
    ),
    Action(
        "leave",
        (n,),
        (_at_most(committed() - protected(), "so many are not protected", "F1", "F2"),),
        (becomes(committed(), committed() - n), becomes(leaving(), leaving() + n)),
        "n blocks that no claim protects are let go of by their last request",
    ),
    Action(
        "arrive",
        (),
        (Guard(("F2", "F4"), leaving() > 0, _SOME),),
        (becomes(leaving(), leaving() - 1),),
        "a block is back in the queue",
    ),
    Action(
        "stay",
        (),
        (Guard(("F2",), leaving() > 0, _SOME),),
        (becomes(leaving(), leaving() - 1), becomes(committed(), committed() + 1)),
        "a block that was on its way back is covered by another claim",
    ),
    Action(
        "defer",
        (n,),
        (
            Guard(("F3", "F4"), n > headroom, "the request does not fit now"),
            _at_most(patience, "it fits once the others have finished", "F4"),
        ),
        (_told(Outcome.DEFERRED),),
        "a request waits for others to finish",
    ),
    Action(
        "put_off",
        (n,),
        (
            Guard(("F4",), n > patience, "claims are in the way"),
            _at_most(usable(), "it fits the pool by itself", "F4"),
        ),
        (_told(Outcome.DEFERRED),),
        "a request waits, within the limit, for claims to end",
    ),
    Action(
        "refuse",
        (n,),
        (
            Guard(("F4",), n > patience, "claims are in the way even when all others finish"),
            _at_most(usable(), "it fits the pool by itself", "F4"),
        ),
        (_told(Outcome.REFUSED),),
        "a request is refused because of claims",
    ),
    Action(
        "overflow",
        (n,),
        (Guard(("F4",), n > usable(), "it exceeds the pool by itself"),),
        (_told(Outcome.CAPACITY_REQUIRED),),
        "a request can never fit; no claim is to blame",
    ),
)


_COUNTS: Final = (protected, committed, leaving, promised, granted)

# Said by the bounds, and not by the guards of the actions: a wrong guard must not move the rule.
_granted: Final = n <= headroom
_deferred: Final = (n > headroom) & (n <= patience)
_refused: Final = (n > patience) & (n <= usable())
_overflown: Final = n > usable()
_RIGHT: Final = [ite(is_so, 1, 0) for is_so in (_granted, _deferred, _refused, _overflown)]

PROPERTIES: Final = (
    Property("F1", "union fits", free >= 0, "What is committed or leaving fits the pool."),
    Property(
        "F1",
        "protected are committed",
        protected() <= committed(),
        "A protected block is one of those committed, counted once.",
    ),
    Property(
        "F2",
        "headroom",
        headroom >= 0,
        "Free blocks cover every promise and every granted need, jointly.",
    ),
    Property(
        "F3",
        "granted only with headroom",
        new(headroom) >= 0,
        "After a grant headroom is at or above zero.",
        on="admit",
    ),
    Property(
        "F3",
        "taking costs nothing more",
        eq(new(headroom), headroom),
        "A request that takes what it was granted takes no headroom a second time.",
        on="take",
    ),
    Property(
        "F3",
        "drawing costs nothing more",
        eq(new(headroom), headroom),
        "What is taken on a claim's reserve is taken off the promise, not twice.",
        on="draw",
    ),
    Property(
        "F3",
        "deferred only without headroom",
        n > headroom,
        "A request that fits now is not made to wait.",
        on="defer",
    ),
    Property(
        "F4",
        "deferred means the others are in the way",
        both(n > headroom, (n + protected() + promised()) <= usable()),
        "A deferred request would fit if other active requests finished.",
        on="defer",
    ),
    Property(
        "F4",
        "put off means claims are in the way",
        both((n + protected() + promised()) > usable(), n <= usable()),
        "A request that is put off for claims would fit if claims ended too.",
        on="put_off",
    ),
    Property(
        "F4",
        "refused means claims are in the way",
        both((n + protected() + promised()) > usable(), n <= usable()),
        "A refused request would not fit with all others finished, but would without claims.",
        on="refuse",
    ),
    Property(
        "F4",
        "capacity required means larger than the pool",
        n > usable(),
        "Only a request that exceeds the pool by itself is told so.",
        on="overflow",
    ),
    Property(
        "F4",
        "one answer",
        every(n, eq(sum(_RIGHT[1:], _RIGHT[0]), 1)),
        "Whatever a request needs, exactly one of the four answers is right.",
    ),
    Property(
        "F2",
        "counts are not negative",
        both(*(count() >= 0 for count in _COUNTS)),
        "Every count stays at or above zero.",
        goal=False,
    ),
)

FEASIBLE: Final = Machine(
    name="feasible",
    meaning="the feasibility rule over counts",
    symbols=(usable, *_COUNTS, answer),
    axioms=(usable() >= 0,),
    init=(*(becomes(count(), 0) for count in _COUNTS), _told(Outcome.PENDING)),
    actions=ACTIONS,
    properties=PROPERTIES,
)
"""Where a request is put off more often than the limit allows is a matter of single requests; the
scheduler and its limit are a machine of their own."""
