# SPDX-License-Identifier: Apache-2.0
"""The task of train.sh: word problems as verl reads them, and an environment that runs the model's Python code.

    python examples/tools_verl/card_problems.py DATA        # writes DATA/train.parquet and DATA/val.parquet

A turn with code in a Markdown fence is answered with what the code prints; one without is the answer, and is scored.
"""

from __future__ import annotations

import random
import re
import sys
from pathlib import Path
from typing import Any

import pandas

from seer import Conversation
from seer.environments.python_sandbox import SandboxLimits
from seer.environments.python_tool import PythonTool

ASK = (
    "Write Python code in a ```python block that prints the answer. You are then shown what it printed. "
    "Answer with the number alone."
)


def score(conversation: Conversation) -> float:
    """1 for the right number at the end, a tenth for another one."""
    numbers = re.findall(r"-?\d+", conversation.text)
    if not numbers:
        return 0.0
    return 1.0 if numbers[-1] == conversation.row["reward_model"]["ground_truth"] else 0.1


tool = PythonTool(score, limits=SandboxLimits(time_s=5.0), most_calls=2)


def problems(num: int, seed: int) -> list[dict[str, Any]]:
    """Rows of verl; prompts are unique."""
    dice = random.Random(seed)
    answers: dict[str, int] = {}
    while len(answers) < num:
        have, bags, each, lost = dice.randint(10, 99), dice.randint(2, 9), dice.randint(3, 14), dice.randint(1, 9)
        story = f"Mia has {have} cards. She buys {bags} bags with {each} cards each and loses {lost} cards."
        answers[f"{story} How many cards does she have now? {ASK}"] = have + bags * each - lost
    return [
        {
            "data_source": "cards",
            "prompt": [{"role": "user", "content": text}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(answer)},
            "extra_info": {"index": number},
        }
        for number, (text, answer) in enumerate(answers.items())
    ]


def main() -> None:
    """Write both files."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    rows = problems(4096, seed=0)
    pandas.DataFrame(rows[64:]).to_parquet(folder / "train.parquet")
    pandas.DataFrame(rows[:64]).to_parquet(folder / "val.parquet")


if __name__ == "__main__":
    main()
