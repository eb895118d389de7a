"""Claims in vLLM: the paper's runs beside ours, a soak, and what claims cost.

    python benchmarks/serving.py paper              arXiv 2605.24259: litmus, sweep, live run
    python benchmarks/serving.py soak               100,000 requests on the allocator
    python benchmarks/serving.py soak --engine vllm-engine --requests 2000
    python benchmarks/serving.py overhead           one step with 0, 1 and 10,000 idle claims

What is run stands in `kvclaims.bridge.vllm.serving_bench`.
"""

from __future__ import annotations

import argparse
import sys

from kvclaims.bridge.vllm import serving_bench as bench
from kvclaims.spec.interface import EngineMissing


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["paper", "soak", "overhead"])
    parser.add_argument("--engine", default="vllm")
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    try:
        if given.what == "paper":
            return show_paper(given.engine)
        if given.what == "overhead":
            return show_overhead()
        return show_soak(given.engine, given.requests, given.seed)
    except EngineMissing as error:
        print(f"serving: {error}", file=sys.stderr)
        return 2


def show_paper(engine: str) -> int:
    rows = bench.paper(engine)
    print("| run | quantity | paper | ours |\n|---|---|---|---|")
    for row in rows:
        print(f"| {row.run} | {row.quantity} | {row.paper} | {row.ours} |")
    differ = sum(row.paper != row.ours for row in rows)
    print(f"\n{len(rows)} figures, {differ} differ")
    return 1 if differ else 0


def show_soak(engine: str, requests: int, seed: int) -> int:
    report = bench.soak(engine, requests, seed, lambda text: print(text, file=sys.stderr))
    for line in report.lines():
        print(line)
    return 1 if report.problems else 0


def show_overhead() -> int:
    print("| idle claims | CPU µs a step, median | against no claims |\n|---|---|---|")
    for row in bench.overhead():
        print(f"| {row.claims} | {row.microseconds:.1f} | {row.ratio:.3f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
