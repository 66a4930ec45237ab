"""What loops with scales can compute that loops with equal weights cannot: an example.

Xu & Sato (arXiv 2410.01405) prove that a looped layer approximates sequence-to-sequence functions,
that equal weights in every loop limit it, and that scales for each loop lift the limit. A small
example is the square of a number, a series of tent maps `y - sum_l T_l(y) / 4^l`: the tent map is
the same in every loop, and the factor 1 / 4^l is the scale of loop l.
"""

from __future__ import annotations

import torch
from torch import Tensor

from boltzattn.nn import FeedForward, OneLayerTransformer


def looped_square(loops: int, timestep_encoding: str | None = "table") -> OneLayerTransformer:
    """A looped transformer that maps tokens (y, y), y in [0, 1], to (_, y^2 up to 4^-(loops+1)).

    Two hidden neurons are applied in every loop; attention adds nothing. Without
    `timestep_encoding` all scales are 1 and the result is not the square for any number of loops.

    Example:
        >>> y = torch.tensor([[0.3], [0.7]]).double().expand(2, 2)
        >>> looped_square(12)(y)[:, 1].tolist()
        [0.0900000..., 0.4899999...]
    """

    def fixed(*rows: object) -> Tensor:
        return torch.tensor(rows, dtype=torch.float64, device="cpu")

    # The tent map of t in [0, 1] is 2 relu(t) - 4 relu(t - 1/2); the skip connection adds t.
    network = FeedForward.from_weights(
        fixed([1.0, 0.0], [1.0, 0.0]),
        fixed(0.0, -0.5),
        fixed([1.0, -4.0], [-2.0, 4.0]),
        fixed(0.0, 0.0),
    )
    model = OneLayerTransformer(
        2,
        form="paper",
        ff1_hidden_dim=0,
        ff2_hidden_dim=0,
        loops=loops,
        timestep_encoding=timestep_encoding,
        method="direct",
        dtype=torch.float64,
        device="cpu",
    )
    model.ff2 = network
    with torch.no_grad():
        for weight in model.attention.parameters():
            weight.zero_()
        if model.loop_scales is not None:
            model.loop_scales[:, 1, 1] = fixed(*(4.0**-loop for loop in range(1, loops + 1)))
    return model
