# SPDX-License-Identifier: Apache-2.0
"""OpenTelemetry spans follow the events: a request, its chunks, and what happened in them."""

from __future__ import annotations

import pytest

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from seer.metrics.events import Ended, Event, Extended, Queued, Started, Stopped
from seer.metrics.spans import Spans


def spans_of(*events: Event) -> tuple[Spans, tuple[ReadableSpan, ...]]:
    provider, exporter = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    spans = Spans(provider, clock=lambda: 0.0)
    for event in events:
        spans(event)
    return spans, exporter.get_finished_spans()


def test_a_request_has_a_span_and_each_of_its_chunks_a_child() -> None:
    spans, finished = spans_of(
        Queued(1.0, 7, 3, 0, 10),
        Started(2.0, 7, 0, 64, None, True),
        Extended(3.0, 7, 0, 64, 30),
        Stopped(4.0, 7, 0, 60, "parked"),
        Started(5.0, 7, 1, 64, 0, True),
        Stopped(6.0, 7, 1, 90, "stop"),
        Ended(6.0, 7, 90, "stop"),
    )
    assert [span.name for span in finished] == ["chunk", "chunk", "request"]
    first, second, request = finished
    assert request.context is not None
    for chunk in (first, second):
        assert chunk.parent is not None
        assert chunk.parent.span_id == request.context.span_id
    assert [event.name for event in first.events] == ["extended"]
    assert second.attributes is not None
    assert (second.attributes["seer.instance"], second.attributes["seer.reason"]) == (1, "stop")
    assert request.attributes is not None
    assert request.attributes["seer.finish_reason"] == "stop"
    assert request.start_time is not None
    assert request.end_time is not None
    assert request.end_time - request.start_time == 5_000_000_000
    assert not spans._requests
    assert not spans._chunks


def test_a_request_that_is_cancelled_while_it_runs_leaves_no_open_span() -> None:
    spans, finished = spans_of(Queued(1.0, 7, 3, 0, 10), Started(2.0, 7, 0, 64, None, True), Ended(3.0, 7, 0, "failed"))
    assert len(finished) == 2
    assert not finished[1].status.is_ok
    assert not spans._chunks
