# SPDX-License-Identifier: Apache-2.0
"""One rank of a training run, for test_trl_ranks.py: `python trl_rank.py OUT` with torchrun's variables set.

Trains twice: first with instances that cannot be started, then properly.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from seer.errors import SeerError
from seer.integrations.trl import seer_rollouts
from trl_toy import Heard, torch, toy_trainer


def a_run(output_dir: Path, num_ranks: int, **settings: Any) -> dict[str, Any]:
    """Three prompts by six responses: with two ranks one group straddles them."""
    with seer_rollouts(kv_blocks=256, block_size=4, **settings) as rollouts:
        heard = Heard(rollouts)
        batch = {"per_device_train_batch_size": 18 // num_ranks, "num_generations": 6}
        toy_trainer(heard, output_dir, max_steps=2, num_rows=12, **batch).train()
        return {"completions": heard.completions, "has_instances": rollouts.record is not None}


if __name__ == "__main__":
    folder, num_ranks = Path(sys.argv[1]), int(os.environ["WORLD_SIZE"])
    try:
        a_run(folder / "failing", num_ranks, hosting={"start_deadline_s": 0.001})  # too short for any process
        error = None
    except SeerError as raised:
        error = str(raised)
    found = a_run(folder / "out", num_ranks) | {"error": error}
    (folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()
