"""SPIN counts the same states of what the declaration was written out to."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from kvclaims.checker import instances
from kvclaims.checker.explore import explore_instance
from kvclaims.checker.exports import export, target
from kvclaims.checker.finite import Instance
from kvclaims.checker.promela import count_with_spin, promela, spin
from kvclaims.spec.blockclaims import BLOCKCLAIMS
from kvclaims.spec.language import without_guard

needs_spin = pytest.mark.skipif(spin() is None, reason="needs spin and gcc (apt install spin gcc)")


def test_a_machine_is_one_process_of_indivisible_steps() -> None:
    text = promela(instances.blockclaims((1,), 1, 1, 1))
    assert text.count("proctype") == 1
    assert "byte s0; /* status(0) - (0) */" in text
    assert ":: d_step { started && (s0 == 0) -> s0 = 1; " in text
    assert text.count("/* alloc */") == 1


def test_without_checks_nothing_is_asserted() -> None:
    assert "assert" in promela(instances.blockclaims())
    assert "assert" not in promela(instances.blockclaims(), check=False)


@needs_spin
@pytest.mark.parametrize(
    ("instance", "states", "transitions", "check"),
    [
        (instances.blockclaims(), 6_656, 45_248, True),
        (instances.blockclaims((1, 2, 3, 1), 3, 3, 8), 211_888, 2_061_728, False),
        (instances.PINNED["pool/soft-keys"](), 1_236, 7_946, False),
        (instances.PINNED["groups/requests"](), 1_932, 6_220, False),
    ],
    ids=["S", "M", "pool/soft-keys", "groups/requests"],
)
def test_spin_stores_as_many_states(
    instance: Instance, states: int, transitions: int, check: bool
) -> None:
    found = count_with_spin(instance, check=check)
    assert (found.states, found.transitions, found.errors) == (states, transitions, 0)


LARGE = ("pool", "groups", "runtime")
"""Machines whose instances take seconds each."""
SMALL = ("runtime/ends", "runtime/hard", "runtime/layers", "pool-refines-claims/ways")
"""Instances of those, and of the pool seen as a machine that it refines, which do not."""


def _is_large(name: str) -> bool:
    return name.split("/", maxsplit=1)[0].partition("-")[0] in LARGE and name not in SMALL


@needs_spin
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if _is_large(name) else ())
        for name in instances.KNOWN
    ],
)
def test_spin_stores_as_many_states_of_every_instance(name: str) -> None:
    """What this checker counts is pinned by hand in `test_explore` and `test_composed`."""
    instance = instances.KNOWN[name]()
    ours = explore_instance(instance, name)
    found = count_with_spin(instance, optimized=False)
    assert (found.states, found.transitions) == (ours.states, ours.transitions)


@needs_spin
def test_a_written_file_is_what_spin_reads(tmp_path: Path) -> None:
    """The commands that `--export` prints, run as printed."""
    path = tmp_path / "claims.pml"
    found = export("claims", {}, target(str(path), "claims"))
    command = found.reading.removeprefix("check it with: ")
    ran = subprocess.run(
        ["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert re.search(r"\b733 states, stored", ran.stdout), "732, and the choice of the initial one"
    assert "errors: 0" in ran.stdout


@needs_spin
def test_spin_finds_a_broken_twin() -> None:
    twin = replace(instances.blockclaims(), machine=without_guard(BLOCKCLAIMS, "accept", 1))
    assert count_with_spin(twin, check=True).errors == 1
