# SPDX-License-Identifier: Apache-2.0
"""The Python API for code without an event loop: it drives a `Rollout` in a thread of its own.

with SyncRollout("smollm2", instances=2) as rollout:
    for group in rollout.run(prompts, n=8, sampling=Sampling(max_tokens=256)):
        ...
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

from seer.api import Rollout, as_config
from seer.config import InstanceKeywords, RolloutConfig, RolloutKeywords
from seer.engine.base import Weights
from seer.errors import SeerError
from seer.hosting.fleet import HostedFleet
from seer.metrics.summary import Summary
from seer.runs.arguments import check_prompts
from seer.runs.prompts import EncodedPrompt, PromptInput
from seer.types import GroupResult, Sampling

if TYPE_CHECKING:
    from seer.verification.verify import Verification

T = TypeVar("T")


class SyncRollout:
    """`Rollout` for code without an event loop: the same arguments and methods, as a context manager."""

    def __init__(self, model: str | Path | RolloutConfig, **settings: Unpack[RolloutKeywords]) -> None:
        self._config = as_config(model, settings)
        self._loop: asyncio.AbstractEventLoop  # both are made by `__enter__`
        self._thread: threading.Thread
        self._rollout: Rollout | None = None

    def __enter__(self) -> Self:
        """Start the instances."""
        if self._rollout is not None:
            raise SeerError("the rollout has been started already", hint="enter it once")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="seer-rollout", daemon=True)
        self._thread.start()
        try:
            self._rollout = Rollout(self._config)
            self._wait(self._rollout.__aenter__())
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the instances and the thread."""
        rollout = self._started()
        try:
            self._wait(rollout.__aexit__(kind, error, trace))
        finally:
            self._stop()

    @property
    def weights_version(self) -> int:
        """Version of the weights."""
        return self._started().weights_version

    @property
    def summary(self) -> Summary | None:
        """The numbers of the newest run."""
        return self._started().summary

    @property
    def verification(self) -> Verification | None:
        """What verifying the newest run found."""
        return self._started().verification

    @property
    def fleet(self) -> HostedFleet:
        """The instances; they belong to the rollout's thread, so only look at them."""
        return self._started().fleet

    def run(self, prompts: Iterable[PromptInput | EncodedPrompt], **settings: Any) -> Iterator[GroupResult]:
        """`Rollout.run`, as a plain iterator."""
        check_prompts(prompts)
        given = list(prompts) if settings.get("enough_groups") is None else prompts
        groups = self._started().run(given, **settings)
        try:
            while True:
                try:
                    yield self._wait(groups.__anext__())  # type: ignore[arg-type]
                except StopAsyncIteration:
                    return
        finally:
            self._wait(groups.aclose())  # type: ignore[attr-defined]

    def cancel(self) -> None:
        """`Rollout.cancel`; may be called from any thread."""
        rollout = self._started()
        self._loop.call_soon_threadsafe(rollout.cancel)

    def stop_group(self, group: int) -> None:
        """`Rollout.stop_group`; may be called from any thread."""
        self._loop.call_soon_threadsafe(self._started().stop_group, group)

    def serve_metrics(self, port: int = 0) -> str:
        """`Rollout.serve_metrics`."""
        return self._wait(self._started().serve_metrics(port))

    def add_instances(self, num_instances: int, **own: Unpack[InstanceKeywords]) -> list[int]:
        """`Rollout.add_instances`; may be called from any thread."""
        return self._wait(self._started().add_instances(num_instances, **own))

    def remove_instances(self, ids: Sequence[int]) -> None:
        """`Rollout.remove_instances`; may be called from any thread."""
        self._wait(self._started().remove_instances(ids))

    def update_weights(self, weights: Weights, *, keep_context: bool = False) -> int:
        """`Rollout.update_weights`."""
        return self._wait(self._started().update_weights(weights, keep_context=keep_context))

    def _started(self) -> Rollout:
        if self._rollout is None:
            raise SeerError("the rollout has not been started", hint="with SyncRollout(...) as rollout:")
        return self._rollout

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        if self._loop.is_closed():
            work.close()
            raise SeerError("the rollout has ended", hint="with SyncRollout(...) as rollout:")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def rollout_sync(
    model: str | Path | RolloutConfig,
    prompts: Iterable[PromptInput | EncodedPrompt],
    *,
    n: int = 1,
    sampling: Sampling | None = None,
    **settings: Unpack[RolloutKeywords],
) -> list[GroupResult]:
    """Start instances, roll the prompts out, end the instances; groups come in the order of the prompts."""
    with SyncRollout(model, **settings) as rollout:
        return sorted(rollout.run(prompts, n=n, sampling=sampling), key=lambda group: group.group)
