# SPDX-License-Identifier: Apache-2.0
"""Shared by all tests: puts `builders` on the path and makes hypothesis repeatable on a busy machine."""

import os

# Some virtual machines advertise AMX and trap its instructions, which kills a bfloat16 product. oneDNN reads this when
# torch is first imported; child processes inherit it.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

from hypothesis import HealthCheck, settings

settings.register_profile(
    "seer",
    deadline=None,  # a shared machine is slow at random
    derandomize=True,  # the same examples everywhere: a failure in CI is a failure here
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("seer")
