"""What is said of resident hashes, and operations that fail (rules B8, B9, B10).

For any number of blocks, hashes and tiers.  A hash may have several physical copies: each block
under which a lookup finds it, in any tier, is one.  Nobody outside sees blocks.  Who routes
requests by what is resident replays the events of the engine, of which there are three: a hash is
*stored* in a tier, a hash is *removed* from a tier, a tier is *cleared*.  `told` is what comes of
the replay.  It is a symbol of its own that events alone change, so that an event too many, too few
or of the wrong tier is a broken rule (B8) and not a definition: `removed` is said where a copy goes
and no other one stays in that tier.

Whatever changes what is resident or held between its first and its last step is an *operation*: an
admission that evicts and takes blocks, and a reset that clears tier after tier.  Either may find
that it cannot go on (memory is short, a block is in use, a tier does not answer), at any point.  An
operation notes what it changed, undoes exactly that, and says that it failed when nothing is left
to undo (B9).  Events are not taken back: what is put back is told as stored again.  What it was
like at the beginning, `was` and `had`, is remembered for B9 to speak of; no step reads it.  So B9
asks the same of a reset that failed: one that cleared the first tier and could not clear the second
puts the first back, or has to ask every tier before it begins.

A reset that reports success has emptied every tier (B10), and what was sent before it stays out:
content that is still on its way to a block is no longer waited for, and does not become visible
when it lands.  `since` remembers what was sent after the last such reset.

The device computes and copies whatever the scheduler does, so content is sent at any time; that
content has landed is noticed between operations only.  Which blocks may be evicted, and what a
block is worth, is the business of `kvclaims.spec.pool`; a block's place is one tier.
"""

from __future__ import annotations

from typing import Final

from kvclaims.spec.language import (
    FALSE,
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
    count,
    eq,
    every,
    iff,
    ite,
    new,
    one_of,
    some,
    total,
    value,
)
from kvclaims.spec.pool import BLOCK, KEY
from kvclaims.spec.progress import Fair, Helpful, Ranking, Response
from kvclaims.spec.tiers import TIER

DOING: Final = Sort("Doing", ("idle", "works", "resets", "undoes"))
SAID: Final = Sort("Said", ("nothing", "success", "failure"))

lies: Final = Symbol("lies", (TIER, BLOCK), rigid=True, meaning="the block is the tier's memory")
visible: Final = Symbol("visible", (BLOCK, KEY), meaning="a lookup of the hash finds the block")
told: Final = Symbol("told", (TIER, KEY), meaning="replaying all events, the tier has the hash")
held: Final = Symbol("held", (BLOCK,), meaning="the block is in use")
coming: Final = Symbol("coming", (BLOCK, KEY), meaning="the content is on its way and waited for")
since: Final = Symbol("since", (BLOCK, KEY), meaning="it was sent after the last successful reset")
doing: Final = Symbol("doing", (), DOING, meaning="which kind of operation is under way")
said: Final = Symbol("said", (), SAID, meaning="what the last operation said in the end")
evicted: Final = Symbol("evicted", (BLOCK, KEY), meaning="this operation made it invisible")
taken: Final = Symbol("taken", (BLOCK,), meaning="this operation put the block to use")
was: Final = Symbol("was", (BLOCK, KEY), meaning="it was visible when the operation began")
had: Final = Symbol("had", (BLOCK,), meaning="it was in use when the operation began")

b: Final = Var("b", BLOCK)
k: Final = Var("k", KEY)
t: Final = Var("t", TIER)
_b: Final = Var("a", BLOCK)
_k: Final = Var("j", KEY)
_t: Final = Var("u", TIER)


# --- what the words mean -----------------------------------------------------------------


def is_in(*kinds: str) -> Term:
    """What is under way is of one of these kinds."""
    return one_of(doing(), *(value(DOING, kind) for kind in kinds))


def says(answer: str) -> Term:
    return eq(said(), value(SAID, answer))


def resident(tier: Term, hash_: Term) -> Term:
    """Some block of the tier is a copy of the hash."""
    return some(_b, lies(tier, _b) & visible(_b, hash_))


_EMPTY: Final = ~some(_b, some(_k, visible(_b, _k)))
"""No lookup finds anything, in any tier."""


def _elsewhere(tier: Term) -> Term:
    """The tier has a copy of hash k beside the one in block b."""
    return some(_b, both(~eq(_b, b), lies(tier, _b), visible(_b, k)))


def _turns(kind: str, answer: str) -> tuple[Update, ...]:
    return (becomes(doing(), value(DOING, kind)), becomes(said(), value(SAID, answer)))


_REMEMBER: Final = (
    becomes(was(_b, _k), visible(_b, _k), over=(_b, _k)),
    becomes(had(_b), held(_b), over=(_b,)),
)

_NOTHING_TO_UNDO: Final = (
    becomes(evicted(_b, _k), FALSE, over=(_b, _k)),
    becomes(taken(_b), FALSE, over=(_b,)),
)

_STORED: Final = becomes(told(_t, k), told(_t, k) | lies(_t, b), over=(_t,))
"""The event that hash k is stored, in the tier that block b lies in."""

_REMOVED: Final = becomes(told(_t, k), told(_t, k) & _elsewhere(_t), over=(_t,))
"""The event that hash k is removed from a tier, where the copy in block b was the last one."""


def _idle(*protects: str) -> Guard:
    return Guard(protects, is_in("idle"), "no operation is under way")


# --- actions -----------------------------------------------------------------------------

ACTIONS: Final = (
    Action(
        "send",
        (b, k),
        (),
        (becomes(coming(b, k), True), becomes(since(b, k), True)),
        "content for the block leaves: a step computes it, or a transfer brings it",
    ),
    Action(
        "land",
        (b, k),
        (
            Guard(("B10",), coming(b, k), "the content is waited for"),
            _idle("B9", "B10"),
        ),
        (becomes(coming(b, k), False), becomes(visible(b, k), True), _STORED),
        "content has arrived and becomes visible: one more copy of the hash",
    ),
    Action(
        "let_go",
        (b,),
        (_idle("B9"),),
        (becomes(held(b), False),),
        "the block is not in use any more; what it contains stays visible",
    ),
    Action(
        "begin",
        (),
        (_idle("B9", "B10"),),
        (*_turns("works", "nothing"), *_REMEMBER),
        "an operation begins that may evict and take blocks: an admission, say",
    ),
    Action(
        "evict",
        (b, k),
        (
            Guard(("B9",), is_in("works"), "an operation is under way, and no reset"),
            Guard(("B9",), visible(b, k), "a lookup finds the block"),
        ),
        (becomes(visible(b, k), False), becomes(evicted(b, k), True), _REMOVED),
        "the operation makes one copy invisible; where it was the last one, the hash is removed",
    ),
    Action(
        "take",
        (b,),
        (
            Guard(("B9",), is_in("works"), "an operation is under way, and no reset"),
            Guard(("B9",), ~held(b), "the block is not in use"),
        ),
        (becomes(held(b), True), becomes(taken(b), True)),
        "the operation puts a block to use",
    ),
    Action(
        "commit",
        (),
        (Guard(("B9", "B10"), is_in("works"), "an operation is under way, and no reset"),),
        (*_turns("idle", "success"), *_NOTHING_TO_UNDO),
        "the operation is complete and says so",
    ),
    Action(
        "reset",
        (),
        (_idle("B9"),),
        (*_turns("resets", "nothing"), *_REMEMBER),
        "a reset of every tier is asked for",
    ),
    Action(
        "clear",
        (t,),
        (Guard(("B9",), is_in("resets"), "a reset is under way"),),
        (
            becomes(visible(_b, _k), visible(_b, _k) & ~lies(t, _b), over=(_b, _k)),
            becomes(
                evicted(_b, _k), evicted(_b, _k) | (lies(t, _b) & visible(_b, _k)), over=(_b, _k)
            ),
            becomes(told(t, _k), False, over=(_k,)),
        ),
        "the reset empties a tier, and one event says that it is cleared",
    ),
    Action(
        "report",
        (),
        (
            Guard(("B9",), is_in("resets"), "a reset is under way"),
            Guard(("B10",), _EMPTY, "no tier has a visible hash"),
        ),
        (
            *_turns("idle", "success"),
            *_NOTHING_TO_UNDO,
            becomes(coming(_b, _k), False, over=(_b, _k)),
            becomes(since(_b, _k), False, over=(_b, _k)),
        ),
        "the reset reports success; what is still on its way is not waited for any more",
    ),
    Action(
        "give_up",
        (),
        (Guard(("B9",), is_in("works", "resets"), "an operation or a reset is under way"),),
        (becomes(doing(), value(DOING, "undoes")),),
        "the operation cannot go on; what it changed is to be undone",
    ),
    Action(
        "put_back",
        (b, k),
        (
            Guard(("B10",), is_in("undoes"), "what was changed is being undone"),
            Guard(("B9", "B10"), evicted(b, k), "the operation made it invisible"),
        ),
        (becomes(visible(b, k), True), becomes(evicted(b, k), False), _STORED),
        "a copy becomes visible again, and is told as stored",
    ),
    Action(
        "give_back",
        (b,),
        (Guard(("B9",), taken(b), "the operation put the block to use"),),
        (becomes(held(b), False), becomes(taken(b), False)),
        "the operation lets go of a block that it took",
    ),
    Action(
        "fail",
        (),
        (
            Guard(("B9",), ~is_in("idle"), "an operation or a reset is under way"),
            Guard(("B9",), ~some(_b, some(_k, evicted(_b, _k))), "all that was evicted is back"),
            Guard(("B9",), ~some(_b, taken(_b)), "all that was taken was given back"),
        ),
        _turns("idle", "failure"),
        "the operation says that it failed",
    ),
)

# --- properties --------------------------------------------------------------------------

PROPERTIES: Final = (
    Property(
        "B8",
        "the replay has what is resident",
        every(t, every(k, iff(told(t, k), resident(t, k)))),
        "Who replays the events knows exactly which hashes each tier has.",
    ),
    Property(
        "B8",
        "removed means the last copy",
        every(
            t,
            every(
                k, (told(t, k) & ~new(told(t, k))) >> every(b, lies(t, b) >> ~new(visible(b, k)))
            ),
        ),
        "After an event that takes a hash from a tier, no block there is a copy of it.",
    ),
    Property(
        "B9",
        "a failure leaves the state as it was",
        both(
            every(b, every(k, iff(new(visible(b, k)), was(b, k)))),
            every(b, iff(new(held(b)), had(b))),
        ),
        "When an operation says that it failed, all is visible and in use that was when it began, "
        "and nothing else.",
        on="fail",
    ),
    Property(
        "B9",
        "what is undone has failed",
        (is_in("undoes") & ~new(is_in("undoes"))) >> new(is_in("idle") & says("failure")),
        "An operation that was given up ends in no other way than by saying so.",
    ),
    Property(
        "B10",
        "success leaves nothing visible",
        both(
            every(b, every(k, ~new(visible(b, k)))),
            every(t, every(k, ~new(told(t, k)))),
        ),
        "When a reset reports success no block of any tier is found, and the events say the same.",
        on="report",
    ),
    Property(
        "B10",
        "a reset says how it ended",
        (is_in("resets") & ~new(is_in("resets")))
        >> new(
            is_in("undoes") | (is_in("idle") & (says("failure") | (says("success") & _EMPTY))),
        ),
        "A reset ends with a success that leaves nothing visible, or with a failure; it may first "
        "undo what it did.",
    ),
    Property(
        "B10",
        "nothing comes back during a reset",
        every(b, every(k, (is_in("resets") & new(visible(b, k))) >> visible(b, k))),
        "While a reset goes on no hash becomes visible, in tiers that are cleared and others.",
    ),
    Property(
        "B10",
        "nothing from before a reset lands after it",
        every(b, every(k, visible(b, k) >> since(b, k))),
        "What a lookup finds was sent after the last reset that reported success.",
    ),
    Property(
        "B9",
        "changes are noted",
        ~is_in("idle")
        >> both(
            every(b, every(k, iff(was(b, k), visible(b, k) | evicted(b, k)))),
            every(b, iff(held(b), had(b) | taken(b))),
        ),
        "While an operation is under way, what it was like is what it is like but for what was "
        "noted.",
        goal=False,
    ),
    Property(
        "B9",
        "what is noted was changed",
        both(
            every(b, every(k, evicted(b, k) >> both(~is_in("idle"), ~visible(b, k), since(b, k)))),
            every(b, taken(b) >> both(is_in("works", "undoes"), held(b), ~had(b))),
        ),
        "Only an operation that is under way has anything to undo, and what it notes is so.",
        goal=False,
    ),
    Property(
        "B10",
        "what is waited for was sent",
        every(b, every(k, coming(b, k) >> since(b, k))),
        "Content that is waited for was sent after the last reset that reported success.",
        goal=False,
    ),
)

EVENTS: Final = Machine(
    name="events",
    meaning="what is told of resident hashes, failed operations and resets",
    symbols=(
        lies,
        visible,
        told,
        held,
        coming,
        since,
        doing,
        said,
        evicted,
        taken,
        was,
        had,
    ),
    axioms=(
        every(b, some(t, lies(t, b))),
        every(b, every(t, every(_t, (lies(t, b) & lies(_t, b)) >> eq(t, _t)))),
    ),
    init=(
        becomes(visible(b, k), False, over=(b, k)),
        becomes(told(t, k), False, over=(t, k)),
        becomes(held(b), False, over=(b,)),
        becomes(coming(b, k), False, over=(b, k)),
        becomes(since(b, k), False, over=(b, k)),
        becomes(doing(), value(DOING, "idle")),
        becomes(said(), value(SAID, "nothing")),
        becomes(evicted(b, k), False, over=(b, k)),
        becomes(taken(b), False, over=(b,)),
        becomes(was(b, k), False, over=(b, k)),
        becomes(had(b), False, over=(b,)),
    ),
    actions=ACTIONS,
    properties=PROPERTIES,
)

# --- progress ----------------------------------------------------------------------------

CLEAR: Final = Fair(
    "a tier that is to be cleared is, or the reset is given up", ("clear",), by=("t",)
)
REPORT: Final = Fair("a reset that emptied every tier is reported", ("report",))
UNDO: Final = Fair("what is being undone is", ("put_back", "give_back", "fail"))

_resets: Final = is_in("resets")
_pending: Final = is_in("resets", "undoes")


def _named(tier: Term) -> Term:
    """By the events the tier has some hash."""
    return some(_k, told(tier, _k))


RESPONSES: Final = (
    Response(
        "B10",
        "every reset is answered",
        (),
        _resets,
        is_in("idle"),
        (CLEAR, REPORT, UNDO),
        "A reset that was asked for reports success or failure in the end, and is never silent.",
        ranking=Ranking(
            _pending,
            (
                ite(_resets, 2, 1),
                ite(_resets, count(_t, _named(_t)), 0),
                ite(_resets, 0, total(_b, count(_k, evicted(_b, _k)) + ite(taken(_b), 1, 0))),
            ),
            (
                Helpful(CLEAR, _resets & _named(t), (t,)),
                Helpful(REPORT, _resets & _EMPTY),
                Helpful(UNDO, is_in("undoes")),
            ),
        ),
    ),
)
