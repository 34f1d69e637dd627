# SPDX-License-Identifier: Apache-2.0
"""Settings of a vLLM instance.

Plain values, because they go to child processes; nothing here imports vLLM. `engine_arguments.py` turns them into
arguments of vLLM.

Every engine of a fleet hashes blocks alike: PYTHONHASHSEED is fixed in ENVIRONMENT.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from seer.config import TransferOptions, VllmSpeculation
from seer.drafting.curve_keys import ClientKeys
from seer.engine.instance_settings import DataParallelRank

CPU_BLOCK_STEP = 32
"""vLLM's attention on a CPU takes blocks of a multiple of this many tokens."""
CPU_BLOCK_SIZE = 128
"""vLLM's own default on a CPU."""

CPU_LATENT_BLOCK_SIZE = 16
"""The only one that vLLM's latent attention (MLA) on a CPU takes."""
CPU_VALUE_BYTES = {"bfloat16": 2, "float16": 2, "half": 2}
"""Bytes of a KV value by dtype; 4 for all others."""
DEFAULT_CPU_KV_BYTES = 1 << 30
"""Enough for the small models that run on a CPU, and little next to a machine's memory."""

ENVIRONMENT = {
    "PYTHONHASHSEED": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "8",  # it needs 4; a host waits 10
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the host pins the instance's cores
}
"""Environment of an engine process, where the user has not set it: equal hashes in every engine, no reports, no
network."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSettings:
    """One instance of vLLM."""

    model_dir: str
    max_num_seqs: int = 64
    max_model_len: int
    block_size: int | None = None
    """None: vLLM chooses."""
    kv_blocks: int | None = None
    kv_memory_bytes: int | None = None
    """Of each rank."""
    tensor_parallel: int = 1
    """Ranks that the model is spread over; each is a worker process of its own."""
    data_parallel: DataParallelRank | None = None
    """With which other engines it shares the experts of its model; None for an engine by itself."""
    dtype: str = "auto"
    device: str = "cpu"
    stream_tokens: int = 16
    """Tokens of a request between two outputs."""
    speculation: VllmSpeculation | None = None
    """Grouped drafts inside the engine; None runs vLLM without."""
    draft_servers: tuple[str, ...] = ()
    """Without any, drafts come from this instance's own responses."""
    draft_keys: ClientKeys | None = None
    """Keys that the draft servers know."""
    pool: dict[str, Any] | None = None
    """`backend` (local or mooncake) and that pool's settings."""
    pool_options: TransferOptions = field(default_factory=TransferOptions)
    """How the connector moves blocks."""
    counts_steps: bool = True
    """Use the scheduler of ours that counts its steps and holds outputs back until they are due."""
    engine: dict[str, Any] = field(default_factory=dict)
    """More engine arguments, passed to vLLM unchanged."""
