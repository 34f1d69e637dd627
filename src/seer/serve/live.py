# SPDX-License-Identifier: Apache-2.0
"""The live page at `/` and its events at `/live/events`: the fleet as it is, twice a second.

The page is one static file; it loads nothing else. A reader that is slow gets fewer events: each is the state at its
time, with the spans since the last one that this reader was sent.
"""

from __future__ import annotations

import asyncio
import importlib.resources
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Any

import msgspec
from starlette.responses import Response

from seer.metrics.fleet_sample import FleetSample
from seer.metrics.live_counts import LiveCounts
from seer.metrics.live_timeline import LiveTimeline
from seer.serve.streams import EventStream, event_of

PERIOD_S = 0.5
RATE_WINDOW_S = 10.0
"""As the progress line of `seer rollout` has it."""
SLOW_READER_S = 30.0
PAGE_MAY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
"""Nothing but its own script and this server."""


class LivePage:
    """Makes the page and its events; also an event sink."""

    def __init__(self, counts: LiveCounts, sample: Callable[[], FleetSample], title: str) -> None:
        self.counts = counts
        self.timeline = LiveTimeline(counts)
        self._sample = sample
        self._title = title
        self._rates: deque[tuple[float, int]] = deque()
        self._is_closed = False

    def close(self) -> None:
        """The server ends: so do the streams."""
        self._is_closed = True

    def on_event(self, event: Any) -> None:
        """Take an event into account."""
        self.counts(event)
        self.timeline(event)

    def page(self) -> Response:
        """The page, with the state of now in it."""
        first = msgspec.json.encode(self.state()).replace(b"<", b"\\u003c")  # no text of a state ends the script
        return Response(
            _page().replace(b"FIRST_STATE", first),
            media_type="text/html",
            headers={"content-security-policy": PAGE_MAY},
        )

    def events(self) -> Response:
        """A stream of states, until the reader leaves."""
        return EventStream(self._states(), on_close=lambda: None, slow_reader_s=SLOW_READER_S, ends_with=b"")

    def state(self, since: int = -1) -> dict[str, Any]:
        """The fleet now, with the spans after `since`."""
        now_s = asyncio.get_running_loop().time()
        counts, sample = self.counts, self._sample()
        rate = self._rate(now_s)
        left_s, even_s = self._time_left(rate)
        sums = counts.per_instance
        return {
            "title": self._title,
            "now_s": now_s,
            "requests": dict(counts.requests_by_state()),
            "ended": dict(counts.ended),
            "tokens": counts.generated_tokens(),
            "tokens_per_s": rate,
            "left_s": left_s,
            "even_s": even_s,
            "migrations": counts.migrations,
            "lost_instances": sample.num_lost,
            "weights_version": sample.weights_version,
            "draft_tokens": sum(sums["draft_tokens"].values()),
            "accepted_tokens": sum(sums["accepted_tokens"].values()),
            "instances": [
                {
                    "is_up": one.is_up,
                    "num_running": one.num_running,
                    "num_waiting": one.num_waiting,
                    "kv_usage": one.kv_usage,
                    "tokens": sums["generation_tokens"][number],
                }
                for number, one in enumerate(sample.instances)
            ],
            "spans": [span.as_row() for span in self.timeline.spans(since)],
        }

    async def _states(self) -> AsyncGenerator[bytes, None]:
        since = -1
        while not self._is_closed:
            yield event_of(self.state(since))
            since = self.timeline.newest
            await asyncio.sleep(PERIOD_S)

    def _time_left(self, rate: float) -> tuple[float | None, float | None]:
        """As it looks, with the longest request at its own speed; and if all work could be spread over the fleet."""
        left = self.timeline.tokens_left()
        if left is None or not rate:
            return None, None
        total, longest = left
        own_rate = rate / max(1, self.counts.requests_by_state()["running"])
        return max(total / rate, longest / own_rate), total / rate

    def _rate(self, now_s: float) -> float:
        """Tokens a second over the last seconds."""
        self._rates.append((now_s, self.counts.generated_tokens()))
        while now_s - self._rates[0][0] > RATE_WINDOW_S:
            self._rates.popleft()
        (first_s, first), (last_s, last) = self._rates[0], self._rates[-1]
        return (last - first) / (last_s - first_s) if last_s > first_s else 0.0


def _page() -> bytes:
    return importlib.resources.files("seer.serve").joinpath("live.html").read_bytes()
