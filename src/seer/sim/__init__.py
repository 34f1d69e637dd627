"""The production rollout loop in virtual time, over instances that are cost models."""
