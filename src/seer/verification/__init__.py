"""Scores responses again with a plain forward pass."""
