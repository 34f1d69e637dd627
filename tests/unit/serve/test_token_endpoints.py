# SPDX-License-Identifier: Apache-2.0
"""Token ids in and out: /inference/v1/generate with SkyRL's and prime-rl's fields, SGLang's /generate with slime's."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("fastapi")

from seer.serve.groups import GroupNames
from served import NAME, Letters, a_server, events_of, expected_ids, until

SKYRL: dict[str, Any] = {
    "min_tokens": 1,
    "skip_special_tokens": True,
    "include_stop_str_in_output": True,
    "max_tokens": 30,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "logprobs": 0,
    "stop": None,
    "seed": 3,
}
"""As SkyRL's get_vllm_sampling_params makes them."""
PRIME: dict[str, Any] = {
    "temperature": 1.0,
    "max_tokens": 30,
    "seed": 3,
    "repetition_penalty": 1.0,
    "min_tokens": 0,
    "stop_token_ids": [999],
    "logprobs": 1,
    "skip_special_tokens": False,
}
"""As the renderer client of prime-rl sends them."""


@pytest.mark.parametrize("sampling", [SKYRL, PRIME], ids=["skyrl", "prime-rl"])
def test_the_reply_has_the_fields_that_frameworks_read(sampling: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with a_server() as served:
            body = {"token_ids": [1, 2], "sampling_params": sampling, "model": NAME, "cache_salt": "7", "priority": 3}
            reply = await served.ok("/inference/v1/generate", body | {"request_id": "r"})
            assert reply["request_id"] == "r"
            [choice] = reply["choices"]
            assert choice["token_ids"] == expected_ids(3, 0, 30)
            assert choice["finish_reason"] == "stop"
            content = choice["logprobs"]["content"]
            assert [one["token_id"] for one in content] == choice["token_ids"]
            assert all(isinstance(one["logprob"], float) for one in content)
            assert reply["usage"]["prompt_tokens"] == 2

    asyncio.run(scenario())


def test_a_stream_of_tokens_adds_up() -> None:
    async def scenario() -> None:
        async with a_server() as served:
            sampling = {"n": 2, "seed": 3, "max_tokens": 50}
            body = {"token_ids": [1], "sampling_params": sampling, "stream": True, "return_token_ids": True}
            events = events_of((await served.post("/inference/v1/generate", body)).text)
            assert events[0]["prompt_token_ids"] == [1]
            assert "prompt_token_ids" not in events[-1]
            for index in range(2):
                own = [one for event in events for one in event["choices"] if one["index"] == index]
                assert [token for one in own for token in one["token_ids"]] == expected_ids(3, index, 50)

    asyncio.run(scenario())


def test_slime_reads_tokens_and_log_probabilities_from_meta_info() -> None:
    async def scenario() -> None:
        async with a_server() as served:
            sampling = {"max_new_tokens": 30, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "sampling_seed": 3}
            body = {"input_ids": [1, 2], "sampling_params": sampling, "return_logprob": True}
            reply = await served.ok("/generate", body)
            pairs = reply["meta_info"]["output_token_logprobs"]
            assert [token for _, token, _ in pairs] == expected_ids(3, 0, 30) == reply["output_ids"]
            assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": 0}
            assert reply["text"] == Letters().decode(reply["output_ids"])
            long = await served.ok("/generate", body | {"sampling_params": sampling | {"ignore_eos": True}})
            assert long["meta_info"]["finish_reason"] == {"type": "length", "length": 30}
            workers = (await served.get("/workers")).json()["workers"]
            assert [worker["url"] for worker in workers] == ["http://localhost"]

    asyncio.run(scenario())


def test_a_stream_of_sglang_tells_the_version_of_the_weights_from_its_first_event() -> None:
    async def scenario() -> None:
        async with a_server() as served:
            body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 50, "ignore_eos": True}, "stream": True}
            events = events_of((await served.post("/generate", body)).text)
            assert len(events) > 1
            assert {event["meta_info"]["weight_version"] for event in events} == {"0"}

    asyncio.run(scenario())


def test_slime_pauses_and_goes_on_by_the_names_of_sglang() -> None:
    async def scenario() -> None:
        async with a_server(step_s=0.001) as served:
            body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}
            for mode, reason in (({}, "abort"), ({"mode": "in_place"}, "length"), ({"mode": "retract"}, "length")):
                running = asyncio.create_task(served.ok("/generate", body))
                await until(lambda: served.service.gate.num_in_flight == 1)
                loads = (await served.get("/v1/loads?include=core")).json()["loads"]
                assert [load["num_total_reqs"] for load in loads] == [1]
                assert (await served.ok("/pause_generation", mode))["status"] == "ok"
                assert (await served.get("/is_paused")).json() == {"is_paused": True}
                assert (await served.get("/flush_cache")).status_code == 200
                assert (await served.ok("/continue_generation", {}))["status"] == "ok"
                assert (await running)["meta_info"]["finish_reason"]["type"] == reason
            assert (await served.post("/pause_generation", {"mode": "wait"})).status_code == 400

    asyncio.run(scenario())


def test_another_engine_is_not_taken_as_a_worker() -> None:
    async def scenario() -> None:
        async with a_server() as served:
            await served.ok("/workers", {"url": "http://localhost", "worker_type": "regular"})
            for bad in ({"url": "http://localhost:1"}, {"url": "http://localhost", "worker_type": "prefill"}):
                response = await served.post("/workers", bad)
                assert response.status_code == 400
                assert "--rollout-external-engine-addrs" in response.json()["error"]["message"]
            assert (await served.get("/health_generate")).status_code == 200

    asyncio.run(scenario())


def test_what_slime_asks_for_with_top_p_is_refused_with_its_option() -> None:
    async def scenario() -> None:
        async with a_server() as served:
            sampling = {"max_new_tokens": 3, "top_p": 0.9}
            await served.ok("/generate", {"input_ids": [1], "sampling_params": sampling | {"custom_params": None}})
            bad = sampling | {"custom_params": {"return_top_p_token_ids": True}}
            response = await served.post("/generate", {"input_ids": [1], "sampling_params": bad})
            assert response.status_code == 400
            assert "--rollout-top-p" in response.json()["error"]["message"]

    asyncio.run(scenario())


def test_requests_that_ask_for_images_are_refused() -> None:
    async def scenario() -> None:
        async with a_server() as served:
            body = {"token_ids": [1], "sampling_params": {}, "features": {"mm_hashes": {}}}
            assert (await served.post("/inference/v1/generate", body)).status_code == 400
            assert (await served.post("/generate", {"input_ids": [1], "image_data": ["x"]})).status_code == 400
            assert (await served.post("/generate", {"input_ids": [1], "text": "a"})).status_code == 400

    asyncio.run(scenario())


def test_a_group_is_named_by_its_field_its_session_or_its_prompt() -> None:
    names = GroupNames(max_sessions=2)
    by_prompt = names.name([1, 2])
    assert names.name([1, 2]) == by_prompt != names.name([1, 3])
    assert names.name([1, 2], group="x") == names.name([5], group="x") != by_prompt
    # SkyRL: all repeats of one uid are siblings, whatever turn they are in.
    assert (
        names.name([1], session="uid_3_0")
        == names.name([1, 9], session="uid_3_11")
        != names.name([1], session="uid_4_0")
    )
    # prime-rl: trajectories with equal prompts are siblings, and stay so as each grows.
    first = names.name([1, 2], session="trajectory")
    assert first == by_prompt == names.name([1, 2, 3, 4], session="trajectory")
    names.forget("trajectory")
    assert names.name([1, 2, 3, 4], session="trajectory") != first
    for number in range(3):
        names.name([number], session=f"s{number}x")
    assert len(names._sessions) == 2
    assert len(names.name([1], group="x" * 10_000)) < 100


def test_siblings_of_a_session_header_share_a_group() -> None:
    async def scenario() -> None:
        async with a_server() as served:
            seen: list[str] = []
            submit = served.service.backend.session.submit

            def noting(*arguments: Any, **settings: Any) -> Any:
                seen.append(settings["group"])
                return submit(*arguments, **settings)

            served.service.backend.session.submit = noting  # type: ignore[method-assign]
            for rep, prompt in enumerate(([1, 2], [1, 2], [1, 2, 3])):
                headers = {"X-Session-ID": f"uid_{rep}"}
                body = {"token_ids": prompt, "sampling_params": {"max_tokens": 3}}
                await served.ok("/inference/v1/generate", body, headers=headers)
            assert seen == ["s:uid"] * 3

    asyncio.run(scenario())


WANTS = [
    ("/v1/completions", {"prompt": [1]}, {"logprobs": 1}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, {"logprobs": True}),
    ("/inference/v1/generate", {"token_ids": [1]}, {"sampling_params": {"logprobs": 0}}),
    ("/generate", {"input_ids": [1]}, {"return_logprob": True}),
    ("/generate/", {"prompts": [[1]], "logprobs": None}, {"logprobs": 0}),
]


@pytest.mark.parametrize(("path", "body", "wish"), WANTS, ids=[one[0] for one in WANTS])
def test_log_probabilities_are_made_only_for_requests_that_want_them(
    path: str, body: dict[str, Any], wish: dict[str, Any]
) -> None:
    async def scenario() -> None:
        async with a_server() as served:
            plain: dict[str, Any] = {"sampling_params": {}} if path == "/inference/v1/generate" else {}
            asked: list[bool] = []
            session = served.service.backend.session
            submit = session.submit

            def watched(*args: Any, **named: Any) -> Any:
                asked.append(named["sampling"].logprobs)
                return submit(*args, **named)

            session.submit = watched  # type: ignore[method-assign]
            for one in (body | plain, body | wish):
                await served.ok(path, one)
            assert asked == [False, True]

    asyncio.run(scenario())
