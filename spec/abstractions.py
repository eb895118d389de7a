"""The refinements: which machine is which other, seen from further away.

- the pool is the claims machine, as far as blocks decide what becomes of a claim;
- the pool is the feasibility rule, when only its counts are looked at;
- the composed machine is each of its parts, and so by the pool it is the feasibility rule too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Final

from kvclaims.spec import claims, feasible, pool
from kvclaims.spec.claims import CLAIMS, ended, is_in, responsible
from kvclaims.spec.composed import RUNTIME
from kvclaims.spec.composition import Part, Step, hide, standing_still
from kvclaims.spec.language import (
    FALSE,
    NAT,
    TRUE,
    Lit,
    Machine,
    Partition,
    Property,
    Symbol,
    Term,
    Update,
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
    told_before,
    value,
)
from kvclaims.spec.pool import POOL, b, c, covers, how, r, ref
from kvclaims.spec.refinement import History, Image, Refinement, same, with_history
from kvclaims.spec.vocabulary import Cause, Decision, Outcome, Phase

NOTHING: Final[tuple[Step, ...]] = ()

# --- the pool refines the claims ----------------------------------------------------------------
#
# The pool does not know time: a claim may expire there at any moment, so what is refined is the
# claims machine with its clock hidden (L6 is shown of it, and of the whole).  It does know more
# than the phase of a claim: what the claim covers decides when it is materialized and harmed.

TIMELESS: Final = hide(CLAIMS, claims.timed, claims.left)
"""The claims machine without its clock."""

_d: Final = Var("of", claims.CLAIM)
_EVICT: Final = POOL.action("evict")
_LOSE: Final = POOL.action("lose")


def _is_harmed_by(updates: tuple[Update, ...], claim: Term) -> Term:
    """The updates move the claim to `harmed`."""
    harmed = is_in(claim, Phase.HARMED)
    return told_before(harmed, updates) & ~harmed


def _loses(updates: tuple[Update, ...], claim: Term) -> Term:
    """The predicate stops holding: the claim is harmed, or had ended and the block was its."""
    late = both(ended(claim), claims.holds(claim), covers(claim, b))
    return _is_harmed_by(updates, claim) | late


def _remember(updates: tuple[Update, ...], why: Cause) -> tuple[Update, ...]:
    lost, harmed = _loses(updates, _d), _is_harmed_by(updates, _d)
    late = both(lost, ended(_d))
    return (
        becomes(claims.holds(_d), claims.holds(_d) & ~lost, over=(_d,)),
        becomes(
            claims.cause(_d),
            ite(harmed, value(claims.CAUSE, why), claims.cause(_d)),
            over=(_d,),
        ),
        becomes(claims.lost(_d), claims.lost(_d) | late, over=(_d,)),
    )


_CLAIM_HISTORY: Final = History(
    (claims.holds, claims.cause, claims.lost),
    (
        becomes(claims.holds(_d), FALSE, over=(_d,)),
        becomes(claims.cause(_d), value(claims.CAUSE, Cause.NONE), over=(_d,)),
        becomes(claims.lost(_d), FALSE, over=(_d,)),
    ),
    {
        "materialize": (becomes(claims.holds(c), TRUE),),
        "evict": _remember(_EVICT.updates, Cause.OWN_CHOICE),
        "lose": _remember(_LOSE.updates, Cause.FAULT),
    },
)
"""Whether a claim's predicate came to hold, and what became of it: the pool needs to know neither,
because what it does depends on blocks."""


def _decision() -> Image:
    """How a claim was answered can be read off its phase."""
    none, refused, accepted = (
        value(claims.DECISION, how) for how in (Decision.NONE, Decision.REFUSED, Decision.ACCEPTED)
    )
    waits = is_in(_d, Phase.ABSENT, Phase.SUBMITTED)
    return Image((_d,), ite(waits, none, ite(is_in(_d, Phase.REFUSED), refused, accepted)))


def _itself(symbol: Symbol) -> Image:
    return Image((_d,), symbol(_d))


def _if_how(phase: Phase) -> Term:
    return eq(how, value(pool.HOW, phase))


POOL_CLAIMS: Final = Refinement(
    concrete=with_history(POOL, _CLAIM_HISTORY),
    abstract=TIMELESS,
    meaning="what the pool makes of a claim is what may become of a claim",
    images={
        **{s.name: _itself(s) for s in (claims.hard, claims.phase)},
        **{s.name: _itself(s) for s in _CLAIM_HISTORY.symbols},
        "decision": _decision(),
        "generation": Image((_d,), ite(is_in(_d, Phase.ABSENT), 0, 1)),
    },
    steps={
        **{action.name: NOTHING for action in POOL.actions},
        "submit": (Step("submit"),),
        "accept": (Step("accept"),),
        "refuse": (Step("refuse"),),
        "materialize": (Step("gain"), Step("materialize")),
        "finish": (
            Step("demote", when=_if_how(Phase.DEMOTED)),
            Step("release", when=_if_how(Phase.RELEASED)),
            Step("expire", when=_if_how(Phase.EXPIRED)),
        ),
        "evict": (Step("lose_by_choice", {"c": _d}, when=_loses(_EVICT.updates, _d), each=_d),),
        "lose": (Step("lose_by_fault", {"c": _d}, when=_loses(_LOSE.updates, _d), each=_d),),
    },
    apart={
        "clip": "the pool accepts a claim as it is or not at all: what is granted is said before",
        "offload": "the pool knows no other tier: there a claim that is offloaded ends",
        "restore": "the pool knows no other tier",
        "restored": "the pool knows no other tier",
        "tick": "the pool does not know time",
        "renew": "the pool does not know time",
    },
    lemmas=(
        Property(
            "L7",
            "materialized is remembered",
            every(_d, is_in(_d, Phase.MATERIALIZED) >> claims.holds(_d)),
            "The predicate of a materialized claim holds.",
            goal=False,
        ),
        Property(
            "L3",
            "nothing is remembered of what was not",
            every(
                _d,
                is_in(_d, Phase.ABSENT)
                >> both(
                    eq(claims.cause(_d), value(claims.CAUSE, Cause.NONE)),
                    ~claims.lost(_d),
                ),
            ),
            "A claim that was never submitted was neither harmed nor lost.",
            goal=False,
        ),
    ),
)

# --- the pool refines the feasibility rule ------------------------------------------------------

_protected: Final = pool.count_protected
_committed: Final = pool.count_committed
_ANSWER: Final = feasible.answer


def _answers(outcome: Outcome) -> tuple[Update, ...]:
    return (becomes(_ANSWER(), value(pool.OUTCOME, outcome)),)


_ANSWERS: Final = History(
    (_ANSWER,),
    _answers(Outcome.PENDING),
    {
        "admit": _answers(Outcome.SERVED),
        "defer": _answers(Outcome.DEFERRED),
        "turn_away": _answers(Outcome.REFUSED),
        "overflow": _answers(Outcome.CAPACITY_REQUIRED),
    },
)

_q: Final = Var("other", pool.REQUEST)
_e: Final = Var("else", claims.CLAIM)
_one: Final = Lit(1, NAT)

_used_by_others: Final = some(_q, ne(_q, r) & pool.held(_q, b))
_used: Final = pool.in_use(b)
_safe: Final = pool.protected(b)
_safe_with_others: Final = some(_e, both(ne(_e, c), pool.pinned_by(_e, b), responsible(_e)))
_freed: Final = eq(ref(b), 1)
_from_queue: Final = claims.hard(c) & pool.queued(b)
_fits_alone: Final = pool.n <= pool.reclaimable

_last_user: Final = both(pool.held(r, b), ~_used_by_others, ~_safe)
"""The request is the last to use the block, and no claim protects it."""

_GIVES_UP: Final = (
    Step("expose", {"n": _protected - new(_protected)}),
    Step("leave", {"n": _committed - new(_committed)}),
)
"""Claims end: some blocks lose their protection, and those that nobody uses leave."""

_a: Final = Var("any", pool.BLOCK)
_ACTIVE_ONLY: Final = count(_a, both(~pool.null(_a), pool.in_use(_a), ~pool.protected(_a)))

POOL_FEASIBLE: Final = Refinement(
    concrete=replace(
        with_history(POOL, _ANSWERS),
        partitions=(*POOL.partitions, Partition(_committed, (_protected, _ACTIVE_ONLY))),
        given=pool.COROLLARIES,
        derived=True,
    ),
    abstract=feasible.FEASIBLE,
    meaning="the pool, seen as counts, follows the feasibility rule",
    images={
        "usable": Image((), pool.usable),
        "protected": Image((), _protected),
        "committed": Image((), _committed),
        "leaving": Image((), pool.usable - pool.free() - _committed),
        "promised": Image((), pool.promised),
        "granted": Image((), pool.granted),
        "answer": Image((), _ANSWER()),
    },
    steps={
        **{action.name: NOTHING for action in POOL.actions},
        "admit": (Step("admit"),),
        "take": (Step("take"),),
        "draw": (Step("draw"),),
        "share": (
            Step("take", when=pool.queued(b)),
            Step("stay", when=both(~pool.queued(b), ~_used, ~_safe)),
        ),
        "drop": (
            Step("leave", {"n": _one}, when=_last_user),
            Step("arrive", when=_last_user & _freed),
        ),
        "give_back": (
            Step("leave", {"n": _one}),
            Step("arrive"),
            Step("accept", {"n": _one}),
        ),
        "retire": (Step("lapse", {"n": pool.owed(r)}),),
        "lose": _GIVES_UP,
        "accept": (Step("accept"),),
        "cover": (
            Step("draw", when=_from_queue),
            Step("forgive", {"n": _one}, when=pool.pays & ~_from_queue),
            Step("stay", when=both(claims.hard(c), ~pool.queued(b), ~_used, ~_safe)),
            Step("protect", when=claims.hard(c) & ~_safe),
        ),
        "uncover": (Step("arrive", when=_freed),),
        "forsake": (
            Step("expose", {"n": _one}, when=~_safe_with_others),
            Step("leave", {"n": _one}, when=~_safe_with_others & ~_used),
            Step("arrive", when=_freed),
            Step("accept", {"n": _one}),
        ),
        "finish": (Step("forgive", {"n": pool.reserve(c)}), *_GIVES_UP),
        "defer": (Step("defer", when=_fits_alone), Step("put_off", when=~_fits_alone)),
        "turn_away": (Step("refuse"),),
        "overflow": (Step("overflow"),),
    },
    corollaries=(
        Property(
            "F1",
            "every block is free, committed or leaving",
            eq(pool.usable, (pool.free() + _committed) + pool.count_let_go),
            "The queue, what is protected or active, and what was let go of make up the pool.",
        ),
        Property(
            "F1",
            "protected, and active only",
            eq(_committed, _protected + _ACTIVE_ONLY),
            "A block that is protected and active is counted once.",
        ),
        Property(
            "F4",
            "what the others would leave",
            eq(pool.usable, (pool.free() + _protected) + pool.count_unprotected),
            "With all others finished, what is not protected is free.",
        ),
    ),
)

# --- the whole refines its parts ----------------------------------------------------------------


_WHOLE: Final = replace(RUNTIME.machine, properties=(), given=(), partitions=())
"""No invariant is needed to see the parts in it."""


def _part_of_the_whole(part: Part) -> Refinement:
    """Seen through one part, every move of the whole is steps of that part, or nothing."""
    return Refinement(
        concrete=_WHOLE,
        abstract=part.machine,
        images=same(part.machine, part),
        steps=RUNTIME.steps_of(part),
        meaning=f"what the whole does is, seen through the {part.name} machine, what that does",
        coarse=True,
    )


@cache
def refinements() -> Mapping[str, Refinement]:
    """Every refinement by name."""
    whole = map(_part_of_the_whole, RUNTIME.parts)
    return {found.name: found for found in (POOL_CLAIMS, POOL_FEASIBLE, *whole)}


@cache
def derived() -> Mapping[str, Machine]:
    """What is proved beside the machines that are declared whole: the composed one, and those whose
    properties say that a refinement holds, or what it rests on."""
    machines = [RUNTIME.machine, standing_still(POOL, pool.COROLLARIES)]
    for found in refinements().values():
        machines += found.obligations
    return {machine.name: machine for machine in machines}
