# SPDX-License-Identifier: Apache-2.0
"""Text environments in the form of Gymnasium (and of OpenEnv's clients): reset, step, an observation as text.

    TextGame(lambda conversation: MyGame(level=3))

where the game has `reset(seed=...)`, and `step(action) -> (observation, reward, terminated, truncated, info)`, plain or
async. The model's turn is the action, the observation is the next message, and the response's reward is the sum of the
steps' rewards.

Plain methods run in a thread each, so that a game that is slow or hangs stops neither the event loop nor other games.
The game's `close`, where it has a plain one, is called in a thread, too, and nothing waits for it.

Invariant: a game is a function of its seed and its actions. So a conversation whose game is missing, in a resumed run,
is played again from its messages.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from seer.environments.base import Answer, Conversation, End, Key
from seer.machine.daemon_thread import in_thread
from seer.types import FinishReason

log = logging.getLogger(__name__)


class Game(Protocol):
    """What is used of a game."""

    def reset(self, *, seed: int | None = None) -> Any:
        """Begin."""

    def step(self, action: str) -> Any:
        """Make a move."""


@dataclass(slots=True)
class _Played:
    game: Game
    num_actions: int = 0
    reward: float = 0.0
    is_over: bool = False
    observation: str = ""


class TextGame:
    """One game per conversation; the prompt says how it begins."""

    def __init__(
        self,
        make: Callable[[Conversation], Game],
        *,
        seed_of: Callable[[Conversation], int] | None = None,
        role: str = "user",
    ) -> None:
        """`make` is called on the event loop, where async games belong: what takes time belongs into `reset`. `seed_of`
        seeds a game, by default `prompt_seed`: all responses to equal prompts play the same one.
        """
        self._make, self._seed_of, self._role = make, seed_of or prompt_seed, role
        self._played: dict[Key, _Played] = {}

    async def __call__(self, conversation: Conversation) -> Answer:
        """Play the newest turn, and those before it that were not played yet."""
        played = self._played.get(conversation.key)
        if played is None:
            played = self._played[conversation.key] = _Played(self._make(conversation))
            await _call(played.game.reset, seed=self._seed_of(conversation))
        actions = _actions(conversation)
        for action in actions[played.num_actions :]:
            if not played.is_over:
                await self._step(played, action)
        if played.is_over or conversation.finish_reason is FinishReason.LENGTH:
            return End(reward=played.reward)
        return [{"role": self._role, "content": played.observation}]

    def close(self, key: Key) -> None:
        """The conversation has ended: so has its game."""
        played = self._played.pop(key, None)
        end = getattr(played.game, "close", None) if played is not None else None
        if end is not None and not inspect.iscoroutinefunction(end):
            threading.Thread(target=_end, args=(end,), name="seer-game-close", daemon=True).start()

    @staticmethod
    async def _step(played: _Played, action: str) -> None:
        observation, reward, terminated, truncated, _ = await _call(played.game.step, action)
        played.num_actions += 1
        played.reward += float(reward)
        played.is_over = bool(terminated or truncated)
        played.observation = str(observation)


def prompt_seed(conversation: Conversation) -> int:
    """A seed from the prompt's tokens: in a slice, a later step, a session or a trainer, a prompt has its own game."""
    text = ",".join(map(str, conversation.prompt_token_ids))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little") >> 1


def _actions(conversation: Conversation) -> list[str]:
    """The model's turns. Messages of the prompt may have the assistant's role too; turns are the last ones."""
    spoken = [message["content"] for message in conversation.messages if message["role"] == "assistant"]
    return spoken[len(spoken) - conversation.turn :]


async def _call(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    if inspect.iscoroutinefunction(function):
        return await function(*arguments, **named)
    return await in_thread(function, *arguments, **named)


def _end(close: Callable[[], Any]) -> None:
    try:
        close()
    except (Exception, SystemExit):
        log.exception("a game could not be closed")
