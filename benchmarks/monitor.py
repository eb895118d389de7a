"""What the monitor costs: scheduler steps a second with it, against those without.

    python benchmarks/monitor.py                        the allocator in pools of three sizes
    python benchmarks/monitor.py --whole                and a whole engine on this CPU
    python benchmarks/monitor.py --compare              hold it against what was kept (--save)

Goals: on the allocator benchmark (a chat: 160 tokens asked, 338 answered) above 0.7 of the bare
scheduler, above 0.97 of a whole engine, and no slower as the pool grows from 1,000 to 100,000
blocks.  A goal that is missed is said, and the exit code is 1.  Where prompts are long and answers
short the monitor has five times as much to judge in a step: told, without a goal.
What is run stands in `kvclaims.bridge.vllm.monitor_bench`; times are of the processor.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Final

import figures
from figures import Figure

from kvclaims.bridge.vllm import monitor_bench as bench
from kvclaims.spec.interface import EngineMissing

ALLOCATOR_GOAL: Final = 0.7
WHOLE_GOAL: Final = 0.97
GROWTH_GOAL: Final = 0.9
"""Watched steps a second in the largest pool against the smallest: equal but for noise."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pools", default=",".join(map(str, bench.POOLS)))
    parser.add_argument("--steps", type=figures.at_least_one, default=100)
    parser.add_argument("--rounds", type=figures.at_least_one, default=11)
    parser.add_argument("--whole", action="store_true", help="run a whole engine too")
    figures.options(parser, "monitor")
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # so that one thread's time is the step's
    try:
        pools = [int(size) for size in given.pools.split(",")]
        costs = [bench.allocator(size, given.steps, given.rounds) for size in pools]
        prefill = bench.allocator(pools[0], given.steps, given.rounds, bench.PREFILL)
        whole = [bench.whole_engine(given.steps, given.rounds)] if given.whole else []
    except (EngineMissing, ValueError) as error:
        print(f"monitor: {error}", file=sys.stderr)
        return 2
    print(table([*costs, prefill, *whole]))
    missed = list(missed_goals(costs, whole))
    for line in missed:
        print(f"MISSED: {line}")
    return int(bool(missed)) or figures.finish(figures_of([*costs, prefill, *whole]), given)


def table(costs: Sequence[bench.Cost]) -> str:
    lines = [
        "| | bare, steps/s | watched, steps/s | ratio | operations judged a step |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {cost.name} | {1 / cost.bare:,.0f} | {1 / cost.watched:,.0f} | {cost.ratio:.3f} | "
        f"{cost.monitored / cost.steps:.1f} |"
        for cost in costs
    ]
    return "\n".join(lines)


def missed_goals(costs: Sequence[bench.Cost], whole: Sequence[bench.Cost]) -> list[str]:
    """What the figures fall short of."""
    found = [
        f"{cost.name}: {cost.ratio:.3f} of the bare engine's steps, the goal is above {goal}"
        for some, goal in ((costs, ALLOCATOR_GOAL), (whole, WHOLE_GOAL))
        for cost in some
        if cost.ratio <= goal
    ]
    growth = costs[0].watched / costs[-1].watched
    if growth < GROWTH_GOAL:
        found.append(f"{costs[-1].name}: {growth:.3f} of the steps a second of {costs[0].name}")
    return found


def figures_of(costs: Sequence[bench.Cost]) -> list[Figure]:
    found = []
    for cost in costs:
        found.append(Figure(f"{cost.name}, watched", 1 / cost.watched, "steps a CPU s", "more"))
        ratio = Figure(f"{cost.name}, ratio", cost.ratio, "of bare", "more", tolerance=0.9)
        found.append(ratio)
    return found


if __name__ == "__main__":
    sys.exit(main())
