# SPDX-License-Identifier: Apache-2.0
"""Parts that the replies of the OpenAI endpoints share."""

from __future__ import annotations

import secrets
import time
from typing import Any

import msgspec

from seer.serve.generation import Generation
from seer.serve.refusals import bad_request
from seer.serve.sampling_fields import Neutral, refuse_unsupported


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What a stream has beside the tokens."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Any = None


_NEUTRAL: Neutral = {"include_obfuscation": ((False,), "events are not padded")}


def check_stream_options(stream: bool | None, options: StreamOptions | None) -> None:
    """Refuse options that would do nothing."""
    if options is None:
        return
    if not stream:
        raise bad_request("stream_options without stream", hint='send "stream": true too', param="stream_options")
    refuse_unsupported(options, _NEUTRAL)


def reply_head(kind: str, prefix: str, model: str, request_id: str | None) -> dict[str, Any]:
    """What every object of a reply starts with. Its id has the one that the client gave, as in vLLM."""
    id = f"{prefix}-{request_id or secrets.token_hex(16)}"
    return {"id": id, "object": kind, "created": int(time.time()), "model": model}


def usage(generation: Generation) -> dict[str, int]:
    """Tokens that the request has cost."""
    prompt, completion = generation.num_prompt_tokens, generation.num_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def usage_so_far(options: StreamOptions | None, generation: Generation) -> dict[str, Any]:
    """What an event of a stream has of its usage."""
    return {"usage": usage(generation)} if options is not None and options.continuous_usage_stats else {}


def wants_usage(options: StreamOptions | None) -> bool:
    """Whether a stream ends with its usage."""
    return options is not None and bool(options.include_usage)
