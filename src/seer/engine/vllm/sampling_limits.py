# SPDX-License-Identifier: Apache-2.0
"""What vLLM does not sample as it is asked to: refused in one line before a request reaches it. Does not import vLLM.

Invariant: a request that vLLM would refuse, sample in another way than asked, or end the instance with, is refused.
"""

from __future__ import annotations

from seer.engine.admission import refuse_no_token
from seer.engine.vllm.model_folder import ModelFolder
from seer.errors import InputError
from seer.types import Sampling

LEAST_TEMPERATURE, MOST_TEMPERATURE = 0.01, 2.0
"""Of one that is not greedy. vLLM takes a smaller one as the least, and 0.32 refuses a greater one."""
MOST_STOP_TOKENS = 128
"""Of a request with `min_tokens`, on a GPU: with more of them the newest runner ends its engine."""


def refuse_sampling(sampling: Sampling, folder: ModelFolder, *, on_cpu: bool, drafts_in_scheduler: bool) -> None:
    """Raise for sampling that an instance of this model cannot do."""
    temperature = sampling.temperature
    if temperature and not LEAST_TEMPERATURE <= temperature <= MOST_TEMPERATURE:
        raise InputError(
            f"temperature={temperature:g}: vLLM samples at {LEAST_TEMPERATURE:g} to {MOST_TEMPERATURE:g}",
            hint="use 0 for greedy responses, or a temperature in this range",
        )
    if sampling.min_p > 0 and drafts_in_scheduler:
        raise InputError(
            f"min_p={sampling.min_p:g}: vLLM's older runner cannot verify drafts with min_p",
            hint="set speculation off, or min_p=0",
        )
    refuse_no_token(sampling, eos_token_ids=folder.eos_token_ids, vocab_size=folder.vocab_size)
    if on_cpu or not sampling.min_tokens:
        return
    num_ends = len(sampling.end_tokens(folder.eos_token_ids))
    if num_ends > MOST_STOP_TOKENS:
        raise InputError(
            f"min_tokens={sampling.min_tokens} and {num_ends} tokens that end a response: vLLM takes "
            f"{MOST_STOP_TOKENS} on a GPU",
            hint="min_tokens=0, or fewer stop_token_ids",
        )
