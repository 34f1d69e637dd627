# SPDX-License-Identifier: Apache-2.0
"""`seer_rollouts`: the function that GRPOTrainer calls for completions, once per generation batch.

One call: gather every rank's prompts; on the main rank send the trainer's weights to the instances if they have
changed, find the groups, roll them out together, and let the trainer score a few responses to check that both sides
hold the same policy; return to each rank its own completions. The first call starts the instances. They end with the
training, the program, or `close`, whichever comes first.

Invariants
  1. The tokens of a step depend on the trainer's seed, step, weights and prompts only; never on timing, on the number
     of instances or ranks, or on what ran before. So a resumed run repeats.
  2. A rollout uses one weights version: the trainer waits while it runs.
"""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from seer.environments.base import Environment, Message, check_environment
from seer.errors import ConfigError, InstanceError
from seer.integrations.trl.early_rewards import REWARDS, EarlyReward, RewardsByRow
from seer.integrations.trl.environment_rows import EnvironmentOfTrainer
from seer.integrations.trl.groups import PromptGroup, find_groups, group_seed
from seer.integrations.trl.instances import TrainedInstances
from seer.integrations.trl.on_policy import SCORE, OnPolicyCheck, score_too
from seer.integrations.trl.prompt_memory import PromptMemory
from seer.integrations.trl.ranks import Columns, Duties, roll_out_together
from seer.integrations.trl.record import RolloutLine, TrainingRecord, log_metrics
from seer.integrations.trl.rollout_settings import RolloutSettings, read_settings
from seer.integrations.trl.sharding import model_of, reshard
from seer.integrations.trl.trainer_callback import add_trainer_callback
from seer.integrations.trl.trainer_weights import GATHER, gather_too, refuse_unreadable
from seer.metrics.events import EventSink, discard
from seer.metrics.jsonl import EventLog
from seer.runs.prompts import Prompt
from seer.runs.run_folder import RunFolder
from seer.sync_api import SyncRollout
from seer.types import FinishReason, GroupResult, Response

log = logging.getLogger(__name__)

_DUTIES: Duties = {GATHER: gather_too, SCORE: score_too}


def seer_rollouts(
    *,
    reward: EarlyReward | None = None,
    reward_deadline_s: float = 60.0,
    environment: Environment | None = None,
    environment_deadline_s: float = 60.0,
    tools: Sequence[Message] | None = None,
    keep_lengths: bool = True,
    keep_responses: bool = False,
    check_responses: int = 8,
    max_mean_gap: float | None = None,
    run_dir: str | Path | None = None,
    keep_steps: int = 4,
    device: str | None = None,
    **fleet: Any,
) -> SeerRollouts:
    """A `rollout_func` for `GRPOTrainer`: the same settings, rolled out by Seer.

    `reward` is computed as each response ends (see `early_reward`). `environment` is called after each turn, with
    the dataset's row in its conversation; tokens that it gives are masked, and `environment_reward` is the reward
    function for what it says. A response whose environment failed is masked as a whole and has no reward.
    `keep_lengths` and `keep_responses` keep lengths and tokens of a prompt's responses for later epochs, as first
    length estimates and as drafts. The trainer scores `check_responses` of each rollout to check that they are on
    policy (0: never) and warns with `OffPolicy` above `max_mean_gap`. The run is recorded in `run_dir` (default:
    the trainer's output_dir/seer), with the events of the newest `keep_steps` rollouts. The instances run on the
    trainer's own device, and share its GPU, unless `gpus` names others beside it or `device` is given. The rest are
    settings of `seer.Rollout`: `instances`, `engine`, `scheduler`, `pool`, `speculation`, `chunk_tokens`,
    `max_num_seqs`, `kv_memory_bytes`, ...
    """
    return SeerRollouts(
        TrainedInstances(device, fleet),
        rewards=RewardsByRow(reward, reward_deadline_s) if reward is not None else None,
        environment=_checked(environment, environment_deadline_s, tools),
        memory=PromptMemory(lengths=keep_lengths, responses=keep_responses),
        check=OnPolicyCheck(num_responses=check_responses, max_mean_gap=max_mean_gap),
        run_dir=Path(run_dir) if run_dir is not None else None,
        keep_steps=keep_steps,
    )


class SeerRollouts:
    """TRL's `rollout_func`. As a context manager it ends the instances on exit."""

    def __init__(
        self,
        instances: TrainedInstances,
        *,
        rewards: RewardsByRow | None,
        environment: EnvironmentOfTrainer | None,
        memory: PromptMemory,
        check: OnPolicyCheck,
        run_dir: Path | None,
        keep_steps: int,
    ) -> None:
        self.instances = instances
        self._rewards = rewards
        self._environment = environment
        self._memory = memory
        self._check = check
        self._run_dir, self._keep_steps = run_dir, keep_steps
        self._last_call: tuple[str, int, int] | None = None  # phase, step, number within it
        self._began_s: float | None = None
        self._callback_of: weakref.ref[Any] | None = None
        self.record: TrainingRecord | None = None
        """The run's folder, once the first rollout has begun."""
        self.newest_step: RunFolder | None = None
        """The folder of the newest rollout, where it is kept."""

    def __enter__(self) -> Self:
        """Nothing is started before the first rollout."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the instances."""
        self.close()

    def __call__(self, prompts: list[Any], trainer: Any) -> Columns:
        """Completions for this rank's prompts, as TRL expects them."""
        settings = read_settings(trainer)
        refuse_unreadable(trainer)
        reshard(model_of(trainer))
        return roll_out_together(
            prompts, trainer, lambda all_prompts: self._roll_out(all_prompts, trainer, settings), _DUTIES
        )

    def close(self) -> None:
        """End the instances; a later call starts them anew, and is the first of a training."""
        self._forget_calls()
        if self.record is not None:
            self.record.end()
        self.instances.close()

    # On the main rank

    def _roll_out(self, prompts: list[Any], trainer: Any, settings: RolloutSettings) -> Columns:
        began_s = time.monotonic()
        record = self._hold_record(trainer)
        call = self._count_call(settings)
        rollout = self.instances.sync_with(trainer)
        weights_s = time.monotonic() - began_s
        name = trainer.model.config._name_or_path or type(trainer.model).__name__
        record.begin(self.instances.options | {"model": name}, rollout.fleet)
        groups = find_groups(prompts, settings.group_size)
        self.newest_step = step = record.open_step(settings, call)
        found = self._generate(rollout, groups, trainer, settings, call)
        rollout_s = time.monotonic() - began_s
        responses = [response for group in found for response in group.responses]
        prompt_ids = [list(group.prompt_token_ids) for group in found for _ in group.responses]
        where = f"the rollout of step {settings.step}"
        numbers = self._check.check(
            trainer, prompt_ids, responses, settings.sampling, dtype=self.instances.dtype, where=where
        )
        line = RolloutLine.of(
            settings,
            call,
            found,
            weights_version=rollout.weights_version,
            rollout_s=rollout_s,
            weights_s=weights_s,
            check_s=time.monotonic() - began_s - rollout_s,
            since_last_s=None if self._began_s is None else began_s - self._began_s,
            tail_s=rollout.summary.tail_s if rollout.summary is not None else 0.0,
            num_known=len(self._memory.lengths({group.key for group in groups})),
            on_policy=numbers,
        )
        self._began_s = began_s
        for group, answered in zip(groups, found, strict=True):
            self._memory.learn(group.key, answered)
        record.close_step(step, settings, rollout.summary)
        record.write(line)
        log_metrics(trainer, line)
        return self._columns(prompt_ids, responses)

    def _generate(
        self,
        rollout: SyncRollout,
        groups: Sequence[PromptGroup],
        trainer: Any,
        settings: RolloutSettings,
        call: int,
    ) -> list[GroupResult]:
        """All groups, in the trainer's order; refused if a response did not end by itself."""
        token_ids, images, _ = trainer._tokenize_prompts([group.prompt for group in groups])
        if images is not None:
            raise ConfigError("prompts with images are not supported", hint="use a text dataset")
        prompts = [
            Prompt(id=group.key, token_ids=tuple(ids), n=group.size, seed=group_seed(settings, call, place))
            for place, (group, ids) in enumerate(zip(groups, token_ids, strict=True))
        ]
        asked: dict[str, Any] = {}
        if self._rewards is not None:
            asked["reward"] = self._rewards.function(groups, trainer, settings.mode)
            asked["reward_deadline_s"] = self._rewards.deadline_s
        if self._environment is not None:
            asked |= self._environment.arguments(groups, trainer, settings.mode)
        keys = [group.key for group in groups]
        with _event_log(self.newest_step) as events:
            found = list(
                rollout.run(
                    prompts,
                    sampling=settings.sampling,
                    seed=settings.seed,
                    length_hints=self._memory.lengths(keys),
                    past_responses=self._memory.responses(keys),
                    events=events,
                    **asked,
                )
            )
        found.sort(key=lambda group: group.group)
        _refuse_incomplete(found, settings.step, may_fail=self._environment is not None)
        _report_reward_errors(found, settings.step)
        return found

    def _columns(self, prompt_ids: list[list[int]], responses: Sequence[Response]) -> Columns:
        columns: Columns = {
            "prompt_ids": prompt_ids,
            "completion_ids": [response.token_ids for response in responses],
            "logprobs": [response.logprobs for response in responses],
        }
        if self._rewards is not None or self._environment is not None:
            columns[REWARDS] = [response.reward for response in responses]
        if self._environment is not None:
            columns["env_mask"] = [_mask(response) for response in responses]
        return columns

    def _count_call(self, settings: RolloutSettings) -> int:
        """Which rollout of its step this is: with gradient accumulation there may be several."""
        last, call = self._last_call, 0
        if last is not None and last[:2] == (settings.mode, settings.step):
            call = last[2] + 1
        self._last_call = (settings.mode, settings.step, call)
        return call

    def _forget_calls(self) -> None:
        self._last_call = self._began_s = None

    def _hold_record(self, trainer: Any) -> TrainingRecord:
        """The run's folder, refused before instances start where it must not be written."""
        if self.record is None or self.record.is_over:
            path = self._run_dir or Path(trainer.args.output_dir) / "seer"
            self.record = TrainingRecord(path, keep_steps=self._keep_steps)
        if self._callback_of is None or self._callback_of() is not trainer:
            self._forget_calls()
            add_trainer_callback(trainer, self)
            self._callback_of = weakref.ref(trainer)
        return self.record


@contextlib.contextmanager
def _event_log(step: RunFolder | None) -> Iterator[EventSink]:
    if step is None:
        yield discard
        return
    with EventLog(step.events, {"source": "train"}) as events:
        yield events


def _checked(
    environment: Environment | None, deadline_s: float, tools: Sequence[Message] | None
) -> EnvironmentOfTrainer | None:
    if environment is None:
        return None
    check_environment(environment)
    return EnvironmentOfTrainer(environment, deadline_s, tools)


def _mask(response: Response) -> list[int]:
    """Which tokens are trained on: those the model generated, and none of a response that failed."""
    if not response.is_complete:
        return [0] * len(response.token_ids)
    return response.loss_mask or [1] * len(response.token_ids)


def _refuse_incomplete(found: Sequence[GroupResult], step: int, *, may_fail: bool) -> None:
    """A response that was cut short would be trained on as if the model had ended it; a failed tool's is masked."""
    for group in found:
        for response in group.responses:
            if may_fail and response.finish_reason is FinishReason.FAILED and response.token_ids:
                log.warning("step %d: response %d to prompt %d: %s", step, response.index, group.group, response.error)
            elif not response.is_complete:
                raise InstanceError(
                    f"response {response.index} to prompt {group.group} of step {step} ended as "
                    f"{response.finish_reason.value}: {response.error}",
                    hint="seer_rollouts(hosting=HostingConfig(log_dir=...)) keeps what the instances write",
                )


def _report_reward_errors(found: Sequence[GroupResult], step: int) -> None:
    errors = [one.reward_error for group in found for one in group.responses if one.reward_error is not None]
    for error in errors[:3]:
        log.warning("step %d: %s", step, error)
    if len(errors) > 3:
        log.warning("step %d: %d more rewards are missing", step, len(errors) - 3)
