# SPDX-License-Identifier: Apache-2.0
"""Keeps tokens in the engine's process until `stream_interval` of a request can be sent together.

vLLM's engine sends the tokens of every step, as three arrays per request. Its front end unpacks them all and then waits
for `stream_interval` tokens anyway. Held back here, they are sent and unpacked once.

Invariants
  1. Tokens leave in the order they came, each with its log-probability, at the latest with the output that ends their
     request. Only an abort drops tokens that are held: the front end has ended the request by then.
  2. The first output of a request leaves at once, and so does every output that carries more than tokens.
  3. Requests that begin together do not all leave at the same steps: their second outputs are spread over
     `stream_interval` steps. Otherwise hundreds would reach the driver at once, and it would answer them late.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from vllm.v1.outputs import LogprobsLists

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutput


class OutputHolding:
    """Outputs of one engine that were not sent yet, by request."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens  # of one request, before they are sent
        self._held: dict[str, list[EngineCoreOutput]] = {}
        self._num_tokens: dict[str, int] = {}
        self._num_begun = 0

    def pass_on(self, outputs: Iterable[EngineCoreOutput]) -> list[EngineCoreOutput]:
        """Take a step's outputs and return those that are due."""
        return [due for output in outputs if (due := self._pass_on(output)) is not None]

    def drop(self, requests: Iterable[str]) -> None:
        """Drop what is held of requests that have ended."""
        for request in requests:
            self._held.pop(request, None)
            self._num_tokens.pop(request, None)

    def _pass_on(self, output: EngineCoreOutput) -> EngineCoreOutput | None:
        request = output.request_id
        held = self._held.get(request)
        is_last = output.finish_reason is not None
        if held is None:
            if not is_last:
                self._held[request], self._num_tokens[request] = [], self._num_begun % self._max_tokens
                self._num_begun += 1
            return output
        held.append(output)
        self._num_tokens[request] += len(output.new_token_ids)
        has_more = is_last or output.events is not None or output.prefill_stats is not None
        if not has_more and self._num_tokens[request] < self._max_tokens:
            return None
        if is_last:
            self.drop([request])
        else:
            self._held[request], self._num_tokens[request] = [], 0
        return _merge(held)


def _merge(outputs: list[EngineCoreOutput]) -> EngineCoreOutput:
    """One output for several; all but the last carry tokens only."""
    last = outputs[-1]
    if len(outputs) > 1:
        last.new_token_ids = [token for output in outputs for token in output.new_token_ids]
        parts = [output.new_logprobs for output in outputs if output.new_logprobs is not None]
        if parts:
            last.new_logprobs = LogprobsLists(
                np.concatenate([part.logprob_token_ids for part in parts]),
                np.concatenate([part.logprobs for part in parts]),
                np.concatenate([part.sampled_token_ranks for part in parts]),
            )
    return last
