# SPDX-License-Identifier: Apache-2.0
"""Pack what gpu.py needs beyond a GPU machine's own packages, for one that reaches no package index.

    python benchmarks/grpo/pack.py [--out .trl] [--python python3.12]

Run it on a machine with a package index. It downloads TRL and its dependencies (for Python 3.12 on Linux x86_64),
builds a wheel of this tree with its native modules (this needs Python 3.12 with its headers), and writes parts of at
most 55 MiB: OUT/1 ... OUT/N. Copy each part to the GPU machine, outside the checkout:
`mkdir -p ~/gpu && cp .trl/1/* ~/gpu/`. Then, once,

    bash ~/gpu/unpack-trl.sh                                     # makes ~/gpu/site-trl
    export PYTHONPATH=~/gpu/site-trl:~/gpu/site HF_HUB_OFFLINE=1
    python benchmarks/grpo/gpu.py --model FOLDER --out DIR

The GPU machine must have torch, transformers >= 5, accelerate, numpy, requests, pyyaml, filelock, tqdm, jinja2 and
packaging. Versions are pinned to those that this benchmark was tested with.
"""

from __future__ import annotations

import argparse
import io
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

PART_BYTES = 55 << 20
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
    "rich",
    "markdown-it-py",
    "mdurl",
    "pygments",
    # for tests/gpu
    "pytest",
    "pluggy",
    "iniconfig",
)
PLATFORMS = (*(f"manylinux_2_{n}_x86_64" for n in (35, 34, 31, 28, 27, 24, 17)), "manylinux2014_x86_64", "any")
UNPACK = """\
#!/usr/bin/env bash
# Build ~/gpu/site-trl from the parts that benchmarks/grpo/pack.py made.
set -euo pipefail
cd ~/gpu
mkdir -p trl-wheels site-trl
cat trl.[0-9][0-9] | tar x -C trl-wheels
python3 - <<'P'
import zipfile
from pathlib import Path
for wheel in sorted(Path("trl-wheels").glob("*.whl")):
    zipfile.ZipFile(wheel).extractall("site-trl")
P
rm -rf trl-wheels trl.[0-9][0-9]
echo "ready: PYTHONPATH=$HOME/gpu/site-trl"
"""


def main() -> None:
    """Download, build, cut into parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(".trl"))
    parser.add_argument("--python", default="python3.12", help="builds the wheel of this tree (%(default)s)")
    args = parser.parse_args()
    work = args.out / "work"
    shutil.rmtree(args.out, ignore_errors=True)
    work.mkdir(parents=True)
    download(work)
    subprocess.run([args.python, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(work), str(ROOT)], check=True)
    wheels = sorted(work.glob("*.whl"))
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for wheel in wheels:
            tar.add(wheel, wheel.name)
    content = buffer.getvalue()
    parts = [content[at : at + PART_BYTES] for at in range(0, len(content), PART_BYTES)]
    for number, part in enumerate(parts, 1):
        folder = args.out / str(number)
        folder.mkdir()
        (folder / f"trl.{number:02d}").write_bytes(part)
    (args.out / str(len(parts)) / "unpack-trl.sh").write_text(UNPACK)
    shutil.rmtree(work)
    sys.stdout.write(f"{len(wheels)} wheels, {len(content) / 2**20:.0f} MiB in {len(parts)} parts under {args.out}/\n")


def download(folder: Path) -> None:
    """The wheels for Python 3.12, also if another Python runs this script."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", "3.12"]
    for platform in PLATFORMS:
        command += ["--platform", platform]
    subprocess.run([*command, "-d", str(folder), *NEEDED], check=True)


if __name__ == "__main__":
    main()
