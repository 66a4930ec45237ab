"""The theory of one-layer rank-1 attention as running code; `python -m boltzattn.theory` shows it.

It follows Kajitsuka & Sato, "Are Transformers with One Layer Self-Attention Using Low-Rank Weight
Matrices Universal Approximators?", ICLR 2024, and its follow-ups on optimal memorization, next
tokens, loops and symmetric polynomials. Every construction is a `OneLayerTransformer` in the
paper's form and is checked by evaluating it. Needs scipy: `pip install 'boltzattn[theory]'`.
"""

from boltzattn.theory.approximation import (
    TARGETS,
    ApproximationReport,
    EquivarianceWarning,
    add_positions,
    approximate,
    rounding_network,
    symmetrised,
)
from boltzattn.theory.boltzmann import (
    BoltzPair,
    Gap,
    boltz_gap,
    boltz_gradient,
    boltz_hessian,
    boltz_pair,
    decreasing_below,
    log_separation_bound,
    max_deficit,
    required_spacing,
    tempered_mean,
)
from boltzattn.theory.construction import RankOneAttention, construct_attention
from boltzattn.theory.contextual import ContextualGap, contextual_gap
from boltzattn.theory.hardmax import (
    Pair,
    hardmax,
    hardmax_attention,
    hardmax_counterexample,
    prouhet_pair,
    search_hardmax_weights,
    shared_gaps,
    temperature_scan,
)
from boltzattn.theory.memorization import MemorizationReport, memorize
from boltzattn.theory.next_token import (
    NextTokenReport,
    decoder_inputs,
    empirical_distributions,
    memorize_next,
)
from boltzattn.theory.packed import PackedReport, memorize_packed
from boltzattn.theory.separation import (
    ConflictError,
    DomainError,
    ResolutionError,
    ResolutionWarning,
    Separation,
    separation,
)
from boltzattn.theory.symmetric import (
    PolynomialReport,
    evaluate_polynomial,
    symmetric_polynomial,
)

__all__ = [
    "TARGETS",
    "ApproximationReport",
    "BoltzPair",
    "ConflictError",
    "ContextualGap",
    "DomainError",
    "EquivarianceWarning",
    "Gap",
    "MemorizationReport",
    "NextTokenReport",
    "PackedReport",
    "Pair",
    "PolynomialReport",
    "RankOneAttention",
    "ResolutionError",
    "ResolutionWarning",
    "Separation",
    "add_positions",
    "approximate",
    "boltz_gap",
    "boltz_gradient",
    "boltz_hessian",
    "boltz_pair",
    "construct_attention",
    "contextual_gap",
    "decoder_inputs",
    "decreasing_below",
    "empirical_distributions",
    "evaluate_polynomial",
    "hardmax",
    "hardmax_attention",
    "hardmax_counterexample",
    "log_separation_bound",
    "max_deficit",
    "memorize",
    "memorize_next",
    "memorize_packed",
    "prouhet_pair",
    "required_spacing",
    "rounding_network",
    "search_hardmax_weights",
    "separation",
    "shared_gaps",
    "symmetric_polynomial",
    "symmetrised",
    "temperature_scan",
    "tempered_mean",
]
