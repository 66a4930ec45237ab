"""Exact softmax attention for low-rank heads."""

from boltzattn import distributed, nn, smoothing
from boltzattn._version import __version__
from boltzattn.boltz_operator import boltz
from boltzattn.compose.merge import merge
from boltzattn.compose.streaming import StreamingAttention
from boltzattn.dispatch.backends import BACKENDS, METHODS
from boltzattn.dispatch.preference import set_quadratic, use_backend, use_method
from boltzattn.explanation import explain
from boltzattn.functional import attention, attention_varlen, self_attention

__all__ = [
    "BACKENDS",
    "METHODS",
    "StreamingAttention",
    "__version__",
    "attention",
    "attention_varlen",
    "boltz",
    "distributed",
    "explain",
    "merge",
    "nn",
    "self_attention",
    "set_quadratic",
    "smoothing",
    "use_backend",
    "use_method",
]
