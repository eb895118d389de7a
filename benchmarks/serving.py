"""Claims in vLLM: the paper's runs beside ours, a soak, and what claims cost.

    python benchmarks/serving.py paper              arXiv 2605.24259: litmus, sweep, live run
    python benchmarks/serving.py soak               100,000 requests on the allocator
    python benchmarks/serving.py soak --engine vllm-engine --requests 2000
    python benchmarks/serving.py overhead           one step with 0, 1 and 10,000 idle claims
    python benchmarks/serving.py overhead --compare hold it against what was kept (--save)

What is run stands in `kvclaims.bridge.vllm.serving_bench`.
"""

from __future__ import annotations

import argparse
import sys
import time

import figures
from figures import Figure

from kvclaims.bridge.vllm import serving_bench as bench
from kvclaims.spec.interface import EngineMissing


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["paper", "soak", "overhead"])
    parser.add_argument("--engine", default="vllm")
    parser.add_argument("--requests", type=figures.at_least_one, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    figures.options(parser, "serving")
    given = parser.parse_args()
    try:
        if given.what == "paper":
            code, found = show_paper(given.engine)
        elif given.what == "overhead":
            code, found = show_overhead()
        else:
            code, found = show_soak(given.engine, given.requests, given.seed)
    except EngineMissing as error:
        print(f"serving: {error}", file=sys.stderr)
        return 2
    return code or figures.finish(found, given)


Shown = tuple[int, list[Figure]]
"""An exit code, and what was measured."""


def show_paper(engine: str) -> Shown:
    rows = bench.paper(engine)
    print("| run | quantity | paper | ours |\n|---|---|---|---|")
    for row in rows:
        print(f"| {row.run} | {row.quantity} | {row.paper} | {row.ours} |")
    differ = sum(row.paper != row.ours for row in rows)
    print(f"\n{len(rows)} figures, {differ} differ")
    agree = Figure(f"paper on {engine}", len(rows) - differ, "figures agree", "same", tolerance=1)
    return int(differ > 0), [agree]


def show_soak(engine: str, requests: int, seed: int) -> Shown:
    spent = time.process_time()
    report = bench.soak(engine, requests, seed, lambda text: print(text, file=sys.stderr))
    spent = time.process_time() - spent
    for line in report.lines():
        print(line)
    rate = Figure(f"soak on {engine}", requests / spent, "requests a CPU second", "more")
    return int(bool(report.problems)), [rate]


def show_overhead() -> Shown:
    print("| idle claims | CPU µs a step, median | against no claims |\n|---|---|---|")
    found = []
    for row in bench.overhead():
        print(f"| {row.claims} | {row.microseconds:.1f} | {row.ratio:.3f} |")
        name = f"a step, {row.claims}" + (" idle claims" if row.claims[0].isdigit() else "")
        found.append(Figure(name, row.microseconds, "CPU µs", "less"))
        found.append(Figure(f"{name}, ratio", row.ratio, "times vLLM's own", "less", tolerance=0.8))
    return 0, found


if __name__ == "__main__":
    sys.exit(main())
