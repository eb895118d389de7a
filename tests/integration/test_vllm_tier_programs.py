"""What shows that vLLM's tier keeps offloadable claims: programs, and the verdict that rests on
them, which falls when what they show is broken or taken away."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import pytest
from tier_plants import (
    a_reset_spares_the_tier,
    any_room,
    blamed_on_all,
    counted_at_once,
    loads_are_good,
    no_look,
    no_quota,
    rests_stay,
)
from vllm_world import NEEDS_VLLM

from kvclaims.bridge.vllm.engine import InProcessEngine
from kvclaims.checker import lower, profiles, tiers
from kvclaims.spec.lowering import OWED, Lowering, Obligation
from kvclaims.spec.vocabulary import Protection, Verdict

pytestmark = NEEDS_VLLM


@pytest.mark.parametrize("program", tiers.PROGRAMS)
def test_each_holds(program: str) -> None:
    report = tiers.run("vllm", program)
    assert report.verdict is Verdict.HOLDS, report.wrong
    assert len(report.shown) > 3


BROKEN = {
    counted_at_once: "tier-restore",
    no_look: "tier-failed",
    loads_are_good: "tier-failed",
    blamed_on_all: "tier-failed",
    a_reset_spares_the_tier: "tier-identity",
    rests_stay: "tier-identity",
    any_room: "tier-refused",
    no_quota: "tier-refused",
}


@pytest.mark.parametrize("plant", BROKEN, ids=lambda plant: plant.__name__)
def test_what_breaks_the_tier_breaks_its_program(
    plant: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert tiers.run("vllm", BROKEN[plant]).verdict is Verdict.VIOLATED, plant.__doc__


def offloadable(**without: Any) -> lower.ModeVerdict:
    """The verdict on the mode, its probes run anew; `without` changes the mode."""
    profile = profiles.load("vllm-claims")
    (mode,) = (m for m in profile.modes if m.protection is Protection.OFFLOADABLE)
    return lower.judge(replace(mode, **without), lower.probe.__wrapped__, "vllm", profile)


def test_the_mode_is_kept_and_rests_on_runs() -> None:
    found = offloadable()
    assert (found.lowering, found.verdict) == (Lowering.POLICY, Verdict.HOLDS), found.reasons
    assert found.places == [f"kvclaims tier {p} --engine vllm" for p in sorted(tiers.PROGRAMS)]


@pytest.mark.parametrize(
    ("plant", "says"),
    [
        (no_look, "restoration_failure_outcome: tier-failed on vllm: VIOLATED"),
        (counted_at_once, "materialization_predicate: tier-restore on vllm: VIOLATED"),
        (no_quota, "explicit_acceptance: tier-refused on vllm: VIOLATED"),
        (a_reset_spares_the_tier, "fixed_cache_identity_and_token_map: tier-identity on vllm"),
    ],
)
def test_it_falls_with_what_a_run_shows(
    plant: Any, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    found = offloadable()
    assert (found.lowering, found.verdict) == (Lowering.REJECTED, Verdict.VIOLATED)
    assert any(reason.startswith(says) for reason in found.reasons), found.reasons


def test_it_falls_with_the_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(InProcessEngine, "tier_fuzzer")
    found = offloadable()
    assert (found.lowering, found.verdict) == (Lowering.REJECTED, Verdict.VIOLATED)
    assert "tier-failed on vllm cannot run here (engine vllm has no tier to fuzz)" in found.reasons


def test_it_falls_with_the_interface_of_the_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    monkeypatch.delattr(KVConnectorBase_V1, "has_pending_push_work")
    found = offloadable()
    assert (found.lowering, found.verdict) == (Lowering.REJECTED, Verdict.VIOLATED)


@pytest.mark.parametrize("lacking", sorted(OWED[Protection.OFFLOADABLE]))
def test_it_falls_with_each_row(lacking: Obligation) -> None:
    (mode,) = (
        m for m in profiles.load("vllm-claims").modes if m.protection is Protection.OFFLOADABLE
    )
    rest = {one: evidence for one, evidence in mode.evidence.items() if one is not lacking}
    holds = lower.ProbeResult(Verdict.HOLDS, "it holds")
    found = lower.judge(replace(mode, evidence=rest), lambda _: holds, "vllm")
    assert found.reasons == (f"nothing shows {lacking}",)
    assert found.verdict is Verdict.VIOLATED


def test_a_program_shows_nothing_of_what_it_does_not_speak_of() -> None:
    (mode,) = (
        m for m in profiles.load("vllm-claims").modes if m.protection is Protection.OFFLOADABLE
    )
    restored = mode.evidence[Obligation.RESTORE]
    swapped = {**mode.evidence, Obligation.RESTORE_FAILURE: restored}
    holds = lower.ProbeResult(Verdict.HOLDS, "it holds")
    found = lower.judge(replace(mode, evidence=swapped), lambda _: holds, "vllm")
    assert found.verdict is Verdict.VIOLATED
    assert "tier-restore does not show it" in found.reasons[0]


def test_the_command_says_what_came_true(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvclaims.checker.cli import run

    out = io.StringIO()
    assert run(["tier", "tier-refused", "--engine", "vllm", "--json"], out) == 0
    told = json.loads(out.getvalue())
    assert [program["program"] for program in told["programs"]] == ["tier-refused"]
    no_quota(monkeypatch)
    out = io.StringIO()
    assert run(["tier", "tier-refused", "--engine", "vllm"], out) == 1
    assert "  NOT answers are joint, by owner and by room\n" in out.getvalue()
    assert run(["tier", "tier-lost", "--engine", "vllm"], io.StringIO()) == 2
    assert run(["tier", "--engine", "reference"], io.StringIO()) == 2
