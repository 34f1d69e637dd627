# SPDX-License-Identifier: Apache-2.0
"""Groups of responses with rewards. Run `seer model get smollm2` first.

The reward is called as each response ends, while others are still being generated.
"""

from __future__ import annotations

import asyncio

from seer import Prompt, Response, Rollout, Sampling


async def reward(prompt: Prompt, response: Response) -> float:
    """Shorter responses get higher rewards."""
    return 1.0 / response.num_tokens


async def main() -> None:
    """Two instances, two prompts, four responses each."""
    questions = ["Name one colour. One word.", "Write a list of ten animals."]
    prompts = [[{"role": "user", "content": question}] for question in questions]
    async with Rollout("smollm2", instances=2) as rollout:
        async for group in rollout.run(prompts, n=4, sampling=Sampling(max_tokens=48), reward=reward):
            for response in group.responses:
                print(f"{questions[group.group]} -> {response.reward:.3f} {response.text!r}")


if __name__ == "__main__":
    asyncio.run(main())
