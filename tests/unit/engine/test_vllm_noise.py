# SPDX-License-Identifier: Apache-2.0
"""The noise that `seer verify` repeats is what vLLM 0.26 draws with Triton; interpreted here."""

from __future__ import annotations

import os

import numpy as np
import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton", reason="Triton is not installed")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("set TRITON_INTERPRET=1 to interpret the kernels", allow_module_level=True)

tl = pytest.importorskip("triton.language")

from seer.verification.noise import LEAST_UNIFORM, vllm_noise

WIDTH = 128


@triton.jit  # type: ignore[untyped-decorator]
def drawn(seed_ptr, position_ptr, out_ptr, COUNT: tl.constexpr):  # type: ignore[name-defined,no-untyped-def]
    """As in vllm/v1/worker/gpu/sample/gumbel.py, without its last logarithms."""
    token = tl.arange(0, COUNT)
    inner = tl.randint(tl.load(seed_ptr), tl.load(position_ptr))
    tl.store(out_ptr + token, tl.rand(inner, token))


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (7, 1), (2**31 + 5, 4095), (2**62 + 12345, 131071)])
def test_the_noise_is_tritons(seed: int, position: int) -> None:
    uniform = torch.empty(WIDTH)
    drawn[(1,)](torch.tensor([seed]), torch.tensor([position]), uniform, COUNT=WIDTH)
    least = np.maximum(uniform.numpy().astype(np.float64), LEAST_UNIFORM)
    np.testing.assert_allclose(vllm_noise(seed, position, WIDTH), -np.log(-np.log1p(-least)), rtol=1e-5)
