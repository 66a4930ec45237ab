"""Key biases, ALiBi and Gaussian scores over processes: shards agree with the whole."""

from __future__ import annotations

from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import boltzattn
import pytest
import torch
import torch.distributed as dist
from boltzattn import distributed
from processes import run
from torch import Tensor

SHARDS = {2: (137, 64), 3: (70, 0, 131)}
SLOPES = torch.tensor([0.5, 0.01])
CASES: dict[str, dict[str, Any]] = {
    "bias": {"bias": True},
    "bias, causal": {"bias": True, "is_causal": True},
    "gaussian": {"score": "gaussian", "scale": 4.0},
    "gaussian with a bias, causal": {"score": "gaussian", "bias": True, "is_causal": True},
    "alibi": {"alibi_slopes": SLOPES},
    "alibi, causal": {"alibi_slopes": SLOPES, "is_causal": True},
    "alibi, causal, rank 3": {"alibi_slopes": SLOPES, "is_causal": True, "rank": 3},
    "gaussian, rank 3, bias": {"score": "gaussian", "rank": 3, "bias": True},
}


def draw(case: dict[str, Any], n: int) -> list[Tensor]:
    """query, key, value, grad_out and, if asked for, a bias; the same in every process."""
    generator = torch.Generator().manual_seed(1)
    widths = (case.get("rank", 1), case.get("rank", 1), 5, 5)
    shapes = [(2, 2, n, width) for width in widths] + [(2, n)] * bool(case.get("bias"))
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def options(case: dict[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in case.items() if name not in ("bias", "rank")}


def of_shard(rank: int, world: int, shards: tuple[int, ...]) -> dict[str, list[Tensor]]:
    first, last = list(pairwise(accumulate(shards, initial=0)))[rank]
    results = {}
    for name, case in CASES.items():
        tensors = [x[..., first:last, :] for x in draw(case, sum(shards))[:4]]
        biases = [x[..., first:last] for x in draw(case, sum(shards))[4:]]
        query, key, value, grad, *bias = (x.clone() for x in (*tensors, *biases))
        leaves = [x.requires_grad_() for x in (query, key, value, *bias)]
        out, lse = distributed.attention(
            query,
            key,
            value,
            key_bias=bias[0] if bias else None,
            return_lse=True,
            **options(case),
        )
        text = (
            distributed.explain(
                query, key, value, key_bias=bias[0] if bias else None, **options(case)
            )
            if case.get("rank", 1) == 1
            else "need all keys"
        )
        assert "need all keys" in text, text
        found = torch.autograd.grad((out, lse), leaves, (grad, torch.ones_like(lse)))
        results[name] = [out.detach(), lse.detach()[..., None], *found[:3]]
        results[name] += [x[..., None] for x in found[3:]]
    return results


@pytest.mark.parametrize("world", [2, 3])
def test_shards_agree_with_the_whole(world: int, tmp_path: Path) -> None:
    shards = SHARDS[world]
    parts = run(of_shard, world, tmp_path, shards)
    for name, case in CASES.items():
        query, key, value, grad, *bias = draw(case, sum(shards))
        leaves = [x.requires_grad_() for x in (query, key, value, *bias)]
        out, lse = boltzattn.attention(
            query,
            key,
            value,
            key_bias=bias[0] if bias else None,
            return_lse=True,
            **options(case),
        )
        found = torch.autograd.grad((out, lse), leaves, (grad, torch.ones_like(lse)))
        whole = [out, lse[..., None], *found[:3], *(x[..., None] for x in found[3:])]
        for i, expected in enumerate(whole):
            joined = torch.cat([part[name][i] for part in parts], -2)
            # Both within the certificates of fp64.
            error = float((joined - expected.detach()).abs().max())
            assert error <= 1e-9 * max(1.0, float(expected.detach().abs().max())), (name, i)


def of_layer(rank: int, world: int, options: dict[str, Any]) -> Tensor:
    torch.manual_seed(0)
    layer = boltzattn.nn.LowRankAttention(
        8,
        2,
        batch_first=True,
        dtype=torch.float64,
        process_group=dist.group.WORLD,
        **options,
    )
    x = torch.randn(3, 50, 8, dtype=torch.float64)[:, rank * 20 : rank * 20 + (20, 30)[rank]]
    return layer(x, x, x, is_causal=True)[0].detach()


@pytest.mark.parametrize("options", [{"alibi": True}, {"score": "gaussian"}], ids=str)
def test_layers(options: dict[str, Any], tmp_path: Path) -> None:
    found = torch.cat(run(of_layer, 2, tmp_path, options), 1)
    torch.manual_seed(0)
    layer = boltzattn.nn.LowRankAttention(8, 2, batch_first=True, dtype=torch.float64, **options)
    x = torch.randn(3, 50, 8, dtype=torch.float64)
    torch.testing.assert_close(found, layer(x, x, x, is_causal=True)[0].detach())


def of_one_with_another_score(rank: int, world: int) -> str:
    q, v = torch.randn(1, 9, 1), torch.randn(1, 9, 2)
    with pytest.raises(ValueError, match="score") as caught:
        distributed.attention(q, q, v, score=("dot", "gaussian")[rank])
    return str(caught.value)


def test_different_scores_raise_everywhere(tmp_path: Path) -> None:
    first, second = run(of_one_with_another_score, 2, tmp_path)
    assert first == second
