"""Autotuning with a fake timer: which launch parameters are tried, kept and used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import boltzattn
import pytest
import torch
from boltzattn.triton_kernels import launch
from boltzattn.triton_kernels.launch import TokenTile
from boltzattn.triton_kernels.tools import autotune
from check import assert_attention
from servers import Server
from triton.runtime.errors import OutOfResources

TRITON = Server("transform", "triton")


@pytest.fixture(autouse=True)
def _table_as_it_was() -> Iterator[None]:
    yield
    autotune.reset()


def call() -> Any:
    # So small that an axis has few panels: the interpreter is slow for each.
    query, key = 1e-3 * torch.randn(2, 1, 40, 1)
    return boltzattn.attention(
        query, key, torch.randn(1, 40, 3), method="transform", backend="triton"
    )


def test_the_fastest_is_kept_and_used(monkeypatch: pytest.MonkeyPatch) -> None:
    candidates = [TokenTile(tile, 4) for tile in (32, 16, 128)]
    monkeypatch.setitem(autotune.CANDIDATES, "transform", candidates)
    monkeypatch.setitem(autotune.CANDIDATES, "direct", [])

    def timer(timed: Callable[[], Any]) -> float:
        tiles = [tile.TILE for key, tile in launch.tuned.items() if key[0] == "transform"]
        if 128 in tiles:
            raise OutOfResources(1, 0, "registers")
        return 10.0 + sum(16.0 if tile == 32 else -16.0 for tile in tiles) / 100

    kept = autotune.autotune(call, timer)
    assert kept == {
        ("transform", "moments", True, 16): TokenTile(16, 4),
        ("transform", "evaluate", True, 16): TokenTile(16, 4),
    }
    assert launch.token_options("moments", torch.float32, 3)["TILE"] == 16
    tensors = (torch.randn(1, 40, 1), torch.randn(1, 90, 1), torch.randn(1, 90, 3))
    assert_attention(TRITON, *tensors, torch.randn(1, 40, 3), scale=1e-3)


def test_nothing_faster_leaves_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(autotune.CANDIDATES, "transform", [TokenTile(32, 4)])
    monkeypatch.setitem(autotune.CANDIDATES, "direct", [])
    assert autotune.autotune(call, lambda timed: 1.0 + len(launch.tuned)) == {}
    assert launch.tuned == {}
