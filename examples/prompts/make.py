# SPDX-License-Identifier: Apache-2.0
"""Write the example prompt sets: `python examples/prompts/make.py` makes mixed.jsonl and uniform.jsonl beside it.

The prompts of `mixed` ask for answers from one word to a long numbered list, so that response lengths have a long tail,
as in RL on reasoning tasks. The prompts of `uniform` all ask for three sentences. The text is generated here from fixed
seeds, so the files are the same every time.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

SHORT = [
    "Is {a} greater than {b}? Answer yes or no.",
    "What is {a} plus {b}? Answer with the number only.",
    "Reply with the single word: {noun}.",
    "Name one colour of a {noun}. One word.",
]
MIDDLE = [
    "Explain in two sentences what a {noun} is for.",
    "Solve step by step: Mia has {a} {noun}s, gives away {c} and buys {b} more. How many has she now?",
    "Write a short poem about a {noun}.",
]
LONG = [
    "Write a numbered list of {n} things one can do with a {noun}, one full sentence each.",
    "Count from {a} to {z} in words, one number per line.",
    "Tell a long story about a {noun} and a {other}, with many details. Do not stop early.",
]
NOUNS = ["lantern", "kettle", "ladder", "compass", "rope", "mirror", "basket", "hammer", "bridge", "garden"]


def fill(template: str, rng: random.Random) -> str:
    """The template with its fields filled in."""
    a = rng.randint(11, 60)
    noun, other = rng.sample(NOUNS, 2)
    return template.format(
        a=a, b=rng.randint(11, 60), c=rng.randint(2, 10), z=a + 80, n=rng.randint(40, 60), noun=noun, other=other
    )


def write(path: Path, templates: list[str], seed: int) -> None:
    """Write one prompt per template."""
    rng = random.Random(seed)
    with path.open("w") as file:
        for number, template in enumerate(templates):
            messages = [{"role": "user", "content": fill(template, rng)}]
            file.write(json.dumps({"id": f"{path.stem}-{number}", "messages": messages}) + "\n")


def main() -> None:
    """Write both sets."""
    home = Path(__file__).parent
    rng = random.Random(7)
    kinds = [SHORT] * 12 + [MIDDLE] * 7 + [LONG] * 5
    rng.shuffle(kinds)
    write(home / "mixed.jsonl", [rng.choice(kind) for kind in kinds], seed=1)
    write(home / "uniform.jsonl", ["Write exactly three sentences about a {noun}."] * 24, seed=2)


if __name__ == "__main__":
    main()
