# SPDX-License-Identifier: Apache-2.0
"""Shared by all tests: puts `builders` on the path and makes hypothesis repeatable on a busy machine."""

import os
import signal

# Some virtual machines advertise AMX and trap its instructions, which kills a bfloat16 product. oneDNN reads this when
# torch is first imported; child processes inherit it.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

# A shell ignores Ctrl-C for what it runs in the background, and nohup ignores SIGHUP. Children inherit that: those that
# tests interrupt would go on.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

from hypothesis import HealthCheck, settings

settings.register_profile(
    "seer",
    deadline=None,  # a shared machine is slow at random
    derandomize=True,  # the same examples everywhere: a failure in CI is a failure here
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("seer")
