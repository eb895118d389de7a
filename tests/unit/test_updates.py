"""Must-fail twins of updates: what no missing guard can break, a wrong update does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvclaims.checker.explore import explore_instance
from kvclaims.checker.instances import MACHINES, PINNED
from kvclaims.spec import claims, pool
from kvclaims.spec.language import Machine, Update, becomes, value
from kvclaims.spec.vocabulary import Phase, Verdict


def altered(machine: str, action: str, *more: Update, drop: str = "") -> Machine:
    """The machine with the updates of one symbol left out of an action, and others added."""
    whole = MACHINES[machine]
    step = whole.action(action)
    kept = tuple(u for u in step.updates if u.target.symbol.name != drop)
    assert more or kept != step.updates
    return whole.with_action(replace(step, updates=(*kept, *more)))


_HARMED = becomes(claims.phase(claims.c), value(claims.PHASE, Phase.HARMED))
_LOST = becomes(claims.holds(claims.c), False)
_EMPTIED = becomes(pool.queued(pool.b), False, over=(pool.b,))

TWINS = {
    "a refusal that takes blocks": ("pool", "turn_away", (_EMPTIED,), "", "F5"),
    "a deferral that takes blocks": ("pool/requests", "defer", (_EMPTIED,), "", "F5"),
    "a soft loss that is not told": ("pool/soft", "evict", (), "phase", "P3"),
    "a counter that is not lowered": ("pool", "take", (), "free", "B1"),
    "a hash that no lookup finds": ("pool", "register", (), "entry", "B3"),
    "a reference that is not counted": ("pool", "share", (), "ref", "B2"),
    "an id that returns as the same generation": ("claims", "submit", (), "generation", "L1"),
    "a refusal without an answer": ("claims", "refuse", (), "decision", "L2"),
    "harm after release": ("claims", "lose_by_fault", (_HARMED,), "", "L4"),
    "a later loss that is not told": ("claims", "lose_by_fault", (), "lost", "L4"),
    "an expiry that deletes": ("claims", "expire", (_LOST,), "", "L6"),
}


@pytest.mark.parametrize("fault", TWINS)
def test_a_wrong_update_breaks_its_rule(fault: str) -> None:
    name, action, more, drop, rule = TWINS[fault]
    twin = altered(name.split("/")[0], action, *more, drop=drop)
    report = explore_instance(replace(PINNED[name](), machine=twin), name)
    assert report.verdict is Verdict.VIOLATED
    assert rule in {found.prop.rule for found in report.counterexamples}
