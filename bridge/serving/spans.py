"""OpenTelemetry: what claims mean for a request, as events of a span in the request's own trace.

A request that came with a trace context gets a span `kvclaims` under it, from its arrival to its
end.  Without OpenTelemetry, or without a context, nothing happens.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any, Final, Self

from kvclaims.spec.telemetry import Event

_SHOWN: Final = {
    "active_request_admitted": ("hit_blocks", "new_blocks", "free_blocks_before_allocate"),
    "active_request_deferred": ("outcome", "missing_now", "capacity_shortfall_blocks"),
    "active_request_refused": ("outcome", "missing_now", "capacity_shortfall_blocks"),
    "active_request_preempted": ("blocks",),
    "active_request_finished": ("outcome", "blocks"),
    "active_request_aborted": ("blocks",),
    "allocation_victim_selected": ("block_id", "reason"),
}
"""Events of a request, and which of their numbers a span carries.  Claims and owners stay out:
whoever reads a request's trace need not be who may read claims (Q3)."""

_LAST: Final = ("active_request_refused", "active_request_finished", "active_request_aborted")


class Spans:
    """The open spans of one engine, by request id."""

    def __init__(self, tracer: Any = None) -> None:
        from opentelemetry import trace

        self._tracer = tracer or trace.get_tracer("kvclaims")
        self._open: dict[str, Any] = {}

    @classmethod
    def where_installed(cls) -> Self | None:
        return None if importlib.util.find_spec("opentelemetry") is None else cls()

    def arrived(self, request_id: str, headers: Mapping[str, str] | None) -> None:
        """A request came, with the trace context in these headers."""
        if not headers:
            return
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        context = TraceContextTextMapPropagator().extract(dict(headers))
        self._open[request_id] = self._tracer.start_span("kvclaims", context=context)

    def heard(self, event: Event) -> None:
        if not self._open:
            return
        span = self._open.get(event.request_id or "")
        if span is None or event.event not in _SHOWN:
            return
        shown = {name: event.data[name] for name in _SHOWN[event.event]}
        span.add_event(event.event, shown, timestamp=event.timestamp_ns)
        if event.event in _LAST:
            del self._open[event.request_id or ""]
            span.end()
