"""Deep ReLU networks whose weights are written down neuron by neuron.

All numbers inside such a network are non-negative, so a ReLU passes them on unchanged. Integers
below 2^53 are exact in fp64, in whatever order a matrix product adds them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

# Activations held at once when no gradient is needed: 4 MB of fp64, as in FeedForward.
_NUMBERS_AT_ONCE = 1 << 19

# The coefficients of a neuron by the name of its input; BIAS is its constant.
Neuron = Mapping[str, float]
BIAS = ""


class ReluLayer(nn.Module):
    """`relu(W z + b)`, token by token: `[..., inputs] -> [..., neurons]`.

    A last layer may be affine, `W z + b`.

    Example:
        >>> layer = ReluLayer(torch.tensor([[1.0], [-1.0]]), torch.tensor([0.0, 2.0]))
        >>> layer(torch.tensor([[0.5]]))
        tensor([[0.5000, 1.5000]], grad_fn=<ReluBackward0>)
    """

    def __init__(self, weight: Tensor, bias: Tensor, affine: bool = False) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias)
        self.affine = affine

    def forward(self, z: Tensor) -> Tensor:
        sums = nn.functional.linear(z, self.weight, self.bias)
        return sums if self.affine else torch.relu(sums)

    def extra_repr(self) -> str:
        neurons, inputs = self.weight.shape
        return f"{inputs} -> {neurons}"


class ReluNetwork(nn.Sequential):
    """Layers one after another; a layer that occurs several times is a loop with tied weights.

    Without gradients the tokens are processed in pieces, which fit into the caches.
    """

    def forward(self, z: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return super().forward(z)
        layers: Sequence[Any] = list(self)
        widest = max(max(layer.weight.shape) for layer in layers)
        rows = z.reshape(-1, z.shape[-1]).split(max(1, _NUMBERS_AT_ONCE // widest))
        pieces = torch.cat([super(ReluNetwork, self).forward(piece) for piece in rows])
        return pieces.view(*z.shape[:-1], pieces.shape[-1])


def relu_layer(
    inputs: Sequence[str], neurons: Mapping[str, Neuron], affine: bool = False
) -> ReluLayer:
    """A layer in fp64 from the coefficients of its neurons.

    Args:
        inputs: names of the numbers that the layer reads, in order.
        neurons: for each name that it writes, in order, the coefficients by input name.

    Example:
        >>> layer = relu_layer(["x", "y"], {"sum": {"x": 1, "y": 1}, "not x": {BIAS: 1, "x": -1}})
        >>> layer(torch.tensor([[1.0, 5.0]]).double()).tolist()
        [[6.0, 0.0]]
    """
    column = {name: i for i, name in enumerate(inputs)}
    weight = torch.zeros(len(neurons), len(inputs), dtype=torch.float64, device="cpu")
    bias = torch.zeros(len(neurons), dtype=torch.float64, device="cpu")
    for row, neuron in enumerate(neurons.values()):
        for name, coefficient in neuron.items():
            if name == BIAS:
                bias[row] = coefficient
            else:
                weight[row, column[name]] = coefficient
    return ReluLayer(weight, bias, affine)


def count_nonzero(module: nn.Module) -> int:
    """The number of parameters that are not 0; tied ones count once.

    Example:
        >>> layer = ReluLayer(torch.eye(3), torch.zeros(3))
        >>> count_nonzero(ReluNetwork(layer, layer))
        3
    """
    return sum(int(torch.count_nonzero(p)) for p in module.parameters())
