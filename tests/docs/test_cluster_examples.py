# SPDX-License-Identifier: Apache-2.0
"""The examples for KubeRay and SLURM are well-formed: fields that those systems know, scripts that a shell reads."""

from __future__ import annotations

import re
import shlex
import subprocess
from typing import Any

import yaml

from markdown_pages import DOCS, code_blocks
from seer.cli.main import build_parser

BLOCKS = [block for page in DOCS if page.name == "many-machines.md" for block in code_blocks(page)]


def ray_job() -> dict[str, Any]:
    (text,) = [block.text for block in BLOCKS if block.language == "yaml"]
    found: dict[str, Any] = yaml.safe_load(text)
    return found


def test_the_job_of_kuberay_has_a_head_workers_and_shared_memory_in_every_pod() -> None:
    job = ray_job()
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        for container in pod["containers"]:
            mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
            assert mounts.keys() <= volumes
            assert "/dev/shm" in mounts.values()


def test_the_job_of_kuberay_runs_a_command_that_seer_takes() -> None:
    program, *arguments = shlex.split(ray_job()["spec"]["entrypoint"])
    assert program == "seer"
    build_parser().parse_args(arguments)


def test_every_bash_block_is_read_by_bash() -> None:
    scripts = [block for block in BLOCKS if block.language == "bash"]
    assert len(scripts) >= 2
    for block in scripts:
        done = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{block.where}: {done.stderr}"


def test_the_script_of_slurm_starts_ray_on_every_node() -> None:
    (script,) = [block.text for block in BLOCKS if "#SBATCH" in block.text]
    options = set(re.findall(r"--[a-z-]+", " ".join(re.findall(r"^#SBATCH (.*)$", script, re.MULTILINE))))
    assert options <= {"--nodes", "--gpus-per-node", "--ntasks-per-node", "--exclusive"}
    steps = [line for line in script.replace("\\\n", " ").splitlines() if line.startswith("srun")]
    assert [("--head" in step, "--address" in step, "seer rollout" in step) for step in steps] == [
        (True, False, False),
        (False, True, False),
        (False, False, True),
    ]
