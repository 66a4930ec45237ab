"""LowRankAttention: nn.MultiheadAttention with the rank of the QK product set free."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from boltzattn import distributed
from boltzattn.compose.streaming import StreamingAttention
from boltzattn.dispatch.preference import preferred
from boltzattn.dispatch.torch_modes import without_autocast
from boltzattn.functional import Projections, attend_layer, attention, attention_varlen
from boltzattn.nn.approximation import Approximation, Decomposition, Form, decompose, truncate
from boltzattn.nn.inputs import check_inputs, check_jagged, check_mask, jagged
from boltzattn.problem import Problem, accumulate_dtype, default_scale
from boltzattn.reference.direct import weights
from boltzattn.reference.scores import scores
from boltzattn.validation import check_scale, check_score


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


def _multihead_weights(mha: nn.MultiheadAttention) -> tuple[Tensor, Tensor, Tensor]:
    """The weights of query, key and value, `[embed_dim, width]` each."""
    if mha.in_proj_weight is not None:
        w_q, w_k, w_v = mha.in_proj_weight.chunk(3)
        return w_q, w_k, w_v
    return mha.q_proj_weight, mha.k_proj_weight, mha.v_proj_weight


def multihead_form(mha: nn.MultiheadAttention) -> Form:
    """What the logits of an nn.MultiheadAttention are made of."""
    w_q, w_k, _ = _multihead_weights(mha)
    b_q = None if mha.in_proj_bias is None else mha.in_proj_bias.chunk(3)[0]
    return Form.of(w_q, b_q, w_k, mha.num_heads, default_scale(mha.head_dim, "dot"))


class _ShiftedStream(StreamingAttention):
    """The state of a layer with `token_shift`: its last tokens, before mixing, belong to it."""

    recent: Tensor  # [..., token_shift, embed_dim]

    def state_bytes(self) -> int:
        return super().state_bytes() + self.recent.numel() * self.recent.itemsize

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "recent": self.recent.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "recent" not in state:
            raise ValueError("state must have the entries of state_dict(), lacks 'recent'")
        super().load_state_dict(state)
        self.recent = state["recent"].clone()


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
        scale: factor on the logits; default `1 / sqrt(rank)`, and 1 for Gaussian scores.
        learnable_temperature: divide the logits of each head by `exp(log_temperature)`, a
            parameter that starts at 0.
        score: "dot", or "gaussian" for logits `-|q - k|^2 / (2 b^2)`: a query attends to the keys
            near it. The bandwidth b of each head is learnt: `exp(log_bandwidth)`.
        alibi: add `-slope |i - j|` to the logits of tokens i and j, with the slopes of ALiBi,
            `2^(-8 (h + 1) / num_heads)` for head h. They are the buffer `alibi_slopes`, which is
            part of the state dict, so that a checkpoint has the slopes it was trained with.
        token_shift: number of earlier tokens that are mixed into every token before the
            projections, channel by channel, with the learnt weights `shift_weight`. Row i of them
            belongs to the token i places before; at first every token is left as it is. For
            self-attention only.
        output_dropout: dropout on the result, after the output projection.
        method, backend: as in `boltzattn.attention`.
        process_group: the sequence is spread over the processes of this torch.distributed group,
            inputs and results being this process's tokens; see `boltzattn.distributed`.
        exchange: what these processes send, "moments" (rank 1) or "gather" (any rank).
        device, dtype: of the parameters.

    Initialisation: the rows of W_Q, and those of W_K, are orthonormal. For inputs of unit variance
    (what a LayerNorm gives) every coordinate of q and k then has variance exactly 1, and the
    logits have standard deviation 1 for every rank, width and number of heads. A rank-1
    query q_i acts as an inverse temperature on the keys, so a typical query starts out with
    an effective share exp(-q_i^2) of the keys: neither the mean of everything, whose gradient
    for q and k is weak, nor one key, whose gradient vanishes. (Xavier, which nn.MultiheadAttention
    uses, counts the output width: its spread would depend on num_heads * rank.) Orthogonal rows
    keep heads that see one direction each from seeing the same one. W_V, W_O and biases start
    as in nn.MultiheadAttention.

    Bandwidths of Gaussian heads start at `sqrt(rank) * 2^(-3 (h + 1/2) / num_heads)`, from wide to
    narrow. Since q and k have unit variance, |q - k| is about sqrt(2 rank). The first heads see
    most of the keys, as a dot head does, and have a gradient for every key; the last ones resolve
    about an eighth of the keys' spread, so that some head is near the resolution that a task
    needs. Equal bandwidths would have to be told apart by training first.

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
        process_group: Any = None,
        exchange: str = "moments",
        score: str = "dot",
        alibi: bool = False,
        token_shift: int = 0,
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
            if size is not None and not (isinstance(size, int) and size >= 1):
                raise ValueError(f"{name} must be an integer of at least 1, got {size!r}")
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
        if not (isinstance(token_shift, int) and token_shift >= 0):
            raise ValueError(f"token_shift must be an integer of at least 0, got {token_shift!r}")
        if token_shift and (process_group is not None or {kdim, vdim} - {None, embed_dim}):
            raise ValueError(
                "token_shift must be 0 with process_group and with kdim or vdim other than "
                "embed_dim: it is for self-attention whose tokens are all in this process"
            )
        preferred(method, backend)  # checks the names
        check_scale(scale)
        check_score(score)
        distributed.check_exchange(exchange)
        if score == "gaussian" and learnable_temperature:
            raise ValueError(
                "learnable_temperature must be False with score='gaussian': the temperature of a "
                "Gaussian head is its bandwidth, which the parameter log_bandwidth learns"
            )
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
        self.process_group = process_group
        self.exchange = exchange
        self.score = score
        self.token_shift = token_shift
        self.approximation: Approximation | None = None  # set by from_multihead

        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        widths = self._widths = (num_heads * rank, num_heads * rank, num_heads * self.head_dim)
        self.q_proj_weight = nn.Parameter(torch.empty(widths[0], embed_dim, **factory))
        self.k_proj_weight = nn.Parameter(torch.empty(widths[1], self.kdim, **factory))
        self.v_proj_weight = nn.Parameter(torch.empty(widths[2], self.vdim, **factory))
        self.in_proj_bias = nn.Parameter(torch.empty(sum(widths), **factory)) if bias else None
        # Quantization must leave it alone: its weight is part of one operator.
        self.out_proj = NonDynamicallyQuantizableLinear(widths[2], embed_dim, bias=bias, **factory)
        self.log_temperature = (
            nn.Parameter(torch.empty(num_heads, **factory)) if learnable_temperature else None
        )
        self.log_bandwidth = (
            nn.Parameter(torch.empty(num_heads, **factory)) if score == "gaussian" else None
        )
        self.shift_weight = (
            nn.Parameter(torch.empty(token_shift + 1, embed_dim, **factory))
            if token_shift
            else None
        )
        self.alibi_slopes: Tensor | None
        slopes = torch.empty(num_heads, **factory) if alibi else None
        self.register_buffer("alibi_slopes", slopes)
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
            draw = torch.empty_like(weight, dtype=accumulate_dtype(weight.dtype))
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
        if self.shift_weight is not None:
            nn.init.zeros_(self.shift_weight)
            nn.init.ones_(self.shift_weight[0])
        head = torch.arange(self.num_heads, dtype=torch.float64, device="cpu")
        if self.log_bandwidth is not None:
            octaves = -3 * (head + 0.5) / self.num_heads
            self.log_bandwidth.copy_(octaves * math.log(2) + math.log(self.rank) / 2)
        if self.alibi_slopes is not None:
            self.alibi_slopes.copy_(torch.exp2(-8 * (head + 1) / self.num_heads))

    @classmethod
    def from_multihead(
        cls,
        mha: nn.MultiheadAttention,
        rank: int,
        *,
        method: str = "auto",
        backend: str = "auto",
    ) -> LowRankAttention:
        """The layer nearest to `mha` among those whose heads have this rank.

        Values and output projection are kept; each head's bilinear form is replaced by its best
        approximation of rank `rank` (see `boltzattn.nn.approximation`). The result is
        exact to rounding for `rank >= mha.head_dim`. What was kept is in `.approximation`.

        Example:
            >>> mha = torch.nn.MultiheadAttention(64, 8, batch_first=True)
            >>> print(LowRankAttention.from_multihead(mha, rank=8).approximation)
            rank 8 -> 8, kept 100.0% of the logits' variance (worst head 100.0%)
        """
        if not isinstance(mha, nn.MultiheadAttention):
            raise TypeError(f"mha must be an nn.MultiheadAttention, got {type(mha).__name__}")
        form = multihead_form(mha)
        return cls._from_decomposition(
            mha,
            form,
            decompose(form),
            (rank,) * mha.num_heads,
            on_data=False,
            method=method,
            backend=backend,
        )

    @classmethod
    def _from_decomposition(
        cls,
        mha: nn.MultiheadAttention,
        form: Form,
        decomposition: Decomposition,
        ranks: tuple[int, ...],
        *,
        on_data: bool,
        method: str,
        backend: str,
    ) -> LowRankAttention:
        """The layer with these heads and the values and output projection of `mha`."""
        rank = max(ranks)
        w_v = _multihead_weights(mha)[2]
        layer = cls(
            mha.embed_dim,
            mha.num_heads,
            dropout=mha.dropout,
            bias=mha.in_proj_bias is not None,
            add_bias_kv=mha.bias_k is not None,
            add_zero_attn=mha.add_zero_attn,
            kdim=mha.kdim,
            vdim=mha.vdim,
            batch_first=mha.batch_first,
            device=w_v.device,
            dtype=w_v.dtype,
            rank=rank,
            method=method,
            backend=backend,
        )
        new_q, new_b, new_k = truncate(form, decomposition, ranks, default_scale(rank, "dot"))
        spectrum = decomposition.spectrum.cpu()
        layer.approximation = Approximation(rank, spectrum, ranks, on_data)
        with torch.no_grad():
            per_head = (mha.num_heads, rank)
            width = new_q.shape[1]
            # Coordinates beyond the rank of a head: a zero query makes them vanish, and the keys
            # stay as drawn so that they can be learnt.
            layer.q_proj_weight.zero_().unflatten(0, per_head)[:, :width] = new_q
            keys = layer.k_proj_weight.unflatten(0, per_head)
            for head, own in enumerate(ranks):
                keys[head, : min(own, width)] = new_k[head, :own].to(keys.dtype)
            layer.v_proj_weight.copy_(w_v)
            layer.out_proj.weight.copy_(mha.out_proj.weight)
            if layer.in_proj_bias is not None:
                to_q, to_k, to_v = layer.in_proj_bias.split(layer._widths)
                to_q.zero_().unflatten(0, per_head)[:, :width] = new_b
                to_k.zero_()
                to_v.copy_(mha.in_proj_bias.chunk(3)[2])
                layer.out_proj.bias.copy_(mha.out_proj.bias)
        return layer.train(mha.training)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """Accept the packed weight of an nn.MultiheadAttention of the same widths."""
        packed = state_dict.get(prefix + "in_proj_weight")
        if packed is not None and packed.shape[0] == sum(self._widths):
            del state_dict[prefix + "in_proj_weight"]
            for name, part in zip("qkv", packed.split(self._widths), strict=True):
                state_dict[f"{prefix}{name}_proj_weight"] = part
        elif packed is not None:
            *_, errors = args
            errors.append(
                f"{prefix}in_proj_weight belongs to an nn.MultiheadAttention, whose heads have "
                f"another rank than {self.rank}; load it into that module, and convert it with "
                "LowRankAttention.from_multihead(module, rank)"
            )
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

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
            "score": "dot",
            "token_shift": 0,
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
        if self.alibi_slopes is not None:
            shown.append("alibi=True")
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
                `[n_q, embed_dim]` unbatched. With `batch_first` also nested tensors of the jagged
                layout, without masks: no padding is computed.
            key, value: alike, with n_k tokens and widths `kdim` and `vdim`.
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
        is_self = query is key and key is value
        if self.token_shift and not (is_self and isinstance(query, Tensor) and not query.is_nested):
            raise ValueError(
                "query, key and value must be one tensor, and not a nested one, in a layer with "
                "token_shift: it mixes neighbouring tokens of one sequence"
            )
        if is_self and isinstance(query, Tensor) and not query.is_nested:
            # The common call, checked and computed with as little Python as possible.
            weight = self.v_proj_weight
            fits = query.ndim in (2, 3) and query.shape[-1] == self.embed_dim
            fits = fits and query.dtype == weight.dtype and query.device == weight.device
        else:
            fits = False
            if jagged(query, key, value):
                refused = self._refused(need_weights, attn_mask)
                refused["key_padding_mask"] = key_padding_mask is not None
                refused["process_group"] = self.process_group is not None
                widths = self.embed_dim, self.kdim, self.vdim
                check_jagged(query, key, value, widths, self.batch_first, **refused)
                return self._forward_jagged(query, key, value, is_causal), None
        if not fits:
            widths = self.embed_dim, self.kdim, self.vdim
            check_inputs(query, key, value, widths, self.batch_first, self.v_proj_weight)
        turned = query.ndim == 3 and not self.batch_first
        if turned:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        if key_padding_mask is not None:
            check_mask("key_padding_mask", key_padding_mask, [key.shape[:-1]])
        if self.shift_weight is not None:
            if key_padding_mask is not None:  # what a mask hides may hold anything
                hidden = key_padding_mask
                hidden = hidden if hidden.dtype == torch.bool else hidden == -math.inf
                query = query.masked_fill(hidden[..., None], 0.0)
            query = key = value = self._mixed(query, self.shift_weight)
        if self.process_group is not None:
            refused = self._refused(need_weights, attn_mask)
            if given := [name for name, is_given in refused.items() if is_given]:
                raise ValueError(
                    f"{given[0]} must not be used together with process_group: a sequence that is "
                    "spread over processes takes a key_padding_mask and is_causal only"
                )
        if attn_mask is not None:
            attn_mask = self._allowed(attn_mask, query, key)
            if is_causal and query.shape[-2] == key.shape[-2]:
                attn_mask = None
            else:  # of a rectangle "causal" may mean two things; the mask says which
                is_causal = False
        weights = None
        if is_self and not need_weights and self.process_group is None:
            out = attend_layer(
                query,
                self._projections(),
                self.num_heads,
                preferred(self.method, self.backend),
                attn_mask=attn_mask,
                dropout_p=self.dropout if self.training else 0.0,
                is_causal=is_causal,
                scale=self.scale,
                key_padding_mask=key_padding_mask,
                score=self.score,
                alibi_slopes=self.alibi_slopes,
            )
        else:
            heads, weights = self._attend(
                (query, key, value), attn_mask, is_causal, key_padding_mask, need_weights
            )
            out = self.out_proj(heads.transpose(-2, -3).flatten(-2))
            if weights is not None and average_attn_weights:
                weights = weights.mean(-3)
        if self.output_dropout > 0.0:
            out = F.dropout(out, self.output_dropout, self.training)
        return (out.transpose(0, 1) if turned else out), weights

    @torch.no_grad()
    def step(
        self,
        x: Tensor,
        state: StreamingAttention | None = None,
        *,
        query_bound: float | None = None,
        key_bound: float | None = None,
    ) -> tuple[Tensor, StreamingAttention]:
        """Causal self-attention of the next tokens, which see all earlier ones through `state`.

        Rank 1, for inference: calling it with a prompt, then token by token, gives what `forward`
        gives for the whole sequence with `is_causal=True`. The state has a fixed size.

        Args:
            x: the next tokens, in the shape of `query` in `forward`; any number of them.
            state: what the previous call returned; None starts a sequence.
            query_bound: when a sequence starts, the largest |query| that may come; a query beyond
                it raises. By default no token of up to twice the norm of the largest token of the
                first call can exceed it.
            key_bound: the same for keys, of layers with `alibi` or Gaussian scores. Their state
                grows with the product of both bounds, so by default tokens of up to 1.25 times
                that norm have room. Other layers take keys of any size.

        Returns:
            The result in the shape of `x`, and the state, which is changed in place.

        Example:
            >>> layer = LowRankAttention(64, 8, batch_first=True).eval()
            >>> x = torch.randn(2, 100, 64)
            >>> out, state = layer.step(x[:, :99])
            >>> last, state = layer.step(x[:, 99:], state)
            >>> torch.allclose(last, layer(x, x, x, is_causal=True)[0][:, 99:], atol=1e-5)
            True
        """
        if self.rank != 1 or self.process_group is not None:
            raise ValueError(
                f"step needs a layer of rank 1 without process_group, got rank {self.rank}; keep "
                "keys and values yourself, and call forward"
            )
        widths = self.embed_dim, self.kdim, self.vdim
        check_inputs(x, x, x, widths, self.batch_first, self.v_proj_weight)
        turned = x.ndim == 3 and not self.batch_first
        rows = x.transpose(0, 1) if turned else x
        if self.shift_weight is not None:
            recent = rows.new_zeros(*rows.shape[:-2], self.token_shift, self.embed_dim)
            if isinstance(state, _ShiftedStream):
                recent = state.recent
            recent = torch.cat([recent, rows], -2)
            rows = self._mixed(rows, self.shift_weight, recent)
        projections = self._weights_and_biases()
        q, k, v = (
            F.linear(rows, weight, bias).unflatten(-1, (self.num_heads, -1)).transpose(-2, -3)
            for weight, bias in projections
        )
        if state is None:
            largest = float(rows.norm(dim=-1).max()) if rows.numel() else 1.0
            bounds, room = [query_bound, key_bound], 1.25 if self._is_biased else 2.0
            for i, (weight, bias) in enumerate(projections[:2]):
                if bounds[i] is None:
                    most = room * largest * float(weight.norm(dim=-1).max())
                    most += 0.0 if bias is None else float(bias.abs().max())
                    bounds[i] = most or 1.0
            kind = StreamingAttention if self.shift_weight is None else _ShiftedStream
            state = kind(
                tuple(q.shape[:-2]),
                self.head_dim,
                bounds[0] or 1.0,
                scale=default_scale(1, self.score) if self.scale is None else self.scale,
                score=self.score,
                alibi_slopes=self.alibi_slopes,
                key_bound=bounds[1] if self._is_biased else None,
                dtype=q.dtype,
                device=q.device,
            )
        if len(state) == 0:
            heads = attention(
                q,
                k,
                v,
                is_causal=True,
                scale=self.scale,
                score=self.score,
                alibi_slopes=self.alibi_slopes,
                backend=self.backend,
            )
            state.append(k, v)
        else:
            steps = zip(q.split(1, -2), k.split(1, -2), v.split(1, -2), strict=True)
            heads = torch.cat([state.step(*one) for one in steps], -2)
        if isinstance(state, _ShiftedStream):
            state.recent = recent[..., recent.shape[-2] - self.token_shift :, :].clone()
        out = self.out_proj(heads.transpose(-2, -3).flatten(-2))
        return (out.transpose(0, 1) if turned else out), state

    def _mixed(self, x: Tensor, weight: Tensor, known: Tensor | None = None) -> Tensor:
        """Every token with `token_shift` tokens before it, which are zero unless `known`."""
        shift, n = self.token_shift, x.shape[-2]
        known = F.pad(x, (0, 0, shift, 0)) if known is None else known
        mixed = weight[0] * x
        for i in range(1, shift + 1):
            mixed = mixed + weight[i] * known.narrow(-2, shift - i, n)
        return mixed

    def _refused(self, need_weights: bool, attn_mask: Tensor | None) -> dict[str, bool]:
        """What nested tensors and spread sequences do not go with: whether it was asked for."""
        return {
            "need_weights": need_weights,
            "attn_mask": attn_mask is not None,
            "dropout": self.dropout > 0.0 and self.training,
        }

    def _attend(
        self,
        inputs: tuple[Tensor, Tensor, Tensor],
        attn_mask: Tensor | None,
        is_causal: bool,
        key_padding_mask: Tensor | None,
        need_weights: bool,
    ) -> tuple[Any, Tensor | None]:
        """(heads [..., num_heads, n_q, head_dim], weights or None) of three inputs."""
        q, k, v = (
            F.linear(x, weight, bias).unflatten(-1, (self.num_heads, -1)).transpose(-2, -3)
            for x, (weight, bias) in zip(inputs, self._weights_and_biases(), strict=True)
        )
        if need_weights:
            weights = self._weights(q, k, attn_mask, is_causal, key_padding_mask)
            return weights @ v, weights
        if self.process_group is not None:
            return distributed.attention(
                q,
                k,
                v,
                group=self.process_group,
                scale=self.scale,
                key_padding_mask=key_padding_mask,
                is_causal=is_causal,
                score=self.score,
                alibi_slopes=self.alibi_slopes,
                exchange=self.exchange,
                backend=self.backend,
            ), None
        return attention(
            q,
            k,
            v,
            attn_mask,
            self.dropout if self.training else 0.0,
            is_causal,
            self.scale,
            key_padding_mask=key_padding_mask,
            score=self.score,
            alibi_slopes=self.alibi_slopes,
            method=self.method,
            backend=self.backend,
        ), None

    def _forward_jagged(self, query: Any, key: Any, value: Any, is_causal: bool) -> Tensor:
        """Nested tensors of the jagged layout are packed sequences already."""
        query, key, value = (x.contiguous() for x in (query, key, value))  # no holes
        q, k, v = (
            F.linear(x.values(), weight, bias).unflatten(-1, (self.num_heads, -1))
            for x, (weight, bias) in zip(
                (query, key, value), self._weights_and_biases(), strict=True
            )
        )
        heads: Any = attention_varlen(
            q,
            k,
            v,
            query.offsets(),
            key.offsets(),
            is_causal=is_causal,
            scale=self.scale,
            score=self.score,
            alibi_slopes=self.alibi_slopes,
            method=self.method,
            backend=self.backend,
        )
        out = self.out_proj(heads.flatten(-2))
        if self.output_dropout > 0.0:
            out = F.dropout(out, self.output_dropout, self.training)
        return torch.nested.nested_tensor_from_jagged(out, query.offsets())

    @property
    def _is_biased(self) -> bool:
        """Whether logits are more than products of queries and keys."""
        return self.score == "gaussian" or self.alibi_slopes is not None

    def _projections(self) -> Projections:
        """The weights as one call of `attend_layer` takes them."""
        out = self.out_proj
        if self.log_temperature is None and self.log_bandwidth is None:
            weights = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
            return Projections(*weights, out.weight, self.in_proj_bias, out.bias)
        (w_q, b_q), (w_k, b_k), (w_v, b_v) = self._weights_and_biases()
        biases = [b for b in (b_q, b_k, b_v) if b is not None]
        b_in = torch.cat(biases) if biases else None
        return Projections(w_q, w_k, w_v, out.weight, b_in, out.bias)

    def _weights_and_biases(self) -> tuple[tuple[Tensor, Tensor | None], ...]:
        """(weight, bias) of query, key and value.

        A temperature is folded into the query's projection, a bandwidth into those of both.
        """
        weights: tuple[Tensor, ...] = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
        biases: tuple[Tensor | None, ...] = (None, None, None)
        if self.in_proj_bias is not None:
            biases = self.in_proj_bias.split(self._widths)
        query, key, value = zip(weights, biases, strict=True)
        if self.log_temperature is not None:
            query = self._divided(query, self.log_temperature)
        if self.log_bandwidth is not None:
            query, key = (self._divided(x, self.log_bandwidth) for x in (query, key))
        return query, key, value

    def _divided(
        self, projection: tuple[Tensor, Tensor | None], log_divisor: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """A projection to queries or keys, divided by one number a head."""
        weight, bias = projection
        factor = torch.exp(-log_divisor).repeat_interleave(self.rank)
        return weight * factor[:, None], None if bias is None else bias * factor

    def _weights(
        self,
        q: Tensor,
        k: Tensor,
        attn_mask: Tensor | None,
        is_causal: bool,
        key_padding_mask: Tensor | None,
    ) -> Tensor:
        """The attention weights themselves, `[..., heads, n_q, n_k]`, after dropout."""
        work = accumulate_dtype(q.dtype)
        scale = default_scale(self.rank, self.score) if self.scale is None else self.scale
        key_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(-2)
        slopes = self.alibi_slopes
        slopes = None if slopes is None else slopes.double().expand(q.shape[:-2])
        is_gaussian = self.score == "gaussian"
        with without_autocast(q.device.type):
            problem = Problem(
                q, k, k, attn_mask, key_mask, slopes, None, scale, 0.0, is_causal, is_gaussian
            )
            found, _ = weights(scores(problem.to(work)))
        found = found.to(q.dtype)
        return F.dropout(found, self.dropout, self.training) if self.dropout > 0.0 else found

    def _allowed(self, mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """An attn_mask of nn.MultiheadAttention in the conventions of `boltzattn.attention`."""
        n_q, n_k = query.shape[-2], key.shape[-2]
        batch = query.shape[:-2]
        stack = math.prod(batch) * self.num_heads
        check_mask("attn_mask", mask, [(n_q, n_k), (stack, n_q, n_k)])
        if mask.ndim == 3:
            mask = mask.unflatten(0, (*batch, self.num_heads))
        return ~mask if mask.dtype == torch.bool else mask
