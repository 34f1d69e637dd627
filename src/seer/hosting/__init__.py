"""Instances in processes of their own: pinned, watched, restarted."""

from seer.engine.prepare import InstanceSpec
from seer.hosting.options import HostOptions, hosting_for
from seer.hosting.process import ProcessInstance
from seer.hosting.supervisor import Supervisor

__all__ = ["HostOptions", "InstanceSpec", "ProcessInstance", "Supervisor", "hosting_for"]
