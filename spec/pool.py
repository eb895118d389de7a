"""Block ownership: who refers to which block, what is promised, what an allocator may do.

Rules F1 to F5, P1 to P4, B1 to B3 and B6 (and L1 to L3, L5, L7 as far as blocks decide them),
for any number of blocks, claims and requests.  Physical facts are relations; the counters of a
real allocator (`ref`, `free`) are symbols of their own that the invariants tie to the
relations, so that a wrong counter is a broken rule and not a definition.

Protection is by reference: a hard claim that covers a block refers to it like a request does,
so the block leaves the free queue.  What a claim was promised and does not cover yet is its
`reserve`; what a request was granted and has not taken yet is `owed` to it.

An engine's step is a run of these actions: an admission is `admit`, then `evict` and `take` or
`share` block by block, then `register`.
"""

from __future__ import annotations

from typing import Final

from kvclaims.spec.claims import (
    CLAIM,
    PHASE,
    ended,
    goes,
    hard,
    is_in,
    phase,
    phase_is,
    responsible,
)
from kvclaims.spec.language import (
    BOOL,
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
    both,
    count,
    eq,
    every,
    iff,
    ite,
    ne,
    new,
    one_of,
    some,
    total,
    value,
)
from kvclaims.spec.vocabulary import Outcome, Phase

BLOCK: Final = Sort("Block")
REQUEST: Final = Sort("Request")
KEY: Final = Sort("Key")
OUTCOME: Final = Sort("Outcome", tuple(o.value for o in Outcome))
HOW: Final = Sort("How", (Phase.DEMOTED, Phase.EXPIRED, Phase.RELEASED))

null: Final = Symbol("null", (BLOCK,), rigid=True, meaning="the block no one may use")
admit_reuse: Final = Symbol(
    "admit_reuse", (REQUEST,), rigid=True, meaning="the request may leave content for reuse"
)
held: Final = Symbol("held", (REQUEST, BLOCK), meaning="the request refers to the block")
ref: Final = Symbol("ref", (BLOCK,), NAT, meaning="the block's reference counter")
queued: Final = Symbol("queued", (BLOCK,), meaning="the block is in the free queue")
free: Final = Symbol("free", (), NAT, meaning="the free queue's own counter")
key: Final = Symbol("key", (BLOCK, KEY), meaning="the block carries this content hash")
entry: Final = Symbol("entry", (KEY, BLOCK), meaning="a lookup of the hash finds the block")
covers: Final = Symbol("covers", (CLAIM, BLOCK), meaning="the claim speaks of this block")
drawn: Final = Symbol(
    "drawn", (CLAIM, BLOCK), meaning="a request took the block on the claim's reserve"
)
reserve: Final = Symbol("reserve", (CLAIM,), NAT, meaning="blocks promised, not yet covered")
active: Final = Symbol("active", (REQUEST,), meaning="the request was admitted and has not ended")
owed: Final = Symbol("owed", (REQUEST,), NAT, meaning="blocks granted to it, not yet taken")
outcome: Final = Symbol("outcome", (REQUEST,), OUTCOME, meaning="what the request was told last")

b: Final = Var("b", BLOCK)
c: Final = Var("c", CLAIM)
r: Final = Var("r", REQUEST)
k: Final = Var("k", KEY)
n: Final = Var("n", NAT)
how: Final = Var("how", HOW)
pays: Final = Var("pays", BOOL)
_d: Final = Var("d", CLAIM)
_r: Final = Var("q", REQUEST)
_k: Final = Var("j", KEY)
_b: Final = Var("a", BLOCK)


# --- what the words mean -----------------------------------------------------------------


def pinned_by(claim: Term, block: Term) -> Term:
    """The claim's cover is a reference: it is hard, and has not let go of the block yet."""
    return hard(claim) & covers(claim, block)


def protected(block: Term) -> Term:
    """Some responsible hard claim covers the block (contract, *Terms*)."""
    return some(_d, pinned_by(_d, block) & responsible(_d))


def in_use(block: Term) -> Term:
    """Some active request holds the block."""
    return some(_r, held(_r, block))


def hashed(block: Term) -> Term:
    return some(_k, key(block, _k))


promised: Final = total(_d, reserve(_d))
granted: Final = total(_r, owed(_r))
headroom: Final = free() - promised - granted
"""Free unprotected blocks less every promise and granted need (F2)."""

usable: Final = count(_b, ~null(_b))
_in_queue: Final = count(_b, queued(_b))
_committed: Final = count(_b, ~null(_b) & (protected(_b) | in_use(_b)))
_let_go: Final = count(_b, ~null(_b) & ~queued(_b) & ~protected(_b) & ~in_use(_b))
_protected: Final = count(_b, ~null(_b) & protected(_b))
_unprotected: Final = count(_b, ~null(_b) & ~queued(_b) & ~protected(_b))

count_committed: Final = _committed
count_protected: Final = _protected
count_unprotected: Final = _unprotected
count_let_go: Final = _let_go
"""The counts of F1, for whoever looks at the pool from further away."""

reclaimable: Final = free() + _unprotected - promised
"""What an arbiter can count on once every other request has finished."""


def turned_away(request: Term) -> Term:
    """The request was refused, or told that it needs a larger pool."""
    return one_of(
        outcome(request),
        value(OUTCOME, Outcome.REFUSED),
        value(OUTCOME, Outcome.CAPACITY_REQUIRED),
    )


_NOT_TURNED_AWAY: Final = Guard(("F4",), ~turned_away(r), "the request was not turned away before")
_WAITING: Final = Guard(("F4",), ~active(r), "the request waits")


# --- actions -----------------------------------------------------------------------------

_UNHASHED: Final = Guard(("B3",), ~hashed(b), "the block carries no hash any more")
_ACTIVE: Final = Guard(("B7",), active(r), "the request is active")


def _is_queued(*protects: str) -> Guard:
    return Guard(protects, queued(b), "the block is in the free queue")


def _leave_queue() -> tuple[Update, ...]:
    return (becomes(queued(b), False), becomes(free(), ite(queued(b), free() - 1, free())))


def _unreference() -> tuple[Update, ...]:
    """One reference less; the last one puts the block back into the queue."""
    return (
        becomes(ref(b), ref(b) - 1),
        becomes(queued(b), queued(b) | eq(ref(b), 1)),
        becomes(free(), ite(eq(ref(b), 1), free() + 1, free())),
    )


_last_holder: Final = ~some(_r, ne(_r, r) & held(_r, b))


def _forget_hash() -> tuple[Update, ...]:
    return (becomes(key(b, k), False), becomes(entry(k, b), False))


def _kept_elsewhere(claim: Term) -> Term:
    return some(_b, ne(_b, b) & covers(claim, _b) & key(_b, k))


def _harm_by_loss() -> tuple[Update, ...]:
    """Block b loses hash k: materialized claims on it are harmed, unless a soft one covers
    another copy.  Hard claims keep the reference until it is let go of."""
    harmed = covers(_d, b) & is_in(_d, Phase.MATERIALIZED) & (hard(_d) | ~_kept_elsewhere(_d))
    return (
        becomes(phase(_d), ite(harmed, value(PHASE, Phase.HARMED), phase(_d)), over=(_d,)),
        becomes(covers(_d, b), covers(_d, b) & hard(_d), over=(_d,)),
    )


ACTIONS: Final = (
    Action(
        "admit",
        (r, n),
        (
            _NOT_TURNED_AWAY,
            Guard(("F3", "F2"), n <= headroom, "headroom covers the blocks it will draw"),
        ),
        (
            becomes(active(r), True),
            becomes(owed(r), owed(r) + n),
            becomes(outcome(r), value(OUTCOME, Outcome.SERVED)),
        ),
        "a request is granted n blocks, at its start or when it grows",
    ),
    Action(
        "take",
        (r, b),
        (
            _is_queued("P1", "B2", "B6"),
            _UNHASHED,
            Guard(("F2", "B7"), owed(r) > 0, "the request has blocks left of its grant"),
        ),
        (
            becomes(held(r, b), True),
            becomes(ref(b), ref(b) + 1),
            becomes(owed(r), owed(r) - 1),
            *_leave_queue(),
        ),
        "the request takes a blank block from the free queue",
    ),
    Action(
        "draw",
        (r, c, b),
        (
            _is_queued("P1", "B2", "B6", "F2"),
            _UNHASHED,
            _ACTIVE,
            Guard(("F2", "L7"), reserve(c) > 0, "the claim has reserve left"),
        ),
        (
            becomes(held(r, b), True),
            becomes(ref(b), ref(b) + 1),
            becomes(reserve(c), reserve(c) - 1),
            becomes(drawn(c, b), True),
            *_leave_queue(),
        ),
        "a request that materializes the claim takes a blank block on the claim's reserve",
    ),
    Action(
        "share",
        (r, b, k),
        (
            _ACTIVE,
            Guard(("B4", "B6"), entry(k, b), "a lookup of the hash finds the block"),
            Guard(("B2",), ~held(r, b), "the request does not hold the block yet"),
            Guard(("F2",), queued(b) >> (owed(r) > 0), "a block from the queue is paid for"),
        ),
        (
            becomes(held(r, b), True),
            becomes(ref(b), ref(b) + 1),
            becomes(owed(r), ite(queued(b), owed(r) - 1, owed(r))),
            *_leave_queue(),
        ),
        "a hit: the request refers to a resident block; one that is in use costs nothing",
    ),
    Action(
        "drop",
        (r, b),
        (
            Guard(
                ("B2", "B1", "B6", "F1", "P1", "P2"),
                held(r, b),
                "the request holds the block",
            ),
            Guard(
                ("F2",),
                ~some(_d, drawn(_d, b)) | ~_last_holder,
                "no loan ends with this holder (else the block is given back)",
            ),
        ),
        (becomes(held(r, b), False), *_unreference()),
        "the request lets go of a block",
    ),
    Action(
        "give_back",
        (r, c, b),
        (
            Guard(("B2", "F1"), held(r, b), "the request holds the block"),
            Guard(("F2", "L7"), drawn(c, b), "the block is on loan from the claim"),
            Guard(("F2",), eq(ref(b), 1), "nobody else refers to the block"),
        ),
        (
            becomes(held(r, b), False),
            becomes(reserve(c), reserve(c) + 1),
            becomes(drawn(c, b), False),
            *_unreference(),
        ),
        "the last holder lets go of a block on loan; the loan goes back to the reserve",
    ),
    Action(
        "retire",
        (r,),
        (Guard(("B7",), ~some(_b, held(r, _b)), "the request holds nothing any more"),),
        (becomes(active(r), False), becomes(owed(r), 0)),
        "the request ends or is preempted; what is left of its grant lapses",
    ),
    Action(
        "register",
        (r, b, k),
        (
            Guard(("B4", "B6", "P4"), held(r, b), "the request holds the block"),
            Guard(("P4",), admit_reuse(r), "the request may leave content for reuse"),
            _UNHASHED,
        ),
        (becomes(key(b, k), True), becomes(entry(k, b), True)),
        "content computed by the request becomes visible",
    ),
    Action(
        "evict",
        (b, k),
        (
            Guard(("L3",), key(b, k), "the block carries the hash"),
            Guard(("P1", "L5"), ~protected(b), "no responsible hard claim covers the block"),
            Guard(("B5",), ~in_use(b), "no request holds the block"),
        ),
        (
            *_forget_hash(),
            *_harm_by_loss(),
        ),
        "a block loses its hash because it will be reused; soft claims on it are told (P3)",
    ),
    Action(
        "lose",
        (b, k),
        (Guard(("L3",), key(b, k), "the block carries the hash"),),
        (
            *_forget_hash(),
            *_harm_by_loss(),
        ),
        "a fault takes the content of a block, wherever it is",
    ),
    Action(
        "submit",
        (c,),
        (phase_is(c, Phase.ABSENT, protects=("L1", "L2", "F2")),),
        (goes(c, Phase.SUBMITTED),),
        "an owner submits a claim",
    ),
    Action(
        "accept",
        (c, n),
        (
            phase_is(c, Phase.SUBMITTED),
            Guard(("F2",), hard(c) >> (n <= headroom), "headroom covers the promise"),
            Guard(("F2",), hard(c) | eq(n, 0), "only a hard claim is promised blocks"),
        ),
        (goes(c, Phase.ACCEPTED), becomes(reserve(c), n)),
        "the claim is accepted and promised n free blocks",
    ),
    Action(
        "refuse",
        (c,),
        (phase_is(c, Phase.SUBMITTED, protects=("L1", "F2")),),
        (goes(c, Phase.REFUSED),),
        "the claim is refused",
    ),
    Action(
        "cover",
        (c, b, pays),
        (
            Guard(("L2",), responsible(c), "the runtime is responsible for the claim"),
            Guard(("L7", "B6"), hashed(b), "the block carries content"),
            Guard(("B2",), ~covers(c, b), "the claim does not cover the block yet"),
            Guard(
                ("F2",),
                (hard(c) & queued(b)) >> pays,
                "a block from the queue is paid for from the reserve",
            ),
            Guard(("F2", "L7"), pays >> (reserve(c) > 0), "the claim has reserve left"),
        ),
        (
            becomes(covers(c, b), True),
            becomes(drawn(c, b), False),
            becomes(ref(b), ite(hard(c), ref(b) + 1, ref(b))),
            becomes(queued(b), queued(b) & ~hard(c)),
            becomes(free(), ite(hard(c) & queued(b), free() - 1, free())),
            becomes(reserve(c), ite(pays, reserve(c) - 1, reserve(c))),
        ),
        "the claim covers a resident block; a hard claim refers to it",
    ),
    Action(
        "uncover",
        (c, b),
        (
            Guard(
                ("B2", "B1", "B6", "F1", "P1", "P2"),
                pinned_by(c, b),
                "the claim refers to the block",
            ),
            Guard(("P1",), ~responsible(c), "the claim has ended"),
        ),
        (becomes(covers(c, b), False), *_unreference()),
        "an ended hard claim lets go of a block; other claims keep theirs (P2)",
    ),
    Action(
        "forsake",
        (c, b),
        (
            Guard(
                ("B2", "B1", "B6", "F1", "F2", "P1", "P2"),
                pinned_by(c, b),
                "the claim refers to the block",
            ),
            Guard(("P1",), ~hashed(b), "the block lost its content"),
            phase_is(c, Phase.ACCEPTED, protects=("F2",)),
            Guard(("F2",), (ref(b) > 1) >> (headroom > 0), "the promise can still be kept"),
        ),
        (
            becomes(covers(c, b), False),
            becomes(reserve(c), reserve(c) + 1),
            *_unreference(),
        ),
        "an accepted claim lets go of a block that a fault emptied; it is promised another",
    ),
    Action(
        "materialize",
        (c,),
        (
            phase_is(c, Phase.ACCEPTED),
            Guard(
                ("L7",),
                every(_b, covers(c, _b) >> hashed(_b)),
                "every covered block carries content",
            ),
            Guard(("L7",), eq(reserve(c), 0), "nothing promised is missing"),
            Guard(("L7",), ~some(_b, drawn(c, _b)), "nothing promised is still on loan"),
        ),
        (goes(c, Phase.MATERIALIZED),),
        "the predicate of an accepted claim holds",
    ),
    Action(
        "finish",
        (c, how),
        (Guard(("L1",), responsible(c), "the runtime is responsible for the claim"),),
        (
            becomes(
                phase(c),
                ite(
                    eq(how, value(HOW, Phase.DEMOTED)),
                    value(PHASE, Phase.DEMOTED),
                    ite(
                        eq(how, value(HOW, Phase.EXPIRED)),
                        value(PHASE, Phase.EXPIRED),
                        value(PHASE, Phase.RELEASED),
                    ),
                ),
            ),
            becomes(reserve(c), 0),
            becomes(drawn(c, _b), False, over=(_b,)),
        ),
        "the claim is demoted, expires, or is released; nothing is promised any more",
    ),
    Action(
        "defer",
        (r, n),
        (
            _WAITING,
            _NOT_TURNED_AWAY,
            Guard(("F3",), n > headroom, "the request does not fit now"),
            Guard(("F4",), n <= usable, "the request fits the pool by itself"),
        ),
        (becomes(outcome(r), value(OUTCOME, Outcome.DEFERRED)),),
        "a request of n blocks waits: for others to finish, or once for claims to end",
    ),
    Action(
        "turn_away",
        (r, n),
        (
            _WAITING,
            _NOT_TURNED_AWAY,
            Guard(("F4",), n > reclaimable, "claims are in the way even when all others finish"),
            Guard(("F4",), n <= usable, "the request fits the pool by itself"),
        ),
        (becomes(outcome(r), value(OUTCOME, Outcome.REFUSED)),),
        "a request of n blocks is refused, and the claims in its way are named",
    ),
    Action(
        "overflow",
        (r, n),
        (
            _WAITING,
            _NOT_TURNED_AWAY,
            Guard(("F4",), n > usable, "the request exceeds the pool by itself"),
        ),
        (becomes(outcome(r), value(OUTCOME, Outcome.CAPACITY_REQUIRED)),),
        "a request of n blocks can never fit; no claim is to blame",
    ),
)

# --- properties --------------------------------------------------------------------------

_gone = both(responsible(c), covers(c, b), key(b, k), ~new(key(b, k)))
_unserved = one_of(
    new(outcome(r)),
    value(OUTCOME, Outcome.DEFERRED),
    value(OUTCOME, Outcome.REFUSED),
    value(OUTCOME, Outcome.CAPACITY_REQUIRED),
)


def _unchanged(*terms: Term) -> Term:
    return both(*(eq(new(term), term) for term in terms))


PROPERTIES: Final = (
    Property(
        "F1",
        "union fits",
        (_committed + free()) <= usable,
        "Blocks that are protected or active, each counted once, and those the queue calls free "
        "fit the pool together.",
    ),
    Property(
        "F2",
        "headroom",
        headroom >= 0,
        "Free unprotected blocks cover every promise and every granted need, jointly.",
    ),
    Property(
        "F3",
        "granted only with headroom",
        new(headroom >= 0),
        "After an allocation was granted headroom is at or above zero.",
        on="admit",
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
        "refused only because of claims",
        both((n + _protected + promised) > usable, n <= usable),
        "A refused request would not fit with all others finished, but would without claims.",
        on="turn_away",
    ),
    Property(
        "F4",
        "capacity required means larger than the pool",
        n > usable,
        "Only a request that exceeds the pool by itself is told so, and no claim is blamed.",
        on="overflow",
    ),
    Property(
        "F4",
        "deferred could fit",
        n <= usable,
        "A request that can never fit is not kept waiting.",
        on="defer",
    ),
    Property(
        "F4",
        "an answer is final",
        every(r, turned_away(r) >> eq(new(outcome(r)), outcome(r))),
        "A request that was turned away is not told something else later.",
    ),
    Property(
        "F4",
        "only a waiting request is answered",
        every(r, (ne(new(outcome(r)), outcome(r)) & _unserved) >> ~active(r)),
        "What runs is not told to wait or to go.",
    ),
    Property(
        "F5",
        "refusal and deferral change no residency",
        every(
            r,
            (ne(new(outcome(r)), outcome(r)) & _unserved)
            >> every(
                b,
                both(
                    _unchanged(queued(b), ref(b)),
                    every(k, _unchanged(key(b, k), entry(k, b))),
                    every(_r, _unchanged(held(_r, b))),
                    every(c, _unchanged(covers(c, b))),
                ),
            ),
        ),
        "Telling a request that it waits or is refused leaves every block as it was.",
    ),
    Property(
        "L1",
        "moves along the table",
        every(
            c,
            (
                ~responsible(c)
                & ne(phase(c), value(PHASE, Phase.ABSENT))
                & ne(phase(c), value(PHASE, Phase.SUBMITTED))
            )
            >> eq(new(phase(c)), phase(c)),
        ),
        "A claim that has ended stays so.",
    ),
    Property(
        "L1",
        "answered once",
        every(
            c,
            both(
                new(is_in(c, Phase.ACCEPTED, Phase.REFUSED))
                >> (is_in(c, Phase.SUBMITTED) | eq(new(phase(c)), phase(c))),
                new(is_in(c, Phase.MATERIALIZED)) >> is_in(c, Phase.ACCEPTED, Phase.MATERIALIZED),
                new(is_in(c, Phase.SUBMITTED)) >> is_in(c, Phase.ABSENT, Phase.SUBMITTED),
                new(is_in(c, Phase.DEMOTED, Phase.EXPIRED, Phase.RELEASED))
                >> (responsible(c) | eq(new(phase(c)), phase(c))),
            ),
        ),
        "Each phase is entered only from where the transition table says.",
    ),
    Property(
        "L2",
        "acceptance first",
        every(c, every(b, (new(covers(c, b)) & ~covers(c, b)) >> responsible(c))),
        "A claim gets its first protected block only after it was accepted.",
    ),
    Property(
        "L3",
        "harm is a loss",
        every(
            c,
            (ne(phase(c), value(PHASE, Phase.HARMED)) & new(is_in(c, Phase.HARMED)))
            >> some(b, covers(c, b) & some(k, key(b, k) & ~new(key(b, k)))),
        ),
        "A claim is harmed only in a step that takes content which it covers.",
    ),
    Property(
        "L3",
        "a hard loss is told",
        every(
            c,
            every(
                b,
                every(
                    k,
                    both(_gone, hard(c), is_in(c, Phase.MATERIALIZED))
                    >> new(is_in(c, Phase.HARMED)),
                ),
            ),
        ),
        "A materialized hard claim that loses content is harmed in that very step.",
    ),
    Property(
        "L5",
        "no hard claim harmed by choice",
        every(c, both(hard(c), responsible(c)) >> ~new(is_in(c, Phase.HARMED))),
        "Nothing but a fault harms a hard claim.",
        but="lose",
    ),
    Property(
        "L7",
        "materialized means resident",
        every(
            c,
            is_in(c, Phase.MATERIALIZED)
            >> both(eq(reserve(c), 0), every(b, ~drawn(c, b) & (covers(c, b) >> hashed(b)))),
        ),
        "Every block of a materialized claim carries content, and none is missing.",
    ),
    Property(
        "P1",
        "a protected block keeps its hash",
        every(b, every(k, (protected(b) & key(b, k)) >> new(key(b, k)))),
        "Nothing but a fault takes the hash of a protected block, or puts another in its place.",
        but="lose",
    ),
    Property(
        "P1",
        "a protected block stays out of the queue",
        every(c, every(b, (pinned_by(c, b) & responsible(c)) >> ~queued(b))),
        "What is protected cannot be handed out.",
    ),
    Property(
        "P1",
        "a taken block was nobody's",
        both(~protected(b), ~in_use(b)),
        "A block is handed out only if nobody held it and no claim protected it.",
        on="take",
    ),
    Property(
        "P1",
        "a drawn block was nobody's",
        both(~protected(b), ~in_use(b)),
        "A block is handed out only if nobody held it and no claim protected it.",
        on="draw",
    ),
    Property(
        "P1",
        "a responsible claim keeps its blocks",
        every(
            c,
            every(
                b,
                both(pinned_by(c, b), responsible(c), new(responsible(c)), hashed(b))
                >> (new(covers(c, b))),
            ),
        ),
        "While the runtime is responsible, a hard claim lets go of no block that has content.",
    ),
    Property(
        "P2",
        "one claim's end leaves the others",
        every(c, every(b, pinned_by(c, b) >> ~queued(b))),
        "A block returns to the queue only when no claim refers to it any more.",
    ),
    Property(
        "P3",
        "a soft loss is told",
        every(
            c,
            every(
                b,
                every(
                    k,
                    (
                        both(_gone, ~hard(c), is_in(c, Phase.MATERIALIZED))
                        & ~some(_b, both(ne(_b, b), covers(c, _b), key(_b, k)))
                    )
                    >> new(is_in(c, Phase.HARMED)),
                ),
            ),
        ),
        "A materialized soft claim that loses content is harmed in that very step.",
    ),
    Property(
        "P4",
        "no-admit registers nothing",
        every(b, every(k, (new(key(b, k)) & ~key(b, k)) >> some(r, held(r, b) & admit_reuse(r)))),
        "Content becomes visible only through a holder that may leave it for reuse.",
    ),
    Property(
        "B1",
        "free means unreferenced",
        every(b, ~null(b) >> iff(queued(b), eq(ref(b), 0))),
        "A block is in the free queue exactly when its reference count is zero.",
    ),
    Property(
        "B1",
        "the counter agrees",
        eq(free(), _in_queue),
        "The queue is as long as its counter says.",
    ),
    Property(
        "B2",
        "references have names",
        every(b, eq(ref(b), count(_r, held(_r, b)) + count(_d, pinned_by(_d, b)))),
        "The reference count is the number of holders and pins that can be named.",
    ),
    Property(
        "B3",
        "map and blocks agree",
        every(b, every(k, iff(key(b, k), entry(k, b)))),
        "A block carries a hash exactly when the lookup of the hash finds it.",
    ),
    Property(
        "B3",
        "one identity a block",
        every(b, every(k, every(_k, (key(b, k) & key(b, _k)) >> eq(k, _k)))),
        "A block has at most one content identity (of one KV group).",
    ),
    Property(
        "B3",
        "a reused block keeps no hash",
        every(k, ~new(key(b, k))),
        "A block that is handed out blank is found under no hash.",
        on="take",
    ),
    Property(
        "B3",
        "a drawn block keeps no hash",
        every(k, ~new(key(b, k))),
        "A block that is handed out blank is found under no hash.",
        on="draw",
    ),
    Property(
        "B4",
        "a hit is what it names",
        key(b, k),
        "A request that hits a block reads the content it asked for.",
        on="share",
    ),
    Property(
        "B4",
        "only holders register",
        some(_r, held(_r, b)),
        "Content becomes visible in a block that somebody holds and has computed.",
        on="register",
    ),
    Property(
        "B5",
        "nothing is evicted under a reader",
        every(_r, ~held(_r, b)),
        "A block that a request holds is not evicted.",
        on="evict",
    ),
    Property(
        "B6",
        "the null block is nobody's",
        every(
            b,
            null(b)
            >> both(
                ~queued(b),
                eq(ref(b), 0),
                every(_r, ~held(_r, b)),
                every(k, ~key(b, k)),
                every(c, ~covers(c, b)),
            ),
        ),
        "The null block is never queued, held, hashed or covered.",
    ),
    Property(
        "B7",
        "ended requests hold nothing",
        every(r, ~active(r) >> both(eq(owed(r), 0), every(b, ~held(r, b)))),
        "A request that ended or was preempted holds no block and no grant.",
    ),
    Property(
        "F2",
        "only responsible hard claims hold reserves",
        every(c, ~both(hard(c), responsible(c)) >> both(eq(reserve(c), 0), every(b, ~drawn(c, b)))),
        "Nothing is promised to a claim that is not hard, or is not in force.",
        goal=False,
    ),
    Property(
        "F2",
        "a loan stands for a held block",
        every(c, every(b, drawn(c, b) >> both(in_use(b), ~covers(c, b)))),
        "What was taken on a claim's reserve is held by a request and not covered yet.",
        goal=False,
    ),
    Property(
        "F2",
        "one loan a block",
        every(c, every(_d, every(b, (drawn(c, b) & drawn(_d, b)) >> eq(c, _d)))),
        "A block is on loan from one claim at most.",
        goal=False,
    ),
    Property(
        "L2",
        "soft covers end with the claim",
        every(c, every(b, (covers(c, b)) >> (responsible(c) | ended(c)))),
        "Only claims that were accepted cover blocks.",
        goal=False,
    ),
    Property(
        "B2",
        "counters are not negative",
        both(free() >= 0, every(b, ref(b) >= 0)),
        "References and the queue's length stay at or above zero.",
        goal=False,
    ),
    Property(
        "F2",
        "nothing is overdrawn",
        both(every(r, owed(r) >= 0), every(c, reserve(c) >= 0)),
        "Neither a grant nor a reserve is drawn on more than was promised.",
        goal=False,
    ),
)

COROLLARIES: Final = (
    Property(
        "B1",
        "what is referred to is not queued",
        every(
            b,
            queued(b) >> both(eq(ref(b), 0), every(r, ~held(r, b)), every(c, ~pinned_by(c, b))),
        ),
        "A block in the queue is held by no request and pinned by no claim.",
    ),
    Property(
        "B2",
        "one reference has one name",
        every(
            b,
            eq(ref(b), 1)
            >> both(
                every(r, every(c, ~(held(r, b) & pinned_by(c, b)))),
                every(r, every(_r, (held(r, b) & held(_r, b)) >> eq(r, _r))),
                every(c, every(_d, (pinned_by(c, b) & pinned_by(_d, b)) >> eq(c, _d))),
            ),
        ),
        "A block with one reference is held once, or pinned once.",
    ),
)
"""What follows from the invariants in every state, without induction."""

POOL: Final = Machine(
    name="pool",
    meaning="block ownership under claims",
    symbols=(
        null,
        hard,
        admit_reuse,
        held,
        ref,
        queued,
        free,
        key,
        entry,
        phase,
        covers,
        drawn,
        reserve,
        active,
        owed,
        outcome,
    ),
    init=(
        becomes(held(r, b), False, over=(r, b)),
        becomes(ref(b), 0, over=(b,)),
        becomes(queued(b), ~null(b), over=(b,)),
        becomes(free(), usable),
        becomes(key(b, k), False, over=(b, k)),
        becomes(entry(k, b), False, over=(k, b)),
        becomes(phase(c), value(PHASE, Phase.ABSENT), over=(c,)),
        becomes(covers(c, b), False, over=(c, b)),
        becomes(drawn(c, b), False, over=(c, b)),
        becomes(reserve(c), 0, over=(c,)),
        becomes(active(r), False, over=(r,)),
        becomes(owed(r), 0, over=(r,)),
        becomes(outcome(r), value(OUTCOME, Outcome.PENDING), over=(r,)),
    ),
    actions=ACTIONS,
    properties=PROPERTIES,
    partitions=(
        Partition(usable, (_in_queue, _committed, _let_go)),
        Partition(usable, (_in_queue, _protected, _unprotected)),
    ),
)

AT_REST: Final = both(
    every(c, ended(c)),
    every(r, turned_away(r) & ~active(r)),
    every(b, null(b) | queued(b)),
)
"""Where the pool may stop: all that was ever asked is answered and over, and every block is free.
Claims and requests of this machine live once, so nothing more can be asked of it."""
