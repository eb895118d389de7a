"""Draw the README's pictures from the machine and from a run.

    python tools/pictures.py          writes them
    python tools/pictures.py --check  exit 1 if one is out of date

The claim's life is read off the transition table of `kvclaims.spec.claims`; the conflict of a
resident 60 and an active 70 in a pool of 80 is run, and each cell is a physical block whose
content was fingerprinted before and after.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Template

from kvclaims.checker.engines import find
from kvclaims.spec.claims import TABLE
from kvclaims.spec.content import Segment, tokens_of
from kvclaims.spec.interface import (
    ClaimSpec,
    PoolConfig,
    Predicate,
    PredicateKind,
    RequestSpec,
    Runtime,
)
from kvclaims.spec.operations import drain
from kvclaims.spec.vocabulary import RESPONSIBLE

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
CONFLICT = ROOT / "docs" / "pictures" / "conflict.svg"
BEGIN, END = "<!-- claim life: tools/pictures.py -->", "<!-- end -->"
USABLE, RESIDENT, ACTIVE = 80, 60, 70

SVG = Template(
    """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 850 {{ height }}" role="img"
 aria-label="A resident of 60 blocks and an active request of 70 in a pool of 80">
<style>
text { font: 13px system-ui, sans-serif; fill: #1f2328 }
.n { font-size: 11px; fill: #59636e }
.resident { fill: #1a7f37 } .lost { fill: #cf222e } .active { fill: #bf8700 }
.free { fill: #eaeef2; stroke: #afb8c1; stroke-width: .5 }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .n { fill: #9198a1 } .free { fill: #21262d; stroke: #3d444d } }
</style>
{%- for row in rows %}
<text x="5" y="{{ row.y }}">{{ row.title }}</text>
<text class="n" x="5" y="{{ row.y + 16 }}">{{ row.note }}</text>
{%- for cell in row.cells %}
<rect class="{{ cell.kind }}" x="{{ 5 + loop.index0 * 10.5 }}" y="{{ row.y + 24 }}" \
width="9" height="18"><title>block {{ cell.block }}: {{ cell.kind }}</title></rect>
{%- endfor %}
{%- endfor %}
{%- for kind, words in legend %}
<rect class="{{ kind }}" x="{{ 5 + loop.index0 * 210 }}" y="{{ height - 20 }}" width="9" \
height="12"/>
<text class="n" x="{{ 19 + loop.index0 * 210 }}" y="{{ height - 10 }}">{{ words }}</text>
{%- endfor %}
</svg>
""",
    autoescape=True,
)
LEGEND = (
    ("resident", "resident, bytes as before"),
    ("lost", "resident overwritten"),
    ("active", "written by the active request"),
    ("free", "free, never written"),
)


@dataclass(frozen=True)
class Cell:
    block: int
    kind: str


@dataclass(frozen=True)
class Row:
    y: int
    title: str
    note: str
    cells: tuple[Cell, ...]


def claim_life() -> str:
    """The transition table as a state diagram; responsible phases are marked."""
    lines = ["```mermaid", "stateDiagram-v2", "    direction LR", "    [*] --> submitted"]
    for before, afters in TABLE.items():
        for after in afters:
            if before.value == "absent" or after.value == "submitted":
                continue  # a new generation of an ended claim starts over at the left
            lines.append(f"    {before} --> {after}")
    lines.append("    classDef owed stroke-width:3px")
    lines += [f"    class {phase} owed" for phase in TABLE if phase in RESPONSIBLE]
    return "\n".join([*lines, "```"])


def conflict(engine: str = "reference") -> str:
    """Run it twice, without and with a hard claim, and draw every physical block."""
    rows = [*_native(find(engine)), *_claimed(find(engine))]
    placed = [Row(18 + 66 * i, *row) for i, row in enumerate(rows)]
    text: str = SVG.render(rows=placed, height=66 * len(rows) + 30, legend=LEGEND)
    return text


def _native(engine: Any) -> Iterator[tuple[str, str, tuple[Cell, ...]]]:
    runtime, marks = _resident(engine)
    yield "Before", f"{_counts(runtime)}", _cells(runtime, marks)
    _submit_active(runtime)
    drain(runtime)
    victims = sum(
        event.event == "allocation_victim_selected"
        and event.data["reason"] == "cached_prefix_reuse"
        for event in runtime.events()
    )
    outcome = runtime.observe().requests["active"].outcome
    yield (
        "Without a claim",
        f"a request of {ACTIVE} blocks is {outcome}; {victims} resident blocks are evicted, "
        "and nobody is told",
        _cells(runtime, marks),
    )


def _claimed(engine: Any) -> Iterator[tuple[str, str, tuple[Cell, ...]]]:
    runtime, marks = _resident(engine)
    tokens = tokens_of((Segment("system", RESIDENT),), runtime.config.block_size)
    runtime.declare(ClaimSpec("system-prompt", tokens, Predicate(PredicateKind.LEADING, RESIDENT)))
    _submit_active(runtime)
    drain(runtime)
    seen = runtime.observe()
    answer = seen.requests["active"]
    yield (
        "With a hard claim on the resident",
        f"the request is {answer.outcome}: shortfall {answer.shortfall}, {seen.free} free, "
        f"blocked by {', '.join(answer.blocking_claims)}",
        _cells(runtime, marks),
    )


def _resident(engine: Any) -> tuple[Runtime, dict[int, int]]:
    """A pool in which a finished request left its blocks, with a fingerprint of every block."""
    runtime: Runtime = engine.open(PoolConfig(USABLE, getattr(engine, "block_size", 16)), "picture")
    tokens = tokens_of((Segment("system", RESIDENT),), runtime.config.block_size)
    runtime.submit(RequestSpec("resident", tokens))
    drain(runtime)
    blocks = tuple(b for b in runtime.locate(tokens) if b is not None)
    return runtime, dict(zip(blocks, runtime.fingerprint(blocks), strict=True))


def _submit_active(runtime: Runtime) -> None:
    tokens = tokens_of((Segment("active", ACTIVE),), runtime.config.block_size)
    runtime.submit(RequestSpec("active", tokens))


def _cells(runtime: Runtime, marks: dict[int, int]) -> tuple[Cell, ...]:
    """Every block in order of its id, residents first, by what its memory says."""
    resident = set(runtime.observe().resident.values())
    blocks = [*marks, *(b for b in sorted(runtime.snapshot().facts) if b not in marks)]
    now = dict(zip(blocks, runtime.fingerprint(tuple(blocks)), strict=True))

    def kind(block: int) -> str:
        if block in marks:
            return "resident" if now[block] == marks[block] else "lost"
        return "active" if block in resident else "free"

    return tuple(Cell(block, kind(block)) for block in blocks)


def _counts(runtime: Runtime) -> str:
    seen = runtime.observe()
    return (
        f"{len(seen.resident)} blocks of a finished request, kept for reuse, in a pool of {USABLE}"
    )


def drawn() -> dict[Path, str]:
    """Every file with a picture, as it should be."""
    text = README.read_text(encoding="utf-8")
    head, rest = text.split(BEGIN)
    tail = rest.split(END, 1)[1]
    return {
        README: f"{head}{BEGIN}\n{claim_life()}\n{END}{tail}",
        CONFLICT: conflict(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = 0
    for path, text in drawn().items():
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale += 1
        print(f"{path.relative_to(ROOT)} {'is out of date' if check else 'written'}")
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    return int(check and stale > 0)


if __name__ == "__main__":
    sys.exit(main())
