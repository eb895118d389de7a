"""On Ray: a partitioned search counts the same, and tasks give the same verdicts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvclaims.checker import distributed
from kvclaims.checker.audit import audit
from kvclaims.checker.distributed import (
    Partition,
    audit_trace,
    audit_traces,
    explore_ray,
    fuzz_seeds,
    map_tasks,
    ray_workers,
)
from kvclaims.checker.engines import find
from kvclaims.checker.explore import explore
from kvclaims.checker.prove import Ways, prove
from kvclaims.spec.interface import (
    BadOperation,
    ClaimSpec,
    PoolConfig,
    Predicate,
    PredicateKind,
    RequestSpec,
)
from kvclaims.spec.operations import drain
from kvclaims.spec.telemetry import TraceError
from kvclaims.spec.vocabulary import Verdict

MEDIUM = {"sizes": "1,2,3,1", "requests": "3", "growth": "3", "pool": "8"}


@pytest.fixture
def traces(tmp_path: Path) -> list[Path]:
    """The traces of four runs of the reference, a claim and a request each."""
    paths = []
    for number in range(4):
        runtime = find("reference").open(PoolConfig(8, 16), f"run-{number}")
        tokens = tuple(range(16 * (number + 2)))
        predicate = Predicate(PredicateKind.LEADING, number + 1)
        runtime.declare(ClaimSpec("keep", tokens, predicate))
        runtime.submit(RequestSpec("active", tokens))
        drain(runtime)
        runtime.close()
        path = tmp_path / f"trace-{number}.jsonl"
        path.write_text("\n".join(event.to_json() for event in runtime.events()))
        paths.append(path)
    return paths


# --- without Ray -------------------------------------------------------------------------


def test_every_state_is_owned_by_one_partition_and_found_by_it() -> None:
    """The halves of a level, called here in one process."""
    parts = [Partition("blockclaims", {}, i, 3, None) for i in range(3)]
    sizes = [part.start() for part in parts]
    assert sum(sizes) == 1
    while any(sizes):
        rows = [part.expand() for part in parts]
        for row in rows:
            for owner, codes in enumerate(row):
                assert set(parts[0]._owners(codes).tolist()) <= {owner}
        sizes = [part.take(*(row[i] for row in rows)) for i, part in enumerate(parts)]
    counts = [part.counts() for part in parts]
    assert sum(part.states for part in counts) == 6_656
    assert sum(sum(part.fired) for part in counts) == 45_248
    assert max(part.depth for part in counts) == explore("blockclaims").depth
    assert all(part.states > 1_800 for part in counts), "owners share the states evenly"


def test_what_is_taken_in_twice_counts_once() -> None:
    part = Partition("blockclaims", {}, 0, 1, None)
    part.start()
    found = part.expand()
    assert part.take(found, np.repeat(found, 3)) == len(set(found.tolist()))


@pytest.mark.parametrize("text", ["ray", "ray:0", "ray:x", "dask:2", "2"])
def test_workers_are_given_as_ray_and_their_number(text: str) -> None:
    with pytest.raises(BadOperation, match="workers are given as ray:N"):
        ray_workers(text)


# --- on two workers ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_workers() -> Iterator[None]:
    pytest.importorskip("ray", reason="spreading work needs Ray (pip install 'kvclaims[ray]')")
    with distributed.cluster(2):
        yield


@pytest.mark.usefixtures("two_workers")
@pytest.mark.parametrize(
    ("machine", "settings", "states", "transitions"),
    [
        ("blockclaims", {}, 6_656, 45_248),
        ("blockclaims", MEDIUM, 211_888, 2_061_728),
        ("pool/soft-keys", {}, 1_236, 7_946),
    ],
)
def test_two_workers_count_the_same(
    machine: str, settings: dict[str, str], states: int, transitions: int
) -> None:
    report = explore_ray(machine, settings, 2)
    assert report.verdict is Verdict.HOLDS
    assert (report.states, report.transitions) == (states, transitions)


@pytest.mark.usefixtures("two_workers")
def test_obligations_have_the_same_verdicts_as_tasks() -> None:
    here = prove("L1", "claims", None, Ways())
    there = prove("L1", "claims", None, Ways(workers=2))
    assert [(o.name, o.action, o.verdict) for o in there.obligations] == [
        (o.name, o.action, o.verdict) for o in here.obligations
    ]
    assert there.verdict is Verdict.PROVED


@pytest.mark.usefixtures("two_workers")
def test_each_seed_is_a_task(tmp_path: Path) -> None:
    report = fuzz_seeds("reference", 60, None, (7, 8), 2, lambda _: None, tmp_path)
    assert [part.to_json()["seed"] for part in report.parts] == [7, 8]
    assert report.to_json()["operations"] == 120


def test_a_trace_is_a_row_with_its_runs_or_what_is_wrong_with_it(traces: list[Path]) -> None:
    """What a worker does, called here."""
    row = audit_trace({"place": 3, "trace": str(traces[0])})
    assert (row["place"], [run.run_id for run in row["runs"]], row["wrong"]) == (3, ["run-0"], "")
    traces[0].write_text(traces[0].read_text().rpartition("\n{")[0])
    row = audit_trace({"place": 3, "trace": str(traces[0])})
    assert row["runs"] == []
    assert "ends without trace_closed" in row["wrong"]


@pytest.mark.usefixtures("two_workers")
def test_many_traces_are_folded_at_once_as_one_by_one(traces: list[Path]) -> None:
    pytest.importorskip("pandas", reason="Ray's datasets need pandas (kvclaims[ray])")
    told: list[str] = []
    there = audit_traces(traces, 2, told.append)
    here = audit(traces)
    assert there.to_json() == here.to_json()
    assert [run.run_id for run in there.runs] == ["run-0", "run-1", "run-2", "run-3"]
    assert len(told) == 4
    traces[2].write_text("not a trace")
    with pytest.raises(TraceError, match=r"trace-2\.jsonl"):
        audit_traces(traces, 2, told.append)


@pytest.mark.usefixtures("two_workers")
def test_what_a_task_raises_is_raised_here() -> None:
    with pytest.raises(BadOperation, match="workers are given as ray:N"):
        list(map_tasks("kvclaims.checker.distributed:ray_workers", [("ray:2",), ("x",)], 2))
