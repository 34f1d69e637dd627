#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# GRPO with verl on a task with a tool: the model may have Python computed before it answers. MODEL and DATA are as in
# ../grpo_verl/train.sh; `python examples/tools_verl/card_problems.py DATA` writes problems. ENVIRONMENT names another
# environment. Further settings of verl may follow the script's name. tests/verl_training runs it on a CPU.
set -euo pipefail
HERE=$(cd "$(dirname "$0")" && pwd)

ROLLOUT=seer exec "$HERE/../grpo_verl/train.sh" \
  +actor_rollout_ref.rollout.custom.seer.environment="${ENVIRONMENT:-$HERE/card_problems.py:tool}" \
  "$@"
