# SPDX-License-Identifier: Apache-2.0
"""GRPO with verl on a CPU: the toy of trl_toy.py (even or odd digits), trained by `examples/grpo_verl/train.sh`.

The words, the model and the reward are those of the other toy; the model has heads of 32, the smallest that vLLM's
attention on a CPU takes.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPO = Path(__file__).parents[2]
PLUGINS = Path(__file__).parent / "plugins"
SCRIPT = REPO / "examples/grpo_verl/train.sh"
TOOLS_SCRIPT = REPO / "examples/tools_verl/train.sh"

WORDS = ["<pad>", "<eos>", "<unk>", "even", "odd", "now", *map(str, range(10))]
RANDOM_REWARD = 5 / len(WORDS)
NUM_RANKS = 2
"""Ranks of the trainer, and replicas."""
RESPONSE_TOKENS = 96

OWN_RAY = (
    "ray_kwargs.ray_init.num_cpus=24",  # logical: verl's actors ask for many
    f"+ray_kwargs.ray_init.num_gpus={NUM_RANKS}",
    "+ray_kwargs.ray_init.object_store_memory=200000000",
    "+ray_kwargs.ray_init.include_dashboard=False",
)
"""For a run that starts its own Ray."""
CPU_SETTINGS = (
    "trainer.device=cpu",
    "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
    "reward.num_workers=1",
    f"reward.custom_reward_function.path={PLUGINS / 'verl_reward.py'}",
    "data.dataloader_num_workers=0",
    "data.filter_overlong_prompts=False",
    "actor_rollout_ref.model.use_remove_padding=False",
    "actor_rollout_ref.model.enable_gradient_checkpointing=False",
    "+actor_rollout_ref.model.override_config.attn_implementation=eager",
    "actor_rollout_ref.actor.use_torch_compile=False",
    "actor_rollout_ref.actor.fsdp_config.use_torch_compile=False",
    "+actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp32",
    "actor_rollout_ref.actor.optim.lr=4e-3",
    "actor_rollout_ref.rollout.dtype=float32",
    "actor_rollout_ref.rollout.enforce_eager=True",
    "actor_rollout_ref.rollout.free_cache_engine=False",
    "+actor_rollout_ref.rollout.enable_sleep_mode=False",
    "actor_rollout_ref.rollout.enable_chunked_prefill=False",
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.02",
    "actor_rollout_ref.rollout.max_model_len=256",
    "actor_rollout_ref.rollout.max_num_seqs=16",
    "actor_rollout_ref.rollout.max_num_batched_tokens=1024",
    "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=16",
    "+actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls=verl_cpu_worker.CpuWorker",
    "+actor_rollout_ref.rollout.engine_kwargs.vllm.distributed_executor_backend=uni",  # a process less to start
    "actor_rollout_ref.rollout.agent.num_workers=1",
    "trainer.val_before_train=False",
    "trainer.test_freq=-1",
    "trainer.save_freq=-1",
    "trainer.resume_mode=disable",
)
"""What a run on a CPU needs beside the script's own settings."""
ENVIRONMENT = {
    "VERL_USE_EXTERNAL_MODULES": "verl_cpu",
    "VERL_ENGINE_DEVICE": "cuda",  # verl registers its FSDP engine for this device only
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # else the engine on a CPU starts one more process for its one worker
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "HYDRA_FULL_ERROR": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_worker_niceness": "0",  # with Ray's 15 a run hardly moves beside other work
    "WANDB_MODE": "disabled",
}


@dataclass(frozen=True)
class ToyRun:
    """A finished run."""

    code: int
    output: str
    steps: list[dict[str, float]]
    """verl's metrics of each step."""

    def series(self, name: str) -> list[float]:
        return [step[name] for step in self.steps]

    @property
    def rewards(self) -> list[float]:
        return self.series("critic/score/mean")


def run_toy(
    folder: Path,
    rollout: str,
    steps: int,
    *settings: str,
    environment: Mapping[str, str] | None = None,
    script: Path = SCRIPT,
) -> ToyRun:
    """Train on the toy in `folder`, which `make_toy` has filled, over a Ray of its own."""
    with tempfile.TemporaryDirectory(prefix="seer-ray-") as ray_dir:
        own = (*OWN_RAY, f"+ray_kwargs.ray_init._temp_dir={ray_dir}")
        return train_toy(folder, rollout, steps, *own, *settings, environment=environment, script=script)


def train_toy(
    folder: Path,
    rollout: str,
    steps: int,
    *settings: str,
    environment: Mapping[str, str] | None = None,
    prefix: Sequence[str] = (),
    script: Path = SCRIPT,
) -> ToyRun:
    """Train on the toy; the script's command stands behind `prefix`."""
    log, metrics = folder / f"{rollout}.log", _metrics(folder, rollout)
    metrics.unlink(missing_ok=True)
    command = [*prefix, str(script), *CPU_SETTINGS, f"trainer.total_training_steps={steps}", *settings]
    with log.open("wb") as output:
        code = subprocess.run(
            command,
            cwd=folder,
            env=toy_environment(folder, rollout) | dict(environment or {}),
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        ).returncode
    lines = metrics.read_text().splitlines() if metrics.is_file() else []
    return ToyRun(code, log.read_text(errors="replace"), [json.loads(line)["data"] for line in lines])


def _metrics(folder: Path, rollout: str) -> Path:
    return folder / f"{rollout}.jsonl"


def toy_environment(folder: Path, rollout: str) -> dict[str, str]:
    """Of every process of a run, Ray's nodes included."""
    bin_dir = Path(sys.executable).parent
    return {
        **os.environ,
        **ENVIRONMENT,
        "PATH": f"{bin_dir}:{os.environ['PATH']}",
        "PYTHONPATH": f"{PLUGINS}:{folder}",
        "RAY_AUTH_TOKEN_PATH": str(folder / "ray_token"),  # else Ray makes one in the home folder
        "MODEL": str(folder / "model"),
        "DATA": str(folder),
        "ROLLOUT": rollout,
        "VERL_FILE_LOGGER_PATH": str(_metrics(folder, rollout)),
        "GPUS": str(NUM_RANKS),
        "PROMPTS": "8",
        "PROMPT_TOKENS": "16",
        "RESPONSE_TOKENS": str(RESPONSE_TOKENS),
    }


def make_toy(folder: Path, *, hopeless_every: int = 0) -> None:
    """Write the model, the prompts and what importlib.metadata must say of vLLM.

    Every so many prompts one has no reward for any response: dynamic sampling drops its group.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _write_model(folder / "model")
    _write_prompts(folder, hopeless_every)
    (folder / "ray_token").write_text(secrets.token_hex(32))
    # verl asks for the version of a package named vllm; the build for CPUs has another name.
    package = folder / "vllm-0.31.0+cpu.dist-info"
    package.mkdir(exist_ok=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.31.0+cpu\n")


def _write_prompts(folder: Path, hopeless_every: int) -> None:
    import pandas

    rows: list[dict[str, Any]] = []
    for i in range(64):
        kind = ("even", "odd")[i % 2]
        content = " ".join([kind] + ["now"] * (i // 2 % 8))
        is_hopeless = hopeless_every and i % hopeless_every == 0
        rows.append(
            {
                "data_source": "toy",
                "prompt": [{"role": "user", "content": content}],
                "ability": "toy",
                "reward_model": {"style": "rule", "ground_truth": "none" if is_hopeless else kind},
                "extra_info": {"split": "train", "index": i},
            }
        )
    pandas.DataFrame(rows).to_parquet(folder / "train.parquet")
    pandas.DataFrame(rows[:4]).to_parquet(folder / "val.parquet")


def _write_model(folder: Path) -> None:
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(WORDS),
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=256,
            tie_word_embeddings=False,
            initializer_range=0.1,  # wide enough that the prompt makes a difference from the start
            eos_token_id=1,
            pad_token_id=0,
            bos_token_id=None,
        )
    )
    model.float().save_pretrained(folder)


if __name__ == "__main__":
    make_toy(Path(sys.argv[1]))
    run = run_toy(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), *sys.argv[4:])
    print(run.code, run.rewards if run.steps else run.output[-3000:])
