"""The transformers that the experiments train: any number of layers and of parameters."""

from __future__ import annotations

from typing import Any

from torch import nn

from boltzattn.experiments.training import count_parameters
from boltzattn.nn import OneLayerTransformer


def transformer(
    layers: int, embed_dim: int, in_dim: int, out_dim: int, hidden_dim: int, **attention: Any
) -> nn.Sequential:
    """A token-wise network, followed by `layers` times attention and a token-wise network.

    One layer is the paper's block. All blocks have the standard form (LayerNorm, GELU), which
    trains well at any depth.

    Args:
        embed_dim: width of a token inside the model.
        hidden_dim: neurons of each of the `layers + 1` networks.
        attention: `num_heads`, `rank`, `head_dim`.

    Example:
        >>> model = transformer(2, 16, in_dim=3, out_dim=1, hidden_dim=32, rank=1)
        >>> model(torch.ones(5, 4, 3)).shape
        torch.Size([5, 4, 1])
    """
    return nn.Sequential(
        *(
            OneLayerTransformer(
                embed_dim,
                in_dim=in_dim if i == 0 else None,
                out_dim=out_dim if i == layers - 1 else None,
                ff1_hidden_dim=hidden_dim if i == 0 else 0,
                ff2_hidden_dim=hidden_dim,
                method="direct",  # the sets have few tokens
                **attention,
            )
            for i in range(layers)
        )
    )


def hidden_dim_for(parameters: int, layers: int, **sizes: Any) -> int:
    """The `hidden_dim` that brings `transformer` closest to this number of parameters.

    Example:
        >>> width = hidden_dim_for(5000, 2, embed_dim=16, in_dim=3, out_dim=1, rank=1)
        >>> model = transformer(2, 16, 3, 1, width, rank=1)
        >>> abs(count_parameters(model) - 5000) < 100
        True
    """
    one, two = (count_parameters(transformer(layers, hidden_dim=h, **sizes)) for h in (1, 2))
    return max(1, 1 + round((parameters - one) / (two - one)))
