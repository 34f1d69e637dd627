# SPDX-License-Identifier: Apache-2.0
"""An environment for the toy: a response says a few words, is shown one, and goes on; at the end it is scored.

`custom.seer.environment` names this file, so it is loaded in the driver. It scores as verl_reward.py does, over the
words that the model said alone; `shown` beside it would count as digits of one kind.
"""

from __future__ import annotations

import itertools

from verl_reward import compute_score

from seer import Conversation, End, FinishReason, Reply
from seer.environments.base import Answer

MOST_TURNS = 3
SHOWN = (6,)
"""0, an even digit: a mask that let it through would teach it to prompts that ask for odd ones."""
CRASHED_EVERY = 40
"""One of so many conversations has a tool that crashes."""

_numbers = itertools.count(1)


async def show_a_digit(conversation: Conversation) -> Answer:
    """Up to three turns."""
    if next(_numbers) % CRASHED_EVERY == 0:
        raise RuntimeError("the tool crashed")
    if conversation.turn < MOST_TURNS and conversation.finish_reason is FinishReason.STOP:
        return Reply(token_ids=SHOWN)
    said = " ".join(message["content"] for message in conversation.messages if message["role"] == "assistant")
    return End(reward=compute_score("toy", said, conversation.row["reward_model"]["ground_truth"]))
