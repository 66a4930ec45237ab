"""FeedForward and OneLayerTransformer: the block of Kajitsuka & Sato, and a practical form."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from boltzattn.nn.attention import LowRankAttention

# Hidden activations held at once when no gradient is needed. 4 MB of fp64: larger pieces leave the
# caches and are slower (every piece faults in fresh pages), not only bigger.
HIDDEN_AT_ONCE = 1 << 19

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu}
FORMS = ("paper", "standard")


class FeedForward(nn.Module):
    """Two layers with a skip, on every token alone: `z + W2 act(W1 z + b1) + b2`.

    Args:
        dim: width of a token.
        hidden: number of hidden neurons, however many; without gradients the tokens are taken in
            pieces, so that `tokens x hidden` activations never exist at once.
        activation: "relu" or "gelu".
        dropout: on the hidden activations and on what is added to z.
        norm: normalise what W1 sees, `z + W2 act(W1 norm(z) + b1) + b2`.

    W1, b1 are `linear1.weight` `[hidden, dim]`, `linear1.bias`; W2, b2 those of `linear2`.

    Example:
        >>> FeedForward(16, 64)(torch.randn(2, 100, 16)).shape
        torch.Size([2, 100, 16])
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        *,
        activation: str = "relu",
        dropout: float = 0.0,
        norm: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if dim < 1 or hidden < 1:
            raise ValueError(f"dim and hidden must be at least 1, got {dim} and {hidden}")
        if activation not in ACTIVATIONS:
            raise ValueError(
                f"activation must be one of {', '.join(map(repr, ACTIVATIONS))}, got {activation!r}"
            )
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.activation = activation
        self.norm = nn.LayerNorm(dim, **factory) if norm else None
        self.linear1 = nn.Linear(dim, hidden, **factory)
        self.linear2 = nn.Linear(hidden, dim, **factory)
        self.dropout = dropout

    @classmethod
    def from_weights(
        cls, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, *, activation: str = "relu"
    ) -> FeedForward:
        """The network with these weights: w1 `[hidden, dim]`, b1 `[hidden]`, w2 `[dim, hidden]`,
        b2 `[dim]`; device and dtype are theirs.

        Example:
            >>> w = torch.randn(5000, 3, dtype=torch.float64)
            >>> b1, b2 = torch.zeros(5000).double(), torch.zeros(3).double()
            >>> FeedForward.from_weights(w, b1, w.T, b2).linear1.out_features
            5000
        """
        hidden, dim = w1.shape
        shapes = {"b1": (b1, (hidden,)), "w2": (w2, (dim, hidden)), "b2": (b2, (dim,))}
        _check_shapes(f"w1 {list(w1.shape)} [hidden, dim]", shapes)
        network = cls(dim, hidden, activation=activation, device="meta", dtype=w1.dtype)
        network.linear1.weight, network.linear1.bias = _parameter(w1), _parameter(b1)
        network.linear2.weight, network.linear2.bias = _parameter(w2), _parameter(b2)
        return network

    def forward(self, z: Tensor) -> Tensor:
        """`[..., dim]` to `[..., dim]`."""
        tokens, hidden = z.numel() // max(1, z.shape[-1]), self.linear1.out_features
        if (
            torch.compiler.is_compiling()
            or torch.is_grad_enabled()
            or tokens * hidden <= HIDDEN_AT_ONCE
        ):
            return self._forward(z)
        rows = z.reshape(-1, z.shape[-1]).split(max(1, HIDDEN_AT_ONCE // hidden))
        return torch.cat([self._forward(piece) for piece in rows]).view(z.shape)

    def _forward(self, z: Tensor) -> Tensor:
        seen = z if self.norm is None else self.norm(z)
        hidden = self._drop(ACTIVATIONS[self.activation](self.linear1(seen)))
        return z + self._drop(self.linear2(hidden))

    def _drop(self, x: Tensor) -> Tensor:
        # In training F.dropout draws a mask even for p = 0.
        return F.dropout(x, self.dropout, self.training) if self.dropout > 0.0 else x

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}, dropout={self.dropout}"


class OneLayerTransformer(nn.Module):
    """`FF2(SA(FF1(z)))`: token-wise network, one attention layer, token-wise network.

    Permutation equivariant: shuffling the tokens shuffles the result. There are no positions and
    no causal mask; the input is a set.

    `form="paper"` is the block of Kajitsuka & Sato (ICLR 2024), which they prove to be a universal
    approximator with a single rank-1 head:

        FF(Z) = Z + relu(Z W1^T + b1) W2^T + b2
        SA(Z) = Z + sum_h softmax((Z Wq_h^T)(Z Wk_h^T)^T) (Z Wv_h^T) Wo_h^T

    without scaling, normalisation, dropout or biases in SA.

    `form="standard"` takes the same three steps the way they train well: every step reads a
    LayerNorm of its input, GELU instead of ReLU, dropout, biases, logits scaled by
    `1 / sqrt(rank)`, and, if `in_dim` or `out_dim` is given, a linear map before and
    (after a last LayerNorm) behind.

    Args:
        dim: width of a token inside the block.
        form: "paper" or "standard".
        num_heads, rank, head_dim: of the attention, as in `LowRankAttention`.
        ff1_hidden, ff2_hidden: hidden widths; default `4 * dim`. 0 leaves the network out.
        in_dim, out_dim: widths of the input and the result (standard form only).
        dropout: behind every step (standard form only); not on attention weights.
        learnable_temperature: as in `LowRankAttention` (standard form only).
        method, backend: as in `boltzattn.attention`.

    Example:
        >>> model = OneLayerTransformer(32, form="standard", num_heads=4, in_dim=3, out_dim=1)
        >>> model(torch.randn(2, 1000, 3)).shape
        torch.Size([2, 1000, 1])
    """

    report: Any = None  # what a construction of boltzattn.theory says about the module it made

    def __init__(
        self,
        dim: int,
        *,
        form: str = "standard",
        num_heads: int = 1,
        rank: int = 1,
        head_dim: int | None = None,
        ff1_hidden: int | None = None,
        ff2_hidden: int | None = None,
        in_dim: int | None = None,
        out_dim: int | None = None,
        dropout: float = 0.0,
        learnable_temperature: bool = False,
        method: str = "auto",
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if form not in FORMS:
            raise ValueError(f"form must be 'paper' or 'standard', got {form!r}")
        paper = form == "paper"
        for name, given in (
            ("in_dim", in_dim),
            ("out_dim", out_dim),
            ("dropout", dropout),
            ("learnable_temperature", learnable_temperature),
        ):
            if paper and given:
                raise ValueError(
                    f"{name}={given} is no part of the paper's block; use form='standard'"
                )
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.form = form
        self.attention = LowRankAttention(
            dim,
            num_heads,
            bias=not paper,
            batch_first=True,
            rank=rank,
            head_dim=head_dim,
            scale=1.0 if paper else None,
            learnable_temperature=learnable_temperature,
            output_dropout=dropout,
            method=method,
            backend=backend,
            **factory,
        )

        def network(hidden: int | None) -> FeedForward | None:
            hidden = 4 * dim if hidden is None else hidden
            if hidden == 0:
                return None
            activation = "relu" if paper else "gelu"
            return FeedForward(
                dim, hidden, activation=activation, dropout=dropout, norm=not paper, **factory
            )

        self.in_proj = None if in_dim is None else nn.Linear(in_dim, dim, **factory)
        self.ff1 = network(ff1_hidden)
        self.attention_norm = None if paper else nn.LayerNorm(dim, **factory)
        self.ff2 = network(ff2_hidden)
        self.out_norm = None if out_dim is None else nn.LayerNorm(dim, **factory)
        self.out_proj = None if out_dim is None else nn.Linear(dim, out_dim, **factory)

    @classmethod
    def from_weights(
        cls,
        w_q: Tensor,
        w_k: Tensor,
        w_v: Tensor,
        w_o: Tensor,
        *,
        num_heads: int = 1,
        ff1: FeedForward | None = None,
        ff2: FeedForward | None = None,
        method: str = "auto",
        backend: str = "auto",
    ) -> OneLayerTransformer:
        """The paper's block with these weights; device and dtype are those of `w_q`.

        Args:
            w_q, w_k: `[num_heads * rank, dim]`, the heads one below the other.
            w_v: `[num_heads * head_dim, dim]`.
            w_o: `[dim, num_heads * head_dim]`, the heads side by side.
            ff1, ff2: `FeedForward.from_weights(...)`, or None to leave the network out.

        They are then `attention.q_proj_weight`, `k_proj_weight`, `v_proj_weight` and
        `attention.out_proj.weight`.

        Example:
            >>> v, o = torch.randn(1, 8).double(), torch.randn(8, 1).double()
            >>> model = OneLayerTransformer.from_weights(10 * v, v, v, o)
            >>> model(torch.randn(5, 8).double()).shape
            torch.Size([5, 8])
        """
        dim = w_q.shape[-1]
        rows, value_rows = w_q.shape[0], w_v.shape[0]
        shapes = {
            "w_k": (w_k, (rows, dim)),
            "w_v": (w_v, (value_rows, dim)),
            "w_o": (w_o, (dim, value_rows)),
        }
        _check_shapes(f"w_q {list(w_q.shape)} [num_heads * rank, dim]", shapes)
        for name, height in (("w_q", rows), ("w_v", value_rows)):
            if height % num_heads:
                raise ValueError(
                    f"num_heads must divide the rows of {name}, got {num_heads} and {height}"
                )
        model = cls(
            dim,
            form="paper",
            num_heads=num_heads,
            rank=rows // num_heads,
            head_dim=value_rows // num_heads,
            ff1_hidden=0,
            ff2_hidden=0,
            method=method,
            backend=backend,
            device="meta",
            dtype=w_q.dtype,
        )
        model.attention.q_proj_weight = _parameter(w_q)
        model.attention.k_proj_weight = _parameter(w_k)
        model.attention.v_proj_weight = _parameter(w_v)
        model.attention.out_proj.weight = _parameter(w_o)
        model.ff1, model.ff2 = ff1, ff2
        return model

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """`[..., n, in_dim or dim]` to `[..., n, out_dim or dim]`.

        Args:
            x: the tokens of one set, or of many.
            key_padding_mask: `[..., n]`, True where a token is padding: no other token sees it
                (its own result is meaningless).
        """
        z = x if self.in_proj is None else self.in_proj(x)
        if self.ff1 is not None:
            z = self.ff1(z)
        z = z + self._attend(z, key_padding_mask)
        if self.ff2 is not None:
            z = self.ff2(z)
        if self.out_proj is not None and self.out_norm is not None:
            z = self.out_proj(self.out_norm(z))
        return z

    def _attend(self, z: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        seen = z if self.attention_norm is None else self.attention_norm(z)
        if z.ndim > 3:  # LowRankAttention has one batch axis, as nn.MultiheadAttention
            seen = seen.flatten(0, -3)
            if key_padding_mask is not None:
                key_padding_mask = key_padding_mask.flatten(0, -2)
        return self.attention(seen, seen, seen, key_padding_mask)[0].reshape(z.shape)

    def extra_repr(self) -> str:
        return f"form={self.form!r}"


def _parameter(value: Tensor) -> nn.Parameter:
    return nn.Parameter(value.detach().clone(memory_format=torch.contiguous_format))


def _check_shapes(given: str, wanted: Mapping[str, tuple[Tensor, tuple[int, ...]]]) -> None:
    for name, (tensor, shape) in wanted.items():
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"{name} must have shape {list(shape)} to fit {given}, got {list(tensor.shape)}"
            )
