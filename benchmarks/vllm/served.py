# SPDX-License-Identifier: Apache-2.0
"""One vLLM engine in its own process. gpu.py starts it and sends it commands as lines of JSON.

Two kinds: `plain` is `AsyncLLM` with nothing of ours but a stat logger that counts drafts; `seer` is `VllmInstance`.
Both generate the same requests, at most `at_once` of them in flight, with the garbage collector set as in a server.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
import uuid
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "src"))


class Served:
    """The commands of both kinds."""

    async def start(self) -> None:
        raise NotImplementedError

    async def one(self, request: dict[str, Any]) -> tuple[list[int], list[float]]:
        """Generate one request; its tokens and their log-probabilities."""
        raise NotImplementedError

    def counts(self) -> dict[str, float]:
        raise NotImplementedError

    async def begin(self, drafts: str) -> None:
        """Start a new run."""

    async def generate(self, job: dict[str, Any]) -> dict[str, Any]:
        """Generate requests. Returns time and counts, and the tokens if the job asks for them."""
        await self.begin(job.get("drafts", "none"))
        before, permits = self.counts(), asyncio.Semaphore(job["at_once"])

        async def limited(request: dict[str, Any]) -> tuple[list[int], list[float]]:
            async with permits:
                return await self.one(request)

        began_s = time.perf_counter()
        generated = await asyncio.gather(*(limited(request) for request in job["requests"]))
        wall_s = time.perf_counter() - began_s
        after = self.counts()
        tokens = sum(len(ids) for ids, _ in generated)
        answer: dict[str, Any] = {"wall_s": wall_s, "tokens": tokens, "tokens_per_s": tokens / wall_s}
        answer |= {name: after[name] - before.get(name, 0) for name in after}
        if job.get("return_tokens"):
            answer["generated"] = [[ids, logprobs] for ids, logprobs in generated]
        return answer


class Plain(Served):
    """vLLM as it is."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from seer.engine.vllm.telemetry import StepCounts

        self._arguments = arguments
        self._counts = StepCounts()
        self._llm: Any = None

    async def start(self) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        from seer.engine.vllm.engine_start import settle_process
        from seer.engine.vllm.telemetry import stat_logger

        args = AsyncEngineArgs(**self._arguments)
        loggers: Any = [stat_logger(self._counts)]
        self._llm = await asyncio.to_thread(AsyncLLM.from_engine_args, args, stat_loggers=loggers)
        settle_process()

    async def one(self, request: dict[str, Any]) -> tuple[list[int], list[float]]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            max_tokens=request["max_tokens"], temperature=request["temperature"],
            ignore_eos=True, stop_token_ids=request["stop"], logprobs=0, detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )  # fmt: skip
        ids: list[int] = []
        logprobs: list[float] = []
        prompt: Any = {"prompt_token_ids": request["prompt"]}
        async for output in self._llm.generate(prompt, params, uuid.uuid4().hex):
            for token, entry in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True):
                ids.append(token)
                logprobs.append(entry[token].logprob)
        return ids, logprobs

    def counts(self) -> dict[str, float]:
        return _step_counts(self._counts)


class Seer(Served):
    """vLLM as our instance."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from seer.config import TransferOptions, VllmSpeculation
        from seer.engine.vllm.instance import VllmInstance
        from seer.engine.vllm.settings import VllmSettings

        own = dict(settings)
        speculation = own.pop("speculation", None)
        chosen = VllmSpeculation(**speculation) if speculation is not None else None
        options = TransferOptions(**own.pop("pool_options", {}))
        self.instance = VllmInstance(0, VllmSettings(speculation=chosen, pool_options=options, **own))
        self._waiting: dict[tuple[int, int], tuple[list[Any], asyncio.Future[None]]] = {}
        self._attempts = 0

    async def start(self) -> None:
        from seer.engine.vllm.engine_start import settle_process

        await self.instance.start(self._take)
        settle_process()

    async def begin(self, drafts: str) -> None:
        await self.instance.begin_run(uuid.uuid4().hex, drafts, 0)

    async def one(self, request: dict[str, Any]) -> tuple[list[int], list[float]]:
        from seer.types import Chunk, Sampling, TokenSpan

        generated = request.get("generated", [])
        spans = (TokenSpan(generated, [0.0] * len(generated), 0),) if generated else ()
        self._attempts += 1
        key = (request["request"], self._attempts)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[key] = outputs, _ = [], done
        self.instance.submit(
            Chunk(
                request=request["request"], group=request["group"], attempt=self._attempts,
                num_prompt_tokens=len(request["prompt"]), num_generated_tokens=len(generated),
                max_tokens=request["max_tokens"], seed=request["seed"], weights_version=0,
                prompt=request["prompt"], spans=spans,
                load_kv=request.get("load_kv", True),
                sampling=Sampling(
                    max_tokens=request.get("max_response", len(generated) + request["max_tokens"]),
                    temperature=request["temperature"], ignore_eos=True, stop_token_ids=tuple(request["stop"]),
                ),
            )
        )  # fmt: skip
        await done
        del self._waiting[key]
        ids = [token for output in outputs if output.span for token in output.span.ids]
        # A greedy token has probability 1 after sampling parameters; the raw values are the model's.
        logprobs = [
            value for output in outputs if output.span for value in output.span.raw_logprobs or output.span.logprobs
        ]
        return ids, logprobs

    def _take(self, output: Any) -> None:
        outputs, done = self._waiting[output.request, output.attempt]
        outputs.append(output)
        if output.end is not None:
            if output.error:
                done.set_exception(RuntimeError(output.error))
            else:
                done.set_result(None)

    def counts(self) -> dict[str, float]:
        return _step_counts(self.instance.counts) | {"recomputed": self.instance.num_recomputed_tokens}

    async def pool(self, job: dict[str, Any]) -> dict[str, Any]:
        """Wait for pending saves. Returns the blocks moved so far."""
        await self.instance.settle_saves()
        return dict(await self.instance.pool_counts())

    async def forget(self, job: dict[str, Any]) -> dict[str, Any]:
        """Empty vLLM's own prefix cache."""
        return {"forgotten": await self.instance._started().reset_prefix_cache()}


def _step_counts(counts: Any) -> dict[str, float]:
    return {
        "steps": counts.num_steps,
        "drafted": counts.num_drafted,
        "accepted": counts.num_accepted,
        "preemptions": counts.num_preemptions,
        "draft_host_s": counts.draft_host_s,
    }


async def serve(answers: Any) -> None:
    """Start the engine, then answer commands one by one."""
    loop = asyncio.get_running_loop()

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    order = json.loads(sys.stdin.readline())
    began_s = time.perf_counter()
    served: Served = Plain(order["arguments"]) if order["kind"] == "plain" else Seer(order["settings"])
    await served.start()
    say({"ready_s": time.perf_counter() - began_s})
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        job = json.loads(line)
        try:
            say(await getattr(served, job["do"])(job))
        except Exception as error:  # gpu.py decides what a failure means
            say({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    from seer.engine.vllm.settings import ENVIRONMENT

    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # vLLM and its children write to standard output. Answers go to the original one, which they cannot reach.
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    asyncio.run(serve(channel))
    os._exit(0)
