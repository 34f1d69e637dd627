"""Trainers' adapters: thin, lazily imported."""
