# SPDX-License-Identifier: Apache-2.0
"""verl trains over two Ray nodes, each in network and mount namespaces of its own: a rank and a replica on each.

KV moves between them over Mooncake's TCP, siblings on different machines draft for each other, and weights come by
verl's own sync. Without root there are no namespaces, and the test skips.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("verl")

from verl_toy import ToyRun, make_toy, toy_environment, train_toy

from pools import needs_mooncake
from two_machines import PORT, Machine, two_machines, why_not

NUM_STEPS = 3
NUM_CPUS = (14, 14)
"""Numbers that verl's actors ask for, no hardware; so are the GPUs."""
NODE = ("--num-gpus=1", "--object-store-memory=200000000")
SEER = tuple(
    f"+actor_rollout_ref.rollout.custom.seer.{one}"
    for one in ("chunk_tokens=16", "kv_blocks=64", "pool.backend=mooncake", "pool.memory_bytes=64MiB")
)
MOVING = "+ray_kwargs.ray_init.runtime_env.worker_process_setup_hook=verl_always_move.always_move"
LONG = "actor_rollout_ref.rollout.ignore_eos=True"
"""Responses of several KV blocks: those that the toy's model ends have hardly one, and seldom move with KV."""
CABLE = {"GLOO_SOCKET_IFNAME": "eth0", "GPUS": "1"}


def train(folder: Path, one: Machine) -> ToyRun:
    """Run the script on the first machine."""
    cluster = (f"+ray_kwargs.ray_init.address={one.address}:{PORT}", "trainer.nnodes=2", MOVING, LONG)
    out = f"trainer.default_local_dir={folder}/checkpoints"  # relative to where Ray was started, unless stated
    prefix = one.command("env", f"--chdir={folder}")
    return train_toy(folder, "seer", NUM_STEPS, *cluster, *SEER, out, environment=CABLE, prefix=prefix)


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_replicas_on_two_machines_are_one_fleet(tmp_path: Path) -> None:
    needs_mooncake()
    make_toy(tmp_path)
    environment = toy_environment(tmp_path, "seer") | CABLE
    with two_machines(NUM_CPUS, options=NODE, environment=environment) as (one, two):
        run = train(tmp_path, one)
        assert run.code == 0, run.output[-5000:]
        assert run.series("seer/responses") == [64.0] * NUM_STEPS
        assert sum(run.series("seer/moves")) > 0
        assert sum(run.series("seer/moved_kv_tokens")) > 0
        assert sum(run.series("seer/drafted_tokens")) > 0
        assert sum(run.series("seer/accepted_draft_tokens")) > 0
        assert max(run.series("training/rollout_probs_diff_max")) < 1e-6
        assert run.series("seer/servers_up") == [2.0] * NUM_STEPS
        assert [machine.shared_memory() for machine in (one, two)] == [[], []], "something of the pool was left"
