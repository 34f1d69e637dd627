# SPDX-License-Identifier: Apache-2.0
"""`verify=P`: responses are scored again as they end, by a process of its own, against the weights of the run."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from safetensors.torch import load_file

from seer import GroupResult, HostingConfig, Rollout, Sampling
from seer.cli.main import main
from seer.engine.local.tiny import make_tiny_model
from seer.errors import ConfigError, SeerError
from seer.runs.prompts import EncodedPrompt, Prompt
from seer.verification.verifier import Verifier

PROMPTS = [[3 + i, 7, 11, 5 + i, 9] for i in range(3)]
SAMPLING = Sampling(max_tokens=24)
DEADLINE_S = 120


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def a_rollout(model: Path, **settings: Any) -> Rollout:
    return Rollout(model, kv_blocks=128, max_num_seqs=4, hosting=HostingConfig(pin_cores=False), **settings)


async def rolled_out(rollout: Rollout, **settings: Any) -> list[GroupResult]:
    return [group async for group in rollout.run(PROMPTS, n=4, sampling=SAMPLING, **settings)]


@pytest.fixture(scope="module")
def groups(model: Path) -> list[GroupResult]:
    async def scenario() -> list[GroupResult]:
        async with a_rollout(model) as rollout:
            return await rolled_out(rollout)

    return asyncio.run(scenario())


def a_verifier(model: Path, share: float = 1.0) -> Verifier:
    prompts = [
        EncodedPrompt(Prompt(token_ids=tuple(ids), id=str(i)), tuple(ids), SAMPLING, 4) for i, ids in enumerate(PROMPTS)
    ]
    return Verifier(prompts, share, folder=model, weights=None, ends_ignored=False)


def test_a_share_of_the_run_is_verified_against_the_weights_it_used(model: Path, tmp_path: Path) -> None:
    other = load_file(make_tiny_model(tmp_path / "other", seed=1) / "model.safetensors")

    async def scenario() -> None:
        async with a_rollout(model) as rollout:
            await rolled_out(rollout)
            assert rollout.verification is None
            await rolled_out(rollout, verify=0.5)
            assert rollout.verification is not None
            assert (rollout.verification.num_responses, rollout.verification.is_clean) == (6, True)
            await rollout.update_weights(other)  # tensors that are in no model folder
            await rolled_out(rollout, verify=1.0, lengths=[[9] * 4] * 3)
            assert rollout.verification is not None
            assert (rollout.verification.num_responses, rollout.verification.is_clean) == (12, True)
            assert rollout.verification.num_tokens == 9 * 12

    asyncio.run(scenario())


def test_a_response_is_verified_when_it_ends_and_not_when_the_run_does(model: Path, groups: list[GroupResult]) -> None:
    async def scenario() -> int:
        verifier = a_verifier(model)
        await verifier.start()
        try:
            verifier.consider(groups[0].responses[0])
            async with asyncio.timeout(DEADLINE_S):
                await verifier._answered.wait()
            return verifier.num_verified
        finally:
            await verifier.close()

    assert asyncio.run(scenario()) == 1


def test_one_token_that_was_changed_is_found(model: Path, groups: list[GroupResult]) -> None:
    async def scenario() -> bool:
        verifier = a_verifier(model)
        await verifier.start()
        try:
            victim = groups[1].responses[2]
            token = victim.token_ids[5]
            victim.token_ids[5] = (token + 1) % 100
            for group in groups:
                for response in group.responses:
                    verifier.consider(response)
            victim.token_ids[5] = token
            found = await verifier.finish()
            assert found is not None
            assert found.num_responses == 12
            return found.is_clean
        finally:
            await verifier.close()

    assert not asyncio.run(scenario())


def test_without_its_process_there_is_no_verification(model: Path, groups: list[GroupResult]) -> None:
    async def scenario() -> None:
        verifier = a_verifier(model)
        await verifier.start()
        assert verifier._child is not None
        os.kill(verifier._child.pid, signal.SIGKILL)
        try:
            verifier.consider(groups[0].responses[0])
            with pytest.raises(SeerError, match="could not be verified: its process ended: killed by SIGKILL"):
                await verifier.finish()
        finally:
            await verifier.close()

    asyncio.run(scenario())


def test_the_choice_is_made_beforehand_and_at_least_one(model: Path) -> None:
    verifier = a_verifier(model, 0.01)
    assert verifier.num_chosen == 1
    assert verifier._chosen == a_verifier(model, 0.01)._chosen
    with pytest.raises(ConfigError, match=r"share of 1\.5"):
        a_verifier(model, 1.5)


def test_the_command_shows_the_verdict_and_keeps_it(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt_token_ids": ids}) for ids in PROMPTS) + "\n")
    run = tmp_path / "run"
    arguments = ["rollout", "--model", str(model), "--prompts", str(prompts), "--n", "4", "--max-tokens", "16"]
    arguments += ["--instances", "1", "--no-pin", "--quiet", "--kv-memory", "4MiB", "--run-dir", str(run)]
    assert main([*arguments, "--verify", "0.5"]) == 0
    assert "clean, 6 responses scored again" in capsys.readouterr().out
    assert json.loads((run / "run.json").read_text())["verification"]["is_clean"]
    assert main(["report", str(run)]) == 0
    assert "6 responses scored again" in (run / "report.html").read_text()
    assert main([*arguments, "--verify", "7"]) == 2
    assert "verify=7" in capsys.readouterr().err
