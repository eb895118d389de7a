"""The benchmarks of serving, short: the paper's figures, a soak, and a soak that must fail."""

from __future__ import annotations

import pytest
from vllm_world import NEEDS_VLLM

pytestmark = NEEDS_VLLM


@pytest.mark.slow
def test_the_papers_figures_are_ours() -> None:
    from kvclaims.bridge.vllm.serving_bench import paper

    figures = paper("vllm")
    assert len(figures) == 38
    assert [figure for figure in figures if figure.paper != figure.ours] == []
    live = {figure.quantity: figure.ours for figure in figures if figure.run == "live"}
    assert (live["deferrals"], live["shortfall"], live["free blocks"]) == (1, 19, 27)


@pytest.mark.parametrize("seed", range(2))
def test_a_soak_ends_with_everything_given_back(seed: int) -> None:
    from kvclaims.bridge.vllm.serving_bench import soak

    report = soak("vllm", 160, seed, lambda _: None, per_life=80)
    assert report.problems == []
    assert (report.requests, report.restarts) == (160, 1)
    assert sum(report.outcomes.values()) == 160
    assert {"served", "refused", "aborted"} <= set(report.outcomes)


def test_a_claim_layer_that_keeps_its_pins_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvclaims.bridge.vllm.claims import ClaimBook
    from kvclaims.bridge.vllm.serving_bench import soak

    monkeypatch.setattr(ClaimBook, "_drop_pins", lambda *_: None)
    report = soak("vllm", 100, 0, lambda _: None)
    assert report.problems, "pins that nobody gives back went unnoticed"


def test_requests_that_are_not_forgotten_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvclaims.bridge.vllm.requests import RequestLog
    from kvclaims.bridge.vllm.serving_bench import soak

    arrived = RequestLog.arrived

    def doubled(self: RequestLog, record: object, blocks: int) -> None:
        arrived(self, record, blocks)  # type: ignore[arg-type]
        self.records[f"{len(self.records)} more"] = record  # type: ignore[assignment]

    monkeypatch.setattr(RequestLog, "arrived", doubled)
    report = soak("vllm", 60, 0, lambda _: None)
    assert any("remembered at the end" in found for found in report.problems), report.problems


@pytest.mark.parametrize("load", ["decode", "turnover"])
def test_a_step_is_priced_beside_more_idle_claims_than_blocks(load: str) -> None:
    from kvclaims.bridge.vllm.overhead_bench import CLAIMS, LOADS, USABLE, overhead

    (chosen,) = (known for known in LOADS if known.name == load)
    costs = overhead("none", chosen, pairs=2, steps=3)
    assert [cost.claims for cost in costs] == [*CLAIMS]
    assert CLAIMS[-1] > USABLE
    assert all(0 < cost.scheduler < cost.step for cost in costs)


def test_what_every_step_does_more_is_in_the_price(monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    from kvclaims.bridge.vllm.overhead_bench import DECODE, overhead
    from kvclaims.bridge.vllm.scheduler import ClaimEnforcer

    def slow(_: object) -> None:
        end = time.thread_time() + 0.003  # within the bounds below, not on one of them
        while time.thread_time() < end:
            pass

    monkeypatch.setattr(ClaimEnforcer, "written", slow)
    (cost,) = overhead("none", DECODE, pairs=3, steps=4, claims=[0])
    assert 2000 <= cost.more <= 4000
    assert cost.part > 1


def test_a_pool_that_would_fill_up_is_no_idle_one() -> None:
    from kvclaims.bridge.vllm.overhead_bench import DECODE, overhead

    with pytest.raises(ValueError, match="fill a pool of 250 blocks"):
        overhead("none", DECODE, pairs=40)


@pytest.mark.parametrize("seed", range(2))
def test_a_witness_says_whose_restore_failed_and_no_others(seed: int) -> None:
    from kvclaims.bridge.vllm.witness import PAPER, RUNS, witness

    few = dict.fromkeys(RUNS, 2)
    found = witness("vllm", few, seed, lambda _: None)
    assert found.problems == []
    figures = {figure.quantity: figure.ours for figure in found.figures(few)}
    assert figures == dict(zip(PAPER, ("2/2", "0/8", "12/12"), strict=True))
    assert (sum(RUNS.values()), RUNS["claimed"]) == (131, 30)
    assert found.ends == {
        ("claimed", "harmed"): 2,
        ("unclaimed", "released"): 2,
        ("wrong-claim", "offloaded"): 2,
        ("recompute", "offloaded"): 2,
        ("no-event", "offloaded"): 2,
        ("restored", "materialized"): 2,
    }


def test_a_connector_that_blames_every_claim_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvclaims.bridge.vllm.offloading import Offloading
    from kvclaims.bridge.vllm.witness import witness

    monkeypatch.setattr(Offloading, "_owners", lambda self, *_: [*self._book.claims])
    found = witness("vllm", {"wrong-claim": 1}, 0, lambda _: None)
    assert (found.recognised["wrong-claim"], found.valid["wrong-claim"]) == (1, 0), found


def test_a_copy_that_is_served_without_a_look_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from kvclaims.bridge.vllm.simulated import SimulatedTier
    from kvclaims.bridge.vllm.witness import witness

    work = SimulatedTier.work

    def trusting(self: SimulatedTier, orders: object) -> object:
        for name in self.files.broken:  # type: ignore[attr-defined]
            self.files.copies[name] = b'["wrong", "", []]'  # type: ignore[attr-defined]
        self.files.broken.clear()  # type: ignore[attr-defined]
        return work(self, orders)  # type: ignore[arg-type]

    monkeypatch.setattr(SimulatedTier, "work", trusting)
    found = witness("vllm", {"claimed": 1}, 0, lambda _: None)
    assert any("are wrong" in problem for problem in found.problems), found
