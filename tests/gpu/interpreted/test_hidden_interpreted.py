"""What a mask hides does not count in the Triton kernels of `direct`, interpreted."""

from __future__ import annotations

import math

import pytest
import torch
from check import run
from hidden import MASKS, SPOILABLE, Hiding, assert_hidden_do_not_count, hiding
from oracle import Result
from servers import Server

TRITON = Server("direct", "triton")
QUICK = (("query", "bool"), ("key", "causal"))


def attend(call: Hiding) -> Result:
    return run(TRITON, *call.spoilt(), attn_mask=call.attn_mask, is_causal=call.is_causal)


@pytest.mark.parametrize(
    ("name", "mask"),
    [
        pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.full])
        for case in ((name, mask) for name in SPOILABLE for mask in MASKS)
    ],
)
def test_nan(name: str, mask: str) -> None:
    sizes = (40, 70) if name in ("key", "grad_out") else (70, 40)
    assert_hidden_do_not_count(hiding(mask, (name,), math.nan, sizes), attend)


@pytest.mark.parametrize(
    ("mask", "poison"),
    [
        ("float", math.inf),
        *(
            pytest.param(mask, poison, marks=pytest.mark.full)
            for mask, poison in (("bool", math.inf), ("causal", math.inf), ("causal", -math.inf))
        ),
    ],
)
def test_infinity(mask: str, poison: float) -> None:
    call = hiding(mask, SPOILABLE, poison, (40, 70), rank=1, dtype=torch.bfloat16)
    assert_hidden_do_not_count(call, attend)
