"""`kvclaims watch`: who holds the memory now, from a trace being written or from metrics.

Start at `watch`.  A source is polled for a `Snapshot`; on a terminal the last one stays in view.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvclaims.checker.verdicts import counted
from kvclaims.spec.interface import BadOperation
from kvclaims.spec.vocabulary import RESPONSIBLE, Phase, Verdict

BLOCKS: Final = ("usable", "active", "protected", "reserved", "free", "headroom")
"""Numbers of blocks, in the order in which they are shown; `free` counts the free queue."""

_STYLES: Final = {"active": "yellow", "protected": "blue", "reserved": "cyan"}
_WIDTH: Final = 48
_MOST_CLAIMS: Final = 20


@dataclass(frozen=True)
class ClaimNow:
    """A claim in force.  `covered` and `reserve` are in blocks; None where nobody tells."""

    claim: str
    owner: str
    protection: str
    phase: str
    footprint: int | None = None
    covered: int | None = None
    reserve: int | None = None


@dataclass(frozen=True)
class Blame:
    """How often requests were refused or put off because of one claim."""

    claim: str
    owner: str
    refused: int
    deferred: int


@dataclass(frozen=True)
class Snapshot:
    """What is known of an engine at one moment; an absent number was not exposed."""

    source: str
    engine: str = ""
    run_id: str = ""
    events: int | None = None
    blocks: Mapping[str, int] = field(default_factory=dict)
    phases: Mapping[str, int] = field(default_factory=dict)
    claims: tuple[ClaimNow, ...] = ()
    requests: Mapping[str, int] = field(default_factory=dict)
    outcomes: Mapping[str, int] = field(default_factory=dict)
    blame: tuple[Blame, ...] = ()
    broken: Mapping[str, int] | None = None
    """Broken rules with their number; None where nobody judges."""
    note: str = ""

    @property
    def verdict(self) -> Verdict:
        """On what was seen so far; VACUOUS where that is nothing."""
        if self.broken is None:
            return Verdict.NOT_EXPOSED
        if self.events == 0:
            return Verdict.VACUOUS
        return Verdict.VIOLATED if any(self.broken.values()) else Verdict.HOLDS

    def to_json(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "engine": self.engine,
            "run_id": self.run_id,
            "events": self.events,
            "blocks": {name: self.blocks.get(name) for name in BLOCKS},
            "claims_by_phase": dict(self.phases),
            "claims": [vars(claim) for claim in self.claims],
            "requests": dict(self.requests),
            "outcomes": dict(self.outcomes),
            "refusals": [vars(one) for one in self.blame],
            "violations": [{"rule": r, "times": n} for r, n in (self.broken or {}).items()],
            "not_exposed": self.not_exposed,
            "note": self.note,
        }

    @property
    def not_exposed(self) -> list[str]:
        absent = [f"{name} blocks" for name in BLOCKS if name not in self.blocks]
        if self.broken is None:
            absent.append("broken rules")
        return absent

    def lines(self) -> Iterator[str]:
        yield self._head()
        yield "  blocks: " + ", ".join(f"{name} {self._number(name)}" for name in BLOCKS)
        yield f"  claims: {_numbers(self.phases)}"
        for claim in self.claims:
            yield f"    {_told(claim)}"
        yield f"  requests: {_numbers(self.requests)}; ended: {_numbers(self.outcomes)}"
        for one in self.blame:
            yield (
                f"  because of claim {one.claim} of {one.owner}: "
                f"{one.refused} refused, {counted(one.deferred, 'deferral')}"
            )
        for rule, times in (self.broken or {}).items():
            yield f"  VIOLATED {rule}: {counted(times, 'time')}"
        for name in self.not_exposed:
            yield f"  {Verdict.NOT_EXPOSED}: {name}"
        if self.note:
            yield f"  {self.note}"
        yield f"{self.verdict}"

    def renderable(self) -> Group:
        """The same for a terminal."""
        parts: list[Any] = [Text(self._head(), "bold"), self._bar(), self._legend(), Text()]
        parts.append(self._claims() if self.claims else Text(f"claims: {_numbers(self.phases)}"))
        if self.blame:
            parts.append(self._blame())
        parts.append(
            Text(f"requests: {_numbers(self.requests)}    ended: {_numbers(self.outcomes)}")
        )
        for rule, times in (self.broken or {}).items():
            parts.append(Text(f"VIOLATED {rule}: {counted(times, 'time')}", "bold red"))
        if self.not_exposed:
            parts.append(Text(f"not exposed: {', '.join(self.not_exposed)}", "dim"))
        if self.note:
            parts.append(Text(self.note, "yellow"))
        return Group(*parts)

    def _head(self) -> str:
        events = "" if self.events is None else counted(self.events, "event")
        who = " ".join(filter(None, (self.engine, f"run {self.run_id}" if self.run_id else "")))
        return ", ".join(filter(None, (self.source, who, events)))

    def _number(self, name: str) -> str:
        return f"{self.blocks[name]:,}" if name in self.blocks else "?"

    def _bar(self) -> Text:
        """The pool as a bar; signs differ as well as colours."""
        bar, usable = Text(), self.blocks.get("usable", 0)
        if not usable:
            return bar
        left = _WIDTH
        for name, sign in (("active", "█"), ("protected", "▓"), ("reserved", "▒")):
            cells = min(left, round(self.blocks.get(name, 0) * _WIDTH / usable))
            bar.append(sign * cells, _STYLES[name])
            left -= cells
        bar.append("·" * left, "dim")
        return bar

    def _legend(self) -> Text:
        signs = {"active": "█ ", "protected": "▓ ", "reserved": "▒ ", "free": "· "}
        text = Text()
        for name in BLOCKS:
            text.append(signs.get(name, "") + f"{name} {self._number(name)}   ", _STYLES.get(name))
        return text

    def _claims(self) -> Table:
        table = Table(title=f"claims: {_numbers(self.phases)}", title_justify="left")
        for heading in ("claim", "owner", "protection", "phase"):
            table.add_column(heading)
        for heading in ("footprint", "covered", "promised"):
            table.add_column(heading, justify="right")
        for claim in self.claims[:_MOST_CLAIMS]:
            numbers = (claim.footprint, claim.covered, claim.reserve)
            table.add_row(
                *map(Text, (claim.claim, claim.owner, claim.protection, claim.phase)),
                *("?" if number is None else f"{number:,}" for number in numbers),
            )
        if len(self.claims) > _MOST_CLAIMS:
            table.add_row(Text(f"and {len(self.claims) - _MOST_CLAIMS} more"))
        return table

    def _blame(self) -> Table:
        table = Table(title="refusals, by the claim that was in the way", title_justify="left")
        for heading in ("claim", "owner"):
            table.add_column(heading)
        for heading in ("refused", "deferred"):
            table.add_column(heading, justify="right")
        for one in self.blame[:_MOST_CLAIMS]:
            table.add_row(Text(one.claim), Text(one.owner), f"{one.refused:,}", f"{one.deferred:,}")
        return table


def _numbers(named: Mapping[str, int]) -> str:
    return ", ".join(f"{number:,} {name}" for name, number in named.items() if number) or "none"


def _told(claim: ClaimNow) -> str:
    numbers = {
        "blocks": claim.footprint,
        "covered": claim.covered,
        "promised": claim.reserve,
    }
    shown = ", ".join(f"{n:,} {name}" for name, n in numbers.items() if n is not None)
    return f"{claim.claim} of {claim.owner}: {claim.phase}, {claim.protection}" + (
        f", {shown}" if shown else ""
    )


def in_force(phase: str) -> bool:
    return phase in RESPONSIBLE or phase == Phase.SUBMITTED


class Source(Protocol):
    """Where snapshots come from."""

    def poll(self) -> Snapshot:
        """What is known now.  `BadOperation` or `TraceError` where there is nothing to read."""


def open_source(source: str) -> Source:
    """A trace file or, by `http://` or `https://`, a metrics page."""
    if source.startswith(("http://", "https://")):
        from kvclaims.checker.watchmetrics import Metrics

        return Metrics(source)
    if "://" in source:
        raise BadOperation(f"cannot watch {source}: give a trace file or an http(s) address")
    from kvclaims.checker.watchtrace import FollowedTrace

    return FollowedTrace(source)


def watch(
    source: Source,
    console: Console,
    *,
    once: bool,
    every: float = 1.0,
    wait: Callable[[float], None] = time.sleep,
) -> Snapshot:
    """Show snapshots until Ctrl-C, or one of them; the last is returned.

    On a terminal it is drawn in place, elsewhere a change is a block of plain lines.
    """
    seen = source.poll()
    if once:
        return seen
    try:
        if console.is_terminal:
            with Live(seen.renderable(), console=console, transient=True) as live:
                while True:
                    wait(every)
                    seen = source.poll()
                    live.update(seen.renderable())
        console.print(Text("\n".join(seen.lines())))
        while True:
            wait(every)
            last, seen = seen, source.poll()
            if seen != last:
                console.print(Text("\n".join(seen.lines())))
    except KeyboardInterrupt:
        return seen
