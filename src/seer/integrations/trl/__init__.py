# SPDX-License-Identifier: Apache-2.0
"""Seer as the generation phase of TRL's `GRPOTrainer`, by one argument.

    GRPOTrainer(..., rollout_func=seer_rollouts())

docs/use-in-trl.md is for users; `rollouts.py` describes one call.
"""

from seer.integrations.trl.early_rewards import EarlyReward, early_reward, environment_reward
from seer.integrations.trl.on_policy import OffPolicy, OnPolicyCheck, OnPolicyNumbers
from seer.integrations.trl.rollouts import SeerRollouts, seer_rollouts

__all__ = [
    "EarlyReward",
    "OffPolicy",
    "OnPolicyCheck",
    "OnPolicyNumbers",
    "SeerRollouts",
    "early_reward",
    "environment_reward",
    "seer_rollouts",
]
