"""How a request's end gives its blocks back, and how soon (rule B7, and B5 as far as ends go).

For any number of requests, blocks and steps in flight.  A request ends in one of four ways: it
finishes, is aborted, is preempted, or fails with an error; all four go the same way from there.
What it holds cannot always be given back at once: a step of the model that was sent off while it
ran may still read or write those blocks, and nothing can call it back.  So giving back is deferred,
block by block, until no such step is in flight.

Time is counted in rounds of the scheduler.  `depth` is how many rounds a step may be in flight, as
many as the engine sends steps ahead of their results; that the device keeps to it is what the
machine takes from outside, as a condition on time: a round begins only when no step is overdue.
The scheduler's own part is another: a round begins only when all was given back that could be.
`age` is the number of rounds that began while a request that has ended still held something.  The
bound is then a fact of every state: that number is never larger than `depth`.  An engine that sends
nothing ahead (`depth` 0) gives everything back within the round.

Who shares a block keeps it: only the request's own hold on it ends, and a step of another request
that reads the same block delays nothing.
"""

from __future__ import annotations

from typing import Final

from kvclaims.spec.language import (
    NAT,
    Action,
    Guard,
    Machine,
    Property,
    Sort,
    Symbol,
    Term,
    Var,
    becomes,
    both,
    count,
    eq,
    every,
    ite,
    ne,
    new,
    some,
    value,
)
from kvclaims.spec.pool import BLOCK, REQUEST
from kvclaims.spec.progress import Fair, Helpful, Ranking, Response
from kvclaims.spec.written import JOB

STANDS: Final = Sort("Stands", ("idle", "running", "finished", "aborted", "preempted", "failed"))
HOW: Final = Sort("Ending", STANDS.values[2:])

depth: Final = Symbol(
    "depth", (), NAT, rigid=True, meaning="rounds that a step of the model may be in flight"
)
stands: Final = Symbol("stands", (REQUEST,), STANDS, meaning="it runs, or how it ended last")
held: Final = Symbol("held", (REQUEST, BLOCK), meaning="the request refers to the block")
age: Final = Symbol("age", (REQUEST,), NAT, meaning="rounds begun since its end while it held some")
flies: Final = Symbol("flies", (JOB,), meaning="the step is in flight")
touches: Final = Symbol(
    "touches", (JOB, REQUEST, BLOCK), meaning="the step may touch the block for the request"
)
left: Final = Symbol("left", (JOB,), NAT, meaning="rounds that the step may still be in flight")

b: Final = Var("b", BLOCK)
r: Final = Var("r", REQUEST)
j: Final = Var("j", JOB)
how: Final = Var("how", HOW)
_b: Final = Var("a", BLOCK)
_r: Final = Var("q", REQUEST)
_j: Final = Var("i", JOB)


def runs(request: Term) -> Term:
    return eq(stands(request), value(STANDS, "running"))


def holds_some(request: Term) -> Term:
    return some(_b, held(request, _b))


def touched(request: Term, block: Term) -> Term:
    """A step in flight may touch the block for the request."""
    return some(_j, touches(_j, request, block))


_ended_as: Final = ite(
    eq(how, value(HOW, "finished")),
    value(STANDS, "finished"),
    ite(
        eq(how, value(HOW, "aborted")),
        value(STANDS, "aborted"),
        ite(
            eq(how, value(HOW, "preempted")),
            value(STANDS, "preempted"),
            value(STANDS, "failed"),
        ),
    ),
)

ACTIONS: Final = (
    Action(
        "run",
        (r,),
        (Guard(("B7",), ~holds_some(r), "it has given back all that it held before"),),
        (becomes(stands(r), value(STANDS, "running")),),
        "the request begins, or begins again after it was preempted",
    ),
    Action(
        "take",
        (r, b),
        (Guard(("B7",), runs(r), "the request runs"),),
        (becomes(held(r, b), True),),
        "the request takes a block, or shares one",
    ),
    Action(
        "dispatch",
        (j,),
        (Guard(("B7",), ~flies(j), "the step is not in flight"),),
        (
            becomes(flies(j), True),
            becomes(left(j), depth()),
            becomes(
                touches(j, _r, _b),
                touches(j, _r, _b) | (runs(_r) & held(_r, _b)),
                over=(_r, _b),
            ),
        ),
        "a step of the model is sent off, for whoever runs",
    ),
    Action(
        "land",
        (j,),
        (),
        (
            becomes(flies(j), False),
            becomes(left(j), 0),
            becomes(touches(j, _r, _b), False, over=(_r, _b)),
        ),
        "the step is over, with a result or without",
    ),
    Action(
        "end",
        (r, how),
        (Guard(("B7",), runs(r), "the request runs"),),
        (becomes(stands(r), _ended_as), becomes(age(r), 0)),
        "the request finishes, is aborted, is preempted, or fails",
    ),
    Action(
        "give_back",
        (r, b),
        (Guard(("B5",), ~touched(r, b), "no step in flight may touch the block for it"),),
        (becomes(held(r, b), False),),
        "the request lets go of a block",
    ),
    Action(
        "round",
        (),
        (
            Guard(("B7",), every(_j, flies(_j) >> (left(_j) > 0)), "no step in flight is overdue"),
            Guard(
                ("B7",),
                every(_r, every(_b, (~runs(_r) & held(_r, _b)) >> touched(_r, _b))),
                "who has ended holds no more than what steps in flight may touch",
            ),
        ),
        (
            becomes(left(_j), ite(flies(_j), left(_j) - 1, left(_j)), over=(_j,)),
            becomes(age(_r), ite(~runs(_r) & holds_some(_r), age(_r) + 1, age(_r)), over=(_r,)),
        ),
        "the scheduler's next round begins: time advances",
    ),
)

PROPERTIES: Final = (
    Property(
        "B7",
        "all is given back in time",
        every(r, (~runs(r) & holds_some(r)) >> (age(r) <= depth())),
        "A request that has ended, however it did, holds blocks for no more rounds than a step may "
        "be in flight.",
    ),
    Property(
        "B7",
        "a round counts",
        every(r, both(~runs(r), holds_some(r)) >> (new(age(r)) > age(r))),
        "Every round that begins while a request that has ended holds something is counted.",
        on="round",
    ),
    Property(
        "B7",
        "who has ended takes nothing",
        every(r, every(b, (new(held(r, b)) & ~held(r, b)) >> runs(r))),
        "After its end a request only lets go of blocks.",
    ),
    Property(
        "B7",
        "the count begins with the end",
        every(r, (ne(new(stands(r)), stands(r)) & ~new(runs(r))) >> (runs(r) & eq(new(age(r)), 0))),
        "A request ends only once, and its rounds are counted from there.",
    ),
    Property(
        "B7",
        "an end is complete before it begins anew",
        every(b, ~new(held(r, b))),
        "A request that was preempted runs again only after all that it held was given back.",
        on="run",
    ),
    Property(
        "B5",
        "what a step may touch is held",
        every(j, every(r, every(b, touches(j, r, b) >> (flies(j) & held(r, b))))),
        "While a step is in flight that may touch a block for a request, the request refers to it.",
    ),
    Property(
        "B7",
        "a step is in flight for its time",
        every(j, both(left(j) >= 0, left(j) <= depth())),
        "A step is never in flight for longer than it may be.",
    ),
    Property(
        "B7",
        "what delays an end is running out",
        every(
            j,
            every(r, every(b, (touches(j, r, b) & ~runs(r)) >> ((age(r) + left(j)) <= depth()))),
        ),
        "The rounds since a request's end and those that a step has left for it are within bounds.",
        goal=False,
    ),
    Property(
        "B7",
        "rounds are counted from zero",
        every(r, age(r) >= 0),
        "The count of rounds stays at or above zero.",
        goal=False,
    ),
)

ENDS: Final = Machine(
    name="ends",
    meaning="blocks given back at the end of a request",
    symbols=(depth, stands, held, age, flies, touches, left),
    axioms=(depth() >= 0,),
    init=(
        becomes(stands(r), value(STANDS, "idle"), over=(r,)),
        becomes(held(r, b), False, over=(r, b)),
        becomes(age(r), 0, over=(r,)),
        becomes(flies(j), False, over=(j,)),
        becomes(touches(j, r, b), False, over=(j, r, b)),
        becomes(left(j), 0, over=(j,)),
    ),
    actions=ACTIONS,
    properties=PROPERTIES,
)

# --- progress ----------------------------------------------------------------------------

LAND: Final = Fair("steps in flight land", ("land",), by=("j",))
GIVE_BACK: Final = Fair("what can be given back is", ("give_back",), by=("r", "b"))

_gives_back: Final = ~runs(r) & holds_some(r)

RESPONSES: Final = (
    Response(
        "B7",
        "every end gives everything back",
        (r,),
        _gives_back,
        ~holds_some(r),
        (LAND, GIVE_BACK),
        "A request that has ended holds nothing in the end.",
        ranking=Ranking(
            _gives_back,
            (
                count(_j, some(_b, touches(_j, r, _b))),
                count(_b, held(r, _b)),
            ),
            (
                Helpful(LAND, _gives_back & some(_b, touches(j, r, _b)), (j,)),
                Helpful(
                    GIVE_BACK,
                    both(_gives_back, held(r, b), ~some(_j, some(_b, touches(_j, r, _b)))),
                    (r, b),
                ),
            ),
        ),
    ),
)
