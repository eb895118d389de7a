"""Reads an engine's metrics page (Prometheus text) as a snapshot of claims and blocks."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Final

from kvclaims.checker.watch import BLOCKS, Blame, ClaimNow, Snapshot, in_force
from kvclaims.spec.interface import BadOperation, EngineMissing

TIMEOUT_S: Final = 5.0
PREFIX: Final = "kvclaims_"

Labels = Mapping[str, str]
Samples = Mapping[str, list[tuple[Labels, float]]]
"""Name without prefix → its samples.  A family without a sample has an empty list."""


class Metrics:
    """A metrics page.  Once it was read, a failure to read it again is a note, not an end."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._last: Snapshot | None = None

    def poll(self) -> Snapshot:
        try:
            self._last = snapshot(self._address, parse(self._address, self._fetch()))
        except BadOperation as error:
            if self._last is None:
                raise
            return Snapshot(**{**vars(self._last), "note": f"not up to date: {error}"})
        return self._last

    def _fetch(self) -> str:
        try:
            with urllib.request.urlopen(self._address, timeout=TIMEOUT_S) as answer:
                raw: bytes = answer.read()
        except urllib.error.HTTPError as error:
            raise BadOperation(f"{self._address}: {error.code} {error.reason}") from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            why = getattr(error, "reason", error)
            said = getattr(why, "strerror", None) or str(why).strip() or type(why).__name__
            raise BadOperation(f"{self._address}: cannot be read: {said}") from None
        return raw.decode("utf-8", "replace")


def parse(address: str, text: str) -> Samples:
    """The families of `kvclaims`.  `BadOperation` where the page has none or is no metrics page,
    `EngineMissing` without the package that reads them."""
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError:
        raise EngineMissing(
            "metrics need prometheus-client; install: pip install prometheus-client"
        ) from None
    found: dict[str, list[tuple[Labels, float]]] = {}
    try:
        for family in text_string_to_metric_families(text):
            if not family.name.startswith(PREFIX):
                continue
            ending = "_total" if family.type == "counter" else ""
            found.setdefault(family.name.removeprefix(PREFIX) + ending, [])
            for sample in family.samples:
                name = sample.name.removeprefix(PREFIX)
                found.setdefault(name, []).append((sample.labels, sample.value))
    except (ValueError, KeyError, IndexError) as error:
        raise BadOperation(f"{address}: not a metrics page: {error}") from None
    if not found:
        raise BadOperation(f"{address}: no metric begins with {PREFIX}: is the monitor on?")
    return found


def snapshot(address: str, samples: Samples) -> Snapshot:
    """What the metrics tell.  A family that is absent leaves its number out."""
    who = next((labels for labels, _ in samples.get("info", ())), {})
    engine = " ".join(filter(None, (who.get("engine"), who.get("version"))))
    violations = samples.get("violations_total")
    return Snapshot(
        source=address,
        engine=engine,
        run_id=who.get("run_id", ""),
        blocks={
            name: int(rows[0][1]) for name in BLOCKS if (rows := samples.get(f"{name}_blocks"))
        },
        phases=_by(samples, "claims", "phase"),
        claims=tuple(_claims(samples)),
        requests=_by(samples, "requests", "state"),
        outcomes=_by(samples, "outcomes_total", "outcome"),
        blame=tuple(_blame(samples)),
        broken=None if violations is None else _by(samples, "violations_total", "rule"),
    )


def _by(samples: Samples, name: str, label: str) -> dict[str, int]:
    """Numbers of a family by one of its labels; those at zero are left out."""
    found: dict[str, int] = {}
    for labels, value in samples.get(name, ()):
        if value:
            key = labels.get(label, "")
            found[key] = found.get(key, 0) + int(value)
    return found


def _claims(samples: Samples) -> Iterator[ClaimNow]:
    told: dict[tuple[str, str, str, str], dict[str, int]] = {}
    for labels, value in samples.get("claim_blocks", ()):
        names = ("claim", "owner", "protection", "phase")
        claim, owner, protection, phase = (labels.get(name, "") for name in names)
        kinds = told.setdefault((claim, owner, protection, phase), {})
        kinds[labels.get("kind", "footprint")] = int(value)
    for (claim, owner, protection, phase), kinds in sorted(told.items()):
        if in_force(phase):
            numbers = (kinds.get(kind) for kind in ("footprint", "covered", "reserve"))
            yield ClaimNow(claim, owner, protection, phase, *numbers)


def _blame(samples: Samples) -> Iterator[Blame]:
    told: dict[tuple[str, str], dict[str, int]] = {}
    for labels, value in samples.get("refusals_total", ()):
        key = (labels.get("claim", ""), labels.get("owner", ""))
        told.setdefault(key, {})[labels.get("outcome", "refused")] = int(value)
    for (claim, owner), times in sorted(told.items()):
        yield Blame(claim, owner, times.get("refused", 0), times.get("deferred", 0))
