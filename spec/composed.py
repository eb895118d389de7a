"""The whole: pool, claims, written KV, owners, tiers, elastic memory and trace, as one machine.

Each part is declared in a module of its own and knows one side of the matter.  Here stands what
they do together: that a claim is accepted is one step of the pool (blocks are promised), of the
claims (a phase), of the owners (a grant), of the tiers, of the elastic memory (against the base)
and of the trace (one event).  Rules of the parts are not repeated; the properties below are those
that take two parts to say.

What a newcomer may wonder about:

- The pool knows one life of a claim, on the device.  A claim that is offloaded ends there
  (`demoted`) and goes on in the tiers; a restored one lives in the tiers alone.  So only claims
  that are not hard are offloaded.
- The pool's queue has the lent blocks in it at all times.  A lent block that is fenced or not
  mapped is queued and not free for the memory, so it is not `available`; headroom of the whole
  counts available blocks.
- A content hash of the pool is provisional until the write has landed; `publish` makes it visible,
  a `hit` needs a visible one, a `follow` waits for the write.
- Many claims may be harmed by one lost block: each of them takes its step of the claims machine.
- A failed restore ends a claim as demoted, expired or harmed.  The tiers also know `refused`, which
  the life of a claim does not (L1): no move takes it.
"""

from __future__ import annotations

from typing import Final

from kvclaims.spec import claims, elastic, owners, pool, tiers, trace, written
from kvclaims.spec.claims import CLAIM, hard
from kvclaims.spec.composition import Composition, Move, Part, Step, alone
from kvclaims.spec.elastic import lent
from kvclaims.spec.language import (
    BOOL,
    NAT,
    Guard,
    Partition,
    Property,
    Symbol,
    Term,
    Var,
    both,
    count,
    either,
    eq,
    every,
    iff,
    ne,
    new,
    some,
    told_before,
    value,
)
from kvclaims.spec.pool import BLOCK, KEY, REQUEST, null
from kvclaims.spec.tiers import TIER
from kvclaims.spec.trace import EVENT, FACT
from kvclaims.spec.vocabulary import Outcome, Phase
from kvclaims.spec.written import JOB

POOL: Final = Part(pool.POOL)
CLAIMS: Final = Part(claims.CLAIMS)
WRITTEN: Final = Part(written.WRITTEN)
OWNERS: Final = Part(owners.OWNERS)
TIERS: Final = Part(tiers.TIERS)
ELASTIC: Final = Part(elastic.ELASTIC)
TRACE: Final = Part(trace.TRACE)

speaks: Final = Symbol("speaks", (FACT, CLAIM), rigid=True, meaning="the fact is about the claim")
answers: Final = Symbol(
    "answers", (FACT, REQUEST), rigid=True, meaning="the fact is about the request"
)

b: Final = Var("b", BLOCK)
c: Final = Var("c", CLAIM)
r: Final = Var("r", REQUEST)
k: Final = Var("k", KEY)
j: Final = Var("j", JOB)
o: Final = Var("o", owners.OWNER)
t: Final = Var("t", TIER)
e: Final = Var("e", EVENT)
x: Final = Var("x", FACT)
n: Final = Var("n", NAT)
size: Final = Var("size", NAT)
d: Final = claims.DURATION
pays: Final = Var("pays", BOOL)
_each: Final = Var("each", CLAIM)
_r: Final = Var("one", REQUEST)
_b: Final = Var("block", BLOCK)
_k: Final = Var("hash", KEY)
_e: Final = Var("line", EVENT)
_x: Final = Var("matter", FACT)

# --- what the words mean -----------------------------------------------------------------------


def in_pool(claim: Term, *phases: Phase) -> Term:
    """Where the pool has the claim."""
    found: Term = POOL(claims.is_in(claim, *phases))
    return found


def in_life(claim: Term, *phases: Phase) -> Term:
    """Where the claim stands in its life."""
    found: Term = CLAIMS(claims.is_in(claim, *phases))
    return found


def owed(claim: Term) -> Term:
    """The runtime owes the claim something, on the device."""
    found: Term = POOL(claims.responsible(claim))
    return found


def used(block: Term) -> Term:
    found: Term = POOL(pool.in_use(block))
    return found


def pinned(claim: Term, block: Term) -> Term:
    found: Term = POOL(pool.pinned_by(claim, block))
    return found


def is_written(block: Term) -> Term:
    found: Term = WRITTEN(written.written(block))
    return found


def stage(claim: Term, *names: str) -> Term:
    found: Term = TIERS(tiers.is_at(claim, *names))
    return found


_reserve: Final = POOL.symbol(pool.reserve)
_drawn: Final = POOL.symbol(pool.drawn)
_covers: Final = POOL.symbol(pool.covers)
_key: Final = POOL.symbol(pool.key)
_queued: Final = POOL.symbol(pool.queued)
_outcome: Final = POOL.symbol(pool.outcome)
_active: Final = POOL.symbol(pool.active)
_free: Final = ELASTIC.symbol(elastic.free)
_granted: Final = OWNERS.symbol(owners.granted)
_accepted_for: Final = ELASTIC.symbol(elastic.promised)

available: Final = count(_b, _queued(_b) & _free(_b))
"""Blocks that are in the queue and that the memory has: what can be handed out."""

_base_available: Final = count(_b, both(_queued(_b), _free(_b), ~lent(_b)))
_lent_available: Final = count(_b, both(_queued(_b), _free(_b), lent(_b)))
_committed: Final = POOL(pool.promised) + POOL(pool.granted)
room: Final = available - _committed
"""Headroom of the whole (F2)."""


def takes_up(claim: Term) -> Term:
    """Blocks that a claim covers, lends or is promised."""
    pins = count(_b, pinned(claim, _b))
    loans = count(_b, _drawn(claim, _b))
    return pins + loans + _reserve(claim)


def _is_harmed_by(part: Part, action: str, harmed: Term) -> Term:
    """Whether the action of a part makes `harmed` true that was not."""
    updates = tuple(part.update(u) for u in part.machine.action(action).updates)
    return told_before(harmed, updates) & ~harmed


# --- what moves share --------------------------------------------------------------------------

_EVENT: Final = (TRACE, Step("step"))
_TELLS_OF_CLAIM: Final = Guard(("T1",), speaks(x, c), "the event tells of the claim")
_TELLS_OF_REQUEST: Final = Guard(("T1",), answers(x, r), "the event tells of the request")


def _how(phase: Phase) -> Term:
    return value(pool.HOW, phase)


def _hit(name: str, meaning: str) -> Move:
    """A request refers to a resident block; a job will read it, or read it once written."""
    idle = ~used(b)
    return Move(
        "hit" if name == "hit" else "follow",
        (r, b, k, j),
        (
            (POOL, Step("share")),
            (ELASTIC, Step("take", when=idle)),
            (ELASTIC, Step("keep", when=idle)),
            (ELASTIC, Step("touch")),
            (WRITTEN, Step(name)),
        ),
        meaning,
    )


def _hand_out(name: str, params: tuple[Var, ...], meaning: str, *guards: Guard) -> Move:
    shares = ((POOL, Step(name)), (ELASTIC, Step("take")), (WRITTEN, Step("reuse")))
    return Move(name, params, shares, meaning, guards)


def _content_lost(name: str, how: str, meaning: str) -> Move:
    """A block loses its hash: materialized claims on it are harmed, others speak of it no more."""
    harmed = _covers(_each, b) & _is_harmed_by(POOL, name, in_pool(_each, Phase.HARMED))
    falls = both(_covers(_each, b), ~hard(_each), ~harmed)
    return Move(
        name,
        (b, k, e, x),
        (
            (POOL, Step(name)),
            (WRITTEN, Step("evict")),
            (CLAIMS, Step(how, {"c": _each}, when=harmed, each=_each)),
            (WRITTEN, Step("end", {"c": _each}, when=harmed, each=_each)),
            (WRITTEN, Step("uncover", {"c": _each}, when=falls, each=_each)),
            (TIERS, Step("lose_device", {"c": _each}, when=harmed, each=_each)),
            _EVENT,
        ),
        meaning,
        (
            Guard(
                ("T1",),
                every(_each, harmed >> speaks(x, _each)),
                "the event tells of every claim that is harmed",
            ),
        ),
    )


def _accept(name: str, meaning: str) -> Move:
    return Move(
        name,
        (o, c, n, size, e, x),
        (
            (POOL, Step("accept")),
            (CLAIMS, Step(name)),
            (OWNERS, Step("grant", {"n": size})),
            (TIERS, Step("accept")),
            (ELASTIC, Step("accept", {"n": size}, when=hard(c))),
            _EVENT,
        ),
        meaning,
        (
            _TELLS_OF_CLAIM,
            Guard(("Q2", "E3"), n <= size, "what is promised is part of what is granted"),
            Guard(("F2",), hard(c) >> (n <= room), "available blocks cover the promise"),
        ),
    )


def _end(name: str, how: Phase, meaning: str, *more: tuple[Part, Step], asker: bool = True) -> Move:
    """A claim ends: in its life, on the device if it is there, and in what was accepted for it."""
    return Move(
        name,
        (o, c, e, x) if asker else (c, e, x),
        (
            (POOL, Step("finish", {"how": _how(how)}, when=owed(c))),
            (CLAIMS, Step(name)),
            (WRITTEN, Step("end")),
            (ELASTIC, Step("end")),
            *more,
            _EVENT,
        ),
        meaning,
        (_TELLS_OF_CLAIM,),
    )


def _settle(how: str, by: str) -> Move:
    return Move(
        f"settle_{how}",
        (c, e, x),
        (
            (TIERS, Step("settle", {"end": value(tiers.END, how)})),
            (CLAIMS, Step(by)),
            _EVENT,
        ),
        f"the claim whose restore failed is {how}",
        (_TELLS_OF_CLAIM,),
    )


def _answer(name: str, meaning: str) -> Move:
    shares = ((POOL, Step(name)), _EVENT)
    return Move(name, (r, n, e, x), shares, meaning, (_TELLS_OF_REQUEST,))


def _lost_in_tier(name: str, params: tuple[Var, ...], meaning: str, *guards: Guard) -> Move:
    """A fault takes a copy, or what the device holds; the claim is harmed if nothing is left."""
    action = {"lose_copy": "lose"}.get(name, name)
    harmed = _is_harmed_by(TIERS, action, stage(c, "harmed"))
    owed_there = CLAIMS(claims.responsible(c))
    return Move(
        name,
        (*params, e, x),
        (
            (TIERS, Step(action)),
            (CLAIMS, Step("lose_by_fault", when=harmed & owed_there)),
            _EVENT,
        ),
        meaning,
        (_TELLS_OF_CLAIM, *guards),
    )


_LAST_HOLDER: Final = ~some(_r, ne(_r, r) & POOL(pool.held(_r, b)))
_IN_THE_BASE: Final = Guard(("E3",), ~lent(b), "the block lies in the base")
_CLAIM_HAS_ENDED: Final = CLAIMS(claims.ended(c))
_TO_BLAME: Final = Guard(
    ("F4",), owed(c) & hard(c), "the claim is hard, and the runtime responsible for it"
)

# --- the moves ---------------------------------------------------------------------------------

_REQUESTS: Final = (
    Move(
        "admit",
        (r, n, e, x),
        ((POOL, Step("admit")), _EVENT),
        "a waiting request is granted n blocks",
        (
            _TELLS_OF_REQUEST,
            Guard(("F2",), n <= room, "available blocks cover what it will draw"),
        ),
    ),
    Move(
        "grow",
        (r, n),
        ((POOL, Step("admit")),),
        "a running request is granted n blocks more",
        (
            Guard(("T1",), _active(r), "the request runs"),
            Guard(("F2",), n <= room, "available blocks cover what it will draw"),
        ),
    ),
    _hand_out("take", (r, b), "the request takes a blank block from the free queue"),
    _hand_out("draw", (r, c, b), "a request takes a block on a claim's reserve", _IN_THE_BASE),
    _hit("hit", "a request refers to a resident block, and a job reads it"),
    _hit("follow", "a request refers to a block that is yet to be written, and a job waits"),
    Move(
        "drop",
        (r, b),
        ((POOL, Step("drop")), (ELASTIC, Step("leave", when=_LAST_HOLDER))),
        "the request lets go of a block",
    ),
    Move(
        "give_back",
        (r, c, b),
        ((POOL, Step("give_back")), (ELASTIC, Step("leave"))),
        "the last holder lets go of a block on loan",
    ),
    Move(
        "retire",
        (r, e, x),
        ((POOL, Step("retire")), _EVENT),
        "the request ends or is preempted",
        (_TELLS_OF_REQUEST,),
    ),
    Move(
        "register",
        (r, b, k),
        ((POOL, Step("register")), (WRITTEN, Step("register")), (ELASTIC, Step("keep"))),
        "a block gets the hash of what the request computes, before it is written",
    ),
    _answer("defer", "the request waits"),
    _answer("turn_away", "the request is refused because of claims"),
    _answer("overflow", "the request can never fit"),
)

_LIVES: Final = (
    Move(
        "submit",
        (c, d, e, x),
        ((POOL, Step("submit")), (CLAIMS, Step("submit")), _EVENT),
        "an owner submits a claim",
        (_TELLS_OF_CLAIM,),
    ),
    _accept("accept", "the claim is accepted as asked, for at most `size` blocks"),
    _accept("clip", "the claim is accepted for less"),
    Move(
        "refuse",
        (c, e, x),
        ((POOL, Step("refuse")), (CLAIMS, Step("refuse")), _EVENT),
        "the claim is refused",
        (_TELLS_OF_CLAIM,),
    ),
    Move(
        "cover",
        (c, b, pays),
        (
            (POOL, Step("cover")),
            (WRITTEN, Step("cover")),
            (ELASTIC, Step("cover", when=hard(c))),
        ),
        "the claim covers a resident block",
        (
            Guard(
                ("Q2", "E3"),
                both(hard(c), ~pays, ~_drawn(c, b)) >> (takes_up(c) < _granted(c)),
                "the claim does not take up more than it was granted",
            ),
        ),
    ),
    Move(
        "uncover",
        (c, b),
        ((POOL, Step("uncover")), (WRITTEN, Step("uncover"))),
        "an ended hard claim lets go of a block",
    ),
    Move(
        "forsake",
        (c, b),
        ((POOL, Step("forsake")), (WRITTEN, Step("uncover"))),
        "an accepted claim lets go of a block that a fault emptied, and is promised another",
        (
            Guard(
                ("F2",),
                (POOL(pool.ref(b)) > 1) >> (room > 0),
                "the promise can still be kept with available blocks",
            ),
        ),
    ),
    Move(
        "materialize",
        (c, e, x),
        (
            (POOL, Step("materialize")),
            (CLAIMS, Step("gain")),
            (CLAIMS, Step("materialize")),
            (WRITTEN, Step("materialize")),
            (TIERS, Step("compute")),
            (TIERS, Step("materialize")),
            _EVENT,
        ),
        "every block of the claim is there and written: its predicate holds",
        (_TELLS_OF_CLAIM,),
    ),
    _end("release", Phase.RELEASED, "the owner ends the claim", (OWNERS, Step("end"))),
    _end("demote", Phase.DEMOTED, "the operator ends the protection", (OWNERS, Step("end"))),
    _end("expire", Phase.EXPIRED, "the duration has passed", asker=False),
    Move(
        "renew",
        (o, c, d, e, x),
        ((CLAIMS, Step("renew")), (OWNERS, Step("renew", {"n": d})), _EVENT),
        "it is said anew how long the claim lasts",
        (_TELLS_OF_CLAIM,),
    ),
    Move(
        "tick",
        (n,),
        ((CLAIMS, Step("tick")), (TRACE, Step("set_clock"))),
        "time passes, for claims and for the clock",
        (Guard(("T1",), n >= TRACE(trace.clock()), "the clock is not set back"),),
    ),
    _content_lost("evict", "lose_by_choice", "a block loses its hash because it will be reused"),
    _content_lost("lose", "lose_by_fault", "a fault takes the content of a block"),
    *(
        Move(
            f"later_{how}",
            (c, e, x),
            ((CLAIMS, Step(how)), _EVENT),
            "content that an ended claim has left behind is lost",
            (_TELLS_OF_CLAIM, Guard(("L1", "O2"), _CLAIM_HAS_ENDED, "the claim has ended")),
        )
        for how in ("lose_by_choice", "lose_by_fault")
    ),
)

_AWAY: Final = (
    Move(
        "offload",
        (c, e, x),
        (
            (POOL, Step("finish", {"how": _how(Phase.DEMOTED)}, when=owed(c))),
            (CLAIMS, Step("offload")),
            (WRITTEN, Step("end")),
            (ELASTIC, Step("end")),
            (TIERS, Step("offload")),
            _EVENT,
        ),
        "a claim that is not hard leaves the device for another tier",
        (_TELLS_OF_CLAIM, Guard(("L1",), ~hard(c), "the claim is not hard")),
    ),
    Move(
        "require",
        (c, e, x),
        ((CLAIMS, Step("restore")), (TIERS, Step("require")), _EVENT),
        "a request needs the content back",
        (_TELLS_OF_CLAIM,),
    ),
    Move(
        "restore",
        (c, t, e, x),
        ((CLAIMS, Step("restored")), (TIERS, Step("restore")), _EVENT),
        "the claim is restored, from the tier that it names",
        (_TELLS_OF_CLAIM,),
    ),
    _settle("demoted", "demote"),
    _settle("expired", "expire"),
    _settle("harmed", "lose_by_fault"),
    _lost_in_tier("lose_copy", (c, t), "a fault takes a copy"),
    _lost_in_tier(
        "lose_device",
        (c,),
        "a fault takes what the device holds of a claim that has no blocks in the pool",
        Guard(("L1",), ~in_pool(c, Phase.MATERIALIZED), "the pool has no blocks for the claim"),
    ),
    *alone(
        TIERS,
        "compute",
        "store",
        "reserve",
        "promise",
        "let_go",
        "load",
        "arrive",
        "break_off",
        "reuse",
        "discard",
    ),
)

_READS: Final = both(some(_k, WRITTEN(written.reads(j, b, _k))), ~WRITTEN(written.told(j, b)))
_IN_FLIGHT: Final = either(
    some(_k, WRITTEN(written.writes(j, b, _k)) | WRITTEN(written.waits(j, b, _k))), _READS
)

_MEMORY: Final = (
    Move(
        "dispatch",
        (j, b, k),
        ((WRITTEN, Step("dispatch")), (ELASTIC, Step("touch"))),
        "a job leaves that will write a block that a request holds",
    ),
    *alone(
        WRITTEN,
        "publish",
        name="publish",
        guards=(Guard(("B4",), _key(b, k), "the block carries the hash still"),),
    ),
    *alone(WRITTEN, "withdraw", "land", "fail", "start", "tell", "deliver", "stop"),
    *alone(
        ELASTIC,
        "done",
        name="done",
        guards=(Guard(("B5",), ~_IN_FLIGHT, "no write or read of the job is in flight"),),
    ),
    *alone(
        ELASTIC,
        "give_back",
        name="fence",
        guards=(
            Guard(
                ("F2",),
                _committed <= _base_available,
                "the base alone covers every promise and grant",
            ),
        ),
    ),
    *alone(
        ELASTIC,
        "drain",
        name="drain",
        guards=(
            Guard(("E2",), ~used(b), "no request holds the block"),
            Guard(("E2",), ~POOL(pool.hashed(b)), "no lookup finds the block"),
        ),
    ),
    *alone(
        ELASTIC,
        "lend",
        "withdraw",
        "turn_back",
        "arrive_lent",
        "arrive_home",
        "unmap_kv",
        "map_kv",
        "open_kv",
        "unmap_act",
        "map_act",
        "open_act",
        "need",
        "start_prefill",
        "end_prefill",
        "list",
    ),
)

_BOOKS: Final = (
    *alone(
        OWNERS,
        "end",
        name="close_account",
        guards=(Guard(("Q2",), _CLAIM_HAS_ENDED, "the claim has ended"),),
    ),
    *alone(OWNERS, "blame", "hint", guards=(_TO_BLAME,)),
    *alone(OWNERS, "set_quota", "read"),
    *alone(TRACE, "close", "lose", "cut", "fold", "spoil", "accept"),
)

# --- what takes two parts to say ---------------------------------------------------------------


def _told(about: Term) -> Term:
    """A new event tells of a matter."""
    emitted, tells = TRACE(trace.emitted(_e)), TRACE(trace.about(_e, _x))
    return some(_e, both(~emitted, new(emitted), some(_x, new(tells) & about)))


_phase: Final = CLAIMS.symbol(claims.phase)
_pool_phase: Final = POOL.symbol(claims.phase)
_gone: Final = (
    Phase.OFFLOADED,
    Phase.RESTORING,
    Phase.MATERIALIZED,
    Phase.DEMOTED,
    Phase.EXPIRED,
    Phase.RELEASED,
    Phase.HARMED,
)
_unserved: Final = (Outcome.DEFERRED, Outcome.REFUSED, Outcome.CAPACITY_REQUIRED)
_left: Final = CLAIMS.symbol(claims.left)
_lost: Final = CLAIMS.symbol(claims.lost)
_touches: Final = ELASTIC.symbol(elastic.touches)

_handed_out: Final = both(~POOL(pool.held(r, b)), new(POOL(pool.held(r, b))), ~POOL(pool.hashed(b)))
"""A request comes to hold a block that carries no hash: not by a hit."""

_asked_to_end: Final = either(
    ~in_life(c, Phase.RELEASED) & new(in_life(c, Phase.RELEASED)),
    in_life(c, Phase.ACCEPTED, Phase.MATERIALIZED, Phase.OFFLOADED)
    & new(in_life(c, Phase.DEMOTED)),
)
"""The claim is released, or demoted: a restore that failed may demote it, and asks nobody."""

_version: Final = OWNERS.symbol(owners.version)

PROPERTIES: Final = (
    Property(
        "L1",
        "pool and life agree",
        every(
            c,
            either(
                eq(_phase(c), _pool_phase(c)),
                both(~hard(c), in_pool(c, Phase.DEMOTED), in_life(c, *_gone)),
            ),
        ),
        "A claim is in its life what it is in the pool, unless it has left the device.",
    ),
    Property(
        "L6",
        "the pool expires on time",
        every(
            c,
            both(owed(c), new(in_pool(c, Phase.EXPIRED)))
            >> CLAIMS(both(claims.timed(c), eq(claims.left(c), 0))),
        ),
        "The pool lets a claim expire only when its duration has passed.",
    ),
    Property(
        "L7",
        "materialized in the pool means written",
        every(
            c,
            every(b, both(in_pool(c, Phase.MATERIALIZED), _covers(c, b)) >> is_written(b)),
        ),
        "Every block that a materialized claim covers in the pool is written.",
    ),
    Property(
        "B4",
        "a lookup finds what the pool knows",
        every(b, every(k, WRITTEN(written.visible(b, k)) >> _key(b, k))),
        "What lookups find is under that hash in the pool's own map.",
    ),
    Property(
        "B5",
        "what is in flight is known to the memory",
        every(b, every(j, _IN_FLIGHT >> _touches(j, b))),
        "A job that writes or reads a block, or waits to, is one that the memory waits for.",
    ),
    Property(
        "B5",
        "what is handed out is at rest",
        every(b, every(r, _handed_out >> every(j, ~_IN_FLIGHT))),
        "A block is handed out only when no job will write it, waits to read it, or reads it "
        "untold.",
    ),
    Property(
        "B4",
        "what is handed out is blank",
        every(b, every(r, _handed_out >> ~new(is_written(b)))),
        "What a block contained counts no more once it was handed out.",
    ),
    Property(
        "E2",
        "what requests hold and lookups find is mapped",
        every(
            b,
            both(lent(b), used(b) | POOL(pool.hashed(b)))
            >> ELASTIC(every(elastic.x, elastic.kv_side(elastic.x))),
        ),
        "A lent block that the pool has in use or under a hash is mapped in every layer.",
    ),
    Property(
        "E3",
        "claims in the pool lie in the base",
        every(c, every(b, (pinned(c, b) | _drawn(c, b)) >> ~lent(b))),
        "No hard claim pins a lent block or lends one.",
    ),
    Property(
        "E3",
        "within what the base was asked for",
        every(c, both(hard(c), owed(c)) >> (takes_up(c) <= _accepted_for(c))),
        "A hard claim takes up no more blocks than were accepted for it against the base.",
    ),
    Property(
        "Q1",
        "who ends or renews a claim has signed",
        every(
            c,
            either(_asked_to_end, both(CLAIMS(claims.responsible(c)), new(_left(c)) > _left(c)))
            >> (new(_version(c)) > _version(c)),
        ),
        "A claim is released, demoted or given more time only in a step that signs a new version "
        "of it.",
    ),
    Property(
        "Q2",
        "within the grant",
        every(c, both(hard(c), owed(c)) >> (takes_up(c) <= _granted(c))),
        "A hard claim takes up no more blocks than count against its owner's quota.",
    ),
    Property(
        "F2",
        "promises are covered by what can be handed out",
        room >= 0,
        "Blocks that are queued and mapped cover every promise and every granted need.",
    ),
    Property(
        "F4",
        "blame is for claims in force",
        owed(c) & hard(c),
        "Only hard claims that the runtime is responsible for are blamed.",
        on="owners_blame",
    ),
    Property(
        "F4",
        "hints are of claims in force",
        owed(c) & hard(c),
        "Only hard claims that the runtime is responsible for are hinted at.",
        on="owners_hint",
    ),
    Property(
        "O1",
        "life and tiers agree",
        every(
            c,
            both(
                in_life(c, Phase.OFFLOADED) >> stage(c, "offloaded"),
                in_life(c, Phase.RESTORING) >> stage(c, "restore_required"),
                in_life(c, Phase.ACCEPTED) >> stage(c, "accepted"),
                in_life(c, Phase.MATERIALIZED) >> stage(c, "materialized", "restored"),
                in_life(c, Phase.ABSENT, Phase.SUBMITTED) >> stage(c, "absent"),
            ),
        ),
        "Where a claim stands in its life is where the tiers have it, until it ends.",
    ),
    Property(
        "O2",
        "what was harmed is served from nowhere",
        every(c, in_life(c, Phase.HARMED) >> stage(c, "harmed")),
        "A claim that is harmed in its life is harmed for the tiers, which serve it no more.",
    ),
    Property(
        "P1",
        "a hard claim stays on the device",
        every(c, both(hard(c), in_life(c, Phase.MATERIALIZED)) >> in_pool(c, Phase.MATERIALIZED)),
        "A hard claim that is materialized is protected in the pool.",
    ),
    Property(
        "T1",
        "a claim does not move in silence",
        every(
            c,
            either(
                ne(new(_phase(c)), _phase(c)),
                ne(new(_pool_phase(c)), _pool_phase(c)),
                new(_left(c)) > _left(c),
                ~_lost(c) & new(_lost(c)),
            )
            >> _told(speaks(_x, c)),
        ),
        "No claim changes its phase, gets more time or loses content after its end without a new "
        "event that tells of it.",
    ),
    Property(
        "T1",
        "a request is not answered in silence",
        every(
            r,
            either(
                ne(new(_active(r)), _active(r)),
                both(
                    ne(new(_outcome(r)), _outcome(r)),
                    either(*(eq(new(_outcome(r)), value(pool.OUTCOME, u)) for u in _unserved)),
                ),
            )
            >> _told(answers(_x, r)),
        ),
        "No request starts, ends, waits or is refused without a new event that tells of it.",
    ),
    Property(
        "T1",
        "the clock does not run back",
        new(TRACE(trace.clock())) >= TRACE(trace.clock()),
        "The clock that stamps events goes with the time of the claims.",
    ),
    Property(
        "T1",
        "no event is ahead of the clock",
        TRACE(trace.clock() >= trace.last()),
        "The last event is not later than what the clock shows.",
        goal=False,
    ),
    Property(
        "O1",
        "the pool knows no other tier",
        every(c, ~in_pool(c, Phase.OFFLOADED, Phase.RESTORING)),
        "What is offloaded has ended in the pool.",
        goal=False,
    ),
    Property(
        "L7",
        "written and pool speak of the same blocks",
        every(
            c,
            both(
                iff(in_pool(c, Phase.MATERIALIZED), WRITTEN(written.materialized(c))),
                owed(c) >> every(b, _covers(c, b) >> WRITTEN(pool.covers(c, b))),
            ),
        ),
        "The claims that are called materialized are the same, and so are the blocks they cover.",
        goal=False,
    ),
    Property(
        "E2",
        "memory and pool hold the same blocks",
        every(
            b,
            both(
                iff(used(b), ELASTIC(elastic.held(b))),
                both(lent(b), POOL(pool.hashed(b))) >> ELASTIC(elastic.hashed(b)),
                both(~lent(b), ~null(b), ~used(b)) >> _free(b),
            ),
        ),
        "Pool and memory hold the same blocks, and an idle block of the base is free.",
        goal=False,
    ),
    Property(
        "E3",
        "grants and the base were asked for the same",
        every(c, both(hard(c), owed(c)) >> eq(_accepted_for(c), _granted(c))),
        "What counts against a quota was accepted against the base.",
        goal=False,
    ),
    Property(
        "E3",
        "nothing was asked for before acceptance",
        every(
            c,
            in_pool(c, Phase.ABSENT, Phase.SUBMITTED) >> eq(_accepted_for(c), 0),
        ),
        "A claim that was not accepted has nothing of the base.",
        goal=False,
    ),
)

RUNTIME: Final = Composition(
    name="runtime",
    meaning="pool, claims, written KV, owners, tiers, elastic memory and trace together",
    parts=(POOL, CLAIMS, WRITTEN, OWNERS, TIERS, ELASTIC, TRACE),
    moves=(*_REQUESTS, *_LIVES, *_AWAY, *_MEMORY, *_BOOKS),
    properties=PROPERTIES,
    partitions=(Partition(available, (_base_available, _lent_available)),),
    symbols=(speaks, answers),
    corollaries=tuple(POOL.property(prop) for prop in pool.COROLLARIES),
)
