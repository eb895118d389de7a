"""The composed machine, the feasibility rule, and what refines what."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvclaims.checker import instances
from kvclaims.checker.explore import explore, explore_instance
from kvclaims.checker.induction import Prover
from kvclaims.checker.prove import prove_machine
from kvclaims.checker.slices import SLICES
from kvclaims.checker.twins import guards, twin
from kvclaims.checker.vacuity import premises
from kvclaims.spec import abstractions, claims, composed, elastic, pool, written
from kvclaims.spec.abstractions import POOL_CLAIMS, POOL_FEASIBLE, derived, refinements
from kvclaims.spec.claims import CLAIM
from kvclaims.spec.composed import POOL, RUNTIME, TRACE, WRITTEN
from kvclaims.spec.composition import Move, Part, Step, hide, standing_still, trail
from kvclaims.spec.feasible import FEASIBLE
from kvclaims.spec.language import (
    TRUE,
    Action,
    Machine,
    MachineError,
    Symbol,
    Var,
    becomes,
    eq,
    every,
    show,
    told_before,
)
from kvclaims.spec.refinement import History, with_history
from kvclaims.spec.vocabulary import Phase, Verdict

WHOLE = RUNTIME.machine

# --- the operator ------------------------------------------------------------------------

_c = Var("c", CLAIM)
_d = Var("d", CLAIM)
light = Symbol("light", (CLAIM,))
TOGGLE = Machine(
    "lamp",
    "a lamp for each claim",
    (light,),
    (becomes(light(_c), False, over=(_c,)),),
    (
        Action("toggle", (_c,), (), (becomes(light(_c), ~light(_c)),), "on and off"),
        Action("all_off", (), (), (becomes(light(_c), False, over=(_c,)),), "off"),
    ),
    (),
)
LAMP = Part(TOGGLE)


def test_parts_are_renamed_apart_and_rigid_symbols_shared() -> None:
    assert POOL.symbol(pool.phase).name == "pool_phase"
    assert POOL.symbol(pool.null) is pool.null
    names = [symbol.name for symbol in WHOLE.symbols]
    assert len(set(names)) == len(names)
    assert names.count("hard") == 1


def test_steps_in_a_row_are_told_in_the_state_before_the_first() -> None:
    twice = trail(LAMP, [Step("toggle"), Step("toggle")])
    (value,) = [told_before(LAMP(light(_c)), twice.updates)]
    assert show(value) == "¬¬lamp_light(c)"


def test_a_step_under_a_condition_leaves_what_earlier_ones_did() -> None:
    lit = LAMP(light(_c))
    steps = trail(LAMP, [Step("toggle"), Step("toggle", when=lit)])
    assert show(told_before(lit, steps.updates)) == (
        "(if lamp_light(c) then ¬¬lamp_light(c) else ¬lamp_light(c))"
    )


def test_steps_for_each_must_not_touch_each_other() -> None:
    each = trail(LAMP, [Step("toggle", {"c": _d}, when=LAMP(light(_d)), each=_d)])
    assert [update.over for update in each.updates] == [(_d,)]
    shared = replace(TOGGLE.actions[0], updates=(becomes(light(_d), True, over=(_d,)),))
    with pytest.raises(MachineError, match="touches light for all alike"):
        trail(Part(TOGGLE.with_action(shared)), [Step("toggle", {"c": _d}, each=_d)])


def test_an_action_that_is_nowhere_needs_a_reason() -> None:
    with pytest.raises(MachineError, match=r"claims\.gain must be in a move, or have a reason"):
        replace(
            RUNTIME,
            moves=tuple(
                m for m in RUNTIME.moves if m.name != "tiers_compute" and m.name != "materialize"
            ),
        )


def test_an_argument_must_be_one_of_the_action() -> None:
    with pytest.raises(MachineError, match=r"lamp\.toggle has no parameters \['colour'\]"):
        trail(LAMP, [Step("toggle", {"colour": TRUE})])


def test_a_bound_variable_is_renamed_before_it_captures() -> None:
    shut = becomes(light(_c), every(_d, light(_d)))
    term = every(_d, light(_d) >> light(_c))
    assert "∀d_. " in show(told_before(term, (shut,)))


def test_history_only_records() -> None:
    seen = Symbol("seen", (CLAIM,))
    kept = History((seen,), (becomes(seen(_c), False, over=(_c,)),))
    assert with_history(TOGGLE, kept).actions == TOGGLE.actions
    meddles = replace(kept, updates={"toggle": (becomes(light(_c), True),)})
    with pytest.raises(MachineError, match="light is no history variable"):
        with_history(TOGGLE, meddles)


def test_hiding_forgets_conditions_and_parameters() -> None:
    untimed = hide(claims.CLAIMS, claims.timed, claims.left)
    assert [g.why for g in untimed.action("expire").guards] == [
        "the runtime is responsible for the claim"
    ]
    assert untimed.action("submit").params == (claims.c,)
    assert untimed.action("tick").updates == ()


# --- the whole ---------------------------------------------------------------------------

COUNTS = {
    "runtime": (3_232, 11_463),
    "runtime/owners": (3_028, 27_762),
    "runtime/tiers": (1_672, 16_989),
    "runtime/hard": (520, 5_253),
    "runtime/memory": (18_944, 249_112),
    "runtime/layers": (258, 1_566),
    "runtime/jobs": (940, 9_336),
    "runtime/written": (1_617, 17_125),
    "runtime/ends": (375, 536),
    "runtime/away": (6_277, 10_076),
    "runtime/answers": (3_411, 5_536),
    "runtime/losses": (9_841, 13_241),
    "runtime/file": (5_578, 20_103),
}
"""States and transitions, counted by the explorer."""


@pytest.fixture(scope="module")
def explored() -> dict[str, tuple[int, int, dict[str, int], Verdict]]:
    found = {}
    for name in SLICES:
        report = explore(name)
        found[name] = (report.states, report.transitions, dict(report.fired), report.verdict)
    return found


def test_counts_of_the_slices(
    explored: dict[str, tuple[int, int, dict[str, int], Verdict]],
) -> None:
    assert {name: found[:2] for name, found in explored.items()} == COUNTS
    assert {found[3] for found in explored.values()} == {Verdict.HOLDS}


def test_every_move_was_taken_in_some_slice(
    explored: dict[str, tuple[int, int, dict[str, int], Verdict]],
) -> None:
    fired = {name for found in explored.values() for name, times in found[2].items() if times}
    assert fired == {move.name for move in RUNTIME.moves}


def test_the_first_slice_has_all_parts() -> None:
    (step,) = [a for a in SLICES["runtime"]().machine.actions if a.name == "accept"]
    parts = {update.target.symbol.name.split("_")[0] for update in step.updates}
    assert parts == {"pool", "claims", "owners", "tiers", "elastic", "trace"}


def test_what_holds_of_the_parts_is_given_and_not_written_again() -> None:
    given = {prop.name for prop in WHOLE.given}
    assert {p.name for p in pool.POOL.invariants} <= given
    assert not given & {prop.name for prop in RUNTIME.properties}


def test_parts_keep_their_rules_in_the_whole() -> None:
    """What is inherited by proof is looked at once: no slice breaks an invariant of a part."""
    small = SLICES["runtime"]()
    whole = replace(small.machine, properties=small.machine.given)
    report = explore_instance(replace(small, machine=whole), "runtime")
    assert report.verdict is Verdict.HOLDS
    assert report.states == COUNTS["runtime"][0]


def test_the_whole_is_proved() -> None:
    found = prove_machine(WHOLE)
    assert len(found) == 2_170
    assert [o for o in found if o.verdict is not Verdict.PROVED] == []


def test_every_property_of_the_whole_says_something() -> None:
    """Each premise holds in a state, or a step, that some slice reaches."""
    wanted = {
        f"{prop.name} {number}": replace(prop, name=f"{prop.name} {number}", formula=~premise)
        for prop in RUNTIME.properties
        for number, premise in enumerate(premises(prop.formula))
    }
    for build in SLICES.values():
        instance, known = build(), {prop.name for prop in build().machine.properties}
        while True:
            asked = tuple(p for n, p in wanted.items() if n.rpartition(" ")[0] in known)
            if not asked:
                break
            machine = replace(instance.machine, properties=asked)
            found = explore_instance(replace(instance, machine=machine), "runtime")
            if not found.counterexamples:
                break
            for witness in found.counterexamples:
                del wanted[witness.prop.name]
    assert wanted == {}


def without(move: str, why: str) -> Machine:
    """The whole with one guard of one move left out, wherever it came from."""
    action = WHOLE.action(move)
    kept = tuple(guard for guard in action.guards if guard.why != why)
    assert len(kept) == len(action.guards) - 1
    return WHOLE.with_action(replace(action, guards=kept))


NEEDED = {
    "L7: a claim is materialized on blocks that are hashed and not written": (
        "materialize",
        "every covered block is written",
        "materialized in the pool means written",
    ),
    "B4: a hash is published that the pool has forgotten": (
        "publish",
        "the block carries the hash still",
        "a lookup finds what the pool knows",
    ),
    "B5: a job is called done while it writes": (
        "done",
        "no write or read of the job is in flight",
        "what is in flight is known to the memory",
    ),
    "E3: a hard claim covers a lent block": (
        "cover",
        "the block lies in the base",
        "claims in the pool lie in the base",
    ),
    "Q2: a claim takes up more than it was granted": (
        "cover",
        "the claim does not take up more than it was granted",
        "within the grant",
    ),
    "F2: fenced blocks are counted as free": (
        "admit",
        "available blocks cover what it will draw",
        "promises are covered by what can be handed out",
    ),
    "T1: the event is about something else": (
        "expire",
        "the event tells of the claim",
        "a claim does not move in silence",
    ),
    "L6: the pool lets a claim expire when it likes": (
        "expire",
        "the duration has passed",
        "the pool expires on time",
    ),
    "O1: a restored claim was not loaded": (
        "offload",
        "the claim is not hard",
        "pool and life agree",
    ),
}


@pytest.mark.parametrize("fault", NEEDED)
def test_without_the_guard_the_rule_is_not_proved(fault: str) -> None:
    move, why, broken = NEEDED[fault]
    machine = without(move, why)
    (prop,) = [p for p in machine.properties if p.name == broken]
    found = Prover(machine, timeout_ms=2000).step(prop, machine.action(move))
    assert found.verdict is Verdict.NOT_INDUCTIVE


FORGETFUL = {
    ("take", "written", "reuse"): "what is handed out is at rest",
    ("release", "owners", "end"): "who ends or renews a claim has signed",
    ("renew", "owners", "renew"): "who ends or renews a claim has signed",
    ("evict", "tiers", "lose_device"): "what was harmed is served from nowhere",
    ("lose_copy", "tiers", "lose"): "what was harmed is served from nowhere",
}
"""Moves in which a part stands still, and what shows that it has to step."""


@pytest.mark.parametrize("share", FORGETFUL)
def test_a_move_in_which_a_part_stands_still_is_not_proved(share: tuple[str, str, str]) -> None:
    move, part, action = share
    (whole,) = (each for each in RUNTIME.moves if each.name == move)
    shares = tuple((p, s) for p, s in whole.shares if (p.name, s.action) != (part, action))
    assert len(shares) < len(whole.shares)
    machine = WHOLE.with_action(replace(whole, shares=shares).action)
    (prop,) = [p for p in machine.properties if p.name == FORGETFUL[share]]
    found = Prover(machine, timeout_ms=2000).step(prop, machine.action(move))
    assert found.verdict is Verdict.NOT_INDUCTIVE


def test_coupling_guards_have_twins_here_and_the_others_in_their_part() -> None:
    coupling = [(a, i) for machine, a, i in guards() if machine == "runtime"]
    assert len(coupling) == 49
    for action, index in coupling:
        assert WHOLE.action(action).guards[index].part == ""
    inherited = [g for a in WHOLE.actions for g in a.guards if g.part]
    assert {g.part for g in inherited} == {part.name for part in RUNTIME.parts}


@pytest.mark.parametrize("at", [("offload", 1), ("close_account", 0)])
def test_a_coupling_guard_left_out_breaks_exactly_its_rules(at: tuple[str, int]) -> None:
    found = twin("runtime", *at)
    assert found.killed, str(found)
    assert found.shortest is not None


# --- refinements -------------------------------------------------------------------------

OBLIGATIONS = {
    "pool-still": 2,
    "pool-refines-claims-start": 6,
    "pool-refines-claims": 84,
    "pool-refines-feasible-start": 7,
    "pool-refines-feasible-still": 3,
    "pool-refines-feasible": 91,
    "runtime-refines-pool-start": 13,
    "runtime-refines-pool": 27,
    "runtime-refines-claims-start": 8,
    "runtime-refines-claims": 22,
    "runtime-refines-written-start": 9,
    "runtime-refines-written": 24,
    "runtime-refines-owners-start": 11,
    "runtime-refines-owners": 10,
    "runtime-refines-tiers-start": 10,
    "runtime-refines-tiers": 23,
    "runtime-refines-elastic-start": 16,
    "runtime-refines-elastic": 33,
    "runtime-refines-trace-start": 18,
    "runtime-refines-trace": 33,
}


@pytest.mark.parametrize("name", OBLIGATIONS)
def test_a_refinement_is_proved(name: str) -> None:
    found = prove_machine(derived()[name])
    assert len(found) == OBLIGATIONS[name]
    assert [o for o in found if o.verdict is not Verdict.PROVED] == []


def test_all_refinements_are_counted() -> None:
    assert set(derived()) == {"runtime", *OBLIGATIONS}
    assert len(refinements()) == 9


@pytest.mark.parametrize(
    ("name", "states", "transitions"),
    [
        ("pool-refines-claims/keys", 2_513, 15_179),
        ("pool-refines-claims/soft-keys", 1_907, 11_506),
        ("pool-refines-feasible/keys", 1_908, 11_724),
        ("pool-refines-feasible/soft-keys", 1_236, 7_946),
    ],
)
def test_sums_are_exact_in_every_explored_step(name: str, states: int, transitions: int) -> None:
    report = explore(name)
    assert (report.states, report.transitions) == (states, transitions)
    assert report.verdict is Verdict.HOLDS


def test_a_step_that_is_none_of_the_abstract_machine_shows_both_states() -> None:
    """Twin: a drawn block that counts as granted.  The step and both counts are shown."""
    steps = {**POOL_FEASIBLE.steps, "draw": (Step("take"),)}
    wrong = replace(POOL_FEASIBLE, steps=steps)
    instance = replace(instances.pool(hard=(1,)), machine=wrong.machine)
    report = explore_instance(instance, "pool-refines-feasible")
    assert report.verdict is Verdict.VIOLATED
    found = next(c for c in report.counterexamples if "promised" in c.prop.name)
    before, (label, after) = found.steps[-2][1], found.steps[-1]
    assert label.startswith("draw(")
    assert (before["feasible.promised"], after["feasible.promised"]) == ("1", "0")
    assert (before["feasible.granted"], after["feasible.granted"]) == ("0", "0")


def test_a_gap_shows_the_abstract_states_too() -> None:
    steps = {**POOL_CLAIMS.steps, "refuse": (Step("accept"),)}
    wrong = replace(POOL_CLAIMS, steps=steps)
    (prop,) = [p for p in wrong.machine.properties if p.on == "refuse" and "phase" in p.name]
    found = Prover(wrong.machine).step(prop, wrong.machine.action("refuse"))
    assert found.verdict is Verdict.NOT_INDUCTIVE
    assert found.gap is not None
    assert found.gap.before["claims.phase(claim0)"] == Phase.SUBMITTED
    assert found.gap.after["claims.phase(claim0)"] == Phase.REFUSED


def test_a_pool_that_harms_in_silence_is_not_a_claims_machine() -> None:
    """The pool with a `lose` that forgets to harm: the abstract claim is harmed, the image not."""
    lose = POOL_CLAIMS.concrete.action("lose")
    kept = tuple(u for u in lose.updates if u.target.symbol != claims.phase)
    silent = replace(
        POOL_CLAIMS,
        concrete=POOL_CLAIMS.concrete.with_action(replace(lose, updates=kept)),
    )
    broken = [
        prop.name
        for prop in silent.machine.properties
        if prop.on == "lose"
        and Prover(silent.machine).step(prop, silent.machine.action("lose")).verdict
        is Verdict.NOT_INDUCTIVE
    ]
    assert "phase is as claims has it" in broken


def test_a_move_that_forgets_a_part_is_no_step_of_it() -> None:
    """Twin of inheritance: a composed `evict` that leaves the written hash visible."""
    found = refinements()["runtime-refines-written"]
    evict = found.concrete.action("evict")
    gone = WRITTEN.symbol(written.visible)
    kept = tuple(u for u in evict.updates if u.target.symbol != gone)
    broken = replace(found, concrete=found.concrete.with_action(replace(evict, updates=kept)))
    (prop,) = [p for p in broken.machine.properties if p.on == "evict"]
    verdict = Prover(broken.machine).step(prop, broken.machine.action("evict")).verdict
    assert verdict is Verdict.NOT_INDUCTIVE


def test_a_move_that_leaves_out_a_guard_of_a_part_is_no_step_of_it() -> None:
    found = refinements()["runtime-refines-elastic"]
    cover = found.concrete.action("cover")
    kept = tuple(g for g in cover.guards if g.part != "elastic")
    broken = replace(found, concrete=found.concrete.with_action(replace(cover, guards=kept)))
    (prop,) = [p for p in broken.machine.properties if p.on == "cover"]
    verdict = Prover(broken.machine).step(prop, broken.machine.action("cover")).verdict
    assert verdict is Verdict.NOT_INDUCTIVE


def test_an_image_is_needed_of_every_symbol_and_a_step_of_every_action() -> None:
    with pytest.raises(MachineError, match="granted has no image"):
        replace(
            POOL_FEASIBLE,
            images={k: v for k, v in POOL_FEASIBLE.images.items() if k != "granted"},
        )
    with pytest.raises(MachineError, match="steps of draw"):
        replace(POOL_FEASIBLE, steps={k: v for k, v in POOL_FEASIBLE.steps.items() if k != "draw"})


def test_a_false_corollary_is_not_proved() -> None:
    (first, *_) = pool.COROLLARIES
    false = replace(first, formula=every(pool.b, pool.queued(pool.b) >> eq(pool.ref(pool.b), 1)))
    (found,) = prove_machine(standing_still(pool.POOL, [false]))
    assert found.verdict is Verdict.NOT_INDUCTIVE


def test_the_parts_of_a_projection_are_coupled_as_in_the_whole() -> None:
    seen = RUNTIME.only("pool", "trace")
    assert {part.name for part in seen.parts} == {"pool", "trace"}
    (admit,) = [move for move in seen.moves if move.name == "admit"]
    assert [guard.why for guard in admit.guards] == ["the event tells of the request"]
    assert isinstance(admit, Move)
    assert TRACE in seen.parts


def test_the_feasibility_machine_is_what_the_refinement_names() -> None:
    assert POOL_FEASIBLE.abstract is FEASIBLE
    assert {move for steps in POOL_FEASIBLE.steps.values() for move in (s.action for s in steps)}
    used = {step.action for steps in POOL_FEASIBLE.steps.values() for step in steps}
    assert used == {action.name for action in FEASIBLE.actions}
    assert abstractions.TIMELESS.name == "claims"
    assert composed.lent is elastic.lent
