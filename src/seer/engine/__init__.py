"""Instances: the protocol, the embedded PyTorch engine, vLLM, and a fake."""
