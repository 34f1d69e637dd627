# SPDX-License-Identifier: Apache-2.0
"""Pack vLLM's `suffix` drafter for a GPU machine that reaches no package index: a part of arctic-inference, alone.

    python benchmarks/vllm/pack_suffix.py [--out .suffix] [--python python3.12]

vLLM's `suffix` method imports only `arctic_inference.suffix_decoding`; the whole package needs CUDA to build. So that
extension alone is built for the machine's Python and put beside its two Python files. With OUT on PYTHONPATH,
`gpu.py --drafters plain,suffix` finds it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "drafting"))

from peers import cache_folder, cmake, load_arctic


def main() -> None:
    """Build for the other Python, then gather."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(".suffix"))
    parser.add_argument("--python", default="python3.12", help="of the GPU machine (%(default)s)")
    args = parser.parse_args()
    load_arctic()  # fetches the source on first use
    (source,) = cache_folder().glob("arctic_inference-*/")
    build = cache_folder() / "build-suffix"
    executable = shutil.which(args.python) or args.python
    configure = [cmake(), "-S", str(source / "csrc" / "suffix_decoding"), "-B", str(build)]
    configure += ["-DCMAKE_BUILD_TYPE=Release", f"-DPython_EXECUTABLE={executable}"]
    # CMake asks that Python for nanobind. This Python has it, and it is only headers and sources.
    import nanobind

    environment = {**os.environ, "PYTHONPATH": str(Path(nanobind.__file__).parents[1])}
    subprocess.run(configure, check=True, stdout=subprocess.DEVNULL, env=environment)
    subprocess.run([cmake(), "--build", str(build)], check=True, stdout=subprocess.DEVNULL)
    shutil.rmtree(args.out, ignore_errors=True)
    package = args.out / "arctic_inference"
    (package / "suffix_decoding").mkdir(parents=True)
    shutil.copy(source / "arctic_inference" / "__init__.py", package)
    for name in ("__init__.py", "cache.py"):
        shutil.copy(source / "arctic_inference" / "suffix_decoding" / name, package / "suffix_decoding")
    (extension,) = build.glob("_C*.so")
    shutil.copy(extension, package / "suffix_decoding")


if __name__ == "__main__":
    main()
