"""How instances are hosted in processes of their own: deadlines, batching, pinning, restarts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seer.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOptions:
    """Every wait of the host has its deadline here."""

    pin: bool = True
    """Keep each instance on one CPU core, round robin, with one thread."""
    start_deadline_s: float = 300.0
    """From launch to ready: imports and weights."""
    call_deadline_s: float = 300.0
    """A weight update, pause or resume."""
    close_deadline_s: float = 10.0
    """A polite exit; after it the process is killed."""
    heartbeat_s: float = 0.5
    silence_deadline_s: float = 10.0
    """No word for so long: the process hangs."""
    progress_deadline_s: float = 60.0
    """Requests running and not one step made in so long: the instance hangs, though its process talks."""
    flush_s: float = 0.05
    flush_tokens: int = 16
    """Tokens reach the driver after this time or number; a death loses no more than that per request."""
    weights_in_place: bool = True
    """New weights that are on a GPU stay there, and the instances map them; otherwise they go through shared memory."""
    max_restarts: int = 3
    """Per instance, and of the draft server, over its life."""
    log_dir: Path | None = None
    """Where each instance's own output goes, as instance-N.log; None keeps it in a temporary file."""

    def __post_init__(self) -> None:
        """Heartbeats must come several times within the silence they disprove."""
        if self.silence_deadline_s < 3 * self.heartbeat_s:
            raise ConfigError(
                f"silence_deadline_s={self.silence_deadline_s:g}, heartbeat_s={self.heartbeat_s:g}",
                hint=f"use at least {3 * self.heartbeat_s:g}",
            )
        if self.flush_tokens < 1:
            raise ConfigError(f"flush_tokens={self.flush_tokens}", hint="use at least 1")


GPU_SILENCE_S = 60.0
"""On a GPU a process may be silent for long and well: compiling a kernel or capturing a graph holds the interpreter."""


def hosting_for(device: str, *, pin: bool = True, **settings: Any) -> HostOptions:
    """Options that suit a device: one core for each CPU instance, all of them and more patience for a GPU's."""
    if device == "cpu":
        return HostOptions(pin=pin, **settings)
    return HostOptions(pin=False, silence_deadline_s=GPU_SILENCE_S, **settings)
