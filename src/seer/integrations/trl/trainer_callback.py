"""Hears from the trainer: logs go into the run's folder, and the end of training ends the instances."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from seer.integrations.trl.rollouts import SeerRollouts


def add_trainer_callback(trainer: Any, rollouts: SeerRollouts) -> None:
    """Add a callback to a trainer that is already at work."""
    from transformers import TrainerCallback

    class SeerCallback(TrainerCallback):
        """Forwards two of the trainer's events."""

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **rest: Any) -> None:
            """Keep what the trainer reports."""
            if rollouts.record is not None and logs is not None and state.is_world_process_zero:
                rollouts.record.write_log(state.global_step, logs)

        def on_train_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            """The processes have no more work; an evaluation afterwards starts them again."""
            rollouts.close()

    trainer.add_callback(SeerCallback())
