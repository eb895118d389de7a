"""What became of a mutant, and the list of those that are declared to change nothing."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from kvclaims.spec.interface import BadOperation

DECLARED: Final = Path(__file__).with_name("equivalents.toml")


class Fate(StrEnum):
    KILLED = "killed"
    PROVED = "equivalent, proved"
    DECLARED = "equivalent, declared"
    LIVES = "lives"


@dataclass(frozen=True)
class Judged:
    """A mutant and its fate.  `by` names the check that killed it, `detail` what it said."""

    target: str
    name: str
    operator: str
    before: str
    after: str
    fate: Fate
    by: str = ""
    detail: str = ""
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return {
            "target": self.target,
            "mutant": self.name,
            "operator": self.operator,
            "before": self.before,
            "after": self.after,
            "fate": self.fate,
            "by": self.by or None,
            "detail": self.detail or None,
            "seconds": round(self.seconds, 4),
        }

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Judged:
        """Raises KeyError, TypeError or ValueError where it is no such record."""
        return cls(
            str(raw["target"]),
            str(raw["mutant"]),
            str(raw["operator"]),
            str(raw["before"]),
            str(raw["after"]),
            Fate(raw["fate"]),
            str(raw["by"] or ""),
            str(raw["detail"] or ""),
            float(raw["seconds"]),
        )

    def lines(self) -> Iterator[str]:
        yield f"{self.fate}: {self.name}"
        if "\n" in self.before or "\n" in self.after or len(self.name) > 200:
            yield from (f"    - {line}" for line in self.before.splitlines())
            yield from (f"    + {line}" for line in self.after.splitlines())
        if self.detail:
            yield f"    {self.detail}"


def declared(path: Path = DECLARED) -> dict[str, str]:
    """Mutants that change nothing by declaration: the name of each and the reason.

    Raises BadOperation for a file that cannot be read, an entry without a reason, or two of one
    name.
    """
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
        entries = [(str(e["mutant"]), str(e["reason"])) for e in raw.get("equivalent", [])]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadOperation(f"{path.name}: {error}") from None
    found = dict(entries)
    if len(found) != len(entries) or not all(found.values()):
        raise BadOperation(f"{path.name}: a mutant stands there twice, or without a reason")
    return found


def settle(judged: Iterable[Judged], reasons: Mapping[str, str]) -> Iterator[Judged]:
    """Those that live and are declared equivalent are no survivors."""
    for one in judged:
        if one.fate is Fate.LIVES and one.name in reasons:
            yield _declared(one, reasons[one.name])
        else:
            yield one


def _declared(one: Judged, reason: str) -> Judged:
    return Judged(
        one.target,
        one.name,
        one.operator,
        one.before,
        one.after,
        Fate.DECLARED,
        "",
        reason,
        one.seconds,
    )


def stale(judged: Iterable[Judged], reasons: Mapping[str, str]) -> list[str]:
    """Declarations that are out of date, among those of the targets that were run: of a mutant
    that is not made any more, or that something tells apart or proves equivalent."""
    fates = {one.name: one.fate for one in judged}
    return sorted(name for name in reasons if fates.get(name) not in (Fate.DECLARED, Fate.LIVES))
