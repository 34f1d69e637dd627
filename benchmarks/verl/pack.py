# SPDX-License-Identifier: Apache-2.0
"""Pack what gpu.py needs beyond vLLM and benchmarks/grpo/pack.py, for a GPU machine that reaches no package index.

    python benchmarks/verl/pack.py [--out .verl]

Run it on a machine with a package index. It downloads verl, Ray and their dependencies (for Python 3.12 on Linux
x86_64) and writes parts of at most 55 MiB: OUT/1 ... OUT/N. Copy each part to the GPU machine, outside the checkout:
`mkdir -p ~/gpu && cp .verl/1/* ~/gpu/`. Then, once,

    bash ~/gpu/unpack-verl.sh                                    # makes ~/gpu/site-verl
    export PYTHONPATH=~/gpu/site-verl:~/gpu/site-trl:~/gpu/site HF_HUB_OFFLINE=1 RAY_USAGE_STATS_ENABLED=0
    python benchmarks/verl/gpu.py --model FOLDER --out DIR

The wheels of benchmarks/grpo/pack.py bring pandas, pyarrow, datasets and Seer itself. verl 0.9.1 wants transformers
below 5.11, so that is packed too and stands before the machine's own.
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
NEEDED = (
    *("verl==0.9.1", "TransferQueue==0.1.11", "ray==2.60.0", "transformers==5.10.4", "tensordict==0.10.0"),
    *("tokenizers==0.22.2", "huggingface-hub==1.33.0"),  # newer ones are refused by that transformers
    *("peft==0.21.2", "accelerate", "torchdata", "hydra-core==1.3.8", "omegaconf", "codetiming", "pybind11"),
    # of tensordict
    *("pyvers", "orjson", "cloudpickle", "importlib-metadata", "zipp"),
    # of Ray
    *("msgpack", "click", "filelock", "jsonschema", "psutil", "protobuf", "prometheus-client", "py-spy", "smart-open"),
    *("aiohttp-cors", "colorful", "opencensus", "opencensus-context", "opentelemetry-exporter-prometheus", "wrapt"),
    *("google-api-core", "google-auth", "googleapis-common-protos", "proto-plus", "pyasn1", "pyasn1-modules", "rsa"),
    *("cachetools", "virtualenv", "distlib", "platformdirs"),
)
BUILT = ("antlr4-python3-runtime==4.9.3",)
"""Of Hydra; pure Python without a wheel."""
PLATFORMS = (*(f"manylinux_2_{n}_x86_64" for n in (35, 34, 31, 28, 27, 24, 17)), "manylinux2014_x86_64", "any")
UNPACK = """\
#!/usr/bin/env bash
# Build ~/gpu/site-verl from the parts that benchmarks/verl/pack.py made.
set -euo pipefail
cd ~/gpu
mkdir -p verl-wheels site-verl
cat verl.[0-9][0-9] | tar x -C verl-wheels
python3 - <<'P'
import zipfile
from pathlib import Path
for wheel in sorted(Path("verl-wheels").glob("*.whl")):
    zipfile.ZipFile(wheel).extractall("site-verl")
P
chmod +x site-verl/ray/core/src/ray/gcs/gcs_server site-verl/ray/core/src/ray/raylet/raylet  # zipfile drops modes
rm -rf verl-wheels verl.[0-9][0-9]
echo "ready: PYTHONPATH=$HOME/gpu/site-verl"
"""


def main() -> None:
    """Download, build, cut into parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(".verl"))
    args = parser.parse_args()
    work = args.out / "work"
    shutil.rmtree(args.out, ignore_errors=True)
    work.mkdir(parents=True)
    download(work)
    wheels = sorted(work.glob("*.whl"))
    content = packed(wheels)
    parts = [content[at : at + PART_BYTES] for at in range(0, len(content), PART_BYTES)]
    for number, part in enumerate(parts, 1):
        folder = args.out / str(number)
        folder.mkdir()
        (folder / f"verl.{number:02d}").write_bytes(part)
    (args.out / str(len(parts)) / "unpack-verl.sh").write_text(UNPACK)
    shutil.rmtree(work)
    sys.stdout.write(f"{len(wheels)} wheels, {len(content) / 2**20:.0f} MiB in {len(parts)} parts under {args.out}/\n")


def packed(wheels: list[Path]) -> bytes:
    """All of them in one archive."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for wheel in wheels:
            tar.add(wheel, wheel.name)
    return buffer.getvalue()


def download(folder: Path) -> None:
    """The wheels for Python 3.12, also if another Python runs this script."""
    pip = [sys.executable, "-m", "pip"]
    command = [*pip, "download", "-q", "--no-deps", "--only-binary=:all:", "--python-version", "3.12"]
    for platform in PLATFORMS:
        command += ["--platform", platform]
    subprocess.run([*command, "-d", str(folder), *NEEDED], check=True)
    subprocess.run([*pip, "wheel", "-q", "--no-deps", "-w", str(folder), *BUILT], check=True)


if __name__ == "__main__":
    main()
