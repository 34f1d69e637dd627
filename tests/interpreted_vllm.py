# SPDX-License-Identifier: Apache-2.0
"""Lets the modules of vLLM's newest runner be imported on a CPU, with real Triton; import this before them.

For tests that run under Triton's interpreter. On a CPU vLLM puts empty modules in the place of Triton.
"""

from __future__ import annotations

import importlib
import warnings
from types import SimpleNamespace
from typing import Any

triton: Any = importlib.import_module("triton")  # no package of this environment: mypy does not find it
tl: Any = importlib.import_module("triton.language")


@triton.jit
def log1p(x):  # type: ignore[no-untyped-def]
    """CUDA's own function, which releases before 0.32 call, is not interpreted."""
    return tl.log(1 + x)


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's imports use what PyTorch is about to drop
    triton_utils: Any = importlib.import_module("vllm.triton_utils")
    triton_utils.triton, triton_utils.tl, triton_utils.tldevice = triton, tl, SimpleNamespace(log1p=log1p)
    triton_utils.HAS_TRITON = True
    importlib.import_module("vllm.v1.worker.gpu.spec_decode.rejection_sampler")
    importlib.import_module("vllm.v1.worker.gpu.spec_decode.speculator")
