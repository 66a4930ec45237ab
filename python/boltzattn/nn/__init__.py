"""Modules over `boltzattn.functional`: no mathematics of their own beyond what a layer adds."""

from boltzattn.nn.adapters import ADAPTERS, Adapter, Projection, linears
from boltzattn.nn.approximation import Approximation
from boltzattn.nn.attention import LowRankAttention
from boltzattn.nn.convert import Conversion, convert
from boltzattn.nn.transformer import FeedForward, OneLayerTransformer

__all__ = [
    "ADAPTERS",
    "Adapter",
    "Approximation",
    "Conversion",
    "FeedForward",
    "LowRankAttention",
    "OneLayerTransformer",
    "Projection",
    "convert",
    "linears",
]
