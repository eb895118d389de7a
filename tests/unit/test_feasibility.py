"""F1 to F4 as a function: union, promises, the three outcomes, and minimal blame."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvclaims.spec.feasibility import Judgement, Promise, Situation, headroom, judge
from kvclaims.spec.vocabulary import Outcome


def blocks(*numbers: int) -> frozenset[int]:
    return frozenset(numbers)


def test_the_founding_conflict_is_refused_with_its_numbers() -> None:
    resident = Promise(frozenset(range(60)))
    found = judge(Situation(usable=80, promises={"system": resident}, active={}, need=70))
    assert found == Judgement(Outcome.REFUSED, 50, 50, blocking_claims=("system",))


def test_F1_a_block_that_is_protected_and_held_counts_once() -> None:
    shared = blocks(1, 2, 3)
    situation = Situation(8, {"c": Promise(shared)}, {"r": shared}, need=5)
    assert headroom(situation) == 5
    assert judge(situation).outcome is Outcome.SERVED


def test_F2_a_reserve_is_not_headroom() -> None:
    situation = Situation(8, {"c": Promise(blocks(), reserve=5)}, {}, need=4)
    assert headroom(situation) == 3
    assert judge(situation).outcome is Outcome.REFUSED


def test_F3_an_owner_pays_nothing_for_its_own_protected_blocks() -> None:
    own = frozenset(range(7))
    assert judge(Situation(8, {"c": Promise(own)}, {}, need=1, holds=own)).outcome is Outcome.SERVED


def test_F3_a_request_that_materializes_a_claim_draws_on_its_reserve() -> None:
    promise = {"c": Promise(blocks(), reserve=5)}
    situation = Situation(8, promise, {}, need=8, materializes={"c": frozenset("abcde")})
    assert judge(situation).outcome is Outcome.SERVED


def test_F3_content_promised_to_two_claims_is_drawn_once() -> None:
    promises = {"a": Promise(blocks(), 1), "b": Promise(blocks(), 1)}
    both = {"a": frozenset("x"), "b": frozenset("x")}
    situation = Situation(4, promises, {}, need=4, materializes=both)
    assert judge(situation) == Judgement(Outcome.REFUSED, 1, 1, blocking_claims=("a",))


def test_F4_congestion_names_the_requests_that_hold_something() -> None:
    situation = Situation(8, {}, {"big": blocks(1, 2, 3, 4, 5), "idle": blocks()}, need=6)
    assert judge(situation) == Judgement(Outcome.DEFERRED, 0, 3, waits_on=("big",))


def test_F4_congestion_names_who_was_granted_what_it_has_not_drawn() -> None:
    own = blocks(1)
    situation = Situation(8, {"c": Promise(own)}, {"a": own, "b": own}, 4, granted={"a": 5, "b": 0})
    assert headroom(situation) == 2
    assert judge(situation) == Judgement(Outcome.DEFERRED, 0, 2, waits_on=("a",))


def test_F4_a_request_larger_than_the_pool_blames_nobody() -> None:
    situation = Situation(4, {"c": Promise(blocks(1, 2, 3))}, {}, need=6)
    assert judge(situation) == Judgement(Outcome.CAPACITY_REQUIRED, 2, 5)


def test_F4_one_claim_that_suffices_is_blamed_alone() -> None:
    promises = {"a": Promise(blocks(1)), "b": Promise(blocks(2)), "c": Promise(blocks(3, 4, 5))}
    assert judge(Situation(8, promises, {}, need=6)).blocking_claims == ("c",)


def test_F4_shared_blocks_need_both_claims_to_end() -> None:
    shared = blocks(1, 2, 3)
    promises = {"a": Promise(shared), "b": Promise(shared)}
    assert judge(Situation(4, promises, {}, need=3)).blocking_claims == ("a", "b")


block_sets = st.frozensets(st.integers(0, 9), max_size=6)
promises = st.dictionaries(
    st.sampled_from("abcd"), st.builds(Promise, block_sets, st.integers(0, 2)), max_size=4
)


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    usable = draw(st.integers(10, 14))
    return Situation(
        usable,
        draw(promises),
        draw(st.dictionaries(st.sampled_from("rs"), block_sets, max_size=2)),
        need=draw(st.integers(0, 12)),
        holds=draw(block_sets),
    )


def fits(situation: Situation, kept: frozenset[str]) -> bool:
    """The definition, counted anew: with these claims in force and all others finished."""
    covered = {b for c in kept for b in situation.promises[c].covered}
    reserves = sum(situation.promises[c].reserve for c in kept)
    taken = len(covered | situation.holds) + situation.need + reserves
    return taken <= situation.usable


@settings(max_examples=400, deadline=None)
@given(situations())
def test_F4_blame_suffices_is_minimal_and_repeats(situation: Situation) -> None:
    found = judge(situation)
    everyone = frozenset(situation.promises)
    assert found == judge(situation)
    if found.outcome is not Outcome.REFUSED:
        assert found.blocking_claims == ()
        return
    blamed = frozenset(found.blocking_claims)
    assert not fits(situation, everyone)
    assert fits(situation, everyone - blamed)
    for size in range(len(blamed)):
        for fewer in combinations(sorted(everyone), size):
            assert not fits(situation, everyone - frozenset(fewer))


@settings(max_examples=400, deadline=None)
@given(situations())
def test_F3_served_exactly_when_headroom_stays(situation: Situation) -> None:
    served = judge(situation).outcome is Outcome.SERVED
    assert served == (headroom(situation) - situation.need >= 0)


@pytest.mark.parametrize("usable", [80, 90, 100, 110, 120, 130, 150])
def test_the_sweep_refuses_below_130(usable: int) -> None:
    resident = Promise(frozenset(range(60)))
    found = judge(Situation(usable, {"system": resident}, {}, need=70))
    assert found.outcome is (Outcome.SERVED if usable >= 130 else Outcome.REFUSED)
    assert found.shortfall == max(0, 130 - usable)
