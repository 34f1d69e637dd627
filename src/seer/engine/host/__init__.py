"""Instances in processes of their own: pinned, watched, restarted."""

from seer.engine.host.options import HostOptions, InstanceSpec, hosting_for
from seer.engine.host.process import ProcessInstance
from seer.engine.host.supervisor import Supervisor

__all__ = ["HostOptions", "InstanceSpec", "ProcessInstance", "Supervisor", "hosting_for"]
