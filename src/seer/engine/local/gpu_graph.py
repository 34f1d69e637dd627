"""A step captured as a graph, and the memory it is told and answers through.

Both ways go through pinned memory of the graph's own. It may be written again when a step's answer has been waited for:
then the device has read what it was told.
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
    """Replays `forward`; without a pool to capture into (tests on a CPU) it calls it."""

    def __init__(
        self,
        inputs: torch.Tensor,
        forward: Callable[[], torch.Tensor],
        num_sampled: int,
        *,
        reads: object,
        pool: Any | None,
        meanwhile: Callable[[], None],
    ) -> None:
        """`forward` reads `inputs`, int32 on the device, and answers with `num_sampled` rows of `GpuOps.sample`.

        `reads` is whatever else it reads that nobody else keeps: it must live as long as the graph. `meanwhile` is
        called while the device computes.
        """
        self.device = inputs.device
        is_cuda = self.device.type == "cuda"
        self._inputs, self._reads, self._meanwhile = inputs, reads, meanwhile
        self._host_inputs = torch.empty(inputs.shape, dtype=torch.int32, pin_memory=is_cuda)
        self.told: NDArray[np.int32] = self._host_inputs.numpy()
        """What the next replay is told, to be filled in."""
        self._host_sampled = torch.empty((num_sampled, 4), pin_memory=is_cuda)
        # Captured kernels need `forward` no more. Kept, it would tie graph and runner into a cycle.
        self.replay, self.sampled = _call(forward, inputs, num_sampled) if pool is None else _capture(forward, pool)

    def tell(self) -> None:
        """Send what the next replay reads."""
        self._inputs.copy_(self._host_inputs, non_blocking=True)

    def run(self) -> NDArray[np.float32]:
        """One step as it was told. The answer is overwritten by the next one."""
        self.tell()
        self.replay()
        self._host_sampled.copy_(self.sampled, non_blocking=True)
        self._meanwhile()
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        return self._host_sampled.numpy()


class Graphs(Generic[S]):
    """The graphs of one kind of step, each captured when its shape is first asked for."""

    def __init__(self) -> None:
        self.shapes = GraphShapes[S]()
        """Says which shape to ask for."""
        self._graphs: dict[S, Graph] = {}

    def get(self, shape: S, capture: Callable[[S], Graph]) -> Graph:
        """The graph of a shape."""
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
        forward()  # compiles kernels and warms cuBLAS, neither of which may happen while capturing
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with _no_collection(), torch.cuda.graph(captured, pool=pool, capture_error_mode="thread_local"):
        sampled = forward()
    return captured.replay, sampled


@contextmanager
def _no_collection() -> Iterator[None]:
    """The garbage collector could meet another engine's graph, and freeing one breaks the capture of any."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
