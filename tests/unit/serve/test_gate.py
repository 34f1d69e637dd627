# SPDX-License-Identifier: Apache-2.0
"""Who gets in: keys, limits, pauses, weight updates and draining."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

from seer.errors import ConfigError
from seer.serve.keys import Keys
from seer.serve.refusals import Refusal
from seer.serve.settings import Limits, ServeSettings
from seer.serve.weight_updates import WeightUpdates
from seer.sim import virtual_time
from served import Served, a_server, until

API, ADMIN = "an-api-key-of-24-letters", "an-admin-key-of-26-letters"
LONG = {"prompt": "a", "seed": 1, "max_tokens": 400, "ignore_eos": True}


async def in_flight(served: Served, num_in_flight: int) -> None:
    await until(lambda: served.service.gate.num_in_flight == num_in_flight)


def test_keys_open_what_they_are_for() -> None:
    async def scenario() -> None:
        async with a_server(ServeSettings(host="0.0.0.0", keys=Keys(api=API, admin=ADMIN))) as served:
            user, admin = {"Authorization": f"Bearer {API}"}, {"Authorization": f"bearer {ADMIN}"}
            browser = {"Authorization": "Basic " + base64.b64encode(f"me:{API}".encode()).decode()}
            assert (await served.get("/", headers=browser)).status_code == 200
            assert (await served.get("/", headers=browser | {"Origin": "http://evil.example"})).status_code == 403
            for headers in (
                {},
                {"Authorization": "Basic %%%"},
                {"Authorization": "Bearer x"},
                {"Authorization": API},
            ):
                response = await served.get("/v1/models", headers=headers)
                assert response.status_code == 401
                assert API not in response.text
            for headers in (user, admin):  # prime-rl has one key for both
                assert (await served.get("/v1/models", headers=headers)).status_code == 200
                assert (await served.post("/v1/completions", {"prompt": "a"}, headers=headers)).status_code == 200
            assert (await served.get("/is_paused", headers=user)).status_code == 401
            assert (await served.get("/is_paused", headers=admin)).status_code == 200
            assert (await served.get("/health")).status_code == 200

    asyncio.run(scenario())


def test_without_an_api_key_the_admin_key_closes_administration_alone() -> None:
    async def scenario() -> None:
        async with a_server(ServeSettings(keys=Keys(admin=ADMIN))) as served:
            assert (await served.get("/v1/models")).status_code == 200
            assert (await served.get("/is_paused")).status_code == 401

    asyncio.run(scenario())


def test_with_an_api_key_alone_administration_is_off() -> None:
    async def scenario() -> None:
        async with a_server(ServeSettings(keys=Keys(api=API))) as served:
            response = await served.post("/pause", headers={"Authorization": f"Bearer {API}"})
            assert response.status_code == 403
            assert "--admin-key-file" in response.json()["error"]["message"]

    asyncio.run(scenario())


def test_an_open_server_answers_no_page_of_another_site() -> None:
    async def scenario() -> None:
        async with a_server() as served:
            for headers in ({"Origin": "http://evil.example"}, {"Host": "evil.example"}, {"Host": "evil.example:8000"}):
                assert (await served.post("/pause", headers=headers)).status_code == 403
            for headers in ({"Origin": "http://localhost"}, {"Host": "127.0.0.2:8000"}, {"Host": "[::1]:8000"}):
                assert (await served.get("/is_paused", headers=headers)).status_code == 200

    asyncio.run(scenario())


def test_an_address_that_others_reach_needs_a_key() -> None:
    with pytest.raises(ConfigError, match="no API key"):
        ServeSettings(host="0.0.0.0")
    ServeSettings(host="::1")
    ServeSettings(host="0.0.0.0", keys=Keys(api=API))
    with pytest.raises(ConfigError):
        Keys(api="short")
    with pytest.raises(ConfigError, match="every client could change the weights"):
        Keys(api=API, admin=API)
    assert API not in repr(ServeSettings(keys=Keys(api=API)))


def test_more_than_fits_is_answered_with_429_and_retry_after() -> None:
    async def scenario() -> None:
        async with a_server(ServeSettings(limits=Limits(max_in_flight=2)), step_s=0.001) as served:
            running = asyncio.create_task(served.post("/v1/completions", LONG | {"n": 2}))
            await in_flight(served, 2)
            response = await served.post("/v1/completions", LONG)
            assert response.status_code == 429
            assert response.headers["retry-after"] == "1"
            assert "2 responses are in flight" in response.json()["error"]["message"]
            assert "seer:requests_refused_total 1.0" in (await served.get("/metrics")).text
            assert (await running).status_code == 200
            assert (await served.post("/v1/completions", LONG)).status_code == 200

    asyncio.run(scenario())


def test_a_body_that_is_too_large_is_not_read() -> None:
    async def scenario() -> None:
        async with a_server(ServeSettings(limits=Limits(max_body_bytes=1000))) as served:
            response = await served.post("/v1/completions", {"prompt": "a" * 2000})
            assert response.status_code == 413

            async def parts() -> AsyncIterator[bytes]:
                for _ in range(100):
                    yield b"a" * 100

            response = await served.client.post("/v1/completions", content=parts())
            assert response.status_code == 413

    asyncio.run(scenario())


def test_frozen_responses_go_on_after_resume_and_new_ones_wait() -> None:
    async def scenario() -> None:
        async with a_server(step_s=0.001) as served:
            running = asyncio.create_task(served.post("/v1/completions", LONG))
            await in_flight(served, 1)
            await served.ok("/pause?mode=keep")
            late = asyncio.create_task(served.post("/v1/completions", LONG))
            await in_flight(served, 2)
            steps = [fake.view().num_steps for fake in served.fleet.fakes]
            for _ in range(100):
                await asyncio.sleep(0)
            assert [fake.view().num_steps for fake in served.fleet.fakes] == steps
            assert not running.done()
            assert not late.done()
            assert (await served.get("/is_paused")).json() == {"is_paused": True}
            await served.ok("/resume")
            assert (await running).json()["choices"] == (await late).json()["choices"]

    asyncio.run(scenario())


def test_a_pause_may_last_longer_than_any_deadline() -> None:
    async def scenario() -> None:
        async with a_server(step_s=0.001) as served:
            running = asyncio.create_task(served.post("/v1/completions", LONG))
            await in_flight(served, 1)
            await served.ok("/pause?mode=keep")
            await asyncio.sleep(24 * 3600)
            assert not running.done()
            await served.ok("/resume")
            assert (await running).json()["choices"][0]["finish_reason"] == "length"
            assert (await served.get("/health")).status_code == 200
            for fake in served.fleet.fakes:  # an instance that hangs is still found
                await fake.pause()
            assert (await served.post("/v1/completions", LONG)).status_code == 500
            assert (await served.get("/health")).status_code == 503

    virtual_time.run(scenario())


def test_a_pause_by_abort_ends_what_runs_and_one_by_wait_lets_it_end() -> None:
    async def scenario() -> None:
        async with a_server(step_s=0.001) as served:
            for mode, reason in (("abort", "abort"), ("wait", "length")):
                running = asyncio.create_task(served.post("/v1/completions", LONG))
                await in_flight(served, 1)
                await served.ok(f"/pause?mode={mode}")
                assert (await running).json()["choices"][0]["finish_reason"] == reason
                await served.ok("/resume")
            assert (await served.post("/pause?mode=maybe")).status_code == 400

    asyncio.run(scenario())


def test_weights_come_from_files_under_their_folder_only(tmp_path: Path) -> None:
    async def scenario() -> None:
        allowed = tmp_path / "weights"
        (allowed / "step-1").mkdir(parents=True)
        (tmp_path / "secret").mkdir()
        (allowed / "link").symlink_to(tmp_path / "secret")
        async with a_server(ServeSettings(weights_dir=allowed)) as served:
            for bad in ("../secret", str(tmp_path / "secret"), "link", "missing", "/etc", "step-1\0", "a" * 5000):
                response = await served.post("/update_weights", {"path": bad})
                assert response.status_code == 400, bad
                assert "under --weights-dir" in response.json()["error"]["message"]
            for body in ({"path": "step-1"}, {"weight_dir": str(allowed / "step-1")}):
                assert (await served.ok("/update_weights", body))["status"] == "ok"
            assert served.fleet.updates == [allowed / "step-1"] * 2
            assert (await served.get("/weight_info")).json() == {"weight_version": "2"}
        async with a_server() as served:
            assert (await served.post("/update_weights", {"path": "step-1"})).status_code == 403

    asyncio.run(scenario())


def test_while_weights_change_requests_get_503_and_what_runs_ends_under_the_old_ones(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with a_server(ServeSettings(weights_dir=tmp_path), step_s=0.001) as served:
            running = asyncio.create_task(
                served.ok("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 300}})
            )
            await in_flight(served, 1)
            updating = asyncio.create_task(served.ok("/update_weights", {"path": "."}))
            await until(lambda: served.service.gate.state == "updating")
            refused = await served.post("/v1/completions", LONG)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert (await running)["meta_info"]["weight_version"] == "0"
            assert (await updating)["weights_version"] == 1
            again = await served.ok("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 3}})
            assert again["meta_info"]["weight_version"] == "1"

    asyncio.run(scenario())


def test_requests_that_wait_for_resume_wait_through_an_update(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with a_server(ServeSettings(weights_dir=tmp_path), step_s=0.001) as served:
            body = {"text": "a", "sampling_params": {"max_new_tokens": 300}}
            running = asyncio.create_task(served.ok("/generate", body))
            await in_flight(served, 1)
            await served.ok("/pause?mode=keep")  # as prime-rl does before an update
            late = asyncio.create_task(served.ok("/generate", body))
            await in_flight(served, 2)
            await served.ok("/update_weights", {"path": "."})
            assert (await running)["meta_info"]["weight_version"] == "0"
            assert not late.done()
            await served.ok("/resume")
            assert (await late)["meta_info"]["weight_version"] == "1"

    asyncio.run(scenario())


def test_what_is_frozen_can_be_waited_for_and_aborted() -> None:
    async def scenario() -> None:
        async with a_server(step_s=0.001) as served:
            for mode, reason in (("abort", "abort"), ("wait", "length")):
                running = asyncio.create_task(served.post("/v1/completions", LONG))
                await in_flight(served, 1)
                await served.ok("/pause?mode=keep")
                await served.ok(f"/pause?mode={mode}")
                assert (await running).json()["choices"][0]["finish_reason"] == reason
                await served.ok("/resume")

    asyncio.run(scenario())


def test_an_update_that_was_started_and_left_behind_is_dropped() -> None:
    async def scenario() -> None:
        async with a_server(ServeSettings(limits=Limits(update_idle_s=0.01))) as served:
            await served.ok("/start_weight_update", {})
            assert (await served.post("/v1/completions", LONG)).status_code == 503
            await until(lambda: not served.service.weights.is_started)
            assert (await served.post("/v1/completions", LONG)).status_code == 200
            for path in ("/finish_weight_update", "/update_weights"):
                assert (await served.post(path, {"update_info": None})).status_code == 400

    asyncio.run(scenario())


async def broadcast(weights: WeightUpdates, tensor: str, seconds: float = 0.0) -> None:
    """A trainer broadcasts a tensor, which takes so long."""

    async def received() -> dict[str, str]:
        await asyncio.sleep(seconds)
        return {"a": tensor}

    await weights.receive(weights.announce([4]), received())


def test_an_update_whose_tensors_come_is_not_left_behind() -> None:
    async def scenario() -> None:
        async with a_server(ServeSettings(limits=Limits(update_idle_s=10.0))) as served:
            weights = served.service.weights
            weights.start()
            await asyncio.gather(*(broadcast(weights, "slow", seconds) for seconds in (30.0, 5.0)))
            assert weights.is_started
            await asyncio.sleep(11.0)
            assert not weights.is_started

    virtual_time.run(scenario())


def test_tensors_of_an_update_that_is_over_do_not_become_part_of_the_next() -> None:
    async def scenario() -> None:
        async with a_server() as served:
            weights = served.service.weights
            weights.start()
            late = asyncio.create_task(broadcast(weights, "old", 5.0))
            await asyncio.sleep(1.0)
            weights.start()
            await broadcast(weights, "new")
            with pytest.raises(Refusal, match="the weight update is over"):
                await late
            await weights.finish()
            assert served.fleet.updates == [{"a": "new"}]

    virtual_time.run(scenario())


def test_an_update_that_is_being_finished_is_not_dropped() -> None:
    async def scenario() -> None:
        async with a_server(ServeSettings(limits=Limits(update_idle_s=10.0)), step_s=1.0) as served:
            weights = served.service.weights
            running = asyncio.create_task(served.post("/v1/completions", LONG))
            await in_flight(served, 1)
            weights.start()
            await broadcast(weights, "first")
            finishing = asyncio.create_task(weights.finish())
            await asyncio.sleep(20.0)  # virtual seconds, in which it waits for what runs under the old weights
            assert not running.done()
            assert (await served.post("/v1/completions", LONG)).status_code == 503
            assert await finishing == 1
            assert (await served.post("/v1/completions", LONG)).status_code == 200

    virtual_time.run(scenario())


def test_an_update_may_be_started_while_another_one_is_being_finished() -> None:
    async def scenario() -> None:
        async with a_server(step_s=0.01) as served:
            weights = served.service.weights
            running = asyncio.create_task(served.post("/v1/completions", LONG))
            await in_flight(served, 1)
            weights.start()
            await broadcast(weights, "first")
            first = asyncio.create_task(weights.finish())
            await until(lambda: not weights.is_started)
            weights.start()
            await broadcast(weights, "second")
            assert (await first, (await running).status_code) == (1, 200)
            assert (await served.post("/v1/completions", LONG)).status_code == 503
            assert await weights.finish() == 2
            assert served.fleet.updates == [{"a": "first"}, {"a": "second"}]
            assert (await served.post("/v1/completions", LONG)).status_code == 200

    virtual_time.run(scenario())


def test_draining_refuses_what_waits_for_resume_and_leaves_nothing_counted() -> None:
    async def scenario() -> None:
        async with a_server() as served:
            await served.ok("/pause?mode=keep")
            waiting = asyncio.create_task(served.post("/v1/completions", LONG))
            await in_flight(served, 1)
            served.service.gate.drain()
            assert (await waiting).status_code == 503
            assert served.service.gate.num_in_flight == 0

    asyncio.run(scenario())


def test_a_request_of_which_a_part_cannot_be_submitted_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with a_server(step_s=0.001) as served:
            submit, calls = served.service.backend.session.submit, 0

            def fail_at_the_third(*arguments: Any, **settings: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls == 3:
                    raise ConfigError("this one does not fit")
                return submit(*arguments, **settings)

            monkeypatch.setattr(served.service.backend.session, "submit", fail_at_the_third)
            response = await served.post("/v1/completions", LONG | {"prompt": ["a", "b", "c", "d"], "n": 2})
            assert response.status_code == 400
            await in_flight(served, 0)
            assert not served.service.generations

    asyncio.run(scenario())


def test_a_draining_server_takes_nothing_and_ends_what_it_has() -> None:
    async def scenario() -> None:
        async with a_server(step_s=0.001) as served:
            running = asyncio.create_task(served.post("/v1/completions", LONG))
            await in_flight(served, 1)
            served.service.gate.drain()
            assert (await served.post("/v1/completions", LONG)).status_code == 503
            assert (await served.get("/health")).status_code == 503
            await served.service.gate.until_idle()
            assert (await running).status_code == 200

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "body", [b"", b"{", b"null", b"[]", b"\xff", b'{"prompt": NaN}', b"[" * 5000, b'{"prompt":' * 999]
)
def test_a_body_that_is_no_request_is_refused(body: bytes) -> None:
    async def scenario() -> None:
        async with a_server() as served:
            for path in ("/v1/completions", "/v1/chat/completions", "/inference/v1/generate", "/generate"):
                response = await served.client.post(path, content=body)
                assert response.status_code == 400
                assert response.json()["error"]["message"]

    asyncio.run(scenario())


def test_unknown_paths_and_methods_are_answered_as_json() -> None:
    async def scenario() -> None:
        async with a_server() as served:
            assert (await served.get("/nothing")).json()["error"]["code"] == 404
            wrong = await served.get("/v1/completions")
            assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
            assert (wrong.json()["error"]["code"], wrong.json()["error"]["type"]) == (405, "invalid_request_error")

    asyncio.run(scenario())
