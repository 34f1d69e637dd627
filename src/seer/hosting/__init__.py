# SPDX-License-Identifier: Apache-2.0
"""Runs each instance in its own process: starts it, pins it to a core, watches it, restarts it."""

from seer.engine.prepare import InstanceSpec
from seer.hosting.process import ProcessInstance
from seer.hosting.supervisor import Supervisor

__all__ = ["InstanceSpec", "ProcessInstance", "Supervisor"]
