# SPDX-License-Identifier: Apache-2.0
"""Instances with known faults, made inside a child process by `InstanceSpec.factory`."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from seer.engine.base import InstanceView, Weights
from seer.engine.fake import FakeInstance
from seer.engine.fake import make_fake as make_configured_fake
from seer.engine.instance_settings import read_settings
from seer.errors import ConfigError
from seer.metrics.events import EventSink
from seer.types import Chunk, ChunkOutput, DraftMode, TokenSpan


class Hanging(FakeInstance):
    """Its event loop stops at the first chunk: the process lives and sends nothing."""

    def submit(self, chunk: Chunk) -> None:
        time.sleep(3600)


class Stuck(FakeInstance):
    """Sends heartbeats, accepts chunks and never steps."""

    def _step_soon(self) -> None:
        """Never."""


class Crashing(FakeInstance):
    """Dies at the first chunk."""

    def submit(self, chunk: Chunk) -> None:
        print(f"instance {self.id} is about to exit", flush=True)
        os._exit(3)


class Noting(FakeInstance):
    """Writes a line for each command into a file."""

    def __init__(self, id: int, notes: str) -> None:
        super().__init__(id)
        self._notes = notes

    async def update_weights(self, weights: Weights, weights_version: int) -> None:
        self._note(f"update_weights {weights} {weights_version}")

    async def begin_run(
        self, run: str, drafts: DraftMode, weights_version: int, past: Mapping[int, Sequence[Sequence[int]]]
    ) -> None:
        self._note(f"begin_run {run} {past}")

    def end_group(self, group: int) -> None:
        self._note(f"end_group {group}")

    def _note(self, line: str) -> None:
        with open(self._notes, "a") as notes:
            notes.write(f"{line}\n")


def make_noting(id: int, settings: dict[str, Any], events: EventSink) -> FakeInstance:
    return Noting(id, **settings)


def make_hanging(id: int, settings: dict[str, Any], events: EventSink) -> FakeInstance:
    return Hanging(id)


def make_stuck(id: int, settings: dict[str, Any], events: EventSink) -> FakeInstance:
    return Stuck(id)


def make_crashing(id: int, settings: dict[str, Any], events: EventSink) -> FakeInstance:
    return Crashing(id)


def make_refusing(id: int, settings: dict[str, Any], events: EventSink) -> FakeInstance:
    raise ConfigError("no such model", hint="name another")


def make_failing(id: int, settings: dict[str, Any], events: EventSink) -> FakeInstance:
    """As vLLM: the cause is in the log, and the error only says so."""
    print("the device is full", flush=True)
    raise RuntimeError("see above")


def make_slow_to_start(id: int, settings: dict[str, Any], events: EventSink) -> FakeInstance:
    """Says what it does, and is at it for longer than anybody waits."""
    print("compiling kernels", flush=True)
    threading.Event().wait()
    return FakeInstance(id)


def make_crashing_once(id: int, settings: dict[str, Any], events: EventSink) -> FakeInstance:
    """Instance 0 dies at its first chunk, once: a file beside the logs remembers that it did."""
    log_dir = read_settings(settings).config.hosting.log_dir
    assert log_dir is not None, "the file needs a folder"
    mark = log_dir / "has-crashed"
    if id == 0 and not mark.exists():
        mark.touch()
        return Crashing(id)
    return make_configured_fake(id, settings, events)


def make_full(id: int, settings: dict[str, Any], events: EventSink) -> FakeInstance:
    """The instances that a file beside the logs names have no memory for new weights, until they are started again."""
    log_dir = read_settings(settings).config.hosting.log_dir
    assert log_dir is not None, "the file needs a folder"
    made, mark = make_configured_fake(id, settings, events), log_dir / f"full-{id}"
    if mark.exists():
        mark.unlink()

        async def refuse(weights: Weights, weights_version: int) -> None:
            raise MemoryError("no memory for new weights")

        made.update_weights = refuse  # type: ignore[method-assign]
    return made


def make_never_updating(id: int, settings: dict[str, Any], events: EventSink) -> FakeInstance:
    """New weights take it for ever."""

    async def wait(weights: Weights, weights_version: int) -> None:
        await asyncio.Event().wait()

    made = FakeInstance(id) if not settings else make_configured_fake(id, settings, events)
    made.update_weights = wait  # type: ignore[method-assign]
    return made


def make_choosy(id: int, settings: dict[str, Any], events: EventSink) -> FakeInstance:
    """Instance 1 does not see weights whose folder has no file for it, as a node without that storage."""
    made = make_configured_fake(id, settings, events)
    update = made.update_weights

    async def look_first(weights: Weights, weights_version: int) -> None:
        if id == 1 and not (Path(str(weights)) / "seen-by-1").exists():
            raise ConfigError(f"there are no weights at {weights}")
        await update(weights, weights_version)

    made.update_weights = look_first  # type: ignore[method-assign]
    return made


def make_telling(id: int, settings: dict[str, Any], events: EventSink) -> FakeInstance:
    """Writes into its log what its process was given to run on."""
    config, cores = read_settings(settings).config, sorted(os.sched_getaffinity(0))
    print(f"device {config.device}, GPUs {os.environ.get('CUDA_VISIBLE_DEVICES')}, cores {cores}", flush=True)
    return make_configured_fake(id, settings, events)


def make_rank(id: int, settings: dict[str, Any], events: EventSink) -> FakeInstance:
    """Writes into its log where it meets the others. Those that a file beside the logs names do not start, once, and
    say so long before the others are ready.
    """
    given = read_settings(settings)
    own, log_dir = given.data_parallel, given.config.hosting.log_dir
    assert own is not None, "it is one of several ranks"
    assert log_dir is not None, "the file needs a folder"
    print(f"rank {own.rank} of {own.size} at {own.address}:{own.port}", flush=True)
    if (mark := log_dir / f"broken-{id}").exists():
        mark.unlink()
        raise ConfigError("this GPU is broken", hint="use another")
    if any(log_dir.glob("broken-*")):
        threading.Event().wait()
    return make_configured_fake(id, settings, events)


def make_fake(id: int, settings: dict[str, Any], events: EventSink) -> FakeInstance:
    """One without faults; the settings are its own arguments."""
    return FakeInstance(id, events=events, **settings)


class BadTokens(FakeInstance):
    """Reports tokens that its model cannot have sampled."""

    vocab_size = 50
    failure = None

    def __init__(self, id: int, token: int, logprob: float) -> None:
        super().__init__(id)
        self._bad = token, logprob

    def submit(self, chunk: Chunk) -> None:
        assert self._sink is not None
        ids, logprobs = [7, self._bad[0]], [-1.0, self._bad[1]]
        span = TokenSpan(ids, logprobs, chunk.weights_version, logprobs)
        self._sink(ChunkOutput(chunk.request, chunk.attempt, self.id, 2, span))


class NoView(FakeInstance):
    """After its first chunk, its state can be read a few times more and then never again."""

    def __init__(self, id: int, num_views: int) -> None:
        super().__init__(id)
        self._num_views = num_views
        self._has_chunk = False

    def submit(self, chunk: Chunk) -> None:
        self._has_chunk = True

    def view(self) -> InstanceView:
        if self._has_chunk:
            self._num_views -= 1
            if self._num_views < 0:
                raise ZeroDivisionError("on purpose")
        return super().view()


def make_bad_tokens(id: int, settings: dict[str, Any], events: EventSink) -> FakeInstance:
    return BadTokens(id, **settings)


def make_no_view(id: int, settings: dict[str, Any], events: EventSink) -> FakeInstance:
    return NoView(id, **settings)


def make_dying_worker(id: int, settings: dict[str, Any], events: EventSink) -> Any:
    """The embedded engine, whose steps fail; with `reports=False` the report of that fails too."""
    from seer.engine.local.hosted import HostedLocal

    reports = settings.pop("reports")
    instance = HostedLocal(id, drafter=None, pool=None, events=events, **settings)
    inner: Any = instance.inner

    def fail(*_: object) -> None:
        raise ZeroDivisionError("on purpose")

    def break_engine() -> None:
        inner_open()
        inner.engine.step = fail
        if not reports:
            inner._break = fail

    inner_open, inner._open = inner._open, break_engine
    return instance


def make_unlike(id: int, settings: dict[str, Any], events: EventSink) -> FakeInstance:
    """Writes into its log what it must be, whatever the engine; one process stands for all ranks."""
    given = read_settings(settings)
    config = given.config
    print(
        f"ranks {config.tensor_parallel}, blocks {config.kv.blocks}, slots {config.max_num_seqs}, "
        f"GPUs {os.environ.get('CUDA_VISIBLE_DEVICES')}, {'no pool' if given.pool is None else 'pool'}",
        flush=True,
    )
    assert config.kv.blocks is not None
    assert config.max_num_seqs is not None
    return FakeInstance(
        id, kv_blocks=config.kv.blocks, block_size=config.kv.block_size, max_num_seqs=config.max_num_seqs, events=events
    )


def make_small(id: int, settings: dict[str, Any], events: EventSink) -> FakeInstance:
    """Whatever memory it is given."""
    return FakeInstance(id, events=events)
