"""Error targets of the Triton transform by dtype, and what follows from them on the host.

Tolerances and limits that all backends share are in boltzattn.transform.tolerances. ROUNDING and
NEGLIGIBLE are also in csrc/spec/tolerances.h; a test holds them equal.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton.language as tl
from boltzattn.transform import layout
from boltzattn.transform.tolerances import LARGEST_PRODUCT
from boltzattn.triton_kernels.launch import NODES

NEGLIGIBLE = tl.constexpr(-80.0)  # exponent below which a panel of key nodes adds nothing
# The error of the passes over tokens, relative to max|value|.
ROUNDING = {torch.float32: 3e-6, torch.bfloat16: 1 / 256, torch.float16: 1 / 2048}


class Precision(NamedTuple):
    """The interpolation errors that the axes of a layout aim at."""

    query: float
    key: float  # smaller: the largest kernel value on a panel multiplies the rounding of a weight


PRECISION = {
    torch.float32: Precision(1e-9, 4e-12),
    torch.bfloat16: Precision(1e-5, 1e-9),
    torch.float16: Precision(1e-5, 1e-9),
}


def most_panels(n_k: int, precision: Precision) -> tuple[int, int]:
    """Panels of the query axis and of the key axis at the largest B that is served."""
    span = layout.Range(-LARGEST_PRODUCT, LARGEST_PRODUCT, -0.5, 0.5, n_k)
    query = layout.make_layout(span, NODES, NODES, precision.query).query
    key = layout.make_layout(span, NODES, NODES, precision.key).key
    return query.panels, key.panels


def key_side_error(n_k: int, precision: Precision) -> float:
    """The a-priori bound of docs/transform.md over all keys, relative to max|value|."""
    half = layout.panel_half_width(layout.KEY_STRIP, NODES, precision.key / math.sqrt(n_k))
    r = layout.KEY_STRIP / half
    rho = r + math.sqrt(r * r + 1)
    return 2 * n_k * 4 * rho ** (1 - NODES) / (rho - 1) * math.exp(4 / 3)
