# SPDX-License-Identifier: Apache-2.0
"""OpenTelemetry spans: one per request, and in it one per chunk, with the names and fields of the events.

A request's span is `request`, from `queued` to `ended`; its children are `chunk`, from `started` to `stopped`.
`extended`, `prefilling`, `decoding` and `preempted` are events of the chunk they fall into, `asked` and `answered` of
the request. Exporting happens in a thread of the SDK; a collector that is away costs spans, never a request.

Invariant: a request that has ended has no open span, and nothing is kept of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec

from seer.errors import MissingExtra
from seer.metrics.events import (
    Answered,
    Asked,
    Decoding,
    Ended,
    Event,
    Extended,
    Preempted,
    Prefilling,
    Queued,
    Started,
    Stopped,
)

NANOSECONDS = 1_000_000_000
InSpan = Extended | Prefilling | Decoding | Preempted | Asked | Answered


def open_telemetry(endpoint: str) -> Any:
    """A tracer provider that exports to an OTLP endpoint over HTTP."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError:
        raise MissingExtra("opentelemetry-exporter-otlp-proto-http", "otel") from None
    provider = TracerProvider(resource=Resource.create({"service.name": "seer"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces")))
    return provider


class Spans:
    """An event sink. `clock` is the clock of the events' times, in seconds."""

    def __init__(self, provider: Any, clock: Callable[[], float]) -> None:
        from opentelemetry import trace

        self._trace = trace
        self._tracer = provider.get_tracer("seer")
        self._offset_s = time.time() - clock()
        self._requests: dict[int, Any] = {}
        self._chunks: dict[int, Any] = {}

    def __call__(self, event: Event) -> None:
        """Start, mark or end a span."""
        if isinstance(event, Queued):
            self._requests[event.request] = self._tracer.start_span(
                "request", start_time=self._at(event), attributes=_fields(event)
            )
        elif isinstance(event, Started):
            self._start_chunk(event)
        elif isinstance(event, Extended | Prefilling | Decoding | Preempted):
            self._mark(self._chunks, event)
        elif isinstance(event, Asked | Answered):
            self._mark(self._requests, event)
        elif isinstance(event, Stopped):
            self._finish(self._chunks, event)
        elif isinstance(event, Ended):
            self._finish(self._chunks, event)
            self._finish(self._requests, event)

    def _start_chunk(self, event: Started) -> None:
        parent = self._requests.get(event.request)
        if parent is not None:
            context = self._trace.set_span_in_context(parent)
            self._chunks[event.request] = self._tracer.start_span(
                "chunk", context=context, start_time=self._at(event), attributes=_fields(event)
            )

    def _mark(self, spans: dict[int, Any], event: InSpan) -> None:
        span = spans.get(event.request)
        if span is not None:
            span.add_event(type(event).__name__.lower(), _fields(event), timestamp=self._at(event))

    def _finish(self, spans: dict[int, Any], event: Stopped | Ended) -> None:
        span = spans.pop(event.request, None)
        if span is not None:
            span.set_attributes(_fields(event))
            if isinstance(event, Ended) and event.finish_reason == "failed":
                span.set_status(self._trace.StatusCode.ERROR)
            span.end(end_time=self._at(event))

    def _at(self, event: Event) -> int:
        return int((event.t_s + self._offset_s) * NANOSECONDS)


def _fields(event: Event) -> dict[str, Any]:
    """The fields of an event as attributes; what is None is left out."""
    fields = msgspec.structs.asdict(event)
    del fields["t_s"]
    return {f"seer.{name}": value for name, value in fields.items() if value is not None}
