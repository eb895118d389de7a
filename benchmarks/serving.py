"""Claims in vLLM: the paper's runs beside ours, a soak, and what claims cost.

    python benchmarks/serving.py paper              arXiv 2605.24259: litmus, sweep, live run
    python benchmarks/serving.py witness            arXiv 2606.01387: failed loads, whole engine
    python benchmarks/serving.py soak               100,000 requests on the allocator
    python benchmarks/serving.py soak --engine vllm-engine --requests 2000
    python benchmarks/serving.py overhead           one step with 0, 1 and 10,000 idle claims
    python benchmarks/serving.py overhead --model gpt2-small --load decode --pairs 5
    python benchmarks/serving.py overhead --compare hold it against what was kept (--save)

What is run stands in `kvclaims.bridge.vllm.serving_bench`, and for the overhead in
`kvclaims.bridge.vllm.overhead_bench`, which says how a step is timed.  Goals: while requests
decode, idle claims take under 1% of a step, 10,000 of them under 3%.  A goal that is missed is
said, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from typing import Final

import figures
from figures import Figure

from kvclaims.bridge.vllm import overhead_bench as costs
from kvclaims.bridge.vllm import serving_bench as bench
from kvclaims.bridge.vllm import witness
from kvclaims.spec.interface import EngineMissing


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["paper", "witness", "soak", "overhead"])
    parser.add_argument("--engine", help="vllm, or vllm-engine (the witness's own choice)")
    parser.add_argument("--requests", type=figures.at_least_one, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", choices=[costs.ALONE, *costs.MODELS], default="tiny")
    parser.add_argument("--load", choices=[load.name for load in costs.LOADS], help="only this one")
    parser.add_argument("--pairs", type=figures.at_least_one, default=15)
    figures.options(parser, "serving")
    given = parser.parse_args()
    try:
        if given.what == "paper":
            code, found = show_paper(given.engine or "vllm")
        elif given.what == "witness":
            code, found = show_witness(given.engine or "vllm-engine", given.seed)
        elif given.what == "overhead":
            loads = [load for load in costs.LOADS if given.load in (None, load.name)]
            code, found = show_overhead(given.model, loads, given.pairs)
        else:
            code, found = show_soak(given.engine or "vllm", given.requests, given.seed)
    except EngineMissing as error:
        print(f"serving: {error}", file=sys.stderr)
        return 2
    return code or figures.finish(found, given)


GOALS: Final = {0: 0.01, 1: 0.01, 10_000: 0.03}
"""Idle claims → the part of a step that they may take."""

Shown = tuple[int, list[Figure]]
"""An exit code, and what was measured."""


def show_paper(engine: str) -> Shown:
    return beside("paper", engine, bench.paper(engine))


def show_witness(engine: str, seed: int) -> Shown:
    found = witness.witness(engine, witness.RUNS, seed, lambda text: print(text, file=sys.stderr))
    code, figures_ = beside("witness", engine, [*found.figures(witness.RUNS)])
    print("\n| runs | | claim at the end |\n|---|---|---|")
    for (kind, phase), count in sorted(found.ends.items()):
        print(f"| {kind} | {count} | {phase} |")
    for problem in found.problems:
        print(f"PROBLEM {problem}")
    return int(code or bool(found.problems)), figures_


def beside(what: str, engine: str, rows: Sequence[bench.Figure]) -> Shown:
    """The papers' numbers and ours."""
    print("| run | quantity | paper | ours |\n|---|---|---|---|")
    for row in rows:
        print(f"| {row.run} | {row.quantity} | {row.paper} | {row.ours} |")
    differ = sum(row.paper != row.ours for row in rows)
    print(f"\n{len(rows)} figures, {differ} differ")
    agree = Figure(f"{what} on {engine}", len(rows) - differ, "figures agree", "same", tolerance=1)
    return int(differ > 0), [agree]


def show_soak(engine: str, requests: int, seed: int) -> Shown:
    spent = time.process_time()
    report = bench.soak(engine, requests, seed, lambda text: print(text, file=sys.stderr))
    spent = time.process_time() - spent
    for line in report.lines():
        print(line)
    rate = Figure(f"soak on {engine}", requests / spent, "requests a CPU second", "more")
    return int(bool(report.problems)), [rate]


def show_overhead(model: str, loads: Sequence[costs.Load], pairs: int) -> Shown:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # so that one thread's time is the step's
    found, missed = [], []
    print(f"model: {model}, {pairs} pairs\n")
    print("| load | idle claims | a step, CPU µs | its scheduler | more | quartiles | part |")
    print("|---|---|---|---|---|---|---|")
    for load in loads:
        for row in costs.overhead(model, load, pairs):
            low, high = row.spread
            print(
                f"| {row.load} | {row.claims:,} | {row.step:,.0f} | {row.scheduler:.0f} "
                f"| {row.more:.1f} | {low:.1f} to {high:.1f} | {100 * row.part:.2f}% |"
            )
            name = f"{row.load} on {model}, {row.claims:,} idle claims"
            found.append(Figure(name, row.more, "CPU µs more a step", "less", tolerance=0.4))
            goal = GOALS[row.claims]
            if load is costs.DECODE and model != costs.ALONE and row.part >= goal:
                missed.append(f"{name}: {100 * row.part:.2f}% of a step, {100 * goal:.0f}% at most")
    for line in missed:
        print(f"MISSED: {line}")
    return int(bool(missed)), found


if __name__ == "__main__":
    sys.exit(main())
