"""Verifies responses: scores them again with a plain forward pass."""
