"""Instances: the protocol, our PyTorch engine, and where an instance lives."""
