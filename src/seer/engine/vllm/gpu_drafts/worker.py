# SPDX-License-Identifier: Apache-2.0
"""vLLM's GPU worker with our speculator and sampler in its newest runner (`worker_cls` names it)."""

from __future__ import annotations

from typing import Any

import vllm.v1.worker.gpu.model_runner
from vllm.logger import init_logger
from vllm.v1.worker.gpu_worker import Worker

from seer.engine.vllm.gpu_drafts.graphs import Shapes, capture_in
from seer.engine.vllm.gpu_drafts.install import missing_names
from seer.engine.vllm.gpu_drafts.sampler import couple
from seer.engine.vllm.gpu_drafts.speculator import GroupedSpeculator

logger = init_logger("vllm.seer")


class GroupedDraftsWorker(Worker):
    """Makes vLLM's runner with our speculator, and lets this process verify drafts by sampling; all else is vLLM's."""

    def init_device(self) -> None:
        """Make the runner with our speculator."""
        lacking = missing_names()
        assert lacking is None, f"grouped drafts were asked for, and {lacking}"  # the host asks before it starts us
        module: Any = vllm.v1.worker.gpu.model_runner
        original, module.init_speculator = module.init_speculator, GroupedSpeculator
        try:
            super().init_device()
        finally:
            module.init_speculator = original
        couple()
        runner: Any = self.model_runner
        runner.speculator.bind(runner)
        logger.info("grouped drafts of %d tokens on %s", runner.speculator.num_draft_tokens, self.device)

    def initialize_from_config(self, *args: Any, **kwargs: Any) -> None:
        """Also choose the graphs, between the making of their manager and their capture."""
        super().initialize_from_config(*args, **kwargs)
        runner: Any = self.model_runner
        additional: Any = self.vllm_config.additional_config
        own = additional["seer"]
        if not capture_in(runner.cudagraph_manager, Shapes(**own["shapes"])):
            logger.warning("vLLM's own choice of CUDA graphs is kept: some steps with drafts run piecewise graphs")

    def seer_draft_counts(self) -> dict[str, int]:
        """Counters of the store; waits for the device."""
        runner: Any = self.model_runner
        return dict(runner.speculator.store.counters())
