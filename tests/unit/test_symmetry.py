"""One representative stands for all states that differ in names only, and counts as all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvclaims.checker import instances
from kvclaims.checker.explore import ExploreReport, explore_instance
from kvclaims.checker.finite import Instance, State, slots
from kvclaims.checker.native import Way, explore_native
from kvclaims.checker.symmetry import Place, Symmetry, symmetry
from kvclaims.spec.language import (
    Action,
    Machine,
    Property,
    Sort,
    Symbol,
    Var,
    becomes,
    count,
    every,
    without_guard,
)
from kvclaims.spec.vocabulary import Verdict

REPRESENTATIVES = {
    # Counted by hand-checked runs; they change only when a machine or an instance changes.
    "blockclaims": 4_112,
    "claims": 732,
    "pool": 4_407,
    "pool/soft": 5_220,
    "pool/requests": 4_705,
    "pool/keys": 650,
    "pool/soft-keys": 412,
    "pool/soft-copies": 1_508,
    "tiers/claims": 4_656,
    "trace": 1_335,
}


def _counts(report: ExploreReport) -> tuple[object, ...]:
    return (report.verdict, report.states, report.transitions, report.depth, dict(report.fired))


@pytest.mark.parametrize("name", instances.PINNED)
def test_orbits_add_up_to_all_states(name: str) -> None:
    instance = instances.PINNED[name]()
    whole, reduced = explore_instance(instance, name), explore_instance(instance, name, True)
    assert _counts(reduced) == _counts(whole)
    assert reduced.representatives is not None
    assert reduced.representatives <= whole.states
    assert reduced.representatives == REPRESENTATIVES.get(name, reduced.representatives)


@pytest.mark.parametrize("name", ["blockclaims", "pool/soft-keys", "tiers/claims", "trace/facts"])
@pytest.mark.parametrize("jobs", [1, 2])
def test_machine_code_expands_as_many_representatives(name: str, jobs: int) -> None:
    instance = instances.PINNED[name]()
    slow = explore_instance(instance, name, True)
    fast = explore_native(instance, name, None, Way(symmetric=True, jobs=jobs))
    assert _counts(fast) == _counts(slow)
    assert fast.representatives == slow.representatives


def test_size_l_has_the_published_counts_by_a_twelfth_of_its_states() -> None:
    large = instances.blockclaims((1, 2, 3, 1, 2), 3, 4, 10)
    report = explore_native(large, "L", None, Way(symmetric=True))
    assert (report.states, report.transitions) == (3_137_216, 35_766_240)
    assert report.representatives == 269_136


# --- what is interchangeable -------------------------------------------------------------


def _of(instance: Instance) -> Symmetry:
    return symmetry(instance, slots(instance))


def test_claims_of_one_size_are_interchangeable_others_are_not() -> None:
    found = _of(instances.blockclaims((1, 2, 1, 3, 2, 1), 2, 1, 3))
    assert found.sorts == {"Claim": ((0, 2, 5), (1, 4)), "Request": ((0, 1),)}
    assert found.order == 6 * 2 * 2
    assert len(found.outer) == 1


def test_the_null_block_and_a_soft_claim_keep_their_names() -> None:
    found = _of(instances.pool(blocks=3, hard=(1, 0, 1), admit_reuse=(1, 0), keys=2))
    assert found.sorts == {"Block": ((1, 2, 3),), "Claim": ((0, 2),), "Key": ((0, 1),)}
    assert found.order == 6 * 2 * 2


def test_an_element_that_a_choice_names_keeps_its_name() -> None:
    whole = instances.blockclaims((1, 1), 2, 1, 3)
    assert _of(whole).order == 4
    assert _of(replace(whole, choices={"r": (0,)})).sorts == {"Claim": ((0, 1),)}


THING = Sort("Thing")
x, y = Var("x", THING), Var("y", THING)
on, first = Symbol("on", (THING,)), Symbol("first", (), THING)


def _switches(*properties: Property) -> Instance:
    machine = Machine(
        "switches",
        "things that are switched on",
        (on,),
        (becomes(on(x), False, over=(x,)),),
        (Action("switch", (x,), (), (becomes(on(x), True),), "one more"),),
        properties,
    )
    return Instance(machine, {"Thing": 4})


def test_things_that_only_differ_in_their_name_are_counted_by_their_number() -> None:
    report = explore_instance(_switches(), "switches", True)
    assert (report.states, report.representatives, report.transitions) == (16, 5, 32)


def test_a_state_that_holds_an_element_hides_no_name() -> None:
    """A symbol whose value is an element would have to be renamed too: its sort is left alone."""
    instance = _switches()
    machine = replace(instance.machine, symbols=(on, replace(first, rigid=True)))
    assert _of(replace(instance, machine=machine)).order == 1


# --- what breaks is found ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "action", "guard"),
    [("blockclaims", "alloc", 0), ("blockclaims", "accept", 1), ("pool/soft-keys", "evict", 0)],
)
def test_a_broken_twin_breaks_the_same_rules_in_as_many_steps(
    name: str, action: str, guard: int
) -> None:
    instance = instances.PINNED[name]()
    twin = replace(instance, machine=without_guard(instance.machine, action, guard))
    whole = explore_instance(twin, name)
    for reduced in (
        explore_instance(twin, name, True),
        explore_native(twin, name, None, Way(symmetric=True)),
    ):
        assert reduced.verdict is Verdict.VIOLATED
        assert [(c.prop, len(c.steps)) for c in reduced.counterexamples] == [
            (c.prop, len(c.steps)) for c in whole.counterexamples
        ]


def test_a_run_is_shown_with_its_own_names() -> None:
    """Each step of the run is a step of the machine, not one between representatives."""
    few = Property("F1", "at most two", count(x, on(x)) <= 2, "Two are enough.")
    kept = Property("F1", "kept", every(y, on(y) >> on(y)), "Nothing.")
    (found,) = explore_native(
        _switches(few, kept), "switches", None, Way(symmetric=True)
    ).counterexamples
    labels = [label for label, _ in found.steps]
    assert len(labels) == len(set(labels)) == 3


# --- representatives ---------------------------------------------------------------------


def _renamings(found: Symmetry) -> Iterator[dict[str, dict[int, int]]]:
    groups = [(sort, group) for sort, groups in found.sorts.items() for group in groups]
    for images in product(*(permutations(group) for _, group in groups)):
        renaming: dict[str, dict[int, int]] = {}
        for (sort, group), image in zip(groups, images, strict=True):
            renaming.setdefault(sort, {}).update(zip(group, image, strict=True))
        yield renaming


def _images(places: Sequence[Place], found: Symmetry, state: State) -> set[State]:
    """All that the state becomes, element by element."""
    index = {slot: i for i, slot in enumerate(places)}
    images = set()
    for renaming in _renamings(found):
        renamed = [0] * len(state)
        for i, (symbol, args) in enumerate(places):
            place = tuple(
                renaming.get(sort.name, {}).get(arg, arg)
                for sort, arg in zip(symbol.domain, args, strict=True)
            )
            renamed[index[symbol, place]] = state[i]
        images.add(tuple(renamed))
    return images


INSTANCES = {
    name: (slots(instance), _of(instance))
    for name, instance in {
        "blockclaims": instances.blockclaims((1, 2, 1, 1), 2, 2, 4),
        "written": instances.written(blocks=3, keys=2, soft=(0, 0, 1), claims=2),
        "tiers": instances.tiers(claims=2, tiers=2),
    }.items()
}


@pytest.mark.parametrize("name", INSTANCES)
@settings(max_examples=25, deadline=None, database=None, derandomize=True)
@given(data=st.data())
def test_renamed_states_have_one_representative_and_its_orbit_is_counted(
    name: str, data: st.DataObject
) -> None:
    places, found = INSTANCES[name]
    state = tuple(data.draw(st.integers(0, 2)) for _ in places)
    images = _images(places, found, state)
    (representative,) = {found.representative(image) for image in images}
    assert representative in images
    assert found.orbit(representative) == len(images)
