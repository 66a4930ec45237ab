"""LowRankAttention: nn.MultiheadAttention with the rank of the QK product set free."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from boltzattn import backends, reference
from boltzattn.functional import attention, self_attention


class _DeclineFastPath:
    """Stands where nn.MultiheadAttention has `in_proj_weight`.

    nn.TransformerEncoder decides by its first layer's tensors whether to hand nested tensors to
    a native kernel that would ignore this module. It declines as soon as one of them overrides
    `__torch_function__`, in every mode, which is what this object is for. (`None` there raises
    in eval mode with gradients on.)
    """

    requires_grad = False

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        raise TypeError(
            "LowRankAttention has no in_proj_weight: q, k and v have different widths; "
            "use q_proj_weight, k_proj_weight and v_proj_weight"
        )


_DECLINE_FAST_PATH = _DeclineFastPath()


class LowRankAttention(nn.Module):
    """Multi-head attention whose query and key have `rank` coordinates a head.

    Constructor, call, masks and shapes are those of `torch.nn.MultiheadAttention`, except:

    * `need_weights` is False by default (weights are n_q x n_k numbers; ask for them);
    * a query that may attend to nothing gets the output bias, not NaN;
    * `is_causal=True` works without `attn_mask`.

    Args:
        embed_dim: width of queries and of the result.
        num_heads: number of heads.
        dropout: probability of dropping an attention weight in training, as in
            `nn.MultiheadAttention`. Only method "direct" can do it, in quadratic time:
            `output_dropout` is the linear-time choice.
        bias: biases of all four projections.
        add_bias_kv, add_zero_attn: accepted as False only.
        kdim, vdim: widths of key and value inputs; default `embed_dim`.
        batch_first: inputs are `[batch, n, width]` rather than `[n, batch, width]`.
        rank: coordinates of query and key a head; 1 runs in linear time.
        head_dim: width of the values a head; default `embed_dim // num_heads`.
        scale: factor on the logits; default `1 / sqrt(rank)`.
        learnable_temperature: divide the logits of each head by `exp(log_temperature)`, a
            parameter that starts at 0.
        output_dropout: dropout on the result, after the output projection.
        method, backend: as in `boltzattn.attention`.

    Initialisation: the rows of W_Q, and those of W_K, are orthonormal. For inputs of unit variance
    (what a LayerNorm gives) every coordinate of q and k then has variance exactly 1, and the
    logits have standard deviation 1 for every rank, width and number of heads. A rank-1
    query q_i acts as an inverse temperature on the keys, so a typical query starts out with
    an effective share exp(-q_i^2) of the keys: neither the mean of everything, whose gradient
    for q and k is weak, nor one key, whose gradient vanishes. (Xavier, which nn.MultiheadAttention
    uses, counts the output width: its spread would depend on num_heads * rank.) Orthogonal rows
    keep heads that see one direction each from seeing the same one. W_V, W_O and biases start
    as in nn.MultiheadAttention.

    Example:
        >>> import torch, boltzattn.nn
        >>> layer = boltzattn.nn.LowRankAttention(64, 8, batch_first=True)
        >>> x = torch.randn(2, 1000, 64)
        >>> out, weights = layer(x, x, x)
        >>> out.shape, weights
        (torch.Size([2, 1000, 64]), None)
    """

    # Read by nn.TransformerEncoderLayer; False makes it leave its fused kernel alone.
    _qkv_same_embed_dim = False

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        rank: int = 1,
        head_dim: int | None = None,
        scale: float | None = None,
        learnable_temperature: bool = False,
        output_dropout: float = 0.0,
        method: str = "auto",
        backend: str = "auto",
    ) -> None:
        super().__init__()
        for name, size in (
            ("embed_dim", embed_dim),
            ("num_heads", num_heads),
            ("rank", rank),
            ("kdim", kdim),
            ("vdim", vdim),
            ("head_dim", head_dim),
        ):
            if size is not None and size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        if head_dim is None and embed_dim % num_heads:
            raise ValueError(
                f"num_heads must divide embed_dim when head_dim is not given, got embed_dim "
                f"{embed_dim} and num_heads {num_heads}; pass head_dim (any width is possible)"
            )
        for name, given in (("add_bias_kv", add_bias_kv), ("add_zero_attn", add_zero_attn)):
            if given:
                raise ValueError(
                    f"{name}=True is not supported by LowRankAttention; append the extra token "
                    "to key and value before the call instead"
                )
        backends.check_name("method", method, backends.METHODS)
        backends.check_name("backend", backend, tuple(backends.BACKENDS))
        for name, p in (("dropout", dropout), ("output_dropout", output_dropout)):
            if not 0.0 <= p <= 1.0:
                raise ValueError(f"{name} must be between 0 and 1, got {p}")
        if dropout > 0.0 and method not in ("auto", "direct"):
            raise ValueError(
                f"dropout={dropout} drops attention weights, which method {method!r} never forms; "
                "use output_dropout, or method='direct' (quadratic time)"
            )
        if dropout > 0.0 and method == "auto" and rank == 1:
            warnings.warn(
                "dropout of attention weights makes training take method 'direct' (quadratic "
                "time); output_dropout keeps rank 1 linear",
                stacklevel=2,
            )

        self.embed_dim = embed_dim
        self.kdim = embed_dim if kdim is None else kdim
        self.vdim = embed_dim if vdim is None else vdim
        self.num_heads = num_heads
        self.rank = rank
        self.head_dim = embed_dim // num_heads if head_dim is None else head_dim
        self.dropout = dropout
        self.output_dropout = output_dropout
        self.batch_first = batch_first
        self.scale = scale
        self.method = method
        self.backend = backend

        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        widths = self._widths = (num_heads * rank, num_heads * rank, num_heads * self.head_dim)
        self.q_proj_weight = nn.Parameter(torch.empty(widths[0], embed_dim, **factory))
        self.k_proj_weight = nn.Parameter(torch.empty(widths[1], self.kdim, **factory))
        self.v_proj_weight = nn.Parameter(torch.empty(widths[2], self.vdim, **factory))
        self.in_proj_bias = nn.Parameter(torch.empty(sum(widths), **factory)) if bias else None
        self.out_proj = nn.Linear(widths[2], embed_dim, bias=bias, **factory)
        self.log_temperature = (
            nn.Parameter(torch.empty(num_heads, **factory)) if learnable_temperature else None
        )
        self.reset_parameters()

    @property
    def in_proj_weight(self) -> _DeclineFastPath:
        return _DECLINE_FAST_PATH

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw all parameters anew, as described in the class."""
        for weight in (self.q_proj_weight, self.k_proj_weight):
            rows, columns = weight.shape
            # QR has no half-precision kernel; fp32 is exact enough to round from.
            draw = torch.empty_like(weight, dtype=reference.accumulate_dtype(weight.dtype))
            # With more rows than columns orthogonal_ shortens the rows; undo that.
            nn.init.orthogonal_(draw, gain=max(1.0, rows / columns) ** 0.5)
            weight.copy_(draw)
        nn.init.xavier_uniform_(self.v_proj_weight)
        self.out_proj.reset_parameters()
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)
        if self.log_temperature is not None:
            nn.init.zeros_(self.log_temperature)

    def extra_repr(self) -> str:
        shown = [
            f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, rank={self.rank}, "
            f"head_dim={self.head_dim}, batch_first={self.batch_first}"
        ]
        usual = {
            "kdim": self.embed_dim,
            "vdim": self.embed_dim,
            "dropout": 0.0,
            "output_dropout": 0.0,
            "scale": None,
            "method": "auto",
            "backend": "auto",
        }
        shown += [
            f"{name}={getattr(self, name)!r}"
            for name, default in usual.items()
            if getattr(self, name) != default
        ]
        if self.log_temperature is not None:
            shown.append("learnable_temperature=True")
        if self.in_proj_bias is None:
            shown.append("bias=False")
        return ", ".join(shown)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend; see `torch.nn.MultiheadAttention.forward` for shapes and masks.

        Args:
            query: `[n_q, batch, embed_dim]`, `[batch, n_q, embed_dim]` with `batch_first`, or
                `[n_q, embed_dim]` unbatched; key and value alike with n_k.
            key_padding_mask: `[batch, n_k]` (`[n_k]` unbatched); bool, True = ignore this key, or
                floating, added to its logits.
            need_weights: also return the attention weights; forms all n_q x n_k of them.
            attn_mask: `[n_q, n_k]` or `[batch * num_heads, n_q, n_k]`; bool, True = may NOT
                attend (as in nn.MultiheadAttention, unlike SDPA), or floating, added.
            average_attn_weights: mean over heads of the weights returned.
            is_causal: query i sees keys 0..i. With `attn_mask` it is a promise that the mask is
                just that one, and lets the mask go unread.

        Returns:
            The result in the shape of `query`, and the weights, `[batch, n_q, n_k]` or per head
            `[batch, num_heads, n_q, n_k]` (no batch axis if unbatched), or None.
        """
        batched = query.ndim == 3
        turned = batched and not self.batch_first
        is_self = query is key and key is value
        if turned:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        attn_mask = self._attn_mask(attn_mask, query, key)
        w_q, b_q, b_k, b_v = self._query_weight_and_biases()
        call: dict[str, Any] = {
            "attn_mask": attn_mask,
            "dropout_p": self.dropout if self.training else 0.0,
            "is_causal": is_causal,
            "scale": self.scale,
            "key_padding_mask": key_padding_mask,
            "method": self.method,
            "backend": self.backend,
        }
        if is_self and not need_weights:
            out = self_attention(
                query,
                w_q,
                self.k_proj_weight,
                self.v_proj_weight,
                self.out_proj.weight,
                num_heads=self.num_heads,
                b_q=b_q,
                b_k=b_k,
                b_v=b_v,
                b_o=self.out_proj.bias,
                **call,
            )
        else:
            out = attention(
                self._heads(query, w_q, b_q),
                self._heads(key, self.k_proj_weight, b_k),
                self._heads(value, self.v_proj_weight, b_v),
                **call,
            )
            out = self.out_proj(out.transpose(-2, -3).flatten(-2))
        if self.output_dropout > 0.0:
            out = F.dropout(out, self.output_dropout, self.training)
        return (out.transpose(0, 1) if turned else out), None

    def _heads(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias).unflatten(-1, (self.num_heads, -1)).transpose(-2, -3)

    def _query_weight_and_biases(
        self,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """(w_q, b_q, b_k, b_v); a temperature is folded into the query's projection."""
        w_q = self.q_proj_weight
        b_q = b_k = b_v = None
        if self.in_proj_bias is not None:
            b_q, b_k, b_v = self.in_proj_bias.split(self._widths)
        if self.log_temperature is not None:
            factor = torch.exp(-self.log_temperature).repeat_interleave(self.rank)
            w_q = w_q * factor[:, None]
            b_q = None if b_q is None else b_q * factor
        return w_q, b_q, b_k, b_v

    def _attn_mask(self, mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
        return mask
