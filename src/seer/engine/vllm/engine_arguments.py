# SPDX-License-Identifier: Apache-2.0
"""The arguments of vLLM's engine that an instance's settings become; nothing here imports vLLM.

Invariants
  1. Without speculation vLLM runs as usual: its own runner, asynchronous scheduling, and its own scheduler, which also
     counts its steps.
  2. Log-probabilities are those of the distribution a token was sampled from.
  3. `additional_config` is equal for all instances of a fleet and for all its starts: vLLM hashes it to find what it
     compiled before (draft_link.py has what is not).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from seer.config import VllmSpeculation
from seer.config.toml_files import plain_values
from seer.engine.instance_settings import DataParallelRank
from seer.engine.vllm.gpu_drafts.graphs import Shapes
from seer.engine.vllm.settings import VllmSettings

CPU_ARGUMENTS: dict[str, Any] = {
    "gpu_memory_utilization": 0.02,  # on a CPU: the share of memory that must be free; KV memory is given in bytes
    "enforce_eager": True,  # compiling takes longer than most runs on a CPU
    # A seeded request with chunked prefill ends vLLM's engine on a CPU: it rewinds the request's generator after each
    # piece, which CPU generators cannot do.
    "enable_chunked_prefill": False,
}
"""Engine arguments on a CPU, each with its reason."""
CPU_LATENT_ARGUMENTS: dict[str, Any] = {
    # vLLM prefers its kernels for AMX, which need bfloat16 and end the process where PyTorch reports AMX and the
    # machine does not let processes use it. The other kernels run everywhere.
    "attention_config": {"backend": "CPU_MLA"},
    "enable_prefix_caching": False,  # vLLM turns it off for these kernels
    # vLLM's native rotary embedding reads queries of three dimensions, which these models have, with the wrong stride
    # on a CPU: a token then depends on what else is in the batch. PyTorch's own operations are right.
    "compilation_config": {"custom_ops": ["all", "-rotary_embedding"]},
}
"""More of them for models with latent attention (MLA)."""
SEPARATE_WORKER_SEQS = 32
"""From so many sequence slots on, and always with drafts on the GPU, the worker gets a process of its own. Otherwise
vLLM plans a step and launches its kernels in one thread, and at 256 requests that thread is what a step waits for
(benchmarks/vllm/results.md). With few requests the messages to the worker cost more than they save."""
FREE_GPU_SHARE = 0.02
"""Of the GPU's memory, what must be free when KV memory is given in bytes: vLLM only checks it then, and its default of
0.92 is what no trainer on the same GPU leaves."""
CPU_STEP_TOKENS = 4096
"""Batched tokens of one step; more where one context may be longer, since chunked prefill is off."""


def engine_arguments(settings: VllmSettings, identity: str) -> dict[str, Any]:
    """Keyword arguments of vLLM's `AsyncEngineArgs`."""
    speculation = settings.speculation
    lookahead = speculation.max_draft_tokens + 1 if speculation is not None else 0
    arguments: dict[str, Any] = {
        "model": settings.model_dir,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # sampling comes with each request, not from the folder's defaults
        "dtype": settings.dtype,
        "max_model_len": settings.max_model_len + lookahead,
        "max_num_seqs": settings.max_num_seqs,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
        "stream_interval": settings.stream_tokens,
        "disable_log_stats": True,
        "worker_extension_cls": "seer.engine.vllm.worker.SeerWorker",
    }
    if settings.counts_steps:
        arguments["scheduler_cls"] = "seer.engine.vllm.step_counting.counting_scheduler"
    if settings.tensor_parallel > 1:
        arguments["tensor_parallel_size"] = settings.tensor_parallel
    if settings.data_parallel is not None:
        arguments |= _among_ranks(settings.data_parallel)
    if _separates_worker(settings):
        arguments["distributed_executor_backend"] = "mp"
    if settings.block_size is not None:
        arguments["block_size"] = settings.block_size
    if settings.kv_blocks is not None:
        arguments["num_gpu_blocks_override"] = settings.kv_blocks + 1  # vLLM keeps one block for itself
    if settings.kv_memory_bytes is not None:
        arguments["kv_cache_memory_bytes"] = settings.kv_memory_bytes
        arguments["gpu_memory_utilization"] = FREE_GPU_SHARE
    if settings.device == "cpu":
        arguments |= CPU_ARGUMENTS
        arguments["max_num_batched_tokens"] = max(CPU_STEP_TOKENS, arguments["max_model_len"])
    if speculation is not None:
        arguments |= _on_gpu(speculation, settings) if speculation.place == "gpu" else _in_scheduler(speculation)
    if settings.pool is not None:
        arguments["kv_transfer_config"] = {
            "kv_connector": "SeerPoolConnector",
            "kv_connector_module_path": "seer.engine.vllm.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "pool": settings.pool,
                "model": identity,
                "options": plain_values(settings.pool_options),
            },
        }
    return arguments | settings.engine


def _among_ranks(own: DataParallelRank) -> dict[str, Any]:
    """An engine that shares experts with others. Each has a front end of its own, as behind an external load balancer
    of vLLM, because which of them gets a request is Seer's decision.
    """
    return {
        "data_parallel_size": own.size,
        "data_parallel_rank": own.rank,
        "data_parallel_address": own.address,
        "data_parallel_rpc_port": own.port,
        "enable_expert_parallel": True,  # without it each expert would be cut into as many pieces as there are GPUs
    }


def _separates_worker(settings: VllmSettings) -> bool:
    if settings.tensor_parallel > 1 or settings.device == "cpu":
        return settings.tensor_parallel > 1
    drafts_on_gpu = settings.speculation is not None and settings.speculation.place == "gpu"
    return drafts_on_gpu or settings.max_num_seqs >= SEPARATE_WORKER_SEQS


def _in_scheduler(speculation: VllmSpeculation) -> dict[str, Any]:
    return {
        "scheduler_cls": "seer.engine.vllm.scheduler.SeerScheduler",
        "async_scheduling": False,
        "speculative_config": {
            "method": "custom_class",
            "model": "seer.engine.vllm.proposer.StubProposer",
            "num_speculative_tokens": speculation.max_draft_tokens,
        },
        "additional_config": {
            "seer": {
                "padding": speculation.padding,
                "fixed_tokens": speculation.fixed_tokens,
            }
        },
    }


def _on_gpu(speculation: VllmSpeculation, settings: VllmSettings) -> dict[str, Any]:
    shapes = Shapes(settings.max_num_seqs, speculation.max_draft_tokens, fixed_tokens=speculation.fixed_tokens)
    own = {
        "arena_tokens": speculation.arena_tokens,
        "table_entries": speculation.table_entries,
        "shapes": dataclasses.asdict(shapes),
    }
    return {
        "worker_cls": "seer.engine.vllm.gpu_drafts.worker.GroupedDraftsWorker",
        "scheduler_cls": "seer.engine.vllm.gpu_drafts.scheduler.GroupedDraftsScheduler",
        "async_scheduling": True,
        "speculative_config": {
            "method": "ngram_gpu",  # accepted by vLLM's checks, and replaced by ours in the worker
            "num_speculative_tokens": speculation.max_draft_tokens,
            "prompt_lookup_min": 1,
            "prompt_lookup_max": 8,
            # Makes the number of drafts changeable; our scheduler changes it before every step.
            "num_speculative_tokens_per_batch_size": [(1, settings.max_num_seqs, speculation.max_draft_tokens)],
        },
        "additional_config": {"seer": own},
        "compilation_config": {"cudagraph_capture_sizes": piecewise_sizes(shapes)},
    }


def piecewise_sizes(shapes: Shapes) -> list[int]:
    """Token counts of the graphs for steps that also compute contexts: vLLM's default list, and the largest we use.

    vLLM may keep only multiples of 1 + K, and its attention reserves memory for graphs up to the largest of them.
    """
    width = 1 + shapes.max_draft_tokens
    largest = -(-max(count * (1 + depth) for count, depth in shapes) // width) * width
    return sorted({1, 2, 4, *range(8, 257, 8), *range(272, 513, 16), largest})
