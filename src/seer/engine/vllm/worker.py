# SPDX-License-Identifier: Apache-2.0
"""Methods that the driver calls on vLLM's workers, over vLLM's `collective_rpc`.

vLLM mixes this class into its own worker class (`worker_extension_cls`), so `self` is that worker.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from seer.engine.local.weights import check_finite, open_weights
from seer.engine.vllm.leftovers import unname_segments
from seer.engine.vllm.model_folder import read_folder
from seer.engine.vllm.new_weights import identify
from seer.errors import InputError
from seer.machine.parent_death import end_with_process


class SeerWorker:
    """Method names begin with `seer_`, because they share a namespace with vLLM's worker."""

    def seer_exit_with_host(self, host_pid: int) -> None:
        """End this process when the process that started the engine ends, and leave no shared memory behind."""
        unname_segments(os.getpid())
        end_with_process(host_pid)

    def seer_load_weights(self, source: str) -> str | None:
        """Load the weights of a folder or safetensors file in place; why not, if they have values that are not finite.

        All are checked before the first is loaded, so that refused weights change nothing. An exception would reach
        the driver without its class and hint.
        """
        tensors = open_weights(Path(source))
        worker: Any = self
        device = worker.device
        try:
            for name in tensors:
                check_finite(name, tensors[name].to(device))
        except InputError as error:
            return str(error)
        worker.reload_weights(weights_iterator=((name, tensors[name]) for name in tensors))
        if device.type == "cpu":
            _repack(worker.model_runner.get_model())
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # in GPU memory, they are the trainer's again once this returns
        return None

    def seer_identify_weights(self, model_dir: str, source: str) -> dict[str, str | None]:
        """The `identity` of weights in GPU memory, or why they are `refused`, with a `hint`."""
        try:
            return {"identity": identify(read_folder(Path(model_dir)), Path(source)), "refused": None, "hint": None}
        except InputError as error:
            return {"identity": None, "refused": str(error), "hint": error.hint}

    def seer_check_weights(self) -> str | None:
        """Why the weights that vLLM has loaded itself cannot be used; None if they can."""
        worker: Any = self
        try:
            for name, parameter in worker.model_runner.get_model().named_parameters():
                check_finite(name, parameter.detach())
        except InputError as error:
            return str(error)
        return None

    def seer_pool_counts(self) -> dict[str, float]:
        """Counts of this worker's connector so far."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        from seer.engine.vllm.connector import SeerPoolConnector

        if not has_kv_transfer_group():
            return {}
        connector = get_kv_transfer_group()
        return connector.counts() if isinstance(connector, SeerPoolConnector) else {}

    def seer_settle_saves(self) -> None:
        """Wait until every block that was read has been put to the pool."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        from seer.engine.vllm.connector import SeerPoolConnector

        if has_kv_transfer_group():
            connector = get_kv_transfer_group()
            if isinstance(connector, SeerPoolConnector):
                connector.settle()


def _repack(model: Any) -> None:
    """Pack again after a reload what vLLM packs only when it loads a model for the first time.

    On a CPU vLLM multiplies by a packed copy of each matrix. A reload packs every layer again but two kinds: a head
    that is tied to the embedding, whose logits would stay those of the old weights, and experts, whose unpacked weights
    would be taken for packed ones.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(module)
