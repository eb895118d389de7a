"""The reference as an engine: how litmus, fuzzing and conformance reach it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from kvclaims.reference.claims import ClaimBook
from kvclaims.reference.ledger import Ledger
from kvclaims.reference.pool import FreeQueue, Pool, Refused
from kvclaims.reference.runtime import MicroRuntime
from kvclaims.spec.interface import EngineInfo, Feature, PoolConfig
from kvclaims.spec.vocabulary import Phase


class LedgerStepper:
    """The reference's own state, moved one machine action at a time."""

    def __init__(
        self,
        blocks: Iterable[int],
        claims: Mapping[str, bool],
        requests: Mapping[str, bool],
        null: Iterable[int] = (),
    ) -> None:
        self._ledger = Ledger(Pool(blocks), _tell_nobody)
        self._claims = dict(claims)
        self._null = tuple(null)
        for request, admit_reuse in requests.items():
            self._ledger.enter(request, admit_reuse=admit_reuse)

    def apply(self, action: str, args: Mapping[str, Any]) -> bool:
        """Take the step, a method of `Ledger` under the machine's name; False, changing nothing,
        where the reference refuses it."""
        extra = {"hard": self._claims[args["c"]]} if action == "submit" else {}
        try:
            getattr(self._ledger, action)(**args, **extra)
        except Refused:
            return False
        return True

    def state(self) -> Mapping[str, Any]:
        ledger, pool = self._ledger, self._ledger.pool
        return {
            "held": {(r, b) for r, blocks in pool.held.items() for b in blocks},
            "ref": {**pool.ref, **dict.fromkeys(self._null, 0)},
            "queued": set(pool.queue),
            "free": pool.queue.count,
            "key": set(pool.key.items()),
            "entry": {(k, b) for k, blocks in pool.entry.items() for b in blocks},
            "phase": {c: ledger.book.phase.get(c, Phase.ABSENT) for c in self._claims},
            "covers": {(c, b) for c, blocks in pool.covers.items() for b in blocks},
            "drawn": {(c, b) for b, c in pool.drawn.items()},
            "reserve": {c: pool.reserve.get(c, 0) for c in self._claims},
            "owed": {r: pool.owed.get(r, 0) for r in ledger.outcome},
            "active": set(pool.held),
            "outcome": dict(ledger.outcome),
        }

    def clone(self) -> LedgerStepper:
        twin: LedgerStepper = _copied(self)
        return twin


class ReferenceEngine:
    """Always there: needs nothing but Python."""

    name = "reference"
    block_size = 16
    package = None
    faults = Path(__file__).with_name("faults.toml")
    features = frozenset(Feature) - {Feature.WINDOWS, Feature.OFFLOAD}

    def info(self) -> EngineInfo:
        try:
            release = version("kvclaims")
        except PackageNotFoundError:
            release = "0 (not installed)"
        return EngineInfo(self.name, release, str(Path(__file__).resolve().parent))

    def open(self, config: PoolConfig, run_id: str) -> MicroRuntime:
        return MicroRuntime(config, run_id, self.name)

    def stepper(
        self,
        blocks: Iterable[int],
        claims: Mapping[str, bool],
        requests: Mapping[str, bool],
        null: Iterable[int] = (),
    ) -> LedgerStepper:
        """The bare state for conformance: `blocks` without the `null` ones, claims by whether
        they are hard, requests by whether they admit reuse."""
        return LedgerStepper(blocks, claims, requests, null)


_PARTS: Final = (LedgerStepper, Ledger, Pool, FreeQueue, ClaimBook)


def _copied(value: Any) -> Any:
    """A copy of the reference's tables and of nothing else; ten times faster than `deepcopy`,
    which matters where every edge of an instance is taken on a copy."""
    if isinstance(value, _PARTS):
        twin = object.__new__(type(value))
        twin.__dict__ = {name: _copied(part) for name, part in value.__dict__.items()}
        return twin
    if isinstance(value, dict):
        return type(value)((key, _copied(part)) for key, part in value.items())
    return list(value) if isinstance(value, list) else value


def _tell_nobody(action: str, args: dict[str, Any]) -> None:
    """Nobody listens to a stepper: whoever drives it knows the steps."""


ENGINE: Final = ReferenceEngine()
