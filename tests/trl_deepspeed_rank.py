# SPDX-License-Identifier: Apache-2.0
"""One rank of training runs with DeepSpeed, for test_trl_deepspeed.py: `python trl_deepspeed_rank.py OUT`.

accelerate counts ranks without GPUs only if it is told that there are none, and then refuses DeepSpeed. Here it is told
their number; the rest is accelerate's, DeepSpeed's and TRL's own code, over gloo.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from accelerate.state import PartialState  # type: ignore[import-untyped]
from accelerate.utils import DistributedType  # type: ignore[import-untyped]

from seer.errors import ConfigError
from seer.integrations.trl import seer_rollouts
from trl_fsdp_rank import logged
from trl_toy import Heard, torch, toy_trainer


def count_ranks_without_gpus() -> None:
    """Let accelerate count the ranks that DeepSpeed has brought together."""
    begin = PartialState.__init__

    def begin_counted(self: Any, *arguments: Any, **settings: Any) -> None:
        begin(self, *arguments, **settings)
        if self.distributed_type == DistributedType.NO and torch.distributed.is_initialized():
            self.distributed_type = DistributedType.DEEPSPEED
        if torch.distributed.is_initialized():
            self.num_processes = torch.distributed.get_world_size()
            self.process_index = self.local_process_index = torch.distributed.get_rank()

    PartialState.__init__ = begin_counted


def a_run(output_dir: Path, stage: int) -> dict[str, Any]:
    """What a training of three steps found."""
    zero = {"zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True}
    sizes = {"train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto"}
    batch: dict[str, Any] = {"per_device_train_batch_size": 12, "num_generations": 6, "use_cpu": False}
    with seer_rollouts(kv_blocks=256, block_size=4, device="cpu") as rollouts:
        heard = Heard(rollouts)
        trainer = toy_trainer(heard, output_dir, max_steps=3, num_rows=12, deepspeed=zero | sizes, **batch)
        trainer.train()
        lines = trainer.state.log_history
        return {
            "completions": heard.completions,
            "gaps": logged(lines, "seer/on_policy/mean_gap"),
            "num_ranks": trainer.accelerator.num_processes,
            "engine": type(trainer.model_wrapped).__name__,
        }


def main() -> None:
    folder = Path(sys.argv[1])
    count_ranks_without_gpus()
    found: dict[str, Any] = {f"stage {stage}": a_run(folder / str(stage), stage) for stage in (1, 2)}
    try:
        a_run(folder / "3", 3)
    except ConfigError as error:
        found["stage 3"] = str(error)
    (folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
