"""Exploration: exact counts, pinned by hand, and shortest counterexamples."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import pytest

from kvclaims.checker import instances
from kvclaims.checker.explore import (
    counterexamples,
    explore,
    explore_instance,
    search,
)
from kvclaims.checker.finite import Instance, compile_instance
from kvclaims.checker.native import Way, explore_native
from kvclaims.spec.interface import BadOperation
from kvclaims.spec.language import (
    Action,
    Guard,
    Machine,
    Property,
    Symbol,
    becomes,
    ne,
    value,
    without_guard,
)
from kvclaims.spec.pool import OUTCOME, POOL, outcome, r
from kvclaims.spec.vocabulary import Verdict

COUNTS = {
    # Published for the common benchmark, size S.
    "blockclaims": (6_656, 45_248),
    # Counted by this explorer; they change only when a machine or an instance changes.
    "claims": (732, 3_086),
    "claims/two": (19_456, 106_020),
    "pool": (14_867, 98_513),
    "pool/soft": (9_060, 63_253),
    "pool/requests": (8_179, 61_047),
    "pool/keys": (1_908, 11_724),
    "pool/soft-keys": (1_236, 7_946),
    "pool/soft-copies": (4_693, 39_037),
    "pool/ways": (191, 755),
    "admission": (3_846, 28_310),
    "admission/claims": (108, 488),
    "admission/congestion": (2_893, 16_316),
    "admission/growth": (7_986, 48_095),
    "admission/sizes": (108, 426),
    "groups": (4_332, 12_917),
    "groups/claims": (1_325, 3_944),
    "groups/soft": (1_272, 3_636),
    "groups/requests": (1_932, 6_220),
    "groups/two-claims": (332, 868),
    "groups/prompts": (4_894, 15_684),
    "groups/lengths": (455, 947),
    "groups/foreign": (695, 1_843),
    "groups/mixed": (450, 1_359),
    "groups/promised": (11_562, 48_998),
    "groups/windows": (12_206, 40_612),
    "groups/skipped": (6_480, 19_539),
    "groups/two-soft": (522, 1_563),
    "groups/same": (2_615, 9_333),
    "groups/shared": (1_987, 6_341),
    "arbitration": (297, 1_148),
    "arbitration/spare": (21, 32),
    "arbitration/holds": (289, 1_122),
    "feasible": (258, 2_368),
    "written": (455, 3_697),
    "written/keys": (1_500, 12_889),
    "written/blocks": (2_196, 23_700),
    "written/claims": (369, 2_856),
    "written/pair": (246, 1_994),
    "written/told": (1_764, 14_784),
    "owners": (2_880, 25_856),
    "owners/quota": (5_296, 51_952),
    "owners/cap": (5_904, 55_320),
    "owners/soft": (1_104, 8_880),
    "owners/mixed": (384, 2_528),
    "tiers": (458, 2_842),
    "tiers/claims": (9_216, 72_192),
    "elastic": (1_056, 4_780),
    "elastic/blocks": (808, 3_806),
    "elastic/claims": (2_304, 13_920),
    "elastic/jobs": (6_144, 43_776),
    "elastic/promises": (9_216, 72_576),
    "elastic/pair": (144, 476),
    "elastic/null": (96, 316),
    "trace": (7_919, 26_448),
    "trace/facts": (1_405, 3_646),
    "trace/clock": (954, 3_194),
    "trace/foreign": (1_079, 3_458),
    "events": (2_934, 13_328),
    "events/tiers": (2_966, 13_440),
    "events/keys": (908, 3_709),
    "ends": (75, 217),
    "ends/jobs": (341, 1_204),
    "ends/blocks": (81, 246),
    "ends/requests": (369, 1_399),
    "ends/at-once": (12, 27),
}


@pytest.mark.parametrize("name", instances.PINNED)
def test_counts_of_pinned_instances(name: str) -> None:
    report = explore(name)
    assert report.verdict is Verdict.HOLDS
    assert (report.states, report.transitions) == COUNTS[name]


def test_size_m_of_the_common_benchmark_has_the_published_counts() -> None:
    settings = {"sizes": "1,2,3,1", "requests": "3", "growth": "3", "pool": "8"}
    report = explore("blockclaims", settings)
    assert (report.states, report.transitions) == (211_888, 2_061_728)


@pytest.mark.parametrize("machine", instances.MACHINES)
def test_every_action_was_taken_in_some_pinned_instance(machine: str) -> None:
    fired: dict[str, int] = {}
    for name in instances.PINNED:
        if name.split("/")[0] == machine:
            for action, times in explore(name).fired.items():
                fired[action] = fired.get(action, 0) + times
    assert all(fired.values()), fired


def test_a_broken_rule_is_shown_by_a_shortest_run() -> None:
    evict = POOL.action("evict")
    (index,) = [i for i, g in enumerate(evict.guards) if "hard claim" in g.why]
    broken = replace(instances.pool(), machine=without_guard(POOL, "evict", index))
    report = explore_instance(broken, "pool")
    assert report.verdict is Verdict.VIOLATED
    shortest = next(c for c in report.counterexamples if c.prop.rule == "P1")
    # admit, take, register, drop, submit, accept, cover — and the eviction itself
    labels = [label.split("(")[0] for label, _ in shortest.steps]
    assert labels[-1] == "evict"
    assert len(labels) == 8
    assert any("key(block" in line for line in shortest.lines())


def test_an_instance_in_which_nothing_can_happen_is_vacuous() -> None:
    report = explore("blockclaims", {"sizes": "1", "requests": "0", "pool": "0"})
    assert report.verdict is Verdict.HOLDS  # the claim can still be offered and rejected
    empty = replace(
        instances.blockclaims(),
        sizes={"Claim": 0, "Request": 0},
        rigid={"size": {}, "growth": {(): 1}, "pool": {(): 1}},
    )
    assert explore_instance(empty, "blockclaims").verdict is Verdict.VACUOUS


def test_one_block_more_shows_what_one_block_less_did_not() -> None:
    """Sensitivity: with one usable block no two claims and a request can compete."""
    fired = {n: explore("pool", {"blocks": str(n)}).fired["forsake"] for n in (1, 2)}
    assert fired[1] < fired[2]


def test_initial_states_are_checked_too() -> None:
    told = Property(
        "F4", "never pending", ne(outcome(r), value(OUTCOME, "pending")), "a false rule"
    )
    from kvclaims.spec.language import every

    wrong = replace(POOL, properties=(replace(told, formula=every(r, told.formula)),))
    compiled = compile_instance(replace(instances.pool(), machine=wrong))
    (found,) = counterexamples(compiled, search(compiled))
    assert found.steps == ()


def test_an_initial_queue_with_the_null_block_breaks_b6() -> None:
    from kvclaims.spec.pool import b, queued

    start = tuple(
        becomes(queued(b), True, over=(b,)) if u.target.symbol is queued else u for u in POOL.init
    )
    compiled = compile_instance(replace(instances.pool(), machine=replace(POOL, init=start)))
    broken = {c.prop.rule for c in counterexamples(compiled, search(compiled))}
    assert "B6" in broken


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("nowhere", {}, "unknown machine 'nowhere'"),
        ("pool", {"colour": "3"}, "pool has no setting 'colour'"),
        ("pool", {"blocks": "-1"}, "blocks must be a whole number of at least 0, not '-1'"),
        ("pool", {"blocks": "1,2"}, "blocks takes one number"),
        ("pool/soft", {"blocks": "1"}, "pool/soft takes no settings"),
    ],
)
def test_wrong_settings_are_named(name: str, settings: dict[str, str], message: str) -> None:
    with pytest.raises(BadOperation, match=message):
        explore(name, settings)


# --- steps that change nothing ------------------------------------------------------------


def _toggle() -> Instance:
    """A switch that may be switched on again, and a rule that forbids just that."""
    on = Symbol("on", ())
    step = Action("switch", (), (), (becomes(on(), True),), "it is on")
    rule = Property("L1", "not again", ~on(), "What is on is not switched on.", on="switch")
    return Instance(
        Machine("switch", "a switch", (on,), (becomes(on(), False),), (step,), (rule,)), {}
    )


@pytest.mark.parametrize("engine", ["python", "native", "symmetric"])
def test_a_step_that_changes_nothing_is_checked_and_no_transition(engine: str) -> None:
    report = {
        "python": lambda: explore_instance(_toggle(), "switch"),
        "native": lambda: explore_native(_toggle(), "switch"),
        "symmetric": lambda: explore_native(_toggle(), "switch", None, Way(symmetric=True, jobs=2)),
    }[engine]()
    assert (report.states, report.transitions) == (2, 1)
    assert report.verdict is Verdict.VIOLATED
    (found,) = report.counterexamples
    assert [label for label, _ in found.steps] == ["switch", "switch"]


@pytest.mark.skipif(find_spec("dd") is None, reason="the symbolic engine needs dd (pip install dd)")
def test_decision_diagrams_check_steps_that_change_nothing() -> None:
    from kvclaims.checker.symbolic import explore_symbolic

    report = explore_symbolic(_toggle(), "switch")
    assert (report.states, report.transitions) == (2, 1)
    assert report.verdict is Verdict.VIOLATED


def test_a_guard_keeps_the_step_that_changes_nothing_away() -> None:
    toggle = _toggle()
    (step,) = toggle.machine.actions
    on = toggle.machine.symbols[0]
    guarded = replace(step, guards=(Guard(("L1",), ~on(), "it is off"),))
    sound = replace(toggle, machine=toggle.machine.with_action(guarded))
    assert explore_instance(sound, "switch").verdict is Verdict.HOLDS
    assert explore_native(sound, "switch").verdict is Verdict.HOLDS
