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

# Columns of a program of `direct`; half as many in backward, where values and their gradients share
# the registers.
WIDEST = {torch.float32: 64, torch.bfloat16: 128, torch.float16: 128}
WIDEST_TRANSFORM = 64
LEAST = 16  # columns of the smallest matrix product
NODES = 16  # on a panel of either axis of a transform: the shortest side of a matrix product
CHUNK = 512  # tokens of a program of the transform: tables are read once for so many
TOKEN_BLOCK = 1024  # tokens of a program that reads one number of each: extents and sorting
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _start(kernel: Any, grid: tuple[int, ...], args: tuple, fixed: dict[str, Any]) -> None:
    kernel[grid](*args, **fixed)


_launcher: ContextVar[Callable] = ContextVar("launcher", default=_start)
_architecture: ContextVar[str | None] = ContextVar("architecture", default=None)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **fixed: Any) -> None:
    """Start a kernel on the current device; an empty grid is no work.

    Every operation is as written: backward rebuilds the numbers of forward to the last bit.
    """
    if 0 not in grid:
        _launcher.get()(kernel, grid, args, {"enable_fp_fusion": False, **fixed})


@contextlib.contextmanager
def launching_by(launcher: Callable, on: str = "ampere") -> Iterator[None]:
    """Within the block, call launcher(kernel, grid, args, fixed) instead of starting kernels on a
    GPU of the architecture `on`."""
    tokens = _launcher.set(launcher), _architecture.set(on)
    try:
        yield
    finally:
        _launcher.reset(tokens[0])
        _architecture.reset(tokens[1])


def sum_shares(shares: Tensor) -> Tensor:
    """A gradient from the shares of the blocks of columns, which stand on the first axis."""
    return shares[0] if len(shares) == 1 else shares.sum(0)


def on_device(x: Tensor) -> contextlib.AbstractContextManager:
    """Kernels start on the device of their tensors, whichever is current."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def architecture() -> str:
    """The current device's, as far as the tables distinguish them: "ampere" (Ada and Hopper too),
    "blackwell" or "amd"."""
    named = _architecture.get()
    if named is not None:
        return named
    if torch.version.hip is not None:
        return "amd"
    newer = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (10, 0)
    return "blackwell" if newer else "ampere"


def _all_registers() -> dict[str, int]:
    """So that nothing spills: on its own, ptxas would rather spill than run one program less."""
    return {} if architecture() == "amd" else {"maxnreg": 255}


def column_block(columns: int, widest: int) -> int:
    """Columns that a program takes: a power of 2."""
    return min(widest, max(LEAST, 1 << (columns - 1).bit_length()))


def column_blocks(dv: int) -> int:
    """Programs that share out the columns of the values in a transform."""
    return cdiv(dv, column_block(dv, WIDEST_TRANSFORM))


def dot_type(dtype: torch.dtype) -> tl.dtype:
    """What matrix units multiply; the interpreter multiplies no bf16."""
    if INTERPRETED or dtype == torch.float32:
        return tl.float32
    return tl.bfloat16 if dtype == torch.bfloat16 else tl.float16


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


# By kernel, whether the numbers are fp32, and columns of the values (32: or fewer): tiles at rank 1
# and at higher ranks, where columns of queries and keys take registers too. The largest that spill
# nowhere.
_DIRECT = {
    ("forward", False, 32): (DirectTile(128, 32, 4), DirectTile(128, 32, 8)),
    ("forward", False, 64): (DirectTile(128, 32, 8), DirectTile(64, 16, 4)),
    ("forward", False, 128): (DirectTile(64, 32, 4), DirectTile(64, 16, 4)),
    ("forward", True, 32): (DirectTile(64, 32, 4), DirectTile(64, 16, 4)),
    ("forward", True, 64): (DirectTile(64, 16, 4), DirectTile(64, 16, 4)),
    ("query_gradient", False, 32): (DirectTile(128, 32, 8), DirectTile(64, 32, 4)),
    ("query_gradient", False, 64): (DirectTile(128, 32, 8), DirectTile(64, 16, 4)),
    ("query_gradient", True, 32): (DirectTile(64, 32, 4), DirectTile(64, 16, 4)),
    ("key_gradient", False, 32): (DirectTile(32, 64, 8), DirectTile(32, 32, 4)),
    ("key_gradient", False, 64): (DirectTile(16, 64, 4), DirectTile(16, 32, 4)),
    ("key_gradient", True, 32): (DirectTile(16, 32, 4), DirectTile(16, 32, 4)),
}
# Whatever the width, with Gaussian scores, slopes or a bias per key: so that masks on top of them
# do not spill.
_BIASED = {
    "forward": DirectTile(64, 16, 8),
    "query_gradient": DirectTile(64, 16, 8),
    "key_gradient": DirectTile(16, 16, 4),
}
# Whatever the width, for the gradient of queries of higher ranks where is_causal or attn_mask hides
# pairs: the check of the results takes registers.
_HIDING = DirectTile(64, 16, 4)
# Whatever the width: AMD's compiler needs the registers for the scores.
_AMD = {
    "forward": DirectTile(64, 16, 4),
    "query_gradient": DirectTile(64, 16, 4),
    "key_gradient": DirectTile(16, 32, 4),
}
# The interpreter takes the same time for small and for large blocks.
_INTERPRETED = DirectTile(128, 128, 4)
# Queries and keys of a block where NaN must not spread: so small that it adds no registers.
_CAREFUL = 128 if INTERPRETED else 16


def _direct_tile(
    kernel: str, dtype: torch.dtype, rank: int, columns: int, biased: bool, hiding: bool
) -> DirectTile:
    if INTERPRETED:
        return _INTERPRETED
    if architecture() == "amd":
        return _AMD[kernel]
    if biased:
        return _BIASED[kernel]
    if hiding and rank > 1 and kernel == "query_gradient":
        return _HIDING
    return _DIRECT[kernel, dtype == torch.float32, max(32, columns)][rank > 1]


def direct_options(
    kernel: str, dtype: torch.dtype, rank: int, dv: int, biased: bool, hiding: bool
) -> dict[str, Any]:
    """Everything that is fixed at compile time, except for the problem itself.

    `biased`: its scores are Gaussian, or have slopes or a bias per key: more registers. `hiding`:
    so does is_causal or attn_mask.
    """
    widest = WIDEST[dtype] if kernel == "forward" else WIDEST[dtype] // 2
    columns = column_block(dv, widest)
    tile = _direct_tile(kernel, dtype, rank, columns, biased, hiding)
    tile = _entry(("direct", kernel, dtype == torch.float32, columns, rank > 1, biased), tile)
    return {
        **tile._asdict(),
        "BLOCK_DV": columns,
        "DOT": dot_type(dtype),
        "PRECISION": precision(),
        "BLOCK_CAREFUL": _CAREFUL,
        "num_stages": 1 if biased and hiding and kernel == "key_gradient" else 2,
        **_all_registers(),
    }


class TokenTile(NamedTuple):
    """Tokens that a pass of the transform multiplies with the nodes of a panel at once."""

    TILE: int
    num_warps: int
    maxnreg: int | None = None  # registers of a thread, on Ampere and Hopper


# By kernel and whether the numbers are fp32. One token per thread in `moments` and `evaluate` of
# half precision, or else warps would read places twice. With 128 registers, a multiprocessor holds
# a quarter of the threads it could.
_TOKENS = {
    ("moments", False): TokenTile(64, 2, 128),
    ("evaluate", False): TokenTile(64, 2, 128),
    ("query_moments", False): TokenTile(32, 4, 128),
    ("evaluate_keys", False): TokenTile(64, 4),
    ("moments", True): TokenTile(16, 4),
    ("evaluate", True): TokenTile(32, 4),
    ("query_moments", True): TokenTile(16, 8),
    ("evaluate_keys", True): TokenTile(32, 8),
}
# Moments of fewer columns than 64, in half precision: two warps would spill, as one does at 64.
_NARROW_MOMENTS = TokenTile(32, 1, 128)
_BLACKWELL_REGISTERS = 192  # at least: its compiler spills with fewer, and if left to itself


def _token_tile(kernel: str, dtype: torch.dtype, columns: int) -> TokenTile:
    if INTERPRETED:
        return TokenTile(64, 4)
    if kernel == "moments" and dtype != torch.float32 and columns < 64:
        return _NARROW_MOMENTS
    return _TOKENS[kernel, dtype == torch.float32]


def token_options(kernel: str, dtype: torch.dtype, dv: int) -> dict[str, Any]:
    """What a pass over tokens has fixed at compile time."""
    columns = column_block(dv, WIDEST_TRANSFORM)
    tile = _token_tile(kernel, dtype, columns)
    tile = _entry(("transform", kernel, dtype == torch.float32, columns), tile)
    # Tables of half precision need no more digits than two bf16 numbers have. AMD and the
    # interpreter know no such product.
    narrow = dtype != torch.float32 and architecture() != "amd" and not INTERPRETED
    fixed = {
        "CHUNK": CHUNK,
        "TILE": tile.TILE,
        "BLOCK_DV": columns,
        "NODES": NODES,
        # Half precision does not need a weight's last digits.
        "WORK": tl.float64 if dtype == torch.float32 else tl.float32,
        "PRECISION": "bf16x3" if narrow else precision(),
        "num_warps": tile.num_warps,
        "num_stages": 1,
    }
    if tile.maxnreg and architecture() != "amd":
        least = _BLACKWELL_REGISTERS if architecture() == "blackwell" else 0
        fixed["maxnreg"] = max(tile.maxnreg, least)
    if kernel in ("moments", "query_moments"):
        fixed["DOT"] = dot_type(dtype)
    return fixed


def work_dtype(dtype: torch.dtype) -> torch.dtype:
    """WORK as torch names it: the dtype of places and of sums over a chunk."""
    return torch.float64 if dtype == torch.float32 else torch.float32


def node_options(dv: int) -> dict[str, Any]:
    """What kernels over nodes have fixed at compile time."""
    return {
        "BLOCK_DV": column_block(dv, WIDEST_TRANSFORM),
        "NODES": NODES,
        "num_warps": 4,
        "num_stages": 1,
        **_all_registers(),
    }


def project_options(dtype: torch.dtype, outputs: int) -> dict[str, Any]:
    """What the projection has fixed at compile time."""
    return {
        "BLOCK": 64,
        "BLOCK_OUT": column_block(outputs, 64),
        "BLOCK_K": 32 if dtype == torch.float32 else 64,
        "DOT": dot_type(dtype),
        "PRECISION": precision(),
        "num_warps": 4,
        "num_stages": 2,
    }


def product_options() -> dict[str, Any]:
    """What the products of `layer` have fixed at compile time."""
    return {
        "BLOCK_ROWS": 32,
        "BLOCK_COLUMNS": 32,
        "BLOCK_INNER": 32,
        "PRECISION": precision(),
        "num_warps": 4,
        "num_stages": 1,
        **_all_registers(),
    }
