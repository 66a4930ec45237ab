"""Packed sequences give what each sequence gives alone, and cost no padding."""

from __future__ import annotations

import time
from itertools import pairwise

import boltzattn
import pytest
import torch
from check import assert_attention
from covering import pairwise as covering
from servers import Server, facts, servers
from torch import Tensor

# Empty ones, single tokens, lengths for `direct` and for the transform.
LENGTHS_Q = [5, 0, 700, 1300, 1, 64, 0]
LENGTHS_K = [9, 3, 700, 1500, 64, 1, 0]


def starts(lengths: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=dtype)


def sequences(cu_q: Tensor, cu_k: Tensor) -> list[tuple[slice, slice]]:
    rows = [[slice(a, b) for a, b in pairwise(cu.tolist())] for cu in (cu_q, cu_k)]
    return list(zip(*rows, strict=True))


def cut(tensors: list[Tensor], rows_q: slice, rows_k: slice) -> list[Tensor]:
    """One sequence of packed tensors as `attention` takes it without packing."""
    query, key, value = tensors
    return [x.transpose(0, 1) for x in (query[rows_q], key[rows_k], value[rows_k])]


def draw(
    rank: int, dv: int, dtype: torch.dtype, heads: int = 2, key_heads: int = 2
) -> tuple[Tensor, Tensor, Tensor]:
    total_q, total_k = sum(LENGTHS_Q), sum(LENGTHS_K)
    shapes = (total_q, heads, rank), (total_k, key_heads, rank), (total_k, key_heads, dv)
    q, k, v = (torch.randn(shape, dtype=dtype) for shape in shapes)
    return q, k, v


CASES = covering(
    {
        "rank": [1, 3],
        "dtype": [torch.float64, torch.float32, torch.bfloat16],
        "is_causal": [False, True],
        "key_heads": [2, 1],
        "with_lse": [False, True],
        "server": [*servers(facts()), Server("auto", "auto")],
    }
)


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c.values())))
def test_equals_one_sequence_at_a_time(case: dict) -> None:
    """Bitwise: a sequence is the same call on the same rows. The rule holds for that call."""
    server, rank = case["server"], case["rank"]
    if server.method == "transform":
        rank = 1
    tensors = [x.requires_grad_() for x in draw(rank, 8, case["dtype"], 2, case["key_heads"])]
    cu_q, cu_k = starts(LENGTHS_Q), starts(LENGTHS_K, torch.int64)
    call = {"is_causal": case["is_causal"], "enable_gqa": True, "return_lse": True, **server.ask}
    out, lse = boltzattn.attention_varlen(*tensors, cu_q, cu_k, **call)
    assert out.shape == (sum(LENGTHS_Q), 2, 8)
    assert lse.shape == (2, sum(LENGTHS_Q))
    grads_of = [torch.randn_like(out)]
    if case["with_lse"]:
        # A row without keys has lse -inf, a constant.
        grads_of.append(torch.randn_like(lse))
    results = (out, lse)[: len(grads_of)]
    gradients = torch.autograd.grad(results, tensors, grads_of)

    outs, lses = [], []
    for rows_q, rows_k in sequences(cu_q, cu_k):
        one = [
            x[rows].transpose(0, 1)
            for x, rows in zip(tensors, (rows_q, rows_k, rows_k), strict=False)
        ]
        one_out, one_lse = boltzattn.attention(*one, **call)
        outs.append(one_out.transpose(0, 1))
        lses.append(one_lse)
    together = torch.cat(outs), torch.cat(lses, 1)
    wanted = torch.autograd.grad(together[: len(grads_of)], tensors, grads_of)
    assert torch.equal(out, together[0])
    assert torch.equal(lse, together[1])
    for name, actual, expected in zip("qkv", gradients, wanted, strict=True):
        assert torch.equal(actual, expected), f"gradient of {name}"


def test_every_method_keeps_the_rule_in_its_sequence() -> None:
    """One long sequence in a pack, against the oracle: the rows are the right ones."""
    q, k, v = draw(1, 4, torch.float32)
    cu_q, cu_k = starts(LENGTHS_Q), starts(LENGTHS_K)
    rows_q, rows_k = sequences(cu_q, cu_k)[3]
    for server in servers(facts()):
        packed = boltzattn.attention_varlen(q, k, v, cu_q, cu_k, **server.ask)
        one = [
            x[rows].transpose(0, 1)
            for x, rows in zip((q, k, v), (rows_q, rows_k, rows_k), strict=False)
        ]
        grad = torch.randn(2, LENGTHS_Q[3], 4)
        result = assert_attention(server, *one, grad)
        assert torch.equal(result.out, packed[rows_q].transpose(0, 1))


def test_double_backward() -> None:
    cu = starts([4, 0, 3])
    tensors = [
        torch.randn(7, 2, width, dtype=torch.float64, requires_grad=True) for width in (1, 1, 2)
    ]

    def call(*tensors: Tensor) -> Tensor:
        return boltzattn.attention_varlen(*tensors, cu, cu)

    assert torch.autograd.gradcheck(call, tensors)
    assert torch.autograd.gradgradcheck(call, tensors)


def test_compiles_whole() -> None:
    cu_q, cu_k = starts(LENGTHS_Q), starts(LENGTHS_K)
    tensors = [x.requires_grad_() for x in draw(1, 8, torch.float32)]

    def call(*tensors: Tensor) -> Tensor:
        return boltzattn.attention_varlen(*tensors, cu_q, cu_k)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    out, plain = compiled(*tensors), call(*tensors)
    assert torch.equal(out, plain)
    grads = [torch.autograd.grad(x.square().sum(), tensors) for x in (out, plain)]
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_one_operator_whatever_the_sequences(is_causal: bool, dtype: torch.dtype) -> None:
    cu = starts([5, 3000, 0, 20, 2500])
    q, k, v = (torch.randn(5525, 1, width, dtype=dtype) for width in (1, 1, 4))
    call = {"is_causal": is_causal, "cu_seqlens_q": cu, "cu_seqlens_k": cu}
    assert boltzattn.explain(q, k, v, **call).startswith("varlen, 5 sequences, 2 plans")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        boltzattn.attention_varlen(q, k, v, **call)
    ran = [event.name for event in profile.events() if event.name.startswith("boltzattn::cpu_")]
    assert ran == ["boltzattn::cpu_varlen_forward"]


def test_explain_counts_the_plans() -> None:
    cu_q, cu_k = starts([10, 4000, 0, 30, 5000]), starts([20, 4000, 0, 3, 5000])
    q, k = torch.randn(9040, 2, 1), torch.randn(9023, 2, 1)
    said = boltzattn.explain(q, k, k, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k).splitlines()
    assert said[0] == "varlen, 5 sequences, 2 plans"
    at = [said.index(f"{count} sequences; for the longest of them:") for count in (3, 2)]
    assert [said[i + 1] for i in at] == [
        "method direct, backend cpu",
        "method transform, backend cpu",
    ]
    assert "2 heads, n_q 10, n_k 20, rank 1" in said[at[0] + 2]
    assert "2 heads, n_q 5000, n_k 5000, rank 1" in said[at[1] + 2]
    with pytest.raises(ValueError, match="attn_mask must not be given here: attention_varlen"):
        boltzattn.explain(q, k, k, torch.zeros(1), cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    with pytest.raises(ValueError, match="cu_seqlens_k must have as many entries"):
        boltzattn.explain(q, k, k, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k[:-1])


def test_threads_do_not_matter() -> None:
    cu = starts([50, 3000, 20, 700])
    q, k = torch.randn(2, 3770, 2, 1)
    v = torch.randn(3770, 2, 8)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(boltzattn.attention_varlen(q, k, v, cu, cu))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_no_padding_work() -> None:
    """Thousand short sequences and one long one, rank 2: padded it would be 200 times the work."""
    lengths = [10] * 1000 + [2000]
    cu = starts(lengths)
    q, k = torch.randn(2, sum(lengths), 1, 2)
    v = torch.randn(sum(lengths), 1, 16)
    long_one = [x[-2000:].transpose(0, 1) for x in (q, k, v)]

    def best(call: object) -> float:
        times = []
        for _ in range(5):
            begin = time.perf_counter()
            call()  # type: ignore[operator]
            times.append(time.perf_counter() - begin)
        return min(times)

    packed = best(lambda: boltzattn.attention_varlen(q, k, v, cu, cu))
    alone = best(lambda: boltzattn.attention(*long_one))
    # 1.03 times the pairs; the rest is the cost of a thousand small calls. Padded: 1001 times.
    assert packed < 20 * alone


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cu_seqlens_k": None}, "cu_seqlens_k must be an int32 or int64 tensor"),
        ({"cu_seqlens_q": torch.tensor([0.0, 6.0])}, "cu_seqlens_q must be int32 or int64"),
        ({"cu_seqlens_q": torch.tensor([0, 2, 6])}, "cu_seqlens_k must have as many entries"),
        ({"cu_seqlens_q": torch.tensor([0, 7])}, "cu_seqlens_q must rise from 0 to the number"),
        ({"cu_seqlens_k": torch.tensor([1, 6])}, "cu_seqlens_k must rise from 0 to the number"),
        ({"cu_seqlens_k": torch.tensor([0, 6], device="meta")}, "must be on the device of query"),
        ({"query": [1.0]}, "query must be a tensor, got list"),
        ({"query": torch.randn(6, 1)}, r"query must be \[total, heads, width\]"),
    ],
)
def test_refuses(change: dict, message: str) -> None:
    call = {name: torch.randn(6, 2, 1) for name in ("query", "key", "value")}
    call |= {name: torch.tensor([0, 6]) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    with pytest.raises((ValueError, TypeError), match=message):
        boltzattn.attention_varlen(**{**call, **change})


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("is_causal", [False, True])
def test_module_takes_jagged_tensors(rank: int, is_causal: bool) -> None:
    layer = boltzattn.nn.LowRankAttention(
        16, 2, rank=rank, batch_first=True, learnable_temperature=True, dtype=torch.float64
    )
    rows = [torch.randn(n, 16, dtype=torch.float64) for n in (3, 0, 50, 1)]
    x = torch.nested.nested_tensor(rows, layout=torch.jagged).requires_grad_()
    out, weights = layer(x, x, x, is_causal=is_causal)
    assert weights is None
    assert out.is_nested
    assert torch.equal(out.offsets(), x.offsets())
    out.values().square().sum().backward()
    from_nested = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    parts = [layer(r, r, r, is_causal=is_causal)[0] for r in rows if len(r)]
    # fp64 sums in another order: a few roundings of numbers of size 1.
    torch.testing.assert_close(out.values(), torch.cat(parts), rtol=1e-12, atol=1e-12)
    torch.cat(parts).square().sum().backward()
    for p, grad in zip(layer.parameters(), from_nested, strict=True):
        torch.testing.assert_close(grad, p.grad, rtol=1e-10, atol=1e-10)
    assert x.grad is not None


def test_module_refuses_what_jagged_tensors_cannot() -> None:
    layer = boltzattn.nn.LowRankAttention(8, 2, batch_first=True)
    x = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(5, 8)], layout=torch.jagged)
    with pytest.raises(ValueError, match="need_weights must not be given with nested"):
        layer(x, x, x, need_weights=True)
    with pytest.raises(ValueError, match="unless query, key and value are all nested"):
        layer(x, torch.randn(2, 3, 8), torch.randn(2, 3, 8))
    other = torch.nested.nested_tensor([torch.randn(5, 8), torch.randn(3, 8)], layout=torch.jagged)
    with pytest.raises(ValueError, match="value must have the sequence lengths of key"):
        layer(x, x, other)
    with pytest.raises(ValueError, match="batch_first=True"):
        boltzattn.nn.LowRankAttention(8, 2)(x, x, x)
