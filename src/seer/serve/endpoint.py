# SPDX-License-Identifier: Apache-2.0
"""What every endpoint has around its own work: the key, and errors as JSON."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response

from seer.errors import SeerError
from seer.serve.bodies import ClientGone
from seer.serve.refusals import Refusal, error_response, refusal_of
from seer.serve.service import Service

log = logging.getLogger(__name__)
Work = Callable[[Service, Request], Awaitable[Response]]
CLIENT_GONE_STATUS = 499
"""Never sent: for the access log, as nginx has it."""


def guarded(
    service: Service, work: Work, *, is_admin: bool = False, is_open: bool = False
) -> Callable[[Request], Awaitable[Response]]:
    """An endpoint that checks the key (unless it is open to all) and answers errors as JSON."""

    async def endpoint(request: Request) -> Response:
        try:
            if not is_open:
                service.settings.keys.check(request.headers, is_admin=is_admin)
            return await work(service, request)
        except ClientGone:
            return Response(status_code=CLIENT_GONE_STATUS)
        except Exception as error:
            refusal = refusal_of(error)
            if refusal.status == 429:
                service.num_refused += 1
            if refusal.status == 500:
                # What is known by name needs no traceback: a lost fleet fails thousands of requests at once.
                is_known = isinstance(error, Refusal | SeerError)
                log.error("%s %s failed: %s", request.method, request.url.path, error, exc_info=not is_known)
            return error_response(refusal)

    return endpoint
