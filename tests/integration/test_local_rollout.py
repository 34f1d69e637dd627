# SPDX-License-Identifier: Apache-2.0
"""The whole thing on the local engine with a tiny model: processes, pool, drafts, faults, verification."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from draft_servers import server_status
from faults import KillOnce

pytest.importorskip("torch")

import torch
from safetensors.torch import load_file, save_file

from seer import GroupResult, HostingConfig, Rollout, Sampling
from seer.drafting.wire import Status
from seer.engine.local.tiny import make_tiny_model
from seer.errors import InputError, NoProbability
from seer.hosting import draft_servers
from seer.machine import private_files
from seer.verification.noise import Scoring
from seer.verification.verify import PlainModel, ResponseToVerify, verify

PROMPTS = [[3 + i, 7, 11, 5 + i, 9] for i in range(6)]
SAMPLING = Sampling(max_tokens=80)
Tokens = dict[tuple[int, int], list[int]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def a_rollout(model: Path, instances: int = 2, **settings: Any) -> Rollout:
    return Rollout(
        model,
        instances=instances,
        kv_blocks=512,
        max_num_seqs=8,
        chunk_tokens=16,
        pool_bytes=16 << 20,
        hosting=HostingConfig(pin_cores=False),
        **settings,
    )


async def rolled_out(rollout: Rollout, **settings: Any) -> list[GroupResult]:
    return [group async for group in rollout.run(PROMPTS, n=4, sampling=SAMPLING, **settings)]


def tokens_of(groups: list[GroupResult]) -> Tokens:
    return {(r.group, r.index): r.token_ids for group in groups for r in group.responses}


@functools.cache
def undisturbed(model: Path) -> list[GroupResult]:
    async def scenario() -> list[GroupResult]:
        async with a_rollout(model, 1, scheduler="verl", speculation="off") as rollout:
            return await rolled_out(rollout)

    return asyncio.run(scenario())


def test_everything_on_gives_the_tokens_of_everything_off(model: Path) -> None:
    async def scenario() -> list[Tokens]:
        async with a_rollout(model) as rollout:
            return [tokens_of(await rolled_out(rollout, scheduler=p)) for p in ("seer", "verl-sync", "context")]

    for tokens in asyncio.run(scenario()):
        assert tokens == tokens_of(undisturbed(model))


def test_kill_9_of_an_instance_changes_no_token(model: Path) -> None:
    async def scenario() -> tuple[Tokens, int]:
        async with a_rollout(model) as rollout:
            victim = rollout.fleet.instances[1]

            groups = await rolled_out(rollout, events=KillOnce(victim, request=2))
            assert sorted(group.group for group in groups) == list(range(len(PROMPTS)))
            return tokens_of(groups), rollout.fleet.num_lost

    tokens, num_lost = asyncio.run(scenario())
    assert num_lost >= 1
    assert tokens == tokens_of(undisturbed(model))


def test_new_weights_give_other_tokens_and_the_next_weights_version(model: Path, tmp_path: Path) -> None:
    other = make_tiny_model(tmp_path / "other", seed=1)

    async def scenario() -> list[GroupResult]:
        async with a_rollout(model) as rollout:
            await rolled_out(rollout)
            await rollout.update_weights(other)
            return await rolled_out(rollout)

    groups = asyncio.run(scenario())
    assert {r.weights_version for g in groups for r in g.responses} == {1}
    assert tokens_of(groups) == tokens_of(undisturbed(other))


def test_tensors_become_the_weights_and_outlive_a_restart(model: Path, tmp_path: Path) -> None:
    other = make_tiny_model(tmp_path / "other", seed=1)
    tensors = load_file(other / "model.safetensors")

    async def scenario() -> tuple[Tokens, int]:
        async with a_rollout(model) as rollout:
            await rollout.update_weights(tensors)
            victim = rollout.fleet.instances[0]

            await rolled_out(rollout, events=KillOnce(victim))
            await asyncio.wait_for(rollout.fleet.wait_until_up(), 60)
            return tokens_of(await rolled_out(rollout)), rollout.fleet.num_lost

    tokens, num_lost = asyncio.run(scenario())
    assert num_lost >= 1
    assert tokens == tokens_of(undisturbed(other))


def to_verify(groups: list[GroupResult]) -> list[ResponseToVerify]:
    return [ResponseToVerify(group.prompt_token_ids, SAMPLING, r) for group in groups for r in group.responses]


def test_instances_share_packed_matrices_also_of_new_weights(tmp_path: Path) -> None:
    """Both processes map the same files, the tokens are those of a process on its own, and nothing stays behind."""
    old, new = (make_tiny_model(tmp_path / f"wide-{seed}", vocab_size=8192, seed=seed) for seed in (0, 1))

    def shared_by(rollout: Rollout) -> set[str]:
        maps = [Path(f"/proc/{instance.pid}/maps").read_text() for instance in rollout.fleet.instances]
        inodes = [
            {tuple(line.split()[3:5]) for line in text.splitlines() if "/seer-matrices-" in line} for text in maps
        ]
        assert len(inodes) == 2
        assert inodes[0] == inodes[1]
        return {inode for _, inode in inodes[0]}

    async def scenario() -> tuple[Tokens, Tokens]:
        async with a_rollout(old) as rollout:
            before = shared_by(rollout)
            assert len(before) == 1, "the output matrix; all others are small"
            first = tokens_of(await rolled_out(rollout))
            await rollout.update_weights(new)
            after = shared_by(rollout)
            assert len(after) == 1
            assert after != before
            return first, tokens_of(await rolled_out(rollout))

    home = private_files.folder("/dev/shm")
    known = set(home.glob("seer-matrices-*"))
    first, second = asyncio.run(scenario())
    assert first == tokens_of(undisturbed(old))
    assert second == tokens_of(undisturbed(new))
    assert set(home.glob("seer-matrices-*")) <= known


def test_the_verification_is_clean_for_these_weights_and_not_for_others(model: Path, tmp_path: Path) -> None:
    groups = undisturbed(model)
    found = verify(PlainModel(model), to_verify(groups))
    assert found.is_clean
    assert found.num_mismatches == 0
    assert found.num_responses == 24
    assert found.num_tokens == sum(r.num_tokens for g in groups for r in g.responses)
    wrong = verify(PlainModel(make_tiny_model(tmp_path / "wrong", seed=2)), to_verify(groups)[:4])
    assert not wrong.is_clean
    assert wrong.num_mismatches > 0


def test_the_verification_notices_a_single_wrong_token_and_a_single_wrong_number(model: Path) -> None:
    (asked, *_) = to_verify(undisturbed(model))
    plain = PlainModel(model)
    token = asked.response.token_ids[3]
    asked.response.token_ids[3] = (token + 1) % 100
    assert verify(plain, [asked]).num_mismatches >= 1
    asked.response.token_ids[3] = token
    value = asked.response.logprobs[5]
    asked.response.logprobs[5] = value - 0.01
    assert not verify(plain, [asked]).is_clean
    asked.response.logprobs[5] = value
    assert verify(plain, [asked]).is_clean


def test_without_log_probabilities_tokens_are_verified_alone_and_none_of_them_where_they_cannot_be_repeated(
    model: Path,
) -> None:
    plain = PlainModel(model)
    scored = to_verify(undisturbed(model))[:4]
    bare = [
        replace(
            one,
            sampling=replace(one.sampling, logprobs=False),
            response=msgspec.structs.replace(
                one.response, token_ids=one.response.token_ids.copy(), logprobs=[], raw_logprobs=None
            ),
        )
        for one in scored
    ]
    found = verify(plain, bare)
    assert (found.is_clean, found.num_unverified) == (True, 0)
    assert found.num_without_logprob == found.num_tokens == found.num_compared
    assert verify(plain, scored).num_without_logprob == 0
    for scoring in (Scoring(noise="none"), Scoring(dtype="bfloat16")):
        found = verify(plain, bare, scoring)
        assert (found.is_clean, found.num_unverified) == (False, found.num_tokens)
        assert verify(plain, scored, scoring).is_clean
    bare[0].response.token_ids[3] = (bare[0].response.token_ids[3] + 1) % 100
    assert not verify(plain, bare).is_clean


def test_instances_ship_tokens_to_the_draft_servers_of_their_fleet_and_a_group_s_end_frees_them(model: Path) -> None:
    async def scenario() -> tuple[Status, Status]:
        async with a_rollout(model) as rollout:
            servers = rollout.fleet.draft_servers
            assert servers is not None
            (address,), keys = servers.addresses, servers.client_keys
            end_group = rollout.fleet.end_group
            ended: list[int] = []
            rollout.fleet.end_group = ended.append  # type: ignore[method-assign, assignment]
            await rolled_out(rollout)
            shipped = await asyncio.to_thread(server_status, address, keys, lambda status: status.tokens > 0)
            assert sorted(ended) == list(range(len(PROMPTS)))
            for group in ended:
                end_group(group)
            freed = await asyncio.to_thread(server_status, address, keys, lambda status: not status.groups)
            return shipped, freed

    shipped, freed = asyncio.run(scenario())
    assert shipped.groups > 0
    assert shipped.tokens > 0
    assert (freed.groups, freed.streams, freed.bytes) == (0, 0, 0)


def test_many_instances_share_several_draft_servers(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_servers, "INSTANCES_PER_SERVER", 1)

    async def scenario() -> list[int]:
        async with a_rollout(model) as rollout:
            servers = rollout.fleet.draft_servers
            assert servers is not None
            rollout.fleet.end_group = lambda group: None  # type: ignore[method-assign]
            await rolled_out(rollout)
            return [
                (await asyncio.to_thread(server_status, one, servers.client_keys, lambda s: s.tokens > 0)).tokens
                for one in servers.addresses
            ]

    tokens = asyncio.run(scenario())
    assert len(tokens) == 2
    assert min(tokens) > 0, "groups are spread over both"


def bad_model(folder: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Path:
    make_tiny_model(folder)
    weights = load_file(folder / "model.safetensors")
    weights[name] = change(weights[name])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("speculation", ["off", "auto"])
def test_a_model_that_gives_no_probability_ends_the_run_by_request_and_position(
    tmp_path: Path, speculation: str
) -> None:
    # Finite weights whose logits are not: nothing of this can be seen before the first step.
    folder = bad_model(tmp_path / "bad", "model.norm.weight", lambda norm: norm * 2e38)

    async def scenario() -> int:
        async with a_rollout(folder, speculation=speculation) as rollout:
            with pytest.raises(NoProbability, match=r"request \d+, position 5: the model gives no probability"):
                await rolled_out(rollout)
            with pytest.raises(NoProbability):
                await rolled_out(rollout)
            return rollout.fleet.num_lost

    assert asyncio.run(scenario()) == 0, "no restart was tried"


def test_weights_that_are_not_finite_are_refused_when_they_arrive(model: Path, tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.o_proj.weight"
    folder = bad_model(tmp_path / "bad", name, lambda weight: weight.masked_fill(weight > 0.3, float("nan")))

    async def scenario() -> Tokens:
        with pytest.raises(InputError, match=f"{name} has "):
            async with a_rollout(folder):
                pass
        async with a_rollout(model) as rollout:
            for weights in (folder, load_file(folder / "model.safetensors")):
                with pytest.raises(InputError, match=f"{name} has ") as refused:
                    await rollout.update_weights(weights)
                assert "the trainer diverged" in str(refused.value.hint)
            return tokens_of(await rolled_out(rollout))

    assert asyncio.run(scenario()) == tokens_of(undisturbed(model)), "with the weights it had"
