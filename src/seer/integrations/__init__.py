"""Adapters for trainers; each imports its trainer only when used."""
