# SPDX-License-Identifier: Apache-2.0
"""The settings of a server: where it listens, who gets in, and how much it takes on."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from seer.errors import ConfigError
from seer.ranges import Count, NumBytes, Port, Seconds, check_fields
from seer.serve.keys import Keys, is_loopback


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much the server takes on. Each limit has its own answer: 400, 408, 413, 429, 431 or 503."""

    max_connections: Count = 8192
    """Open at once; a further one is answered with 503 and closed. Twice the responses in flight by default."""
    max_head_bytes: NumBytes = 32 << 10
    """Of a request's line and headers, each header counting 32 more."""
    head_s: Seconds = 30.0
    """A connection on which no whole head of a request comes for this long is closed."""
    max_body_bytes: NumBytes = 64 << 20
    """A TRL batch of 1,024 prompts of 8,192 token ids is about 50 MB."""
    body_idle_s: Seconds = 60.0
    """A body of which nothing comes for this long is given up."""
    max_in_flight: Count = 4096
    """Responses that wait or run; beyond them requests are answered with 429."""
    max_prompts: Count = 4096
    """Prompts of one request."""
    slow_reader_s: Seconds = 60.0
    """A stream whose client takes nothing for this long is cut, and its responses are cancelled."""
    drain_s: Seconds = 300.0
    """After SIGTERM, responses that have not ended by then are cancelled."""
    update_idle_s: Seconds = 600.0
    """A weight update that was started and gets no further call for this long is dropped."""

    def __post_init__(self) -> None:
        """Refuse what cannot run."""
        check_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """Settings of a server."""

    host: str = "127.0.0.1"
    port: Port = 8000
    keys: Keys = field(default_factory=Keys)
    limits: Limits = field(default_factory=Limits)
    model_name: str | None = None
    """How clients name the model; None: as it was given."""
    weight_backend: Literal["nccl", "gloo"] = "gloo"
    """How trainers broadcast weights to this server: over its GPU, or over its memory."""
    weights_dir: Path | None = None
    """Weights are read from files under this folder only; None: from no file."""

    def __post_init__(self) -> None:
        """A server that others can reach has a key."""
        check_fields(self)
        if not is_loopback(self.host) and self.keys.api is None:
            raise ConfigError(
                f"--host {self.host} can be reached from other machines, and there is no API key",
                hint="--api-key-file FILE or SEER_API_KEY, or --host 127.0.0.1",
            )
