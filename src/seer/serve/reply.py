# SPDX-License-Identifier: Apache-2.0
"""Parts that the replies of the OpenAI endpoints share."""

from __future__ import annotations

import secrets
import time
from typing import Any

import msgspec

from seer.serve.generation import Generation


class StreamOptions(msgspec.Struct, kw_only=True):
    """What a stream has beside the tokens."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


def reply_head(kind: str, prefix: str, model: str) -> dict[str, Any]:
    """What every object of a reply starts with."""
    return {"id": f"{prefix}-{secrets.token_hex(16)}", "object": kind, "created": int(time.time()), "model": model}


def usage(generation: Generation) -> dict[str, int]:
    """Tokens that the request has cost."""
    prompt, completion = generation.num_prompt_tokens, generation.num_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def wants_usage(options: StreamOptions | None) -> bool:
    """Whether a stream ends with its usage."""
    return options is not None and bool(options.include_usage)
