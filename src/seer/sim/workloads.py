# SPDX-License-Identifier: Apache-2.0
"""Workloads: groups and their response lengths, and the cluster: model, GPUs and instances.

`moonlight`, `qwen2-vl-72b` and `kimi-k2` are those of the paper's Table 3. The paper gives the mean and the maximum
length, and says that lengths within a group are correlated. The distribution and the correlation are our assumptions:
log-normal lengths, cut at the maximum, with a share of the variance of the logarithm common to the group.

Invariants
  1. All seeds have the same lengths, the quantiles of the distribution. A seed decides which of them share a group, and
     the order of the groups. So results of two seeds differ by the arrangement alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from seer.errors import ConfigError
from seer.sim.costs import H800, MODELS, InstanceCost
from seer.sim.draft_model import DraftModel, PlainDrafts, acceptance_for
from seer.sim.turns import RequestTurns
from seer.types import Group, InstanceLimits, Sampling

TABLE_2_DRAFTS = DraftModel()
"""Acceptance of Table 2, and plain drafts from a request's own text."""
BLOCK_SIZE = 64
"""Tokens per KV block of simulated instances. The simulator counts tokens; only the scheduler's promises are blocks."""


GPUS_PER_NODE = 8


def instances_on(num_nodes: int, num_gpus: int) -> int:
    """Instances of so many GPUs that fill these nodes."""
    if num_nodes * GPUS_PER_NODE < num_gpus:
        raise ConfigError(
            f"{num_nodes} nodes of {GPUS_PER_NODE} GPUs hold no instance of {num_gpus} GPUs",
            hint=f"--nodes {-(-num_gpus // GPUS_PER_NODE)} or more",
        )
    return num_nodes * GPUS_PER_NODE // num_gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthModel:
    """Log-normal response lengths, correlated within a group, cut at a maximum."""

    mean: int
    maximum: int
    sigma: float
    """Standard deviation of the logarithm of the length."""
    correlation: float
    """Share of the variance of the logarithm that is common to a group's responses."""

    def sample(self, num_groups: int, group_size: int, seed: int, *, iteration: int = 0) -> list[list[int]]:
        """Lengths by group: the same lengths for every seed, arranged anew.

        In another iteration the groups are the same prompts: what is common to a group stays, the rest is drawn again.
        """
        random = np.random.default_rng(seed)
        common = random.standard_normal((num_groups, 1)) * math.sqrt(self.correlation)
        if iteration:
            random = np.random.default_rng((seed, iteration))
        own = random.standard_normal((num_groups, group_size)) * math.sqrt(1.0 - self.correlation)
        lengths = np.empty(num_groups * group_size, dtype=int)
        lengths[np.argsort((common + own).ravel(), kind="stable")] = _quantiles(self, len(lengths))
        rows: list[list[int]] = lengths.reshape(num_groups, group_size).tolist()
        return rows


@lru_cache(maxsize=16)
def _quantiles(shape: LengthModel, num: int) -> np.ndarray:
    """`num` lengths at equal steps of probability, in ascending order. Their mean is as nearly the stated one as the
    maximum allows."""
    normal = NormalDist()
    noise = shape.sigma * np.array([normal.inv_cdf((i + 0.5) / num) for i in range(num)])
    low, high = 0.0, math.log(shape.maximum) + 4 * shape.sigma
    for _ in range(60):  # the cut lowers the mean: find the median that gives the mean, by bisection
        middle = (low + high) / 2
        if np.minimum(np.exp(middle + noise), shape.maximum).mean() < shape.mean:
            low = middle
        else:
            high = middle
    return np.clip(np.exp(low + noise), 1, shape.maximum).astype(int)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One iteration: lengths by group, and the cluster."""

    name: str
    lengths: tuple[tuple[int, ...], ...]
    max_tokens: int
    prompt_tokens: int
    cost: InstanceCost
    num_instances: int
    chunk_tokens: int = 8192
    max_num_seqs: int = 1024
    drafts: DraftModel = TABLE_2_DRAFTS
    keys: tuple[str, ...] = ()
    """The groups' prompts, for length hints; empty: the groups' numbers."""
    turns: tuple[RequestTurns, ...] = ()
    """Of every request, group after group; empty: responses without turns."""

    @property
    def max_context_tokens(self) -> int:
        """The longest context that a request may reach, what its tools give included."""
        return self.prompt_tokens + self.max_tokens + max((sum(one.given) for one in self.turns), default=0)

    @property
    def num_requests(self) -> int:
        """Requests of all groups."""
        return sum(map(len, self.lengths))

    @property
    def num_tokens(self) -> int:
        """Tokens of all responses."""
        return sum(map(sum, self.lengths))

    @property
    def group_size(self) -> int:
        """Responses per group (the largest, where they differ)."""
        return max(map(len, self.lengths))

    def limits(self) -> InstanceLimits:
        """Limits of each instance."""
        return InstanceLimits(
            kv_blocks=self.cost.kv_tokens // BLOCK_SIZE,
            block_size=BLOCK_SIZE,
            max_num_seqs=self.max_num_seqs,
            max_model_len=self.max_context_tokens,
        )

    def groups(self) -> list[Group]:
        """The groups without their lengths, which only instances and oracles may know."""
        sampling = Sampling(max_tokens=self.max_tokens)
        keys = self.keys or tuple(map(str, range(len(self.lengths))))
        return [
            Group(id=i, num_requests=len(row), num_prompt_tokens=self.prompt_tokens, sampling=sampling, key=key)
            for i, (row, key) in enumerate(zip(self.lengths, keys, strict=True))
        ]

    def check(self) -> None:
        """Raise if the workload cannot run."""
        if self.num_instances < 1:
            raise ConfigError(f"{self.num_instances} instances", hint="--instances 1 or more")
        if not self.lengths or not all(self.lengths):
            raise ConfigError(f"workload {self.name} has no groups, or an empty one", hint="--group-size 1 or more")
        room = self.limits().kv_tokens
        if room < self.max_context_tokens:
            raise ConfigError(
                f"one request may reach {self.max_context_tokens} tokens, "
                f"an instance of {self.cost.num_gpus} x {self.cost.gpu.name} holds the KV of {max(room, 0)}",
                hint="more GPUs per instance, or a smaller maximum",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _PaperWorkload:
    """A column of Table 3, with the calibrated numbers of docs/design/0002-simulator.md."""

    model: str
    num_gpus: int
    expert_parallel: bool
    num_instances: int
    num_groups: int
    group_size: int
    prompt_tokens: int
    lengths: LengthModel
    overhead_s: float
    slowdown: float
    memory_share: float
    verify_context_share: float
    drafts: DraftModel


PAPER: dict[str, _PaperWorkload] = {
    "moonlight": _PaperWorkload(
        model="moonlight",
        num_gpus=1,
        expert_parallel=False,
        num_instances=32,
        num_groups=400,
        group_size=8,
        prompt_tokens=512,
        lengths=LengthModel(mean=22_386, maximum=65_536, sigma=0.8, correlation=0.93),
        overhead_s=0.0131,
        slowdown=1.542,
        memory_share=0.85,
        verify_context_share=0.403,
        # SuffixDecoding over a request's own text.
        drafts=DraftModel(level=0.98, plain=PlainDrafts(acceptance=acceptance_for(1.67, 16), max_depth=16)),
    ),
    "qwen2-vl-72b": _PaperWorkload(
        model="qwen2-vl-72b",
        num_gpus=8,
        expert_parallel=False,
        num_instances=16,
        num_groups=600,
        group_size=16,
        prompt_tokens=1024,
        lengths=LengthModel(mean=7_615, maximum=40_960, sigma=1.1, correlation=0.93),
        overhead_s=0.0152,
        slowdown=1.361,
        memory_share=0.9,
        verify_context_share=0.079,
        # A draft model, Qwen2-VL-7B.
        drafts=DraftModel(plain=PlainDrafts(acceptance=acceptance_for(2.19, 3), max_depth=3, pass_s=0.0159)),
    ),
    "kimi-k2": _PaperWorkload(
        model="kimi-k2",
        num_gpus=32,
        expert_parallel=True,
        num_instances=8,
        num_groups=800,
        group_size=8,
        prompt_tokens=512,
        lengths=LengthModel(mean=38_959, maximum=98_304, sigma=0.9, correlation=0.93),
        overhead_s=0.0059,
        slowdown=3.63,
        memory_share=0.7,
        verify_context_share=0.1,
        # The model's own multi-token-prediction head.
        drafts=DraftModel(
            level=0.98, plain=PlainDrafts(acceptance=acceptance_for(1.74, 1), max_depth=1, pass_s=0.0132)
        ),
    ),
}


def paper_workload(
    name: str,
    *,
    seed: int = 0,
    group_size: int | None = None,
    num_instances: int | None = None,
    shrink: int = 1,
    num_nodes: int | None = None,
) -> Workload:
    """One of the paper's three. Another group size keeps the number of requests, as in the paper's figure 7.

    `shrink` divides instances and groups alike, for a quick look: an instance has as much to do as before. `num_nodes`
    multiplies both, to fill so many nodes.
    """
    spec = PAPER[name]
    size = group_size if group_size is not None else spec.group_size
    if size < 1:
        raise ConfigError(f"group size {size}", hint="--group-size 1 or more")
    default_instances, num_requests = spec.num_instances // shrink, spec.num_groups * spec.group_size // shrink
    if num_nodes is not None:
        default_instances = instances_on(num_nodes, spec.num_gpus)
        num_requests = spec.num_groups * spec.group_size * default_instances // spec.num_instances
    num_groups = max(1, num_requests // size)
    lengths = spec.lengths.sample(num_groups, size, seed)
    cost = InstanceCost(
        model=MODELS[spec.model],
        gpu=H800,
        num_gpus=spec.num_gpus,
        expert_parallel=spec.expert_parallel,
        overhead_s=spec.overhead_s,
        slowdown=spec.slowdown,
        memory_share=spec.memory_share,
        verify_context_share=spec.verify_context_share,
    )
    return Workload(
        name=name,
        lengths=tuple(map(tuple, lengths)),
        max_tokens=spec.lengths.maximum,
        prompt_tokens=spec.prompt_tokens,
        cost=cost,
        num_instances=num_instances if num_instances is not None else default_instances,
        drafts=spec.drafts,
    )
