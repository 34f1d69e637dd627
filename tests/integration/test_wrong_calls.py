# SPDX-License-Identifier: Apache-2.0
"""Wrong calls of the Python API: each is refused by name, at once, and the rollout can be used afterwards.

A call counts as refused in a clear way if it raises a `SeerError` with a hint where one can be given, or Python's own
TypeError about a signature (a missing or unknown keyword).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from seer import HostingConfig, Rollout, RolloutConfig, Sampling, SyncRollout
from seer.errors import SeerError
from seer.runs.prompts import EncodedPrompt, Prompt

FAKE: dict[str, Any] = {"engine": "fake", "hosting": HostingConfig(pin_cores=False)}
S = Sampling(max_tokens=8)
GIVEN = Prompt(token_ids=(1, 2), id="mine")
SIGNATURE = TypeError


def rollout(**settings: Any) -> Rollout:
    return Rollout("none", **FAKE | settings)


MAKING: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "a model that is None": (lambda: Rollout(None, engine="fake"), SeerError, "model is a NoneType"),  # type: ignore[arg-type]
    "a model that is a number": (lambda: Rollout(3, engine="fake"), SeerError, "model is a int"),  # type: ignore[arg-type]
    "a model without a name": (lambda: Rollout(""), SeerError, "no name"),
    "a model that is not there": (lambda: Rollout("/nowhere"), SeerError, "/nowhere"),
    "two models": (lambda: Rollout("a", "b"), SIGNATURE, "positional"),  # type: ignore[call-arg, arg-type]
    "a misspelt setting": (lambda: rollout(instnces=2), SeerError, "instnces"),
    "a configuration and settings": (
        lambda: Rollout(RolloutConfig(model="m", engine="fake"), instances=2),
        SeerError,
        "no further settings",
    ),
    "instances as text": (lambda: rollout(instances="2"), SeerError, "instances='2'"),
    "no instances": (lambda: rollout(instances=0), SeerError, "instances=0"),
    "one and a half instances": (lambda: rollout(instances=1.5), SeerError, "instances=1.5"),
    "instances that are True": (lambda: rollout(instances=True), SeerError, "instances=True"),
    "instances that are None": (lambda: rollout(instances=None), SeerError, "instances=None"),
    "an engine that is None": (lambda: Rollout("m", engine=None), SeerError, "engine"),  # type: ignore[arg-type]
    "an engine that is a number": (lambda: Rollout("m", engine=3), SeerError, "engine"),  # type: ignore[arg-type]
    "a scheduler that is a number": (lambda: rollout(scheduler=3), SeerError, "scheduler=3"),
    "an unknown scheduler": (lambda: rollout(scheduler="sear"), SeerError, "sear"),
    "negative memory": (lambda: rollout(kv_blocks=-1), SeerError, "blocks=-1"),
    "a length as text": (lambda: rollout(max_model_len="9"), SeerError, "max_model_len='9'"),
    "a chunk of NaN tokens": (lambda: rollout(chunk_tokens=math.nan), SeerError, "chunk_tokens=nan"),
    "a pool that is a number": (lambda: rollout(pool=3), SeerError, "pool=3"),
    "an unknown setting of a section": (lambda: rollout(hosting={"nope": 1}), SeerError, "hosting.nope"),
    "a section that is text": (lambda: rollout(hosting="x"), SeerError, "hosting='x'"),
    "engine settings of another kind": (lambda: rollout(engine_settings=3), SeerError, "engine_settings"),
    "an unknown device": (lambda: rollout(device="tpu"), SeerError, "device='tpu'"),
    "an unknown type": (lambda: rollout(dtype="int4"), SeerError, "dtype='int4'"),
    "no max_tokens": (partial(Sampling), SIGNATURE, "max_tokens"),
    "no tokens": (lambda: Sampling(max_tokens=0), SeerError, "max_tokens=0"),
    "tokens as text": (lambda: Sampling(max_tokens="5"), SeerError, "max_tokens='5'"),  # type: ignore[arg-type]
    "half a token": (lambda: Sampling(max_tokens=1.5), SeerError, "max_tokens=1.5"),  # type: ignore[arg-type]
    "a temperature of NaN": (lambda: Sampling(max_tokens=5, temperature=math.nan), SeerError, "temperature=nan"),
    "a temperature that makes logits infinite": (
        lambda: Sampling(max_tokens=5, temperature=1e-40),
        SeerError,
        "temperature=1e-40",
    ),
    "a temperature in words": (lambda: Sampling(max_tokens=5, temperature="hot"), SeerError, "temperature"),  # type: ignore[arg-type]
    "a top_p of 0": (lambda: Sampling(max_tokens=5, top_p=0), SeerError, "top_p=0"),
    "a top_k of -1": (lambda: Sampling(max_tokens=5, top_k=-1), SeerError, "top_k=-1"),
    "a stop token that is no tuple": (lambda: Sampling(max_tokens=5, stop_token_ids=7), SeerError, "stop_token_ids=7"),  # type: ignore[arg-type]
    "a stop token in words": (lambda: Sampling(max_tokens=5, stop_token_ids=("a",)), SeerError, "stop_token_ids"),  # type: ignore[arg-type]
    "ignore_eos in words": (lambda: Sampling(max_tokens=5, ignore_eos="yes"), SeerError, "ignore_eos='yes'"),  # type: ignore[arg-type]
    "a misspelt sampling setting": (lambda: Sampling(max_tokens=5, temprature=1), SIGNATURE, "temprature"),  # type: ignore[call-arg]
    "more min_tokens than max_tokens": (lambda: Sampling(max_tokens=5, min_tokens=6), SeerError, "min_tokens=6"),
    "a prompt without content": (lambda: Prompt(id="x"), SeerError, "exactly one of text"),
    "a prompt with two contents": (lambda: Prompt(id="x", text="a", token_ids=(1,)), SeerError, "exactly one of text"),
    "a prompt whose id is a number": (lambda: Prompt(id=3, text="a"), SeerError, "id is a int"),  # type: ignore[arg-type]
    "a prompt with no responses": (lambda: Prompt(id="a", text="a", n=0), SeerError, "n=0"),
    "a prompt with a misspelt setting": (
        lambda: Prompt(id="a", text="a", sampling={"temprature": 1}),
        SeerError,
        "temprature",
    ),
    "a prompt with an impossible setting": (
        lambda: Prompt(id="a", text="a", sampling={"temperature": -1}),
        SeerError,
        "temperature=-1",
    ),
}

RUNNING: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "prompts that are None": ({"prompts": None}, SeerError, "prompts is a NoneType"),
    "prompts that are a number": ({"prompts": 3}, SeerError, "prompts is a int"),
    "one text": ({"prompts": "hello"}, SeerError, "prompts is a str"),
    "one mapping": ({"prompts": {"prompt": "hello"}}, SeerError, "prompts is a dict"),
    "no prompts": ({"prompts": []}, SeerError, "no prompts"),
    "bytes": ({"prompts": [b"x"]}, SeerError, "prompt 0"),
    "a line of a file": ({"prompts": [{"prompt": "x"}]}, SeerError, "prompt 0"),
    "a prompt that is None": ({"prompts": [None]}, SeerError, "prompt 0"),
    "tokens that are fractions": ({"prompts": [[1.5]]}, SeerError, "prompt 0"),
    "negative tokens": ({"prompts": [[-1]]}, SeerError, "prompt 0"),
    "nested tokens": ({"prompts": [[[1, 2]]]}, SeerError, "prompt 0"),
    "tokens beyond 32 bits": ({"prompts": [[1 << 40]]}, SeerError, "prompt 0"),
    "text without a tokenizer": ({"prompts": ["x"]}, SeerError, "no tokenizer"),
    "a prompt that is too long": ({"prompts": [[1] * 9000]}, SeerError, "tokens that fit"),
    "an encoded prompt without tokens": ({"prompts": [EncodedPrompt(GIVEN, (), S, 1)]}, SeerError, "no token"),
    "an encoded prompt without responses": ({"prompts": [EncodedPrompt(GIVEN, (1,), S, 0)]}, SeerError, "n=0"),
    "no responses": ({"n": 0}, SeerError, "n=0"),
    "responses as text": ({"n": "3"}, SeerError, "n='3'"),
    "two and a half responses": ({"n": 2.5}, SeerError, "n=2.5"),
    "a billion responses": ({"n": 10**9}, SeerError, "n=1000000000"),
    "responses that are None": ({"n": None}, SeerError, "n=None"),
    "sampling as a mapping": ({"sampling": {"max_tokens": 5}}, SeerError, "sampling is a dict"),
    "sampling as a number": ({"sampling": 5}, SeerError, "sampling is a int"),
    "a seed as text": ({"seed": "1"}, SeerError, "seed='1'"),
    "a negative seed": ({"seed": -1}, SeerError, "seed=-1"),
    "a seed that is a fraction": ({"seed": 1.5}, SeerError, "seed=1.5"),
    "a seed beyond 64 bits": ({"seed": 1 << 70}, SeerError, "seed="),
    "a seed that is None": ({"seed": None}, SeerError, "seed=None"),
    "a reward that is a number": ({"reward": 3}, SeerError, "reward is a int"),
    "a reward without arguments": ({"reward": lambda: 1.0}, SeerError, "reward cannot be called"),
    "a reward with no time": ({"reward_deadline_s": 0}, SeerError, "reward_deadline_s=0"),
    "a deadline as text": ({"reward_deadline_s": "1"}, SeerError, "reward_deadline_s='1'"),
    "a deadline of NaN": ({"reward_deadline_s": math.nan}, SeerError, "reward_deadline_s=nan"),
    "an unknown scheduler": ({"scheduler": "x"}, SeerError, "'x'"),
    "a scheduler that is a number": ({"scheduler": 3}, SeerError, "scheduler=3"),
    "a scheduler that discards": ({"scheduler": "partial"}, SeerError, "discards"),
    "a scheduler that knows lengths": ({"scheduler": "oracle"}, SeerError, "every length"),
    "speculation in other words": ({"speculation": "on"}, SeerError, "speculation='on'"),
    "speculation that is True": ({"speculation": True}, SeerError, "speculation=True"),
    "lengths that are a number": ({"lengths": 5}, SeerError, "lengths is not a list"),
    "too few lengths": ({"lengths": []}, SeerError, "lengths for 0 groups"),
    "a length of 0": ({"lengths": [[0]]}, SeerError, r"lengths\[0\]"),
    "a length in words": ({"lengths": [["a"]]}, SeerError, r"lengths\[0\]"),
    "a length that is a fraction": ({"lengths": [[1.5]]}, SeerError, r"lengths\[0\]"),
    "lengths of nothing": ({"lengths": [None]}, SeerError, "lengths is not a list"),
    "hints in a list": ({"length_hints": [1]}, SeerError, "length_hints is a list"),
    "a negative hint": ({"length_hints": {"0": -5}}, SeerError, r"length_hints\['0'\]=-5"),
    "a hint in words": ({"length_hints": {"0": "long"}}, SeerError, r"length_hints\['0'\]"),
    "past responses in a list": ({"past_responses": [[1]]}, SeerError, "past_responses is a list"),
    "past responses as text": ({"past_responses": {"0": ["ab"]}}, SeerError, "past_responses"),
    "a past response that is a number": ({"past_responses": {"0": 5}}, SeerError, "past_responses"),
    "events that are a number": ({"events": 3}, SeerError, "events is a int"),
    "events that are None": ({"events": None}, SeerError, "events is a NoneType"),
    "a journal that is a number": ({"journal": 3}, SeerError, "journal is a int"),
    "a journal that is a folder": ({"journal": Path("/tmp")}, SeerError, "is a folder"),
    "a resume without a journal": ({"resume": True}, SeerError, "without a journal"),
    "a resume in words": ({"journal": Path("/tmp/absent/j"), "resume": "yes"}, SeerError, "resume='yes'"),
    "a journal that is not there": ({"journal": Path("/tmp/absent/j"), "resume": True}, SeerError, "not a folder"),
    "twice the responses to verify": ({"verify": 2.0}, SeerError, "verify=2.0"),
    "a negative share": ({"verify": -1}, SeerError, "verify=-1"),
    "a share in words": ({"verify": "all"}, SeerError, "verify='all'"),
    "a share of NaN": ({"verify": math.nan}, SeerError, "verify=nan"),
    "what no seed decides": ({"verify": 0.5}, SeerError, "cannot be verified"),
    "a setting of the sampling": ({"temperature": 1}, SIGNATURE, "temperature"),
}

WEIGHTS: dict[str, tuple[dict[str, Any], str]] = {
    "None": ({"weights": None}, "weights is a NoneType"),
    "a number": ({"weights": 3}, "weights is a int"),
    "a list": ({"weights": [1]}, "weights is a list"),
    "text as a tensor": ({"weights": {"a": "b"}}, "holds a str as 'a'"),
    "no tensor": ({"weights": {}}, "is empty"),
    "keep_context in words": ({"weights": "/tmp", "keep_context": "x"}, "keep_context='x'"),
}


async def never() -> None:
    """No environment: it takes no conversation."""


SESSIONS: dict[str, tuple[dict[str, Any], str]] = {
    "a seed as text": ({"seed": "1"}, "seed='1'"),
    "a scheduler for whole batches": ({"scheduler": "group"}, "needs all prompts at once"),
    "a scheduler that is a number": ({"scheduler": 3}, "scheduler=3"),
    "an unknown scheduler": ({"scheduler": "sear"}, "sear"),
    "speculation in other words": ({"speculation": "on"}, "speculation='on'"),
    "speculation that is True": ({"speculation": True}, "speculation=True"),
    "hints in a list": ({"length_hints": [1]}, "length_hints is a list"),
    "a negative hint": ({"length_hints": {"a": -1}}, r"length_hints\['a'\]=-1"),
    "events that are a number": ({"events": 3}, "events is a int"),
}

SUBMITTING: dict[str, tuple[dict[str, Any], str]] = {
    "a home that there is not": ({"home": 77}, "home=77: there are instances 0 to 0"),
    "a home below 0": ({"home": -1}, "home=-1"),
    "a home as text": ({"home": "0"}, "home='0'"),
    "a prompt that is None": ({"prompt": None}, "prompt 0"),
    "negative tokens": ({"prompt": [-1]}, "prompt 0"),
    "no responses": ({"n": 0}, "n=0"),
    "responses as text": ({"n": "3"}, "n='3'"),
    "sampling as a mapping": ({"sampling": {"max_tokens": 5}}, "sampling is a dict"),
    "a seed as text": ({"seed": "1"}, "seed='1'"),
    "a negative seed": ({"seed": -1}, "seed=-1"),
    "a seed of NaN": ({"seed": math.nan}, "seed=nan"),
    "a group that is a number": ({"group": 5}, "group is a int"),
    "a group without a name": ({"group": ""}, "group has no name"),
    "on_tokens that is a number": ({"on_tokens": 5}, "on_tokens is a int"),
    "on_tokens of one argument": ({"on_tokens": lambda handle: None}, "on_tokens cannot be called"),
    "an environment that is a number": ({"environment": 5}, "environment is a int"),
    "an environment that is not async": ({"environment": lambda conversation: None}, "not an async function"),
    "an environment without a conversation": ({"environment": never}, "environment never cannot be called"),
    "an environment with no time": ({"environment_deadline_s": 0}, "environment_deadline_s=0"),
    "a deadline of NaN": ({"environment_deadline_s": math.nan}, "environment_deadline_s=nan"),
    "tools that are text": ({"tools": "python"}, "tools is no list"),
    "no context": ({"max_context_tokens": 0}, "max_context_tokens=0"),
    "a context without an environment": ({"max_context_tokens": 80}, "is for an environment"),
}

RESIZING: dict[str, tuple[str, Any, str]] = {
    "no instances more": ("add_instances", 0, "num_instances=0"),
    "instances as text": ("add_instances", "2", "num_instances='2'"),
    "instances that are None": ("add_instances", None, "num_instances=None"),
    "a port beyond all": ("serve_metrics", 70_000, "port=70000"),
    "a port below all": ("serve_metrics", -1, "port=-1"),
    "a port as text": ("serve_metrics", "9100", "port='9100'"),
    "a port of NaN": ("serve_metrics", math.nan, "port=nan"),
    "an unknown instance": ("remove_instances", [9], "cannot be removed"),
    "all instances": ("remove_instances", [0], "would be removed"),
    "one twice": ("remove_instances", [0, 0], "cannot be removed"),
    "one that is no list": ("remove_instances", 0, "ids is a int"),
    "one as text": ("remove_instances", ["0"], "cannot be removed"),
}

OWN_SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "another type": ({"dtype": "bfloat16"}, "'dtype' is no setting of single instances"),
    "other blocks": ({"block_size": 32}, "'block_size' is no setting of single instances"),
    "ranks where there is one device": ({"tensor_parallel": 2}, "engine 'fake' runs on one device"),
    "no KV": ({"kv_blocks": 0}, "blocks=0"),
    "requests as text": ({"max_num_seqs": "4"}, "max_num_seqs='4'"),
    "GPUs on a CPU": ({"gpus": "0"}, "device='cpu'"),
}


def test_what_a_session_cannot_take_is_refused_by_name_and_changes_nothing() -> None:
    async def scenario() -> list[int]:
        async with Rollout("none", **FAKE) as rollout:
            for settings, why in SESSIONS.values():
                with pytest.raises(SeerError, match=why):
                    rollout.session(**settings)
            async with rollout.session(seed=3) as session:
                [first] = session.submit([1, 2], sampling=S)
                for settings, why in SUBMITTING.values():
                    asked: dict[str, Any] = {"prompt": [1, 2], "sampling": S} | settings
                    with pytest.raises(SeerError, match=why):
                        session.submit(**asked)
                for own, why in OWN_SETTINGS.values():
                    with pytest.raises(SeerError, match=why):
                        await rollout.add_instances(1, **own)
                for call, argument, why in RESIZING.values():
                    with pytest.raises(SeerError, match=why):
                        await getattr(rollout, call)(argument)
                [second] = session.submit([1, 2], sampling=S)  # seeds are drawn as if nothing was asked between
                return [(await handle).seed for handle in (first, second)]

    async def undisturbed() -> list[int]:
        async with Rollout("none", **FAKE) as rollout, rollout.session(seed=3) as session:
            handles = [session.submit([1, 2], sampling=S)[0] for _ in range(2)]
            return [(await handle).seed for handle in handles]

    assert asyncio.run(scenario()) == asyncio.run(undisturbed())


def test_there_are_more_wrong_calls_than_were_ever_counted() -> None:
    assert len(MAKING) + len(RUNNING) + len(WEIGHTS) >= 100


@pytest.mark.parametrize("name", MAKING)
def test_what_cannot_be_made_is_refused_by_name(name: str) -> None:
    make, kind, why = MAKING[name]
    with pytest.raises(kind, match=why):
        make()


@pytest.fixture(scope="module")
def started() -> Iterator[SyncRollout]:
    with SyncRollout("none", **FAKE) as rollout:
        yield rollout


@pytest.mark.parametrize("name", RUNNING)
def test_a_run_that_cannot_work_is_refused_by_name_and_the_next_one_works(started: SyncRollout, name: str) -> None:
    settings, kind, why = RUNNING[name]
    asked: dict[str, Any] = {"prompts": [[1, 2]], "sampling": S} | settings
    with pytest.raises(kind, match=why):
        list(started.run(**asked))
    assert len(list(started.run([[1, 2]], sampling=S))) == 1


@pytest.mark.parametrize("name", WEIGHTS)
def test_what_are_no_weights_is_refused_by_name_and_the_next_run_works(started: SyncRollout, name: str) -> None:
    settings, why = WEIGHTS[name]
    version = started.weights_version
    with pytest.raises(SeerError, match=why):
        started.update_weights(**settings)
    assert started.weights_version == version
    assert len(list(started.run([[1, 2]], sampling=S))) == 1


def test_a_journal_may_be_named_by_text(started: SyncRollout, tmp_path: Path) -> None:
    assert len(list(started.run([[1, 2]], sampling=S, journal=str(tmp_path / "j")))) == 1
    assert len(list(started.run([[1, 2]], sampling=S, journal=str(tmp_path / "j"), resume=True))) == 1


def test_what_comes_at_the_wrong_time_is_refused() -> None:
    async def scenario() -> None:
        rollout = Rollout("none", **FAKE | {"engine_settings": {"step_s": 0.01}})
        with pytest.raises(SeerError, match="not started"):
            await anext(rollout.run([[1]], sampling=S))
        with pytest.raises(SeerError, match="not started"):
            await rollout.update_weights(Path("/tmp"))
        async with rollout:
            with pytest.raises(SeerError, match="started already"):
                await rollout.__aenter__()
            first = rollout.run([[1]] * 4, n=2, sampling=Sampling(max_tokens=60))
            await anext(first)
            with pytest.raises(SeerError, match="another run"):
                await anext(rollout.run([[1]], sampling=S))
            assert len([group async for group in first]) == 3
        with pytest.raises(SeerError, match="has ended"):
            await anext(rollout.run([[1]], sampling=S))
        with pytest.raises(SeerError, match="has ended"):
            await rollout.update_weights(Path("/tmp"))

    asyncio.run(scenario())


def test_a_synchronous_rollout_that_has_ended_says_so() -> None:
    with SyncRollout("none", **FAKE) as rollout:
        assert len(list(rollout.run([[1]], sampling=S))) == 1
        with pytest.raises(SeerError, match="started already"):
            rollout.__enter__()
    with pytest.raises(SeerError, match="has ended"):
        rollout.update_weights(Path("/tmp"))


@pytest.mark.parametrize(
    "call",
    [
        lambda rollout: list(rollout.run([[1]])),
        lambda rollout: rollout.summary,
        lambda rollout: rollout.cancel(),
        lambda rollout: rollout.update_weights("x"),
        lambda rollout: rollout.__exit__(None, None, None),
    ],
    ids=["run", "summary", "cancel", "update_weights", "exit"],
)
def test_a_synchronous_rollout_that_was_not_entered_says_so(call: Callable[[SyncRollout], object]) -> None:
    with pytest.raises(SeerError, match="has not been started"):
        call(SyncRollout("none", **FAKE))
