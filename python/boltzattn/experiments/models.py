"""The transformers that are trained: one layer or several, with any number of parameters."""

from __future__ import annotations

from typing import Any

from torch import nn

from boltzattn.experiments.training import count_parameters
from boltzattn.nn import OneLayerTransformer


def transformer(
    layers: int, dim: int, in_dim: int, out_dim: int, hidden: int, **attention: Any
) -> nn.Sequential:
    """A token-wise network, then attention and a token-wise network `layers` times.

    One layer is the paper's sequence of networks; all blocks are in the standard form (LayerNorm,
    GELU), which is what trains well at any depth.

    Args:
        dim: width of a token inside.
        hidden: neurons of each of the `layers + 1` networks.
        attention: `num_heads`, `rank`, `head_dim`.

    Example:
        >>> transformer(2, 16, in_dim=3, out_dim=1, hidden=32, rank=1)(torch.ones(5, 4, 3)).shape
        torch.Size([5, 4, 1])
    """
    return nn.Sequential(
        *(
            OneLayerTransformer(
                dim,
                in_dim=in_dim if i == 0 else None,
                out_dim=out_dim if i == layers - 1 else None,
                ff1_hidden=hidden if i == 0 else 0,
                ff2_hidden=hidden,
                method="direct",  # sets of a few tokens
                **attention,
            )
            for i in range(layers)
        )
    )


def hidden_for(parameters: int, layers: int, **sizes: Any) -> int:
    """The `hidden` of `transformer` that comes closest to a number of parameters, at least 1.

    Example:
        >>> hidden = hidden_for(5000, 2, dim=16, in_dim=3, out_dim=1, rank=1)
        >>> model = transformer(2, 16, 3, 1, hidden, rank=1)
        >>> abs(count_parameters(model) - 5000) < 100
        True
    """
    one, two = (count_parameters(transformer(layers, hidden=h, **sizes)) for h in (1, 2))
    return max(1, 1 + round((parameters - one) / (two - one)))
