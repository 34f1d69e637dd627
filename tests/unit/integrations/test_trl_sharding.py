# SPDX-License-Identifier: Apache-2.0
"""Ways to spread weights over ranks: what is refused, and parameters that are read in parts and whole."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from seer.errors import ConfigError
from seer.integrations.trl.sharding import gathering, is_sharded, shard_of
from seer.integrations.trl.trainer_weights import refuse_unreadable


def a_trainer(*parameters: torch.Tensor, is_fsdp2: bool = False, zero_stage: int = 0, **settings: bool) -> Any:
    """As much of a GRPOTrainer as is asked whether its weights can be read."""
    return SimpleNamespace(
        **{"is_fsdp_enabled": is_fsdp2, "is_deepspeed_enabled": False} | settings,
        model=torch.nn.ParameterList(parameters),
        accelerator=SimpleNamespace(
            is_fsdp2=is_fsdp2,
            unwrap_model=lambda model: model,
            state=SimpleNamespace(deepspeed_plugin=SimpleNamespace(zero_stage=zero_stage)),
        ),
    )


@contextlib.contextmanager
def one_rank() -> Iterator[DeviceMesh]:
    """torch's process group of this process alone."""
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        torch.distributed.destroy_process_group()


def test_the_first_version_of_fsdp_is_refused() -> None:
    refuse_unreadable(a_trainer(torch.ones(1)))
    with pytest.raises(ConfigError, match="version 1 of FSDP"):
        refuse_unreadable(a_trainer(torch.ones(1), is_fsdp_enabled=True))


def test_the_stage_of_deepspeed_that_spreads_weights_is_refused() -> None:
    for stage in (1, 2):
        refuse_unreadable(a_trainer(torch.ones(1), is_deepspeed_enabled=True, zero_stage=stage))
    with pytest.raises(ConfigError, match="ZeRO stage 3"):
        refuse_unreadable(a_trainer(torch.ones(1), is_deepspeed_enabled=True, zero_stage=3))


def test_tensors_are_spread_by_fsdp2_and_by_nothing_else() -> None:
    with one_rank() as mesh:
        spread = distribute_tensor(torch.arange(8.0).reshape(4, 2), mesh, [Shard(0)])
        refuse_unreadable(a_trainer(spread, is_fsdp2=True))
        with pytest.raises(ConfigError, match="something else than FSDP2"):
            refuse_unreadable(a_trainer(spread))


def test_a_parameter_is_gathered_whole_and_one_that_each_rank_holds_is_copied() -> None:
    with one_rank() as mesh:
        plain = torch.nn.Parameter(torch.arange(8.0).reshape(4, 2))
        spread = torch.nn.Parameter(distribute_tensor(plain.detach(), mesh, [Shard(0)]))
        whole = gathering(torch.device("cpu", 0))
        for parameter in (plain, spread):
            found = whole(parameter)
            assert type(found) is torch.Tensor
            assert torch.equal(found, plain)
            assert type(shard_of(parameter)) is torch.Tensor
        assert whole(plain).data_ptr() != plain.data_ptr()
        assert [is_sharded(a_trainer(one).model) for one in (plain, spread)] == [False, True]
