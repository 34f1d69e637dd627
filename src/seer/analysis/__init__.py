"""Explains, replays and compares finished runs."""
