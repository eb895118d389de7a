"""Fates of mutants that an earlier run found: a run that was interrupted goes on from there.

A fate depends on the mutant and on every check, so it counts only while no text has changed of all
that is mutated or judges.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Final

from kvclaims.checker.fates import Judged
from kvclaims.checker.proofcache import ProofCache

ROOT: Final = Path(__file__).parents[1]
PARTS: Final = ("spec", "reference", "checker")
_SUFFIXES: Final = frozenset({".py", ".toml"})


class KeptFates:
    """A folder of fates, some mutants a file.  Raises BadOperation where it cannot be made."""

    def __init__(self, folder: Path, root: Path = ROOT) -> None:
        self._cache = ProofCache(folder)
        self._text = hashlib.sha256()
        for file in _files(root):
            self._text.update(file.relative_to(root).as_posix().encode() + b"\0")
            self._text.update(file.read_bytes())
        self._text.update(f"{sys.version} {version('z3-solver')}".encode())

    def find(self, of: str, start: int, stop: int) -> list[Judged] | None:
        """The fates of these mutants of a machine or module; None where they are not known."""
        record = self._cache.recall(self._key(of, start, stop))
        try:
            return [Judged.from_json(one) for one in record["judged"]] if record else None
        except (KeyError, TypeError, ValueError):
            return None

    def keep(self, of: str, start: int, stop: int, judged: Sequence[Judged]) -> None:
        record = {"judged": [one.to_json() for one in judged]}
        self._cache.remember(self._key(of, start, stop), record)

    def _key(self, of: str, start: int, stop: int) -> str:
        whole = self._text.copy()
        whole.update(f"{of} {start} {stop}".encode())
        return whole.hexdigest()


def _files(root: Path) -> Iterator[Path]:
    """What decides a fate, in an order of its own."""
    found = (file for part in PARTS for file in (root / part).rglob("*"))
    yield from sorted(file for file in found if file.suffix in _SUFFIXES)
