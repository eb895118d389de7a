"""Proofs: everything declared is proved, and what is not true is not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvclaims.checker.instances import MACHINES
from kvclaims.checker.prove import INITIALLY, Prover, obligations, prove, prove_machine
from kvclaims.spec.claims import CLAIMS
from kvclaims.spec.interface import BadOperation
from kvclaims.spec.language import Property, every, without_guard
from kvclaims.spec.pool import POOL, b, queued, ref
from kvclaims.spec.vocabulary import Verdict

OBLIGATIONS = {"claims": 230, "pool": 620, "blockclaims": 55}
"""Each invariant at the start and under every action, each step property under its actions."""


@pytest.mark.parametrize("name", MACHINES)
def test_every_obligation_of_a_machine_is_proved(name: str) -> None:
    found = prove_machine(MACHINES[name])
    assert len(found) == OBLIGATIONS[name]
    assert [o for o in found if o.verdict is not Verdict.PROVED] == []


def test_a_missing_guard_is_shown_as_two_states_and_the_step_between_them() -> None:
    evict = POOL.action("evict")
    (index,) = [i for i, g in enumerate(evict.guards) if "hard claim" in g.why]
    twin = without_guard(POOL, "evict", index)
    (prop,) = [p for p in POOL.properties if p.name == "a protected block keeps its hash"]
    found = Prover(twin).step(prop, twin.action("evict"))
    assert found.verdict is Verdict.NOT_INDUCTIVE
    assert found.gap is not None
    assert found.gap.action == "evict(block0, key0)"
    assert any(name.startswith("key(") for name in found.gap.before)
    assert found.gap.before != found.gap.after
    assert any("after evict" in line for line in found.gap.lines())


def test_a_wrong_counter_is_not_proved_by_the_facts_about_sums() -> None:
    """The ghost totals must not prove too much: a drop that forgets the counter fails B2."""
    drop = POOL.action("drop")
    updates = tuple(u for u in drop.updates if u.target.symbol is not ref)
    twin = POOL.with_action(replace(drop, updates=updates))
    (prop,) = [p for p in POOL.properties if p.name == "references have names"]
    assert Prover(twin).step(prop, twin.action("drop")).verdict is Verdict.NOT_INDUCTIVE


def test_a_forgotten_queue_counter_is_not_proved() -> None:
    take = POOL.action("take")
    updates = tuple(u for u in take.updates if u.target.symbol.name != "free")
    twin = POOL.with_action(replace(take, updates=updates))
    (prop,) = [p for p in POOL.properties if p.name == "the counter agrees"]
    assert Prover(twin).step(prop, twin.action("take")).verdict is Verdict.NOT_INDUCTIVE


def test_a_false_invariant_fails_at_the_start() -> None:
    nothing = Property("B1", "nothing is queued", every(b, ~queued(b)), "not so at the start")
    wrong = replace(POOL, properties=(nothing,))
    assert Prover(wrong).initially(nothing).verdict is Verdict.NOT_INDUCTIVE


def test_a_true_but_not_inductive_property_is_told_apart_from_a_false_one() -> None:
    """Alone, without its strengthenings, F1 holds in every reachable state and is not proved."""
    alone = tuple(p for p in POOL.properties if p.rule == "F1")
    bare = replace(POOL, properties=alone)
    assert Prover(bare).step(alone[0], bare.action("drop")).verdict is Verdict.NOT_INDUCTIVE


def test_a_proof_that_runs_out_of_time_is_unknown() -> None:
    (prop,) = [p for p in POOL.properties if p.name == "union fits"]
    found = Prover(POOL, timeout_ms=1, quick_ms=1).step(prop, POOL.action("cover"))
    assert found.verdict is Verdict.UNKNOWN
    assert found.reason


def test_obligations_cover_the_initial_state_and_every_action() -> None:
    named = [
        name for prop, name in obligations(CLAIMS) if prop.name == "materialized means it holds"
    ]
    assert named == [INITIALLY, *(action.name for action in CLAIMS.actions)]


def test_a_rule_selects_its_obligations() -> None:
    report = prove(rule="P2")
    assert report.verdict is Verdict.PROVED
    assert {o.rule for o in report.obligations} == {"P2"}
    assert all(o.seconds > 0 for o in report.obligations)


@pytest.mark.parametrize(
    ("rule", "machine", "message"),
    [
        ("Z9", None, "unknown rule 'Z9'"),
        (None, "engine", "unknown machine 'engine'"),
        ("V1", None, "no machine states rule V1"),
    ],
)
def test_wrong_selections_are_named(rule: str | None, machine: str | None, message: str) -> None:
    with pytest.raises(BadOperation, match=message):
        prove(rule, machine)


def test_an_engine_that_hands_out_held_blocks_is_not_proved() -> None:
    """Must-fail: a `take` that also works on held blocks breaks P1, for any size of pool."""
    take = POOL.action("take")
    guards = tuple(g for g in take.guards if g.why != "the block is in the free queue")
    twin = POOL.with_action(replace(take, guards=guards))
    broken = {
        p.rule
        for p in POOL.properties
        if p.on in (None, "take")
        and Prover(twin).step(p, twin.action("take")).verdict is not Verdict.PROVED
    }
    assert {"P1", "B2", "B6"} <= broken


def test_register_by_one_who_does_not_hold_the_block_is_not_proved() -> None:
    (prop,) = [p for p in POOL.properties if p.name == "only holders register"]
    register = POOL.action("register")
    (index,) = [i for i, g in enumerate(register.guards) if "holds the block" in g.why]
    twin = without_guard(POOL, "register", index)
    assert Prover(twin).step(prop, twin.action("register")).verdict is Verdict.NOT_INDUCTIVE
