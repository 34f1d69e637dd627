# SPDX-License-Identifier: Apache-2.0
"""The embedded engine on this machine's CPU: speed against transformers, start to first token, losslessness.

    python benchmarks/engine/run.py [--quick]

Prints what results.md records. The comparison needs `pip install transformers`. gpu.py measures on a GPU.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]

from stamp import print_stamp

FIRST_TOKEN = """
import time; started = time.perf_counter()
import asyncio
from seer.engine.local import LocalInstance
from seer.engine.local.models_get import get_model
from seer.engine.local.tokenizer import Tokenizer
from seer.types import Chunk, Sampling

async def main():
    folder = get_model("smollm2")
    prompt = Tokenizer(folder).chat([{"role": "user", "content": "What is the capital of France?"}])
    instance, first = LocalInstance(0, folder, kv_blocks=64, stream_tokens=1), asyncio.Event()
    await instance.start(lambda output: first.set())
    instance.submit(Chunk(request=0, group=0, attempt=1, num_prompt_tokens=len(prompt), num_generated_tokens=0,
                          max_tokens=8, sampling=Sampling(max_tokens=8), seed=0, weights_version=0, prompt=prompt))
    await asyncio.wait_for(first.wait(), 300)
    wall_s, cpu_s = time.perf_counter() - started, time.process_time()
    print(f"start to first token: {wall_s:.1f} s wall, {cpu_s:.1f} s CPU", flush=True)
    await instance.close()

asyncio.run(main())
"""


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="one run of each, fewer tokens")
    args = options.parse_args()
    print_stamp(args)
    python = [sys.executable]
    environment = {"PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"}
    size = ["--new-tokens", "128", "--repeat", "1"] if args.quick else ["--new-tokens", "256", "--repeat", "3"]
    for command in (
        [*python, "-m", "seer", "model", "get", "smollm2"],
        [*python, "-c", FIRST_TOKEN],
        [*python, "-m", "seer", "bench", "engine", "smollm2", *size],
        [*python, str(ROOT / "benchmarks/engine/lossless.py"), *(["--tokens", "40"] if args.quick else [])],
    ):
        subprocess.run(command, check=True, env=dict(os.environ) | environment)
    return 0


if __name__ == "__main__":
    sys.exit(main())
