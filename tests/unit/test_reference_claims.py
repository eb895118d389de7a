"""Claims on the reference: rules L1 to L7, P1 to P3 and the acceptance half of F2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from reference_world import World

from kvclaims.spec.content import GENERATED_TOKEN
from kvclaims.spec.fidelity import Fidelity
from kvclaims.spec.interface import BadOperation, ClaimSpec, Predicate, PredicateKind
from kvclaims.spec.vocabulary import Decision, Phase, Protection

SOFT = (Protection.SOFT, Protection.EXPIRING, Protection.BEST_EFFORT)


# --- L1, L2: life and acceptance ---------------------------------------------------------


def test_L1_an_ended_claim_stays_ended() -> None:
    w = World(8).cache("A4")
    w.claim("c", "A4")
    w.runtime.release("c")
    for again in (w.runtime.release, w.runtime.demote, lambda c: w.runtime.renew(c, 5)):
        with pytest.raises(BadOperation):
            again("c")
    assert w.about("c").phase is Phase.RELEASED


def test_L1_a_claim_id_returns_only_with_a_higher_generation() -> None:
    w = World(8)
    w.claim("c", "A4")
    with pytest.raises(BadOperation, match="has not ended"):
        w.claim("c", "A4", generation=2)
    w.runtime.release("c")
    with pytest.raises(BadOperation, match="higher generation"):
        w.claim("c", "A4", generation=1)
    assert w.claim("c", "B2", generation=2).decision is Decision.ACCEPTED
    assert (w.about("c").generation, w.about("c").footprint) == (2, 2)


def test_L2_a_claim_beyond_the_headroom_is_refused_with_a_reason() -> None:
    w = World(8)
    answer = w.claim("c", "A9")
    assert (answer.decision, answer.cost, answer.headroom) == (Decision.REFUSED, 9, 8)
    assert answer.reason
    assert answer.granted is None
    assert w.about("c").phase is Phase.REFUSED
    assert w.headroom == 8


def test_L2_a_clipped_claim_states_what_it_was_granted() -> None:
    w = World(8)
    answer = w.claim("c", "A12", min_blocks=3)
    assert answer.decision is Decision.CLIPPED
    assert answer.granted == Predicate(PredicateKind.LEADING, 8)
    assert (w.about("c").footprint, w.about("c").reserve) == (8, 8)


def test_L2_a_claim_is_not_clipped_below_its_minimum() -> None:
    assert World(8).claim("c", "A12", min_blocks=9).decision is Decision.REFUSED


def test_L2_a_range_is_not_clipped() -> None:
    w = World(3)
    assert w.claim("c", "A6", 4, start=2, min_blocks=1).decision is Decision.REFUSED


def test_L2_there_is_no_tier_to_offload_to() -> None:
    answer = World(8).claim("c", "A2", protection=Protection.OFFLOADABLE)
    assert (answer.decision, answer.reason) == (Decision.REFUSED, "no tier")


def test_L2_a_claim_that_asks_for_more_than_survives_is_refused() -> None:
    w = World(8, fidelity=Fidelity.BOUNDED_LOSS)
    answer = w.claim("c", "A2")
    assert (answer.decision, answer.cost) == (Decision.REFUSED, 0)
    assert answer.reason == "exact is asked, bounded_loss survives"
    assert w.claim("d", "A2", fidelity=Fidelity.LOSSY).decision is Decision.ACCEPTED


@pytest.mark.parametrize(
    ("survives", "bound", "asked", "decision"),
    [
        (Fidelity.BOUNDED_LOSS, 0.5, 0.5, Decision.ACCEPTED),
        (Fidelity.BOUNDED_LOSS, 0.5, 0.4, Decision.REFUSED),
        (Fidelity.BOUNDED_LOSS, 0.5, None, Decision.ACCEPTED),
        (Fidelity.BOUNDED_LOSS, None, 0.5, Decision.REFUSED),
        (Fidelity.EXACT, None, 0.1, Decision.ACCEPTED),
        (Fidelity.LOSSY, None, 9.0, Decision.REFUSED),
    ],
)
def test_L2_a_bound_that_is_asked_for_is_kept(
    survives: Fidelity, bound: float | None, asked: float | None, decision: Decision
) -> None:
    w = World(8, fidelity=survives, bound=bound)
    predicate = Predicate(PredicateKind.LEADING, 2, 0, Fidelity.BOUNDED_LOSS, asked)
    answer = w.runtime.declare(ClaimSpec("c", w.tokens("A2"), predicate))
    assert answer.decision is decision
    if decision is Decision.ACCEPTED:
        assert answer.granted == predicate


@pytest.mark.parametrize(
    ("fidelity", "bound"),
    [(Fidelity.EXACT, 1.0), (Fidelity.BOUNDED_LOSS, 0.0), (Fidelity.BOUNDED_LOSS, float("nan"))],
)
def test_L2_a_bound_is_a_positive_number_and_goes_with_bounded_loss(
    fidelity: Fidelity, bound: float
) -> None:
    with pytest.raises(BadOperation, match="a bound is a positive number"):
        Predicate(PredicateKind.LEADING, 2, 0, fidelity, bound)


@pytest.mark.parametrize(
    ("fidelity", "bound"),
    [
        (Fidelity.EXACT, 1.0),
        (Fidelity.LOSSY, 0.0),
        (Fidelity.BOUNDED_LOSS, -1.0),
        (Fidelity.BOUNDED_LOSS, float("nan")),
        (Fidelity.BOUNDED_LOSS, float("inf")),
    ],
)
def test_L2_what_survives_within_a_bound_is_within_one_that_bounds(
    fidelity: Fidelity, bound: float
) -> None:
    """A pool whose errors stay below -1 would give whatever is asked."""
    with pytest.raises(BadOperation, match="the bound of a pool is 0 or more"):
        World(8, fidelity=fidelity, bound=bound)


@pytest.mark.parametrize("part", [{"n": 2}, {"n": 2, "start": 1}, {"min_blocks": 1}])
def test_L2_a_state_is_claimed_whole(part: dict[str, Any]) -> None:
    w = World(8, fidelity=Fidelity.STATE)
    with pytest.raises(BadOperation, match="a state is claimed whole"):
        w.claim("c", "A3", fidelity=Fidelity.STATE, **part)
    assert w.claim("c", "A3", fidelity=Fidelity.STATE).decision is Decision.ACCEPTED


def test_L2_a_clipped_claim_keeps_the_class_that_it_asked_for() -> None:
    granted = World(3).claim("c", "A6", fidelity=Fidelity.LOSSY, min_blocks=1).granted
    assert granted == Predicate(PredicateKind.LEADING, 3, fidelity=Fidelity.LOSSY)


@pytest.mark.parametrize(
    "wrong",
    [{"n": 5}, {"n": 2, "start": 3}, {"duration": 0}, {"min_blocks": 0}, {"generation": 0}],
)
def test_L2_a_claim_that_makes_no_sense_changes_nothing(wrong: dict[str, Any]) -> None:
    w = World(8)
    with pytest.raises(BadOperation):
        w.claim("c", "A4", **wrong)
    assert not w.runtime.observe().claims
    assert len(w.runtime.events()) == 1


# --- F2, F1: acceptance by headroom ------------------------------------------------------


def test_F2_claims_are_accepted_jointly_not_one_by_one() -> None:
    w = World(10)
    assert w.claim("c1", "A6").decision is Decision.ACCEPTED
    assert w.claim("c2", "B6").decision is Decision.REFUSED
    assert w.claim("c3", "C4").decision is Decision.ACCEPTED
    assert w.headroom == 0


def test_F1_a_block_that_is_protected_already_costs_nothing_again() -> None:
    w = World(10).cache("A8")
    assert w.claim("c1", "A8").cost == 8
    answer = w.claim("c2", "A8+B2")
    assert (answer.cost, answer.headroom) == (2, 2)
    assert (w.free, w.headroom) == (2, 0)


def test_F1_a_block_that_a_running_request_holds_costs_nothing_again() -> None:
    w = World(8)
    w.ask("r", "A4", max_new_tokens=3)
    w.step()
    answer = w.claim("c", "A4")
    assert answer.cost == 0
    assert w.about("c").covered == 4


# --- L3 to L5: harm ----------------------------------------------------------------------


@pytest.mark.parametrize("protection", SOFT)
def test_L3_P3_a_soft_claim_is_harmed_by_eviction_and_told(protection: Protection) -> None:
    w = World(8).cache("A4")
    w.claim("c", "A4", protection=protection)
    assert w.about("c").phase is Phase.MATERIALIZED
    w.cache("B6")
    assert w.about("c").phase is Phase.HARMED
    (harm,) = w.told("resident_claim_harmed")
    assert harm.data["cause"] == "own_choice"
    assert harm.data["before"] == {"holds": True, "leading": 4, "survivors": 4}
    assert harm.data["after"] == {"holds": False, "leading": 3, "survivors": 3}


def test_P3_a_demotable_claim_is_demoted_before_its_block_goes() -> None:
    w = World(8).cache("A4")
    w.claim("c", "A4", protection=Protection.DEMOTABLE)
    w.cache("B6")
    assert w.about("c").phase is Phase.DEMOTED
    kinds = [e.event for e in w.runtime.events()]
    assert "resident_claim_harmed" not in kinds
    demoted, victim, lost = (
        kinds.index("resident_claim_demoted"),
        kinds.index("allocation_victim_selected"),
        kinds.index("block_lost_after_release"),
    )
    assert demoted < victim < lost
    assert kinds.count("block_lost_after_release") == 2


def test_L3_an_accepted_claim_that_never_held_is_not_harmed() -> None:
    w = World(8).cache("A2")
    w.claim("c", "A4", protection=Protection.SOFT)
    w.cache("B8")
    assert w.about("c").phase is Phase.ACCEPTED
    assert (w.about("c").covered, w.about("c").survivors) == (0, 0)
    assert not w.told("resident_claim_harmed")


def test_P3_a_second_copy_saves_a_soft_claim() -> None:
    w = World(8).cache("A3", "A3")
    assert len(w.runtime.snapshot().lookup[w.keys("A3")[2]]) == 2
    w.claim("c", "A3", protection=Protection.SOFT)
    w.ask("r", "B5")
    w.drain()
    assert w.victims == 1, "one of the two copies was taken"
    assert w.about("c").phase is Phase.MATERIALIZED
    assert w.about("c").survivors == 3


def test_L5_a_hard_claim_survives_any_load() -> None:
    w = World(8).cache("A4")
    w.claim("c", "A4")
    for number in range(5):
        w.ask(f"r{number}", f"B{number + 2}", max_new_tokens=9)
    w.drain()
    assert w.about("c").phase is Phase.MATERIALIZED
    assert w.resident("A4") == [0, 1, 2, 3]


def test_L5_a_fault_on_a_covered_block_harms_and_says_so() -> None:
    w = World(8).cache("A4")
    w.claim("c", "A4")
    assert w.lose("A4", 2)
    assert w.about("c").phase is Phase.HARMED
    (harm,) = w.told("resident_claim_harmed")
    assert (harm.data["cause"], harm.data["after"]["leading"]) == ("fault", 2)
    assert (w.free, w.headroom) == (8, 8), "its pins are gone"
    queue = w.runtime.snapshot().queue
    assert w.runtime.locate(w.tokens("A4"))[2] is None
    assert queue[0] not in w.runtime.locate(w.tokens("A4")), "the empty block is used first"


def test_L5_a_fault_before_materialization_renews_the_promise() -> None:
    w = World(8).cache("A2")
    w.claim("c", "A4")
    assert w.lose("A4", 1)
    view = w.about("c")
    assert (view.phase, view.covered, view.reserve) == (Phase.ACCEPTED, 1, 3)
    assert w.headroom == 4


def test_L5_a_promise_that_a_fault_makes_impossible_ends_the_claim() -> None:
    w = World(4)
    w.ask("r", "A2.1", max_new_tokens=9)
    w.step()
    w.claim("c", "A2+B1")
    assert (w.headroom, w.about("c").reserve) == (0, 1)
    assert w.lose("A2", 1), "the request goes on holding that block, so none can be promised"
    assert w.about("c").phase is Phase.DEMOTED
    assert not w.told("resident_claim_harmed")
    assert w.headroom == 1


def test_L4_a_loss_after_the_end_is_told_once_and_harms_nobody() -> None:
    w = World(8).cache("A4")
    w.claim("c", "A4")
    w.runtime.release("c")
    assert w.lose("A4", 3)
    assert not w.lose("A4", 3)
    (lost,) = w.told("block_lost_after_release")
    assert (lost.data["position"], lost.data["phase"]) == (3, "released")
    assert not w.told("resident_claim_harmed")


def test_L4_a_new_generation_is_not_told_of_the_old_ones_blocks() -> None:
    w = World(8).cache("A4")
    w.claim("c", "A4")
    w.runtime.release("c")
    w.claim("c", "B1", generation=2)
    w.lose("A4", 3)
    assert not w.told("block_lost_after_release")


# --- L6: time ----------------------------------------------------------------------------


def test_L6_expiry_is_on_time_and_deletes_nothing() -> None:
    w = World(8).cache("A4")
    w.claim("c", "A4", duration=3)
    w.runtime.advance(2)
    assert w.about("c").phase is Phase.MATERIALIZED
    w.runtime.advance(1)
    assert w.about("c").phase is Phase.EXPIRED
    assert w.resident("A4") == [0, 1, 2, 3]
    assert w.headroom == 8


def test_L6_a_read_renews_nothing() -> None:
    w = World(8).cache("A4")
    w.claim("c", "A4", duration=2)
    w.runtime.advance(1)
    w.cache("A4.1")
    w.runtime.advance(1)
    assert w.about("c").phase is Phase.EXPIRED


def test_L6_renewal_counts_from_now() -> None:
    w = World(8)
    w.claim("c", "A4", duration=3)
    w.runtime.advance(2)
    w.runtime.renew("c", 3)
    w.runtime.advance(2)
    assert w.about("c").phase is Phase.ACCEPTED
    w.runtime.advance(1)
    assert w.about("c").phase is Phase.EXPIRED


def test_L6_claims_expire_in_order_of_their_end_then_of_declaration() -> None:
    w = World(8)
    for claim, duration in (("late", 3), ("first", 1), ("second", 2), ("again", 2)):
        w.claim(claim, "A1", duration=duration)
    w.runtime.advance(5)
    ended = [e.claim_id for e in w.told("resident_claim_expired")]
    assert ended == ["first", "second", "again", "late"]


# --- L7: materialization -----------------------------------------------------------------


def test_L7_a_claim_materializes_when_its_content_was_written() -> None:
    w = World(8)
    w.claim("c", "A4")
    assert w.about("c").phase is Phase.ACCEPTED
    w.cache("A2")
    assert (w.about("c").phase, w.about("c").covered) == (Phase.ACCEPTED, 2)
    w.cache("A4.1")
    assert w.about("c").phase is Phase.MATERIALIZED
    assert (w.about("c").covered, w.about("c").reserve) == (4, 0)


def test_L7_decoding_fills_a_claimed_block() -> None:
    w = World(8)
    generated = "A1.3"
    w.ask("r", generated, max_new_tokens=3)
    claimed = (*w.tokens(generated), GENERATED_TOKEN)
    w.runtime.declare(ClaimSpec("c", claimed, Predicate(PredicateKind.LEADING, 2)))
    w.step()
    assert w.about("c").covered == 1
    w.step()
    assert w.about("c").phase is Phase.MATERIALIZED


def test_L7_a_range_speaks_of_its_own_positions_only() -> None:
    w = World(8).cache("A5")
    w.claim("c", "A5", 3, start=2)
    assert w.about("c").phase is Phase.MATERIALIZED
    assert w.lose("A5", 0)
    assert w.about("c").phase is Phase.MATERIALIZED, "position 0 is not its business"


# --- P2: protection counts per claim -----------------------------------------------------


@pytest.mark.parametrize("end", ["release", "demote"])
def test_P2_ending_one_of_two_claims_frees_what_only_it_covers(end: str) -> None:
    w = World(12).cache("A4+B4", "A4+C2")
    w.claim("long", "A4+B4")
    w.claim("short", "A4+C2")
    assert w.free == 2
    finish: Callable[[str], None] = getattr(w.runtime, end)
    finish("long")
    assert w.free == 6, "the four blocks of B, not the shared prefix"
    w.cache("D6")
    assert w.resident("A4+C2") == list(range(6))
    assert w.about("short").phase is Phase.MATERIALIZED


def test_P1_a_pinned_block_keeps_its_bytes() -> None:
    w = World(8).cache("A4")
    w.claim("c", "A4")
    blocks = tuple(b for b in w.runtime.locate(w.tokens("A4")) if b is not None)
    before = w.runtime.fingerprint(blocks)
    for number in range(6):
        w.cache(f"{'BCDEFG'[number]}4")
    assert w.runtime.fingerprint(blocks) == before


def test_P1_bytes_name_their_content_wherever_they_lie() -> None:
    w = World(8).cache("A2", "B2")
    a, b = (w.runtime.fingerprint(_blocks(w, name)) for name in ("A2", "B2"))
    other = World(8).cache("C3", "A2")
    assert a == other.runtime.fingerprint(_blocks(other, "A2"))
    assert a != b


def test_B10_a_reset_is_refused_while_a_claim_holds_blocks() -> None:
    w = World(8).cache("A4")
    w.claim("c", "A4")
    assert not w.runtime.reset()
    assert w.resident("A4") == [0, 1, 2, 3]
    w.runtime.release("c")
    assert w.runtime.reset()
    assert w.runtime.observe().resident == {}
    assert [e.data["succeeded"] for e in w.told("pool_reset")] == [False, True]


def test_L5_a_reset_harms_soft_claims_as_a_fault() -> None:
    w = World(8).cache("A4")
    w.claim("soft", "A4", protection=Protection.SOFT)
    w.claim("mild", "A4", protection=Protection.DEMOTABLE)
    assert w.runtime.reset()
    (harm,) = w.told("resident_claim_harmed")
    assert (harm.claim_id, harm.data["cause"]) == ("soft", "fault")
    assert harm.data["after"] == {"holds": False, "leading": 0, "survivors": 0}
    assert w.about("mild").phase is Phase.DEMOTED


def test_nothing_is_accepted_after_close() -> None:
    w = World(8)
    w.runtime.close()
    for operation in (w.step, w.runtime.close, lambda: w.claim("c", "A1"), w.runtime.reset):
        with pytest.raises(BadOperation, match="closed"):
            operation()
    assert w.told("trace_closed")[0].data == {"events": 1}


def _blocks(w: World, content: str) -> tuple[int, ...]:
    return tuple(b for b in w.runtime.locate(w.tokens(content)) if b is not None)
