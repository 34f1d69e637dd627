# SPDX-License-Identifier: Apache-2.0
"""A plug-in of pytest: verl's own tests get Seer's agent-loop worker in place of verl's."""

import verl.experimental.agent_loop as package
import verl.experimental.agent_loop.agent_loop as module

from seer.integrations.verl.agent_loops import SeerAgentLoopWorker

module.AgentLoopWorker = package.AgentLoopWorker = SeerAgentLoopWorker
