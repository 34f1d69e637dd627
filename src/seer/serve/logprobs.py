# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of sampled tokens in the forms of the endpoints.

Seer reports the log-probability of the sampled token, under the distribution that it was sampled from, and no
alternatives. Where a form has a list of the likeliest tokens, it holds the sampled token alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from seer.engine.text_codec import TextCodec
from seer.serve.choice import Piece


def token_names(ids: Sequence[int], codec: TextCodec | None, *, as_ids: bool) -> list[str]:
    """Tokens as text, or as `token_id:N`, which names them even where their text is no whole character."""
    if as_ids or codec is None:
        return [f"token_id:{token}" for token in ids]
    return [codec.decode([token]) for token in ids]


def completion_logprobs(piece: Piece, names: Sequence[str]) -> dict[str, Any]:
    """As /v1/completions has them."""
    offsets, at = [], piece.start_char
    for name in names:
        offsets.append(at)
        at += len(name)
    return {
        "text_offset": offsets,
        "token_logprobs": list(piece.logprobs),
        "tokens": list(names),
        "top_logprobs": [{name: value} for name, value in zip(names, piece.logprobs, strict=True)],
    }


def chat_logprobs(piece: Piece, names: Sequence[str], *, with_top: bool) -> dict[str, Any]:
    """As /v1/chat/completions has them; `with_top`: `top_logprobs` was asked for."""
    content = []
    for name, value in zip(names, piece.logprobs, strict=True):
        one: dict[str, Any] = {"token": name, "logprob": value, "bytes": list(name.encode("utf-8", "replace"))}
        content.append(one | {"top_logprobs": [one] if with_top else []})
    return {"content": content}


def generate_logprobs(piece: Piece) -> dict[str, Any]:
    """As /inference/v1/generate has them: by token id."""
    content = []
    for token, value in zip(piece.ids, piece.logprobs, strict=True):
        one: dict[str, Any] = {"token_id": token, "token": f"token_id:{token}", "logprob": value, "rank": None}
        content.append(one | {"top_logprobs": [one]})
    return {"content": content}
