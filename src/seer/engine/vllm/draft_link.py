# SPDX-License-Identifier: Apache-2.0
"""How an engine's process learns which draft servers to talk to, and with which keys.

By an environment variable: a process that hosts an instance starts one engine. vLLM hashes its configuration to find
what it compiled before, and addresses and keys are new with every start of a fleet: inside the configuration they would
make every start compile again. vLLM also logs its configuration.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import msgspec

from seer.drafting.curve_keys import ClientKeys

VARIABLE = "SEER_DRAFT_LINK"


@dataclass(frozen=True, slots=True)
class DraftLink:
    """The draft servers of a fleet; none if `servers` is empty."""

    servers: tuple[str, ...] = ()
    keys: ClientKeys | None = None


def publish(link: DraftLink) -> None:
    """Let the engine that this process starts next read the link."""
    os.environ[VARIABLE] = msgspec.json.encode(link).decode()


def read_link() -> DraftLink:
    """The link of this engine's process."""
    given = os.environ.get(VARIABLE)
    return DraftLink() if given is None else msgspec.json.decode(given, type=DraftLink)
