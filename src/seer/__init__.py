# SPDX-License-Identifier: Apache-2.0
"""Seer: rollout for synchronous, on-policy RL of LLMs without the long tail.

The names here are the public ones. Each is loaded from its module when it is first used, so importing seer
costs nothing and pulls in nothing heavy: torch is imported by the processes that run a model, and engines,
pools and trainers' adapters from their own modules, by those who have the extra installed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from seer.api import Rollout
    from seer.config import HostingConfig, KvConfig, PoolConfig, RolloutConfig, RunConfig
    from seer.context import Context
    from seer.environments.base import Conversation, End, Reply
    from seer.errors import (
        ConfigError,
        DeadlineExceeded,
        DraftError,
        InputError,
        InstanceError,
        MissingExtra,
        NoProbability,
        Overloaded,
        PoolError,
        SeerError,
    )
    from seer.machine.daemon_thread import in_thread
    from seer.metrics.summary import Summary
    from seer.rollout import RolloutLoop
    from seer.runs.prompts import Prompt, read_prompts
    from seer.runs.response_handle import ResponseHandle
    from seer.runs.session import Session
    from seer.scheduling.registry import SchedulerSettings, make_scheduler, parse_scheduler
    from seer.sync_api import SyncRollout, rollout_sync
    from seer.types import FinishReason, Group, GroupResult, Response, Sampling, TokenSpan, Turn

__all__ = [
    "ConfigError",
    "Context",
    "Conversation",
    "DeadlineExceeded",
    "DraftError",
    "End",
    "FinishReason",
    "Group",
    "GroupResult",
    "HostingConfig",
    "InputError",
    "InstanceError",
    "KvConfig",
    "MissingExtra",
    "NoProbability",
    "Overloaded",
    "PoolConfig",
    "PoolError",
    "Prompt",
    "Reply",
    "Response",
    "ResponseHandle",
    "Rollout",
    "RolloutConfig",
    "RolloutLoop",
    "RunConfig",
    "Sampling",
    "SchedulerSettings",
    "SeerError",
    "Session",
    "Summary",
    "SyncRollout",
    "TokenSpan",
    "Turn",
    "in_thread",
    "make_scheduler",
    "parse_scheduler",
    "read_prompts",
    "rollout_sync",
]

_HOMES = {
    "Rollout": "seer.api",
    "SyncRollout": "seer.sync_api",
    "rollout_sync": "seer.sync_api",
    "Context": "seer.context",
    "Conversation": "seer.environments.base",
    "End": "seer.environments.base",
    "Reply": "seer.environments.base",
    "HostingConfig": "seer.config",
    "KvConfig": "seer.config",
    "PoolConfig": "seer.config",
    "RolloutConfig": "seer.config",
    "RunConfig": "seer.config",
    "ConfigError": "seer.errors",
    "DeadlineExceeded": "seer.errors",
    "DraftError": "seer.errors",
    "InputError": "seer.errors",
    "InstanceError": "seer.errors",
    "MissingExtra": "seer.errors",
    "NoProbability": "seer.errors",
    "Overloaded": "seer.errors",
    "PoolError": "seer.errors",
    "SeerError": "seer.errors",
    "in_thread": "seer.machine.daemon_thread",
    "Summary": "seer.metrics.summary",
    "Prompt": "seer.runs.prompts",
    "read_prompts": "seer.runs.prompts",
    "ResponseHandle": "seer.runs.response_handle",
    "Session": "seer.runs.session",
    "RolloutLoop": "seer.rollout",
    "SchedulerSettings": "seer.scheduling.registry",
    "make_scheduler": "seer.scheduling.registry",
    "parse_scheduler": "seer.scheduling.registry",
    "FinishReason": "seer.types",
    "Group": "seer.types",
    "GroupResult": "seer.types",
    "Response": "seer.types",
    "Sampling": "seer.types",
    "TokenSpan": "seer.types",
    "Turn": "seer.types",
}


def __getattr__(name: str) -> Any:
    """Load a public name from the module it lives in."""
    if name not in _HOMES:
        raise AttributeError(f"module 'seer' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
