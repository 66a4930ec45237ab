"""The two ways in which `convert` replaces an attention layer, behind one interface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from boltzattn.nn.adapters import Adapter, mark_ranks
from boltzattn.nn.approximation import Approximation, Decomposition, Form, truncate
from boltzattn.nn.attention import LowRankAttention, multihead_form
from boltzattn.nn.moments import Gathered
from boltzattn.problem import default_scale

Mask = Callable[[], Tensor | None]


class Layer(ABC):
    """An attention layer of a model, and the names it has there."""

    approximation: Approximation  # after `replace`

    def __init__(self, name: str, num_heads: int, form: Form) -> None:
        self.names = [name]
        self.num_heads = num_heads
        self.form = form

    @abstractmethod
    def watch(self, sums: Gathered, mask: Mask) -> list[Any]:
        """Hooks that add the queries and keys of every call to `sums`; `mask()` tells tokens."""

    @abstractmethod
    def replace(
        self, model: nn.Module, new: Decomposition, ranks: tuple[int, ...], on_data: bool
    ) -> None:
        """Give the heads these ranks, and set `approximation`."""


class MultiheadLayer(Layer):
    """An nn.MultiheadAttention; a LowRankAttention takes its place."""

    def __init__(self, name: str, mha: nn.Module, method: str, backend: str) -> None:
        assert isinstance(mha, nn.MultiheadAttention)
        super().__init__(name, mha.num_heads, multihead_form(mha))
        self.mha = mha
        self.method = method
        self.backend = backend

    @staticmethod
    def why_not(mha: Any) -> str | None:
        if type(mha) is not nn.MultiheadAttention:
            return f"is a subclass, {type(mha).__name__}, which may compute something else"
        for name, given in (
            ("add_bias_kv", mha.bias_k is not None),
            ("add_zero_attn", mha.add_zero_attn),
        ):
            if given:
                return f"{name}=True is not supported by LowRankAttention"
        return None

    def watch(self, sums: Gathered, mask: Mask) -> list[Any]:
        dtype = self.mha.out_proj.weight.dtype
        w_q, w_k = (w.flatten(0, 1).to(dtype) for w in (self.form.w_q, self.form.w_k))
        b_q = None if self.form.b_q is None else self.form.b_q.flatten().to(dtype)

        def see(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            named = dict(zip(("query", "key", "value", "key_padding_mask"), args, strict=False))
            named.update(kwargs)
            query, key, padding = named["query"], named["key"], named.get("key_padding_mask")
            is_self = query is key
            if query.ndim == 3 and not self.mha.batch_first:
                query, key = query.transpose(0, 1), key.transpose(0, 1)
            is_token = mask()
            if padding is not None:
                is_token = ~padding if padding.dtype == torch.bool else padding != -torch.inf
                is_token = is_token.unsqueeze(0) if is_token.ndim == 1 else is_token
            sums.add_queries(F.linear(query, w_q, b_q), is_token if is_self else None)
            sums.add_keys(F.linear(key, w_k), is_token)

        return [self.mha.register_forward_pre_hook(see, with_kwargs=True)]

    def replace(
        self, model: nn.Module, new: Decomposition, ranks: tuple[int, ...], on_data: bool
    ) -> None:
        layer = LowRankAttention._from_decomposition(
            self.mha,
            self.form,
            new,
            ranks,
            on_data=on_data,
            method=self.method,
            backend=self.backend,
        )
        for name in self.names:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, layer)
        assert layer.approximation is not None
        self.approximation = layer.approximation


def _cloned(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.clone()


class InPlaceLayer(Layer):
    """A layer of another library; its projections get new weights, zero beyond the rank."""

    def __init__(self, name: str, module: nn.Module, adapter: Adapter) -> None:
        num_heads = adapter.num_heads(module)
        self.module = module
        self.query, self.key = adapter.query(module), adapter.key(module)
        self.dtype = self.query.weight.dtype
        head_dim = self.query.weight.shape[0] // num_heads
        self.scale = adapter.scale(module) or default_scale(head_dim, "dot")
        form = Form.of(self.query.weight, self.query.bias, self.key.weight, num_heads, self.scale)
        super().__init__(name, num_heads, form)

    def watch(self, sums: Gathered, mask: Mask) -> list[Any]:
        def see_queries(_: nn.Module, __: Any, out: Tensor) -> None:
            sums.add_queries(out[..., self.query.rows], mask())

        def see_keys(_: nn.Module, __: Any, out: Tensor) -> None:
            sums.add_keys(out[..., self.key.rows], mask())

        return [
            self.query.module.register_forward_hook(see_queries),
            self.key.module.register_forward_hook(see_keys),
        ]

    @contextmanager
    def turned(self) -> Iterator[None]:
        """The layer with queries and keys in other coordinates, which keeps all products."""
        saved = [(p, p.weight.clone(), _cloned(p.bias)) for p in (self.query, self.key)]
        head_dim = self.form.w_q.shape[1]
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randn(head_dim, head_dim, generator=generator, dtype=torch.float64)
        turn = torch.linalg.qr(drawn).Q.to(self.form.w_q.device)
        try:
            for projection, weight, bias in saved:
                heads = weight.double().unflatten(0, (self.num_heads, -1))
                if bias is not None:
                    bias = (bias.double().unflatten(0, (self.num_heads, -1)) @ turn.T).flatten()
                projection.write((turn @ heads).flatten(0, 1), bias)
            yield
        finally:
            for projection, weight, bias in saved:
                projection.write(weight, bias)

    def replace(
        self, model: nn.Module, new: Decomposition, ranks: tuple[int, ...], on_data: bool
    ) -> None:
        head_dim = self.form.w_q.shape[1]
        self.approximation = Approximation(max(ranks), new.spectrum.cpu(), ranks, on_data)
        if min(ranks) < head_dim:
            w_q, b_q, w_k = truncate(self.form, new, ranks, self.scale)
            rest = head_dim - w_q.shape[1]
            w_q, w_k = (F.pad(w, (0, 0, 0, rest)).flatten(0, 1) for w in (w_q, w_k))
            b_q = None if b_q is None else F.pad(b_q, (0, rest)).flatten()
            self.query.write(w_q, b_q)
            # Softmax does not see the bias of the keys.
            self.key.write(w_k, w_k.new_zeros(len(w_k)))
        mark_ranks(self.module, self.query, self.key, self.num_heads)
