# SPDX-License-Identifier: Apache-2.0
"""Which part of a KV block each tensor-parallel rank holds, saves and loads.

Engines that share experts (data parallelism) hold whole blocks each, and are several engines here.

Every rank moves its own part, under keys that carry the part (`keys_of_part`). Ranks that hold equal bytes share one:
all ranks of a model with latent attention (MLA), and ranks among which vLLM repeats a KV head. The first rank of a part
saves it, every rank loads it.

    4 ranks, 8 KV heads       parts 0 1 2 3      all save
    4 ranks, 2 KV heads       parts 0 0 1 1      ranks 0 and 2 save
    4 ranks, MLA              parts 0 0 0 0      rank 0 saves

Invariants
  1. A block is held only if all its parts are.
  2. The layout, with its number of tensor-parallel ranks, is in every key: instances with different layouts find
     nothing of each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from seer.errors import ConfigError
from seer.kvpool.base import Pool
from seer.kvpool.keys import KVLayout, keys_of_part

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

SPLIT_OTHERWISE = (
    "pipeline_parallel_size",
    "decode_context_parallel_size",
    "prefill_context_parallel_size",
)
"""Ways to spread an engine, beside tensor parallelism, whose blocks the pool does not take."""


@dataclass(frozen=True, slots=True)
class KVParts:
    """The parts of each block of one engine."""

    num_ranks: int = 1
    num_parts: int = 1

    def part_of(self, rank: int) -> int:
        """The part that a rank holds."""
        return rank * self.num_parts // self.num_ranks

    def saves(self, rank: int) -> bool:
        """Whether this rank is the first with its part."""
        return rank == 0 or self.part_of(rank) != self.part_of(rank - 1)


def kv_parts(vllm_config: VllmConfig) -> KVParts:
    """The parts of this engine's blocks; refuses an engine that is spread in other ways."""
    parallel: Any = vllm_config.parallel_config
    for name in SPLIT_OTHERWISE:
        size = getattr(parallel, name, 1)
        if size > 1:
            raise ConfigError(
                f"{name}={size}: the pool takes KV of engines that are spread by tensor parallelism alone",
                hint="pool='none', or tensor_parallel and more instances",
            )
    ranks, model = parallel.tensor_parallel_size, vllm_config.model_config
    return KVParts(ranks, 1 if model.use_mla else min(ranks, model.get_total_num_kv_heads()))


def kv_layout(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> KVLayout:
    """How the bytes of a part are laid out; refuses KV memory of several kinds."""
    groups = kv_cache_config.kv_cache_groups
    spec: Any = groups[0].kv_cache_spec
    if len(groups) != 1 or not hasattr(spec, "num_kv_heads"):
        raise ConfigError(
            f"KV memory of {len(groups)} groups, the first a {type(spec).__name__}: the pool takes layers of one kind",
            hint="pool='none'",
        )
    return KVLayout(
        num_layers=len(groups[0].layer_names),
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_size,
        dtype=str(spec.dtype).removeprefix("torch."),
        block_size=spec.block_size,
        kind="latent" if vllm_config.model_config.use_mla else "kv",
        num_ranks=vllm_config.parallel_config.tensor_parallel_size,
    )


class WholeBlocks:
    """The pool as the scheduler asks it: about whole blocks, by the keys of part 0."""

    def __init__(self, pool: Pool, num_parts: int) -> None:
        self._pool, self._num_parts = pool, num_parts

    def lookup_now(self, keys: Sequence[bytes]) -> int:
        """Count the leading blocks of which all parts are held."""
        for part in range(self._num_parts):
            keys = keys[: self._pool.lookup_now(keys_of_part(keys, part))] if keys else keys
        return len(keys)

    def pin(self, request: str, keys: Sequence[bytes]) -> int:
        """Keep the leading blocks of which all parts are held; also parts of others that were found first."""
        for part in range(self._num_parts):
            keys = keys[: self._pool.pin(request, keys_of_part(keys, part))] if keys else keys
        return len(keys)
