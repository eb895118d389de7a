"""BlockClaims: hard claims of fixed sizes and growing requests over a pool, by counts alone.

The common exploration benchmark of the field, with published counts of states and transitions
for several sizes, so that this checker's counts can be held against others'.
"""

from __future__ import annotations

from dataclasses import replace
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
    Term,
    Update,
    Var,
    becomes,
    either,
    eq,
    every,
    ite,
    new,
    one_of,
    total,
    value,
)
from kvclaims.spec.pool import REQUEST

STATUS: Final = Sort(
    "Status",
    (
        "Absent",
        "Offered",
        "Accepted",
        "Materialized",
        "Demoted",
        "Expired",
        "Released",
        "Rejected",
    ),
)
size: Final = Symbol("size", (CLAIM,), NAT, rigid=True, meaning="blocks the claim asks for")
growth: Final = Symbol("growth", (), NAT, rigid=True, meaning="blocks a request may grow to")
pool: Final = Symbol("pool", (), NAT, rigid=True, meaning="blocks in the pool")
status: Final = Symbol("status", (CLAIM,), STATUS, meaning="where the claim stands")
blocks: Final = Symbol("blocks", (REQUEST,), NAT, meaning="blocks the request holds")

i: Final = Var("i", CLAIM)
r: Final = Var("r", REQUEST)
_i: Final = Var("j", CLAIM)
_r: Final = Var("q", REQUEST)


def _is(claim: Term, *names: str) -> Term:
    return one_of(status(claim), *(value(STATUS, name) for name in names))


committed: Final = total(_i, ite(_is(_i, "Accepted", "Materialized"), size(_i), 0))
resident: Final = total(_i, ite(_is(_i, "Materialized"), size(_i), 0))
promised: Final = total(_i, ite(_is(_i, "Accepted"), size(_i), 0))
active: Final = total(_r, blocks(_r))


_MOVES: Final[dict[str, tuple[tuple[str, ...], str]]] = {
    "offer": (("Absent",), "Offered"),
    "accept": (("Offered",), "Accepted"),
    "reject": (("Offered",), "Rejected"),
    "materialize": (("Accepted",), "Materialized"),
    "rematerialize": (("Demoted",), "Materialized"),
    "demote": (("Materialized",), "Demoted"),
    "expire": (("Offered", "Accepted", "Materialized", "Demoted"), "Expired"),
    "release": (("Accepted", "Materialized", "Demoted"), "Released"),
}


def _move(name: str, *guards: Guard, protects: tuple[str, ...] = ("L1",)) -> Action:
    source, to = _MOVES[name]
    at = Guard(protects, _is(i, *source), f"the claim is {' or '.join(source)}")
    move: Update = becomes(status(i), value(STATUS, to))
    return Action(name, (i,), (at, *guards), (move,), f"the claim becomes {to}")


_FITS: Final = Guard(
    ("F2",), (committed + size(i) + active) <= pool(), "the claim fits beside every promise"
)
_FITS_NOT: Final = Guard(("F3",), (committed + size(i) + active) > pool(), "the claim does not fit")

BLOCKCLAIMS: Final = Machine(
    name="blockclaims",
    meaning="hard claims and growing requests by counts, the common benchmark",
    symbols=(size, growth, pool, status, blocks),
    init=(
        becomes(status(i), value(STATUS, "Absent"), over=(i,)),
        becomes(blocks(r), 0, over=(r,)),
    ),
    axioms=(every(i, size(i) >= 0), pool() >= 0, growth() >= 0),
    actions=(
        _move("offer"),
        _move("accept", _FITS),
        _move("reject", _FITS_NOT),
        _move("materialize", protects=("L1", "F1", "F2")),
        _move("rematerialize", replace(_FITS, protects=("F2", "F1"))),
        _move("demote"),
        _move("expire"),
        _move("release"),
        Action(
            "alloc",
            (r,),
            (
                Guard(("B11",), blocks(r) < growth(), "the request may still grow"),
                Guard(("F2", "F1"), (committed + active + 1) <= pool(), "a block is left"),
            ),
            (becomes(blocks(r), blocks(r) + 1),),
            "the request grows by one block",
        ),
        Action(
            "free",
            (r,),
            (),
            (becomes(blocks(r), 0),),
            "the request ends and returns its blocks",
        ),
    ),
    properties=(
        Property(
            "F1",
            "resident and active fit",
            (resident + active) <= pool(),
            "What is materialized and what is active fit the pool together.",
        ),
        Property(
            "F2",
            "committed and active fit",
            (committed + active) <= pool(),
            "Every promise and every active block fit the pool together.",
            goal=False,
        ),
        Property(
            "L1",
            "moves along the table",
            every(
                i,
                either(
                    eq(new(status(i)), status(i)),
                    *(_is(i, *source) & new(_is(i, to)) for source, to in _MOVES.values()),
                ),
            ),
            "Every step leaves a claim where it is or moves it along the table.",
        ),
        Property(
            "F3",
            "rejected only if it does not fit",
            (committed + size(i) + active) > pool(),
            "A claim that fits is not rejected.",
            on="reject",
        ),
        Property(
            "B11",
            "no growth past the bound",
            every(r, blocks(r) <= growth()),
            "A request holds no more blocks than it may grow to.",
        ),
        Property(
            "B2",
            "no negative holding",
            every(r, blocks(r) >= 0),
            "No request holds fewer than zero blocks.",
            goal=False,
        ),
    ),
    partitions=(Partition(committed, (resident, promised)),),
)
