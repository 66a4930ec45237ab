"""Exact softmax attention for low-rank heads."""

from boltzattn import nn
from boltzattn._version import __version__
from boltzattn.backends import BACKENDS, METHODS, use_backend, use_method
from boltzattn.functional import attention, boltz, explain, self_attention
from boltzattn.merging import merge

__all__ = [
    "BACKENDS",
    "METHODS",
    "__version__",
    "attention",
    "boltz",
    "explain",
    "merge",
    "nn",
    "self_attention",
    "use_backend",
    "use_method",
]
