"""Error targets of the transform by dtype, and what follows from them and from n on the host.

`rounding` and `tolerance` are those of csrc/cpu/transform.h and csrc/cuda/transform.cuh, NEGLIGIBLE
that of csrc/cpu/core.h; the largest product of a query and a key is boltzattn.transform.layout's.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton.language as tl
from boltzattn.transform import layout
from boltzattn.triton_kernels.launch import NODES

NEGLIGIBLE = tl.constexpr(-80.0)  # exponent below which a panel of key nodes adds nothing


class Tolerances(NamedTuple):
    """Interpolation errors to aim at, and the largest sum of all errors that is accepted."""

    query: float
    key: float  # smaller: the largest kernel value on a panel multiplies the rounding of a weight
    rounding: float
    tolerance: float


TOLERANCES = {
    torch.float32: Tolerances(1e-9, 4e-12, 3e-6, 5e-6),
    torch.bfloat16: Tolerances(1e-5, 1e-9, 1 / 256, 4 / 256),
    torch.float16: Tolerances(1e-5, 1e-9, 1 / 2048, 4 / 2048),
}


def most_panels(n_k: int, tolerances: Tolerances) -> tuple[int, int]:
    """Panels of the query axis and of the key axis at the largest B that is served."""
    widest = layout.LARGEST_PRODUCT
    span = layout.Range(-widest, widest, -0.5, 0.5, n_k)
    query = layout.make_layout(span, NODES, NODES, tolerances.query).query
    key = layout.make_layout(span, NODES, NODES, tolerances.key).key
    return query.panels, key.panels


def key_side_error(n_k: int, tolerances: Tolerances) -> float:
    """The a-priori bound of docs/transform.md over all keys, relative to max|v|."""
    half = layout.panel_half_width(layout.KEY_STRIP, NODES, tolerances.key / math.sqrt(n_k))
    r = layout.KEY_STRIP / half
    rho = r + math.sqrt(r * r + 1)
    return 2 * n_k * 4 * rho ** (1 - NODES) / (rho - 1) * math.exp(4 / 3)
