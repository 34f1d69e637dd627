# SPDX-License-Identifier: Apache-2.0
"""A training run that kills itself: `python trl_killed.py OUT STEP during|between [resume]`, for test_trl_resume.py.

`during` dies in the middle of a rollout: when the first of the step's responses has ended and others have not.
`between` dies after an optimizer step, its checkpoint written, before the next rollout.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from seer.integrations.trl import early_reward, seer_rollouts
from trl_toy import WEIGHTS_KEPT, share, toy_trainer

SETTINGS: dict[str, Any] = {"instances": 2, "kv_blocks": 256, "block_size": 4, "max_num_seqs": 4, "chunk_tokens": 4}


def a_run(output_dir: Path, *, die_at: int | None = None, how: str = "", **settings: Any) -> Any:
    """A trainer on which `train` may be called, and its rollouts."""
    now: list[int] = [0]

    @early_reward
    def share_of_kind(completion: str, kind: str, **row: Any) -> float:
        if how == "during" and now[0] == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return share(completion, kind)

    class Watch(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            if how == "between" and state.global_step == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            now[0] = state.global_step

    rollouts = seer_rollouts(reward=share_of_kind, **SETTINGS | settings)
    trainer = toy_trainer(
        rollouts,
        output_dir,
        reward_funcs=share_of_kind,
        callbacks=[Watch()],
        max_steps=8,
        num_rows=40,  # one epoch of the dataset: TRL's sampler begins a resumed later epoch in another order
        max_completion_length=24,
        **WEIGHTS_KEPT,
    )
    return trainer, rollouts


if __name__ == "__main__":
    folder, step, how, *rest = sys.argv[1:]
    a_run(Path(folder), die_at=int(step), how=how)[0].train(resume_from_checkpoint=bool(rest))
