# SPDX-License-Identifier: Apache-2.0
"""TRL's server mode against `seer serve`: GRPOTrainer(use_vllm=True, vllm_mode="server") trains the toy on a CPU."""

from __future__ import annotations

import socket
import warnings
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("trl")
pytest.importorskip("vllm")  # TRL's client wants it

import httpx
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of TRL, about the version of vLLM, whose code is not used here
    from seer.integrations.trl.server_on_cpu import weights_over_gloo
from serve_process import SMALL, a_serve_process
from trl_toy import rewards_of, toy_model, toy_tokenizer, toy_trainer

pytestmark = pytest.mark.filterwarnings("ignore:TRL currently supports vLLM")


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def test_a_trainer_in_server_mode_learns(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    model = toy_model(0)
    model.save_pretrained(tmp_path / "model")
    toy_tokenizer().save_pretrained(tmp_path / "model")
    settings: dict[str, Any] = {"use_vllm": True, "vllm_mode": "server", "vllm_group_port": free_port()}
    words = ("--model", str(tmp_path / "model"), "--instances", "2", *SMALL)
    with a_serve_process(*words) as server, weights_over_gloo():
        trainer = toy_trainer(
            None, tmp_path / "out", model=model, max_steps=20, vllm_server_base_url=server.url, **settings
        )
        trainer.train()
        version = httpx.get(f"{server.url}/weight_info").json()["weight_version"]
    rewards = rewards_of(trainer)
    assert int(version) >= 19  # an update before every step but the first
    start, end = sum(rewards[:2]) / 2, sum(rewards[-4:]) / 4
    assert end > 0.85
    assert end > start + 0.3
    # On policy: the trainer's own log-probabilities are those that came over HTTP.
    ratios = [line for line in trainer.state.log_history if "sampling/sampling_logp_difference/mean" in line]
    assert ratios
    assert max(line["sampling/sampling_logp_difference/max"] for line in ratios) < 1e-3
