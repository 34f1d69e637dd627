# SPDX-License-Identifier: Apache-2.0
"""Mathematics questions for gpu.py: the GSM8K and MATH-500 prompts of a recording, whose answers vary much in length.

The recording has 16 responses of the untrained model to each question and no solutions. The answer that most of them
box is taken for the right one, as test-time RL does, so the reward says how often a response agrees with it. Responses
of Qwen2.5-Coder-1.5B have 600 tokens in the mean; one of a hundred is longer than 2,048.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

SETS = ("gsm8k", "math500")
FORMAT_SCORE = 0.1
_BOXED = re.compile(r"\\boxed\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}")
_QUESTION = re.compile(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", re.DOTALL)


def boxed(text: str) -> str | None:
    """What the last `\\boxed{}` holds, without spaces."""
    found = _BOXED.findall(text)
    return re.sub(r"\s", "", found[-1]) if found else None


def score(text: str, answer: str) -> float:
    """1 for the answer in a box, a tenth for another one there, 0 for no box."""
    found = boxed(text)
    return 0.0 if found is None else 1.0 if found == answer else FORMAT_SCORE


def questions(recording: Path, model: Path) -> list[dict[str, Any]]:
    """Rows for a trainer: `prompt` as a conversation and `answer`. `model` has the recording's tokenizer."""
    import numpy as np
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    rows = []
    with np.load(recording, allow_pickle=False) as found:
        ends, lengths = np.cumsum(found["prompt_lengths"]), found["lengths"]
        prompts = np.split(found["prompts"], ends[:-1])
        responses = np.split(found["tokens"], np.cumsum(lengths.ravel())[:-1])
        for group, name in enumerate(found["sets"]):
            if str(name) not in SETS:
                continue
            prompt = _QUESTION.search(tokenizer.decode(prompts[group].tolist(), skip_special_tokens=False))
            assert prompt is not None, f"group {group} is not in ChatML"
            of_group = responses[group * lengths.shape[1] : (group + 1) * lengths.shape[1]]
            answers = Counter(boxed(tokenizer.decode(one.tolist())) for one in of_group)
            answers.pop(None, None)
            if answers:
                answer = answers.most_common(1)[0][0]
                rows.append({"prompt": [{"role": "user", "content": prompt.group(1)}], "answer": answer})
    return rows
