"""The tensor engine counts what the explorer counts, with torch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvclaims.checker import instances, tensors
from kvclaims.checker.explore import explore_instance
from kvclaims.checker.tensors import explore_tensors
from kvclaims.spec.interface import BadOperation, EngineMissing
from kvclaims.spec.language import without_guard
from kvclaims.spec.vocabulary import Verdict

torch = pytest.importorskip("torch", reason="the tensor engine needs torch (pip install torch)")

QUICK = ("blockclaims", "claims", "tiers/claims", "owners/quota", "elastic", "trace/facts")


@pytest.mark.parametrize("name", QUICK)
def test_counts_of_pinned_instances_are_the_explorers(name: str) -> None:
    instance = instances.PINNED[name]()
    found, expected = explore_tensors(instance, name), explore_instance(instance, name)
    assert (found.states, found.transitions) == (expected.states, expected.transitions)
    assert (found.depth, dict(found.fired)) == (expected.depth, dict(expected.fired))
    assert found.verdict is Verdict.HOLDS


@pytest.mark.parametrize("mapped", [True, False])
def test_size_m_has_the_published_counts(mapped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a map of the product, and past that with a sorted tensor."""
    if not mapped:
        monkeypatch.setattr(tensors, "_MAP", 0)
    report = explore_tensors(instances.blockclaims((1, 2, 3, 1), 3, 3, 8), "M")
    assert (report.states, report.transitions) == (211_888, 2_061_728)
    assert report.memory["visited"] == ("map" if mapped else "sorted")


@pytest.mark.parametrize(
    ("name", "action", "guard"), [("blockclaims", "accept", 1), ("claims", "materialize", 1)]
)
def test_a_broken_twin_is_caught(name: str, action: str, guard: int) -> None:
    instance = instances.PINNED[name]()
    twin = replace(instance, machine=without_guard(instance.machine, action, guard))
    found, expected = explore_tensors(twin, name), explore_instance(twin, name)
    assert found.verdict is Verdict.VIOLATED
    assert [c.prop for c in found.counterexamples] == [c.prop for c in expected.counterexamples]
    assert (found.states, found.transitions) == (expected.states, expected.transitions)


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(BadOperation, match="unknown device 'tpu'"):
        explore_tensors(instances.blockclaims(), "S", device="tpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there_is_named() -> None:
    with pytest.raises(EngineMissing, match="torch finds no GPU here"):
        explore_tensors(instances.blockclaims(), "S", device="cuda")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use")
def test_a_gpu_counts_the_same() -> None:
    report = explore_tensors(instances.blockclaims((1, 2, 3, 1, 2), 3, 4, 10), "L", device="cuda")
    assert (report.states, report.transitions) == (3_137_216, 35_766_240)
