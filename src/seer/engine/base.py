# SPDX-License-Identifier: Apache-2.0
"""The protocol of an instance: one running inference engine with its own KV memory.

The rollout loop talks to every instance through this protocol: the embedded PyTorch engine, vLLM, an instance in
another process, the fake, the simulator, and wrappers of them. All of them pass
tests/contract/test_instance_contract.py.

Rules of the protocol
  1. `submit` either raises (nothing was started) or leads to exactly one output with `end` set for that attempt.
  2. Outputs of one request arrive in order; their tokens are disjoint, gapless and in all at most what the largest
     lease of the attempt allows: `chunk.max_tokens`, or more after `extend`.
  3. Every token comes with its log-probability and the weights version it was sampled under. The simulator has no
     tokens: its outputs carry only their number.
  4. What an instance computes for one request does not depend on the other requests it runs.
  5. All methods are called from the event loop's thread, and the sink is called there.
  6. A paused instance generates nothing until `resume`; chunks, leases and aborts are still accepted.
  7. An attempt that has ended stays ended: a lease or a park that comes later, or is for another attempt, is ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from seer.errors import SeerError
from seer.types import Attempt, Chunk, ChunkOutput, DraftMode, InstanceLimits, Lease

__all__ = [
    "DraftingInstance",
    "Instance",
    "InstanceLimits",
    "InstanceView",
    "ModelInstance",
    "OutputSink",
    "PlacedInstance",
    "PrefetchingInstance",
    "Weights",
    "node_of",
]

OutputSink = Callable[[ChunkOutput], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceView:
    """The state of an instance at one moment, for people and metrics; admission does not read it."""

    num_running: int = 0
    num_waiting: int = 0
    used_kv_blocks: int = 0
    """Held by running requests."""
    cached_kv_blocks: int = 0
    """Held by no running request, kept for reuse until the memory is needed."""
    num_preemptions: int = 0
    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    weights_version: int = 0


Weights = Path | Mapping[str, Any]
"""New weights: a folder or safetensors file, or tensors by name."""


class Instance(Protocol):
    """One running inference engine."""

    @property
    def id(self) -> int:
        """Dense and unique within a rollout."""

    @property
    def limits(self) -> InstanceLimits:
        """What it can hold."""

    async def start(self, sink: OutputSink) -> None:
        """Get ready for chunks; outputs go to `sink` from now on."""

    def submit(self, chunk: Chunk) -> None:
        """Start a chunk. If it raises `Overloaded` or `InstanceError`, nothing was started."""

    def extend(self, leases: Sequence[Lease]) -> None:
        """Let attempts generate more than before. A lease that is not longer than the present one changes nothing."""

    def park(self, attempts: Sequence[Attempt]) -> None:
        """End leases at the next step boundary at which a KV block is full, or earlier, with the KV kept as at a
        lease's end; the last outputs have `end=PARKED`, unless the chunk stops or reaches its lease before that.
        """

    def abort(self, request: int) -> None:
        """Stop working on a request soon; its last output has `end=ABORTED`. Unknown requests are ignored."""

    def view(self) -> InstanceView:
        """Its current state, without waiting."""

    def cached_prefix_tokens(self, chunk: Chunk) -> int:
        """How many leading tokens of the chunk's context are in this instance's own KV memory."""

    async def update_weights(self, weights: Weights, weights_version: int) -> None:
        """Switch to a newer weights version; refused while chunks run. KV of the old version is never used again."""

    async def pause(self) -> None:
        """Stop stepping; chunks stay where they are."""

    async def resume(self) -> None:
        """Step again."""

    async def close(self) -> None:
        """Free everything; chunks still running end as `ABORTED`."""


@runtime_checkable
class DraftingInstance(Protocol):
    """An instance that drafts, and must know which run its drafts are for."""

    async def begin_run(
        self, run: str, drafts: DraftMode, weights_version: int, past: Mapping[int, Sequence[Sequence[int]]]
    ) -> None:
        """Forget what earlier runs generated, and draft as this run asks; `past` holds earlier responses by group."""

    def end_group(self, group: int) -> None:
        """All requests of the group have ended: forget the tokens that its drafts came from."""


@runtime_checkable
class PrefetchingInstance(Protocol):
    """An instance that can bring KV closer before a chunk needs it."""

    def prefetch(self, chunk: Chunk) -> None:
        """A request with this context will probably run here next: bring its KV from SSD to DRAM. Only a hint."""


@runtime_checkable
class PlacedInstance(Protocol):
    """An instance that may be on another machine than its driver."""

    @property
    def node_name(self) -> str | None:
        """Names its node; instances with equal names share memory. None for the driver's own machine."""


def node_of(instance: Instance) -> str | None:
    """The name of its node; None for the driver's own machine."""
    return instance.node_name if isinstance(instance, PlacedInstance) else None


@runtime_checkable
class ModelInstance(Protocol):
    """An instance that computes a model."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""

    @property
    def failure(self) -> SeerError | None:
        """Why it computes nothing more; None while it works. Set before the chunks in flight end as FAILED."""
