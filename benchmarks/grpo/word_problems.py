# SPDX-License-Identifier: Apache-2.0
"""Generated word problems in the style of GSM8K, each with its answer: no download, any number of them.

Every problem is a short story of three to five sums. Numbers are small, but large enough for a small model to fail on
some of them.
"""

from __future__ import annotations

import random
import re
from typing import Any

NAMES = ("Mia", "Omar", "Lena", "Ravi", "Chloe", "Jonas", "Aisha", "Pedro", "Yuki", "Nora")
THINGS = ("apples", "marbles", "stickers", "pencils", "coins", "cards", "books", "shells")
ASK = "Think step by step, briefly. Write the final number after '####'."


def problems(num: int, seed: int) -> list[dict[str, Any]]:
    """Rows for a trainer: `prompt` as a conversation, `answer` as a number. Prompts are unique."""
    dice = random.Random(seed)
    rows: dict[str, int] = {}
    while len(rows) < num:
        story, answer = _story(dice)
        rows.setdefault(story, answer)
    return [
        {"prompt": [{"role": "user", "content": f"{story}\n{ASK}"}], "answer": answer} for story, answer in rows.items()
    ]


def score(text: str, answer: int) -> float:
    """1 for the right number after the last '####', a tenth for a wrong number there, 0 for none."""
    found = re.findall(r"####\s*\$?(-?[\d,]+)", text)
    if not found:
        return 0.0
    return 1.0 if found[-1].replace(",", "") == str(answer) else 0.1


def _story(dice: random.Random) -> tuple[str, int]:
    name, friend = dice.sample(NAMES, 2)
    things = dice.choice(THINGS)
    have = dice.randint(12, 60)
    parts = [f"{name} has {have} {things}."]
    for _ in range(dice.randint(3, 5)):
        kind = dice.choice(("buys", "gives", "boxes", "doubles", "shares"))
        if kind == "buys":
            bags, each = dice.randint(2, 9), dice.randint(3, 14)
            parts.append(f"{name} buys {bags} bags with {each} {things} each.")
            have += bags * each
        elif kind == "gives" and have > 10:
            given = dice.randint(3, have - 5)
            parts.append(f"{name} gives {given} {things} to {friend}.")
            have -= given
        elif kind == "boxes":
            lost, found = dice.randint(1, 5), dice.randint(6, 19)
            parts.append(f"On Monday {name} loses {lost} {things} and on Tuesday finds {found} more.")
            have += found - lost
        elif kind == "doubles" and have < 150:
            parts.append(f"{friend} then gives {name} as many {things} as {name} already has.")
            have *= 2
        elif kind == "shares" and have % 3 == 0:
            parts.append(f"{name} puts a third of the {things} aside for good.")
            have -= have // 3
    return " ".join(parts) + f" How many {things} does {name} have now?", have
