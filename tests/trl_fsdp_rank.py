# SPDX-License-Identifier: Apache-2.0
"""One rank of training runs under FSDP2, for test_trl_fsdp.py: `python trl_fsdp_rank.py OUT` with torchrun's variables.

Trains a whole model, then LoRA, each with an evaluation between two steps, which leaves FSDP2 with whole tensors; then
a model whose weights find the disk full while they are gathered.

accelerate shards on GPUs only. Here its state is told otherwise; what then shards, gathers, computes and steps is
accelerate's, torch's and TRL's own code, over gloo.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from accelerate.state import AcceleratorState, PartialState  # type: ignore[import-untyped]
from accelerate.utils import DistributedType  # type: ignore[import-untyped]

from seer.errors import SeerError
from seer.integrations.trl import seer_rollouts, weights_file
from seer.integrations.trl.sharding import is_sharded
from trl_toy import Heard, torch, toy_dataset, toy_trainer

SHARDED: dict[str, Any] = {
    "fsdp": True,
    "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
}


def shard_on_cpus() -> None:
    """Let accelerate shard over ranks that have no GPU."""
    begin = AcceleratorState.__init__

    def begin_sharded(self: Any, *arguments: Any, fsdp_plugin: Any = None, **settings: Any) -> None:
        begin(self, *arguments, fsdp_plugin=fsdp_plugin, **settings)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            self.fsdp_plugin = fsdp_plugin

    AcceleratorState.__init__ = begin_sharded


def a_run(output_dir: Path, num_ranks: int, **settings: Any) -> dict[str, Any]:
    """What a training of three steps found, with an evaluation after the second."""
    with seer_rollouts(kv_blocks=256, block_size=4) as rollouts:
        heard = Heard(rollouts)
        torch.manual_seed(0)  # adapters begin with random values
        batch: dict[str, Any] = {"per_device_train_batch_size": 24 // num_ranks, "num_generations": 6}
        evaluation: dict[str, Any] = {
            "eval_strategy": "steps",
            "eval_steps": 2,
            "per_device_eval_batch_size": 24 // num_ranks,
        }
        data = toy_dataset(4)
        trainer = toy_trainer(heard, output_dir, max_steps=3, eval_dataset=data, **batch, **evaluation, **settings)
        trainer.train()
        lines = trainer.state.log_history
        return {
            "completions": heard.completions,
            "gaps": logged(lines, "seer/on_policy/mean_gap"),
            "eval_gaps": logged(lines, "eval_seer/on_policy/mean_gap"),
            "versions": logged(lines, "seer/weights_version"),
            "is_sharded": is_sharded(trainer.model),
        }


def logged(lines: list[dict[str, Any]], name: str) -> list[float]:
    """The main rank logs what a rollout found; the others have nothing to log of it."""
    return [line[name] for line in lines if name in line]


def a_full_disk(output_dir: Path, num_ranks: int) -> str:
    """What this rank says if the main rank can write no more than three tensors."""
    to_bytes, num_written = weights_file._bytes, [0]

    def until_full(tensor: Any) -> memoryview:
        num_written[0] += 1
        if num_written[0] > 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return to_bytes(tensor)

    with mock.patch.object(weights_file, "_bytes", until_full):
        try:
            a_run(output_dir, num_ranks, **SHARDED)
        except (OSError, SeerError) as error:
            return str(error)
    return ""


def main() -> None:
    folder, num_ranks = Path(sys.argv[1]), int(os.environ["WORLD_SIZE"])
    shard_on_cpus()
    from peft import LoraConfig

    lora: dict[str, Any] = {"r": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    found = {
        "whole": a_run(folder / "whole", num_ranks, **SHARDED),
        "lora": a_run(folder / "lora", num_ranks, peft_config=LoraConfig(**lora), **SHARDED),
        "full disk": a_full_disk(folder / "full", num_ranks),
    }
    (folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
