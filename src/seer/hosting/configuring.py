# SPDX-License-Identifier: Apache-2.0
"""One command for all instances of a fleet: those that are up carry it out, the others after their restart.

Invariants
  1. An instance that alone cannot do what the others did is ended, and does it after its restart.
  2. After weights that were refused, or whose sender has given up, every instance has the weights before them, or is
     ended and restarted with those: no two hold different weights under one version.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence

from seer.errors import DeadlineExceeded, InstanceError
from seer.hosting.messages import Command, UpdateWeights
from seer.hosting.process import ProcessInstance


async def send_to_all(instances: Sequence[ProcessInstance], command: Command) -> None:
    """Have every instance carry the command out; raises what an instance answered that is not its trouble alone."""
    up = [instance for instance in instances if instance.is_up]
    before = {instance: instance.configured(type(command)) for instance in instances}
    for instance in instances:
        if instance not in up:
            instance.configure_after_restart(command)
    refusing: list[ProcessInstance] = []
    try:
        results = await asyncio.gather(*(instance.configure(command) for instance in up), return_exceptions=True)
        failed = {one: error for one, error in zip(up, results, strict=True) if isinstance(error, BaseException)}
        refusing = [one for one, error in failed.items() if one.is_up and not isinstance(error, DeadlineExceeded)]
        _settle(command, failed, num_up=len(up))
    except BaseException:
        if isinstance(command, UpdateWeights):
            _take_back(before, refusing)
        raise


def _settle(command: Command, failed: Mapping[ProcessInstance, BaseException], *, num_up: int) -> None:
    for instance, error in failed.items():
        if instance.is_up:
            is_its_own = isinstance(error, InstanceError | DeadlineExceeded) and len(failed) < num_up
            if not is_its_own:
                raise error
            instance.give_up(str(error))  # as one without memory for new weights: the others have taken them
        instance.configure_after_restart(command)  # it was lost during the call, or is now


def _take_back(before: Mapping[ProcessInstance, Command | None], refusing: Collection[ProcessInstance]) -> None:
    """Weights that not all have taken: end those that have them, or may have, and leave those that have refused."""
    for instance, earlier in before.items():
        instance.take_back(UpdateWeights, earlier)
        if instance not in refusing:
            instance.give_up("it may have new weights that the fleet did not take")
