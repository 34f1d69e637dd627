# SPDX-License-Identifier: Apache-2.0
"""What vLLM 0.32 lacks on a CPU for engines that share experts, as a plugin that its processes load.

On a GPU vLLM has all of it: tokens of unequal numbers gathered from all ranks and summed back to theirs, and experts
that are another rank's. The CPU's communicator has neither operation, and its experts take a global number for an index
into their own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

PACKAGE = "seer_cpu_experts-0.dist-info"


def install(folder: Path) -> None:
    """Make the folder one where vLLM finds this plugin; it must be in `sys.path`, as this module."""
    package = folder / PACKAGE
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: seer-cpu-experts\nVersion: 0\n")
    (package / "entry_points.txt").write_text("[vllm.general_plugins]\nseer_cpu_experts = cpu_experts:prepare\n")


def prepare() -> None:
    """In every process of an engine, before it makes anything."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    communicator: Any = CpuCommunicator
    communicator.all_gatherv, communicator.reduce_scatterv = _all_gatherv, _reduce_scatterv
    experts: Any = CPUUnquantizedExperts
    experts.apply = _of_own_experts(experts.apply)


def _all_gatherv(self: Any, given: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    """The rows of all ranks, `sizes` of each."""
    if isinstance(given, list):
        return [_all_gatherv(self, one, dim, sizes) for one in given]
    assert dim == 0, "rows are gathered"
    sizes = sizes or [given.shape[0]] * self.world_size
    own = given.new_zeros((max(sizes), *given.shape[1:]))
    own[: given.shape[0]] = given
    gathered = [torch.empty_like(own) for _ in sizes]
    torch.distributed.all_gather(gathered, own, group=self.device_group)
    return torch.cat([rows[:size] for rows, size in zip(gathered, sizes, strict=True)])


def _reduce_scatterv(self: Any, given: torch.Tensor, dim: int = -1, sizes: list[int] | None = None) -> torch.Tensor:
    """The sums of this rank's rows over all ranks."""
    assert dim == 0, "rows are summed"
    sizes = sizes or [given.shape[0] // self.world_size] * self.world_size
    total = given.contiguous().clone()
    torch.distributed.all_reduce(total, group=self.device_group)
    first = sum(sizes[: self.rank_in_group])
    return total[first : first + sizes[self.rank_in_group]].contiguous()


def _of_own_experts(apply: Any) -> Any:
    """Experts of other ranks add nothing here."""
    names = ["hidden_states", "w1", "w2", "topk_weights", "topk_ids", "activation", "global_num_experts", "expert_map"]

    def apply_own(self: Any, output: Any, *args: Any, **kwargs: Any) -> None:
        given = dict(zip(names, args, strict=False)) | kwargs
        rest, own = args[len(names) :], given["expert_map"]
        if own is not None:
            index = own[given["topk_ids"].long()]
            given["topk_weights"] = given["topk_weights"].masked_fill(index < 0, 0)
            given["topk_ids"] = index.clamp(min=0).to(given["topk_ids"].dtype)
        apply(self, output, *(given.pop(name) for name in names), *rest, **given)

    return apply_own
