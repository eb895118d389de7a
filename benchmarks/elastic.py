"""Does lending the activation reserve pay?  One amount of memory, several chunks, three policies.

    python benchmarks/elastic.py                          chunks 128, 512 and 2048, three runs each
    python benchmarks/elastic.py --chunks 256,2048 --runs 5
    python benchmarks/elastic.py --compare                hold it against what was kept (--save)

Needs a vLLM that runs on this CPU.  Times are medians over the runs, of this process's CPU; what is
measured and what is modelled stands in `kvclaims.bridge.vllm.elastic_bench`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence

import figures
from figures import Figure

from kvclaims.bridge.vllm.elastic_bench import BenchReport, bench
from kvclaims.spec.interface import BadOperation, EngineMissing
from kvclaims.spec.vocabulary import Verdict


def table(reports: Sequence[BenchReport]) -> str:
    """One Markdown row a policy and chunk, medians over the reports."""
    head = "| policy | chunk | KV tokens | first token, ms | decode step, ms | toggles |"
    lines = [head + " a toggle, ms | preempted | refused |", "|---|" + "---|" * 8]
    for rows in zip(*(report.rows for report in reports), strict=True):
        row = rows[0]
        firsts = [r.first_token_ms for r in rows if r.first_token_ms is not None]
        first = f"{statistics.median(firsts):.0f}" if firsts else "all refused"
        decode = statistics.median(r.decode_ms for r in rows)
        toggle = f"{statistics.median(r.toggle_ms for r in rows):.1f}" if row.toggles else ""
        sizes = [f"{blocks * 32:,}" for blocks in (row.base_blocks, row.most_blocks)]
        kv = " to ".join(dict.fromkeys(sizes))
        lines.append(
            f"| {row.policy} | {row.chunk} | {kv} | {first} | {decode:.1f} | {row.toggles} | "
            f"{toggle} | {row.preempted} | {row.refused} |"
        )
    return "\n".join(lines)


def figures_of(reports: Sequence[BenchReport]) -> list[Figure]:
    """Times in milliseconds of the process's CPU, medians over the reports; what was refused."""
    found = []
    for rows in zip(*(report.rows for report in reports), strict=True):
        name = f"{rows[0].policy} {rows[0].chunk}"
        firsts = [r.first_token_ms for r in rows if r.first_token_ms is not None]
        if firsts:
            first = statistics.median(firsts)
            found.append(Figure(f"{name} first token", first, "CPU ms", "less"))
        decode = statistics.median(r.decode_ms for r in rows)
        refused = max(r.refused for r in rows)
        found.append(Figure(f"{name} decode step", decode, "CPU ms", "less"))
        found.append(Figure(f"{name} refused", refused, "requests", "same", tolerance=1))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chunks", default="128,512,2048")
    parser.add_argument("--runs", type=figures.at_least_one, default=3)
    figures.options(parser, "elastic")
    given = parser.parse_args()
    try:
        chunks = tuple(int(chunk) for chunk in given.chunks.split(","))
        reports = [
            bench(lambda text: print(text, file=sys.stderr), chunks) for _ in range(given.runs)
        ]
    except (ValueError, BadOperation, EngineMissing) as error:
        print(f"elastic: {error}", file=sys.stderr)
        return 2
    print(table(reports))
    if any(report.verdict is not Verdict.HOLDS for report in reports):
        return 1
    return figures.finish(figures_of(reports), given)


if __name__ == "__main__":
    sys.exit(main())
