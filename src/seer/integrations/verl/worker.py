# SPDX-License-Identifier: Apache-2.0
"""What vLLM mixes into its worker class in a Seer server: our methods beside verl's.

`engine_kwargs.vllm.worker_extension_cls`, where the user has set it, takes the place of verl's own extension. vLLM
takes one class by name and imports it in its worker processes, so the user's class is named in the environment.
"""

from __future__ import annotations

import importlib
import os

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from seer.engine.vllm.worker import SeerWorker

USER_EXTENSION = "SEER_VERL_WORKER_EXTENSION"
"""Environment variable: the user's class, as `module.Class`."""
EXTENSION = f"{__name__}.SeerVerlWorker"


def _theirs() -> type:
    module, _, name = os.environ.get(USER_EXTENSION, "").rpartition(".")
    found: type = getattr(importlib.import_module(module), name) if module else vLLMColocateWorkerExtension
    return found


class SeerVerlWorker(SeerWorker, _theirs()):  # type: ignore[misc]
    """Both sets of methods."""
