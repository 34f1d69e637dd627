#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# GRPO with verl: MODEL is a model folder, DATA holds train.parquet and val.parquet, ROLLOUT is vllm or seer.
# Further settings of verl may follow the script's name. tests/verl_training runs it on a CPU with either rollout.
set -euo pipefail
: "${MODEL:?a model folder}" "${DATA:?a folder with train.parquet and val.parquet}"
ROLLOUT=${ROLLOUT:-seer} GPUS=${GPUS:-8}
PROMPTS=${PROMPTS:-64} PROMPT_TOKENS=${PROMPT_TOKENS:-512} RESPONSE_TOKENS=${RESPONSE_TOKENS:-4096}

exec python -m verl.trainer.main_ppo \
  algorithm.adv_estimator=grpo \
  data.train_files=$DATA/train.parquet \
  data.val_files=$DATA/val.parquet \
  data.train_batch_size=$PROMPTS \
  data.max_prompt_length=$PROMPT_TOKENS \
  data.max_response_length=$RESPONSE_TOKENS \
  actor_rollout_ref.model.path=$MODEL \
  actor_rollout_ref.actor.strategy=fsdp2 \
  actor_rollout_ref.actor.ppo_mini_batch_size=$PROMPTS \
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 \
  actor_rollout_ref.actor.use_kl_loss=False \
  actor_rollout_ref.rollout.name=$ROLLOUT \
  actor_rollout_ref.rollout.n=8 \
  actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
  actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8 \
  actor_rollout_ref.rollout.calculate_log_probs=True \
  trainer.nnodes=1 \
  trainer.n_gpus_per_node=$GPUS \
  trainer.logger='["console","file"]' \
  "$@"
