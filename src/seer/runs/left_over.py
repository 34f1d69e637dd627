# SPDX-License-Identifier: Apache-2.0
"""What is left of a run that is resumed: nothing, once its journal has the end of every response."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from seer.runs.prompts import EncodedPrompt
from seer.runs.results import read_responses
from seer.types import Restored


def is_nothing_left(prompts: Sequence[EncodedPrompt], past: Mapping[tuple[int, int], Restored]) -> bool:
    """Whether every response to these prompts has ended by itself."""
    asked = [(position, index) for position, prompt in enumerate(prompts) for index in range(prompt.n)]
    return all(key in past and past[key].finish_reason is not None for key in asked)


def are_results_whole(out: Path, prompts: Sequence[EncodedPrompt]) -> bool:
    """Whether a results file has every response to these prompts, once."""
    ended = [(one.group, one.index) for one in read_responses(out) if one.is_complete] if out.exists() else []
    return len(ended) == len(set(ended)) == sum(prompt.n for prompt in prompts)
