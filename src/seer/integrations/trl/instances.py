# SPDX-License-Identifier: Apache-2.0
"""The instances that roll out for a trainer, with the trainer's model and weights.

The first rollout starts them from a model folder in shared memory. Before each later rollout the trainer's weights are
sent if they have changed.

Invariants
  1. A file with the newest weights stays until newer ones have arrived: an instance that restarts reads it again.
"""

from __future__ import annotations

import atexit
from pathlib import Path
from typing import Any

from seer.config import HostingConfig, from_keywords
from seer.engine.staged_weights import remove_shared_folder
from seer.errors import ConfigError
from seer.integrations.trl.trainer_weights import (
    WEIGHTS_FILE,
    are_as_held,
    stamp_of,
    tensors_of,
    write_model_folder,
    write_weights,
)
from seer.sync_api import SyncRollout

GPU_HOSTING = HostingConfig(progress_deadline_s=300.0)
"""On a GPU the first steps compile kernels, which takes minutes at worst."""

VLLM_GPU_SHARE = 0.3
"""Of the trainer's GPU, for all vLLM instances on it together; TRL gives its own vLLM as much."""
_DEFAULTS: dict[str, Any] = {
    "engine": "local",
    "scheduler": "seer",
    "instances": 1,
    "chunk_tokens": None,
    "dtype": "auto",
}


class TrainedInstances:
    """A `SyncRollout` that holds a trainer's weights."""

    def __init__(self, device: str | None, settings: dict[str, Any]) -> None:
        if "model" in settings:
            raise ConfigError("seer_rollouts takes no model", hint="the trainer's own is rolled out")
        # Instances on the trainer's GPU unless others are named: then they run beside it.
        self._device = device or ("cuda" if settings.get("gpus") is not None else None)
        self._settings = _DEFAULTS | settings
        if self._device is not None:
            self._settings["device"] = self._device
        from_keywords("trained", self._settings)  # a wrong setting is refused here, not at the first rollout
        self._folder: Path | None = None
        self._weights: Path | None = None  # the folder of the newest weights, where they are in a file
        self._rollout: SyncRollout | None = None
        self._stamp: tuple[int, str] | None = None

    @property
    def are_up(self) -> bool:
        """Whether they have been started."""
        return self._rollout is not None

    @property
    def options(self) -> dict[str, Any]:
        """The settings that are plain values, for the run's record."""
        return {key: value for key, value in self._settings.items() if isinstance(value, str | int | float | None)}

    @property
    def dtype(self) -> str:
        """The type they compute in."""
        from seer.verification.noise import engine_dtype

        return engine_dtype(str(self._settings["dtype"]), self._settings["device"])

    def sync_with(self, trainer: Any) -> SyncRollout:
        """Instances with the trainer's current weights."""
        stamp = stamp_of(trainer)
        if self._rollout is None:
            self._start(trainer)
        elif stamp != self._stamp:
            self._send_weights(trainer)
        self._stamp = stamp
        assert self._rollout is not None, "started above"
        return self._rollout

    def close(self) -> None:
        """End them and give their memory back; `sync_with` starts them anew."""
        rollout, self._rollout = self._rollout, None
        folders = self._folder, self._weights
        self._folder = self._weights = None
        if rollout is not None:
            atexit.unregister(self.close)
            rollout.__exit__(None, None, None)
        for folder in folders:
            if folder is not None:
                remove_shared_folder(folder)

    def _start(self, trainer: Any) -> None:
        own = trainer.accelerator.device
        # Ranks on a CPU call theirs cpu:0, cpu:1, ...: there is one.
        self._settings["device"] = device = self._device or ("cpu" if own.type == "cpu" else f"cuda:{own.index or 0}")
        if self._device is None and device != "cpu":
            self._settings.setdefault("share_gpus", True)  # they share the trainer's GPU, so also with each other
            self._limit_vllm()
        self._settings.setdefault("hosting", HostingConfig() if device == "cpu" else GPU_HOSTING)
        self._folder = write_model_folder(trainer)
        try:
            rollout = SyncRollout(self._folder, **self._settings)
            rollout.__enter__()
        except BaseException:
            self.close()
            raise
        self._rollout = rollout
        atexit.register(self.close)

    def _limit_vllm(self) -> None:
        """Without a size of its KV memory, vLLM takes nearly all of the GPU, which the trainer needs too."""
        sized = {"kv", "kv_memory_bytes", "kv_blocks", "engine_settings"} & self._settings.keys()
        if self._settings["engine"] == "vllm" and not sized:
            share = VLLM_GPU_SHARE / self._settings["instances"]
            self._settings["engine_settings"] = {"engine": {"gpu_memory_utilization": share}}

    def _send_weights(self, trainer: Any) -> None:
        assert self._rollout is not None, "weights are sent to instances that run"
        if are_as_held(trainer):
            self._rollout.update_weights(tensors_of(trainer))
            return
        folder = write_weights(trainer)
        try:
            self._rollout.update_weights(folder / WEIGHTS_FILE)
        except BaseException:
            remove_shared_folder(folder)
            raise
        if self._weights is not None:
            remove_shared_folder(self._weights)
        self._weights = folder
