"""Work spread over Ray: a partitioned search, and tasks called by name (extra `ray`).

Each process of a search owns the states whose number hashes to it and keeps only those in its
set.  A level has two halves: every process makes the successors of its own states and sorts them
by owner, then every process takes in what the others found for it; the driver moves references
alone.  Small filters leave most repetitions out before they are sent.

Without RAY_ADDRESS a small cluster is started on this machine and stopped again.  What processes
say to each other Ray encodes with pickle; nothing of it is read from or kept in a file of ours.
"""

from __future__ import annotations

import importlib
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvclaims.checker.explore import ExploreReport
from kvclaims.checker.instances import instance
from kvclaims.checker.machinecode import CONTROL, Build, Kernel
from kvclaims.checker.native import CHUNK, LeftDomain, Search, Way, address, explore_native
from kvclaims.checker.verdicts import Progress, Several
from kvclaims.checker.visitedcode import EMPTY
from kvclaims.spec.interface import BadOperation, EngineMissing

if TYPE_CHECKING:
    from kvclaims.checker.audit import AuditReport

STORE: Final = 100 << 20
"""Bytes of shared memory for what is on its way, in a cluster started here."""

_FILTER: Final = 1 << 18
"""Places in a filter of what was sent lately."""

_OUT: Final = 1 << 18
"""Successors that are sorted by owner at once, at least."""

_OWNER: Final = np.uint64(0xD6E8FEB86659FD93)
"""An odd multiplier, other than the hash table's: a partition's numbers must spread there."""

_FOUND, _LIMIT, _MASK, _SHIFT, _EVENTS, _BROKEN, _WHOLE = range(len(CONTROL))

Array = np.ndarray[Any, np.dtype[Any]]


@contextmanager
def cluster(workers: int) -> Iterator[Any]:
    """The module `ray`, connected.  Raises EngineMissing where it is not installed."""
    # Ray reports on its use over the network unless told otherwise.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        ray = importlib.import_module("ray")
    except ImportError:
        raise EngineMissing("spreading work needs Ray (pip install 'kvclaims[ray]')") from None
    if ray.is_initialized():
        yield ray
        return
    if os.environ.get("RAY_ADDRESS"):
        ray.init(log_to_driver=False, logging_level="ERROR")
    else:
        ray.init(
            num_cpus=workers,
            object_store_memory=STORE,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
        )
    try:
        yield ray
    finally:
        ray.shutdown()


def ray_workers(text: str) -> int:
    """How many workers `ray:N` asks for.  Raises BadOperation for anything else."""
    kind, _, number = text.partition(":")
    if kind != "ray" or not number.isdigit() or not int(number):
        raise BadOperation(f"workers are given as ray:N with N at least 1, not {text!r}")
    return int(number)


# --- tasks -------------------------------------------------------------------------------


def map_tasks(
    function: str, arguments: Sequence[tuple[Any, ...]], workers: int
) -> Iterator[tuple[int, Any]]:
    """Call `function` (`module:name`) with each tuple of arguments, on `workers` processes.

    Yields the position of the arguments and what was returned, whichever is ready first.  What a
    task raises is raised here.
    """
    with cluster(workers) as ray:
        call = ray.remote(called).options(num_cpus=1)
        tasks = {call.remote(function, given): i for i, given in enumerate(arguments)}
        while tasks:
            (ready, *_), _ = ray.wait(list(tasks), num_returns=1)
            yield tasks.pop(ready), ray.get(ready)


def called(function: str, arguments: tuple[Any, ...]) -> Any:
    """In a worker: find the function by its name and call it."""
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)(*arguments)


def fuzz_seeds(
    engine: str,
    steps: int | None,
    seconds: float | None,
    seeds: Sequence[int],
    workers: int,
    progress: Progress,
    folder: Path,
) -> Several:
    """One fuzzing run for each seed, each in a task of its own."""
    given = [(engine, steps, seconds, seed, str(folder.absolute())) for seed in seeds]
    done: dict[int, Any] = {}
    for place, report in map_tasks(f"{__name__}:fuzz_seed", given, workers):
        done[place] = report
        progress(f"{len(done)}/{len(given)} seeds, {seeds[place]}: {report.verdict}")
    return Several(
        "seeds", tuple(done[i] for i in sorted(done)), sums=("runs", "operations", "steps")
    )


def fuzz_seed(engine: str, steps: int | None, seconds: float | None, seed: int, folder: str) -> Any:
    """The report of one seed."""
    from kvclaims.checker import engines, fuzz

    found, _ = engines.ready(engine)
    return fuzz.fuzz(found, steps, seconds, seed, lambda _: None, Path(folder))


def audit_traces(traces: Sequence[Path], workers: int, progress: Progress) -> AuditReport:
    """Fold many traces at once, each a row of a Ray dataset; in the order in which they are named.

    Raises TraceError for the first of them that is not whole or cannot be read.
    """
    from kvclaims.checker.audit import AuditReport
    from kvclaims.spec.telemetry import TraceError

    done: dict[int, Any] = {}
    with cluster(workers):
        try:
            data = importlib.import_module("ray.data")
        except ImportError as error:
            raise EngineMissing(
                f"many traces at once need Ray's datasets (pip install 'kvclaims[ray]'): {error}"
            ) from None
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        data.DataContext.get_current().enable_progress_bars = False
        rows = [{"place": i, "trace": str(path.absolute())} for i, path in enumerate(traces)]
        found = data.from_items(rows, override_num_blocks=len(rows)).map(audit_trace)
        for row in found.iter_rows():
            done[row["place"]] = row
            progress(f"{len(done)}/{len(rows)} traces, {traces[row['place']].name}")
    if wrong := [done[i]["wrong"] for i in sorted(done) if done[i]["wrong"]]:
        raise TraceError(wrong[0])
    return AuditReport(tuple(run for i in sorted(done) for run in done[i]["runs"]))


def audit_trace(row: dict[str, Any]) -> dict[str, Any]:
    """In a worker: the runs of one trace, or why it is rejected."""
    from kvclaims.checker.audit import audit
    from kvclaims.spec.telemetry import TraceError

    try:
        runs = audit([Path(row["trace"])]).runs
    except (BadOperation, TraceError) as error:
        return {"place": row["place"], "runs": [], "wrong": str(error)}
    return {"place": row["place"], "runs": list(runs), "wrong": ""}


# --- a partitioned search ----------------------------------------------------------------


@dataclass(frozen=True)
class Counts:
    """What one process counted of its states."""

    states: int
    depth: int
    fired: tuple[int, ...]
    odd: bool
    """Some rule was broken, or some value left its domain."""
    taken: int
    """Bytes of its set and its levels."""


def explore_ray(
    machine: str,
    settings: Mapping[str, str],
    workers: int,
    progress: Progress | None = None,
    budget: int | None = None,
) -> ExploreReport:
    """Explore an instance on `workers` processes, each with `budget` bytes at most.

    Raises BadOperation as `explore_native` does, and EngineMissing without Ray.  If a rule is
    broken the shortest run is left to the native engine.
    """
    start = time.perf_counter()
    chosen = instance(machine, settings)
    with cluster(workers) as ray:
        kind = ray.remote(Partition).options(num_cpus=1)
        parts = [kind.remote(machine, dict(settings), i, workers, budget) for i in range(workers)]
        sizes = ray.get([part.start.remote() for part in parts])
        states = 0
        while any(sizes):
            states += sum(sizes)
            if progress:
                rate = states / (time.perf_counter() - start) / 1e6
                progress(f"{machine}: {states:,} states, {rate:.2f} million states/s")
            sent = [part.expand.options(num_returns=workers).remote() for part in parts]
            rows = sent if workers > 1 else [[one] for one in sent]
            sizes = ray.get(
                [part.take.remote(*(row[i] for row in rows)) for i, part in enumerate(parts)]
            )
        counts: list[Counts] = ray.get([part.counts.remote() for part in parts])
        version = ray.__version__
    odd = any(part.odd for part in counts)
    broken = (
        explore_native(chosen, machine, None, Way(budget=budget)).counterexamples if odd else ()
    )
    if odd and not broken:
        raise LeftDomain(f"{machine}: a value leaves its domain")
    names = [action.name for action in chosen.machine.actions]
    fired = {name: sum(part.fired[i] for part in counts) for i, name in enumerate(names)}
    return ExploreReport(
        machine=machine,
        states=sum(part.states for part in counts),
        transitions=sum(fired.values()),
        depth=max(part.depth for part in counts),
        fired=fired,
        counterexamples=broken,
        seconds=time.perf_counter() - start,
        engine=f"explicit, native (LLVM) on Ray {version}, {workers} processes",
        settings=dict(settings),
        memory={"taken": sum(part.taken for part in counts)},
    )


class Partition:
    """The states that one process owns: a native search whose levels come from everywhere."""

    def __init__(
        self, machine: str, settings: Mapping[str, str], number: int, of: int, budget: int | None
    ) -> None:
        self.number = number
        self.of = of
        self.search = Search(instance(machine, settings), machine, Way(budget=budget), None)
        self.sender = Kernel(self.search.grounded, self.search.where, Build("sent"))
        self.filter: Array = np.full(_FILTER, EMPTY, np.int64)
        self.odd = bool(self.search.totals.broken)
        while len(self.search.hands[0].next) < _OUT:
            self.search.hands[0].grow()

    def start(self) -> int:
        """Keep the initial states that are its own; how many there are."""
        level = self.search.level
        level.front = np.ascontiguousarray(level.front[self._owners(level.front) == self.number])
        return len(level.front)

    def expand(self) -> Any:
        """The successors of the level, one array for each process."""
        search, level = self.search, self.search.level
        hand = search.hands[0]
        sent: list[list[Array]] = [[] for _ in range(self.of)]
        place, limit = 0, len(hand.next) - search.width - 1
        while place < len(level.front):
            control = hand.control
            control[:] = (0, limit, 0, 65 - _FILTER.bit_length(), 0, 0, 0)
            to = min(place + CHUNK, len(level.front))
            stopped = self.sender.expand(
                address(level.front), place, to, address(self.filter), address(hand.next),
                address(control), address(hand.fired), address(hand.events), address(hand.broken),
            )  # fmt: skip
            self.odd |= bool(control[_EVENTS] or control[_BROKEN])
            level.sound += stopped - place - int(control[_BROKEN])
            found = hand.next[: control[_FOUND]]
            owners = self._owners(found)
            for owner, codes in enumerate(sent):
                codes.append(found[owners == owner])
            place = stopped
        search.totals.states += level.sound
        search.totals.fired += hand.fired
        hand.fired[:] = 0
        if level.sound:
            search.totals.depth = level.depth
        whole = [np.concatenate([hand.next[:0], *codes]) for codes in sent]
        return whole if self.of > 1 else whole[0]

    def take(self, *found: Array) -> int:
        """Begin the next level with those that are new; how many there are."""
        for codes in found:
            for first in range(0, len(codes), CHUNK):
                self.search.absorb(codes[first : first + CHUNK])
        self.search.advance()
        return len(self.search.level.front)

    def counts(self) -> Counts:
        totals = self.search.totals
        fired = tuple(int(count) for count in totals.fired)
        return Counts(totals.states, totals.depth, fired, self.odd, self.search.taken())

    def _owners(self, codes: Array) -> Array:
        mixed = codes.astype(np.uint64) * _OWNER
        return (mixed >> np.uint64(33)) % np.uint64(self.of)
