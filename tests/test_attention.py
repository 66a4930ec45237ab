"""attention() against the oracle: sizes, ranks, dtypes, masks; output, lse and gradients.

The cases are a covering design, so that every two settings meet, and a second one at rank 1, where
methods exist that no other rank has.
"""

from __future__ import annotations

import math
import zlib
from typing import Any, NamedTuple

import boltzattn
import pytest
import torch
from covering import pairwise
from errors import assert_accurate
from oracle import Result, eagers, oracle
from servers import Server, facts, servers
from torch import Tensor

SIZES = (0, 1, 2, 63, 65, 257)
RANKS = (*range(1, 17), 17, 40)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
WIDTHS = (1, 3, 64, 65)
LEADS = ((), (3,), (2, 2), (2, 1, 3))
SCALES = (None, 0.3, -0.7, 0.0)
MASKS = (
    "none",
    "causal",
    "bool",
    "bool with dead rows",
    "additive",
    "additive with dead rows",
    "bool padding",
    "padding everything",
    "additive padding",
    "causal, bool padding",
    "bool, bool padding",
    "additive, additive padding",
)


class Case(NamedTuple):
    n_q: int
    n_k: int
    rank: int
    dv: int
    dtype: torch.dtype
    lead: tuple[int, ...]
    mask: str
    scale: float | None
    through_lse: bool

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        lead = "x".join(map(str, self.lead)) or "flat"
        return (
            f"{self.n_q}x{self.n_k} rank {self.rank} dv {self.dv} {dtype} {lead} "
            f"{self.mask} scale {self.scale}{' through lse' * self.through_lse}"
        )

    def masks(self, generator: torch.Generator) -> dict[str, Any]:
        """The mask arguments of the call."""
        shape = (*self.lead, self.n_q, self.n_k)
        padding_shape = (*self.lead[:-1], self.n_k)
        may_attend = torch.rand(shape, generator=generator) < 0.7
        bias = torch.randn(shape, generator=generator)
        ignored = torch.rand(padding_shape, generator=generator) < 0.3
        padding_bias = torch.randn(padding_shape, generator=generator)
        dead = torch.arange(self.n_q) % 3 == 1  # rows that may attend to nothing
        made = {
            "none": {},
            "causal": {"is_causal": True},
            "bool": {"attn_mask": may_attend},
            "bool with dead rows": {"attn_mask": may_attend & ~dead[:, None]},
            "additive": {"attn_mask": bias.to(self.dtype)},
            "additive with dead rows": {
                "attn_mask": bias.masked_fill(dead[:, None], -torch.inf).to(self.dtype)
            },
            "bool padding": {"key_padding_mask": ignored},
            "padding everything": {"key_padding_mask": torch.ones_like(ignored)},
            "additive padding": {"key_padding_mask": padding_bias.to(self.dtype)},
        }
        arguments = made.get(self.mask, {})
        if not arguments and self.mask != "none":  # two of them
            for part in self.mask.split(", "):
                arguments = arguments | made[part]
        return arguments

    def servers(self) -> list[Server]:
        return servers(
            facts(
                dtype=self.dtype,
                heads=math.prod(self.lead),
                n_q=self.n_q,
                n_k=self.n_k,
                rank=self.rank,
                dv=self.dv,
                is_causal="causal" in self.mask,
                attn_mask=self.mask.startswith(("bool", "additive"))
                and self.mask not in ("bool padding", "additive padding"),
                key_bias=self.mask.endswith("additive padding"),
            )
        )


def _cases(ranks: tuple[int, ...]) -> list[Case]:
    factors = {
        "n_q": SIZES,
        "n_k": SIZES,
        "rank": ranks,
        "dv": WIDTHS,
        "dtype": DTYPES,
        "lead": LEADS,
        "mask": MASKS,
        "scale": SCALES,
        "through_lse": (True, False),
    }
    return [Case(**case) for case in pairwise(factors)]


CASES = list(dict.fromkeys([*_cases(RANKS), *_cases((1,))]))


def _lse_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _run(
    server: Server, tensors: tuple[Tensor, ...], grads: tuple[Tensor, ...], call: dict
) -> Result:
    """Output, lse and gradients as a user gets them; a second of `grads` goes through lse."""
    tensors = tuple(x.detach().requires_grad_() for x in tensors)
    out, lse = boltzattn.attention(*tensors, **call, **server.ask, return_lse=True)
    gradients = torch.autograd.grad((out, lse)[: len(grads)], tensors, grads)
    return Result(out.detach(), lse.detach(), *gradients)


@pytest.mark.parametrize(
    ("case", "server"),
    [pytest.param(c, s, id=f"{c}-{s}") for c in CASES for s in c.servers()],
)
def test_against_the_oracle(case: Case, server: Server) -> None:
    generator = torch.Generator().manual_seed(zlib.crc32(str(case).encode()))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*case.lead, *shape, generator=generator).to(case.dtype)

    n_q, n_k = case.n_q, case.n_k
    tensors = (normal(n_q, case.rank), normal(n_k, case.rank), normal(n_k, case.dv))
    grads = (normal(n_q, case.dv),)
    if case.through_lse:
        grads += (normal(n_q).to(_lse_dtype(case.dtype)),)
    call = {"scale": case.scale, **case.masks(generator)}

    actual = _run(server, tensors, grads, call)
    assert actual.out.dtype == case.dtype
    assert actual.lse.dtype == _lse_dtype(case.dtype)
    assert actual.grad_query.dtype == case.dtype
    assert_accurate(
        actual._asdict(),
        oracle(*tensors, *grads, **call)._asdict(),
        eagers(*tensors, *grads, **call),
        value=tensors[2],
    )
