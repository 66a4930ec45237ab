"""The same bits every time, for any number of threads.

The reference adds with torch's matrix products, whose order of sums follows the threads; it
promises the same bits for the same number of threads only.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from check import run
from oracle import Result
from servers import Server, facts, servers

# Long enough that every stage of a kernel is divided among threads, several heads or one.
SHAPES = (((1,), 1100, 900), ((3,), 300, 500), ((2, 8), 65, 130))
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "dropout": {"dropout_p": 0.3},
}


def _cases() -> list[Any]:
    return [
        pytest.param(shape, rank, name, server, id=f"{shape}-rank {rank}-{name}-{server}")
        for shape in SHAPES
        for rank in (1, 7)
        for name, call in CALLS.items()
        for server in servers(
            facts(
                heads=torch.Size(shape[0]).numel(),
                n_q=shape[1],
                n_k=shape[2],
                rank=rank,
                is_causal="is_causal" in call,
                dropout="dropout_p" in call,
            )
        )
    ]


@pytest.mark.parametrize(("shape", "rank", "name", "server"), _cases())
def test_bitwise_equal(
    shape: tuple[tuple[int, ...], int, int], rank: int, name: str, server: Server
) -> None:
    lead, n_q, n_k = shape
    tensors = [
        torch.randn(*lead, n, width)
        for n, width in ((n_q, rank), (n_k, rank), (n_k, 20), (n_q, 20))
    ]
    grad_lse = torch.randn(*lead, n_q)

    def bits(threads: int) -> Result:
        torch.set_num_threads(threads)
        torch.manual_seed(7)  # of dropout
        return run(server, *tensors, grad_lse, **CALLS[name])

    expected = bits(1)
    for threads in (1, 1) if server.backend == "reference" else (1, 2, 3, 5, 2):
        for field, x, y in zip(Result._fields, bits(threads), expected, strict=True):
            assert torch.equal(x, y), f"{field} with {threads} threads"
