# SPDX-License-Identifier: Apache-2.0
"""Pack what gpu.py needs beyond a GPU machine's own packages, for one that reaches no package index.

    python benchmarks/grpo/pack.py [--out .trl] [--python python3.12]

Run it on a machine with a package index. It downloads TRL and its dependencies (for Python 3.12 on Linux x86_64),
builds a wheel of this tree with its native modules (this needs Python 3.12 with its headers), and writes parts of at
most 55 MiB: OUT/1 ... OUT/N. Copy each part to the GPU machine, outside the checkout:
`mkdir -p ~/gpu && cp .trl/1/* ~/gpu/`. Then, once,

    bash ~/gpu/unpack-trl.sh                                     # makes ~/gpu/site-trl
    checkout=$PWD; (cd ~/gpu/site-trl && find seer -name '*.so' -exec cp --parents {} $checkout/src/ \\;)
    python3 -m compileall -q -j 16 ~/gpu/site ~/gpu/site-trl     # or the first imports do it, one file after the other
    export PYTHONPATH=~/gpu/site-trl:~/gpu/site HF_HUB_OFFLINE=1
    python benchmarks/grpo/gpu.py --model FOLDER --out DIR

gpu.py runs the checkout's code, which lacks the native modules; so they are copied from the wheel.

The GPU machine must have torch, transformers >= 5, accelerate, numpy, requests, pyyaml, filelock, tqdm, jinja2 and
packaging. Versions are pinned to those that this benchmark was tested with.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from wheel_parts import download, fresh_folder, write_parts

ROOT = Path(__file__).resolve().parents[2]
NEEDED = (
    "trl==1.16.0",
    "datasets==5.2.0",
    "pyarrow==26.0.1",
    "pandas==3.1.1",
    "python-dateutil",
    "six",
    "tzdata",
    "dill",
    "multiprocess",
    "xxhash",
    "fsspec",
    "aiohttp",
    "aiohappyeyeballs",
    "aiosignal",
    "attrs",
    "frozenlist",
    "multidict",
    "propcache",
    "yarl",
    "httpx",
    "httpcore",
    "h11",
    "anyio",
    "idna",
    "certifi",
    # Seer's own
    "msgspec",
    "pyzmq",
    "tomli-w",
    "rich",
    "markdown-it-py",
    "mdurl",
    "pygments",
    # for tests/gpu
    "pytest",
    "pluggy",
    "iniconfig",
)


def main() -> None:
    """Download, build, cut into parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(".trl"))
    parser.add_argument("--python", default="python3.12", help="builds the wheel of this tree (%(default)s)")
    args = parser.parse_args()
    work = fresh_folder(args.out)
    download(work, NEEDED)
    subprocess.run([args.python, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(work), str(ROOT)], check=True)
    write_parts(work, "trl", "benchmarks/grpo/pack.py")


if __name__ == "__main__":
    main()
