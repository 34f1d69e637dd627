"""Tokens stay in the engine's process until an output is due: vLLM sends every step's, though it streams every few.

vLLM's engine sends what each step said, three arrays for every request, and its front end unpacks them all only to let
them lie until `stream_interval` tokens are there: two thirds of what a token costs that process. Held back here, they
travel together.

Invariants
  1. Tokens leave in the order they came, each with its log-probability, at the latest with the output that ends their
     request. Only an abort from outside drops what is held: the front end has then ended the request already.
  2. The first output of a request, and whatever says more than tokens, leaves at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from vllm.v1.outputs import LogprobsLists

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutput


class OutputHolding:
    """Outputs of requests that have begun, on their way out of the engine."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens  # of a request held before they leave
        self._held: dict[str, list[EngineCoreOutput]] = {}
        self._num_tokens: dict[str, int] = {}

    def pass_on(self, outputs: Iterable[EngineCoreOutput]) -> list[EngineCoreOutput]:
        """Take a step's outputs; what is due now comes back."""
        return [due for output in outputs if (due := self._pass_on(output)) is not None]

    def drop(self, requests: Iterable[str]) -> None:
        """These have ended, whoever ended them."""
        for request in requests:
            self._held.pop(request, None)
            self._num_tokens.pop(request, None)

    def _pass_on(self, output: EngineCoreOutput) -> EngineCoreOutput | None:
        request = output.request_id
        held = self._held.get(request)
        is_last = output.finish_reason is not None
        if held is None:
            if not is_last:
                self._held[request], self._num_tokens[request] = [], 0
            return output
        held.append(output)
        self._num_tokens[request] += len(output.new_token_ids)
        says_more = is_last or output.events is not None or output.prefill_stats is not None
        if not says_more and self._num_tokens[request] < self._max_tokens:
            return None
        if is_last:
            self.drop([request])
        else:
            self._held[request], self._num_tokens[request] = [], 0
        return _merge(held)


def _merge(outputs: list[EngineCoreOutput]) -> EngineCoreOutput:
    """One output that says what these said: all but the last say nothing but tokens."""
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
