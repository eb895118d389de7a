"""How fast the engines explore the common benchmark (BlockClaims), side by side in one run.

    python benchmarks/exploration.py                    S, M and L, three runs each
    python benchmarks/exploration.py --sizes L,XL --runs 5 --engines native,symbolic
    python benchmarks/exploration.py --compare          hold it against what was kept
    python benchmarks/exploration.py --save             keep what was measured

Times are medians.  `whole` holds everything from the declaration to the report, compilation
included; `search` the search alone, where that can be told apart; `cpu` the processor's seconds of
the search (of everything, where it cannot be told apart; SPIN runs in a process of its own, where
they are not taken).  Elapsed time tells little on a machine that others use: rates are told by
`cpu` as well, and those are compared.  Every count is held against the published one: a wrong
count is an error, and no time is shown for it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Final

import figures
from figures import Figure

from kvclaims.checker import promela
from kvclaims.checker.explore import ExploreReport, explore_instance
from kvclaims.checker.finite import Instance
from kvclaims.checker.instances import blockclaims
from kvclaims.checker.native import Way, searching
from kvclaims.checker.symbolic import backend
from kvclaims.checker.symbolic import searching as searching_symbolic
from kvclaims.checker.tensors import explore_tensors


@dataclass(frozen=True)
class Size:
    instance: Instance
    states: int
    transitions: int


SIZES: Final = {
    "S": Size(blockclaims((1, 2, 3), 2, 3, 6), 6_656, 45_248),
    "M": Size(blockclaims((1, 2, 3, 1), 3, 3, 8), 211_888, 2_061_728),
    "L": Size(blockclaims((1, 2, 3, 1, 2), 3, 4, 10), 3_137_216, 35_766_240),
    "XL": Size(blockclaims((1, 2, 3, 1, 2, 3), 3, 4, 12), 27_799_360, 363_784_256),
}


@dataclass(frozen=True)
class Run:
    """One run: counts, seconds of the whole, of the search and of the processor (None where not
    told apart, or not known)."""

    states: int
    transitions: int
    whole: float
    search: float | None = None
    cpu: float | None = None


@dataclass(frozen=True)
class Row:
    size: str
    engine: str
    runs: int
    states: int
    whole: float
    search: float | None
    cpu: float | None

    @property
    def rate(self) -> float:
        """States a second, by the search where it is known alone."""
        return self.states / (self.whole if self.search is None else self.search)

    @property
    def whole_rate(self) -> float:
        return self.states / self.whole

    @property
    def cpu_rate(self) -> float | None:
        """States for each second of the processor."""
        return self.states / self.cpu if self.cpu else None


def _native(instance: Instance) -> Run:
    return Run(*searching(instance))


def _threads(instance: Instance) -> Run:
    return Run(*searching(instance, Way(jobs=2)))


def _symmetry(instance: Instance) -> Run:
    """Counts and rates are of the states that the representatives stand for."""
    return Run(*searching(instance, Way(symmetric=True)))


def _timed(explore: Callable[[], ExploreReport]) -> Run:
    cpu = time.process_time()
    report = explore()
    cpu = time.process_time() - cpu
    return Run(report.states, report.transitions, report.seconds, cpu=cpu)


def _python(instance: Instance) -> Run:
    return _timed(lambda: explore_instance(instance, "blockclaims"))


def _symbolic(instance: Instance) -> Run:
    return Run(*searching_symbolic(instance))


def _torch(instance: Instance) -> Run:
    return _timed(lambda: explore_tensors(instance, "blockclaims"))


def _spin(instance: Instance) -> Run:
    found = promela.count_with_spin(instance)
    return Run(found.states, found.transitions, found.whole_seconds, found.seconds)


def _spin_breadth(instance: Instance) -> Run:
    found = promela.count_with_spin(instance, breadth_first=True)
    return Run(found.states, found.transitions, found.whole_seconds, found.seconds)


@dataclass(frozen=True)
class Engine:
    run: Callable[[Instance], Run]
    largest: int
    """States of the largest size it is tried at."""
    missing: Callable[[], str]
    """What it lacks on this machine, empty if nothing."""


def _nothing() -> str:
    return ""


def _no_dd() -> str:
    return "" if find_spec("dd") else "dd is not installed (pip install dd)"


def _no_torch() -> str:
    return "" if find_spec("torch") else "torch is not installed (pip install torch)"


def _no_spin() -> str:
    return "" if promela.spin() else "spin and gcc are not installed (apt install spin gcc)"


ENGINES: Final = {
    "python": Engine(_python, 300_000, _nothing),
    "native": Engine(_native, 1 << 40, _nothing),
    "threads": Engine(_threads, 1 << 40, _nothing),
    "symmetry": Engine(_symmetry, 1 << 40, _nothing),
    "symbolic": Engine(_symbolic, 1 << 40, _no_dd),
    "torch": Engine(_torch, 4_000_000, _no_torch),
    "spin": Engine(_spin, 4_000_000, _no_spin),
    "spin-bfs": Engine(_spin_breadth, 4_000_000, _no_spin),
}


def measure(size: str, engine: str, runs: int) -> Row:
    """The medians of some runs.  Raises ValueError where a count is not the published one."""
    wanted = SIZES[size]
    found = [ENGINES[engine].run(wanted.instance) for _ in range(runs)]
    for run in found:
        if (run.states, run.transitions) != (wanted.states, wanted.transitions):
            raise ValueError(f"{engine} counts {run.states:,}/{run.transitions:,} at {size}")
    searches = [run.search for run in found if run.search is not None]
    spent = [run.cpu for run in found if run.cpu is not None]
    return Row(
        size,
        engine,
        runs,
        wanted.states,
        statistics.median(run.whole for run in found),
        statistics.median(searches) if searches else None,
        statistics.median(spent) if spent else None,
    )


def table(rows: Sequence[Row]) -> Iterator[str]:
    yield (
        f"{'size':4} {'engine':9} {'states':>11} {'search s':>9} {'whole s':>8} {'cpu s':>8} "
        f"{'search M/s':>10} {'whole M/s':>9} {'cpu M/s':>8} {'× python':>9} {'× spin':>8}"
    )
    for row in rows:
        search = "" if row.search is None else f"{row.search:.3f}"
        cpu = "" if row.cpu is None else f"{row.cpu:.3f}"
        cpu_rate = "" if row.cpu_rate is None else f"{row.cpu_rate / 1e6:.3f}"
        yield (
            f"{row.size:4} {row.engine:9} {row.states:11,} {search:>9} {row.whole:8.3f} "
            f"{cpu:>8} {row.rate / 1e6:10.3f} {row.whole_rate / 1e6:9.3f} {cpu_rate:>8} "
            f"{_ratio(row, rows, 'python'):>9} {_ratio(row, rows, 'spin'):>8}"
        )


def _ratio(row: Row, rows: Sequence[Row], other: str) -> str:
    """How often faster than the other engine, at this size or the largest it was run at."""
    others = [r for r in rows if r.engine == other]
    if not others:
        return "–"
    same = next((r for r in others if r.size == row.size), others[-1])
    return f"{row.rate / same.rate:.1f}{'' if same.size == row.size else ' ' + same.size}"


def figures_of(rows: Sequence[Row]) -> list[Figure]:
    """States for each second of the processor, where that is known."""
    return [
        Figure(f"{row.size} {row.engine}", row.cpu_rate, "states a CPU second", "more")
        for row in rows
        if row.cpu_rate is not None
    ]


def _some_of(known: Mapping[str, object]) -> Callable[[str], list[str]]:
    """Names with commas between them, all of them known."""

    def names(text: str) -> list[str]:
        unknown = [name for name in text.split(",") if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"unknown: {unknown[0]!r}; known: {', '.join(known)}")
        return text.split(",")

    return names


def _measured(options: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    for size in options.sizes:
        for engine in options.engines:
            lacking = ENGINES[engine].missing()
            if lacking:
                print(f"{engine} skipped: {lacking}", file=sys.stderr)
            elif SIZES[size].states <= ENGINES[engine].largest:
                rows.append(measure(size, engine, options.runs))
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    sizes, engines = _some_of(SIZES), _some_of(ENGINES)
    parser.add_argument("--sizes", type=sizes, default="S,M,L", help=f"some of {','.join(SIZES)}")
    parser.add_argument("--engines", type=engines, default=",".join(ENGINES))
    parser.add_argument("--runs", type=figures.at_least_one, default=3)
    parser.add_argument("--json", action="store_true")
    figures.options(parser, "exploration")
    options = parser.parse_args(arguments)
    before = os.getloadavg()
    rows = _measured(options)
    if options.json:
        print(json.dumps([asdict(row) | {"rate": row.rate} for row in rows], indent=2))
        return figures.finish(figures_of(rows), options)
    print("\n".join(table(rows)))
    using = f"dd.{backend()}" if find_spec("dd") else "no dd"
    print(
        f"medians of {options.runs}; {os.cpu_count()} cores, each engine but threads on one; "
        f"{using}; load {before[0]:.2f} before, {os.getloadavg()[0]:.2f} after; "
        f"{time.strftime('%Y-%m-%d %H:%M')}"
    )
    return figures.finish(figures_of(rows), options)


if __name__ == "__main__":
    sys.exit(main())
