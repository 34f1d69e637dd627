"""Shared by all tests: puts `builders` on the path and makes hypothesis repeatable on a busy machine."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "seer",
    deadline=None,  # a shared machine is slow at random
    derandomize=True,  # the same examples everywhere: a failure in CI is a failure here
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("seer")
