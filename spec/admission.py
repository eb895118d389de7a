"""The queue at the door: who is admitted, deferred, refused, and that everybody is in the end.

Rules V3 and B11, and F2 to F4 as far as they meet there, for any number of requests and claims.
The pool is seen as numbers: a running request takes `need` blocks, a claim in force `size`, and
none of them is shared (sharing only makes room; `kvclaims.spec.pool` counts by union).

All is seen from one arbitrary request, `ours`.  Whoever came `ahead` of it goes first; those
behind it may come and go for ever.  Among those ahead any order is allowed, so a queue in order
of arrival is one of the behaviours.  A request that ended makes way for another of its name.

A running request may grow; where there is no room the one that came last is sent back to the
queue, perhaps itself, and keeps what it has produced, so that each such step is a step forward.
"""

from __future__ import annotations

from typing import Final

from kvclaims.spec.claims import CLAIM
from kvclaims.spec.language import (
    NAT,
    Action,
    Guard,
    Machine,
    Property,
    Sort,
    Symbol,
    Term,
    Update,
    Var,
    becomes,
    both,
    either,
    eq,
    every,
    ite,
    ne,
    new,
    one_of,
    some,
    total,
    value,
)
from kvclaims.spec.pool import OUTCOME, REQUEST, outcome
from kvclaims.spec.progress import Fair, Helpful, Ranking, Response
from kvclaims.spec.vocabulary import Outcome

STANDING: Final = Sort("Standing", ("absent", "waiting", "running", "ended"))

ours: Final = Symbol("ours", (REQUEST,), rigid=True, meaning="the request all is seen from")
usable: Final = Symbol("usable", (), NAT, rigid=True, meaning="blocks of the pool")
defer_limit: Final = Symbol(
    "defer_limit", (), NAT, rigid=True, meaning="how often claims may defer one request"
)
size: Final = Symbol("size", (CLAIM,), NAT, rigid=True, meaning="blocks the claim protects")
standing: Final = Symbol("standing", (REQUEST,), STANDING, meaning="where the request stands")
need: Final = Symbol("need", (REQUEST,), NAT, meaning="blocks that its tokens take")
todo: Final = Symbol("todo", (REQUEST,), NAT, meaning="blocks by which it may grow still")
deferrals: Final = Symbol("deferrals", (REQUEST,), NAT, meaning="how often claims deferred it")
ahead: Final = Symbol("ahead", (REQUEST,), meaning="the request came before ours")
in_force: Final = Symbol("in_force", (CLAIM,), meaning="a hard claim that is responsible")

r: Final = Var("r", REQUEST)
q: Final = Var("q", REQUEST)
c: Final = Var("c", CLAIM)
n: Final = Var("n", NAT)
k: Final = Var("k", NAT)
_r: Final = Var("p", REQUEST)
_c: Final = Var("d", CLAIM)


def stands(request: Term, *where: str) -> Term:
    return one_of(standing(request), *(value(STANDING, name) for name in where))


def live(request: Term) -> Term:
    return stands(request, "waiting", "running")


def early(request: Term) -> Term:
    """Ours, or one that came before it."""
    return ours(request) | ahead(request)


def told(request: Term, *what: Outcome) -> Term:
    return one_of(outcome(request), *(value(OUTCOME, o) for o in what))


held: Final = total(_r, ite(stands(_r, "running"), need(_r), 0))
claimed: Final = total(_c, ite(in_force(_c), size(_c), 0))
room: Final = usable() - claimed
"""Blocks left with every other request finished."""
headroom: Final = usable() - claimed - held

_RUNS_LATE: Final = some(_r, stands(_r, "running") & ~early(_r))
_WAITS_EARLY: Final = some(_r, stands(_r, "waiting") & early(_r))
_WAITS_AHEAD: Final = some(_r, stands(_r, "waiting") & ahead(_r))
_OURS_RUNS: Final = some(_r, stands(_r, "running") & ours(_r))
NOBODY_RUNS: Final = ~some(_r, stands(_r, "running"))


def first_in_line(request: Term) -> Term:
    """Nobody who came earlier waits."""
    return both(ours(request) >> ~_WAITS_AHEAD, early(request) | ~_WAITS_EARLY)


def last_to_run(request: Term) -> Term:
    """Nobody who came later runs."""
    return both(early(request) >> ~_RUNS_LATE, ahead(request) >> ~_OURS_RUNS)


def _goes(request: Term, where: str) -> Update:
    return becomes(standing(request), value(STANDING, where))


def _says(request: Term, what: Outcome) -> Update:
    return becomes(outcome(request), value(OUTCOME, what))


_WAITING: Final = Guard(("F4",), stands(r, "waiting"), "the request waits")
_RUNNING: Final = Guard(("B11",), stands(r, "running"), "the request runs")
_TOO_LARGE_NOW: Final = Guard(("F3",), need(r) > headroom, "it does not fit now")
_IN_THE_WAY: Final = Guard(("F4",), need(r) > room, "claims are in the way")
_FITS_ALONE: Final = Guard(("F4",), need(r) <= usable(), "it fits the pool by itself")
_GROWS: Final = Guard(("B11",), todo(r) > 0, "it has not grown to the full")
_ABSENT: Final = Guard(("B11",), stands(r, "absent", "ended"), "no request of that name is there")

_ARRIVES: Final = (
    _goes(r, "waiting"),
    _says(r, Outcome.PENDING),
    becomes(need(r), n),
    becomes(todo(r), k),
    becomes(deferrals(r), 0),
)

ACTIONS: Final = (
    Action(
        "come",
        (r, n, k),
        (
            _ABSENT,
            Guard(("B11",), ours(r), "it is ours"),
            Guard(("B11",), n > 0, "it has a prompt"),
        ),
        (
            *_ARRIVES,
            becomes(ahead(_r), live(_r), over=(_r,)),
        ),
        "our request arrives, and goes behind all that are there",
    ),
    Action(
        "submit",
        (r, n, k),
        (
            _ABSENT,
            Guard(("B11",), ~ours(r), "it is another one"),
            Guard(("B11",), n > 0, "it has a prompt"),
        ),
        (
            *_ARRIVES,
            becomes(ahead(r), False),
        ),
        "another request arrives, and goes behind ours",
    ),
    Action(
        "admit",
        (r,),
        (
            Guard(("B11", "F4"), stands(r, "waiting"), "the request waits"),
            Guard(("B11",), first_in_line(r), "nobody who came before it waits"),
            Guard(("F2", "F3"), need(r) <= headroom, "headroom covers what it needs"),
        ),
        (_goes(r, "running"), _says(r, Outcome.PENDING)),
        "the first in line is admitted",
    ),
    Action(
        "wait",
        (r,),
        (
            _WAITING,
            _TOO_LARGE_NOW,
            Guard(("F4",), need(r) <= room, "it fits once the others have finished"),
        ),
        (_says(r, Outcome.DEFERRED),),
        "congestion: the request is deferred until others have finished",
    ),
    Action(
        "defer",
        (r,),
        (
            _WAITING,
            _IN_THE_WAY,
            _FITS_ALONE,
            Guard(("F4",), deferrals(r) < defer_limit(), "it was not deferred that often yet"),
        ),
        (_says(r, Outcome.DEFERRED), becomes(deferrals(r), deferrals(r) + 1)),
        "claims are in the way, and may end meanwhile: the request is deferred once more",
    ),
    Action(
        "refuse",
        (r,),
        (
            _WAITING,
            _IN_THE_WAY,
            _FITS_ALONE,
            Guard(
                ("F4",), eq(deferrals(r), defer_limit()), "it was deferred as often as it may be"
            ),
        ),
        (_goes(r, "ended"), _says(r, Outcome.REFUSED)),
        "claims are in the way still: the request is refused",
    ),
    Action(
        "overflow",
        (r,),
        (_WAITING, Guard(("F4",), need(r) > usable(), "it exceeds the pool by itself")),
        (_goes(r, "ended"), _says(r, Outcome.CAPACITY_REQUIRED)),
        "the request can never fit",
    ),
    Action(
        "grow",
        (r,),
        (
            _RUNNING,
            _GROWS,
            Guard(("F2",), headroom > 0, "there is room for one block more"),
        ),
        (becomes(need(r), need(r) + 1), becomes(todo(r), todo(r) - 1)),
        "a running request grows by a block",
    ),
    Action(
        "push_out",
        (r, q),
        (
            _RUNNING,
            _GROWS,
            Guard(("B11", "F2", "F4"), stands(q, "running"), "the other runs too"),
            Guard(("B11",), last_to_run(q), "the other came last of those that run"),
            Guard(("B11",), headroom <= 0, "there is no room"),
        ),
        (
            becomes(need(r), need(r) + 1),
            becomes(todo(r), todo(r) - 1),
            _goes(q, "waiting"),
        ),
        "no room to grow: who came last, perhaps the request itself, is sent back to the queue",
    ),
    Action(
        "finish",
        (r,),
        (Guard(("F4",), stands(r, "running"), "the request runs"),),
        (_goes(r, "ended"), _says(r, Outcome.SERVED)),
        "a running request finishes, at its full growth or earlier",
    ),
    Action(
        "abort",
        (r,),
        (Guard(("F4",), live(r), "the request is there"),),
        (_goes(r, "ended"), _says(r, Outcome.ABORTED)),
        "the request is aborted",
    ),
    Action(
        "accept",
        (c,),
        (Guard(("F2",), ~in_force(c) >> (size(c) <= headroom), "headroom covers the promise"),),
        (becomes(in_force(c), True),),
        "a hard claim is accepted",
    ),
    Action("end", (c,), (), (becomes(in_force(c), False),), "the claim ends"),
)

_turned_down = new(told(r, Outcome.DEFERRED, Outcome.REFUSED, Outcome.CAPACITY_REQUIRED))
_answered = told(r, Outcome.SERVED, Outcome.REFUSED, Outcome.CAPACITY_REQUIRED, Outcome.ABORTED)


def _unchanged(*terms: Term) -> Term:
    return both(*(eq(new(term), term) for term in terms))


PROPERTIES: Final = (
    Property(
        "F2",
        "headroom",
        headroom >= 0,
        "What runs and what is promised fit the pool together.",
    ),
    Property(
        "F3",
        "granted only with headroom",
        new(headroom >= 0),
        "After an admission headroom is at or above zero.",
        on="admit",
    ),
    Property(
        "F3",
        "congestion only without headroom",
        need(r) > headroom,
        "A request that fits now is not made to wait for others.",
        on="wait",
    ),
    Property(
        "F4",
        "congestion passes",
        need(r) + claimed <= usable(),
        "Who is told to wait for others fits once they have finished.",
        on="wait",
    ),
    Property(
        "F4",
        "deferred because of claims",
        both(need(r) + claimed > usable(), need(r) <= usable()),
        "A deferral is counted only where claims are in the way of a request that could fit.",
        on="defer",
    ),
    Property(
        "F4",
        "refused after the last deferral",
        both(need(r) + claimed > usable(), need(r) <= usable(), eq(deferrals(r), defer_limit())),
        "A request is refused only where claims are in its way, after as many deferrals as the "
        "limit says.",
        on="refuse",
    ),
    Property(
        "F4",
        "capacity required means larger than the pool",
        need(r) > usable(),
        "Only a request that exceeds the pool by itself is told so.",
        on="overflow",
    ),
    Property(
        "F4",
        "deferrals are limited",
        every(r, deferrals(r) <= defer_limit()),
        "Claims defer no request more often than the limit says.",
    ),
    Property(
        "F4",
        "only a waiting request is turned down",
        every(r, (ne(new(outcome(r)), outcome(r)) & _turned_down) >> stands(r, "waiting")),
        "Nobody but a waiting request is told to wait or to go.",
    ),
    Property(
        "F4",
        "an answer is final",
        every(
            r,
            stands(r, "ended")
            >> either(
                _unchanged(standing(r), outcome(r)),
                new(stands(r, "waiting") & told(r, Outcome.PENDING)) & eq(new(deferrals(r)), 0),
            ),
        ),
        "A request that ended stays as it is until another one of its name arrives.",
    ),
    Property(
        "F4",
        "ended means answered",
        every(
            r,
            both(
                stands(r, "ended") >> _answered,
                told(r, Outcome.DEFERRED) >> stands(r, "waiting"),
                stands(r, "absent", "running") >> told(r, Outcome.PENDING),
            )
            & (stands(r, "waiting") >> ~_answered),
        ),
        "A request has an outcome exactly when it has ended, and is deferred only while it waits.",
    ),
    Property(
        "F4",
        "moves along its stations",
        every(
            r,
            both(
                new(stands(r, "absent")) >> stands(r, "absent"),
                new(stands(r, "running")) >> live(r),
                (stands(r, "waiting") & new(stands(r, "ended"))) >> ~new(told(r, Outcome.SERVED)),
            ),
        ),
        "Only a request that waited runs, and only one that ran is served.",
    ),
    Property(
        "B11",
        "nobody overtakes",
        both(
            every(r, (stands(r, "waiting") & early(r)) >> ~_RUNS_LATE),
            every(r, (stands(r, "waiting") & ahead(r)) >> ~_OURS_RUNS),
        ),
        "While a request waits nobody runs who came after it.",
    ),
    Property(
        "B11",
        "nobody is sent back while there is room",
        every(r, (stands(r, "running") & new(stands(r, "waiting"))) >> (headroom <= 0)),
        "A running request goes back to the queue only where another cannot grow otherwise.",
    ),
    Property(
        "B11",
        "who waits keeps what it needs",
        every(
            r,
            (stands(r, "waiting") & new(live(r))) >> _unchanged(need(r), todo(r)),
        ),
        "What admission was judged by is what the request takes.",
    ),
    Property(
        "B11",
        "growth is bounded",
        every(r, todo(r) >= 0),
        "No request grows beyond what it may.",
    ),
    Property(
        "B11",
        "all that is there takes blocks",
        every(r, live(r) >> (need(r) > 0)),
        "A request that is there needs at least one block.",
        goal=False,
    ),
    Property(
        "B11",
        "ours is behind those ahead",
        every(r, ours(r) >> ~ahead(r)),
        "Our request did not come before itself.",
        goal=False,
    ),
)

ADMISSION: Final = Machine(
    name="admission",
    meaning="the queue at the door, seen from one request",
    symbols=(
        ours,
        usable,
        defer_limit,
        size,
        standing,
        outcome,
        need,
        todo,
        deferrals,
        ahead,
        in_force,
    ),
    axioms=(
        every(r, every(q, (ours(r) & ours(q)) >> eq(r, q))),
        (usable() >= 0) & (defer_limit() >= 0),
        every(c, size(c) >= 0),
    ),
    init=(
        becomes(standing(r), value(STANDING, "absent"), over=(r,)),
        becomes(outcome(r), value(OUTCOME, Outcome.PENDING), over=(r,)),
        becomes(need(r), 0, over=(r,)),
        becomes(todo(r), 0, over=(r,)),
        becomes(deferrals(r), 0, over=(r,)),
        becomes(ahead(r), False, over=(r,)),
        becomes(in_force(c), False, over=(c,)),
    ),
    actions=ACTIONS,
    properties=PROPERTIES,
)

# --- progress ----------------------------------------------------------------------------

RUN: Final = Fair("a running request goes on", ("grow", "push_out", "finish"), by=("r",))
ANSWER: Final = Fair(
    "the first in line is answered", ("admit", "defer", "refuse", "overflow"), by=("r",)
)

_RANK: Final = (
    total(_r, ite(live(_r) & early(_r), todo(_r), 0)),
    total(_r, ite(live(_r) & early(_r), ite(stands(_r, "waiting"), 2, 1), 0)),
    total(_r, ite(stands(_r, "waiting") & early(_r), defer_limit() - deferrals(_r), 0)),
)
"""Of ours and all ahead of it: how much they may grow, how far they are from their end, and how
often claims may defer them still.  What comes behind ours counts nowhere."""

_ANSWERS: Final = (
    Helpful(ANSWER, both(NOBODY_RUNS, ahead(q), stands(q, "waiting")), (q,)),
    Helpful(ANSWER, both(NOBODY_RUNS, ours(r), stands(r, "waiting"), ~_WAITS_AHEAD), (r,)),
)

RESPONSES: Final = (
    Response(
        "V3",
        "every deferred request ends",
        (r,),
        ours(r) & told(r, Outcome.DEFERRED),
        stands(r, "ended"),
        (RUN, ANSWER),
        "A deferred request is served or turned down in the end, whatever arrives behind it and "
        "whatever claims come and go.",
        ranking=Ranking(
            ours(r) & live(r),
            _RANK,
            (Helpful(RUN, early(q) & stands(q, "running"), (q,)), *_ANSWERS),
        ),
    ),
    Response(
        "B11",
        "the pool is not idle while a request waits",
        (r,),
        both(ours(r), stands(r, "waiting"), NOBODY_RUNS),
        ~stands(r, "waiting") | ~NOBODY_RUNS,
        (ANSWER,),
        "Where requests wait and none runs, one comes to run or is turned down.",
        ranking=Ranking(both(ours(r), stands(r, "waiting"), NOBODY_RUNS), _RANK, _ANSWERS),
    ),
)
