"""Launch parameters: a small table, chosen from the compiled kernels' registers and shared memory.

`python -m boltzattn.info --kernels` prints what each entry costs on each architecture. Nothing is
tuned at run time unless `autotune` is asked to, so the first call is not slow and results do not
depend on a timer.
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

WIDEST = {torch.float32: 64, torch.bfloat16: 128, torch.float16: 128}  # columns of a program
LEAST = 16  # columns of the smallest matrix product
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

_DOT = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _start(kernel: Any, grid: tuple[int, ...], args: tuple, fixed: dict[str, Any]) -> None:
    kernel[grid](*args, **fixed)


_launcher: ContextVar[Callable] = ContextVar("launcher", default=_start)
_architecture: ContextVar[str | None] = ContextVar("architecture", default=None)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **fixed: Any) -> None:
    """Start a kernel on the current device; an empty grid is no work."""
    if 0 not in grid:
        _launcher.get()(kernel, grid, args, fixed)


@contextlib.contextmanager
def launching_by(launcher: Callable, on: str = "ampere") -> Iterator[None]:
    """Within the block, launcher(kernel, grid, args, fixed) is called in place of a GPU of the
    architecture `on`."""
    tokens = _launcher.set(launcher), _architecture.set(on)
    try:
        yield
    finally:
        _launcher.reset(tokens[0])
        _architecture.reset(tokens[1])


def on_device(x: Tensor) -> contextlib.AbstractContextManager:
    """Kernels start on the device of their tensors, whichever is current."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def architecture() -> str:
    """Of the current device, as far as the tables tell them apart: "ampere", which Hopper and Ada
    are like, "blackwell" or "amd"."""
    said = _architecture.get()
    if said is not None:
        return said
    if torch.version.hip is not None:
        return "amd"
    newer = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (10, 0)
    return "blackwell" if newer else "ampere"


def _all_registers() -> dict[str, int]:
    """So that nothing spills: by itself ptxas would rather spill than run one program less."""
    return {} if architecture() == "amd" else {"maxnreg": 255}


def column_block(dtype: torch.dtype, dv: int) -> int:
    """Columns of the values that a program takes: a power of 2."""
    return min(WIDEST[dtype], max(LEAST, 1 << (dv - 1).bit_length()))


def precision() -> str:
    """How fp32 matrices are multiplied: three tf32 products, as one alone would lose 13 bits.

    AMD's matrix units take fp32 as it is.
    """
    return "ieee" if architecture() == "amd" else "tf32x3"


tuned: dict[tuple, Any] = {}  # entries of the tables that `autotune` has replaced
asked: set[tuple] = set()  # entries that launches have asked for


def _entry(key: tuple, default: Any) -> Any:
    asked.add(key)
    return tuned.get(key, default)


class DirectTile(NamedTuple):
    """Sizes of a program of `direct`."""

    BLOCK_Q: int
    BLOCK_K: int
    num_warps: int


# By kernel and width of the values' block: tiles at rank 1 and at higher ranks, where columns of
# queries and keys take registers too. The largest that spill nowhere.
_HALF: dict[str, dict[int, tuple[DirectTile, DirectTile]]] = {
    "forward": {
        16: (DirectTile(128, 32, 4), DirectTile(128, 32, 8)),
        32: (DirectTile(128, 32, 4), DirectTile(128, 32, 8)),
        64: (DirectTile(128, 32, 8), DirectTile(64, 16, 4)),
        128: (DirectTile(64, 32, 4), DirectTile(64, 16, 4)),
    },
    "query_gradient": {
        16: (DirectTile(128, 32, 8), DirectTile(64, 32, 4)),
        32: (DirectTile(128, 32, 8), DirectTile(64, 32, 4)),
        64: (DirectTile(128, 32, 8), DirectTile(64, 16, 4)),
    },
    "key_gradient": {
        16: (DirectTile(32, 64, 8), DirectTile(32, 32, 4)),
        32: (DirectTile(32, 64, 8), DirectTile(32, 32, 4)),
        64: (DirectTile(16, 64, 4), DirectTile(16, 32, 4)),
    },
}
_SINGLE: dict[str, dict[int, tuple[DirectTile, DirectTile]]] = {
    "forward": {
        16: (DirectTile(64, 32, 4), DirectTile(64, 16, 4)),
        32: (DirectTile(64, 32, 4), DirectTile(64, 16, 4)),
        64: (DirectTile(64, 16, 4), DirectTile(64, 16, 4)),
    },
    "query_gradient": {
        16: (DirectTile(64, 32, 4), DirectTile(64, 16, 4)),
        32: (DirectTile(64, 32, 4), DirectTile(64, 16, 4)),
    },
    "key_gradient": {
        16: (DirectTile(16, 32, 4), DirectTile(16, 32, 4)),
        32: (DirectTile(16, 32, 4), DirectTile(16, 32, 4)),
    },
}
# Whatever the width: what AMD's compiler takes registers for is the scores.
_AMD = {
    "forward": DirectTile(64, 16, 4),
    "query_gradient": DirectTile(64, 16, 4),
    "key_gradient": DirectTile(16, 32, 4),
}
# An operation costs the interpreter the same for small and for large blocks.
_INTERPRETED = DirectTile(128, 128, 4)


def _direct_tile(kernel: str, dtype: torch.dtype, rank: int, columns: int) -> DirectTile:
    if INTERPRETED:
        return _INTERPRETED
    if architecture() == "amd":
        return _AMD[kernel]
    table = _SINGLE if dtype == torch.float32 else _HALF
    return table[kernel][columns][rank > 1]


def direct_options(kernel: str, dtype: torch.dtype, rank: int, dv: int) -> dict[str, Any]:
    """Everything that is fixed at compile time but the problem itself."""
    columns = column_block(dtype, dv)
    if kernel != "forward":
        columns = min(columns, WIDEST[dtype] // 2)  # values and their gradients share registers
    tile = _direct_tile(kernel, dtype, rank, columns)
    tile = _entry(("direct", kernel, dtype == torch.float32, columns, rank > 1), tile)
    return {
        "BLOCK_Q": tile.BLOCK_Q,
        "BLOCK_K": tile.BLOCK_K,
        "BLOCK_DV": columns,
        # The interpreter multiplies no bf16.
        "DOT": tl.float32 if INTERPRETED else _DOT[dtype],
        "PRECISION": precision(),
        "num_warps": tile.num_warps,
        "num_stages": 2,
        **_all_registers(),
        # Weights are rebuilt in backward from the same scores: every operation is as written.
        "enable_fp_fusion": False,
    }


CHUNK = 512  # tokens of a program of the transform: tables are read once for so many


class TokenTile(NamedTuple):
    """Tokens that a pass of the transform multiplies with the nodes of a panel at once."""

    TILE: int
    num_warps: int
    maxnreg: int | None = None  # registers of a thread, for Ampere and Hopper


# By kernel and whether the numbers are fp32. A token a thread in moments and evaluation of half
# precision, or else warps would read places twice. At 128 registers a quarter of the threads fit
# that a multiprocessor can hold.
_TOKENS = {
    ("moments", False): TokenTile(64, 2, 128),
    ("evaluate", False): TokenTile(64, 2, 128),
    ("query_gradient", False): TokenTile(32, 4, 128),
    ("key_gradient", False): TokenTile(64, 4),
    ("moments", True): TokenTile(16, 4),
    ("evaluate", True): TokenTile(32, 4),
    ("query_gradient", True): TokenTile(16, 8),
    ("key_gradient", True): TokenTile(32, 8),
}
# Moments of fewer columns than 64, in half precision: two warps would spill, as one does at 64.
_NARROW_MOMENTS = TokenTile(32, 1, 128)
_BLACKWELL_REGISTERS = 192  # at least: its compiler spills below that, and if left to itself


def _token_tile(kernel: str, dtype: torch.dtype, columns: int) -> TokenTile:
    if INTERPRETED:
        return TokenTile(64, 4)
    if kernel == "moments" and dtype != torch.float32 and columns < 64:
        return _NARROW_MOMENTS
    return _TOKENS[kernel, dtype == torch.float32]


def token_options(kernel: str, dtype: torch.dtype, dv: int, nodes: int) -> dict[str, Any]:
    """What a pass over tokens has fixed at compile time."""
    columns = min(64, column_block(dtype, dv))
    tile = _token_tile(kernel, dtype, columns)
    tile = _entry(("transform", kernel, dtype == torch.float32, columns), tile)
    # Tables of half precision need no more digits than two bf16 numbers have. AMD and the
    # interpreter know no such product.
    narrow = dtype != torch.float32 and architecture() != "amd" and not INTERPRETED
    fixed = {
        "CHUNK": CHUNK,
        "TILE": tile.TILE,
        "BLOCK_DV": columns,
        "NODES": nodes,
        # Half precision is not worth a weight's last digits.
        "WORK": tl.float64 if dtype == torch.float32 else tl.float32,
        "PRECISION": "bf16x3" if narrow else precision(),
        "num_warps": tile.num_warps,
        "num_stages": 1,
        "enable_fp_fusion": False,
    }
    if tile.maxnreg and architecture() != "amd":
        least = _BLACKWELL_REGISTERS if architecture() == "blackwell" else 0
        fixed["maxnreg"] = max(tile.maxnreg, least)
    if kernel in ("moments", "query_gradient"):
        fixed["DOT"] = tl.float32 if INTERPRETED else _DOT[dtype]
    return fixed


def work_dtype(dtype: torch.dtype) -> torch.dtype:
    """What WORK is, of places and of sums over a chunk."""
    return torch.float64 if dtype == torch.float32 else torch.float32


def node_options(dtype: torch.dtype, dv: int, nodes: int) -> dict[str, Any]:
    """What kernels over nodes have: no tokens, hence small and in fp64."""
    return {
        "BLOCK_DV": min(64, column_block(dtype, dv)),
        "NODES": nodes,
        "num_warps": 4,
        "num_stages": 1,
        **_all_registers(),
        "enable_fp_fusion": False,
    }


def core_options(dtype: torch.dtype, dv: int, nodes: int) -> dict[str, Any]:
    """What the core and its adjoint have."""
    return node_options(dtype, dv, nodes) | {"PRECISION": precision()}


def project_options(dtype: torch.dtype, outputs: int) -> dict[str, Any]:
    """What the projection has fixed at compile time."""
    return {
        "BLOCK": 64,
        "BLOCK_OUT": min(64, max(LEAST, 1 << (outputs - 1).bit_length())),
        "BLOCK_K": 32 if dtype == torch.float32 else 64,
        "DOT": tl.float32 if INTERPRETED else _DOT[dtype],
        "PRECISION": precision(),
        "num_warps": 4,
        "num_stages": 2,
        "enable_fp_fusion": False,
    }


def product_options() -> dict[str, Any]:
    """What the products of `layer` have."""
    return {
        "BLOCK_ROWS": 32,
        "BLOCK_COLUMNS": 32,
        "BLOCK_INNER": 32,
        "PRECISION": precision(),
        "num_warps": 4,
        "num_stages": 1,
        **_all_registers(),
        "enable_fp_fusion": False,
    }
