# SPDX-License-Identifier: Apache-2.0
"""Run steps on a GPU: captured graphs for shapes that repeat, and bursts of decoding steps without the host.

    kind of step                              how
    every chunk decodes, no drafts            burst: a graph per batch size, replayed several times; each replay lays
                                              out its batched tokens from the sequence slots' state on the device
    every chunk decodes, some have drafts     a graph per (batch size, tokens per chunk); one copy in, one copy out;
                                              several steps in native code (`run_drafted`) if the drafter supports it
    anything else (pieces of contexts)        a graph per (batched tokens, chunks) where steps are small and often of
                                              that size; else kernel by kernel

Chunks that use top-k, top-p or min-p, or are still below `min_tokens`, are sampled by sampling.py, one row at a time.
All others are sampled on the device, and the host waits for a step once, however many chunks it has. graph_shapes.py
chooses the graph of a step.

Invariants
  1. Padding tokens belong to a spare sequence slot. They write their KV to a slot that is never read.
  2. When a step starts, the seed and temperature of a sequence slot on the device are its chunk's. When a burst starts,
     so are its last token and position. Steps with drafts carry their own tokens and do not update those two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from seer.drafting.base import Allowance, DraftSession
from seer.engine.local import gpu_kernels as kernels
from seer.engine.local.active import ActiveChunk
from seer.engine.local.batch import Batch, Work, build
from seer.engine.local.batch_scheduler import BatchScheduler
from seer.engine.local.drafted_steps import NO_MOVE, run_drafted_steps
from seer.engine.local.gpu_graph import Graph, Graphs
from seer.engine.local.gpu_ops import ANY_TREE_NODES, TILE_TOKENS, GpuOps, GpuStep, SeqSlotState, describe
from seer.engine.local.graph_shapes import MixedShape, Shape
from seer.engine.local.model import Model
from seer.engine.local.runner import DraftedSteps, sample_rows
from seer.engine.local.sampling import MASK64, Samples, mix64, sample, unpack
from seer.engine.local.uniform_rows import SEQ_SLOT, SLOT, TOKEN, VISIBLE, lay_out

BURST = 8
"""Decoding steps per burst: host work per token falls to an eighth; a chunk that stops wastes 3.5 tokens on average."""

Flat = TypeVar("Flat", torch.Tensor, NDArray[np.int32])

NOT_SENT = -1
"""Position of a sequence slot that must be sent before a burst; valid positions are 0 or more."""


class GpuRunner:
    """Replays captured graphs; implements `Runner`."""

    def __init__(
        self,
        model: Model,
        scheduler: BatchScheduler,
        *,
        capture: bool = True,
        while_computing: Callable[[], None] = lambda: None,
    ) -> None:
        assert isinstance(model.ops, GpuOps), "a GPU runner needs the GPU's kernels"
        self.model, self.ops, self.scheduler, self.capture = model, model.ops, scheduler, capture
        self.device = model.ops.device
        self.while_computing = while_computing
        """Called after the device has been given its work and before the host waits for it."""
        num_seq_slots, width = scheduler.tables.shape
        self.spare_seq_slot = num_seq_slots
        self.spare_slot = scheduler.cache.spare_slot
        self.tables = torch.full(
            (num_seq_slots + 1, width),
            self.spare_slot // scheduler.cache.block_size,
            dtype=torch.int32,
            device=self.device,
        )
        self.seq_slots = SeqSlotState.zeros(num_seq_slots + 1, self.device)
        self._positions: NDArray[np.int64] = np.zeros(num_seq_slots + 1, np.int64)
        self._limits: NDArray[np.int64] = np.zeros(num_seq_slots + 1, np.int64)
        self._owners: list[object] = [None] * num_seq_slots
        self._tables_version = -1
        self.decoding, self.verifying = Graphs[Shape](), Graphs[Shape]()
        self.mixed = Graphs[MixedShape]()
        self._pool = torch.cuda.graph_pool_handle() if capture and self.device.type == "cuda" else None

    # The protocol

    @property
    def num_captured(self) -> int:
        """Graphs of all kinds captured so far."""
        return len(self.decoding) + len(self.verifying) + len(self.mixed)

    def run(self, works: list[Work]) -> Samples:
        """One step, by graph where its shape repeats."""
        self._send_tables()
        self._send_owners(works)
        uniform = all(work.num_tokens == 1 and work.samples for work in works)
        if uniform and all(_plain_sampling(work) for work in works):
            return self._run_uniform(works)
        return self._run_any(works)

    def burst_length(self, works: Sequence[Work]) -> int:
        """`BURST` if every chunk can be sampled on the device, else 1."""
        return BURST if all(_plain_sampling(work) for work in works) else 1

    def burst(self, works: Sequence[Work], num_steps: int) -> list[Samples]:
        """Replay the decoding graph; the host reads all results at the end."""
        self._send_tables()
        self._send_owners(works)
        self._send_positions(works)
        shape = self.decoding.shapes.choose(Shape.of(len(works), 1), num_steps)
        graph = self.decoding.get(shape, self._capture_burst)
        seq_slots = [work.active.seq_slot for work in works]
        graph.inputs[...] = seq_slots + [self.spare_seq_slot] * (shape.num_chunks - len(seq_slots))
        graph.send_inputs()
        results = torch.empty((num_steps, *graph.sampled.shape), device=self.device)
        for index in range(num_steps):
            graph.replay()
            results[index].copy_(graph.sampled)
        self._positions[seq_slots] += num_steps
        self.while_computing()
        host = results.cpu().numpy()
        return [unpack(host[index, : len(works)]) for index in range(num_steps)]

    def run_drafted(
        self, works: Sequence[Work], session: DraftSession, allowance: Allowance, *, until_one_ends: bool
    ) -> DraftedSteps:
        """Verify with graphs; drafted_steps.py does the work between two steps."""
        self._send_tables()
        self._send_owners(works)
        return run_drafted_steps(
            works,
            session,
            allowance,
            scheduler=self.scheduler,
            choose=self._choose_uniform,
            move=self.ops.move,
            max_steps=BURST,
            until_one_ends=until_one_ends,
        )

    # One step

    def _run_uniform(self, works: list[Work]) -> Samples:
        """Each chunk's last token and its draft nodes, padded to one shape."""
        most = max(1 + (len(work.tree.tokens) if work.tree else 0) for work in works)
        shape, step = self._choose_uniform(len(works), most)
        cache = self.scheduler.cache
        rows = lay_out(
            works,
            size=shape.num_chunks,
            per_chunk=shape.tokens_per_chunk,
            block_size=cache.block_size,
            first_scratch_slot=cache.first_scratch_slot,
            spare_seq_slot=self.spare_seq_slot,
            spare_slot=self.spare_slot,
        )
        step.inputs[: rows.size], step.inputs[rows.size :] = rows.ravel(), NO_MOVE
        return unpack(step.run())

    def _choose_uniform(self, num_chunks: int, tokens_per_chunk: int) -> tuple[Shape, Graph]:
        """The graph for a step with this many tokens for each of its chunks."""
        shape = self.verifying.shapes.choose(Shape.of(num_chunks, tokens_per_chunk))
        return shape, self.verifying.get(shape, self._capture_uniform)

    def _run_any(self, works: list[Work]) -> Samples:
        cache = self.scheduler.cache
        batch = build(works, cache.block_size, cache.first_scratch_slot)
        on_device = all(_plain_sampling(work) for work in works if work.samples)
        own = (
            MixedShape.of(batch.num_batched_tokens, len(works), any(work.tree for work in works)) if on_device else None
        )
        shape = self.mixed.shapes.choose_or_eager(own) if own is not None else None
        if shape is not None:
            return self._run_mixed(batch, shape)
        logits = self.model.forward(batch, self.tables)
        if not len(batch.sample_rows):
            return Samples([], [], [])
        if not on_device:
            return sample(logits, sample_rows(works))
        rows = torch.from_numpy(batch.sample_rows.astype(np.int32)).to(self.device)
        return unpack(self.ops.sample(logits, rows, self.seq_slots, advance=False).cpu().numpy())

    def _run_mixed(self, batch: Batch, shape: MixedShape) -> Samples:
        """Any batch, padded with tokens of the spare sequence slot."""
        graph = self.mixed.get(shape, self._capture_mixed)
        graph.inputs[...] = self._mixed_inputs(shape, batch)
        return unpack(graph.run()[: len(batch.sample_rows)])

    def _mixed_inputs(self, shape: MixedShape, batch: Batch | None) -> NDArray[np.int32]:
        """Inputs of a mixed step. Padding is in tiles too: a row in no tile would be left with arbitrary values."""
        inputs = np.zeros(_mixed_size(shape), np.int32)
        rows, tiles, sampled = _mixed_parts(inputs, shape)
        rows[SEQ_SLOT], rows[SLOT], rows[VISIBLE] = self.spare_seq_slot, self.spare_slot, 1
        num_batched_tokens = num_tiles = 0
        if batch is not None:
            own_rows, own_tiles = describe(batch)
            num_batched_tokens, num_tiles = own_rows.shape[1], own_tiles.shape[1]
            rows[:, :num_batched_tokens], tiles[:, :num_tiles] = own_rows, own_tiles
            sampled[: len(batch.sample_rows)] = batch.sample_rows
        for tile, at in enumerate(range(num_batched_tokens, shape.num_batched_tokens, TILE_TOKENS), num_tiles):
            tiles[:, tile] = at, min(TILE_TOKENS, shape.num_batched_tokens - at), at
        return inputs

    # Captured once

    def _capture_burst(self, shape: Shape) -> Graph:
        """A step that lays out its batched tokens on the device, from a list of sequence slots."""
        step = self._uniform_step(
            shape, torch.empty((6, shape.num_batched_tokens), dtype=torch.int32, device=self.device)
        )
        seq_slots = torch.full((shape.num_chunks,), self.spare_seq_slot, dtype=torch.int32, device=self.device)
        every_row = torch.arange(shape.num_batched_tokens, dtype=torch.int32, device=self.device)

        def forward() -> torch.Tensor:
            self.ops.step = step
            self._next_rows(step, seq_slots)
            return self._sample_all(step, every_row, advance=True)

        return Graph(
            seq_slots,
            forward,
            shape.num_batched_tokens,
            reads=(step, every_row),
            pool=self._pool,
            while_computing=self.while_computing,
        )

    def _capture_uniform(self, shape: Shape) -> Graph:
        """A step whose inputs are its batched tokens, and the KV of the step before that is moved first."""
        inputs = torch.full(
            (6 * shape.num_batched_tokens + 2 * shape.num_nodes,), NO_MOVE, dtype=torch.int32, device=self.device
        )
        step = self._uniform_step(shape, inputs[: 6 * shape.num_batched_tokens].view(6, shape.num_batched_tokens))
        moves = inputs[6 * shape.num_batched_tokens :].view(2, shape.num_nodes)
        every_row = torch.arange(shape.num_batched_tokens, dtype=torch.int32, device=self.device)

        def forward() -> torch.Tensor:
            self.ops.step = step
            if shape.num_nodes:
                self.ops.move_on_device(moves, num_programs=shape.num_chunks)
            return self._sample_all(step, every_row, advance=False)

        return Graph(
            inputs,
            forward,
            shape.num_batched_tokens,
            reads=(step, every_row),
            pool=self._pool,
            while_computing=self.while_computing,
        )

    def _capture_mixed(self, shape: MixedShape) -> Graph:
        """A step whose inputs are its batched tokens, its tiles and the rows to sample from."""
        inputs = torch.from_numpy(self._mixed_inputs(shape, None)).to(self.device)
        rows, tiles, sampled = _mixed_parts(inputs, shape)
        step = GpuStep(
            rows=rows,
            tiles=tiles,
            tables=self.tables,
            num_batched_tokens=shape.num_batched_tokens,
            tile_tokens=TILE_TOKENS,
            num_node_tokens=ANY_TREE_NODES if shape.has_trees else 0,
        )

        def forward() -> torch.Tensor:
            self.ops.step = step
            hidden = self.model.weights.embedding[step.rows[TOKEN].long()]
            change = self.model.run_layers(hidden)
            at = sampled.long()
            return self.ops.sample(self.model.logits(hidden[at], change[at]), sampled, self.seq_slots, advance=False)

        return Graph(
            inputs,
            forward,
            len(sampled),
            reads=(step, sampled),
            pool=self._pool,
            while_computing=self.while_computing,
        )

    def _uniform_step(self, shape: Shape, rows: torch.Tensor) -> GpuStep:
        """A step over these rows, all of them padding until they are filled in."""
        num_batched_tokens, per_chunk = shape.num_batched_tokens, shape.tokens_per_chunk
        rows.zero_()
        rows[SEQ_SLOT], rows[SLOT], rows[VISIBLE] = self.spare_seq_slot, self.spare_slot, 1
        first = torch.arange(0, num_batched_tokens, per_chunk, dtype=torch.int32)
        tiles = torch.stack((first, torch.full_like(first, per_chunk), first + 1))
        return GpuStep(
            rows=rows,
            tiles=tiles.contiguous().to(self.device),
            tables=self.tables,
            num_batched_tokens=num_batched_tokens,
            tile_tokens=per_chunk,
            num_node_tokens=0 if per_chunk == 1 else 16 if per_chunk <= 17 else 32,
        )

    def _sample_all(self, step: GpuStep, every_row: torch.Tensor, *, advance: bool) -> torch.Tensor:
        hidden = self.model.weights.embedding[step.rows[TOKEN].long()]
        logits = self.model.logits(hidden, self.model.run_layers(hidden))
        return self.ops.sample(logits, every_row, self.seq_slots, advance=advance)

    def _next_rows(self, step: GpuStep, seq_slots: torch.Tensor) -> None:
        state = self.seq_slots
        kernels.next_rows_kernel[(step.num_batched_tokens,)](
            seq_slots, state.tokens, state.positions, state.limits, self.tables, self.tables.shape[1], step.rows,
            step.capacity, BT=self.scheduler.cache.block_size, num_warps=1,
        )  # fmt: skip

    # State on the device

    def _send_tables(self) -> None:
        if self._tables_version != self.scheduler.tables_version:
            self._tables_version = self.scheduler.tables_version
            self.tables[:-1].copy_(self.scheduler.tables)

    def _send_owners(self, works: Sequence[Work]) -> None:
        """Send seed and temperature of each chunk that is new in its sequence slot."""
        fresh = [work.active for work in works if self._owners[work.active.seq_slot] is not work.active]
        if not fresh:
            return
        at = torch.tensor([active.seq_slot for active in fresh], device=self.device)
        seeds = [_signed(mix64(active.chunk.seed & MASK64)) for active in fresh]
        self.seq_slots.seeds[at] = torch.tensor(seeds, dtype=torch.int64, device=self.device)
        inverse = [_inverse(active.chunk.sampling.temperature) for active in fresh]
        self.seq_slots.inverse_temperature[at] = torch.tensor(inverse, dtype=torch.float32, device=self.device)
        for active in fresh:
            self._owners[active.seq_slot] = active
            self._positions[active.seq_slot] = NOT_SENT

    def _send_positions(self, works: Sequence[Work]) -> None:
        """Send last token, position and limit of sequence slots whose position or limit on the device is stale."""
        stale = [active for active in (work.active for work in works) if self._is_stale(active)]
        if not stale:
            return
        seq_slots = [active.seq_slot for active in stale]
        last = [len(active.tokens) - 1 for active in stale]
        limits = [_last_position(active) for active in stale]
        ints = np.array([seq_slots, [active.tokens[-1] for active in stale], last, limits], np.int32)
        sent = _pinned(ints, self.device).to(self.device, non_blocking=True)
        at = sent[0].long()
        self.seq_slots.tokens[at], self.seq_slots.positions[at], self.seq_slots.limits[at] = sent[1], sent[2], sent[3]
        self._positions[seq_slots], self._limits[seq_slots] = last, limits

    def _is_stale(self, active: ActiveChunk) -> bool:
        at = active.seq_slot
        return bool(self._positions[at] != len(active.tokens) - 1 or self._limits[at] != _last_position(active))


def _last_position(active: ActiveChunk) -> int:
    """The last position that a burst writes to. Steps after it write there too: that KV is not used, or computed again
    by the step after the burst."""
    return len(active.tokens) + active.num_room - 1


def _plain_sampling(work: Work) -> bool:
    """Whether the device can sample for this chunk: no token is excluded from the distribution."""
    sampling = work.active.chunk.sampling
    whole = sampling.top_p == 1 and sampling.top_k is None and sampling.min_p == 0
    return whole and work.active.num_sampled >= sampling.min_tokens


def _mixed_size(shape: MixedShape) -> int:
    """Number of integers in a mixed step's inputs."""
    num_sampled = shape.num_batched_tokens if shape.has_trees else shape.num_chunks
    return 6 * shape.num_batched_tokens + 3 * _num_tiles(shape) + num_sampled


def _num_tiles(shape: MixedShape) -> int:
    """The most tiles a step can need: the last tile of each chunk, and of the padding, may be partly empty."""
    return shape.num_batched_tokens // TILE_TOKENS + shape.num_chunks + 1


def _mixed_parts(inputs: Flat, shape: MixedShape) -> tuple[Flat, Flat, Flat]:
    """Views of a mixed step's inputs: rows, tiles, rows to sample from."""
    first_tile = 6 * shape.num_batched_tokens
    first_sample = first_tile + 3 * _num_tiles(shape)
    return (
        inputs[:first_tile].reshape(6, shape.num_batched_tokens),
        inputs[first_tile:first_sample].reshape(3, _num_tiles(shape)),
        inputs[first_sample:],
    )


def _pinned(array: NDArray[np.int32], device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if device.type == "cuda" else tensor


def _signed(value: int) -> int:
    """An unsigned 64-bit number as the int64 with the same bits."""
    return value - 2**64 if value >= 2**63 else value


def _inverse(temperature: float) -> float:
    return 0.0 if temperature == 0 else 1.0 / temperature
