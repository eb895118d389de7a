"""Owners: who may touch a claim, what an owner may hold, what a refusal shows (rules Q1 to Q3).

For any number of owners and claims.  The operator is an owner of its own kind.  Each change makes
a new version of the claim, and is signed: `signed(o, c)` is the last version of claim c that o
asked for.  So rule Q1 is a fact about states and steps, not a condition repeated: the latest
version bears the signature of somebody entitled, and an old signature does not do.  `granted` is
what counts against a quota: the blocks that the claim covers or was promised, zero while it is
not in force.

What an owner has learned is recorded as two relations: `knows`, the claim in full, and `hinted`,
an opaque id and a size.  Both only grow, since nothing is unlearned.

Claims also end without anybody asking: they expire and are harmed.  That is the business of
`kvclaims.spec.claims` and is not repeated here.
"""

from __future__ import annotations

from typing import Final

from kvclaims.spec.claims import CLAIM, hard
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
    some,
    total,
)

OWNER: Final = Sort("Owner")

operator: Final = Symbol("operator", (OWNER,), rigid=True, meaning="runs the engine")
owns: Final = Symbol("owns", (OWNER, CLAIM), rigid=True, meaning="the claim is this owner's")
cap: Final = Symbol("cap", (), NAT, rigid=True, meaning="blocks for all hard claims together")
quota: Final = Symbol("quota", (OWNER,), NAT, meaning="blocks for the owner's hard claims")
granted: Final = Symbol("granted", (CLAIM,), NAT, meaning="blocks covered by it or promised to it")
term: Final = Symbol("term", (CLAIM,), NAT, meaning="how long it was last said to last")
version: Final = Symbol("version", (CLAIM,), NAT, meaning="how often the claim was changed")
signed: Final = Symbol("signed", (OWNER, CLAIM), NAT, meaning="the last version it asked for")
knows: Final = Symbol("knows", (OWNER, CLAIM), meaning="has seen the claim in full")
hinted: Final = Symbol("hinted", (OWNER, CLAIM), meaning="has seen an opaque id and a size")
blamed: Final = Symbol("blamed", (CLAIM,), meaning="a refusal has named the claim")

o: Final = Var("o", OWNER)
c: Final = Var("c", CLAIM)
n: Final = Var("n", NAT)
_o: Final = Var("p", OWNER)
_c: Final = Var("d", CLAIM)


def entitled(owner: Term, claim: Term) -> Term:
    """The owner of the claim, or the operator."""
    return owns(owner, claim) | operator(owner)


def used(owner: Term) -> Term:
    """The blocks of the owner's hard claims."""
    return total(_c, ite(hard(_c) & owns(owner, _c), granted(_c), 0))


used_by_all: Final = total(_c, ite(hard(_c), granted(_c), 0))


def _sign() -> tuple[Update, ...]:
    return (becomes(version(c), version(c) + 1), becomes(signed(o, c), version(c) + 1))


def _tell_operators() -> Update:
    return becomes(knows(_o, c), knows(_o, c) | operator(_o), over=(_o,))


def _entitled(*protects: str) -> Guard:
    return Guard(protects, entitled(o, c), "it is asked by the claim's owner or the operator")


ACTIONS: Final = (
    Action(
        "set_quota",
        (o, n),
        (Guard(("Q2",), used(o) <= n, "what the owner has been granted stays within it"),),
        (becomes(quota(o), n),),
        "the operator sets an owner's quota",
    ),
    Action(
        "grant",
        (o, c, n),
        (
            _entitled("Q1"),
            Guard(
                ("Q2",),
                every(
                    _o,
                    (hard(c) & owns(_o, c)) >> ((used(_o) - granted(c) + n) <= quota(_o)),
                ),
                "the owner of the claim stays within its quota",
            ),
            Guard(
                ("Q2",),
                hard(c) >> ((used_by_all - granted(c) + n) <= cap()),
                "all hard claims stay within the cap",
            ),
        ),
        (becomes(granted(c), n), *_sign()),
        "the claim is accepted for n blocks, or changed to n blocks",
    ),
    Action(
        "renew",
        (o, c, n),
        (_entitled("Q1"),),
        (becomes(term(c), n), *_sign()),
        "it is said anew how long the claim lasts",
    ),
    Action(
        "end",
        (o, c),
        (_entitled("Q1"),),
        (becomes(granted(c), 0), *_sign()),
        "the claim is released by its owner or demoted by the operator",
    ),
    Action(
        "read",
        (o, c),
        (_entitled("Q1", "Q3"),),
        (becomes(knows(o, c), True),),
        "somebody asks for the claim and is shown all of it",
    ),
    Action(
        "blame",
        (o, c),
        (_entitled("Q1", "Q3"),),
        (
            becomes(knows(_o, c), either(knows(_o, c), operator(_o), eq(_o, o)), over=(_o,)),
            becomes(blamed(c), True),
        ),
        "a refusal names the claim in full to a requester that is entitled to it",
    ),
    Action(
        "hint",
        (o, c),
        (),
        (becomes(hinted(o, c), True), _tell_operators(), becomes(blamed(c), True)),
        "a refusal names the claim to any requester by an opaque id and a size",
    ),
)

_changed: Final = either(ne(new(granted(c)), granted(c)), ne(new(term(c)), term(c)))

PROPERTIES: Final = (
    Property(
        "Q1",
        "a change makes a new version",
        every(c, _changed >> (new(version(c)) > version(c))),
        "A claim that is granted, changed, renewed or ended gets a new version.",
    ),
    Property(
        "Q1",
        "versions are signed by the entitled",
        every(
            c,
            (version(c) > 0) >> some(o, both(eq(signed(o, c), version(c)), entitled(o, c))),
        ),
        "The latest version of a claim was asked for by its owner or the operator.",
    ),
    Property(
        "Q1",
        "no other name is signed",
        every(c, every(o, (signed(o, c) > 0) >> entitled(o, c))),
        "Nobody else is ever recorded as having changed a claim.",
    ),
    Property(
        "Q1",
        "only the entitled have read it",
        every(c, every(o, knows(o, c) >> entitled(o, c))),
        "Whoever has seen a claim in full is its owner or the operator.",
    ),
    Property(
        "Q2",
        "within the quota",
        every(o, used(o) <= quota(o)),
        "An owner's hard claims together never exceed its quota.",
    ),
    Property(
        "Q2",
        "within the cap",
        used_by_all <= cap(),
        "All hard claims together never exceed the cap.",
    ),
    Property(
        "Q3",
        "blame reaches the operator",
        every(c, blamed(c) >> every(o, operator(o) >> knows(o, c))),
        "The operator sees in full every claim that a refusal has named.",
    ),
    Property(
        "Q3",
        "others see no more than a hint",
        every(c, every(o, both(hinted(o, c), ~entitled(o, c)) >> ~knows(o, c))),
        "Who was refused because of another owner's claim saw an opaque id and a size, no more.",
    ),
    Property(
        "Q2",
        "grants are not negative",
        every(c, both(granted(c) >= 0, term(c) >= 0, version(c) >= 0)),
        "Grants, terms and versions stay at or above zero.",
        goal=False,
    ),
)

OWNERS: Final = Machine(
    name="owners",
    meaning="owners, quotas and what a refusal shows",
    symbols=(
        operator,
        owns,
        hard,
        cap,
        quota,
        granted,
        term,
        version,
        signed,
        knows,
        hinted,
        blamed,
    ),
    axioms=(
        cap() >= 0,
        every(c, every(o, every(_o, (owns(o, c) & owns(_o, c)) >> eq(o, _o)))),
        every(c, some(o, owns(o, c))),
    ),
    init=(
        becomes(quota(o), 0, over=(o,)),
        becomes(granted(c), 0, over=(c,)),
        becomes(term(c), 0, over=(c,)),
        becomes(version(c), 0, over=(c,)),
        becomes(signed(o, c), 0, over=(o, c)),
        becomes(knows(o, c), False, over=(o, c)),
        becomes(hinted(o, c), False, over=(o, c)),
        becomes(blamed(c), False, over=(c,)),
    ),
    actions=ACTIONS,
    properties=PROPERTIES,
)
