"""FeedForward and OneLayerTransformer: the block of Kajitsuka & Sato, and a practical form."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from boltzattn.nn.attention import LowRankAttention

# Hidden activations held at once when no gradient is needed: 4 MB of fp64. Larger pieces do not fit
# into the caches and are slower.
HIDDEN_AT_ONCE = 1 << 19

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu}
FORMS = ("paper", "standard")
TIMESTEP_ENCODINGS = ("table", "sinusoidal")
# Sine and cosine of t, t/4, .. for timestep_encoding="sinusoidal".
_FREQUENCIES = 4


class FeedForward(nn.Module):
    """A two-layer network with a skip connection, token by token: `z + W2 act(W1 z + b1) + b2`.

    Args:
        embed_dim: width of a token.
        hidden_dim: number of hidden neurons. Without gradients the tokens are processed in pieces,
            so a large `hidden_dim` does not need `tokens x hidden_dim` activations at once.
        activation: "relu" or "gelu".
        dropout: probability, for the hidden activations and for the output of W2.
        norm: apply a LayerNorm first, `z + W2 act(W1 norm(z) + b1) + b2`.
        device, dtype: of the parameters.

    `linear1` holds W1 `[hidden_dim, embed_dim]` and b1, `linear2` holds W2 and b2.

    Example:
        >>> FeedForward(16, 64)(torch.randn(2, 100, 16)).shape
        torch.Size([2, 100, 16])
    """

    def __init__(
        self,
        embed_dim: int,
        hidden_dim: int,
        *,
        activation: str = "relu",
        dropout: float = 0.0,
        norm: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if embed_dim < 1 or hidden_dim < 1:
            raise ValueError(
                f"embed_dim and hidden_dim must be at least 1, got {embed_dim} and {hidden_dim}"
            )
        if activation not in ACTIVATIONS:
            raise ValueError(
                f"activation must be one of {', '.join(map(repr, ACTIVATIONS))}, got {activation!r}"
            )
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.activation = activation
        self.norm = nn.LayerNorm(embed_dim, **factory) if norm else None
        self.linear1 = nn.Linear(embed_dim, hidden_dim, **factory)
        self.linear2 = nn.Linear(hidden_dim, embed_dim, **factory)
        self.dropout = dropout

    @classmethod
    def from_weights(
        cls, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, *, activation: str = "relu"
    ) -> FeedForward:
        """Build the network from its weights, on their device and in their dtype.

        Args:
            w1, b1: `[hidden_dim, embed_dim]`, `[hidden_dim]`.
            w2, b2: `[embed_dim, hidden_dim]`, `[embed_dim]`.

        Example:
            >>> w = torch.randn(5000, 3, dtype=torch.float64)
            >>> b1, b2 = torch.zeros(5000).double(), torch.zeros(3).double()
            >>> FeedForward.from_weights(w, b1, w.T, b2).linear1.out_features
            5000
        """
        hidden_dim, embed_dim = w1.shape
        shapes = {
            "b1": (b1, (hidden_dim,)),
            "w2": (w2, (embed_dim, hidden_dim)),
            "b2": (b2, (embed_dim,)),
        }
        _check_shapes(f"w1 {list(w1.shape)} [hidden_dim, embed_dim]", shapes)
        network = cls(embed_dim, hidden_dim, activation=activation, device="meta", dtype=w1.dtype)
        network.linear1.weight, network.linear1.bias = _parameter(w1), _parameter(b1)
        network.linear2.weight, network.linear2.bias = _parameter(w2), _parameter(b2)
        return network

    def forward(self, z: Tensor) -> Tensor:
        """Apply the network to every token.

        Args:
            z: `[..., embed_dim]`, the shape of the result, too.
        """
        tokens, hidden_dim = z.numel() // max(1, z.shape[-1]), self.linear1.out_features
        if (
            torch.compiler.is_compiling()
            or torch.is_grad_enabled()
            or tokens * hidden_dim <= HIDDEN_AT_ONCE
        ):
            return self._forward(z)
        rows = z.reshape(-1, z.shape[-1]).split(max(1, HIDDEN_AT_ONCE // hidden_dim))
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
    """`FF2(SA(FF1(z)))`: a token-wise network, one attention layer, a token-wise network.

    The module is permutation equivariant: shuffling the tokens shuffles the output. There are no
    positions; without `is_causal` the input is a set.

    `form="paper"` is the block of Kajitsuka & Sato (ICLR 2024), who prove that it is a universal
    approximator with a single rank-1 head:

        FF(Z) = Z + relu(Z W1^T + b1) W2^T + b2
        SA(Z) = Z + sum_h softmax((Z Wq_h^T)(Z Wk_h^T)^T) (Z Wv_h^T) Wo_h^T

    without scaling, normalisation, dropout or biases in SA.

    `form="standard"` adds what training needs: a LayerNorm before each of the three steps, GELU
    instead of ReLU, dropout, biases, and logits scaled by `1 / sqrt(rank)`. `in_dim` adds a linear
    map before the block, `out_dim` a LayerNorm and a linear map after it.

    With `loops = k` attention and FF2 are applied k times with the same weights, as in the looped
    transformers of Xu & Sato (ICML 2025): depth without further parameters. Weights that are the
    same in every loop limit what loops can do, which `timestep_encoding` lifts: what attention and
    FF2 add to a token in loop t is multiplied by scales of that loop, a number per coordinate.
    They start at 1.

    Args:
        embed_dim: width of a token inside the block.
        form: "paper" or "standard".
        num_heads, rank, head_dim: as in `LowRankAttention`.
        ff1_hidden_dim, ff2_hidden_dim: hidden widths of the two networks; default
            `4 * embed_dim`. 0 omits the network.
        in_dim, out_dim: widths of the input and the output (standard form only).
        dropout: probability, for the output of every step (standard form only); attention weights
            are not dropped.
        learnable_temperature, score: as in `LowRankAttention` (standard form only).
        loops: how often attention and FF2 are applied.
        timestep_encoding: None for the same scales in every loop; "table" for free scales in each,
            `2 * embed_dim` parameters a loop; "sinusoidal" for a linear function of sines and
            cosines of t, with as many parameters for any number of loops.
        method, backend: as in `boltzattn.attention`.
        device, dtype: of the parameters.

    Example:
        >>> model = OneLayerTransformer(32, form="standard", num_heads=4, in_dim=3, out_dim=1)
        >>> model(torch.randn(2, 1000, 3)).shape
        torch.Size([2, 1000, 1])
    """

    report: Any = None  # set by the constructions in boltzattn.theory

    def __init__(
        self,
        embed_dim: int,
        *,
        form: str = "standard",
        num_heads: int = 1,
        rank: int = 1,
        head_dim: int | None = None,
        ff1_hidden_dim: int | None = None,
        ff2_hidden_dim: int | None = None,
        in_dim: int | None = None,
        out_dim: int | None = None,
        dropout: float = 0.0,
        learnable_temperature: bool = False,
        score: str = "dot",
        loops: int = 1,
        timestep_encoding: str | None = None,
        method: str = "auto",
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if form not in FORMS:
            raise ValueError(f"form must be 'paper' or 'standard', got {form!r}")
        if not (isinstance(loops, int) and loops >= 1):
            raise ValueError(f"loops must be an integer of at least 1, got {loops!r}")
        if timestep_encoding not in (None, *TIMESTEP_ENCODINGS):
            raise ValueError(
                f"timestep_encoding must be None, 'table' or 'sinusoidal', got "
                f"{timestep_encoding!r}"
            )
        paper = form == "paper"
        for name, given in (
            ("in_dim", in_dim),
            ("out_dim", out_dim),
            ("dropout", dropout),
            ("learnable_temperature", learnable_temperature),
            ("score", "" if score == "dot" else score),
        ):
            if paper and given:
                raise ValueError(
                    f"{name}={given} is not part of the paper's block; use form='standard'"
                )
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.form, self.loops, self.timestep_encoding = form, loops, timestep_encoding
        self.attention = LowRankAttention(
            embed_dim,
            num_heads,
            bias=not paper,
            batch_first=True,
            rank=rank,
            head_dim=head_dim,
            scale=1.0 if paper else None,
            learnable_temperature=learnable_temperature,
            score=score,
            output_dropout=dropout,
            method=method,
            backend=backend,
            **factory,
        )

        def network(hidden_dim: int | None) -> FeedForward | None:
            if hidden_dim == 0:
                return None
            return FeedForward(
                embed_dim,
                4 * embed_dim if hidden_dim is None else hidden_dim,
                activation="relu" if paper else "gelu",
                dropout=dropout,
                norm=not paper,
                **factory,
            )

        self.in_proj = None if in_dim is None else nn.Linear(in_dim, embed_dim, **factory)
        self.ff1: nn.Module | None = network(ff1_hidden_dim)
        self.attention_norm = None if paper else nn.LayerNorm(embed_dim, **factory)
        self.ff2: nn.Module | None = network(ff2_hidden_dim)
        self.loop_scales = None
        self.loop_scale_weight = None
        if timestep_encoding == "table":
            self.loop_scales = nn.Parameter(torch.ones(loops, 2, embed_dim, **factory))
        elif timestep_encoding == "sinusoidal":
            shape = (2 * embed_dim, 2 * _FREQUENCIES)
            self.loop_scale_weight = nn.Parameter(torch.zeros(shape, **factory))
        self.out_norm = None if out_dim is None else nn.LayerNorm(embed_dim, **factory)
        self.out_proj = None if out_dim is None else nn.Linear(embed_dim, out_dim, **factory)

    @classmethod
    def from_weights(
        cls,
        w_q: Tensor,
        w_k: Tensor,
        w_v: Tensor,
        w_o: Tensor,
        *,
        num_heads: int = 1,
        ff1: nn.Module | None = None,
        ff2: nn.Module | None = None,
        method: str = "auto",
        backend: str = "auto",
    ) -> OneLayerTransformer:
        """Build the paper's block from its weights, on the device and in the dtype of `w_q`.

        Args:
            w_q, w_k: `[num_heads * rank, embed_dim]`, the heads stacked along the rows.
            w_v: `[num_heads * head_dim, embed_dim]`.
            w_o: `[embed_dim, num_heads * head_dim]`, the heads stacked along the columns.
            ff1, ff2: `FeedForward.from_weights(...)`, or any token-wise module, or None to omit
                the network.

        The weights become `attention.q_proj_weight`, `k_proj_weight`, `v_proj_weight` and
        `attention.out_proj.weight`.

        Example:
            >>> v, o = torch.randn(1, 8).double(), torch.randn(8, 1).double()
            >>> model = OneLayerTransformer.from_weights(10 * v, v, v, o)
            >>> model(torch.randn(5, 8).double()).shape
            torch.Size([5, 8])
        """
        embed_dim = w_q.shape[-1]
        rows, value_rows = w_q.shape[0], w_v.shape[0]
        shapes = {
            "w_k": (w_k, (rows, embed_dim)),
            "w_v": (w_v, (value_rows, embed_dim)),
            "w_o": (w_o, (embed_dim, value_rows)),
        }
        _check_shapes(f"w_q {list(w_q.shape)} [num_heads * rank, embed_dim]", shapes)
        for name, height in (("w_q", rows), ("w_v", value_rows)):
            if height % num_heads:
                raise ValueError(
                    f"num_heads must divide the rows of {name}, got {num_heads} and {height}"
                )
        model = cls(
            embed_dim,
            form="paper",
            num_heads=num_heads,
            rank=rows // num_heads,
            head_dim=value_rows // num_heads,
            ff1_hidden_dim=0,
            ff2_hidden_dim=0,
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

    def forward(
        self, x: Tensor, key_padding_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """Map `[..., n, in_dim or embed_dim]` to `[..., n, out_dim or embed_dim]`.

        Args:
            x: the tokens of one set or of a batch of sets.
            key_padding_mask: `[..., n]`, True where a token is padding: no other token attends to
                it, and its own output is meaningless.
            is_causal: token i attends to tokens 0..i.
        """
        z = x if self.in_proj is None else self.in_proj(x)
        if self.ff1 is not None:
            z = self.ff1(z)
        scales = self._scales(z)
        for loop in range(self.loops):
            added = self._attend(z, key_padding_mask, is_causal)
            z = z + (added if scales is None else scales[loop, 0] * added)
            if self.ff2 is None:
                continue
            after = self.ff2(z)
            z = after if scales is None else z + scales[loop, 1] * (after - z)
        if self.out_proj is not None and self.out_norm is not None:
            z = self.out_proj(self.out_norm(z))
        return z

    def _scales(self, z: Tensor) -> Tensor | None:
        """Factors `[loops, 2, embed_dim]` on what attention and FF2 add in each loop."""
        if self.loop_scale_weight is None:
            return self.loop_scales
        t = torch.arange(self.loops, dtype=z.dtype, device=z.device)[:, None]
        angles = t * 4.0 ** -torch.arange(_FREQUENCIES, dtype=z.dtype, device=z.device)
        waves = torch.cat([angles.sin(), angles.cos()], -1)
        return 1 + (waves @ self.loop_scale_weight.T).unflatten(-1, (2, -1))

    def _attend(self, z: Tensor, key_padding_mask: Tensor | None, is_causal: bool) -> Tensor:
        seen = z if self.attention_norm is None else self.attention_norm(z)
        if z.ndim > 3:  # LowRankAttention has one batch axis, like nn.MultiheadAttention
            seen = seen.flatten(0, -3)
            if key_padding_mask is not None:
                key_padding_mask = key_padding_mask.flatten(0, -2)
        mixed, _ = self.attention(seen, seen, seen, key_padding_mask, is_causal=is_causal)
        return mixed.reshape(z.shape)

    def extra_repr(self) -> str:
        shown = f"form={self.form!r}"
        if self.loops > 1 or self.timestep_encoding is not None:
            shown += f", loops={self.loops}, timestep_encoding={self.timestep_encoding!r}"
        return shown


def _parameter(value: Tensor) -> nn.Parameter:
    return nn.Parameter(value.detach().clone(memory_format=torch.contiguous_format))


def _check_shapes(given: str, wanted: Mapping[str, tuple[Tensor, tuple[int, ...]]]) -> None:
    for name, (tensor, shape) in wanted.items():
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"{name} must have shape {list(shape)} to fit {given}, got {list(tensor.shape)}"
            )
