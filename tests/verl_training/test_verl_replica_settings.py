# SPDX-License-Identifier: Apache-2.0
"""Which trainers of verl the rollout works under, and how it has its agent loops used; nothing is started."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("verl")

from omegaconf import OmegaConf

from seer.errors import ConfigError
from seer.integrations.verl.agent_loops import MANAGER
from seer.integrations.verl.replica import _use_agent_loops, refuse_several_machines


def rollout_config(**trainer: Any) -> Any:
    """The rollout's part of a whole configuration."""
    whole = OmegaConf.create(
        {
            "trainer": {"use_v1": True, "v1": {"trainer_mode": "sync"}, "default_local_dir": "/out"} | trainer,
            "actor_rollout_ref": {"rollout": {"agent": {"num_workers": 1}}},
        }
    )
    OmegaConf.set_struct(whole, True)
    return whole.actor_rollout_ref.rollout


def test_the_newer_trainer_is_given_our_agent_loops() -> None:
    config = rollout_config()
    assert _use_agent_loops(config) == "/out/seer"
    assert config.agent.agent_loop_manager_class == MANAGER


def test_the_older_trainer_must_be_given_them_by_the_user() -> None:
    with pytest.raises(ConfigError) as caught:
        _use_agent_loops(rollout_config(use_v1=False))
    assert MANAGER in str(caught.value.hint)


def test_an_agent_loop_manager_that_goes_past_seer_is_refused() -> None:
    config = rollout_config()
    for name in ("SeerAgentLoops", "SeerAgentLoopManagerTQ"):
        OmegaConf.update(
            config, "agent.agent_loop_manager_class", f"seer.integrations.verl.agent_loops.{name}", force_add=True
        )
        _use_agent_loops(config)
    config.agent.agent_loop_manager_class = "verl.trainer.ppo.v1.AgentLoopManagerTQ"
    with pytest.raises(ConfigError, match="AgentLoopManagerTQ does not ask"):
        _use_agent_loops(config)


def test_a_replica_over_several_machines_is_refused() -> None:
    refuse_several_machines(1, 8, 8)
    with pytest.raises(ConfigError, match="16 GPUs spans 2 machines of 8"):
        refuse_several_machines(2, 16, 8)


@pytest.mark.parametrize("mode", ["colocate_async", "separate_async"])
def test_asynchronous_trainers_are_refused(mode: str) -> None:
    with pytest.raises(ConfigError, match=mode):
        _use_agent_loops(rollout_config(v1={"trainer_mode": mode}))
