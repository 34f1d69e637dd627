# SPDX-License-Identifier: Apache-2.0
"""Errors as OpenAI's clients expect them: a status, and `{"error": {message, type, param, code}}`.

The message says what, got and limit, and ends with the hint. 429 and 503 carry Retry-After: clients try again then.
"""

from __future__ import annotations

from http import HTTPStatus

import msgspec
from starlette.responses import Response

from seer.errors import ConfigError, InputError, SeerError

RETRY_AFTER_S = 1
"""Long enough that a client that waits for a weight update does not flood the server."""

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    503: "service_unavailable_error",
}


class Refusal(Exception):  # noqa: N818 - reads as what it is
    """An HTTP error that answers a request."""

    def __init__(self, status: int, message: str, *, hint: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.hint = hint
        self.param = param


def bad_request(message: str, *, hint: str | None = None, param: str | None = None) -> Refusal:
    """The client must change its request."""
    return Refusal(400, message, hint=hint, param=param)


def refusal_of(error: BaseException) -> Refusal:
    """How an error is answered. What is not Seer's own is a bug: its text stays in the log."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, ConfigError | InputError):
        return bad_request(str(error), hint=error.hint)
    if isinstance(error, SeerError):
        return Refusal(500, str(error), hint=error.hint)
    return Refusal(500, "internal error", hint="the server's log has the traceback")


def error_body(refusal: Refusal) -> dict[str, object]:
    """The JSON value of an error; also an event of a stream that breaks."""
    message = f"{refusal}. Hint: {refusal.hint}" if refusal.hint else str(refusal)
    kind = _KINDS.get(refusal.status, "server_error")
    return {"error": {"message": message, "type": kind, "param": refusal.param, "code": refusal.status}}


def error_response(refusal: Refusal) -> Response:
    """The response that carries an error."""
    headers = {}
    if refusal.status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
        headers["retry-after"] = str(RETRY_AFTER_S)
    if refusal.status == HTTPStatus.UNAUTHORIZED:
        headers["www-authenticate"] = 'Bearer, Basic realm="seer"'
    if refusal.status in (HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.REQUEST_TIMEOUT):
        headers["connection"] = "close"  # the rest of the body is not read
    return json_response(error_body(refusal), refusal.status, headers)


def json_response(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON response; msgspec writes it."""
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")
