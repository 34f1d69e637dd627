# SPDX-License-Identifier: Apache-2.0
"""The production rollout loop in virtual time, over simulated instances."""
