# SPDX-License-Identifier: Apache-2.0
"""An instance around another one: every method of the protocol is passed on, and subclasses override what they change.

Invariants
  1. `inner` is used through public names only.
  2. `start` and `close` are passed on too: the wrapper owns the instance it holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from seer.engine.base import (
    Instance,
    InstanceLimits,
    InstanceView,
    ModelInstance,
    OutputSink,
    PrefetchingInstance,
    Weights,
    node_of,
)
from seer.errors import SeerError
from seer.types import Attempt, Chunk, Lease

InnerT = TypeVar("InnerT", bound=Instance)


class _Computing(Instance, ModelInstance, Protocol):
    """Both protocols; `ModelInstance` alone is what can be asked of an object that has not started."""


ModelT = TypeVar("ModelT", bound=_Computing)


class InstanceWrapper(Generic[InnerT]):
    """Implements `seer.engine.base.Instance` by passing every call to `inner`."""

    def __init__(self, inner: InnerT) -> None:
        self.inner = inner

    @property
    def id(self) -> int:
        """The wrapped instance's id."""
        return self.inner.id

    @property
    def limits(self) -> InstanceLimits:
        """The wrapped instance's limits."""
        return self.inner.limits

    @property
    def node_name(self) -> str | None:
        """The wrapped instance's node."""
        return node_of(self.inner)

    async def start(self, sink: OutputSink) -> None:
        """Start the wrapped instance."""
        await self.inner.start(sink)

    def submit(self, chunk: Chunk) -> None:
        """Pass the chunk on."""
        self.inner.submit(chunk)

    def extend(self, leases: Sequence[Lease]) -> None:
        """Pass the leases on."""
        self.inner.extend(leases)

    def park(self, attempts: Sequence[Attempt]) -> None:
        """Pass the parks on."""
        self.inner.park(attempts)

    def abort(self, request: int) -> None:
        """Pass the abort on."""
        self.inner.abort(request)

    def view(self) -> InstanceView:
        """The wrapped instance's view."""
        return self.inner.view()

    def cached_prefix_tokens(self, chunk: Chunk) -> int:
        """What the wrapped instance has cached of the chunk's context."""
        return self.inner.cached_prefix_tokens(chunk)

    def prefetch(self, chunk: Chunk) -> None:
        """Pass the hint on, if the wrapped instance takes it."""
        if isinstance(self.inner, PrefetchingInstance):
            self.inner.prefetch(chunk)

    async def update_weights(self, weights: Weights, weights_version: int) -> None:
        """Update the wrapped instance."""
        await self.inner.update_weights(weights, weights_version)

    async def pause(self) -> None:
        """Pause the wrapped instance."""
        await self.inner.pause()

    async def resume(self) -> None:
        """Resume the wrapped instance."""
        await self.inner.resume()

    async def close(self) -> None:
        """Close the wrapped instance."""
        await self.inner.close()


class ModelInstanceWrapper(InstanceWrapper[ModelT]):
    """An instance around one that computes with a model."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self.inner.vocab_size

    @property
    def failure(self) -> SeerError | None:
        """Why it computes nothing more; None while it works."""
        return self.inner.failure
