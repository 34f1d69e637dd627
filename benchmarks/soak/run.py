# SPDX-License-Identifier: Apache-2.0
"""A soak: rollouts with weight updates through one process; memory, descriptors, threads, shared memory after each.

    python benchmarks/soak/run.py --rollouts 200 --out docs/assets/soak.svg > soak.jsonl

200 rollouts of 100 requests on two CPU instances of the tiny model, each rollout after an update of the weights through
shared memory. One line of JSON per rollout; the last line says how much each measure grew over the second half.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from seer import HostingConfig, Rollout, Sampling
from seer.engine.local.tiny import make_tiny_model
from seer.report.svg import Frame, colour, document, moved
from stamp import print_stamp

PROMPTS = [[3 + i, 7, 11, 5 + i] for i in range(20)]
SAMPLES = 5
WIDTH, HEIGHT, HEAD = 960, 170, 40
MEASURES = {
    "driver_mib": "driver: memory (MiB)",
    "children_mib": "instances and draft server: memory (MiB)",
    "shared_mib": "shared memory (MiB)",
    "descriptors": "descriptors of all processes",
    "threads": "threads of all processes",
}


def processes() -> list[int]:
    """This process and its children."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [os.getpid(), *map(int, children)]


def resident_mib(pids: Iterable[int]) -> float:
    """Memory of their own: without shared memory, which is counted apart."""
    pages = 0
    for pid in pids:
        _, resident, shared, *_ = map(int, Path(f"/proc/{pid}/statm").read_text().split())
        pages += resident - shared
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def shared_mib() -> float:
    """What the files that this process holds open in shared memory take, and the folders beside their locks."""
    blocks = 0
    for number in os.listdir("/proc/self/fd"):
        try:
            path = Path(os.readlink(f"/proc/self/fd/{number}"))
            if path.is_relative_to("/dev/shm"):
                folder = path.with_name(path.name.removesuffix(".folder.lock"))
                files = [path, *(folder.iterdir() if folder.is_dir() else ())]
                blocks += sum(file.stat().st_blocks for file in files)
        except OSError:  # closed since
            continue
    return blocks * 512 / 2**20


def measure() -> dict[str, float]:
    """All measures, now."""
    pids = processes()
    return {
        "driver_mib": resident_mib(pids[:1]),
        "children_mib": resident_mib(pids[1:]),
        "shared_mib": shared_mib(),
        "descriptors": sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids),
        "threads": sum(len(os.listdir(f"/proc/{pid}/task")) for pid in pids),
    }


async def soak(num_rollouts: int, num_tokens: int) -> list[dict[str, float]]:
    """Roll out again and again; a sample after each rollout."""
    samples = []
    with tempfile.TemporaryDirectory() as home:
        model = make_tiny_model(Path(home) / "tiny")
        weights: dict[str, Any] = load_file(model / "model.safetensors")
        hosting = HostingConfig(pin_cores=False)
        settings: dict[str, Any] = {"instances": 2, "kv_blocks": 256, "max_num_seqs": 16, "pool_bytes": 16 << 20}
        async with Rollout(model, hosting=hosting, chunk_tokens=16, **settings) as rollout:
            for number in range(num_rollouts):
                await rollout.update_weights(weights)
                sampling = Sampling(max_tokens=num_tokens)
                async for _ in rollout.run(PROMPTS, n=SAMPLES, sampling=sampling, seed=number):
                    pass
                samples.append(measure() | {"requests": (number + 1) * len(PROMPTS) * SAMPLES})
                sys.stdout.write(json.dumps(samples[-1]) + "\n")
                sys.stdout.flush()
    return samples


def growth(samples: list[dict[str, float]]) -> dict[str, float]:
    """Of each measure: its mean over the last quarter over that of the second one."""
    quarter = len(samples) // 4
    means = {
        name: [
            sum(one[name] for one in part) / len(part) for part in (samples[quarter : 2 * quarter], samples[-quarter:])
        ]
        for name in MEASURES
    }
    return {name: round(after / before, 4) for name, (before, after) in means.items()}


def plot(samples: list[dict[str, float]], path: Path) -> None:
    """A panel per measure over the requests."""
    panels = []
    for place, (name, label) in enumerate(MEASURES.items()):
        peak = 1.15 * max(one[name] for one in samples)
        frame = Frame(WIDTH, HEIGHT, samples[-1]["requests"], peak)
        points = " ".join(f"{frame.x(one['requests']):.1f},{frame.y(one[name]):.1f}" for one in samples)
        line = f'<polyline points="{points}" fill="none" stroke="{colour(place)}" stroke-width="1.6"/>'
        panels.append(moved(HEAD + place * HEIGHT, frame.axes("", label, num_y_ticks=3) + line))
    title = f"{samples[-1]['requests']:,.0f} requests in {len(samples)} rollouts, each after new weights; over requests"
    height = HEAD + len(MEASURES) * HEIGHT
    path.write_text(document(WIDTH, height, title, "".join(panels)))


def main() -> None:
    """Soak, print, plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--out", type=Path, help="SVG file of the curves")
    args = parser.parse_args()
    print_stamp(args)
    samples = asyncio.run(soak(args.rollouts, args.max_tokens))
    if args.out is not None:
        plot(samples, args.out)
    print(json.dumps({"growth": growth(samples)}))


if __name__ == "__main__":
    main()
