"""The embedded engine: a compact PyTorch inference engine, and the specification of what an instance is."""

from seer.engine.local.instance import LocalInstance

__all__ = ["LocalInstance"]
