"""Ending claims to make room, one thing at a time: what F4's blame and F6's restraint rest on.

A request asks for `need` blocks beside those it `holds`.  What claims take from it is counted as
in `kvclaims.spec.feasibility`: each covered block that the request does not hold, once; each
reserve; less each content that the request would compute itself, once, however many claims were
promised it.  A claim that ends lets go of its blocks and its reserve piece by piece.

Two things are shown for any number of blocks, claims and contents.  Ending claims never takes
room away (so what suffices goes on to suffice when more claims end, and sparing claims one by
one leads to a set of which none can be spared).  And once every claim has ended, a request that
fits the pool by itself fits (so there is such a set).  How few claims suffice is a question of
exact counts; `kvclaims.checker.blame` asks Z3 on random situations, of a bounded size: the search
that is checked treats every claim, block and content alike, by its sets alone, so that a larger
situation brings more of the same and no new case.
"""

from __future__ import annotations

from typing import Final

from kvclaims.spec.claims import CLAIM
from kvclaims.spec.language import (
    NAT,
    Action,
    Guard,
    Machine,
    Partition,
    Property,
    Sort,
    Symbol,
    Var,
    becomes,
    both,
    count,
    eq,
    every,
    new,
    some,
    total,
)
from kvclaims.spec.pool import BLOCK

CONTENT: Final = Sort("Content")
LOAN: Final = Sort("Loan")
"""A block of a claim's reserve that the request draws on, for one content (F3)."""

usable: Final = Symbol("usable", (), NAT, rigid=True, meaning="blocks in the pool")
need: Final = Symbol("need", (), NAT, rigid=True, meaning="blocks that the request asks for")
holds: Final = Symbol("holds", (BLOCK,), rigid=True, meaning="the request holds or hits the block")
covered: Final = Symbol("covered", (CLAIM, BLOCK), rigid=True, meaning="covered when it asked")
promised: Final = Symbol("promised", (CLAIM,), NAT, rigid=True, meaning="promised when it asked")
lent_by: Final = Symbol("lent_by", (LOAN, CLAIM), rigid=True, meaning="whose reserve it is of")
pays_for: Final = Symbol("pays_for", (LOAN, CONTENT), rigid=True, meaning="what it is drawn for")

covers: Final = Symbol("covers", (CLAIM, BLOCK), meaning="the claim covers the block")
spare: Final = Symbol("spare", (CLAIM,), NAT, meaning="its reserve less its loans")
draws: Final = Symbol("draws", (LOAN, CONTENT), meaning="the loan is drawn for the content")
ending: Final = Symbol("ending", (CLAIM,), meaning="the claim was chosen to end")

b: Final = Var("b", BLOCK)
c: Final = Var("c", CLAIM)
x: Final = Var("x", CONTENT)
t: Final = Var("t", LOAN)
_b: Final = Var("a", BLOCK)
_c: Final = Var("d", CLAIM)
_x: Final = Var("y", CONTENT)
_t: Final = Var("u", LOAN)

_own: Final = count(_b, holds(_b))
_others: Final = count(_b, ~holds(_b) & some(_c, covers(_c, _b)))
_occupied: Final = count(_b, holds(_b) | some(_c, covers(_c, _b)))
_reserves: Final = total(_c, spare(_c))
_loans: Final = count(_t, some(_x, draws(_t, _x)))
_drawn: Final = count(_x, some(_t, draws(_t, _x)))

demand: Final = need() + _occupied + _reserves + _loans - _drawn
"""Blocks that the request and the claims in force take together (F1 to F3)."""

_nothing_left: Final = both(
    every(c, every(b, ~covers(c, b))), every(c, eq(spare(c), 0)), every(t, every(x, ~draws(t, x)))
)


def _chosen(*protects: str) -> Guard:
    return Guard(protects, ending(c), "the claim was chosen to end")


ARBITRATION: Final = Machine(
    name="arbitration",
    meaning="claims end to make room for a request",
    symbols=(
        *(usable, need, holds, covered, promised, lent_by, pays_for),
        *(covers, spare, draws, ending),
    ),
    axioms=(
        every(c, promised(c) >= 0),
        every(t, every(x, every(_x, (pays_for(t, x) & pays_for(t, _x)) >> eq(x, _x)))),
        every(t, every(c, every(_c, (lent_by(t, c) & lent_by(t, _c)) >> eq(c, _c)))),
    ),
    init=(
        becomes(covers(c, b), covered(c, b), over=(c, b)),
        becomes(spare(c), promised(c), over=(c,)),
        becomes(draws(t, x), pays_for(t, x), over=(t, x)),
        becomes(ending(c), False, over=(c,)),
    ),
    actions=(
        Action(
            "choose",
            (c,),
            (Guard(("F6",), demand > usable(), "the request does not fit yet"),),
            (becomes(ending(c), True),),
            "one more claim is chosen to end",
        ),
        Action(
            "let_go",
            (c, b),
            (_chosen("F6"),),
            (becomes(covers(c, b), False),),
            "a claim that ends lets go of a block",
        ),
        Action(
            "waive",
            (c,),
            (
                _chosen("F6"),
                Guard(("F4",), spare(c) > 0, "something is left of its reserve"),
            ),
            (becomes(spare(c), spare(c) - 1),),
            "a claim that ends gives up a block of its reserve",
        ),
        Action(
            "lapse",
            (c, t, x),
            (
                _chosen("F6"),
                Guard(("F6",), lent_by(t, c), "the loan is on its reserve"),
            ),
            (becomes(draws(t, x), False),),
            "a claim that ends takes a loan back; what others lent for the content stays",
        ),
    ),
    properties=(
        Property(
            "F4",
            "ending claims takes no room away",
            new(demand) <= demand,
            "What suffices still suffices when more claims end.",
        ),
        Property(
            "F4",
            "without claims it fits",
            both(_nothing_left, (need() + _own) <= usable()) >> (demand <= usable()),
            "A request that fits the pool by itself fits once every claim has ended.",
        ),
        Property(
            "F4",
            "a loan is for one content",
            every(t, every(x, every(_x, (draws(t, x) & draws(t, _x)) >> eq(x, _x)))),
            "Each block of a reserve that is drawn on counts for one content.",
            goal=False,
        ),
        Property(
            "F4",
            "no reserve is overdrawn",
            every(c, spare(c) >= 0),
            "No more of a reserve is given up than was promised.",
            goal=False,
        ),
        Property(
            "F6",
            "nothing is taken beyond the need",
            every(c, (new(ending(c)) & ~ending(c)) >> (demand > usable())),
            "A claim is chosen to end only while the request does not fit.",
        ),
        Property(
            "F6",
            "only chosen claims lose",
            every(
                c,
                ~ending(c)
                >> both(
                    every(b, covers(c, b) >> new(covers(c, b))),
                    new(spare(c)) >= spare(c),
                    every(t, every(x, (lent_by(t, c) & draws(t, x)) >> new(draws(t, x)))),
                ),
            ),
            "A claim that was not chosen keeps its blocks, its reserve and its loans.",
        ),
    ),
    partitions=(Partition(_occupied, (_own, _others)),),
)

AT_REST: Final = every(
    c,
    ending(c)
    >> both(
        eq(spare(c), 0),
        every(b, ~covers(c, b)),
        every(t, every(x, lent_by(t, c) >> ~draws(t, x))),
    ),
)
"""Where arbitration may stop: whoever was chosen to end has let go of everything."""
