"""The Triton projection, interpreted, against the CPU's: numbers and extents."""

from __future__ import annotations

import math

import pytest
import torch
from boltzattn.triton_kernels.project import project


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("batch", "n", "width", "outputs"), [(2, 70, 33, 2), (1, 130, 20, 17)])
def test_as_the_cpu(
    batch: int, n: int, width: int, outputs: int, dtype: torch.dtype, biased: bool
) -> None:
    x = torch.randn(n, batch, width).transpose(0, 1).to(dtype)
    weight = torch.randn(outputs, width).to(dtype)
    bias = torch.randn(outputs).to(dtype) if biased else None
    numbers, extents = project(x, weight, bias)
    exact = x.double() @ weight.double().mT + (0.0 if bias is None else bias.double())
    # fp32 sums of `width` products; the interpreter truncates to bf16 where hardware rounds.
    size = (x.double().abs() @ weight.double().abs().mT).max().item() + 3.0
    eps = torch.finfo(dtype).eps + width * torch.finfo(torch.float32).eps
    assert (numbers.double().mT - exact).abs().max().item() <= eps * size
    rows = numbers.double()
    torch.testing.assert_close(extents[..., 0], rows.amin(-1), rtol=0.0, atol=0.0)
    torch.testing.assert_close(extents[..., 1], rows.amax(-1), rtol=0.0, atol=0.0)
    at = extents[..., 2:4].long()
    assert torch.equal(rows.gather(-1, at[..., :1])[..., 0], extents[..., 0])
    assert torch.equal(rows.gather(-1, at[..., 1:])[..., 0], extents[..., 1])
    assert torch.equal(extents[..., 4:], torch.tensor([n, 1.0]).double().expand(batch, outputs, 2))


def test_nan_is_not_regular() -> None:
    x = torch.randn(1, 70, 4)
    x[0, 65, 0] = math.nan
    _, extents = project(x, torch.eye(2, 4), None)
    assert extents[0, :, 5].tolist() == [0.0, 0.0]  # 0 * NaN is NaN
