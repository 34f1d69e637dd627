# SPDX-License-Identifier: Apache-2.0
"""The KV pool behind vLLM's KV connector interface (v1), for vLLM 0.26 to 0.33.

vLLM makes one connector in the scheduler, which decides what moves (connector_plan.py), and one in each worker, which
moves it (connector_transfer.py); with tensor parallelism each worker moves its part (connector_parts.py). A
`PoolMetadata` goes from the first to the others with every step.

A request's blocks are freed as soon as it ends: a step's saves are read from KV memory before the step's forward pass
is launched, and anything that may overwrite a freed block is launched later.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)

from seer.config import TransferOptions
from seer.engine.vllm.connector_parts import WholeBlocks, kv_layout, kv_parts
from seer.engine.vllm.connector_plan import Plan, PoolMetadata, pool_salt
from seer.engine.vllm.connector_stats import MoveStats
from seer.engine.vllm.connector_transfer import BlockTransfer
from seer.errors import ConfigError, PoolError
from seer.kvpool.open_pool import join_pool

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

log = logging.getLogger(__name__)


class SeerPoolConnector(KVConnectorBase_V1):
    """The scheduler's or the worker's side of moving blocks between vLLM's KV memory and the pool."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        parts, layout = kv_parts(vllm_config), kv_layout(vllm_config, kv_cache_config)
        config = vllm_config.kv_transfer_config
        assert config is not None, "a connector is made because there is a kv_transfer_config"
        extra = config.kv_connector_extra_config
        options = TransferOptions(**extra.get("options", {}))
        self._pool = join_pool(extra["pool"])
        self._pool_block_bytes: int = extra["pool"]["block_bytes"]
        self._num_blocks = kv_cache_config.num_blocks
        self._plan: Plan | None = None
        self._transfer: BlockTransfer | None = None
        if role == KVConnectorRole.SCHEDULER:
            speculative = vllm_config.speculative_config
            self._plan = Plan(
                WholeBlocks(self._pool, parts.num_parts),
                layout,
                pool_salt(vllm_config),
                tokens_per_step=1 + (speculative.num_speculative_tokens if speculative is not None else 0),
                options=options,
            )
        else:
            from vllm.distributed import get_tensor_model_parallel_rank

            self._transfer = BlockTransfer(self._pool, options, parts=parts, rank=get_tensor_model_parallel_rank())

    # Scheduler's side

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens after the computed ones the pool has, and whether they are loaded while others compute."""
        return self._planning().matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Load into these blocks."""
        if num_external_tokens:
            self._planning().load_into(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """What the workers move in this step."""
        return self._planning().step(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Forget blocks that could not be loaded: the pool does not have them."""
        if connector_output.invalid_block_ids:
            self._planning().forget_blocks(connector_output.invalid_block_ids)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Save the rest of a chunk, or free a request that is complete; vLLM may free its blocks at once."""
        self._planning().finish(request, block_ids)
        return False, None

    def reset_cache(self) -> bool:
        """A trainer has changed the weights: drop the pool's blocks of the versions that were used here so far."""
        for weights_version in self._planning().take_versions():
            try:
                self._pool.drop_weights_version(weights_version)
            except PoolError as error:
                # Keys carry the weights version, so stale blocks are never read; they only take up memory.
                log.warning("the pool keeps the KV of weights version %d: %s", weights_version, error)
        return True

    # Worker's side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Use this KV memory, by layer; refuse a pool that was made for smaller blocks."""
        self._moving().use(list(kv_caches.values()), self._num_blocks)
        needed = self._moving().block_bytes
        if needed > self._pool_block_bytes:
            raise ConfigError(
                f"a KV block has {needed} bytes on each rank, the pool was made for {self._pool_block_bytes}",
                hint="all instances on a pool need the same model, dtype, block_size and tensor_parallel",
            )

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """The step begins: read the blocks to save before anything else is launched."""
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, PoolMetadata), type(connector_metadata)
        self._moving().save(connector_metadata.saves, connector_metadata.frees)

    def start_load_kv(self, forward_context: ForwardContext, **_: Any) -> None:
        """Fill blocks from the pool: now, or in a thread for asynchronous loads."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, PoolMetadata), type(metadata)
        if metadata.loads:
            self._moving().load(metadata.loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to do: loads that this step needs are complete before it starts."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **_: Any) -> None:
        """Nothing to do: blocks are saved with all layers at once, when they are final."""

    def wait_for_save(self) -> None:
        """Nothing to do: saves have been read when the step is launched."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """No request waits for its saves; the second set is requests whose loads are complete."""
        return None, self._moving().take_loaded() or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that could not be loaded and must be computed."""
        return self._moving().take_failed()

    def get_kv_connector_stats(self) -> MoveStats | None:
        """What moved since the last step; None on the scheduler's side."""
        stats = self._transfer.take_stats() if self._transfer is not None else None
        return MoveStats(stats) if stats else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> MoveStats:
        """The statistics as vLLM's front end rebuilds them."""
        return MoveStats(data or {})

    def shutdown(self) -> None:
        """Close the pool."""
        if self._transfer is not None:
            self._transfer.close()
        self._pool.close()

    # Beyond vLLM's interface

    def counts(self) -> dict[str, float]:
        """Counts of the worker's side so far."""
        return self._moving().counts()

    def settle(self) -> None:
        """Wait until every block read so far was put to the pool."""
        self._moving().settle()

    def _planning(self) -> Plan:
        assert self._plan is not None, "called on the worker's side"
        return self._plan

    def _moving(self) -> BlockTransfer:
        assert self._transfer is not None, "called on the scheduler's side"
        return self._transfer
