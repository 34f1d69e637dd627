# SPDX-License-Identifier: Apache-2.0
"""Rollouts on instances without a model, whose tokens follow from their seeds: many cheap faults of processes, messages
and connections. Half of the fleets are on this machine behind a relay of messages, half dial in over TCP and TLS.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from dial_hosting import over_tcp
from fault_campaign import Tally, num_rounds_of
from fault_rounds import ROUNDS_PER_FLEET, a_rollout, disturbed_rounds, undisturbed
from frame_proxy import proxied
from link_strikes import LINK_STRIKES
from seer import Sampling
from strikes import STRIKES

NO_MODEL = Path("none")
HOSTING_ROUNDS = num_rounds_of("hosting")
SAMPLING = Sampling(max_tokens=64, ignore_eos=True)
SETTINGS: dict[str, Any] = {"engine": "fake", "engine_settings": {"step_s": 0.002}, "pool_bytes": 0}
WITH_A_MODEL = ("pool", "draft server", "memory")
"""Words in the names of faults of what these instances do not have."""


def without_a_model(strikes: dict[str, Any]) -> dict[str, Any]:
    return {name: strike for name, strike in strikes.items() if not any(word in name for word in WITH_A_MODEL)}


def test_no_fault_of_hosting_changes_a_token() -> None:
    expected = undisturbed(NO_MODEL, SAMPLING, **SETTINGS)
    tally = Tally("hosting")
    while tally.goes_on(HOSTING_ROUNDS):
        dials = tally.rounds // ROUNDS_PER_FLEET % 2
        options = {"strikes": without_a_model(LINK_STRIKES if dials else STRIKES), "sampling": SAMPLING}
        options["num_rounds"] = min(ROUNDS_PER_FLEET, HOSTING_ROUNDS - tally.rounds)
        with over_tcp() if dials else proxied():
            asyncio.run(disturbed_rounds(a_rollout(NO_MODEL, **SETTINGS), NO_MODEL, expected, tally, **options))
    tally.finish()
