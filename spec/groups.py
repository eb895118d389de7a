"""Blocks of several sizes: KV groups that share one pool of blocks.

Rules F1 to F3, P1, P2, P5, B1 to B5, B11, L3 and L7 where a model keeps its KV in several
groups (full attention beside a sliding window), for any number of groups, blocks, contents,
requests and claims.

Each group has its own block size in tokens and its own chain of contents: a `Key` names a block
of one group together with the whole prefix before it, and `upto` says at which token it ends.  A
prefix of n tokens stands in a group on a boundary only if some block ends at n there; n is one
in *every* group only if it is a multiple of every block size, which is how lengths aligned by
their least common multiple appear here.  A full group needs every block of the prefix, a
sliding window only those that reach into the last `window` tokens.

A hit is settled for all groups at once and then touched block by block, while other requests
run: that is where a block found in one group can be lost to another (guards of `evict` and
`grant`).  A hard claim's footprint is the sum over its groups; what it does not cover yet is its
reserve, and blocks count once however many claims and requests share them.

What `spec.pool` shows for one group is not repeated: the null block, loans on a claim's reserve,
the three outcomes, faults that take content.
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
    either,
    eq,
    every,
    iff,
    ite,
    ne,
    new,
    some,
    total,
    value,
)
from kvclaims.spec.pool import BLOCK, KEY, REQUEST
from kvclaims.spec.vocabulary import Phase

GROUP: Final = Sort("Group")
STAGE: Final = Sort("Stage", ("idle", "looking", "settled", "running", "ending"))

full: Final = Symbol("full", (GROUP,), rigid=True, meaning="the group attends to the whole prefix")
size: Final = Symbol("size", (GROUP,), NAT, rigid=True, meaning="tokens in a block of the group")
window: Final = Symbol("window", (GROUP,), NAT, rigid=True, meaning="tokens that it attends to")
of: Final = Symbol("of", (KEY, GROUP), rigid=True, meaning="the content is the group's")
upto: Final = Symbol("upto", (KEY,), NAT, rigid=True, meaning="tokens up to the block's end")
wants: Final = Symbol("wants", (REQUEST, KEY), rigid=True, meaning="it is in the request's prompt")
speaks: Final = Symbol("speaks", (CLAIM, KEY), rigid=True, meaning="it is in the claim's prefix")

stage: Final = Symbol("stage", (REQUEST,), STAGE, meaning="how far the request has come")
hit: Final = Symbol("hit", (REQUEST,), NAT, meaning="tokens that it did not have to compute")
at: Final = Symbol("at", (REQUEST,), NAT, meaning="tokens whose KV is there, hit or computed")
found: Final = Symbol("found", (REQUEST, KEY, BLOCK), meaning="looked up, not yet referred to")
slot: Final = Symbol("slot", (REQUEST, KEY, BLOCK), meaning="the block is in the request's table")
held: Final = Symbol("held", (REQUEST, BLOCK), meaning="the request refers to the block")
taken: Final = Symbol("taken", (REQUEST, KEY), meaning="a block was taken for the content")
owed: Final = Symbol("owed", (REQUEST,), NAT, meaning="blocks granted to it, not yet taken")
ref: Final = Symbol("ref", (BLOCK,), NAT, meaning="the block's reference counter")
queued: Final = Symbol("queued", (BLOCK,), meaning="the block is in the free queue")
free: Final = Symbol("free", (), NAT, meaning="the free queue's own counter")
has: Final = Symbol("has", (BLOCK, KEY), meaning="the whole KV of the content is in the block")
key: Final = Symbol("key", (BLOCK, KEY), meaning="the block carries this content hash")
covers: Final = Symbol("covers", (CLAIM, KEY, BLOCK), meaning="the claim holds the block for it")
pins: Final = Symbol("pins", (CLAIM, BLOCK), meaning="the claim refers to the block")
reserve: Final = Symbol("reserve", (CLAIM,), NAT, meaning="blocks promised, not yet covered")

r: Final = Var("r", REQUEST)
k: Final = Var("k", KEY)
b: Final = Var("b", BLOCK)
c: Final = Var("c", CLAIM)
n: Final = Var("n", NAT)
_r: Final = Var("q", REQUEST)
_k: Final = Var("j", KEY)
_i: Final = Var("i", KEY)
_b: Final = Var("a", BLOCK)
_c: Final = Var("d", CLAIM)
_g: Final = Var("g", GROUP)
_h: Final = Var("h", GROUP)


# --- what the words mean -----------------------------------------------------------------


def is_at(request: Term, *stages: str) -> Term:
    return either(*(eq(stage(request), value(STAGE, s)) for s in stages))


def needed(content: Term, tokens: Term) -> Term:
    """Attention to the token after `tokens` reads the block: always in a full group, in a
    sliding window if the block reaches into its last tokens."""
    return some(_g, of(content, _g) & (full(_g) | ((upto(content) + window(_g)) > tokens)))


def on_boundary(request: Term, tokens: Term) -> Term:
    """A block of the prompt ends there in every group."""
    return eq(tokens, 0) | every(
        _g, some(_i, both(wants(request, _i), of(_i, _g), eq(upto(_i), tokens)))
    )


def resident(content: Term) -> Term:
    return some(_b, key(_b, content))


def all_resident(request: Term, tokens: Term) -> Term:
    """Every block that a hit of so many tokens needs is resident, in every group."""
    return every(
        _k,
        both(wants(request, _k), upto(_k) <= tokens, needed(_k, tokens)) >> resident(_k),
    )


def in_use(block: Term) -> Term:
    return some(_r, held(_r, block))


def protected(block: Term) -> Term:
    """Some responsible hard claim covers the block, in whichever group."""
    return some(_c, responsible(_c) & pins(_c, block))


def _stands(claim: Term, content: Term) -> Term:
    """A hard claim covers the content; for another it is resident."""
    return (hard(claim) & some(_b, covers(claim, content, _b) & key(_b, content))) | (
        ~hard(claim) & resident(content)
    )


def filled(request: Term, content: Term) -> Term:
    return some(_b, slot(request, content, _b))


def begins_at_or_after(content: Term, tokens: Term) -> Term:
    """Every token of the block comes after the first `tokens`."""
    return every(_g, of(content, _g) >> ((tokens + size(_g)) <= upto(content)))


def begins_before(content: Term, tokens: Term) -> Term:
    """Some token of the block is among the first `tokens`."""
    return some(_g, of(content, _g) & (upto(content) < (tokens + size(_g))))


to_take: Final = count(_k, both(wants(r, _k), upto(_k) > hit(r), ~taken(r, _k)))
"""Blocks of all groups that the request has to take for what it computes itself (B11)."""

footprint: Final = count(_k, speaks(c, _k) & ~some(_b, covers(c, _k, _b)))
"""Blocks of all groups that the claim speaks of and does not cover yet."""

promised: Final = total(_c, reserve(_c))
granted: Final = total(_r, owed(_r))
headroom: Final = free() - promised - granted
blocks: Final = count(_b, eq(_b, _b))
_in_queue: Final = count(_b, queued(_b))
_committed: Final = count(_b, protected(_b) | in_use(_b))
_let_go: Final = count(_b, both(~queued(_b), ~protected(_b), ~in_use(_b)))


# --- actions -----------------------------------------------------------------------------

_FREE_FOR_ONE: Final = queued(b) >> (headroom > 0)


def _goes(to: str) -> Update:
    return becomes(stage(r), value(STAGE, to))


def _leave_queue() -> tuple[Update, ...]:
    return (becomes(queued(b), False), becomes(free(), ite(queued(b), free() - 1, free())))


def _unreference() -> tuple[Update, ...]:
    return (
        becomes(ref(b), ref(b) - 1),
        becomes(queued(b), queued(b) | eq(ref(b), 1)),
        becomes(free(), ite(eq(ref(b), 1), free() + 1, free())),
    )


_kept_elsewhere: Final = some(_b, ne(_b, b) & key(_b, k))

ACTIONS: Final = (
    Action(
        "look",
        (r,),
        (Guard(("B7", "B5", "P5"), is_at(r, "idle"), "the request waits"),),
        (_goes("looking"),),
        "a waiting request looks its prompt up, group by group",
    ),
    Action(
        "find",
        (r, k, b),
        (
            Guard(("B5", "B2", "B7"), is_at(r, "looking"), "the request is looking its prompt up"),
            Guard(("B5",), both(wants(r, k), key(b, k)), "it carries a content of its prompt"),
            Guard(("B2",), ~some(_b, found(r, k, _b)), "no block was found for it before"),
        ),
        (becomes(found(r, k, b), True),),
        "a lookup in one group finds a block; nothing refers to it yet",
    ),
    Action(
        "settle",
        (r, n),
        (
            Guard(("B5", "B7", "P5"), is_at(r, "looking"), "the request is looking its prompt up"),
            Guard(("B4",), on_boundary(r, n), "a block ends there in every group"),
            Guard(
                ("P5",),
                every(
                    _k,
                    both(wants(r, _k), upto(_k) <= n, needed(_k, n)) >> some(_b, found(r, _k, _b)),
                ),
                "every group found the blocks that it needs",
            ),
            Guard(
                ("P5",),
                every(
                    k,
                    both(wants(r, k), upto(k) > n, on_boundary(r, upto(k)))
                    >> ~all_resident(r, upto(k)),
                ),
                "no longer prefix is resident in every group",
            ),
        ),
        (
            _goes("settled"),
            becomes(hit(r), n),
            becomes(at(r), n),
            becomes(
                found(r, k, b),
                both(found(r, k, b), upto(k) <= n, needed(k, n)),
                over=(k, b),
            ),
        ),
        "the hit is n tokens in every group; blocks found beyond it, or outside a window, are "
        "let go of",
    ),
    Action(
        "touch",
        (r, k, b),
        (
            Guard(("B5", "B2", "B3", "P5"), found(r, k, b), "the lookup found the block"),
            Guard(("B5",), is_at(r, "settled"), "the hit is settled"),
            Guard(("F2",), _FREE_FOR_ONE, "headroom covers a block from the queue"),
        ),
        (
            becomes(found(r, k, b), False),
            becomes(slot(r, k, b), True),
            becomes(held(r, b), True),
            becomes(ref(b), ref(b) + 1),
            *_leave_queue(),
        ),
        "the request refers to a block of its hit; one that is in use costs nothing",
    ),
    Action(
        "grant",
        (r, n),
        (
            Guard(("P5",), is_at(r, "settled"), "the hit is settled"),
            Guard(
                ("P5", "B5"), ~some(_k, some(_b, found(r, _k, _b))), "every group's hit is touched"
            ),
            Guard(("B11",), eq(n, to_take), "the blocks of every group are counted"),
            Guard(("F3", "F2"), n <= headroom, "headroom covers them together"),
        ),
        (_goes("running"), becomes(owed(r), n)),
        "the request is granted the n blocks that it will take in all groups",
    ),
    Action(
        "take",
        (r, k, b),
        (
            Guard(("B7", "B2", "B5", "P5"), is_at(r, "running"), "the request runs"),
            Guard(
                ("B11", "B2", "B5", "P5"),
                both(wants(r, k), upto(k) > hit(r)),
                "it computes the content itself",
            ),
            Guard(("B11", "B2", "P5"), ~taken(r, k), "it took no block for it before"),
            Guard(("P1", "B2", "B3", "P5"), queued(b), "the block is in the free queue"),
            Guard(("B3", "B4"), ~some(_k, key(b, _k)), "the block carries no hash any more"),
        ),
        (
            becomes(slot(r, k, b), True),
            becomes(held(r, b), True),
            becomes(taken(r, k), True),
            becomes(owed(r), owed(r) - 1),
            becomes(has(b, _k), False, over=(_k,)),
            becomes(ref(b), ref(b) + 1),
            *_leave_queue(),
        ),
        "the request takes a blank block for a content of one of its groups",
    ),
    Action(
        "run",
        (r, n),
        (
            Guard(("P5",), is_at(r, "running"), "the request runs"),
            Guard(("P5", "B2"), n > at(r), "it goes on, never back"),
            Guard(
                ("B4", "P5"),
                every(
                    _k,
                    both(wants(r, _k), upto(_k) > hit(r), begins_before(_k, n)) >> taken(r, _k),
                ),
                "every group has the blocks that the step writes",
            ),
        ),
        (
            becomes(at(r), n),
            becomes(
                has(_b, _k),
                has(_b, _k)
                | both(
                    slot(r, _k, _b),
                    at(r) < upto(_k),
                    upto(_k) <= n,
                    begins_at_or_after(_k, hit(r)),
                ),
                over=(_b, _k),
            ),
        ),
        "the request computes up to token n; blocks that end on the way are whole",
    ),
    Action(
        "register",
        (r, k, b),
        (
            Guard(("B4", "B3"), slot(r, k, b), "the block is in the request's table"),
            Guard(("B4",), upto(k) <= at(r), "its last token was computed"),
        ),
        (becomes(key(b, k), True),),
        "a whole block becomes visible under its group's hash",
    ),
    Action(
        "skip",
        (r, k, b),
        (
            Guard(("B2", "B1", "F1", "P1"), slot(r, k, b), "the block is in the request's table"),
            Guard(("P5",), ~needed(k, at(r)), "its group's window has passed it"),
        ),
        (becomes(slot(r, k, b), False), becomes(held(r, b), False), *_unreference()),
        "a block that fell out of the sliding window is freed, once",
    ),
    Action(
        "stop",
        (r,),
        (),
        (
            becomes(stage(r), ite(is_at(r, "idle"), stage(r), value(STAGE, "ending"))),
            becomes(owed(r), 0),
            becomes(found(r, _k, _b), False, over=(_k, _b)),
        ),
        "the request finishes, is aborted or gives up; what it found and was granted lapses",
    ),
    Action(
        "drop",
        (r, k, b),
        (
            Guard(("B2", "B1", "F1", "P1"), slot(r, k, b), "the block is in the request's table"),
            Guard(("P5",), is_at(r, "ending"), "the request has stopped"),
        ),
        (becomes(slot(r, k, b), False), becomes(held(r, b), False), *_unreference()),
        "a request that stopped lets go of a block",
    ),
    Action(
        "retire",
        (r,),
        (
            Guard(("B7", "B5"), is_at(r, "ending"), "the request has stopped"),
            Guard(("B7", "B5"), ~some(_b, held(r, _b)), "every group's table is empty"),
        ),
        (
            _goes("idle"),
            becomes(hit(r), 0),
            becomes(at(r), 0),
            becomes(taken(r, _k), False, over=(_k,)),
        ),
        "the request is over",
    ),
    Action(
        "evict",
        (b, k),
        (
            Guard(
                ("P1", "L3", "L7"),
                ~protected(b),
                "no responsible hard claim covers it, in any group",
            ),
            Guard(("B5",), ~in_use(b), "no request holds it"),
            Guard(
                ("B5",),
                ~some(_r, some(_k, found(_r, _k, b))),
                "no lookup found it that has not referred to it yet",
            ),
        ),
        (
            becomes(key(b, k), False),
            becomes(
                phase(_c),
                ite(
                    both(
                        ~hard(_c),
                        speaks(_c, k),
                        is_in(_c, Phase.MATERIALIZED),
                        ~_kept_elsewhere,
                    ),
                    value(PHASE, Phase.HARMED),
                    phase(_c),
                ),
                over=(_c,),
            ),
        ),
        "a block loses its hash; in whichever group, that breaks the prefix of soft claims on it",
    ),
    Action(
        "accept",
        (c, n),
        (
            phase_is(c, Phase.ABSENT, protects=("L1", "P1")),
            Guard(
                ("F2",),
                eq(n, ite(hard(c), footprint, 0)),
                "a hard claim is promised the blocks of every group",
            ),
            Guard(("F2",), n <= headroom, "headroom covers the promise"),
        ),
        (goes(c, Phase.ACCEPTED), becomes(reserve(c), n)),
        "the claim is accepted; a hard one is promised n blocks over all groups",
    ),
    Action(
        "cover",
        (c, k, b),
        (
            Guard(
                ("P2", "B2", "F2"),
                both(hard(c), responsible(c), speaks(c, k)),
                "a hard claim in force speaks of the content",
            ),
            Guard(("P1", "B2"), key(b, k), "the block carries the content"),
            Guard(("F2", "B2"), ~some(_b, covers(c, k, _b)), "it covers no block for it yet"),
        ),
        (
            becomes(covers(c, k, b), True),
            becomes(pins(c, b), True),
            becomes(reserve(c), reserve(c) - 1),
            becomes(ref(b), ref(b) + 1),
            *_leave_queue(),
        ),
        "a hard claim covers a resident block of one of its groups, on its reserve",
    ),
    Action(
        "materialize",
        (c,),
        (
            phase_is(c, Phase.ACCEPTED),
            Guard(
                ("L7",),
                every(_k, speaks(c, _k) >> _stands(c, _k)),
                "every group's part of the prefix is there",
            ),
        ),
        (goes(c, Phase.MATERIALIZED),),
        "the claim's prefix is resident in every group",
    ),
    Action(
        "finish",
        (c,),
        (Guard(("L1",), responsible(c), "the runtime is responsible for the claim"),),
        (goes(c, Phase.RELEASED), becomes(reserve(c), 0)),
        "the claim ends; nothing is promised any more",
    ),
    Action(
        "uncover",
        (c, k, b),
        (
            Guard(("B2", "B1", "F1", "P1"), covers(c, k, b), "the claim covers the block"),
            Guard(("P2", "F2", "L7"), ~responsible(c), "the claim has ended"),
        ),
        (becomes(covers(c, k, b), False), becomes(pins(c, b), False), *_unreference()),
        "an ended claim lets go of a block; other claims and groups keep theirs",
    ),
)


# --- properties --------------------------------------------------------------------------

_lost = resident(k) & ~new(resident(k))

PROPERTIES: Final = (
    Property(
        "F1",
        "union fits",
        (_committed + free()) <= blocks,
        "Blocks that are protected or in use, each counted once over all groups, and those the "
        "queue calls free fit the pool together.",
    ),
    Property(
        "F2",
        "headroom",
        headroom >= 0,
        "Free blocks cover every promise and every grant, jointly over all groups.",
    ),
    Property(
        "F2",
        "a promise counts every group",
        every(c, both(hard(c), responsible(c)) >> eq(reserve(c), footprint)),
        "A hard claim's reserve is what it does not cover yet, summed over its groups.",
    ),
    Property(
        "F2",
        "only responsible hard claims hold reserves",
        every(c, ~both(hard(c), responsible(c)) >> eq(reserve(c), 0)),
        "Nothing is promised to a claim that is not hard, or is not in force.",
        goal=False,
    ),
    Property(
        "F3",
        "granted only with headroom",
        new(headroom >= 0),
        "After a grant for all groups together headroom is at or above zero.",
        on="grant",
    ),
    Property(
        "L1",
        "moves along the table",
        every(
            c,
            both(
                ended(c) >> eq(new(phase(c)), phase(c)),
                new(is_in(c, Phase.ACCEPTED)) >> is_in(c, Phase.ABSENT, Phase.ACCEPTED),
                new(is_in(c, Phase.MATERIALIZED)) >> is_in(c, Phase.ACCEPTED, Phase.MATERIALIZED),
                new(is_in(c, Phase.RELEASED)) >> (responsible(c) | is_in(c, Phase.RELEASED)),
            ),
        ),
        "Each phase is entered only from where the transition table says; what ended stays so.",
    ),
    Property(
        "L3",
        "harm is a loss",
        every(
            c,
            (new(is_in(c, Phase.HARMED)) & ~is_in(c, Phase.HARMED))
            >> both(is_in(c, Phase.MATERIALIZED), some(k, speaks(c, k) & _lost)),
        ),
        "A claim is harmed only in a step that takes the last copy of a content of its prefix.",
    ),
    Property(
        "L3",
        "a loss in one group is a loss",
        every(
            c,
            every(
                k,
                both(is_in(c, Phase.MATERIALIZED), speaks(c, k), _lost)
                >> new(is_in(c, Phase.HARMED)),
            ),
        ),
        "An eviction in one group breaks the whole prefix: a materialized claim is harmed then.",
    ),
    Property(
        "L5",
        "no hard claim is harmed by choice",
        every(c, both(hard(c), responsible(c)) >> ~new(is_in(c, Phase.HARMED))),
        "Eviction never harms a hard claim, in any group.",
    ),
    Property(
        "L7",
        "materialized in every group",
        every(c, every(k, both(is_in(c, Phase.MATERIALIZED), speaks(c, k)) >> _stands(c, k))),
        "Every group has its part of a materialized claim's prefix.",
    ),
    Property(
        "P1",
        "what is covered stays out of the queue",
        every(c, every(b, pins(c, b) >> ~queued(b))),
        "A block that a claim refers to for one group is not handed out to another.",
    ),
    Property(
        "B1",
        "what is held stays out of the queue",
        every(r, every(b, held(r, b) >> ~queued(b))),
        "A block that a request refers to for one group is not handed out to another.",
    ),
    Property(
        "P1",
        "a covered block keeps its hash",
        every(c, every(k, every(b, (covers(c, k, b) & responsible(c)) >> key(b, k)))),
        "While the claim is in force its blocks carry the contents that it speaks of.",
    ),
    Property(
        "P1",
        "a taken block was nobody's",
        both(~protected(b), ~in_use(b)),
        "A block is handed out only if no request held it and no claim protected it.",
        on="take",
    ),
    Property(
        "P2",
        "one claim's end leaves the others",
        every(
            c,
            every(k, every(b, (covers(c, k, b) & ~new(covers(c, k, b))) >> ~responsible(c))),
        ),
        "Only a claim that ended lets go of a block.",
    ),
    Property(
        "P2",
        "only hard claims refer to blocks",
        every(
            c,
            every(
                k,
                every(
                    b,
                    covers(c, k, b) >> both(hard(c), speaks(c, k), responsible(c) | ended(c)),
                ),
            ),
        ),
        "A claim refers to blocks of its own prefix, and only if it is hard.",
        goal=False,
    ),
    Property(
        "B2",
        "tables and references agree",
        both(
            every(r, every(b, iff(held(r, b), some(k, slot(r, k, b))))),
            every(c, every(b, iff(pins(c, b), some(k, covers(c, k, b))))),
        ),
        "A request refers to what stands in its tables, a claim to what it covers.",
        goal=False,
    ),
    Property(
        "P5",
        "a hit is held in every group",
        every(
            r,
            every(
                k,
                both(is_at(r, "running"), wants(r, k), upto(k) <= at(r), needed(k, at(r)))
                >> filled(r, k),
            ),
        ),
        "What attention reads is in the request's table: all of a full group, the last window "
        "of another.",
    ),
    Property(
        "P5",
        "a hit is what it names",
        every(
            r,
            every(
                k,
                every(b, both(slot(r, k, b), upto(k) <= at(r)) >> has(b, k)),
            ),
        ),
        "A block in a request's table holds the whole KV of the content it stands for.",
    ),
    Property(
        "P5",
        "a hit is the longest run",
        every(
            k,
            both(wants(r, k), all_resident(r, upto(k)), on_boundary(r, upto(k))) >> (upto(k) <= n),
        ),
        "No longer prefix was resident in all groups.",
        on="settle",
    ),
    Property(
        "B1",
        "free means unreferenced",
        every(b, iff(queued(b), eq(ref(b), 0))),
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
        every(b, eq(ref(b), count(_r, held(_r, b)) + count(_c, pins(_c, b)))),
        "The reference count is the number of requests and claims that can be named.",
    ),
    Property(
        "B2",
        "one place in a table",
        every(r, every(b, every(k, every(_k, (slot(r, k, b) & slot(r, _k, b)) >> eq(k, _k))))),
        "No block stands twice in a request's tables, of one group or of two.",
    ),
    Property(
        "B2",
        "one place in a claim",
        every(c, every(b, every(k, every(_k, (covers(c, k, b) & covers(c, _k, b)) >> eq(k, _k))))),
        "No block stands twice in a claim.",
        goal=False,
    ),
    Property(
        "B2",
        "one block a place",
        every(
            r,
            every(
                k,
                both(
                    every(b, every(_b, (slot(r, k, b) & slot(r, k, _b)) >> eq(b, _b))),
                    every(b, every(_b, (found(r, k, b) & found(r, k, _b)) >> eq(b, _b))),
                    every(b, every(_b, ~(found(r, k, b) & slot(r, k, _b)))),
                ),
            ),
        ),
        "A content has one block in a request's table, found or referred to.",
        goal=False,
    ),
    Property(
        "B2",
        "counters are not negative",
        both(
            free() >= 0,
            every(b, ref(b) >= 0),
            every(r, both(owed(r) >= 0, hit(r) >= 0, hit(r) <= at(r))),
            every(c, reserve(c) >= 0),
        ),
        "Counters stay at or above zero.",
        goal=False,
    ),
    Property(
        "B3",
        "one identity a block",
        every(b, every(k, every(_k, (key(b, k) & key(b, _k)) >> eq(k, _k)))),
        "A block is visible under one content of one group at most.",
    ),
    Property(
        "B3",
        "one content a block",
        every(
            r,
            every(
                b,
                every(
                    k,
                    both(
                        every(_k, (slot(r, k, b) & key(b, _k)) >> eq(k, _k)),
                        every(_r, every(_k, (slot(r, k, b) & slot(_r, _k, b)) >> eq(k, _k))),
                    ),
                ),
            ),
        ),
        "All that refer to a block refer to it for the same content, which is the one it shows.",
        goal=False,
    ),
    Property(
        "B3",
        "a reused block keeps no hash",
        every(_k, ~new(key(b, _k))),
        "A block that is handed out blank is found under no hash, of any group.",
        on="take",
    ),
    Property(
        "B4",
        "visible means wholly written",
        every(b, every(k, key(b, k) >> has(b, k))),
        "A visible block holds the whole KV of its content; a hit that ends inside a block of "
        "some group would leave it half written.",
    ),
    Property(
        "B4",
        "a hit cuts no block",
        every(
            r,
            every(
                k,
                both(wants(r, k), upto(k) > hit(r)) >> begins_at_or_after(k, hit(r)),
            ),
        ),
        "Every block that the request computes begins at or after the end of its hit.",
        goal=False,
    ),
    Property(
        "B5",
        "nothing is evicted under a reader",
        both(
            every(_r, ~held(_r, b)),
            every(_r, every(_k, ~found(_r, _k, b))),
        ),
        "A block that a request holds, or found and is about to refer to, is not evicted.",
        on="evict",
    ),
    Property(
        "B5",
        "what was found is still there",
        every(r, every(k, every(b, found(r, k, b) >> both(key(b, k), wants(r, k))))),
        "Between the lookup and the reference no other group or request takes the block.",
    ),
    Property(
        "B5",
        "stages of a request",
        every(
            r,
            every(
                k,
                every(
                    b,
                    both(
                        found(r, k, b) >> is_at(r, "looking", "settled"),
                        (found(r, k, b) & is_at(r, "settled"))
                        >> both(upto(k) <= hit(r), needed(k, hit(r))),
                        slot(r, k, b) >> is_at(r, "settled", "running", "ending"),
                        (slot(r, k, b) & is_at(r, "settled")) >> key(b, k),
                        slot(r, k, b) >> (wants(r, k) & ((upto(k) <= hit(r)) | taken(r, k))),
                    ),
                ),
            ),
        ),
        "Pointers stand only where a request's stage lets them.",
        goal=False,
    ),
    Property(
        "P5",
        "a settled hit is found or held",
        every(
            r,
            every(
                k,
                both(is_at(r, "settled"), wants(r, k), upto(k) <= hit(r), needed(k, hit(r)))
                >> some(b, found(r, k, b) | slot(r, k, b)),
            ),
        ),
        "Each block that a settled hit needs was found and is, or will be, referred to.",
        goal=False,
    ),
    Property(
        "P5",
        "taken blocks are held while they are needed",
        every(
            r,
            every(
                k,
                both(
                    taken(r, k) >> both(wants(r, k), upto(k) > hit(r)),
                    taken(r, k) >> is_at(r, "running", "ending"),
                    (is_at(r, "running") & taken(r, k)) >> (filled(r, k) | ~needed(k, at(r))),
                    both(is_at(r, "running"), wants(r, k), upto(k) > hit(r), upto(k) <= at(r))
                    >> taken(r, k),
                    (~is_at(r, "running", "ending")) >> eq(at(r), hit(r)),
                ),
            ),
        ),
        "A block is let go of only when its group's window has passed it.",
        goal=False,
    ),
    Property(
        "B4",
        "what began was taken",
        every(
            r,
            every(
                k,
                both(
                    is_at(r, "running"),
                    wants(r, k),
                    upto(k) > hit(r),
                    at(r) > hit(r),
                    begins_before(k, at(r)),
                )
                >> taken(r, k),
            ),
        ),
        "A block was there before its first token was computed.",
        goal=False,
    ),
    Property(
        "B7",
        "ended requests hold nothing",
        every(
            r,
            is_at(r, "idle")
            >> both(
                eq(owed(r), 0),
                every(b, ~held(r, b)),
                every(k, every(b, ~found(r, k, b))),
            ),
        ),
        "A request that is over holds no block in any group, and no grant.",
    ),
    Property(
        "B7",
        "only running requests are owed blocks",
        every(r, ~is_at(r, "running") >> eq(owed(r), 0)),
        "A grant lasts while the request runs.",
        goal=False,
    ),
    Property(
        "B11",
        "granted is what will be taken",
        every(r, is_at(r, "running") >> eq(owed(r), to_take)),
        "What was foretold is what the allocator takes, summed over groups of any block size.",
    ),
)

GROUPS: Final = Machine(
    name="groups",
    meaning="blocks of several sizes: KV groups that share one pool",
    symbols=(
        *(full, size, window, of, upto, wants, speaks, hard),
        *(stage, hit, at, found, slot, held, taken, owed),
        *(ref, queued, free, has, key),
        *(phase, covers, pins, reserve),
    ),
    axioms=(
        every(k, some(_g, of(k, _g))),
        every(k, every(_g, every(_h, (of(k, _g) & of(k, _h)) >> eq(_g, _h)))),
        every(_g, both(size(_g) > 0, window(_g) >= 0)),
        every(k, every(_g, of(k, _g) >> (size(_g) <= upto(k)))),
        every(
            r,
            every(
                k,
                every(
                    _k,
                    every(
                        _g,
                        both(wants(r, k), wants(r, _k), of(k, _g), of(_k, _g), upto(k) < upto(_k))
                        >> ((upto(k) + size(_g)) <= upto(_k)),
                    ),
                ),
            ),
        ),
    ),
    init=(
        becomes(stage(r), value(STAGE, "idle"), over=(r,)),
        becomes(hit(r), 0, over=(r,)),
        becomes(at(r), 0, over=(r,)),
        becomes(found(r, k, b), False, over=(r, k, b)),
        becomes(slot(r, k, b), False, over=(r, k, b)),
        becomes(held(r, b), False, over=(r, b)),
        becomes(taken(r, k), False, over=(r, k)),
        becomes(owed(r), 0, over=(r,)),
        becomes(ref(b), 0, over=(b,)),
        becomes(queued(b), True, over=(b,)),
        becomes(free(), blocks),
        becomes(has(b, k), False, over=(b, k)),
        becomes(key(b, k), False, over=(b, k)),
        becomes(phase(c), value(PHASE, Phase.ABSENT), over=(c,)),
        becomes(covers(c, k, b), False, over=(c, k, b)),
        becomes(pins(c, b), False, over=(c, b)),
        becomes(reserve(c), 0, over=(c,)),
    ),
    actions=ACTIONS,
    properties=PROPERTIES,
    partitions=(Partition(blocks, (_in_queue, _committed, _let_go)),),
)
