# SPDX-License-Identifier: Apache-2.0
"""Where verl is installed: what importlib.metadata says of vLLM, and verl's platform for CPUs. Elsewhere nothing.

verl asks for the version of a package named vllm; the build for CPUs has another name.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from pathlib import Path

PLUGINS = Path(__file__).parent / "plugins"
PACKAGE = "vllm-0.31.0+cpu.dist-info"

if importlib.util.find_spec("verl") is not None:
    _made = tempfile.TemporaryDirectory(prefix="seer-vllm-name-")
    package = Path(_made.name) / PACKAGE
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.31.0+cpu\n")
    sys.path[:0] = [str(PLUGINS), _made.name]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(PLUGINS), _made.name])
    os.environ.setdefault("VERL_USE_EXTERNAL_MODULES", "verl_cpu")
