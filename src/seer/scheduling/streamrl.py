# SPDX-License-Identifier: Apache-2.0
"""`streamrl-oracle`: the skewness-aware dispatch of StreamRL (arXiv 2504.15930), with the true lengths of the prompts.

As the paper evaluates it: a group is one unit, placed once; the length of each prompt's responses, their mean, is known
instead of predicted, and that of a single response is not.

1. The fifth of the groups with the longest responses is the long tail.
2. It gets `n` instances of its own, the other groups the rest. StreamRL chooses the `n` with the least latency of the
   long tail plus that of the others. By its model, M responses of length L on an instance take

       token_s(B) · L · ⌈M / B⌉            B: how many of them fit into memory at once

   where L is the 90th percentile of all lengths for the long tail and their median for the others.
3. On each side, longest first, a group goes to the instance with the fewest tokens, which starts them in this order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from seer.buffer import Request
from seer.fleet import Fleet
from seer.scheduling.base import TrueLength
from seer.scheduling.dispatch import Dispatcher, by_group
from seer.types import InstanceLimits

LONG_SHARE = 0.2
"""Share of the groups that is the long tail (StreamRL: 20%)."""
LONG_QUANTILE, REGULAR_QUANTILE = 0.9, 0.5
"""Of all lengths: what StreamRL takes for the length of a response of the long tail, and of any other."""
IDLE_STEP_SHARE = 0.4
"""Without a cost model: time of a step on an empty instance over that on a full one."""

TokenSeconds = Callable[[int, float], float]
"""Seconds of a step, by requests and by tokens of context of each of them."""


class StreamRLOracle(Dispatcher):
    """Long groups apart, in batches as small as StreamRL's model of latency asks for."""

    def __init__(self, true_length: TrueLength, token_s: TokenSeconds | None = None) -> None:
        """Without `token_s` a step takes longer the fuller the memory is."""
        super().__init__()
        self._true_length = true_length
        self._token_s = token_s

    def dispatch(self, requests: Sequence[Request], fleet: Fleet) -> list[tuple[Request, int | None]]:
        """The groups of each side, the longest first, to its instance with the fewest tokens."""
        groups = sorted(by_group(requests), key=lambda members: -self._group_length(members))
        num_long = max(1, round(len(groups) * LONG_SHARE))
        num_dedicated = self._num_dedicated(groups, num_long, fleet)
        sides = [(groups[:num_long], range(num_dedicated)), (groups[num_long:], range(num_dedicated, len(fleet)))]
        if not num_dedicated:
            sides = [(groups, range(len(fleet)))]
        pairs: list[tuple[Request, int | None]] = []
        for side, instances in sides:
            tokens = dict.fromkeys(instances, 0.0)
            for members in side:
                instance = min(tokens, key=lambda i: (tokens[i], i))
                tokens[instance] += len(members) * self._group_length(members)
                pairs += [(request, instance) for request in members]
        return pairs

    def _group_length(self, members: Sequence[Request]) -> float:
        return sum(map(self._true_length, members)) / len(members)

    def _num_dedicated(self, groups: Sequence[Sequence[Request]], num_long: int, fleet: Fleet) -> int:
        """Instances for the long tail; 0 if it shares all of them."""
        if len(fleet) == 1 or len(groups) <= num_long:
            return 0
        lengths = sorted(self._true_length(request) for members in groups for request in members)
        long, regular = (lengths[int(q * len(lengths))] for q in (LONG_QUANTILE, REGULAR_QUANTILE))
        tail = sum(map(len, groups[:num_long]))
        prompt_tokens = groups[0][0].group.num_prompt_tokens

        mean = _mean_limits(fleet)

        def latency_s(num_dedicated: int) -> float:
            num_others = len(fleet) - num_dedicated
            of_tail_s = self._latency_s(-(-tail // num_dedicated), long, prompt_tokens, mean)
            return of_tail_s + self._latency_s(-((tail - len(lengths)) // num_others), regular, prompt_tokens, mean)

        return min(range(1, len(fleet)), key=latency_s)

    def _latency_s(self, num_responses: int, num_tokens: int, prompt_tokens: int, limits: InstanceLimits) -> float:
        """Time in which an instance generates so many responses of this length."""
        fit = min(limits.max_num_seqs, limits.kv_tokens // (prompt_tokens + num_tokens))
        batch = max(1, min(num_responses, fit))
        context_tokens = prompt_tokens + num_tokens / 2
        if self._token_s is not None:
            token_s = self._token_s(batch, context_tokens)
        else:
            token_s = IDLE_STEP_SHARE + (1.0 - IDLE_STEP_SHARE) * batch * context_tokens / limits.kv_tokens
        return token_s * num_tokens * -(-num_responses // batch)


def _mean_limits(fleet: Fleet) -> InstanceLimits:
    """Of unlike instances: StreamRL's model counts instances and knows one kind."""
    kv_blocks, max_num_seqs, max_model_len = (
        sum(getattr(one, name) for one in fleet.limits) // len(fleet)
        for name in ("kv_blocks", "max_num_seqs", "max_model_len")
    )
    return replace(fleet.limits[0], kv_blocks=kv_blocks, max_num_seqs=max_num_seqs, max_model_len=max_model_len)
