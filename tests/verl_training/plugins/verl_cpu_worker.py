# SPDX-License-Identifier: Apache-2.0
"""verl's weight receiver for vLLM on a CPU, for tests only.

There vLLM packs weights after loading them, so verl's in-place `load_weights` fails. This one takes all of them and
lets vLLM reload.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension


class CpuWorker(vLLMColocateWorkerExtension):
    """The extension that verl's servers mix into vLLM's workers."""

    def update_weights_from_ipc(
        self, peft_config: Any = None, base_sync_done: bool = False, use_shm: bool = False
    ) -> None:
        """Take the weights of one sync."""
        weights: list[tuple[str, torch.Tensor]] = []

        def take(bucket: list[tuple[str, torch.Tensor]], is_last: bool) -> None:
            weights.extend((name, one.clone()) for name, one in bucket)
            self._strike_if_due()

        receiver = BucketedWeightReceiver(self._get_zmq_handle(), torch.device("cpu"), use_shm=use_shm)
        receiver.receive_weights(take)
        self.reload_weights(weights_iterator=iter(weights))

    def _strike_if_due(self) -> None:
        """Kill the server in the middle of a weight sync, where a test asks for it."""
        if "SEER_KILLS" not in os.environ:
            return
        from verl_kills import HOST, is_due, step_of_sync, strike

        if is_due("sync", step_of_sync()):  # not by the first weights of a server: it knows no step before them
            strike(int(os.environ[HOST]))
            time.sleep(60)  # no answer: this process ends with the server
