"""Decision diagrams count the same states as the searches, from the same declaration."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvclaims.checker import instances
from kvclaims.checker.explore import explore_instance
from kvclaims.spec.language import without_guard
from kvclaims.spec.vocabulary import Verdict

pytest.importorskip("dd", reason="the symbolic engine needs dd (pip install dd)")

from kvclaims.checker import symbolic
from kvclaims.checker.symbolic import explore_symbolic

CUDD = symbolic.backend() == "cudd"
QUICK = ("blockclaims", "claims", "pool/soft-keys")


@pytest.mark.parametrize("name", instances.PINNED if CUDD else QUICK)
def test_counts_of_pinned_instances_are_the_explorers(name: str) -> None:
    instance = instances.PINNED[name]()
    found, expected = explore_symbolic(instance, name), explore_instance(instance, name)
    assert (found.states, found.transitions) == (expected.states, expected.transitions)
    assert (found.depth, dict(found.fired)) == (expected.depth, dict(expected.fired))
    assert found.verdict is Verdict.HOLDS


@pytest.mark.skipif(not CUDD, reason="needs dd with CUDD, pure Python diagrams take minutes")
@pytest.mark.parametrize(
    ("settings", "states", "transitions"),
    [
        (((1, 2, 3, 1), 3, 3, 8), 211_888, 2_061_728),
        (((1, 2, 3, 1, 2), 3, 4, 10), 3_137_216, 35_766_240),
    ],
)
def test_the_common_benchmark_has_the_published_counts(
    settings: tuple[tuple[int, ...], int, int, int], states: int, transitions: int
) -> None:
    report = explore_symbolic(instances.blockclaims(*settings), "blockclaims")
    assert (report.states, report.transitions) == (states, transitions)


def test_pure_python_diagrams_count_the_same() -> None:
    report = explore_symbolic(instances.blockclaims(), "S", using="autoref")
    assert (report.states, report.transitions) == (6_656, 45_248)
    assert report.engine == "symbolic, dd.autoref"


@pytest.mark.parametrize("using", ["autoref", symbolic.backend()])
def test_counting_node_by_node_is_exact(using: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symbolic, "_EXACT_BITS", 0)
    report = explore_symbolic(instances.blockclaims(), "S", using=using)
    assert (report.states, report.transitions) == (6_656, 45_248)


@pytest.mark.parametrize(
    ("name", "action", "guard"), [("blockclaims", "accept", 1), ("claims", "materialize", 1)]
)
def test_a_broken_twin_is_caught(name: str, action: str, guard: int) -> None:
    instance = instances.PINNED[name]()
    twin = replace(instance, machine=without_guard(instance.machine, action, guard))
    found, expected = explore_symbolic(twin, name), explore_instance(twin, name)
    assert found.verdict is Verdict.VIOLATED
    assert [c.prop for c in found.counterexamples] == [c.prop for c in expected.counterexamples]
    assert (found.states, found.transitions) == (expected.states, expected.transitions)
