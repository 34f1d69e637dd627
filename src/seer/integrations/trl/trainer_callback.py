# SPDX-License-Identifier: Apache-2.0
"""The trainer callback: writes the trainer's logs into the run's folder and ends the instances with the training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from seer.integrations.trl.rollouts import SeerRollouts


def add_trainer_callback(trainer: Any, rollouts: SeerRollouts) -> None:
    """Add the callback to a trainer that already runs."""
    from transformers import TrainerCallback

    class SeerCallback(TrainerCallback):
        """Forwards two of the trainer's events."""

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **rest: Any) -> None:
            """Write the trainer's log."""
            if rollouts.record is not None and logs is not None and state.is_world_process_zero:
                rollouts.record.write_log(state.global_step, logs)

        def on_train_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            """End the instances; an evaluation afterwards starts them again."""
            rollouts.close()

    trainer.add_callback(SeerCallback())
