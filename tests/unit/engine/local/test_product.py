# SPDX-License-Identifier: Apache-2.0
"""Products by panels: right, and the same bits for a row in any company, on any number of threads.

csrc/engine/product.h states it; equal tokens across batches, chunks and drafts rest on it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from seer.engine.local import cpu_ops

if not cpu_ops.available():
    pytest.skip("the native kernels are not built", allow_module_level=True)

kernels = cpu_ops.kernels
SHAPES = [(1, 1), (7, 5), (64, 128), (96, 48), (576, 960), (1536, 576), (769, 97), (2000, 130)]
"""(inner, outer): whole panels and not, one piece of `inner` and several."""


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    kernels.use_threads(1)
    yield
    kernels.use_threads(1)


def a_matrix(inner: int, outer: int, *, bias: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(inner * 1000 + outer)
    weight = torch.randn(outer, inner, generator=generator) / inner**0.5
    return weight, torch.randn(outer, generator=generator) if bias else None


def panel_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> cpu_ops.PanelLinear:
    return cpu_ops.PanelLinear(cpu_ops.to_panels(weight), bias, len(weight))


def some_rows(count: int, inner: int) -> torch.Tensor:
    return torch.randn(count, inner, generator=torch.Generator().manual_seed(count))


def product(linear: cpu_ops.PanelLinear, x: torch.Tensor, width: int) -> torch.Tensor:
    # Filled with what no product gives, and with room behind it that must stay as it is.
    room = torch.full((len(x) * linear.outer + 64,), float("nan"))
    bias = 0 if linear.bias is None else linear.bias.data_ptr()
    kernels.multiply(
        x.data_ptr(), linear.panels.data_ptr(), bias, room.data_ptr(), len(x), linear.inner, linear.outer, width
    )
    assert room[-64:].isnan().all(), "written past the end"
    return room[:-64].view(len(x), linear.outer)


@pytest.mark.parametrize("width", kernels.widths())
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("inner", "outer"), SHAPES)
def test_a_product_is_right(inner: int, outer: int, bias: bool, width: int) -> None:
    weight, added = a_matrix(inner, outer, bias=bias)
    linear = panel_linear(weight, added)
    for rows in (1, 3, 8, 9, 33):
        x = some_rows(rows, inner)
        exact = x.double() @ weight.double().T + (0.0 if added is None else added.double())
        torch.testing.assert_close(product(linear, x, width).double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("width", kernels.widths())
@pytest.mark.parametrize(("inner", "outer"), SHAPES)
def test_a_rows_product_does_not_depend_on_the_other_rows(inner: int, outer: int, width: int) -> None:
    linear = panel_linear(*a_matrix(inner, outer))
    x = some_rows(300, inner)
    whole = product(linear, x, width)
    for rows in (*range(1, 20), 31, 32, 33, 64, 100, 257):
        for first in (0, 1, 37):
            part = product(linear, x[first : first + rows].contiguous(), width)
            assert torch.equal(part, whole[first : first + rows]), f"{rows} rows from {first}"


def test_vectors_that_fuse_agree_to_the_bit() -> None:
    fusing = [width for width in kernels.widths() if width > 4]
    linear, x = panel_linear(*a_matrix(1000, 200, bias=True)), some_rows(21, 1000)
    results = [product(linear, x, width) for width in fusing]
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("threads", [2, 3, 7])
def test_threads_do_not_change_a_bit(threads: int) -> None:
    """Fewer panels than threads, panels that do not divide evenly, and a product too small to share."""
    for inner, outer in ((576, 960), (4000, 60), (1536, 577), (8, 8)):
        linear, x = panel_linear(*a_matrix(inner, outer, bias=True)), some_rows(40, inner)
        kernels.use_threads(1)
        alone = linear(x)
        kernels.use_threads(threads)
        for _ in range(20):
            assert torch.equal(linear(x), alone), f"{inner} by {outer}"


def test_a_replaced_matrix_multiplies_as_the_new_one() -> None:
    weight, _ = a_matrix(64, 96)
    linear, x = panel_linear(weight), some_rows(5, 64)
    before = linear(x)
    linear.replace(panel_linear(weight * 2))
    assert torch.equal(linear(x), before * 2)


def test_a_matrix_that_is_a_view_is_packed_as_it_looks() -> None:
    weight, x = a_matrix(300, 200)[0].T, some_rows(5, 200)
    assert torch.equal(panel_linear(weight)(x), panel_linear(weight.clone(memory_format=torch.contiguous_format))(x))
