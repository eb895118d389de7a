"""Requests on the reference: rules F3 to F6, P4, P5, B7, V3 and the scheduler's order."""

from __future__ import annotations

import pytest
from reference_world import World

from kvclaims.spec.interface import BadOperation
from kvclaims.spec.vocabulary import Outcome, Phase, Protection

# --- F3: granted exactly when headroom stays at or above zero ----------------------------


def test_F3_the_owner_reuses_its_own_claim_under_a_full_pool() -> None:
    w = World(8).cache("A7")
    w.claim("c", "A7")
    w.ask("owner", "A7.1")
    w.drain()
    assert w.request("owner").outcome is Outcome.SERVED
    assert w.request("owner").hit_blocks == 7
    assert w.victims == 0


def test_F3_a_request_that_materializes_a_claim_draws_on_its_reserve() -> None:
    w = World(6)
    w.claim("c", "A5")
    w.claim("d", "B1")
    assert w.headroom == 0
    w.ask("writer", "A5")
    w.step()
    assert w.request("writer").outcome is Outcome.SERVED
    assert w.about("c").phase is Phase.MATERIALIZED
    assert (w.about("c").covered, w.about("d").reserve, w.headroom) == (5, 1, 0)


def test_F3_one_block_is_drawn_from_one_claim_only() -> None:
    w = World(3)
    w.claim("c1", "A1")
    w.claim("c2", "A1")
    w.claim("c3", "C1")
    w.ask("r", "A1+B1")
    w.step()
    assert w.request("r").outcome is Outcome.DEFERRED, "one block is lent, not two"
    assert w.headroom == 0


def test_F3_a_no_admit_request_draws_on_nothing() -> None:
    w = World(4)
    w.claim("c", "A4")
    w.ask("r", "A4", admit_reuse=False)
    w.drain()
    assert w.request("r").outcome is Outcome.REFUSED
    assert w.request("r").blocking_claims == ("c",)


def test_F2_others_leave_a_reserve_alone() -> None:
    w = World(8)
    w.claim("c", "A5")
    w.ask("r", "B3")
    w.ask("s", "C4")
    w.drain()
    assert w.request("r").outcome is Outcome.SERVED
    assert w.request("s").outcome is Outcome.REFUSED
    assert w.request("s").shortfall == 1
    w.cache("A5")
    assert w.about("c").phase is Phase.MATERIALIZED


def test_F2_a_growing_request_leaves_a_reserve_alone() -> None:
    w = World(4)
    w.ask("r", "A2", max_new_tokens=9)
    w.step()
    w.claim("c", "B2")
    w.drain()
    assert w.told("active_request_preempted")
    assert w.request("r").outcome is Outcome.REFUSED
    assert w.about("c").reserve == 2


# --- F4: the outcomes kept apart ---------------------------------------------------------


def test_F4_blame_names_the_one_claim_that_suffices() -> None:
    w = World(30).cache("A4", "B10", "C3")
    w.claim("a", "A4")
    w.claim("b", "B10")
    w.claim("c", "C3")
    w.ask("r", "D20")
    w.drain()
    assert w.request("r").shortfall == 7
    assert w.request("r").blocking_claims == ("b",)


def test_F4_blame_is_the_first_of_the_smallest_sets() -> None:
    w = World(30)
    for claim in ("d", "c", "b", "a"):
        w.claim(claim, f"{claim.upper()}5")
    w.ask("r", "E20")
    w.drain()
    assert w.request("r").shortfall == 10
    assert w.request("r").blocking_claims == ("a", "b")


def test_F4_ending_the_blamed_lets_the_request_through() -> None:
    w = World(30).cache("A4", "B10", "C3")
    for claim, content in (("a", "A4"), ("b", "B10"), ("c", "C3")):
        w.claim(claim, content)
    w.ask("r", "D20")
    w.step()
    assert w.request("r").outcome is Outcome.DEFERRED
    w.runtime.release("b")
    w.drain()
    assert w.request("r").outcome is Outcome.SERVED


def test_F4_blame_knows_that_the_claim_that_stays_lends_what_the_blamed_one_would_have() -> None:
    w = World(4, defer_limit=0).cache("A3")
    w.lose("A3", 0)
    w.lose("A3", 1)
    w.claim("a", "A3", 2, start=1)
    w.claim("b", "A2")
    w.ask("r", "A2+X2")
    w.step()
    assert w.request("r").blocking_claims == ("a",)


def test_F4_congestion_by_active_requests_alone_defers_and_names_them() -> None:
    w = World(8)
    w.ask("first", "A6", max_new_tokens=4)
    w.ask("second", "B6")
    w.step()
    assert w.request("second").outcome is Outcome.DEFERRED
    w.drain()
    assert w.request("second").outcome is Outcome.SERVED
    (deferred,) = w.told("active_request_deferred")
    assert deferred.data["waits_on"] == ["first"]
    assert deferred.data["blocking_claim_ids"] == []
    assert deferred.data["feasibility"] == "active_live_kv_accumulation"
    assert (deferred.data["missing_now"], deferred.data["capacity_shortfall_blocks"]) == (4, 0)


def test_F4_a_request_larger_than_the_pool_needs_capacity_and_blames_nobody() -> None:
    w = World(8).cache("A4")
    w.claim("c", "A4")
    w.ask("r", "B9")
    w.step()
    view = w.request("r")
    assert (view.outcome, view.shortfall) == (Outcome.CAPACITY_REQUIRED, 1)
    assert view.blocking_claims == ()
    (event,) = w.told("active_request_refused")
    assert event.data["feasibility"] == "physical_capacity_infeasible"


def test_F4_a_request_that_outgrows_the_pool_ends() -> None:
    w = World(3)
    w.ask("r", "A3", max_new_tokens=9)
    w.drain()
    assert w.request("r").outcome is Outcome.CAPACITY_REQUIRED


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_F4_V3_claims_defer_a_request_as_often_as_the_limit_says(limit: int) -> None:
    w = World(8, defer_limit=limit)
    w.claim("c", "A5")
    w.ask("r", "B4")
    assert w.drain() == limit + 1
    deferred = w.told("active_request_deferred")
    assert len(deferred) == limit
    labels = {e.data["feasibility"] for e in deferred}
    assert labels <= {"resident_protection_requires_deferral"}
    assert w.request("r").outcome is Outcome.REFUSED


def test_F4_soft_claims_are_never_in_the_way() -> None:
    w = World(8).cache("A6")
    w.claim("c", "A6", protection=Protection.DEMOTABLE)
    w.ask("r", "B8")
    w.step()
    assert w.request("r").outcome is Outcome.SERVED


def test_F5_a_refusal_and_a_deferral_change_no_residency() -> None:
    w = World(8).cache("A5", "B2")
    w.claim("c", "A5")
    before = w.runtime.snapshot()
    w.ask("r", "C4")
    w.step()
    assert w.runtime.snapshot() == before
    w.step()
    assert w.request("r").outcome is Outcome.REFUSED
    assert w.runtime.snapshot() == before


# --- P4, P5: content ---------------------------------------------------------------------


def test_P4_a_no_admit_request_reads_and_registers_nothing() -> None:
    w = World(12).cache("A3")
    w.ask("r", "A3+B4.1", admit_reuse=False, max_new_tokens=4)
    w.drain()
    assert w.request("r").hit_blocks == 3
    assert w.resident("A3+B4") == [0, 1, 2]
    (denied,) = w.told("future_reuse_denied")
    assert denied.data["blocks"] == 5


def test_P5_a_hit_is_the_longest_run_from_position_0() -> None:
    w = World(12).cache("A6")
    w.lose("A6", 2)
    w.ask("r", "A6.1")
    w.drain()
    assert w.request("r").hit_blocks == 2


def test_P5_the_last_token_is_always_computed() -> None:
    w = World(12).cache("A4")
    w.ask("again", "A4")
    w.step()
    assert w.request("again").hit_blocks == 3, "so the last block is computed a second time"
    assert len(w.runtime.snapshot().lookup[w.keys("A4")[3]]) == 2


def test_P5_salts_keep_contents_apart() -> None:
    w = World(12).cache("A4")
    w.ask("r", "A4.1", salt="other")
    w.drain()
    assert w.request("r").hit_blocks == 0


# --- the scheduler -----------------------------------------------------------------------


def test_a_waiting_request_hits_what_was_scheduled_before_it_in_the_same_step() -> None:
    w = World(12)
    w.ask("r", "A4.1")
    w.ask("s", "A4.2")
    w.step()
    assert w.request("s").hit_blocks == 4


def test_the_last_running_request_is_preempted_and_keeps_its_tokens() -> None:
    w = World(6)
    w.ask("old", "A2", max_new_tokens=6)
    w.ask("new", "B2", max_new_tokens=6)
    w.step()
    for _ in range(4):
        w.step()
    assert w.request("new").state == "running"
    w.step()
    assert w.request("old").state == "finished"
    w.drain()
    assert w.request("new").outcome is Outcome.SERVED


def test_preemption_gives_the_blocks_back_and_the_resumed_request_hits_them() -> None:
    w = World(5)
    w.ask("old", "A2", max_new_tokens=9)
    w.ask("new", "B2", max_new_tokens=5)
    w.step()
    w.step()
    (preempted,) = w.told("active_request_preempted")
    assert (preempted.request_id, preempted.data["blocks"]) == ("new", 2)
    assert w.request("new").state == "waiting"
    assert w.request("new").blocks == ()
    w.drain()
    assert w.request("new").outcome is Outcome.SERVED
    assert w.request("new").hit_blocks >= 1


def test_nobody_new_is_admitted_in_a_step_that_preempts() -> None:
    w = World(5)
    w.ask("old", "A2", max_new_tokens=9)
    w.ask("new", "B2", max_new_tokens=9)
    w.step()
    w.ask("small", "C0.1")
    w.step()
    assert w.told("active_request_preempted")
    assert w.request("small").state == "waiting"


def test_one_request_at_the_door_stops_those_behind_it() -> None:
    w = World(8)
    w.ask("running", "A5", max_new_tokens=9)
    w.ask("big", "B4")
    w.ask("small", "C1")
    w.step()
    assert w.request("small").outcome is Outcome.PENDING
    assert w.request("small").state == "waiting"


def test_B1_the_queue_order_is_vllms() -> None:
    w = World(8)
    assert w.runtime.snapshot().queue == (1, 2, 3, 4, 5, 6, 7, 8)
    w.ask("r", "A2.1")
    w.drain()
    assert w.runtime.snapshot().queue == (3, 4, 5, 6, 7, 8, 2, 1)
    w.ask("n", "B2.1", admit_reuse=False)
    w.drain()
    assert w.runtime.snapshot().queue == (5, 4, 3, 6, 7, 8, 2, 1), "private ones first"


# --- B7: every end returns every block ---------------------------------------------------


@pytest.mark.parametrize("steps", range(5))
def test_B7_an_abort_in_any_state_returns_every_block(steps: int) -> None:
    w = World(6)
    w.claim("c", "C1")
    w.ask("r", "A2", max_new_tokens=9)
    w.ask("s", "B3", max_new_tokens=9)
    for _ in range(steps):
        w.step()
    for name in ("s", "r"):
        assert w.request(name).state != "finished"
        w.runtime.abort(name)
        assert w.request(name).outcome is Outcome.ABORTED
    assert (w.free, w.headroom) == (6, 5)
    with pytest.raises(BadOperation):
        w.runtime.abort("r")


def test_B7_an_abort_after_deferral_leaves_no_trace_in_the_queue() -> None:
    w = World(4)
    w.claim("c", "A4")
    w.ask("r", "B2")
    w.step()
    w.runtime.abort("r")
    w.ask("s", "A4")
    w.drain()
    assert w.request("s").outcome is Outcome.SERVED


def test_B9_a_wrong_request_changes_nothing() -> None:
    w = World(4)
    w.ask("r", "A1")
    events = w.runtime.events()
    for wrong in (("r", "A1", {}), ("s", "A0", {}), ("s", "A1", {"max_new_tokens": 0})):
        with pytest.raises(BadOperation):
            w.ask(wrong[0], wrong[1], **wrong[2])
    with pytest.raises(BadOperation):
        w.runtime.abort("nobody")
    assert w.runtime.events() == events
    assert set(w.runtime.observe().requests) == {"r"}


def test_lose_of_what_is_not_there_says_so() -> None:
    w = World(4)
    assert not w.lose("A2", 1)
    with pytest.raises(BadOperation):
        w.lose("A2", 2)
