# SPDX-License-Identifier: Apache-2.0
"""Pack what gpu.py needs beyond vLLM and benchmarks/grpo/pack.py, for a GPU machine that reaches no package index.

    python benchmarks/verl/pack.py [--out .verl]

Run it on a machine with a package index. It downloads verl, Ray and their dependencies (for Python 3.12 on Linux
x86_64) and writes parts of at most 55 MiB: OUT/1 ... OUT/N. Copy each part to the GPU machine, outside the checkout:
`mkdir -p ~/gpu && cp .verl/1/* ~/gpu/`. Then, once,

    bash ~/gpu/unpack-verl.sh                                    # makes ~/gpu/site-verl
    export PYTHONPATH=~/gpu/site-verl:~/gpu/site-no-trl:~/gpu/site HF_HUB_OFFLINE=1 RAY_USAGE_STATS_ENABLED=0
    python benchmarks/verl/gpu.py --model FOLDER --out DIR

The wheels of benchmarks/grpo/pack.py, unpacked before, bring pandas, pyarrow, datasets and Seer itself. TRL is left out
of them (site-no-trl): where verl 0.9.1 finds it, it imports a class that TRL 1.16 no longer has. verl 0.9.1 wants
transformers below 5.11, so that is packed too and stands before the machine's own.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from wheel_parts import download, fresh_folder, write_parts

NEEDED = (
    *("verl==0.9.1", "TransferQueue==0.1.11", "ray==2.60.0", "transformers==5.10.4", "tensordict==0.10.0"),
    *("tokenizers==0.22.2", "huggingface-hub==1.33.0"),  # newer ones are refused by that transformers
    *("peft==0.21.2", "accelerate", "torchdata", "hydra-core==1.3.8", "codetiming", "pybind11"),
    "omegaconf==2.3.1",  # newer ones are refused by that Hydra
    # of tensordict
    *("pyvers==0.1.0", "orjson", "cloudpickle", "importlib-metadata", "lazy-importer", "zipp"),
    # of Ray
    *("msgpack", "click", "filelock", "jsonschema", "psutil", "protobuf", "prometheus-client", "py-spy", "smart-open"),
    *("aiohttp-cors", "colorful", "opencensus", "opencensus-context", "opentelemetry-exporter-prometheus", "wrapt"),
    *("google-api-core", "google-auth", "googleapis-common-protos", "proto-plus", "pyasn1", "pyasn1-modules", "rsa"),
    *("cachetools", "virtualenv", "distlib", "platformdirs", "python-discovery"),
)
BUILT = ("antlr4-python3-runtime==4.9.3",)
"""Of Hydra; pure Python without a wheel."""
SERVERS = "site-verl/ray/core/src/ray/gcs/gcs_server site-verl/ray/core/src/ray/raylet/raylet"
MORE = f"""\
chmod +x {SERVERS}  # zipfile drops modes
mkdir -p site-no-trl
for part in site-trl/*; do
  case $part in */trl|*/trl-*) ;; *) ln -sfn "$PWD/$part" site-no-trl/ ;; esac
done
"""


def main() -> None:
    """Download, build, cut into parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(".verl"))
    args = parser.parse_args()
    work = fresh_folder(args.out)
    download(work, NEEDED)
    subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(work), *BUILT], check=True)
    write_parts(work, "verl", "benchmarks/verl/pack.py", more=MORE)


if __name__ == "__main__":
    main()
