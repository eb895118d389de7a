"""The reference's bare state, one step at a time: rules B1 to B4, B9, P1, P4 and F2."""

from __future__ import annotations

import pytest

from kvclaims.reference.engine import ENGINE, LedgerStepper
from kvclaims.spec.vocabulary import Outcome, Phase


def stepper(blocks: int = 3) -> LedgerStepper:
    return ENGINE.stepper(
        range(1, blocks + 1),
        claims={"h": True, "g": True, "s": False},
        requests={"r": True, "q": True, "n": False},
        null=(0,),
    )


def play(world: LedgerStepper, *steps: str) -> LedgerStepper:
    """Take steps written as "take r 1"; every one must be allowed."""
    for step in steps:
        assert attempt(world, step), step
    return world


def attempt(world: LedgerStepper, step: str) -> bool:
    action, *words = step.split()
    values = [int(word) if word.isdigit() else WORDS.get(word, word) for word in words]
    return world.apply(action, dict(zip(PARAMETERS[action], values, strict=True)))


WORDS = {"pays": True, "free": False}
PARAMETERS = {
    **dict.fromkeys(("admit", "defer", "turn_away", "overflow"), ("r", "n")),
    "take": ("r", "b"),
    "drop": ("r", "b"),
    "draw": ("r", "c", "b"),
    "give_back": ("r", "c", "b"),
    "share": ("r", "b", "k"),
    "register": ("r", "b", "k"),
    "retire": ("r",),
    "evict": ("b", "k"),
    "lose": ("b", "k"),
    "accept": ("c", "n"),
    "cover": ("c", "b", "pays"),
    "finish": ("c", "how"),
    **dict.fromkeys(("uncover", "forsake"), ("c", "b")),
    **dict.fromkeys(("submit", "refuse", "materialize"), ("c",)),
}

CACHED = ("admit r 1", "take r 1", "register r 1 k", "drop r 1", "retire r")
HELD = ("admit r 1", "take r 1", "register r 1 k")
PROTECTED = (*CACHED, "submit h", "accept h 1", "cover h 1 pays")
ON_LOAN = ("submit h", "accept h 1", "admit r 0", "draw r h 1", "register r 1 k")

REFUSED = [
    ("F3: a grant beyond the headroom", (), "admit r 4"),
    ("F2: a grant that eats a reserve", ("submit h", "accept h 2"), "admit r 2"),
    ("F2: a promise beyond the headroom", ("submit h",), "accept h 4"),
    ("F2: a promise that eats a grant", ("admit r 2", "submit h"), "accept h 2"),
    ("F2: a soft claim is promised nothing", ("submit s",), "accept s 1"),
    ("F2: no grant left", ("admit r 1", "take r 1"), "take r 2"),
    ("F2: no reserve left", ON_LOAN, "draw r h 2"),
    ("F2: a hit in the queue costs a grant", (*CACHED, "admit q 0"), "share q 1 k"),
    ("F2: a pin in the queue must pay", (*CACHED, "submit h", "accept h 1"), "cover h 1 free"),
    ("B3: a taken block has no hash", (*CACHED, "admit q 1"), "take q 1"),
    ("B3: a block has one identity", HELD, "register r 1 j"),
    ("B3: a hit is found under its hash", (*CACHED, "admit q 1"), "share q 1 j"),
    ("B4: only a holder registers", HELD, "register q 2 j"),
    ("P4: no-admit registers nothing", ("admit n 1", "take n 1"), "register n 1 k"),
    ("B2: a block is held once", HELD, "share r 1 k"),
    ("B2: only a holder drops", HELD, "drop q 1"),
    ("B2: dropped once", CACHED, "drop r 1"),
    ("B5: a held block is not evicted", HELD, "evict 1 k"),
    ("P1: a protected block is not evicted", PROTECTED, "evict 1 k"),
    ("P1: a responsible claim keeps its pin", PROTECTED, "uncover h 1"),
    ("P1: what has content is not forsaken", PROTECTED, "forsake h 1"),
    ("B7: a holder does not retire", HELD, "retire r"),
    ("F2: a loan is given back, not dropped", ON_LOAN, "drop r 1"),
    ("F2: a loan goes back to its lender", (*ON_LOAN, "submit g", "accept g 0"), "give_back r g 1"),
    ("F2: a shared loan stays", (*ON_LOAN, "admit q 0", "share q 1 k"), "give_back r h 1"),
    ("L1: submitted once", ("submit h",), "submit h"),
    ("L1: accepted once", ("submit h", "accept h 0"), "accept h 0"),
    ("L1: not accepted after refusal", ("submit h", "refuse h"), "accept h 0"),
    ("L1: an end is an end", (*PROTECTED, "finish h released"), "finish h demoted"),
    ("L2: no cover before acceptance", (*CACHED, "submit s"), "cover s 1 free"),
    ("L7: nothing materializes while owed", ("submit h", "accept h 1"), "materialize h"),
    ("L7: nothing materializes on loan", ON_LOAN, "materialize h"),
    ("L7: what lost its content is not covered", (*PROTECTED, "lose 1 k"), "materialize h"),
    ("F3: a request that fits does not wait", (), "defer r 3"),
    ("F4: what can never fit does not wait", ("admit q 1",), "defer r 4"),
    ("F4: congestion is no refusal", ("admit q 3",), "turn_away r 3"),
    ("F4: what can never fit is not refused for claims", PROTECTED, "turn_away r 4"),
    ("F4: what fits the pool needs no capacity", (), "overflow r 3"),
    ("F4: a running request is not told to wait", HELD, "defer r 3"),
    ("B6: the null block is nobody's", ("admit r 1",), "take r 0"),
]


@pytest.mark.parametrize(("before", "step"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED])
def test_B9_a_refused_step_changes_nothing(before: tuple[str, ...], step: str) -> None:
    world = play(stepper(), *before)
    state = world.state()
    assert not attempt(world, step)
    assert world.state() == state


def test_B1_B2_counters_follow_the_references() -> None:
    world = play(stepper(), *PROTECTED, "admit q 1", "share q 1 k", "take q 2")
    state = world.state()
    assert state["ref"] == {0: 0, 1: 2, 2: 1, 3: 0}
    assert state["queued"] == {3}
    assert state["free"] == 1
    assert state["held"] == {("q", 1), ("q", 2)}
    assert state["covers"] == {("h", 1)}


def test_P2_a_pin_and_a_holder_are_two_references() -> None:
    world = play(stepper(), *HELD, "submit h", "accept h 0", "cover h 1 free")
    play(world, "drop r 1")
    assert world.state()["queued"] == {2, 3}
    play(world, "finish h released", "uncover h 1")
    assert world.state()["queued"] == {1, 2, 3}


def test_F2_a_loan_that_is_given_back_is_owed_again() -> None:
    world = play(stepper(), *ON_LOAN)
    assert world.state()["reserve"]["h"] == 0
    play(world, "give_back r h 1")
    assert world.state()["reserve"]["h"] == 1
    assert world.state()["drawn"] == set()
    assert world.state()["free"] == 3


def test_F2_a_loan_that_is_covered_has_been_paid_for() -> None:
    world = play(stepper(), *ON_LOAN, "cover h 1 free", "materialize h", "drop r 1")
    assert world.state()["phase"]["h"] is Phase.MATERIALIZED
    assert world.state()["reserve"]["h"] == 0
    assert world.state()["queued"] == {2, 3}


def test_L3_a_fault_harms_a_materialized_hard_claim_and_keeps_its_pin_until_it_is_dropped() -> None:
    world = play(stepper(), *PROTECTED, "materialize h", "lose 1 k")
    assert world.state()["phase"]["h"] is Phase.HARMED
    assert world.state()["queued"] == {2, 3}
    play(world, "uncover h 1")
    assert world.state()["queued"] == {1, 2, 3}


def test_L3_eviction_harms_a_materialized_soft_claim() -> None:
    world = play(stepper(), *CACHED, "submit s", "accept s 0", "cover s 1 free", "materialize s")
    play(world, "evict 1 k")
    assert world.state()["phase"]["s"] is Phase.HARMED
    assert world.state()["covers"] == set()


def test_L3_another_copy_spares_a_soft_claim() -> None:
    world = play(stepper(), *CACHED, "admit q 1", "take q 2", "register q 2 k")
    play(world, "submit s", "accept s 0", "cover s 1 free", "materialize s", "cover s 2 free")
    play(world, "evict 1 k")
    assert world.state()["phase"]["s"] is Phase.MATERIALIZED
    assert world.state()["covers"] == {("s", 2)}


def test_L5_an_accepted_claim_forsakes_what_a_fault_emptied() -> None:
    world = play(stepper(), *CACHED, "submit h", "accept h 2", "cover h 1 pays", "lose 1 k")
    play(world, "forsake h 1")
    assert world.state()["reserve"]["h"] == 2
    assert world.state()["queued"] == {1, 2, 3}


def test_F4_answers_are_kept_and_a_deferred_request_can_be_admitted() -> None:
    world = play(stepper(), *PROTECTED, "defer r 3", "turn_away r 3", "overflow q 4")
    assert world.state()["outcome"]["r"] is Outcome.REFUSED
    assert world.state()["outcome"]["q"] is Outcome.CAPACITY_REQUIRED
    assert not attempt(world, "defer r 3")


def test_a_clone_goes_its_own_way() -> None:
    world = stepper()
    other = world.clone()
    play(other, "admit r 1")
    assert world.state()["active"] == set()
    assert other.state()["active"] == {"r"}


def test_an_unknown_action_is_an_error_and_not_a_refusal() -> None:
    with pytest.raises(AttributeError, match="borrow"):
        stepper().apply("borrow", {})
