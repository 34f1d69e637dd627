# SPDX-License-Identifier: Apache-2.0
"""The configuration of a rollout: frozen, typed, and the same object from the command line to the instances.

    RunConfig                one `seer rollout` or `seer compare`; what a TOML file holds
    ├── sampling             seer.types.Sampling
    ├── compare              CompareConfig
    └── rollout              RolloutConfig; what `seer.Rollout` takes
        ├── kv               KvConfig
        ├── pool             PoolConfig
        ├── hosting          HostingConfig
        └── engine_settings  LocalEngineConfig | VllmEngineConfig | FakeEngineConfig, as `engine` says

Invariants
  1. Nothing here reads a model, imports torch or vLLM, or looks at this machine. None means "fit the device";
     `RolloutConfig.fitted` fills those fields in.
  2. An unknown key is refused, with the nearest known one.
  3. A configuration written as TOML and read again is equal to the first.
"""

from seer.config.build import build, build_run, from_keywords, of_new_instances
from seer.config.engines import (
    EngineConfig,
    FakeEngineConfig,
    LocalEngineConfig,
    TransferOptions,
    VllmEngineConfig,
    VllmSpeculation,
)
from seer.config.keywords import InstanceKeywords, RolloutKeywords
from seer.config.presets import PRESETS, Preset, preset
from seer.config.rollout import HostingConfig, KvConfig, PoolConfig, RolloutConfig
from seer.config.run import CompareConfig, RunConfig
from seer.config.toml_files import plain_values, read_config_file, to_toml

__all__ = [
    "PRESETS",
    "CompareConfig",
    "EngineConfig",
    "FakeEngineConfig",
    "HostingConfig",
    "InstanceKeywords",
    "KvConfig",
    "LocalEngineConfig",
    "PoolConfig",
    "Preset",
    "RolloutConfig",
    "RolloutKeywords",
    "RunConfig",
    "TransferOptions",
    "VllmEngineConfig",
    "VllmSpeculation",
    "build",
    "build_run",
    "from_keywords",
    "of_new_instances",
    "plain_values",
    "preset",
    "read_config_file",
    "to_toml",
]
