"""Modules over `boltzattn.functional`: no mathematics of their own beyond what a layer adds."""

from boltzattn.nn.attention import LowRankAttention
from boltzattn.nn.transformer import FeedForward, OneLayerTransformer

__all__ = ["FeedForward", "LowRankAttention", "OneLayerTransformer"]
