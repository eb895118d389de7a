"""The language: what a declaration may say, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvclaims.spec.language import (
    INT,
    NAT,
    TRUE,
    Action,
    Machine,
    MachineError,
    Property,
    Sort,
    Symbol,
    Var,
    becomes,
    both,
    count,
    either,
    eq,
    every,
    lit,
    new,
    show,
    some,
    substitute,
    told_before,
    total,
)

THING = Sort("Thing")
on = Symbol("on", (THING,))
weight = Symbol("weight", (THING,), NAT)
x, y = Var("x", THING), Var("y", THING)


def machine(**changes: object) -> Machine:
    parts: dict[str, object] = {
        "name": "lamp",
        "meaning": "lamps",
        "symbols": (on,),
        "init": (becomes(on(x), False, over=(x,)),),
        "actions": (Action("light", (x,), (), (becomes(on(x), True),), "it is lit"),),
        "properties": (Property("B1", "fine", every(x, on(x) | ~on(x)), "always"),),
    }
    return Machine(**{**parts, **changes})  # type: ignore[arg-type]


def test_terms_are_shown_as_mathematics() -> None:
    assert show(every(x, on(x) >> some(y, ~on(y)))) == "∀x. on(x) → (∃y. ¬on(y))"
    assert show(count(x, on(x)) <= 3) == "(#{x | on(x)}) ≤ 3"
    assert show(total(x, weight(x))) == "Σx. weight(x)"
    assert show(new(on(x))) == "on′(x)"


def test_free_variables_are_those_no_binder_names() -> None:
    assert every(x, on(x) & on(y)).free == (y,)


def test_substitution_leaves_bound_variables_alone() -> None:
    term = on(x) & every(x, on(x))
    assert substitute(term, {x: y}) == on(y) & every(x, on(x))


def test_empty_conjunction_is_true_and_empty_disjunction_false() -> None:
    assert both() == TRUE
    assert either() == lit(False)


def test_a_symbol_refuses_arguments_of_another_sort() -> None:
    with pytest.raises(MachineError, match="on takes"):
        on(Var("n", INT))


def test_every_symbol_is_fixed_once_at_the_start() -> None:
    with pytest.raises(MachineError, match="lamp, init: on must be fixed once"):
        machine(init=())


def test_a_guard_must_not_speak_of_the_new_state() -> None:
    from kvclaims.spec.language import Guard

    bad = Action("light", (x,), (Guard(("B1",), new(on(x)), "lit"),), (), "")
    with pytest.raises(MachineError, match="a guard speaks of the new state"):
        machine(actions=(bad,))


def test_updates_name_their_places_by_variables() -> None:
    bad = Action("light", (x,), (), (becomes(on(y), True),), "")
    with pytest.raises(MachineError, match="arguments of on must be variables"):
        machine(actions=(bad,))


def test_a_property_has_no_free_variables() -> None:
    with pytest.raises(MachineError, match="fine: the formula has free variables"):
        machine(properties=(Property("B1", "fine", on(x), "some lamp"),))


def test_a_property_of_new_state_is_a_step_property() -> None:
    stays = Property("B1", "stays", every(x, on(x) >> new(on(x))), "")
    whole = machine(properties=(stays,))
    assert whole.step_properties == (stays,)
    assert whole.invariants == ()


def test_a_property_may_speak_of_one_action_or_of_all_but_one() -> None:
    every_step = Property("B1", "stays", every(x, on(x) >> new(on(x))), "")
    one, others = replace(every_step, on="light"), replace(every_step, but="light")
    spoken = [[p.speaks_of(a) for a in ("light", "other")] for p in (every_step, one, others)]
    assert spoken == [[True, True], [True, False], [False, True]]
    with pytest.raises(MachineError, match="stays: it speaks of one action, or of all but one"):
        machine(properties=(replace(one, but="light"),))
    with pytest.raises(MachineError, match="no action 'nothing'"):
        machine(properties=(replace(every_step, but="nothing"),))


def test_a_property_of_all_actions_but_one_is_of_steps() -> None:
    """Also where its formula speaks of no new state."""
    assert Property("B1", "dark", every(x, ~on(x)), "", but="light").of_steps


def test_equality_of_truths_is_shown_as_equivalence() -> None:
    assert show(eq(on(x), on(y))) == "on(x) ↔ on(y)"


def test_a_sum_is_of_one_state() -> None:
    """Twin: the sum of what a step changes would be read in the state before it, as nothing."""
    lit_up = Property("B1", "none", eq(count(x, new(on(x)) & ~on(x)), 0), "no lamp is ever lit")
    with pytest.raises(MachineError, match="a sum speaks of the new state"):
        machine(properties=(lit_up,))
    whole = replace(lit_up, formula=eq(new(count(x, on(x))), count(x, on(x))))
    assert machine(properties=(whole,)).step_properties


def test_a_sum_is_over_a_finite_sort() -> None:
    n = Var("n", INT)
    endless = Property("B1", "many", count(n, n > 0) >= 0, "")
    with pytest.raises(MachineError, match="a sum over all numbers"):
        machine(properties=(endless,))


def test_no_name_means_two_things() -> None:
    """Twins: of two actions of a name only the first would be shown to keep anything; one that is
    called like the start would be none; a parameter would be the symbol of its name."""
    light = machine().actions[0]
    with pytest.raises(MachineError, match="light: the name of more than one action"):
        machine(actions=(light, replace(light, updates=())))
    with pytest.raises(MachineError, match="initially: what holds at the start is said"):
        machine(actions=(replace(light, name="initially"),))
    with pytest.raises(MachineError, match="on: the name of more than one symbol"):
        machine(symbols=(on, Symbol("on", (), INT, rigid=True)))
    for params in ((x, Var("on", INT)), (x, Var("x", INT))):
        with pytest.raises(MachineError, match="is another parameter's name, or a symbol's"):
            machine(actions=(replace(light, params=params),))


def test_a_machine_speaks_of_its_own_symbols() -> None:
    """Twin: a symbol of the same name that is another one would be said never to change."""
    other = replace(on, meaning="the lamp is lit")
    stays = Property("B1", "stays", every(x, eq(new(other(x)), other(x))), "")
    with pytest.raises(MachineError, match="on is no symbol of the machine"):
        machine(properties=(stays,))


def test_what_an_update_binds_captures_no_place() -> None:
    near = Symbol("near", (THING, THING), rigid=True)
    update = becomes(on(x), some(y, near(x, y)), over=(x,))
    with pytest.raises(MachineError, match=r"y would be bound in ∃y\. near"):
        told_before(on(y), (update,))
    assert show(told_before(every(y, on(y)), (update,))) == "∀y_. ∃y. near(y_, y)"


def test_an_axiom_speaks_of_what_never_changes() -> None:
    """Twin: what a machine assumed of a symbol that its steps change would be proved of itself."""
    with pytest.raises(MachineError, match="axiom 0: on may change"):
        machine(axioms=(every(x, ~on(x)),))
    with pytest.raises(MachineError, match="axiom 0: it has free variables"):
        machine(axioms=(eq(x, y),))
    assert machine(axioms=(every(x, eq(x, x)),)).axioms


def test_only_a_derived_machine_is_given_invariants() -> None:
    assumed = Property("L1", "assumed", every(x, ~on(x)), "nothing is on")
    with pytest.raises(MachineError, match="assumed: it is given, and the machine is not derived"):
        machine(given=(assumed,))
    assert machine(given=(assumed,), derived=True).invariants[0] is assumed
    with pytest.raises(MachineError, match="assumed: what is given must be of states"):
        machine(
            given=(Property("L1", "assumed", every(x, new(on(x))), "all will be on"),),
            derived=True,
        )
