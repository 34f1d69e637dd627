# SPDX-License-Identifier: Apache-2.0
"""The session that a request names: its header X-Session-ID, or its field `session_id`."""

from __future__ import annotations

from starlette.requests import Request


def session_of(request: Request, field: str | None = None) -> str | None:
    """The session's name; None if the request names none. SGLang's router calls the header X-SMG-Routing-Key."""
    headers = request.headers
    return headers.get("x-session-id") or headers.get("x-smg-routing-key") or field or None
