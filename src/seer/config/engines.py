# SPDX-License-Identifier: Apache-2.0
"""Settings that only one engine has: the section `engine_settings`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from seer.errors import ConfigError
from seer.ranges import Count, DraftTokens, NumBytes, SecondsOrZero, Share, Threads, check_fields

EngineName = Literal["local", "vllm", "fake"]
Padding = Literal["none", "drafted", "always"]
PADDINGS = ("none", "drafted", "always")
DraftPlace = Literal["scheduler", "gpu"]
DRAFT_PLACES = ("scheduler", "gpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalEngineConfig:
    """The embedded engine."""

    max_step_tokens: Count | None = None
    """Most batched tokens of a step; longer contexts are computed in pieces. None: 512 on a CPU, 8192 on a GPU."""
    max_waiting: Count = 1024
    """Requests an instance queues beyond those it runs."""
    stream_tokens: Count = 16
    """Tokens of a request between two outputs."""
    threads: Threads = 1
    """CPU threads of an instance."""
    memory_share: Share | None = None
    """Share of the device's free memory for an instance's KV where `kv` gives no size. None: 0.6 of a GPU, divided by
    the number of instances."""

    def __post_init__(self) -> None:
        """Refuse what cannot run."""
        check_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSpeculation:
    """Grouped drafts inside vLLM."""

    max_draft_tokens: DraftTokens = 8
    """Most draft tokens per request and step: vLLM reserves lookahead slots and captures graphs for this many."""
    padding: Padding = "none"
    """Fill drafts up to `max_draft_tokens`, so that all requests of a step are equally long and full CUDA graphs apply:
    `drafted` in steps that draft anything, `always` in all steps."""
    place: DraftPlace = "scheduler"
    """Where drafts are made: in the scheduler's process, from the group's tokens on all instances, on vLLM's older
    runner without asynchronous scheduling; or on the GPU, from the same tokens, with both."""
    arena_tokens: Count | None = None
    """On the GPU: tokens that the store of drafts holds. None: the store's own default."""
    table_entries: Count | None = None
    """On the GPU: entries of the store's hash table, a power of two. None: the store's own default."""
    fixed_tokens: DraftTokens | None = None
    """Always draft this many tokens, instead of the measured budget; for benchmarks."""

    def __post_init__(self) -> None:
        """Refuse what cannot run."""
        check_fields(self)
        if self.place not in DRAFT_PLACES:
            raise ConfigError(f"place={self.place!r}", hint="scheduler or gpu")
        if self.padding not in PADDINGS:
            raise ConfigError(f"padding={self.padding!r}", hint="none, drafted or always")
        entries = self.table_entries
        if entries is not None and entries & (entries - 1):
            raise ConfigError(
                f"table_entries={entries} is no power of two", hint=f"use {1 << (entries.bit_length() - 1)}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferOptions:
    """How KV blocks move between vLLM and the pool."""

    buffer_bytes: NumBytes = 64 << 20
    """Size of a pinned buffer on a GPU, an eighth of it on a CPU; at least one block."""
    num_save_buffers: Threads = 4
    """Pinned buffers for saving."""
    num_load_buffers: Threads = 2
    """Pinned buffers for loading."""
    load_threads: Threads = 8
    """Threads that read the pool at once: one thread checks and copies no more than a few GB/s."""
    save_threads: Threads = 8
    """Threads that write to the pool at once; memory of the pool that is used for the first time costs them most."""
    load_async: bool = False
    """Let other requests compute while a request's blocks are loaded. It costs the request three more steps, and made
    no difference to a rollout on four GPU engines (docs/log.md)."""
    flush_blocks: Count = 128
    """Save when this many blocks are pending ..."""
    flush_steps: Count = 32
    """... or when the oldest has waited this many steps."""
    save_wait_s: SecondsOrZero = 0.02
    """How long a step may wait for a free buffer."""
    near_deadline_s: SecondsOrZero = 0.1
    """How long a request waits for the last blocks of its context, which another instance is still saving."""
    ask_again_s: SecondsOrZero = 0.002
    """Between two lookups of such a request: vLLM asks at every step, and a lookup takes time of the scheduler."""

    def __post_init__(self) -> None:
        """Refuse what cannot run."""
        check_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmEngineConfig:
    """Stock vLLM."""

    stream_tokens: Count = 16
    """Tokens of a request between two outputs."""
    speculation: VllmSpeculation | None = None
    """Grouped drafts. None: in the scheduler on a CPU; on the GPU for Qwen2 and Llama models on vLLM 0.26 on one
    GPU, where they were measured; else off. `speculation = "off"` of the rollout turns them off everywhere."""
    pool_options: TransferOptions = field(default_factory=TransferOptions)
    """How KV blocks move between vLLM and the pool."""
    engine: dict[str, Any] = field(default_factory=dict)
    """Further engine arguments, passed to vLLM as they are. Names that the installed vLLM does not have, and what Seer
    sets itself, are refused before anything starts."""

    def __post_init__(self) -> None:
        """Refuse what cannot run."""
        check_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeEngineConfig:
    """The engine without a model, for tests."""

    step_s: SecondsOrZero = 0.0
    """Duration of a step."""

    def __post_init__(self) -> None:
        """Refuse what cannot run."""
        check_fields(self)


EngineConfig = LocalEngineConfig | VllmEngineConfig | FakeEngineConfig
ENGINE_CONFIGS: dict[str, type[LocalEngineConfig] | type[VllmEngineConfig] | type[FakeEngineConfig]] = {
    "local": LocalEngineConfig,
    "vllm": VllmEngineConfig,
    "fake": FakeEngineConfig,
}
ENGINES = tuple(ENGINE_CONFIGS)
