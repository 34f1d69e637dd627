"""The production rollout loop in virtual time, over simulated instances."""
