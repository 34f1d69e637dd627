# SPDX-License-Identifier: Apache-2.0
"""The name of the driver actor, by which servers, replicas and agent loops of one verl job find it."""

DRIVER = "seer_driver"
"""Ray keeps names apart by job."""
