"""The life of a claim: rules L1 to L7, for any number of claims.

The machine knows no blocks: `holds(c)` says whether the predicate of claim c holds, and the
actions `gain`, `lose_by_choice` and `lose_by_fault` are all that can happen to it.  How blocks
make it so is the business of `kvclaims.spec.pool`.
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
    one_of,
    some,
    value,
)
from kvclaims.spec.progress import Fair, Helpful, Ranking, Recurring, Response, Steps, Urgency
from kvclaims.spec.vocabulary import RESPONSIBLE, TERMINAL, Cause, Decision, Phase

CLAIM: Final = Sort("Claim")
PHASE: Final = Sort("Phase", tuple(p.value for p in Phase))
DECISION: Final = Sort("Decision", tuple(d.value for d in Decision))
CAUSE: Final = Sort("Cause", tuple(c.value for c in Cause))

hard: Final = Symbol("hard", (CLAIM,), rigid=True, meaning="the claim is hard protected")
timed: Final = Symbol("timed", (CLAIM,), meaning="the claim has a duration")
phase: Final = Symbol("phase", (CLAIM,), PHASE, meaning="where the claim stands in its life")
decision: Final = Symbol("decision", (CLAIM,), DECISION, meaning="how it was answered")
generation: Final = Symbol("generation", (CLAIM,), NAT, meaning="how often the id was submitted")
holds: Final = Symbol("holds", (CLAIM,), meaning="the predicate holds, in the tier it is kept in")
left: Final = Symbol("left", (CLAIM,), NAT, meaning="time units until a timed claim ends")
cause: Final = Symbol("cause", (CLAIM,), CAUSE, meaning="why it was harmed")
lost: Final = Symbol("lost", (CLAIM,), meaning="content was lost after the claim had ended")

c: Final = Var("c", CLAIM)
_any: Final = Var("x", CLAIM)
_other: Final = Var("other", CLAIM)

_RELEASES: Final = (Phase.DEMOTED, Phase.EXPIRED, Phase.RELEASED)

TABLE: Final[dict[Phase, tuple[Phase, ...]]] = {
    Phase.ABSENT: (Phase.SUBMITTED,),
    Phase.SUBMITTED: (Phase.ACCEPTED, Phase.REFUSED),
    Phase.ACCEPTED: (Phase.MATERIALIZED, Phase.HARMED, *_RELEASES),
    Phase.MATERIALIZED: (Phase.OFFLOADED, Phase.HARMED, *_RELEASES),
    Phase.OFFLOADED: (Phase.RESTORING, Phase.HARMED, *_RELEASES),
    Phase.RESTORING: (Phase.MATERIALIZED, Phase.HARMED, *_RELEASES),
    **dict.fromkeys(sorted(TERMINAL), (Phase.SUBMITTED,)),
}
"""The transition table (L1).  An ended claim returns only as a new generation."""


def is_in(claim: Term, *phases: Phase) -> Term:
    return one_of(phase(claim), *(value(PHASE, p) for p in phases))


def responsible(claim: Term) -> Term:
    """The runtime owes the claim something (contract, *Terms*)."""
    return is_in(claim, *(p for p in Phase if p in RESPONSIBLE))


def ended(claim: Term) -> Term:
    return is_in(claim, *(p for p in Phase if p in TERMINAL))


def goes(claim: Term, to: Phase) -> Update:
    return becomes(phase(claim), value(PHASE, to))


def decided(claim: Term, how: Decision) -> Update:
    return becomes(decision(claim), value(DECISION, how))


def phase_is(claim: Term, *phases: Phase, protects: tuple[str, ...] = ("L1",)) -> Guard:
    return Guard(protects, is_in(claim, *phases), f"the claim is {' or '.join(phases)}")


def still_owed(claim: Term) -> Guard:
    return Guard(("L1",), responsible(claim), "the runtime is responsible for the claim")


def _end(name: str, to: Phase, meaning: str, *more: Guard) -> Action:
    return Action(name, (c,), (still_owed(c), *more), (goes(c, to),), meaning)


def _answer(name: str, to: Phase, how: Decision, meaning: str) -> Action:
    return Action(
        name, (c,), (phase_is(c, Phase.SUBMITTED),), (goes(c, to), decided(c, how)), meaning
    )


def _loss(name: str, why: Cause, meaning: str, *more: Guard) -> Action:
    """The predicate stops holding: harm while responsible (L3), its own event afterwards (L4)."""
    return Action(
        name,
        (c,),
        (Guard(("L3",), holds(c), "the predicate holds"), *more),
        (
            becomes(holds(c), False),
            becomes(phase(c), ite(responsible(c), value(PHASE, Phase.HARMED), phase(c))),
            becomes(cause(c), ite(responsible(c), value(CAUSE, why), cause(c))),
            becomes(lost(c), ended(c) | lost(c)),
        ),
        meaning,
    )


DURATION: Final = Var("d", NAT)

ACTIONS: Final = (
    Action(
        "submit",
        (c, DURATION),
        (
            Guard(
                ("L1",),
                is_in(c, Phase.ABSENT, *(p for p in Phase if p in TERMINAL)),
                "the id is new, or its last generation has ended",
            ),
        ),
        (
            goes(c, Phase.SUBMITTED),
            decided(c, Decision.NONE),
            becomes(generation(c), generation(c) + 1),
            becomes(timed(c), DURATION > 0),
            becomes(left(c), DURATION),
            becomes(cause(c), value(CAUSE, Cause.NONE)),
            becomes(lost(c), False),
        ),
        "an owner submits a claim, or a new generation of an ended one; duration 0 means no end",
    ),
    _answer("accept", Phase.ACCEPTED, Decision.ACCEPTED, "the claim is accepted as asked"),
    _answer("clip", Phase.ACCEPTED, Decision.CLIPPED, "the claim is accepted for less"),
    _answer("refuse", Phase.REFUSED, Decision.REFUSED, "the claim is refused with a reason"),
    Action(
        "gain",
        (c,),
        (),
        (becomes(holds(c), True),),
        "content was written, and the predicate comes to hold",
    ),
    Action(
        "materialize",
        (c,),
        (
            phase_is(c, Phase.ACCEPTED, protects=("L1", "L2")),
            Guard(("L7",), holds(c), "the predicate holds on written blocks"),
        ),
        (goes(c, Phase.MATERIALIZED),),
        "an accepted claim whose predicate holds is materialized",
    ),
    Action(
        "offload",
        (c,),
        (phase_is(c, Phase.MATERIALIZED, protects=("L1", "L2", "L7")),),
        (goes(c, Phase.OFFLOADED),),
        "the content moves to another tier; the predicate holds there",
    ),
    Action(
        "restore",
        (c,),
        (phase_is(c, Phase.OFFLOADED, protects=("L1", "L2", "L7")),),
        (goes(c, Phase.RESTORING),),
        "the content is on its way back",
    ),
    Action(
        "restored",
        (c,),
        (phase_is(c, Phase.RESTORING, protects=("L1", "L2", "L7")),),
        (goes(c, Phase.MATERIALIZED),),
        "the content is back (a failed restore is a loss by fault)",
    ),
    _end("demote", Phase.DEMOTED, "the runtime or operator ends the protection"),
    _end("release", Phase.RELEASED, "the owner ends the claim"),
    _end(
        "expire",
        Phase.EXPIRED,
        "the duration has passed",
        Guard(("L6",), timed(c) & eq(left(c), 0), "the duration has passed"),
    ),
    Action(
        "tick",
        (),
        (
            Guard(
                ("V1",),
                ~some(_any, is_in(_any, Phase.SUBMITTED)),
                "no claim waits for its decision",
            ),
        ),
        (becomes(left(_any), ite(left(_any) > 0, left(_any) - 1, 0), over=(_any,)),),
        "time passes for every claim; each that was submitted is answered before",
    ),
    Action(
        "renew",
        (c, DURATION),
        (
            Guard(("L6",), responsible(c), "the runtime is responsible for the claim"),
            Guard(("L6",), timed(c) >> (left(c) > 0), "the duration has not passed"),
        ),
        (becomes(left(c), DURATION), becomes(timed(c), True)),
        "before the claim ends its owner says anew how long it lasts from now",
    ),
    _loss(
        "lose_by_choice",
        Cause.OWN_CHOICE,
        "allocation, eviction or the return of lent memory takes the content",
        Guard(("L5",), ~(responsible(c) & hard(c)), "no responsible hard claim is taken from"),
    ),
    _loss("lose_by_fault", Cause.FAULT, "a failure outside the runtime's control takes it"),
)

_moves = either(
    eq(new(phase(c)), phase(c)),
    *(
        eq(phase(c), value(PHASE, before)) & eq(new(phase(c)), value(PHASE, after))
        for before, afters in TABLE.items()
        for after in afters
    ),
)
_harmed: Final = value(PHASE, Phase.HARMED)
_submitted: Final = value(PHASE, Phase.SUBMITTED)
_loses = holds(c) & ~new(holds(c))
_restarts = ne(phase(c), _submitted) & eq(new(phase(c)), _submitted)

PROPERTIES: Final = (
    Property(
        "L1",
        "moves along the table",
        every(c, _moves),
        "Every step leaves a claim where it is or moves it along the transition table.",
    ),
    Property(
        "L1",
        "a new life is a new generation",
        every(
            c,
            (_restarts >> (new(generation(c)) > generation(c)))
            & (new(generation(c)) >= generation(c)),
        ),
        "A claim id comes back only with a higher generation, and generations never fall.",
    ),
    Property(
        "L2",
        "responsible only after acceptance",
        every(
            c,
            responsible(c)
            >> one_of(
                decision(c), value(DECISION, Decision.ACCEPTED), value(DECISION, Decision.CLIPPED)
            ),
        ),
        "The runtime is responsible only for claims it has accepted, whole or clipped.",
    ),
    Property(
        "L2",
        "refused means a refusal was given",
        every(
            c,
            both(
                is_in(c, Phase.SUBMITTED) >> eq(decision(c), value(DECISION, Decision.NONE)),
                is_in(c, Phase.REFUSED) >> eq(decision(c), value(DECISION, Decision.REFUSED)),
            ),
        ),
        "A submitted claim awaits its answer, and a refused one was answered so.",
    ),
    Property(
        "L3",
        "harm is a loss while responsible",
        every(c, responsible(c) >> iff(eq(new(phase(c)), _harmed), _loses)),
        "A responsible claim is harmed in exactly the step in which its predicate stops holding.",
    ),
    Property(
        "L4",
        "no harm outside responsibility",
        every(c, (~responsible(c) & eq(new(phase(c)), _harmed)) >> eq(phase(c), _harmed)),
        "Nothing is harmed that was not accepted, or that had ended.",
    ),
    Property(
        "L4",
        "a later loss is told",
        every(c, (ended(c) & _loses) >> new(lost(c))),
        "Content lost after the claim had ended is recorded as such.",
    ),
    Property(
        "L5",
        "hard claims are harmed by faults only",
        every(c, (hard(c) & is_in(c, Phase.HARMED)) >> eq(cause(c), value(CAUSE, Cause.FAULT))),
        "The runtime's own choice never harms a hard claim.",
    ),
    Property(
        "L6",
        "expiry is on time",
        every(c, (responsible(c) & new(is_in(c, Phase.EXPIRED))) >> (timed(c) & eq(left(c), 0))),
        "Only a claim with a duration expires, and only when the duration has passed.",
    ),
    Property(
        "L6",
        "expiry deletes nothing",
        every(c, (responsible(c) & new(is_in(c, Phase.EXPIRED))) >> iff(new(holds(c)), holds(c))),
        "The content of an expiring claim is left alone by the expiry.",
    ),
    Property(
        "L6",
        "nothing revives a claim",
        every(
            c,
            ((ended(c) | both(responsible(c), timed(c), eq(left(c), 0))) & ~_restarts)
            >> (new(left(c)) <= left(c)),
        ),
        "Once a claim has ended or its time is up, it gets no more time.",
    ),
    Property(
        "L7",
        "materialized means it holds",
        every(c, is_in(c, Phase.MATERIALIZED) >> holds(c)),
        "A materialized claim's predicate holds.",
    ),
    Property(
        "L7",
        "what is kept elsewhere holds there",
        every(c, is_in(c, Phase.OFFLOADED, Phase.RESTORING) >> holds(c)),
        "An offloaded claim's predicate holds in its tier until a failed restore harms it.",
        goal=False,
    ),
    Property(
        "V1",
        "no time runs while a claim is undecided",
        every(
            c,
            every(
                _other,
                (is_in(c, Phase.SUBMITTED) & eq(new(generation(_other)), generation(_other)))
                >> (new(left(_other)) >= left(_other)),
            ),
        ),
        "While a claim waits for its decision no claim has less time left than before, unless its "
        "owner renews it for less.",
        but="renew",
    ),
    Property(
        "L1",
        "time is counted",
        every(c, both(left(c) >= 0, generation(c) >= 0)),
        "Counters stay at or above zero.",
        goal=False,
    ),
)

CLAIMS: Final = Machine(
    name="claims",
    meaning="the life of a claim",
    symbols=(hard, phase, decision, generation, holds, timed, left, cause, lost),
    init=(
        becomes(phase(c), value(PHASE, Phase.ABSENT), over=(c,)),
        becomes(decision(c), value(DECISION, Decision.NONE), over=(c,)),
        becomes(generation(c), 0, over=(c,)),
        becomes(holds(c), False, over=(c,)),
        becomes(timed(c), False, over=(c,)),
        becomes(left(c), 0, over=(c,)),
        becomes(cause(c), value(CAUSE, Cause.NONE), over=(c,)),
        becomes(lost(c), False, over=(c,)),
    ),
    actions=ACTIONS,
    properties=PROPERTIES,
)

# --- progress ----------------------------------------------------------------------------

UNDECIDED: Final = is_in(c, Phase.SUBMITTED)

TIME: Final = Recurring(
    "time advances",
    ("tick",),
    nearer=("accept", "clip", "refuse"),
    distance=count(_any, is_in(_any, Phase.SUBMITTED)),
)
EXPIRE: Final = Fair("a claim whose time is up expires", ("expire",), by=("c",))
RENEWALS: Final = Steps("renewals of a claim", ("renew",), by=("c",))

_runs_out: Final = responsible(c) & timed(c)

RESPONSES: Final = (
    Response(
        "V1",
        "every submitted claim is decided",
        (c,),
        UNDECIDED,
        is_in(c, Phase.ACCEPTED, Phase.REFUSED),
        (TIME,),
        "A submitted claim is accepted, whole or clipped, or refused in the end.",
        ranking=Urgency(UNDECIDED, before=TIME),
    ),
    Response(
        "V2",
        "every claim with a duration ends",
        (c,),
        _runs_out,
        ended(c),
        (TIME, EXPIRE),
        "A claim with a duration for which the runtime is responsible ends, by expiry if not "
        "before.",
        unless="its owner renews it for ever, as L6 allows: renewals in time have no limit.",
        ceasing=(RENEWALS,),
        ranking=Ranking(
            _runs_out,
            (left(c),),
            (
                Helpful(TIME, _runs_out & (left(c) > 0)),
                Helpful(EXPIRE, _runs_out & eq(left(c), 0), (c,)),
            ),
        ),
    ),
)
