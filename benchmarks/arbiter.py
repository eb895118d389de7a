"""Whose claim on the memory wins?  Fourteen mechanisms on the arbiter study of arXiv 2605.24259.

    python benchmarks/arbiter.py
    python benchmarks/arbiter.py --usable 100 --json
    python benchmarks/arbiter.py --compare              hold it against what was kept (--save)

80 usable blocks; 60 are resident in two spans of 30, worth 17 each while they last; a request of 70
blocks, worth 13, comes in chunks of 20, 20, 20 and 10.  Costs: waiting 1.0 a step, offload 0.05 a
block, computing again 0.10 a block, routing 4.0, more capacity 0.20 a block.  Utility is what was
kept and served, less what it cost.  The oracle takes the mechanism of greatest utility among those
that keep the answer exact.

The setting, the costs and the three attention modes are the paper's; which mechanisms there are and
how each is run are ours.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from typing import Final

import figures
from figures import Figure

SPAN_VALUE: Final = 17.0
ACTIVE_VALUE: Final = 13.0
WAIT: Final = 1.0
OFFLOAD: Final = 0.05
RECOMPUTE: Final = 0.10
ROUTE: Final = 4.0
CAPACITY: Final = 0.20

PATIENCE: Final = 3
"""Steps that a mechanism waits, where waiting is all it does."""


@dataclass(frozen=True)
class Case:
    """The study's setting, in blocks."""

    usable: int = 80
    spans: tuple[int, ...] = (30, 30)
    chunks: tuple[int, ...] = (20, 20, 20, 10)

    @property
    def active(self) -> int:
        return sum(self.chunks)

    def over(self, live: int | None = None) -> int:
        """Blocks missing for this much live KV beside all residents."""
        return max(0, sum(self.spans) + (self.active if live is None else live) - self.usable)


@dataclass
class Run:
    """What a mechanism did.  `lost` blocks of each span went without anybody's leave; `ended` spans
    were given up openly first; `exact` says that the answer is that of full attention."""

    case: Case
    lost: list[int] = field(default_factory=list)
    ended: set[int] = field(default_factory=set)
    served: bool = True
    exact: bool = True
    waited: int = 0
    offloaded: int = 0
    recomputed: int = 0
    routed: bool = False
    added: int = 0

    def __post_init__(self) -> None:
        self.lost = self.lost or [0] * len(self.case.spans)

    @property
    def kept(self) -> int:
        """Spans that are whole at the end: a count of survivors is no predicate (L6)."""
        return sum(not lost and i not in self.ended for i, lost in enumerate(self.lost))

    @property
    def cost(self) -> float:
        return (
            WAIT * self.waited
            + OFFLOAD * self.offloaded
            + RECOMPUTE * self.recomputed
            + ROUTE * self.routed
            + CAPACITY * self.added
        )

    @property
    def utility(self) -> float:
        return SPAN_VALUE * self.kept + ACTIVE_VALUE * self.served - self.cost

    @property
    def silent(self) -> int:
        """Spans lost without a release: harm that nobody was told of."""
        return sum(bool(lost) and i not in self.ended for i, lost in enumerate(self.lost))


Mechanism = Callable[[Case], Run]


def _evict(run: Run, blocks: int, order: Iterator[int]) -> None:
    for span in order:
        taken = min(blocks, run.case.spans[span] - run.lost[span])
        run.lost[span] += taken
        blocks -= taken


def _end(run: Run, blocks: int, fewest: bool) -> None:
    """Claims end until `blocks` are free: the least that does, or all of them."""
    freed = 0
    for span, size in sorted(enumerate(run.case.spans), key=lambda each: -each[1]):
        if blocks <= 0 or (fewest and freed >= blocks):
            break
        run.ended.add(span)
        freed += size


def native(case: Case) -> Run:
    run = Run(case)
    _evict(run, case.over(), iter(range(len(case.spans))))
    return run


def soft_priority(case: Case) -> Run:
    """Evicted last, and evicted all the same."""
    run = Run(case)
    _evict(run, case.over(), iter(reversed(range(len(case.spans)))))
    return run


def chunked_prefill(case: Case) -> Run:
    """Chunks bound a step's work, not the live KV: it adds up chunk by chunk."""
    run, before = Run(case), 0
    for live in accumulate(case.chunks):
        _evict(run, case.over(live) - before, iter(range(len(case.spans))))
        before = case.over(live)
    return run


def hard_refuse(case: Case) -> Run:
    return Run(case, served=case.over() == 0)


def hard_defer_once(case: Case) -> Run:
    """One deferral, as by default; nothing ends meanwhile, so a refusal follows."""
    blocked = case.over() > 0
    return Run(case, served=not blocked, waited=int(blocked))


def hard_wait(case: Case) -> Run:
    blocked = case.over() > 0
    return Run(case, served=not blocked, waited=PATIENCE * blocked)


def demote_fewest(case: Case) -> Run:
    run = Run(case)
    _end(run, case.over(), fewest=True)
    return run


def expire_then_serve(case: Case) -> Run:
    """The claims' time is up one step later; then the request is served."""
    run = Run(case, waited=int(case.over() > 0))
    _end(run, case.over(), fewest=False)
    return run


def offload_needed(case: Case) -> Run:
    return Run(case, offloaded=case.over())


def sliding_window(case: Case) -> Run:
    """Live KV bounded to what is free: another answer than full attention's."""
    room = case.usable - sum(case.spans)
    return Run(case, exact=case.active <= room)


def recompute_chunks(case: Case) -> Run:
    """One chunk live at a time, everything before it computed again for each."""
    if case.over() == 0:
        return Run(case)
    again = sum(accumulate(case.chunks[:-1]))
    return Run(case, served=case.over(max(case.chunks)) == 0, recomputed=again)


def route_elsewhere(case: Case) -> Run:
    return Run(case, routed=case.over() > 0)


def add_capacity(case: Case) -> Run:
    return Run(case, added=case.over())


MECHANISMS: Final[dict[str, Mechanism]] = {
    "native eviction": native,
    "write no-admit": native,
    "soft priority": soft_priority,
    "chunked prefill": chunked_prefill,
    "hard, refuse": hard_refuse,
    "hard, defer once": hard_defer_once,
    "hard, wait 3 steps": hard_wait,
    "demote fewest": demote_fewest,
    "expire, then serve": expire_then_serve,
    "offload what is missing": offload_needed,
    "sliding window": sliding_window,
    "recompute by chunks": recompute_chunks,
    "route elsewhere": route_elsewhere,
    "more capacity": add_capacity,
}
"""Write no-admit registers nothing of the request's, and evicts as native does."""


@dataclass(frozen=True)
class Row:
    mechanism: str
    served: bool
    exact: bool
    spans_kept: int
    spans_lost_in_silence: int
    cost: float
    utility: float
    regret: float


def study(case: Case) -> list[Row]:
    """All mechanisms, the best exact one first named by its regret of 0."""
    runs = {name: mechanism(case) for name, mechanism in MECHANISMS.items()}
    best = max(run.utility for run in runs.values() if run.exact)
    return [
        Row(
            name,
            run.served,
            run.exact,
            run.kept,
            run.silent,
            round(run.cost, 2),
            round(run.utility, 2),
            round(best - run.utility, 2),
        )
        for name, run in runs.items()
    ]


def oracle(rows: list[Row]) -> Row:
    return max((row for row in rows if row.exact), key=lambda row: row.utility)


def figures_of(rows: list[Row], usable: int) -> list[Figure]:
    """Utilities: results of a study, not measurements."""
    return [
        Figure(f"{row.mechanism} in {usable}", row.utility, "utility", "same", tolerance=1)
        for row in rows
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--usable", type=int, default=80)
    parser.add_argument("--json", action="store_true")
    figures.options(parser, "arbiter")
    given = parser.parse_args()
    if given.usable < 1:
        print("arbiter: a pool has at least one usable block", file=sys.stderr)
        return 2
    rows = study(Case(usable=given.usable))
    best = oracle(rows)
    if given.json:
        print(json.dumps({"oracle": best.mechanism, "rows": [asdict(row) for row in rows]}))
        return figures.finish(figures_of(rows, given.usable), given)
    print("| mechanism | served | exact | spans kept | lost in silence | cost | utility | regret |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        yes = {True: "yes", False: "no"}
        print(
            f"| {row.mechanism} | {yes[row.served]} | {yes[row.exact]} | {row.spans_kept} | "
            f"{row.spans_lost_in_silence} | {row.cost:g} | {row.utility:g} | {row.regret:g} |"
        )
    print(f"\nThe oracle takes: {best.mechanism} ({best.utility:g})")
    return figures.finish(figures_of(rows, given.usable), given)


if __name__ == "__main__":
    sys.exit(main())
