"""Random runs of the reference: what they show is pinned, and any other behaviour shows."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest

from kvclaims.checker import engines
from kvclaims.checker.mutatecode import RUNS
from kvclaims.checker.recorded import CROWDED, LENGTH, SPOILED, Recorded, differing, play, record
from kvclaims.checker.scenes import scenes
from kvclaims.spec.interface import FCFS, PRIORITY, Engine

ALL = "4d4ac3975db39127"
"""The digest of all recorded runs and scenes.  It changes with the behaviour of the reference, and
with what is drawn; mutants that no check objects to are killed by it (`kvclaims mutate`)."""


@pytest.fixture(scope="module")
def reference() -> Engine:
    return engines.find("reference")


@pytest.fixture(scope="module")
def runs(reference: Engine) -> tuple[Recorded, ...]:
    return tuple(record(reference, number) for number in range(RUNS))


def test_what_the_reference_shows_is_as_pinned(
    reference: Engine, runs: tuple[Recorded, ...]
) -> None:
    played = [play(reference, number, scene) for number, scene in enumerate(scenes(), RUNS)]
    whole = hashlib.sha256("".join(run.digest for run in (*played, *runs)).encode())
    assert whole.hexdigest()[:16] == ALL


def test_the_reference_shows_the_same_again(reference: Engine, runs: tuple[Recorded, ...]) -> None:
    assert list(differing(reference, runs[:40])) == []


def test_another_answer_is_seen_at_its_operation(
    reference: Engine, runs: tuple[Recorded, ...]
) -> None:
    seen = list(runs[0].seen)
    seen[6] = "something else"
    other = replace(runs[0], seen=tuple(seen))
    ((run, where),) = differing(reference, (other, runs[1]))
    assert run is other
    assert where == f"run 0, operation 7: {other.operations[6]}"


def test_what_is_left_at_the_end_counts(reference: Engine, runs: tuple[Recorded, ...]) -> None:
    other = replace(runs[0], seen=(*runs[0].seen[:-1], "something else"))
    assert len(other.seen) == len(other.operations) + 1 >= LENGTH + 1
    ((_, where),) = differing(reference, (other,))
    assert where == "run 0: when it is closed"


def test_runs_have_operations_that_nobody_should_accept(runs: tuple[Recorded, ...]) -> None:
    spoiled = {run.operations[i].op for run in runs for i in run.spoiled}
    assert spoiled == set(SPOILED)
    assert all(len([*run.sound]) == len(run.operations) - len(run.spoiled) for run in runs)


def test_crowded_runs_have_little_room(runs: tuple[Recorded, ...]) -> None:
    crowded = [run.config for run in runs[CROWDED:]]
    assert {config.block_size for config in crowded} == {2}
    assert {config.usable for config in crowded} == set(range(5, 10))
    assert {config.in_flight for config in crowded} == {1, 2, 3}
    assert {config.policy for config in crowded} == {FCFS, PRIORITY}
    assert {config.token_budget for config in crowded} == {0, 3, 5}
