"""Schedulers: which request runs next, where, and for how many tokens."""
