# SPDX-License-Identifier: Apache-2.0
"""Instances: the protocol, the embedded PyTorch engine, vLLM, and a fake."""
