# SPDX-License-Identifier: Apache-2.0
"""The numbers of a rollout for Prometheus, most of them per instance. Names follow vLLM's, with `seer:` for `vllm:`.

Prometheus keeps the colon for recording rules, so its linter refuses vLLM's names and these. The same numbers can be
had with `seer_`.

A scrape reads what `LiveCounts` has summed and asks the fleet for its state; nothing is computed between scrapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from seer.metrics.fleet_sample import FleetSample
from seer.metrics.histograms import Histogram
from seer.metrics.live_counts import LiveCounts

SUMS = {
    "generation_tokens": "Tokens that became part of a response.",
    "prefill_tokens": "Tokens whose KV was computed from known tokens.",
    "recomputed_tokens": "Of the prefilled tokens, those whose KV had been computed before.",
    "loaded_tokens": "Tokens whose KV came from the pool.",
    "loaded_bytes": "Bytes of KV from the pool.",
    "far_loaded_bytes": "Of these, bytes from other nodes.",
    "unsaved_blocks": "KV blocks that were not saved to the pool: it took longer than an engine may wait.",
    "batched_tokens": "Tokens that steps computed: prompts, one per decoding request, and drafts.",
    "steps": "Steps of the instance.",
    "preemptions": "Requests whose KV the instance dropped for lack of memory.",
    "draft_tokens": "Draft tokens that were verified.",
    "accepted_tokens": "Draft tokens that were accepted.",
}
"""Sums of `LiveCounts` by their names there, with the text of their HELP line."""

NAMES = {
    "preemptions": "num_preemptions",
    "draft_tokens": "spec_decode_num_draft_tokens",
    "accepted_tokens": "spec_decode_num_accepted_tokens",
}
"""Where vLLM has another name."""

ENGINE = "engine"
"""The label with an instance's number, as vLLM has it. `instance` is Prometheus's own, for the address that it scrapes,
and would replace it."""

Names = Literal["colon", "underscore"]
"""`seer:steps_total` as vLLM has it, or `seer_steps_total`."""


def make_registry(counts: LiveCounts, sample: Callable[[], FleetSample], names: Names = "colon") -> CollectorRegistry:
    """A registry that answers from these."""
    registry = CollectorRegistry()
    fleet = _Fleet(counts, sample)
    registry.register(fleet if names == "colon" else _Underscored(fleet))
    return registry


class _Underscored(Collector):
    """The families of another collector, without colons in their names."""

    def __init__(self, inner: Collector) -> None:
        self._inner = inner

    def collect(self) -> Iterator[Metric]:
        """All of them."""
        for family in self._inner.collect():
            family.name = family.name.replace(":", "_")
            family.samples = [one._replace(name=one.name.replace(":", "_")) for one in family.samples]
            yield family


class _Fleet(Collector):
    """Makes the families of one scrape."""

    def __init__(self, counts: LiveCounts, sample: Callable[[], FleetSample]) -> None:
        self._counts = counts
        self._sample = sample

    def collect(self) -> Iterator[Metric]:
        """All of them."""
        sample = self._sample()
        yield from self._requests()
        yield from self._instances(sample)
        yield from self._sums()
        yield from self._histograms()
        yield from _fleet_gauges(sample)

    def _requests(self) -> Iterator[Metric]:
        open_ = GaugeMetricFamily("seer:num_requests", "Requests that have not ended, by state.", labels=["state"])
        by_state = self._counts.requests_by_state()
        for state in ("queued", "running", "parked", "at_tool"):
            open_.add_metric([state], by_state[state])
        yield open_
        ended = CounterMetricFamily("seer:request_success", "Requests that ended.", labels=["finished_reason"])
        for reason in ("stop", "length", "cancelled", "failed"):
            ended.add_metric([reason], self._counts.ended[reason])
        yield ended
        chunks = CounterMetricFamily("seer:chunks", "Chunks that ended, by why.", labels=["reason"])
        for reason, number in sorted(self._counts.chunks.items()):
            chunks.add_metric([reason], number)
        yield chunks
        yield CounterMetricFamily("seer:prompt_tokens", "Tokens of prompts.", value=self._counts.prompt_tokens)
        moved = "Chunks that started on another instance than the request's last one."
        yield CounterMetricFamily("seer:migrations", moved, value=self._counts.migrations)
        changed = "Of the migrations, those to another node."
        yield CounterMetricFamily("seer:node_changes", changed, value=self._counts.node_changes)
        yield from self._turns_and_waste()

    def _turns_and_waste(self) -> Iterator[Metric]:
        counts = self._counts
        yield CounterMetricFamily("seer:turns", "Turns after which an environment was asked.", value=counts.turns)
        failures = "Responses that failed for their environment."
        yield CounterMetricFamily("seer:tool_failures", failures, value=counts.tool_failures)
        yield CounterMetricFamily(
            "seer:dropped_groups", "Groups that were whole and not kept.", value=counts.dropped_groups
        )
        yield CounterMetricFamily(
            "seer:dropped_tokens", "Tokens generated for groups that were not kept.", value=counts.dropped_tokens
        )

    def _instances(self, sample: FleetSample) -> Iterator[Metric]:
        texts = {
            "seer:instance_up": "Whether the instance runs.",
            "seer:num_requests_running": "Requests that the instance runs.",
            "seer:num_requests_waiting": "Requests that wait inside the instance.",
            "seer:kv_cache_usage_perc": "Share of the KV memory that running requests hold; 1 is all of it.",
            "seer:accepted_tokens_per_step": "Tokens gained per request and step.",
        }
        families = {name: GaugeMetricFamily(name, text, labels=[ENGINE]) for name, text in texts.items()}
        for number, one in enumerate(sample.instances):
            state = self._counts.states.get(number)
            accepted = state.accepted_per_step if state is not None else 1.0
            values = (float(one.is_up), one.num_running, one.num_waiting, one.kv_usage, accepted)
            for family, value in zip(families.values(), values, strict=True):
                family.add_metric([str(number)], value)
        yield from families.values()

    def _sums(self) -> Iterator[Metric]:
        for name, text in SUMS.items():
            family = CounterMetricFamily(f"seer:{NAMES.get(name, name)}", text, labels=[ENGINE])
            for instance, value in sorted(self._counts.per_instance[name].items()):
                family.add_metric([str(instance)], value)
            yield family
        failures = sum(self._counts.per_instance["pool_failures"].values())
        yield CounterMetricFamily(
            "seer:pool_failures", "Blocks or calls that the pool could not serve.", value=failures
        )

    def _histograms(self) -> Iterator[Metric]:
        counts = self._counts
        yield _histogram(
            "seer:request_queue_time_seconds", "From a request's arrival to its first chunk.", counts.queue_s
        )
        yield _histogram("seer:e2e_request_latency_seconds", "From a request's arrival to its end.", counts.latency_s)
        yield _histogram("seer:tool_wait_seconds", "From a turn's end to its environment's answer.", counts.tool_s)
        yield _histogram("seer:request_generation_tokens", "Lengths of responses.", counts.response_tokens)
        steps = HistogramMetricFamily("seer:step_time_seconds", "Times of steps.", labels=[ENGINE])
        for instance, one in sorted(counts.step_s.items()):
            steps.add_metric([str(instance)], one.cumulative(), one.total)
        yield steps


def _fleet_gauges(sample: FleetSample) -> Iterator[Metric]:
    yield GaugeMetricFamily("seer:weights_version", "Version of the weights.", value=sample.weights_version)
    yield CounterMetricFamily("seer:lost_instances", "Instances that died or hung.", value=sample.num_lost)
    abandoned = "Calls of tools and rewards that ignored their cancellation and run on."
    yield CounterMetricFamily("seer:abandoned_calls", abandoned, value=sample.num_abandoned_calls)
    yield CounterMetricFamily("seer:requests_refused", "Requests answered with 429.", value=sample.refused)
    used = GaugeMetricFamily("seer:pool_used_bytes", "KV in the pool, by tier.", labels=["tier"])
    room = GaugeMetricFamily("seer:pool_capacity_bytes", "Size of the pool, by tier.", labels=["tier"])
    for family, values in ((used, sample.pool_used_bytes), (room, sample.pool_capacity_bytes)):
        for tier, value in values.items():
            family.add_metric([tier], value)
        yield family


def _histogram(name: str, text: str, values: Histogram) -> HistogramMetricFamily:
    family = HistogramMetricFamily(name, text)
    family.add_metric([], values.cumulative(), values.total)
    return family
