# SPDX-License-Identifier: Apache-2.0
"""Fetch and build the suffix extension of arctic-inference, which our drafts are compared with.

Its release is source only and its build needs torch and protobuf; the suffix tree needs neither. So the source is
downloaded with pip (an empty `torch` module satisfies the import in its setup script) and only that CMake target is
built, with the installed nanobind and the project's own optimisation flags. Everything is kept in a cache folder.
"""

import importlib.util
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from types import ModuleType

VERSION = "0.3.0"


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "seer-bench" / f"arctic-{VERSION}"


def cmake() -> str:
    """The cmake of this Python's environment, or else of the system."""
    beside = Path(sys.executable).parent / "cmake"
    return str(beside) if beside.exists() else "cmake"


def load_arctic() -> ModuleType:
    """Return the module holding arctic's SuffixTree, building it on first use."""
    folder = cache_folder()
    built = sorted((folder / "build").glob("_C*.so"))
    if not built:
        _build(folder)
        built = sorted((folder / "build").glob("_C*.so"))
    spec = importlib.util.spec_from_file_location("_C", built[0])
    assert spec is not None, f"cannot load {built[0]}"
    assert spec.loader is not None, f"cannot load {built[0]}"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _build(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as stubs:
        (Path(stubs) / "torch.py").write_text("")
        pip = [sys.executable, "-m", "pip"]
        # Its setup script needs `bdist_wheel`, which setuptools has since 70.1; a new venv may have an older one.
        subprocess.run([*pip, "install", "-q", "--target", stubs, "setuptools>=70.1"], check=True)
        download = [*pip, "download", "-q", "--no-deps", "--no-binary", ":all:", "--no-build-isolation"]
        download += ["--dest", str(folder), f"arctic-inference=={VERSION}"]
        subprocess.run(download, check=True, env={**os.environ, "PYTHONPATH": stubs})
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    (source,) = folder.glob("arctic_inference-*/csrc/suffix_decoding")
    build = folder / "build"
    configure = [cmake(), "-S", str(source), "-B", str(build), "-DCMAKE_BUILD_TYPE=Release"]
    subprocess.run([*configure, f"-DPython_EXECUTABLE={sys.executable}"], check=True, stdout=subprocess.DEVNULL)
    subprocess.run([cmake(), "--build", str(build)], check=True, stdout=subprocess.DEVNULL)
