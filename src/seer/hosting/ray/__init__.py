# SPDX-License-Identifier: Apache-2.0
"""Instances on the nodes of a Ray cluster.

Ray places an instance, starts its process and tells of deaths. Chunks, tokens and heartbeats go over our own
connections (seer.hosting.remote): a call of Ray costs many times as much, and Ray does not notice a stopped process, or
a cut link within a minute.

    driver ── RayHosting ── Listener, one for all instances
                        ├── NodeAgent, one actor per node: weights in its shared memory, its part of the pool
                        └── RayLauncher ── per instance: a placement group, and in it an InstanceHost (an actor)
                                           that starts `seer.hosting.child`, which dials in

Invariants
  1. Every process on a node ends with its actor, and every actor with the driver: Ray ends the actors of a driver that
     is gone, and an instance's process ends with its actor, its connection or its lease, whichever is first.
  2. `close` leaves no actor, placement group, process or shared memory of the fleet on any node that can be reached.
"""
