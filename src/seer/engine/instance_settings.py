# SPDX-License-Identifier: Apache-2.0
"""What the process of an instance gets from the driver: the configuration, and what the instances share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from seer.config import RolloutConfig, build
from seer.config.engines import EngineConfig
from seer.drafting.curve_keys import ClientKeys
from seer.errors import ConfigError

E = TypeVar("E", bound=EngineConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallelRank:
    """An instance that shares the experts of its model with others, and where it meets them."""

    rank: int
    size: int
    address: str
    """Of the machine of rank 0."""
    port: int
    """On that machine, asked for at each start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceSettings:
    """Becomes plain values on the way to the process, and the same type again there."""

    config: RolloutConfig
    """As `prepare` resolved it: `model` is a folder, and nothing is left to the device."""
    pool: dict[str, Any] | None = None
    """For `seer.kvpool.open_pool`."""
    draft_servers: tuple[str, ...] | None = None
    """Addresses of the fleet's draft servers; None turns grouped drafts off."""
    draft_keys: ClientKeys | None = None
    """Keys that the draft servers know."""
    matrices_dir: str | None = None
    """Folder where the local engine's instances share packed weights."""
    step_profile: str | None = None
    """File with measured step costs that fits this engine; drafts go by it until the instance has measured its own."""
    data_parallel: DataParallelRank | None = None
    """With `config.data_parallel` above 1; known once the processes of all ranks are there."""

    @property
    def max_num_seqs(self) -> int:
        """Requests the instance runs at once."""
        assert self.config.max_num_seqs is not None, "the configuration was fitted to its device"
        return self.config.max_num_seqs

    def engine_settings(self, kind: type[E]) -> E:
        """The settings of the engine that this process hosts."""
        found = self.config.engine_settings
        if not isinstance(found, kind):
            raise ConfigError(f"engine_settings is a {type(found).__name__}, not a {kind.__name__}")
        return found


def read_settings(values: dict[str, Any]) -> InstanceSettings:
    """The settings that the driver sent as plain values."""
    return build(InstanceSettings, values)
