# SPDX-License-Identifier: Apache-2.0
"""One rollout of the training: its events, its numbers for verl's log, and its folder for `seer report`.

Invariant: what cannot be written (the disk is full) ends the recording with a warning, and nothing else.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import msgspec

from seer.analysis.explain import explain
from seer.analysis.whatif import recorded_run, replay_under
from seer.errors import InputError
from seer.metrics.events import Ended, Event, InstanceState, Prefilling, Queued, Started, Stepped
from seer.metrics.jsonl import EventLog
from seer.metrics.summary import Summarizer, Summary
from seer.runs.run_folder import RunFolder, machine
from seer.types import FinishReason, InstanceLimits

log = logging.getLogger(__name__)

STOCK = "verl"
"""The scheduler that dispatches as verl's own load balancer does."""
MAX_REPLAYED = 20_000
"""Responses of a rollout that is replayed: more would hold up the trainer's log for seconds."""
_COUNTED = (
    *("responses", "failed_responses", "tokens", "longest_tokens", "chunks", "moves"),
    *("drafted_tokens", "accepted_draft_tokens"),
)
_NOT_RESPONSES = (FinishReason.CANCELLED.value, FinishReason.FAILED.value)


class StepRecord:
    """An event sink of one rollout."""

    def __init__(
        self,
        name: str,
        *,
        began_s: float,
        weights_version: int,
        num_servers: int,
        folder: RunFolder | None,
        manifest: dict[str, Any],
    ) -> None:
        self.name = name
        """The step, and `-val` for a validation."""
        self.began_s = began_s
        self._weights_version = weights_version
        self._summarizer = Summarizer(num_servers)
        self._counts: Counter[str] = Counter()
        self._replayed: list[Event] = []
        self._first_number = self._next_number = 0
        self.first_error: str | None = None
        """Why the first of the failed responses failed."""
        self._folder, self._manifest = folder, manifest
        self._open = contextlib.ExitStack()
        self._log: EventLog | None = None
        if folder is not None:
            with self._recording():
                folder.create()
                self._write("running", None)
                self._log = self._open.enter_context(EventLog(folder.events, {"source": "train"}))

    @property
    def num_failed(self) -> int:
        """Responses that were asked for and did not come."""
        return self._counts["failed_responses"]

    def note_failure(self, error: str) -> None:
        """A response was asked for and does not come."""
        self.first_error = self.first_error or error
        self._counts["failed_responses"] += 1

    def begin_session(self) -> None:
        """The session broke, and another one counts its requests and groups from 0 again."""
        self._first_number = self._next_number

    def __call__(self, event: Event) -> None:
        """Take one event."""
        event = self._numbered(event)
        self._summarizer(event)
        if self._log is not None:
            with self._recording():
                self._log(event)
        if isinstance(event, Queued | Ended | Stepped | Prefilling | InstanceState):
            self._replayed.append(event)
        if isinstance(event, Started):
            self._counts["chunks"] += 1
            self._counts["moves"] += event.migrated_from is not None
        elif isinstance(event, Stepped):
            self._counts["drafted_tokens"] += event.num_drafted
            self._counts["accepted_draft_tokens"] += event.num_accepted
        elif isinstance(event, Ended):
            self._counts["responses"] += event.finish_reason not in _NOT_RESPONSES
            self._counts["tokens"] += event.num_generated
            self._counts["longest_tokens"] = max(self._counts["longest_tokens"], event.num_generated)

    def metrics(self) -> dict[str, float]:
        """The numbers so far, by name."""
        numbers = {name: float(self._counts[name]) for name in _COUNTED}
        numbers["weights_version"] = float(self._weights_version)
        summary = self._summary()
        if summary is not None:
            numbers |= {
                "rollout_s": summary.makespan_s,
                "tail_s": summary.tail_s,
                "moved_kv_tokens": float(summary.migrated_tokens),
                "recomputed_tokens": float(summary.recomputed_tokens),
            }
            if summary.num_turns:
                numbers |= {
                    "turns_mean": summary.num_turns / max(1, summary.num_requests),
                    "tool_wait_s": summary.tool_wait_s,
                    "tool_failures": float(summary.tool_failures),
                }
        return numbers

    def replay(self, limits: Sequence[InstanceLimits], chunk_tokens: int | None) -> dict[str, float]:
        """What verl's own dispatch and the ideal schedule would have taken, by the step times that were measured.

        `limits` are those of each server. Empty where there is nothing to go by: no step was measured, a response did
        not end by itself, or responses waited for an environment.
        """
        summary = self._summary()
        if not 0 < self._counts["responses"] <= MAX_REPLAYED or (summary is not None and summary.num_turns):
            return {}
        found = explain(self._replayed, max_num_seqs=[one.max_num_seqs for one in limits])
        try:
            recorded = recorded_run(
                self._replayed,
                scheduler=STOCK,
                limits=limits,
                max_tokens=1,  # at least the longest response is allowed
                chunk_tokens=chunk_tokens,
            )
        except InputError:
            return {}
        numbers = {"stock_rollout_s": replay_under(recorded, STOCK).makespan_s}
        if found is not None and found.oracle_s is not None:
            numbers["oracle_rollout_s"] = found.oracle_s
        return numbers

    def close(self) -> None:
        """The rollout is over; a second time changes nothing."""
        if self._log is None:
            return
        self._log = None
        with self._recording():
            self._open.close()
            self._write("finished", self._summary())

    @contextlib.contextmanager
    def _recording(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._log = None
            with contextlib.suppress(OSError):
                self._open.close()
            log.warning("rollout %s is not recorded any more: %s", self.name, error)

    def _numbered(self, event: Event) -> Event:
        """The event with numbers of its own among all sessions of this rollout."""
        if isinstance(event, Queued):
            self._next_number = max(self._next_number, self._first_number + max(event.request, event.group) + 1)
        if not self._first_number:
            return event
        own = {name: getattr(event, name) + self._first_number for name in ("request", "group") if hasattr(event, name)}
        return msgspec.structs.replace(event, **own) if own else event

    def _summary(self) -> Summary | None:
        return self._summarizer.summary() if self._counts["responses"] else None

    def _write(self, status: str, summary: Summary | None) -> None:
        assert self._folder is not None, "there is a folder to write to"
        self._folder.write_manifest(
            {
                "command": "rollout",
                **self._manifest,
                "machine": machine(),
                "status": status,
                "summary": None if summary is None else asdict(summary),
            }
        )
