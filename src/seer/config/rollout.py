# SPDX-License-Identifier: Apache-2.0
"""What `seer.Rollout` takes: a model on instances, their memory, and the processes they run in."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from seer.config.engines import ENGINE_CONFIGS, ENGINES, EngineConfig, EngineName
from seer.config.nearest import nearest
from seer.errors import ConfigError
from seer.machine.gpus import refuse_repeated
from seer.ranges import (
    BlockSize,
    Count,
    CountOrZero,
    FileName,
    Instances,
    NumBytes,
    NumBytesOrZero,
    Seconds,
    SecondsOrZero,
    SequenceSlots,
    check_fields,
)
from seer.scheduling.registry import parse_scheduler

PoolBackend = Literal["local", "mooncake", "none"]
POOL_BACKENDS = ("local", "mooncake", "none")
PoolProtocol = Literal["auto", "tcp", "rdma"]
POOL_PROTOCOLS = ("auto", "tcp", "rdma")
SpeculationMode = Literal["auto", "off"]
SPECULATION_MODES = ("auto", "off")
DTYPES = ("auto", "float32", "bfloat16", "float16")

CPU_MAX_NUM_SEQS = 16
"""On a CPU a step's time grows with its requests, so more of them at once gain little and hold more KV."""
GPU_MAX_NUM_SEQS = 256
"""vLLM's own default. The local engine captures graphs for up to 512 requests, and 256 of them with the deepest draft
(9 tokens each) stay below its 8192 tokens of a step."""
CPU_KV_BYTES = 1 << 30
"""Per instance: memory that is reserved and never used would only slow the start."""
CPU_SILENCE_S = 10.0
GPU_SILENCE_S = 60.0
"""Compiling a kernel or capturing a graph holds the interpreter, so a healthy process may send nothing for long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvConfig:
    """The KV memory of each instance."""

    memory_bytes: NumBytes | None = None
    """Its size; with tensor parallelism that of each rank. None: 1 GiB on a CPU; on a GPU its instances share 60% of
    what is free (vLLM: 90% of the GPU)."""
    blocks: Count | None = None
    """Its size in blocks, instead of `memory_bytes`."""
    block_size: BlockSize = 16
    """Tokens of a KV block. vLLM on a CPU rounds it up to a multiple of 32."""

    def __post_init__(self) -> None:
        """Refuse what cannot run."""
        check_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """The KV pool that instances share, and that paused requests are kept in; one instance has a pool only if its size
    or an SSD tier is given."""

    backend: PoolBackend = "local"
    """`local`: shared memory of this machine; `mooncake`: a store that `seer pool up` started; `none`. On a Ray cluster
    `local` is none, because nodes share no memory, and `mooncake` is a store over the nodes that the rollout starts."""
    memory_bytes: NumBytesOrZero | None = None
    """Size of the local pool; 0 is no pool. None: twice the KV memory of all instances, at most half of what is
    free."""
    name: FileName = "default"
    """Which Mooncake store."""
    protocol: PoolProtocol = "auto"
    """How the nodes of a cluster move KV with `mooncake`. `auto`: each node uses RDMA if it has a device for it, TCP
    otherwise. Where only some have one, `tcp`: both ends must use the same."""
    ssd_dir: Path | None = None
    """Folder for the SSD tier of the local pool. KV of paused requests goes there while DRAM is nearly full. With it,
    one instance has a pool too. None: no SSD tier."""
    ssd_bytes: NumBytes | None = None
    """Size of the SSD tier. None: four times the DRAM of the pool, at most half of what is free in `ssd_dir`."""

    def __post_init__(self) -> None:
        """Refuse what cannot run."""
        if self.ssd_bytes is not None and self.ssd_dir is None:
            raise ConfigError("pool.ssd_bytes is set and pool.ssd_dir is not", hint="name a folder on a local SSD")
        if self.ssd_dir is not None and (self.backend != "local" or self.memory_bytes == 0):
            pool = "is off" if self.backend == "none" or self.memory_bytes == 0 else f"is {self.backend!r}"
            raise ConfigError(
                f"pool.ssd_dir={str(self.ssd_dir)!r}, and the pool {pool}",
                hint="only the local pool has an SSD tier here; `seer pool up --ssd` gives one to Mooncake",
            )
        if self.backend not in POOL_BACKENDS:
            raise ConfigError(f"unknown pool {self.backend!r}", hint=f"one of {', '.join(POOL_BACKENDS)}")
        if self.protocol not in POOL_PROTOCOLS:
            raise ConfigError(f"pool.protocol={self.protocol!r}", hint=f"one of {', '.join(POOL_PROTOCOLS)}")
        check_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostingConfig:
    """The processes of the instances: every wait has its deadline here."""

    ray: str | None = None
    """Run the instances on the nodes of a Ray cluster: `auto` is the one that this machine is part of, otherwise
    `HOST:PORT` of its head. None: all on this machine."""
    pin_cores: bool | None = None
    """Keep each instance on CPU cores of one NUMA node: one core, with one thread, for each rank. Instances take turns
    where there are fewer cores. None: yes on a CPU, no on a GPU."""
    start_deadline_s: Seconds = 300.0
    """From launch to ready: imports and weights."""
    call_deadline_s: Seconds = 300.0
    """A weight update, pause or resume."""
    close_deadline_s: Seconds = 10.0
    """A process that has not exited by then is killed."""
    heartbeat_s: Seconds = 0.5
    """Between two heartbeats of a process."""
    silence_deadline_s: Seconds | None = None
    """A process that sends nothing for this long has hung. None: 10 s on a CPU, 60 s on a GPU."""
    progress_deadline_s: Seconds = 60.0
    """An instance that has requests and makes no step for this long has hung, even if its process sends heartbeats."""
    lease_deadline_s: Seconds = 120.0
    """An instance on another machine that does not hear its driver for this long ends itself."""
    flush_s: SecondsOrZero = 0.05
    """Tokens are sent to the driver after this time ..."""
    flush_tokens: Count = 16
    """... or this number; the death of a process loses no more than that per request."""
    weights_in_place: bool = True
    """New weights that are on a GPU stay there, and the instances map them; otherwise they go through shared memory."""
    max_restarts: CountOrZero = 3
    """Of an instance, and of the draft server, within an hour."""
    restart_pause_s: SecondsOrZero = 1.0
    """Before the second restart within an hour; each further pause is twice as long, up to a minute."""
    log_dir: Path | None = None
    """Folder for the output of each instance, as instance-N.log; None keeps it in a temporary file."""

    def __post_init__(self) -> None:
        """Heartbeats must come several times within the silence they disprove."""
        check_fields(self)
        if self.ray == "":
            raise ConfigError("hosting.ray is empty", hint="auto, HOST:PORT, or leave it out")
        if self.silence_deadline_s is not None and self.silence_deadline_s < 3 * self.heartbeat_s:
            raise ConfigError(
                f"silence_deadline_s={self.silence_deadline_s:g}, heartbeat_s={self.heartbeat_s:g}",
                hint=f"use at least {3 * self.heartbeat_s:g}",
            )

    def fitted(self, device: str) -> HostingConfig:
        """The same with every None filled in for the device."""
        on_cpu = device == "cpu"
        silence_s = max(CPU_SILENCE_S if on_cpu else GPU_SILENCE_S, 3 * self.heartbeat_s)
        return replace(
            self,
            pin_cores=on_cpu if self.pin_cores is None else self.pin_cores,
            silence_deadline_s=silence_s if self.silence_deadline_s is None else self.silence_deadline_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """A model on instances, ready to roll out."""

    model: str
    """A folder, a Hugging Face id (`org/name`), or a name that `seer model get` knows (`smollm2`)."""
    instances: Instances = 1
    """Processes, each with one engine; on GPUs each has its own."""
    engine: EngineName = "local"
    """`local`, the embedded engine; `vllm`, stock vLLM; `fake`, without a model, for tests."""
    device: str = "cpu"
    """`cpu`, `cuda` (every visible GPU, or those of `gpus`) or `cuda:N` (that one)."""
    gpus: tuple[int, ...] | None = None
    """GPUs for the instances, as `cuda` numbers them: `[0, 1, 4]`, or `"0,1,4-7"`. None: all that are visible to this
    process (CUDA_VISIBLE_DEVICES)."""
    share_gpus: bool = False
    """Put several instances on a GPU where there are fewer GPUs than they need; otherwise that is refused."""
    tensor_parallel: Count = 1
    """Ranks that the model of an instance is spread over, each on a GPU of its own (`vllm` only)."""
    data_parallel: Count = 1
    """Instances in a row that share the experts of a mixture of experts: each has attention, requests and KV memory of
    its own and a part of the experts, and they step together (`vllm` only). It divides `instances`."""
    dtype: str = "auto"
    """`float32`, `bfloat16`, `float16` or `auto`: float32 on a CPU; on a GPU bfloat16 (vLLM: the model's own)."""
    max_num_seqs: SequenceSlots | None = None
    """Requests an instance runs at once. None: 16 on a CPU, 256 on a GPU."""
    max_model_len: Count | None = None
    """Longest context in tokens, prompt included. None: the model's own."""
    scheduler: str = "seer"
    """`seer simulate --help` lists the schedulers."""
    speculation: SpeculationMode = "auto"
    """`auto`: grouped drafts as the scheduler says, where they pay; `off`: none."""
    chunk_tokens: Count | None = None
    """Tokens a request may generate before it is placed anew. None: an eighth of the longest response."""
    kv: KvConfig = field(default_factory=KvConfig)
    """The KV memory of each instance."""
    pool: PoolConfig = field(default_factory=PoolConfig)
    """The KV pool that instances share."""
    hosting: HostingConfig = field(default_factory=HostingConfig)
    """The processes of the instances."""
    engine_settings: EngineConfig | None = None
    """Settings of the chosen engine; None is its defaults."""

    def __post_init__(self) -> None:
        """Refuse what cannot run here, before anything starts."""
        if self.engine not in ENGINES:
            raise ConfigError(f"unknown engine {self.engine!r}", hint=nearest(self.engine, ENGINES))
        wanted = ENGINE_CONFIGS[self.engine]
        if self.engine_settings is not None and not isinstance(self.engine_settings, wanted):
            raise ConfigError(
                f"engine_settings is a {type(self.engine_settings).__name__}, and engine is {self.engine!r}",
                hint=f"use {wanted.__name__}, or leave engine_settings out",
            )
        check_fields(self)
        if self.tensor_parallel > 1 and self.engine != "vllm":
            raise ConfigError(
                f"tensor_parallel={self.tensor_parallel}: engine {self.engine!r} runs on one device",
                hint="engine='vllm', or tensor_parallel=1",
            )
        self._refuse_odd_ranks()
        self._refuse_contradicting_gpus()
        self._refuse_one_machine_settings()
        if not re.fullmatch(r"cpu|cuda(:\d+)?", self.device):
            raise ConfigError(f"device={self.device!r}", hint="cpu, cuda or cuda:N")
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype={self.dtype!r}", hint=f"one of {', '.join(DTYPES)}")
        if self.speculation not in SPECULATION_MODES:
            raise ConfigError(f"speculation={self.speculation!r}", hint="auto or off")
        parse_scheduler(self.scheduler)

    def _refuse_odd_ranks(self) -> None:
        if self.data_parallel == 1:
            return
        if self.engine == "local":
            raise ConfigError(
                f"data_parallel={self.data_parallel}: engine 'local' has no models with experts",
                hint="engine='vllm', or more instances",
            )
        if self.instances % self.data_parallel:
            raise ConfigError(
                f"instances={self.instances} is no multiple of data_parallel={self.data_parallel}",
                hint=f"instances={-(-self.instances // self.data_parallel) * self.data_parallel}, for example",
            )
        if self.share_gpus:
            raise ConfigError(
                f"data_parallel={self.data_parallel} and share_gpus",
                hint="ranks that share experts need a GPU each: name as many, gpus=[...], and leave share_gpus out",
            )

    @property
    def on_cpu(self) -> bool:
        """Whether the instances compute on the CPU."""
        return self.device == "cpu"

    def _refuse_contradicting_gpus(self) -> None:
        if self.gpus is None:
            return
        if self.device != "cuda":
            raise ConfigError(f"gpus={list(self.gpus)} and device={self.device!r}", hint="gpus go with device='cuda'")
        refuse_repeated(self.gpus)

    def _refuse_one_machine_settings(self) -> None:
        """On a cluster Ray chooses the GPUs, and no disk is every node's."""
        if self.hosting.ray is None:
            return
        given = {
            "gpus": self.gpus is not None,
            "share_gpus": self.share_gpus,
            f"device={self.device!r}": ":" in self.device,
            "pool.ssd_dir": self.pool.ssd_dir is not None,
        }
        for name, is_given in given.items():
            if is_given:
                raise ConfigError(
                    f"{name} is of one machine, and hosting.ray={self.hosting.ray!r}",
                    hint="on a cluster Ray places each instance: leave it out",
                )

    def chosen_gpus(self, num_visible: int) -> tuple[int, ...]:
        """The GPUs that the instances may use, of `num_visible` that this process sees."""
        if self.gpus is not None:
            return self.gpus
        index = self.device.partition(":")[2]
        return (int(index),) if index else tuple(range(num_visible))

    def fitted(self) -> RolloutConfig:
        """The same with the defaults of the device filled in. What follows free memory or the model stays None."""
        max_num_seqs = CPU_MAX_NUM_SEQS if self.on_cpu else GPU_MAX_NUM_SEQS
        kv = self.kv
        if self.on_cpu and self.engine != "fake" and kv.blocks is None and kv.memory_bytes is None:
            kv = replace(kv, memory_bytes=CPU_KV_BYTES)
        return replace(
            self,
            max_num_seqs=self.max_num_seqs or max_num_seqs,
            kv=kv,
            hosting=self.hosting.fitted(self.device),
            engine_settings=self.engine_settings or ENGINE_CONFIGS[self.engine](),
        )
