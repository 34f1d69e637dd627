# SPDX-License-Identifier: Apache-2.0
"""Has verl's agent loops talk to `custom.seer.environment`, before anything starts; in the trainer's process.

Every process that reads verl's configuration later finds the name of our agent loop in it, and whole paths of files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from seer.environments.named import with_whole_path
from seer.errors import ConfigError
from seer.integrations.verl.conversing import ChatTemplate, environment_of, tools_of
from seer.integrations.verl.settings import ROLLOUT, WHERE, read_settings

LOOP = "seer_environment"
"""Our agent loop, for `rollout.agent.default_agent_loop` and a dataset's column `agent_name`."""
_USUAL_LOOP = "single_turn_agent"
"""verl's default."""


def use_environment(config: Any, model: Any) -> ChatTemplate | None:
    """Check what the settings name, and have verl use it; None where they name nothing.

    `config` and `model` are verl's configurations of the rollout and of the model.
    """
    settings = read_settings(config.get("custom"))
    if settings.environment is None or not isinstance(config, DictConfig):
        return None
    chosen = config.agent.default_agent_loop
    if chosen not in (_USUAL_LOOP, LOOP):
        raise ConfigError(
            f"{ROLLOUT}.agent.default_agent_loop={chosen} and {WHERE}.environment={settings.environment} are both set",
            hint="leave one of them out",
        )
    environment_of(settings)
    tools_of(settings)
    with open_dict(config):
        config.agent.default_agent_loop = LOOP
        for name in ("environment", "tools"):
            if config.custom.seer.get(name) is not None:
                config.custom.seer[name] = with_whole_path(config.custom.seer[name])
    data = config._get_root().get("data") or {}
    variables = data.get("apply_chat_template_kwargs") or {}
    return ChatTemplate(
        folder=Path(model.get("tokenizer_path") or model.path).expanduser().absolute(),
        template=model.get("custom_chat_template"),
        variables=OmegaConf.to_container(variables) if isinstance(variables, DictConfig) else variables,
    )
