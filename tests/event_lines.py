# SPDX-License-Identifier: Apache-2.0
"""Events as lines of text, for golden files."""

from __future__ import annotations

import msgspec

from seer.metrics.events import Event


def line(event: Event) -> str:
    written = msgspec.to_builtins(event)  # as in an event log: without what is left out there
    fields = {name: value for name, value in written.items() if name not in ("kind", "t_s")}
    shown = " ".join(value if isinstance(value, str) else f"{name}={_short(value)}" for name, value in fields.items())
    return f"{event.t_s:9.4f}  {type(event).__name__.lower():13} {shown}"


def _short(value: object) -> object:
    return round(value, 3) if isinstance(value, float) else value
