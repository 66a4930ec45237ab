"""Launch parameters: a small table, chosen from the compiled kernels' registers and shared memory.

`python -m boltzattn.info --kernels` prints what each entry costs on each architecture. Nothing is
tuned at run time, so the first call is not slow and results do not depend on a timer.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

WIDEST = 128  # columns of the values that one program handles
LEAST = 16  # columns of the smallest matrix product
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

_DOT = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _start(kernel: Any, grid: tuple[int, ...], args: tuple, fixed: dict[str, Any]) -> None:
    kernel[grid](*args, **fixed)


_launcher: ContextVar[Callable] = ContextVar("launcher", default=_start)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **fixed: Any) -> None:
    """Start a kernel on the current device; an empty grid is no work."""
    if 0 not in grid:
        _launcher.get()(kernel, grid, args, fixed)


@contextlib.contextmanager
def launching_by(launcher: Callable) -> Iterator[None]:
    """Within the block, launcher(kernel, grid, args, fixed) is called in place of the GPU."""
    token = _launcher.set(launcher)
    try:
        yield
    finally:
        _launcher.reset(token)


def on_device(x: Tensor) -> contextlib.AbstractContextManager:
    """Kernels start on the device of their tensors, whichever is current."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def column_block(dv: int) -> int:
    """Columns of a program: a power of 2."""
    return min(WIDEST, max(LEAST, 1 << (dv - 1).bit_length()))


def precision(device: torch.device) -> str:
    """How fp32 matrices are multiplied: three tf32 products, as one alone would lose 13 bits.

    AMD's matrix units take fp32 as it is.
    """
    return "ieee" if torch.version.hip and device.type == "cuda" else "tf32x3"


class DirectTile(NamedTuple):
    """Sizes of a program of `direct`."""

    BLOCK_Q: int
    BLOCK_K: int
    num_warps: int


# (kernel, fp32?, columns): the largest tiles that no architecture spills at rank 4 and rank 16.
_DIRECT: dict[tuple[str, bool, int], tuple[DirectTile, DirectTile]] = {}
for _columns in (16, 32, 64, 128):
    for _kernel in ("forward", "query_gradient", "key_gradient"):
        _DIRECT[_kernel, False, _columns] = (DirectTile(128, 32, 8), DirectTile(64, 16, 4))
        _DIRECT[_kernel, True, _columns] = (DirectTile(64, 16, 4), DirectTile(32, 16, 4))
# An operation costs the interpreter the same for small and for large blocks.
_INTERPRETED = DirectTile(128, 128, 4)


def direct_options(kernel: str, dtype: torch.dtype, rank: int, dv: int, how: str) -> dict[str, Any]:
    """Everything that is fixed at compile time but the problem itself."""
    columns = column_block(dv)
    tile = _DIRECT[kernel, dtype == torch.float32, columns][rank > 4]
    if INTERPRETED:
        tile = _INTERPRETED
    return {
        "BLOCK_Q": tile.BLOCK_Q,
        "BLOCK_K": tile.BLOCK_K,
        "BLOCK_DV": columns,
        # The interpreter multiplies no bf16.
        "DOT": tl.float32 if INTERPRETED else _DOT[dtype],
        "PRECISION": how,
        "num_warps": tile.num_warps,
        "num_stages": 2,
        # Weights are rebuilt in backward from the same scores: every operation is as written.
        "enable_fp_fusion": False,
    }
