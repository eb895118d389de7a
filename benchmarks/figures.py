"""What a benchmark measured, kept in a file and held against what was kept before.

A benchmark turns its rows into `Figure`s, adds `--save` and `--compare` with `options`, and ends
with `finish`, whose exit code is 1 where a figure became worse than its tolerance allows.
Baselines lie in `benchmarks/baselines/`, one JSON file a benchmark.

Elapsed time tells little on a machine that others use, so figures of speed count the processor's
seconds, and machines still differ: a tolerance of 0.6 says that less than 0.6 of the kept speed
(or more than 1/0.6 of the kept time) is worse.  A figure that is no measurement but a result has
tolerance 1, and any difference fails.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

FOLDER: Final = Path(__file__).resolve().parent / "baselines"

SPEED: Final = 0.6
"""Tolerance of a figure of speed: machines differ by a third."""

Better = Literal["more", "less", "same"]


class NoBaseline(Exception):
    """A file that holds no figures, and why, in one line."""


@dataclass(frozen=True)
class Figure:
    """One number of a benchmark, in `unit`.

    `better` says which way is better: more of it, less of it, or exactly what was kept.
    """

    name: str
    value: float
    unit: str
    better: Better
    tolerance: float = SPEED

    def __post_init__(self) -> None:
        if not math.isfinite(self.value) or not 0 < self.tolerance <= 1:
            raise ValueError(f"{self.name}: {self.value} within {self.tolerance} is no figure")

    def ratio(self, kept: float) -> float:
        """How much better than the kept value: 1 is as good, less is worse."""
        if self.value == kept:
            return 1.0
        if self.better == "same":
            return 0.0
        now, then = (self.value, kept) if self.better == "more" else (kept, self.value)
        return now / then if then else math.inf

    def is_worse(self, kept: float) -> bool:
        return self.ratio(kept) < self.tolerance


def options(parser: argparse.ArgumentParser, name: str) -> None:
    """Add `--save [FILE]` and `--compare [FILE]`; without FILE, the benchmark's own baseline."""
    own = FOLDER / f"{name}.json"
    for word, does in (("save", "keep the figures in"), ("compare", "hold the figures against")):
        parser.add_argument(
            f"--{word}",
            type=Path,
            nargs="?",
            const=own,
            metavar="FILE",
            help=f"{does} FILE (default: benchmarks/baselines/{name}.json)",
        )


def at_least_one(text: str) -> int:
    """How many runs: the type of such an option."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not at least 1")
    return number


def save(figures: Sequence[Figure], path: Path) -> None:
    """Keep the figures, each with where and when it was measured, and what else the file holds."""
    names = [figure.name for figure in figures]
    if len(set(names)) != len(names):
        raise ValueError(f"two figures of one name in {names}")
    day, load_now = time.strftime("%Y-%m-%d"), os.getloadavg()[0]
    measured = f"{day}, {os.cpu_count()} cores, load {load_now:.1f}"
    kept = dict(load(path)) if path.exists() else {}
    for figure in figures:
        own = {"value": figure.value, "unit": figure.unit, "better": figure.better}
        kept[figure.name] = {**own, "measured": measured}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"figures": kept}, indent=1) + "\n", "utf-8")


def load(path: Path) -> Mapping[str, Any]:
    """The kept figures by name; `NoBaseline` where the file has none."""
    try:
        whole = json.loads(path.read_text("utf-8"))
        kept: Mapping[str, Any] = whole["figures"]
        wrong = [name for name, one in kept.items() if not math.isfinite(one["value"])]
    except OSError as error:
        raise NoBaseline(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise NoBaseline(f"{path}: no figures of a benchmark") from None
    if wrong:
        raise NoBaseline(f"{path}: no number: {', '.join(wrong)}")
    return kept


def compare(figures: Sequence[Figure], kept: Mapping[str, Any]) -> tuple[list[str], bool]:
    """A line for each figure that both have, and whether none became worse.

    Figures that were left out this time are not worse; where none is in both, nothing was
    compared, and that is not fine.
    """
    lines, fine = [], True
    for figure in figures:
        if figure.name not in kept:
            lines.append(f"{figure.name}: {_number(figure.value)} {figure.unit}, not kept before")
            continue
        before = kept[figure.name]["value"]
        worse = figure.is_worse(before)
        fine &= not worse
        told = "" if figure.better == "same" else f" ({figure.ratio(before):.2f} times as good)"
        lines.append(
            f"{figure.name}: {_number(figure.value)} {figure.unit}, kept {_number(before)}{told}"
            f"{' WORSE' if worse else ''}"
        )
    if not any(figure.name in kept for figure in figures):
        return [*lines, "nothing to compare: no figure is in both"], False
    return lines, fine


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 1000 else f"{value:.4g}"


def finish(figures: Sequence[Figure], given: argparse.Namespace) -> int:
    """Compare and keep as the options ask (first the one, then the other); 0, 1 where something
    became worse, 2 where a file cannot be read or written."""
    code = 0
    try:
        if given.compare:
            lines, fine = compare(figures, load(given.compare))
            print("\n".join(lines), file=sys.stderr)
            code = 0 if fine else 1
        if given.save:
            save(figures, given.save)
    except (NoBaseline, OSError) as error:
        print(f"benchmark: {error}", file=sys.stderr)
        return 2
    return code
