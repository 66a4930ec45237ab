"""PyTorch's own sample inputs for SDPA, through attention(), compared with SDPA."""

from __future__ import annotations

from typing import Any

import boltzattn
import pytest
import torch
from check import assert_attention
from errors import assert_accurate
from oracle import Result, eagers, magnitudes, oracle
from servers import Server, servers_of
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.testing._internal.common_methods_invocations import op_db

SDPA = next(op for op in op_db if op.name == "nn.functional.scaled_dot_product_attention")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def sdpa(*args: Tensor, **call: Any) -> Tensor:
    """SDPA by its definition; its CPU kernel would be another approximation."""
    with sdpa_kernel(SDPBackend.MATH):
        return scaled_dot_product_attention(*args, **call)


def _samples() -> list[Any]:
    """Calls in fp64. Dropout draws other random numbers than SDPA's: test_dropout is for that."""
    torch.manual_seed(0)
    return [
        (tuple(x.detach() for x in (sample.input, *sample.args)), sample.kwargs)
        for sample in SDPA.sample_inputs("cpu", torch.float64, requires_grad=False)
        if not sample.kwargs.get("dropout_p")
    ]


SAMPLES = _samples()


def _name(sample: tuple[tuple[Tensor, ...], dict[str, Any]]) -> str:
    tensors, call = sample
    shapes = " ".join("x".join(map(str, x.shape)) for x in tensors)
    given = " ".join(name for name, x in call.items() if x is not False and name != "dropout_p")
    return f"{shapes} {given}".strip()


def _in(dtype: torch.dtype, call: dict[str, Any]) -> dict[str, Any]:
    return {name: x.to(dtype) if isinstance(x, Tensor) else x for name, x in call.items()}


def _servers(tensors: tuple[Tensor, ...], call: dict[str, Any]) -> list[Server]:
    given = {name: x for name, x in call.items() if name in ("attn_mask", "is_causal")}
    return servers_of(*tensors, **given)


def test_there_are_samples_of_every_kind() -> None:
    assert any(call["is_causal"] for _, call in SAMPLES)
    assert any(call.get("attn_mask") is not None for _, call in SAMPLES)
    assert any(tensors[0].ndim != tensors[1].ndim for tensors, _ in SAMPLES)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("sample", "server"),
    [
        pytest.param(sample, server, id=f"{_name(sample)}-{server}")
        for sample in SAMPLES
        for server in _servers(*sample)
    ],
)
def test_like_sdpa(
    sample: tuple[tuple[Tensor, ...], dict[str, Any]], server: Server, dtype: torch.dtype
) -> None:
    """Both are within the error rule of the same oracle, output and gradients."""
    tensors, call = sample
    tensors = tuple(x.to(dtype) for x in tensors)
    call = _in(dtype, call)
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = sdpa(*leaves, **call)
    grad_out = torch.randn(out.shape, dtype=torch.float64).to(dtype)
    grads = torch.autograd.grad(out, leaves, grad_out)
    theirs = {"out": out, **dict(zip(Result._fields[2:], grads, strict=True))}

    del call["dropout_p"]
    truth = oracle(*tensors, grad_out, **call)._asdict()
    sizes = magnitudes(*tensors, grad_out, **call)
    assert_accurate(theirs, truth, eagers(*tensors, grad_out, **call), magnitudes=sizes)
    assert_attention(server, *tensors, grad_out, **call)


@pytest.mark.parametrize("server", servers_of(*SAMPLES[0][0], dropout_p=0.5), ids=str)
def test_dropout_samples_run(server: Server) -> None:
    """The shapes at least; and everything dropped is zero, in SDPA too."""
    for sample in SDPA.sample_inputs("cpu", torch.float32, requires_grad=False):
        if sample.kwargs.get("dropout_p"):
            call = {**sample.kwargs, "dropout_p": 1.0}
            out = boltzattn.attention(sample.input, *sample.args, **call, **server.ask)
            assert torch.equal(out, torch.zeros_like(sdpa(sample.input, *sample.args)))
