"""Seventeen experiments on one-layer rank-1 attention; `python -m boltzattn.experiments` runs them.

Each file asks one question, says what would refute the expected answer, measures, and judges the
answer from the measured rows. Needs scipy, matplotlib and tqdm: `pip install
'boltzattn[experiments]'`.
"""

from boltzattn.experiments import (
    approximate,
    capacity,
    depth,
    duplicates,
    hardmax,
    long_sets,
    loops,
    memorize,
    next_token,
    no_quantizer,
    polynomials,
    rank,
    scores,
    set_lengths,
    single_location,
    temperature,
    theory_vs_practice,
)
from boltzattn.experiments.experiment import Experiment, Finding, Result, run

EXPERIMENTS: dict[str, Experiment] = {
    module.EXPERIMENT.name: module.EXPERIMENT
    for module in (
        memorize,
        theory_vs_practice,
        temperature,
        hardmax,
        duplicates,
        approximate,
        depth,
        rank,
        no_quantizer,
        long_sets,
        capacity,
        next_token,
        loops,
        polynomials,
        scores,
        set_lengths,
        single_location,
    )
}

__all__ = ["EXPERIMENTS", "Experiment", "Finding", "Result", "run"]
