# SPDX-License-Identifier: Apache-2.0
"""A step captured as a CUDA graph, with its input and output buffers.

Inputs and results are copied through pinned host memory that belongs to the graph. The host may write the inputs again
once it has waited for a step's results: the device has read the inputs by then.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from seer.engine.local.graph_shapes import Fitting, GraphShapes

S = TypeVar("S", bound=Fitting)


class Graph:
    """Replays a captured `forward`. Without a memory pool to capture into (tests on a CPU) it calls `forward`."""

    def __init__(
        self,
        inputs: torch.Tensor,
        forward: Callable[[], torch.Tensor],
        num_sampled: int,
        *,
        reads: object,
        pool: Any | None,
        while_computing: Callable[[], None],
    ) -> None:
        """`forward` reads `inputs`, int32 on the device, and returns `num_sampled` rows of `GpuOps.sample`.

        `reads` holds the other tensors that it reads, which must live as long as the graph. `while_computing` is called
        while the device computes.
        """
        self.device = inputs.device
        is_cuda = self.device.type == "cuda"
        self._device_inputs, self._reads, self._while_computing = inputs, reads, while_computing
        self._host_inputs = torch.empty(inputs.shape, dtype=torch.int32, pin_memory=is_cuda)
        self.inputs: NDArray[np.int32] = self._host_inputs.numpy()
        """Inputs of the next replay, on the host. Filled in before `run` or `send_inputs`."""
        self._host_sampled = torch.empty((num_sampled, 4), pin_memory=is_cuda)
        # A captured graph no longer needs `forward`. Keeping it would tie graph and runner into a reference cycle.
        self.replay, self.sampled = _call(forward, inputs, num_sampled) if pool is None else _capture(forward, pool)

    def send_inputs(self) -> None:
        """Copy `inputs` to the device."""
        self._device_inputs.copy_(self._host_inputs, non_blocking=True)

    def run(self) -> NDArray[np.float32]:
        """Run one step and wait for it. The next step overwrites the result."""
        self.send_inputs()
        self.replay()
        self._host_sampled.copy_(self.sampled, non_blocking=True)
        self._while_computing()
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        return self._host_sampled.numpy()


class Graphs(Generic[S]):
    """The graphs of one kind of step. Each is captured when its shape is first used."""

    def __init__(self) -> None:
        self.shapes = GraphShapes[S]()
        """Chooses the shape of a step."""
        self._graphs: dict[S, Graph] = {}

    def get(self, shape: S, capture: Callable[[S], Graph]) -> Graph:
        """The graph of a shape; captured now if there is none."""
        if shape not in self._graphs:
            self._graphs[shape] = capture(shape)
        return self._graphs[shape]

    def __len__(self) -> int:
        return len(self._graphs)

    def __iter__(self) -> Iterator[S]:
        return iter(self._graphs)


def _call(
    forward: Callable[[], torch.Tensor], inputs: torch.Tensor, num_sampled: int
) -> tuple[Callable[[], None], torch.Tensor]:
    sampled = torch.empty((num_sampled, 4), device=inputs.device)

    def replay() -> None:
        sampled.copy_(forward())

    return replay, sampled


def _capture(forward: Callable[[], torch.Tensor], pool: Any) -> tuple[Callable[[], None], torch.Tensor]:
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        forward()  # compiles kernels and initialises cuBLAS, which must not happen during capture
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with _no_collection(), torch.cuda.graph(captured, pool=pool, capture_error_mode="thread_local"):
        sampled = forward()
    return captured.replay, sampled


@contextmanager
def _no_collection() -> Iterator[None]:
    """Stop the garbage collector: if it frees another engine's graph, the capture fails."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
