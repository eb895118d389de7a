"""The litmus of the contract on the reference: 80 usable blocks, 60 resident, 70 asked."""

from __future__ import annotations

from pathlib import Path

import pytest
from reference_world import World

from kvclaims.reference.engine import ENGINE
from kvclaims.spec.telemetry import parse_event
from kvclaims.spec.vocabulary import Outcome, Phase


def world() -> World:
    return World(80).cache("A60")


def test_L1_native_serves_and_takes_50_victims() -> None:
    w = world()
    w.ask("r", "B70")
    w.drain()
    assert w.request("r").outcome is Outcome.SERVED
    assert w.victims == 50
    assert not w.told("resident_claim_accepted")
    assert not w.told("resident_claim_harmed")
    assert w.resident("A60") == list(range(10)), "the end of the chain goes first"


def test_L2_no_admit_serves_takes_50_victims_and_leaves_nothing_new() -> None:
    w = world()
    before = set(w.runtime.observe().resident)
    w.ask("r", "B70", admit_reuse=False)
    w.drain()
    assert w.request("r").outcome is Outcome.SERVED_NO_ADMIT
    assert w.victims == 50
    assert [e.data["blocks"] for e in w.told("future_reuse_denied")] == [70]
    assert set(w.runtime.observe().resident) < before


def test_L3_a_hard_claim_refuses_with_the_arithmetic_and_loses_nothing() -> None:
    w = world()
    w.claim("c", "A60")
    resident = w.runtime.observe().resident
    w.ask("r", "B70")
    w.drain()
    view = w.request("r")
    assert (view.outcome, view.shortfall, view.blocking_claims) == (Outcome.REFUSED, 50, ("c",))
    assert w.victims == 0
    assert w.free == 20
    assert w.runtime.observe().resident == resident
    deferred, refused = w.told("active_request_deferred"), w.told("active_request_refused")
    assert len(deferred) == len(refused) == 1
    assert refused[0].data == {
        "outcome": "refused",
        "feasibility": "protected_resident_headroom_exhausted",
        "blocking_claim_ids": ["c"],
        "waits_on": [],
        "protected_resident_blocks": 60,
        "resident_plus_active_blocks": 130,
        "capacity_shortfall_blocks": 50,
        "missing_now": 50,
        "free_blocks_before_allocate": 20,
        "active_live_blocks_required": 70,
        "active_live_blocks_current": 0,
        "arbiter_action": "none",
    }


@pytest.mark.parametrize("how", ["demoted", "expired"])
def test_L4_L5_an_end_before_the_loss_is_no_harm(how: str) -> None:
    w = world()
    w.claim("c", "A60", duration=3)
    if how == "demoted":
        w.runtime.demote("c")
    else:
        w.runtime.advance(3)
    w.ask("r", "B70")
    w.drain()
    assert w.request("r").outcome is Outcome.SERVED
    assert len(w.told(f"resident_claim_{how}")) == 1
    assert not w.told("resident_claim_harmed")
    lost = w.told("block_lost_after_release")
    assert sorted(e.data["position"] for e in lost) == list(range(10, 60))
    assert {e.data["phase"] for e in lost} == {how}


def test_L6_59_survivors_are_no_prefix() -> None:
    w = world()
    assert w.lose("A60", 0)
    w.claim("c", "A60")
    view = w.about("c")
    assert (view.survivors, view.leading, view.footprint) == (59, 0, 60)
    assert view.phase is Phase.ACCEPTED
    assert (view.covered, view.reserve) == (59, 1)


def test_L7_the_trace_of_L3_is_whole_and_tells_the_story_in_order() -> None:
    w = world()
    w.claim("c", "A60")
    w.ask("r", "B70")
    w.drain()
    w.runtime.close()
    events = [parse_event(event.to_json()) for event in w.runtime.events()]
    assert [e.seq for e in events] == list(range(len(events)))
    times = [e.timestamp_ns for e in events]
    assert times == sorted(times)
    kinds = [e.event for e in events if "block" not in e.event]
    assert kinds[0] == "trace_opened"
    assert kinds[-1] == "trace_closed"
    story = [
        "resident_claim_submitted",
        "resident_claim_accepted",
        "resident_claim_materialized",
        "active_request_submitted",
        "active_request_found",
        "active_request_deferred",
        "active_request_found",
        "active_request_refused",
    ]
    assert kinds[kinds.index(story[0]) : -1] == story


@pytest.mark.parametrize("usable", [80, 90, 100, 110, 120, 130, 150])
@pytest.mark.parametrize("policy", ["native", "no-admit", "hard"])
def test_S_victims_follow_the_arithmetic(usable: int, policy: str) -> None:
    w = World(usable).cache("A60")
    if policy == "hard":
        w.claim("c", "A60")
    w.ask("r", "B70", admit_reuse=policy != "no-admit")
    w.drain()
    refused = policy == "hard" and usable < 130
    assert w.victims == (0 if policy == "hard" else max(0, 130 - usable))
    assert (w.request("r").outcome is Outcome.REFUSED) == refused


def test_the_engine_says_what_it_is() -> None:
    info = ENGINE.info()
    assert info.name == ENGINE.name == "reference"
    assert Path(info.path, "engine.py").exists()
