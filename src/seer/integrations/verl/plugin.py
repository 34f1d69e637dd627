# SPDX-License-Identifier: Apache-2.0
"""Registers the rollout `seer`; verl loads this module in every process, by the entry point `verl.plugins`.

Nothing heavy is imported and nothing is checked here: verl logs the failure of a plug-in only at DEBUG. What does not
fit is said when the rollout is used.
"""

from __future__ import annotations

from verl.workers.rollout.base import _ROLLOUT_REGISTRY
from verl.workers.rollout.replica import RolloutReplicaRegistry

NAME = "seer"
"""`actor_rollout_ref.rollout.name`."""


def _load_replica() -> type:
    from seer.integrations.verl.version import require_verl

    require_verl()
    from seer.integrations.verl.replica import SeerReplica

    return SeerReplica


RolloutReplicaRegistry.register(NAME, _load_replica)
_ROLLOUT_REGISTRY[NAME, "async"] = "seer.integrations.verl.weights.SeerServerAdapter"
