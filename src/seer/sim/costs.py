# SPDX-License-Identifier: Apache-2.0
"""What a step costs on given hardware: a roofline from a model's config.json numbers.

A step over `tokens` tokens of `B` requests takes

    overhead + slowdown · ( max(weights touched / bandwidth, FLOPs / peak) + communication )
             + slowdown · context tokens · max(KV bytes / bandwidth, attention FLOPs / peak)

For a fixed batch this is linear in the context, so the simulated instance can advance many steps in closed form.
`slowdown` (how far an engine is from the roofline) and `overhead_s` are fitted for the paper's workloads. The other
numbers are those of the hardware and the model, or assumptions (docs/design/0002-simulator.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from seer.transfer import MoveCost, PrefillCost, TransferCosts

BYTES_PER_VALUE = 2
"""Activations and KV are bf16."""
ROOFLINE_BANDWIDTH = 0.85
"""Share of the nominal memory bandwidth that a good kernel reaches."""
ROOFLINE_FLOPS = 0.6
"""Share of the nominal matrix peak that large multiplications reach."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One accelerator."""

    name: str
    memory_bytes: float
    bandwidth_bytes_s: float
    bf16_flops_s: float
    link_bytes_s: float
    """Per direction, to the other accelerators of an instance."""
    network_bytes_s: float
    """To other machines: the pool's path."""


H800 = Gpu(
    name="H800",
    memory_bytes=80e9,
    bandwidth_bytes_s=3.35e12,
    bf16_flops_s=989e12,
    link_bytes_s=200e9,
    network_bytes_s=50e9,
)
H200 = Gpu(
    name="H200",
    memory_bytes=141e9,
    bandwidth_bytes_s=4.8e12,
    bf16_flops_s=989e12,
    link_bytes_s=450e9,
    network_bytes_s=50e9,
)
GPUS = {gpu.name.lower(): gpu for gpu in (H800, H200)}
"""By name. Nominal numbers of the vendor's data sheets; the network is taken to be 400 Gbit/s per GPU."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The numbers of a config.json that determine cost: dense or mixture of experts, grouped-query attention or MLA."""

    name: str
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied_head: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    num_shared_experts: int = 0
    num_dense_layers: int = 0
    """Leading layers without experts, in a mixture of experts."""
    kv_lora_rank: int = 0
    """MLA: width of the compressed KV; 0 means grouped-query attention."""
    rope_head_dim: int = 0
    q_lora_rank: int = 0
    bytes_per_weight: float = 2
    """2 for bf16, 1 for fp8."""

    @cached_property
    def kv_bytes_per_token(self) -> float:
        """Bytes of KV of one token over all layers."""
        width = self.kv_lora_rank + self.rope_head_dim if self.kv_lora_rank else 2 * self.num_kv_heads * self.head_dim
        return float(self.num_layers * width * BYTES_PER_VALUE)

    @cached_property
    def attention_flops_per_context_token(self) -> float:
        """FLOPs that one new token spends on one token of context, over all layers."""
        if self.kv_lora_rank:  # absorbed form: scores over rank + rope, values over rank
            return 2.0 * self.num_layers * self.num_heads * (2 * self.kv_lora_rank + self.rope_head_dim)
        return 4.0 * self.num_layers * self.num_heads * self.head_dim

    @cached_property
    def _attention_parameters(self) -> float:
        if self.kv_lora_rank:
            query_in = self.q_lora_rank or self.hidden
            query_dim = self.head_dim + self.rope_head_dim
            query = (self.hidden * self.q_lora_rank if self.q_lora_rank else 0) + query_in * self.num_heads * query_dim
            down = self.hidden * (self.kv_lora_rank + self.rope_head_dim)
            up = self.kv_lora_rank * self.num_heads * 2 * self.head_dim
            return query + down + up + self.num_heads * self.head_dim * self.hidden
        qkv = self.hidden * (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        return qkv + self.num_heads * self.head_dim * self.hidden

    @cached_property
    def expert_parameters(self) -> float:
        """Parameters of all routed experts of all layers."""
        num_layers = self.num_layers - self.num_dense_layers
        return 3.0 * self.hidden * self.expert_intermediate * self.num_experts * num_layers

    @cached_property
    def resident_parameters(self) -> float:
        """Parameters that every step reads: all except the routed experts."""
        if self.num_experts:
            shared = 3 * self.hidden * self.expert_intermediate * self.num_shared_experts
            mlp = self.num_dense_layers * 3 * self.hidden * self.intermediate
            mlp += (self.num_layers - self.num_dense_layers) * shared
        else:
            mlp = self.num_layers * 3 * self.hidden * self.intermediate
        head = self.vocabulary * self.hidden
        return self.num_layers * self._attention_parameters + mlp + head

    @cached_property
    def weight_bytes(self) -> float:
        """All weights, embedding included."""
        embedding = 0 if self.tied_head else self.vocabulary * self.hidden
        return self.bytes_per_weight * (self.resident_parameters + self.expert_parameters + embedding)

    @cached_property
    def active_parameters(self) -> float:
        """Parameters that each token is multiplied with."""
        share = self.experts_per_token / self.num_experts if self.num_experts else 0.0
        return self.resident_parameters + share * self.expert_parameters

    def touched_bytes(self, num_tokens: float) -> float:
        """Weight bytes that a step over this many tokens reads. Experts that no token chose are not read."""
        touched = self.resident_parameters
        if self.num_experts:
            cold = (1.0 - self.experts_per_token / self.num_experts) ** num_tokens
            touched += self.expert_parameters * (1.0 - cold)
        return self.bytes_per_weight * touched


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step: a part for the batch, and a part for each context token."""

    base_s: float
    per_context_token_s: float


@dataclass(frozen=True, kw_only=True)
class InstanceCost:
    """Step time, KV capacity and transfer speed of one instance."""

    model: ModelShape
    gpu: Gpu
    num_gpus: int = 1
    expert_parallel: bool = False
    """Data-parallel attention with experts spread over the GPUs; otherwise tensor parallel."""
    overhead_s: float = 0.004
    """Per step: scheduling, launches, sampling."""
    slowdown: float = 1.0
    """How many times slower than the roofline the engine's kernels are."""
    memory_share: float = 0.9
    """Share of the GPUs' memory for weights and KV."""
    speculation_overhead_s: float = 0.005
    """Per step that verifies drafts: ragged batches leave the full CUDA graphs and add host work. Measured on an H200
    with stock vLLM as 2.4 ms growing to about 7 ms per step."""
    draft_s_per_token: float = 0.5e-6
    """Time to draft one token: about 4 us for 8 tokens of one request, as measured on our index."""
    draft_pass_s: float = 0.0
    """Time of a pass of a draft model, which proposes one token for every request."""
    verify_context_share: float = 0.0
    """Reading the context for each further verified token, as a share of reading it for the first. 0: one read serves
    all tokens of a request; 1: each token reads it anew."""

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV fits beside the weights."""
        free = self.num_gpus * self.gpu.memory_bytes * self.memory_share - self.model.weight_bytes
        return int(free / self.model.kv_bytes_per_token)

    def step(self, num_requests: int, tokens_per_request: float = 1.0, prefill_tokens: float = 0.0) -> StepTime:
        """Cost of a step that decodes or verifies for every request, and prefills some tokens."""
        num_tokens = num_requests * tokens_per_request + prefill_tokens
        bandwidth = self.num_gpus * self.gpu.bandwidth_bytes_s * ROOFLINE_BANDWIDTH
        flops = self.num_gpus * self.gpu.bf16_flops_s * ROOFLINE_FLOPS
        linear_s = max(
            self.model.touched_bytes(num_tokens) / bandwidth, 2.0 * self.model.active_parameters * num_tokens / flops
        )
        # A good kernel reads a request's KV once for all its verified tokens. With MLA the FLOPs can take longer.
        context_s = max(
            self.model.kv_bytes_per_token * (1.0 + self.verify_context_share * (tokens_per_request - 1.0)) / bandwidth,
            self.model.attention_flops_per_context_token * tokens_per_request / flops,
        )
        draft_s = 0.0
        if tokens_per_request > 1.0:
            depth = tokens_per_request - 1.0
            draft_s = self.speculation_overhead_s + depth * (num_requests * self.draft_s_per_token + self.draft_pass_s)
        base_s = self.overhead_s + draft_s + self.slowdown * (linear_s + self._communication_s(num_tokens))
        return StepTime(base_s, self.slowdown * context_s)

    def _communication_s(self, num_tokens: float) -> float:
        if self.num_gpus == 1:
            return 0.0
        layers, width = self.model.num_layers, self.model.hidden * BYTES_PER_VALUE
        if self.expert_parallel:  # dispatch and combine, each token to its experts' GPUs
            bytes_per_gpu = num_tokens * self.model.experts_per_token * width / self.num_gpus
            return layers * 2 * (20e-6 + bytes_per_gpu / self.gpu.network_bytes_s)
        return layers * 2 * (8e-6 + 2 * num_tokens * width / self.gpu.link_bytes_s)

    def transfer_s(self, num_tokens: int) -> float:
        """Time to load this many tokens' KV from the pool."""
        return num_tokens * self.model.kv_bytes_per_token / (self.num_gpus * self.gpu.network_bytes_s)

    def transfer_costs(self) -> TransferCosts:
        """Costs of moving and of computing KV, for placement: the same costs that this model charges."""
        flops = self.num_gpus * self.gpu.bf16_flops_s * ROOFLINE_FLOPS
        return TransferCosts(
            move=MoveCost(latency_s=0.0, bandwidth_bytes_s=self.num_gpus * self.gpu.network_bytes_s),
            prefill=PrefillCost(
                fixed_s=0.0,
                per_token_s=self.slowdown * 2.0 * self.model.active_parameters / flops,
                per_token_pair_s=self.slowdown * self.model.attention_flops_per_context_token / flops,
            ),
            bytes_per_token=round(self.model.kv_bytes_per_token),
        )


MODELS = {
    model.name: model
    for model in (
        # Moonlight-16B-A3B: DeepSeek-V3 architecture, MLA.
        ModelShape(
            name="moonlight",
            num_layers=27,
            hidden=2048,
            num_heads=16,
            num_kv_heads=16,
            head_dim=128,
            intermediate=11264,
            vocabulary=163840,
            num_experts=64,
            experts_per_token=6,
            expert_intermediate=1408,
            num_shared_experts=2,
            num_dense_layers=1,
            kv_lora_rank=512,
            rope_head_dim=64,
        ),
        # Qwen2-VL-72B, language part.
        ModelShape(
            name="qwen2-vl-72b",
            num_layers=80,
            hidden=8192,
            num_heads=64,
            num_kv_heads=8,
            head_dim=128,
            intermediate=29568,
            vocabulary=152064,
        ),
        # Kimi-K2: 1T parameters in fp8, 32B active, MLA.
        ModelShape(
            name="kimi-k2",
            num_layers=61,
            hidden=7168,
            num_heads=64,
            num_kv_heads=64,
            head_dim=128,
            intermediate=18432,
            vocabulary=163840,
            num_experts=384,
            experts_per_token=8,
            expert_intermediate=2048,
            num_shared_experts=1,
            num_dense_layers=1,
            kv_lora_rank=512,
            rope_head_dim=64,
            q_lora_rank=1536,
            bytes_per_weight=1,
        ),
        ModelShape(
            name="llama-8b",
            num_layers=32,
            hidden=4096,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            intermediate=14336,
            vocabulary=128256,
        ),
        ModelShape(
            name="qwen2.5-1.5b",
            num_layers=28,
            hidden=1536,
            num_heads=12,
            num_kv_heads=2,
            head_dim=128,
            intermediate=8960,
            vocabulary=151936,
        ),
    )
}
