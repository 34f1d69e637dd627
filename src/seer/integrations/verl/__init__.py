# SPDX-License-Identifier: Apache-2.0
"""Seer as a rollout of verl: `actor_rollout_ref.rollout.name=seer`.

verl loads `plugin.py` in every process, by the entry point `verl.plugins`. It registers the rollout `seer`; all else is
imported when that rollout is used.

    trainer's process     replica.py         starts and restarts the servers; agent_loops.py: the manager
    server actors         server.py          verl's vLLM server with our instance around its engine
    driver actor          driver.py          the session: one scheduler for all replicas
    agent-loop actors     agent_loops.py     hand every request to the driver, with its group
    training ranks        weights.py         verl's weight sync, which survives the death of a server

docs/use-in-verl.md is for users.
"""
