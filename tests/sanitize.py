"""What `make sanitize` runs: every CPU kernel once on awkward sizes, strides and masks.

Not collected by the ordinary test run: what is asserted here is that the sanitizers stay silent
(they end the process) and that results agree with the reference roughly, so that nothing is
optimised away. Accuracy is the business of the other tests.
"""

from __future__ import annotations

import itertools

import boltzattn
import boltzattn._C
import pytest
import torch

SIZES = [(0, 3), (3, 0), (1, 1), (2, 63), (65, 2), (257, 130), (63, 257)]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def strided(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Every second element of a larger tensor: reading past the end is then out of bounds."""
    return torch.randn(*shape[:-1], 2 * shape[-1]).to(dtype)[..., ::2]


@pytest.mark.parametrize("isa", boltzattn._C.supported_isas())
@pytest.mark.parametrize(
    ("method", "rank"), [("direct", 1), ("direct", 5), ("direct", 33), ("transform", 1)]
)
def test_kernels(isa: str, method: str, rank: int) -> None:
    torch.manual_seed(0)
    boltzattn._C.force_isa(isa)
    try:
        for (n_q, n_k), dtype, dv in itertools.product(SIZES, DTYPES, (1, 7, 64)):
            make = strided if dv == 7 else lambda *shape, dtype: torch.randn(*shape).to(dtype)
            query = make(2, n_q, rank, dtype=dtype).requires_grad_()
            key = make(2, n_k, rank, dtype=dtype).requires_grad_()
            value = make(2, n_k, dv, dtype=dtype).requires_grad_()
            for causal, padding in ((False, None), (True, None), (False, torch.rand(n_k) < 0.3)):
                out, lse = boltzattn.attention(
                    query,
                    key,
                    value,
                    is_causal=causal,
                    key_padding_mask=padding,
                    method=method,
                    backend="cpu",
                    return_lse=True,
                )
                exact = boltzattn.attention(
                    query,
                    key,
                    value,
                    is_causal=causal,
                    key_padding_mask=padding,
                    method="direct",
                    backend="reference",
                )
                torch.testing.assert_close(out, exact, rtol=0.05, atol=0.05)
                finite = torch.where(lse.isfinite(), lse, 0.0)
                torch.autograd.grad(out.float().sum() + finite.sum(), (query, key, value))
    finally:
        boltzattn._C.force_isa(None)


def test_masks_and_dropout() -> None:
    query, key, value = (torch.randn(2, 70, width, requires_grad=True) for width in (3, 3, 9))
    for mask in (torch.rand(70, 70) < 0.5, torch.randn(70, 70)):
        out = boltzattn.attention(query, key, value, mask, 0.3, backend="cpu")
        assert out.isfinite().all()
        torch.autograd.grad(out.sum(), (query, key, value))
