"""attention() against the oracle: sizes, ranks, dtypes, masks; output, lse and gradients.

The cases are a covering design, so that every two settings meet, and a second one at rank 1, where
methods exist that no other rank has.
"""

from __future__ import annotations

import math
import zlib
from functools import partial
from typing import Any, NamedTuple

import boltzattn
import pytest
import torch
from check import assert_attention, lse_dtype, run
from covering import pairwise
from errors import assert_accurate
from oracle import Result, dense
from servers import Server, facts, instruction_set, instruction_sets, servers
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


def call_of(case: Case) -> tuple[list[Tensor], dict[str, Any]]:
    """Tensors (with the incoming gradients) and keywords of the case."""
    generator = torch.Generator().manual_seed(zlib.crc32(str(case).encode()))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*case.lead, *shape, generator=generator).to(case.dtype)

    n_q, n_k = case.n_q, case.n_k
    tensors = [normal(n_q, case.rank), normal(n_k, case.rank), normal(n_k, case.dv)]
    tensors.append(normal(n_q, case.dv))
    if case.through_lse:
        tensors.append(normal(n_q).to(lse_dtype(case.dtype)))
    return tensors, {"scale": case.scale, **case.masks(generator)}


@pytest.mark.parametrize(
    ("case", "server"),
    [pytest.param(c, s, id=f"{c}-{s}") for c in CASES for s in c.servers()],
)
def test_against_the_oracle(case: Case, server: Server) -> None:
    tensors, call = call_of(case)
    assert_attention(server, *tensors, **call)


@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize("case", CASES[::4], ids=str)
def test_every_instruction_set(case: Case, isa: str) -> None:
    tensors, call = call_of(case)
    with instruction_set(isa):
        assert_attention(Server("direct", "cpu"), *tensors, **call)


@pytest.mark.parametrize("mask", ["none", "causal", "additive, additive padding"])
@pytest.mark.parametrize("rank", [1, 3])
def test_auto_is_the_plan_it_explains(rank: int, mask: str) -> None:
    case = Case(65, 63, rank, 3, torch.float32, (2, 2), mask, None, False)
    tensors, call = call_of(case)
    query, key, value, grad_out = tensors
    first_line = boltzattn.explain(query, key, value, **call).splitlines()[0]
    method, backend = first_line.removeprefix("method ").split(", backend ")
    assert Server(method, backend) in case.servers()
    by_auto = run(Server("auto", "auto"), query, key, value, grad_out, **call)
    by_name = run(Server(method, backend), query, key, value, grad_out, **call)
    for name, x, y in zip(Result._fields, by_auto, by_name, strict=True):
        assert torch.equal(x, y), name


@pytest.mark.parametrize("mask", ["additive", "additive with dead rows", "additive padding"])
def test_gradient_of_a_mask(mask: str) -> None:
    """Biases have gradients too; a row that sees nothing gives none, not even through lse."""
    case = Case(7, 5, 3, 4, torch.float64, (2, 2), mask, None, True)
    (query, key, value, grad_out, grad_lse), call = call_of(case)
    (name, bias), *_ = ((n, x) for n, x in call.items() if isinstance(x, Tensor))

    def gradients(compute: Any) -> tuple[Tensor, ...]:
        tensors = [x.detach().requires_grad_() for x in (query, key, value, bias)]
        out, lse = compute(*tensors[:3], scale=call["scale"], **{name: tensors[3]})
        seen = lse.isfinite()  # lse is -inf where nothing is seen: leave those out of the sum
        return torch.autograd.grad((out, lse[seen]), tensors, (grad_out, grad_lse[seen]))

    actual = gradients(partial(boltzattn.attention, return_lse=True))
    truth = gradients(dense)
    yardsticks = (gradients(partial(dense, order=order)) for order in range(1, 9))
    names = ("grad_query", "grad_key", "grad_value", f"grad_{name}")
    assert_accurate(
        dict(zip(names, actual, strict=True)),
        dict(zip(names, truth, strict=True)),
        (dict(zip(names, y, strict=True)) for y in yardsticks),
    )


def test_merge_of_queries_that_see_nothing_has_finite_gradients() -> None:
    """A query without keys on either side, one with keys on one side, one with both."""
    outs = [torch.randn(3, 2, dtype=torch.float64) for _ in range(2)]
    lses = [torch.tensor([-torch.inf, -torch.inf, 0.3]), torch.tensor([-torch.inf, 1.0, 0.7])]
    leaves = [x.double().requires_grad_() for x in (outs[0], lses[0], outs[1], lses[1])]
    out, lse = boltzattn.merge(*leaves)
    assert torch.equal(out[0], torch.zeros(2, dtype=torch.float64))
    assert lse[0] == -torch.inf
    torch.testing.assert_close(out[1], leaves[2][1])
    grads = torch.autograd.grad(out.sum() + lse[1:].sum(), leaves)
    assert all(bool(grad.isfinite().all()) for grad in grads)
    assert not any(bool(grad[0].any()) for grad in grads)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_merge_rounds_no_more_than_the_lse_it_is_given(dtype: torch.dtype) -> None:
    """Weights are those of the difference of both lse, however large they are."""
    out_a, out_b = torch.randn(2, 9, 4, dtype=dtype)
    lse_b = (1e4 + 1e3 * torch.rand(9, dtype=dtype)).requires_grad_()
    lse_a = (lse_b + torch.randn(9, dtype=dtype)).detach().requires_grad_()
    out, _ = boltzattn.merge(out_a, lse_a, out_b, lse_b)
    (gradient,) = torch.autograd.grad(out.sum(), lse_a)
    share = (lse_a.double() - lse_b.double()).sigmoid().detach()[:, None]
    slope = (share * (1 - share) * (out_a.double() - out_b.double())).sum(-1)
    assert_accurate(
        {"out": out, "slope": gradient},
        {"out": share * out_a + (1 - share) * out_b, "slope": slope},
        [],
        magnitudes={"out": out_a.abs().max().item() + out_b.abs().max().item(), "slope": 8.0},
    )
