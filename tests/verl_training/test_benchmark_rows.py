# SPDX-License-Identifier: Apache-2.0
"""The benchmark's log-probabilities (benchmarks/verl/many_rows.py) are verl's own, gradients too."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
functional = pytest.importorskip("verl.utils.torch_functional")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks" / "verl"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_many_rows_at_a_time_give_what_row_by_row_gives(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    usual = functional.logprobs_from_logits_v2
    monkeypatch.setattr(functional, "logprobs_from_logits_v2", usual)  # put back what the import replaces
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    ours = importlib.import_module("many_rows")
    monkeypatch.setattr(ours, "ROWS", 3)  # the last part is smaller
    draws = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(1, 8, 50, generator=draws)).to(getattr(torch, dtype))
    labels = torch.randint(50, (1, 8), generator=draws)
    found = []
    for function in (usual, ours.log_probabilities):
        leaf = logits.clone().requires_grad_()
        values = function(leaf, labels)
        values.float().pow(2).sum().backward()
        found.append((values, leaf.grad))
    (values, gradient), (own, own_gradient) = found
    assert own.shape == values.shape
    assert own.dtype == values.dtype
    torch.testing.assert_close(own, values)
    torch.testing.assert_close(own_gradient, gradient)
