# SPDX-License-Identifier: Apache-2.0
"""The one event schema: each request from queue to end, and the state of each instance.

The rollout loop and the instances emit these. Tables, plots, traces and the HTML page are computed from them alone.
Times are seconds on the event loop's clock.

    Queued ──> Started ──> [Prefilling ──> Decoding ──> (Preempted ──> Prefilling ...)] ──> Stopped ──> ... ──> Ended
               one per chunk; the part in brackets comes from the instance, and `Extended` anywhere in it from the loop

With turns, `Asked` follows the `Stopped` that ends a turn, and `Answered` comes before the next `Started`; in between,
the request waits for its environment.

A file of them is JSON lines, one event each; `kind` names the event.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec


class _Event(msgspec.Struct, frozen=True, gc=False, array_like=False, tag_field="kind", tag=str.lower):
    t_s: float


class Queued(_Event, frozen=True, gc=False, omit_defaults=True):
    """A request was admitted."""

    request: int
    group: int
    index: int
    num_prompt_tokens: int
    num_generated: int = 0
    """By an earlier part of a run that was resumed; later events count these tokens too."""


class Started(_Event, frozen=True, gc=False):
    """A chunk of it was handed to an instance."""

    request: int
    instance: int
    max_tokens: int
    moved_from: int | None
    """The instance of its last chunk, if there was one."""
    load_kv: bool

    @property
    def migrated_from(self) -> int | None:
        """The instance of its last chunk, if that was another one."""
        return None if self.moved_from == self.instance else self.moved_from


class Prefilling(_Event, frozen=True, gc=False):
    """The instance began to prefill: it computes the tokens it has no KV for."""

    request: int
    instance: int
    num_tokens: int
    num_recomputed: int
    """Of these, tokens whose KV had been computed before, here or elsewhere."""
    num_loaded: int
    """Tokens whose KV came from the pool instead."""


class Decoding(_Event, frozen=True, gc=False):
    """The instance began to generate."""

    request: int
    instance: int


class Preempted(_Event, frozen=True, gc=False):
    """The instance ran out of KV memory and dropped the request's; it will be recomputed."""

    request: int
    instance: int


class Extended(_Event, frozen=True, gc=False):
    """A running chunk may generate more: it stays on its instance."""

    request: int
    instance: int
    num_tokens: int
    """More than before."""
    num_generated: int
    """By the request so far, as known to the driver."""


class Stopped(_Event, frozen=True, gc=False):
    """A chunk ended: the model stopped, its lease ended, it was parked, aborted, failed, cancelled or lost."""

    request: int
    instance: int
    num_generated: int
    """By the request so far, all chunks together."""
    reason: str


class Asked(_Event, frozen=True, gc=False):
    """A turn has ended, and the request's environment was called."""

    request: int
    turn: int
    """Turns that the model has ended, this one included."""


class Answered(_Event, frozen=True, gc=False):
    """The environment gave tokens: the request waits for an instance. If it ended the response, `Ended` comes."""

    request: int
    num_tokens: int
    turn: int


class Ended(_Event, frozen=True, gc=False):
    """The request reached its terminal state."""

    request: int
    num_generated: int
    finish_reason: str


class Dropped(_Event, frozen=True, gc=False):
    """A group is whole and was not kept: its work is wasted."""

    group: int
    num_requests: int
    num_tokens: int
    """That were generated for it."""
    request_s: float
    """From the start to the end of its requests, summed over them."""


class Placed(_Event, frozen=True, gc=False):
    """The instance is on this node from now on; none where all are on the driver's machine."""

    instance: int
    node: str


class InstanceState(_Event, frozen=True, gc=False):
    """The state of an instance from now until its next such event."""

    instance: int
    num_running: int
    num_waiting: int
    kv_tokens: int
    """Tokens of running requests in its KV memory."""
    draft_tokens: float = 0.0
    """Draft tokens verified per request and step."""
    accepted_per_step: float = 1.0
    """Tokens gained per request and step, the bonus token included."""


class Stepped(_Event, frozen=True, gc=False):
    """Totals over the steps of an instance since its last such event; emitted a few times a second, not per step."""

    instance: int
    num_steps: int
    duration_s: float
    """Of all these steps together."""
    num_batched_tokens: int
    """Tokens computed: prompts, one per decoding request and step, and drafts."""
    num_prefill_tokens: int
    num_emitted: int
    """Tokens that became part of a response."""
    num_drafted: int
    num_accepted: int
    load_s: float = 0.0
    """Spent on KV from the pool, beside `duration_s`."""
    overlapped_load_s: float = 0.0
    """Spent on KV from the pool while steps ran."""
    loaded_bytes: int = 0
    """In either time."""
    far_load_s: float = 0.0
    """Of these times, spent on KV from other nodes."""
    far_loaded_bytes: int = 0
    """Of these bytes, from other nodes."""
    num_preempted: int = 0
    """For engines that count preemptions without naming the request; others emit `Preempted`."""
    num_unsaved_blocks: int = 0
    """KV blocks that were not saved to the pool, because saving took longer than the engine may wait."""


class PoolErrors(_Event, frozen=True, gc=False):
    """Counts of the KV pool's errors since the last such event. The KV that it did not give is computed again."""

    instance: int | None
    """The instance that met them; None for counts of all processes together."""
    num_failed: int = 0
    """Calls, or blocks of a call."""
    num_corrupt: int = 0
    """Blocks whose checksum did not match."""
    num_recomputed: int = 0
    """Tokens computed again because of them."""


class PoolUsed(_Event, frozen=True, gc=False):
    """Blocks that the KV pool took, refused and moved between DRAM and SSD in a run, by all processes together."""

    block_bytes: int
    num_put: int
    num_refused: int
    """Not kept: both tiers were full of KV that is still needed."""
    num_hit_dram: int
    num_hit_ssd: int
    num_spilled: int
    """Written to SSD."""
    num_prefetched: int
    """Read from SSD to DRAM before their request needed them; `num_hit_ssd` were read when it did."""

    @property
    def ssd_written_bytes(self) -> int:
        """KV written to SSD."""
        return self.num_spilled * self.block_bytes

    @property
    def ssd_read_bytes(self) -> int:
        """KV read from SSD."""
        return (self.num_hit_ssd + self.num_prefetched) * self.block_bytes


Event = (
    Queued
    | Started
    | Prefilling
    | Decoding
    | Extended
    | Preempted
    | Stopped
    | Asked
    | Answered
    | Ended
    | Dropped
    | Placed
    | InstanceState
    | Stepped
    | PoolErrors
    | PoolUsed
)
EventSink = Callable[[Event], None]


def discard(event: Event) -> None:
    """An event sink that keeps nothing."""


def both(first: EventSink, second: EventSink) -> EventSink:
    """An event sink that hands every event to these, in this order."""

    def sink(event: Event) -> None:
        first(event)
        second(event)

    return sink
