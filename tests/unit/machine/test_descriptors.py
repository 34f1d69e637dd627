# SPDX-License-Identifier: Apache-2.0
"""The limit on open files and connections, in processes of their own."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCENARIO = """
import asyncio, resource
from seer.hosting.remote.listener import Listener
from seer.machine.descriptors import allow_descriptors

def soft():
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]

async def listen():
    listener = Listener("127.0.0.1")
    await listener.start()
    await listener.close()

resource.setrlimit(resource.RLIMIT_NOFILE, (64, 512))
{act}
print(soft())
"""


@pytest.mark.parametrize(
    ("act", "limit"),
    [
        ("asyncio.run(listen())", 512),
        ("assert allow_descriptors(100) == 100", 100),
        ("assert allow_descriptors(32) == 64", 64),
    ],
)
def test_a_driver_may_open_as_many_connections_as_the_system_lets_it(act: str, limit: int) -> None:
    words = [sys.executable, "-c", SCENARIO.format(act=act)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == (str(limit), "")
