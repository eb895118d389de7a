"""Tiers: how a claim leaves the device and comes back (rules O1 to O3).

For any number of claims and tiers.  What the engine says, `stage`, is apart from what is so:
`device` (the device blocks really hold the claim's content), `copy` (the tier holds one) and
`loaded` (a load from this tier has brought it back).  The stages refine the phases of
`kvclaims.spec.claims`: `restore_required` is its `restoring`; `restored` is its `materialized`
by another way, and names the tier.

A lookup is no step here: it changes nothing, so what it found may be gone the next moment (O3).
Whoever wants to count on a copy reserves it first; only a reserved copy is `promised`, and only
a promised one is loaded.  A load ends in one of two events, `arrive` or `break_off`; the engine's
answer to them, `restore` or `settle`, is a step of its own, because engines have taken the one
for the other (O2).  A request may `compute` the content again at any time; that makes it
present, and makes nothing restored (O3).

A fault may take a copy or what the device holds at any time; then no promise on it is left
standing, a load under way has failed, and a claim of which nothing is left is harmed.
"""

from __future__ import annotations

from typing import Final

from kvclaims.spec.claims import CLAIM
from kvclaims.spec.language import (
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
    one_of,
    some,
    value,
)

TIER: Final = Sort("Tier")

_ENDS: Final = ("refused", "demoted", "expired", "harmed")
"""What may become of a claim whose restore failed."""

_ORDER: Final = (
    "absent",
    "accepted",
    "materialized",
    "offloaded",
    "restore_required",
    "restored",
)
STAGE: Final = Sort("Stage", (*_ORDER, *_ENDS))
END: Final = Sort("End", _ENDS)

stage: Final = Symbol("stage", (CLAIM,), STAGE, meaning="where the engine says the claim stands")
device: Final = Symbol("device", (CLAIM,), meaning="the device holds the content")
copy: Final = Symbol("copy", (CLAIM, TIER), meaning="the tier holds the content")
reserved: Final = Symbol("reserved", (CLAIM, TIER), meaning="the copy is reserved for a load")
promised: Final = Symbol("promised", (CLAIM, TIER), meaning="somebody was told to count on it")
loading: Final = Symbol("loading", (CLAIM, TIER), meaning="a load from the tier is in flight")
loaded: Final = Symbol("loaded", (CLAIM, TIER), meaning="a load from the tier has succeeded")
named: Final = Symbol("named", (CLAIM, TIER), meaning="the claim is said to come from the tier")
failed: Final = Symbol("failed", (CLAIM,), meaning="a load for the claim has failed")
reused: Final = Symbol("reused", (CLAIM,), meaning="a request was served from the claim")

c: Final = Var("c", CLAIM)
t: Final = Var("t", TIER)
end: Final = Var("end", END)
_c: Final = Var("d", CLAIM)
_t: Final = Var("u", TIER)


def is_at(claim: Term, *names: str) -> Term:
    return one_of(stage(claim), *(value(STAGE, name) for name in names))


def away(claim: Term) -> Term:
    """The runtime owes the claim's content from another tier."""
    return is_at(claim, "offloaded", "restore_required")


def on_device(claim: Term) -> Term:
    """The engine says that the claim can be served from the device."""
    return is_at(claim, "materialized", "restored")


def _goes(claim: Term, name: str) -> Update:
    return becomes(stage(claim), value(STAGE, name))


def _at(*names: str, protects: tuple[str, ...] = ("O1",)) -> Guard:
    return Guard(protects, is_at(c, *names), f"the claim is {' or '.join(names)}")


def _forget_plan() -> tuple[Update, ...]:
    """The copy is no longer reserved, promised or being loaded."""
    return (
        becomes(reserved(c, t), False),
        becomes(promised(c, t), False),
        becomes(loading(c, t), False),
    )


_brought_back: Final = some(_t, loaded(c, _t))
_last_of_claim: Final = both(
    away(c), copy(c, t), ~_brought_back, ~some(_t, ne(_t, t) & copy(c, _t))
)

ACTIONS: Final = (
    Action(
        "accept",
        (c,),
        (_at("absent", protects=("O1", "O2")),),
        (_goes(c, "accepted"),),
        "the claim is accepted",
    ),
    Action(
        "compute",
        (c,),
        (),
        (becomes(device(c), True),),
        "a request computes the content on the device, for the first time or again",
    ),
    Action(
        "materialize",
        (c,),
        (
            _at("accepted", protects=("O1", "O2")),
            Guard(("O2",), device(c), "the device holds the content"),
        ),
        (_goes(c, "materialized"),),
        "the claim is materialized",
    ),
    Action(
        "store",
        (c, t),
        (),
        (becomes(copy(c, t), copy(c, t) | device(c)),),
        "what the device holds is copied to the tier; a store of nothing leaves no copy",
    ),
    Action(
        "offload",
        (c,),
        (
            _at("materialized", "restored", protects=("O1", "O2")),
            Guard(("O1",), some(_t, copy(c, _t)), "some tier holds the content"),
        ),
        (
            _goes(c, "offloaded"),
            becomes(device(c), False),
            becomes(reused(c), False),
            becomes(loaded(c, _t), False, over=(_t,)),
            becomes(named(c, _t), False, over=(_t,)),
        ),
        "the device blocks are given up; the content is kept in a tier",
    ),
    Action(
        "require",
        (c,),
        (_at("offloaded"),),
        (_goes(c, "restore_required"),),
        "a request needs the content back",
    ),
    Action(
        "reserve",
        (c, t),
        (Guard(("O3",), copy(c, t), "the tier holds the content"),),
        (becomes(reserved(c, t), True),),
        "the copy is kept for whoever asked",
    ),
    Action(
        "promise",
        (c, t),
        (Guard(("O3",), reserved(c, t), "the copy is reserved"),),
        (becomes(promised(c, t), True),),
        "somebody counts on the copy",
    ),
    Action(
        "let_go",
        (c, t),
        (Guard(("O3",), ~loading(c, t), "no load from the tier is in flight"),),
        (becomes(reserved(c, t), False), becomes(promised(c, t), False)),
        "whoever reserved the copy gives it up",
    ),
    Action(
        "load",
        (c, t),
        (
            _at("restore_required", protects=("O2",)),
            Guard(("O3",), promised(c, t), "the copy is promised"),
            Guard(
                ("O2",),
                ~either(failed(c), _brought_back, some(_t, loading(c, _t))),
                "no load for the claim is in flight, has succeeded or has failed",
            ),
        ),
        (becomes(loading(c, t), True),),
        "a load from the tier begins",
    ),
    Action(
        "arrive",
        (c, t),
        (Guard(("O2",), loading(c, t), "a load from the tier is in flight"),),
        (becomes(device(c), True), becomes(loaded(c, t), True), *_forget_plan()),
        "the load has brought the content to the device",
    ),
    Action(
        "break_off",
        (c, t),
        (Guard(("O2",), loading(c, t), "a load from the tier is in flight"),),
        (becomes(failed(c), True), *_forget_plan()),
        "the load fails",
    ),
    Action(
        "restore",
        (c, t),
        (
            Guard(
                ("O3", "O1", "O2"),
                loaded(c, t),
                "a load from this tier has brought the content back",
            ),
        ),
        (_goes(c, "restored"), becomes(named(c, t), True)),
        "the claim is restored, from the tier that it names",
    ),
    Action(
        "settle",
        (c, end),
        (
            Guard(("O2",), failed(c), "a load for the claim has failed"),
            _at("restore_required"),
        ),
        (
            becomes(
                stage(c),
                ite(
                    eq(end, value(END, "refused")),
                    value(STAGE, "refused"),
                    ite(
                        eq(end, value(END, "demoted")),
                        value(STAGE, "demoted"),
                        ite(
                            eq(end, value(END, "expired")),
                            value(STAGE, "expired"),
                            value(STAGE, "harmed"),
                        ),
                    ),
                ),
            ),
        ),
        "the claim whose restore failed ends, one way or another",
    ),
    Action(
        "reuse",
        (c,),
        (
            Guard(
                ("O1", "O2"),
                on_device(c),
                "the claim is materialized, or was restored",
            ),
        ),
        (becomes(reused(c), True),),
        "a request is served from the claim",
    ),
    Action(
        "discard",
        (c, t),
        (
            Guard(("O3",), ~reserved(c, t), "the copy is not reserved"),
            Guard(("O1",), ~_last_of_claim, "it is not all that is left of the claim"),
        ),
        (becomes(copy(c, t), False),),
        "the tier gives up a copy of its own choice",
    ),
    Action(
        "lose",
        (c, t),
        (),
        (
            becomes(copy(c, t), False),
            becomes(failed(c), failed(c) | loading(c, t)),
            becomes(
                stage(c),
                ite(_last_of_claim, value(STAGE, "harmed"), stage(c)),
            ),
            *_forget_plan(),
        ),
        "a fault takes the copy",
    ),
    Action(
        "lose_device",
        (c,),
        (),
        (
            becomes(device(c), False),
            becomes(failed(c), failed(c) | (away(c) & _brought_back)),
            becomes(
                stage(c),
                ite(
                    on_device(c) | both(away(c), _brought_back, ~some(_t, copy(c, _t))),
                    value(STAGE, "harmed"),
                    stage(c),
                ),
            ),
            becomes(reused(c), False),
            becomes(loaded(c, _t), False, over=(_t,)),
            becomes(named(c, _t), False, over=(_t,)),
        ),
        "a fault takes what the device holds",
    ),
)


def _steps(*moves: tuple[str, tuple[str, ...]]) -> Term:
    return either(
        eq(new(stage(c)), stage(c)),
        *(is_at(c, before) & new(is_at(c, *afters)) for before, afters in moves),
    )


PROPERTIES: Final = (
    Property(
        "O1",
        "stages come in order",
        every(
            c,
            _steps(
                ("absent", ("accepted",)),
                ("accepted", ("materialized",)),
                ("materialized", ("offloaded", "harmed")),
                ("offloaded", ("restore_required", "harmed")),
                ("restore_required", ("restored", *_ENDS)),
                ("restored", ("offloaded", "harmed")),
            ),
        ),
        "A claim is accepted, materialized, offloaded, required back and restored in this order.",
    ),
    Property(
        "O1",
        "reuse comes last",
        every(c, reused(c) >> on_device(c)),
        "A claim that is away is not reused before it was restored.",
    ),
    Property(
        "O1",
        "a restored claim names its tier",
        every(c, is_at(c, "restored") >> some(t, named(c, t))),
        "A restored claim says which tier it came from.",
    ),
    Property(
        "O1",
        "the tier it names is where it came from",
        every(c, every(t, named(c, t) >> loaded(c, t))),
        "A claim names no tier but one that a load has brought it back from.",
    ),
    Property(
        "O1",
        "what is away is kept",
        every(c, away(c) >> some(t, copy(c, t) | loaded(c, t))),
        "An offloaded claim has a copy in some tier until a load has brought it back.",
    ),
    Property(
        "O2",
        "what is served is there",
        device(c),
        "A request is served from a claim only if the device holds its content.",
        on="reuse",
    ),
    Property(
        "O2",
        "a failed restore restores nothing",
        every(c, failed(c) >> is_at(c, "restore_required", *_ENDS)),
        "A claim whose load has failed is never called restored.",
    ),
    Property(
        "O2",
        "a load succeeds or fails",
        every(
            c,
            every(t, (loading(c, t) & ~new(loading(c, t))) >> new(loaded(c, t) | failed(c))),
        ),
        "No load ends without its success or its failure being known.",
    ),
    Property(
        "O2",
        "a failure is not forgotten",
        every(c, failed(c) >> (new(failed(c)) | is_at(c, *_ENDS))),
        "Until a claim whose load has failed is ended, the failure stays known.",
    ),
    Property(
        "O2",
        "a failure ends that claim only",
        every(_c, ne(_c, c) >> eq(new(stage(_c)), stage(_c))),
        "When a restore has failed no claim but the one concerned is refused, ended or harmed.",
        on="settle",
    ),
    Property(
        "O2",
        "only a failure ends a claim so",
        failed(c),
        "A claim is ended for a failed restore only if one failed.",
        on="settle",
    ),
    Property(
        "O3",
        "recomputing is not restoring",
        every(c, is_at(c, "restored") >> some(t, loaded(c, t))),
        "A claim is called restored only if a load has brought it back, not if a request computed "
        "its content again.",
    ),
    Property(
        "O3",
        "a promise is reserved",
        every(c, every(t, promised(c, t) >> reserved(c, t))),
        "Nobody is told to count on a copy that is not reserved for it.",
    ),
    Property(
        "O3",
        "what is promised is there",
        every(c, every(t, promised(c, t) >> copy(c, t))),
        "A copy that somebody counts on stays in its tier, faults excepted.",
    ),
    Property(
        "O3",
        "loads read promised copies",
        every(c, every(t, loading(c, t) >> promised(c, t))),
        "A load in flight reads a copy that was promised to it.",
    ),
    Property(
        "O3",
        "a reservation is of something",
        every(c, every(t, reserved(c, t) >> copy(c, t))),
        "What is reserved exists.",
        goal=False,
    ),
    Property(
        "O2",
        "on the device means there",
        every(c, on_device(c) >> device(c)),
        "The device holds the content of a claim that is called materialized or restored.",
        goal=False,
    ),
    Property(
        "O2",
        "loads are for claims that need them",
        every(
            c,
            every(
                t,
                both(
                    loading(c, t)
                    >> both(is_at(c, "restore_required"), ~failed(c), ~some(_t, loaded(c, _t))),
                    loaded(c, t)
                    >> both(is_at(c, "restore_required", "restored"), device(c), ~failed(c)),
                    every(_t, (loading(c, t) & loading(c, _t)) >> eq(t, _t)),
                ),
            ),
        ),
        "Only a claim that is required back is loaded, by one load, and what was loaded is on the "
        "device.",
        goal=False,
    ),
)

TIERS: Final = Machine(
    name="tiers",
    meaning="offload, restore and reuse",
    symbols=(
        stage,
        device,
        copy,
        reserved,
        promised,
        loading,
        loaded,
        named,
        failed,
        reused,
    ),
    init=(
        becomes(stage(c), value(STAGE, "absent"), over=(c,)),
        becomes(device(c), False, over=(c,)),
        becomes(copy(c, t), False, over=(c, t)),
        becomes(reserved(c, t), False, over=(c, t)),
        becomes(promised(c, t), False, over=(c, t)),
        becomes(loading(c, t), False, over=(c, t)),
        becomes(loaded(c, t), False, over=(c, t)),
        becomes(named(c, t), False, over=(c, t)),
        becomes(failed(c), False, over=(c,)),
        becomes(reused(c), False, over=(c,)),
    ),
    actions=ACTIONS,
    properties=PROPERTIES,
)
