"""The tolerances and limits of the transform that Python needs.

csrc/spec/tolerances.h has all of them; a test holds the common part equal.
"""

from __future__ import annotations

import torch

# The error of out that a head may have, relative to max|value|. A head whose certificate is larger
# is left to `direct`.
TOLERANCE = {
    torch.float64: 1e-10,
    torch.float32: 5e-6,
    torch.bfloat16: 4 / 256,
    torch.float16: 4 / 2048,
}
# The interpolation error that the layout aims at first. The reference works in fp64 for every
# dtype and aims below its rounding.
PRECISION = {
    torch.float64: 1e-17,
    torch.float32: 1e-8,
    torch.bfloat16: 1e-5,
    torch.float16: 1e-5,
}
REFERENCE_PRECISION = PRECISION[torch.float64]
LEVELS = 3  # precisions that the CPU backend tries, each 1000 times tighter, before `direct`

# The rounding error that a certificate in fp64 counts with; the second is per unit of the logits.
ROUNDING = 8e-15
ROUNDING_OF_PRODUCT = 4e-16

LARGEST_PRODUCT = 3e7  # B = max|t| R beyond which fp64 itself loses the logits
LARGEST_SUM = 1e300  # of |value| over the keys: sums must not overflow
LEAST_EXTENT = 1e-290  # of the keys: its inverse must not overflow

LEAST_NODES = 8  # on a panel
MOST_NODES = 32
NODE_STEP = 4
