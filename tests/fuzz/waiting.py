"""Which cases are known to be wrong, and what they wait for. They are run and counted apart.

This is the one place: without a reason here its cases count like all others.
"""

from __future__ import annotations

from fuzz.cases import Case

LEAF = 512  # tokens; shorter streams are not composed of parts
LARGE = 100.0  # below, parts are merged exactly enough
FAR_FAMILIES = ("offset", "far_grid", "equal", "ties", "two_point", "denormal", "huge")


def waits_for(case: Case) -> str | None:
    """What the case waits for, or None."""
    if _waits_for_streams(case):
        return "streams"
    if _waits_for_exact_scores(case):
        return "scores"
    return None


def _waits_for_streams(case: Case) -> bool:
    """Streams whose logits are large, until they are scans."""
    composed = case.kind == "stream" and case.n_k >= LEAF
    return composed and (case.temperature > LARGE or case.family in FAR_FAMILIES)


# Products with these keys are exact, or all are rounded alike, so that eager loses nothing.
EXACT_FAMILIES = ("two_point", "grid", "far_grid", "ladder")


def _waits_for_exact_scores(case: Case) -> bool:
    """`direct` of the CPU multiplies queries and masks by log2(e) first, which rounds every logit.

    It also sums over the rank by fused operations, which tell apart what eager rounds to a tie. A
    mask that is a bias is left to it by the transform, too.
    """
    exact = case.family in EXACT_FAMILIES or case.queries == "whole"
    exact = exact and case.method != "transform" and case.kind != "stream"  # has its own sums
    return case.backend == "cpu" and (exact or case.mask in ("bias", "padding_bias"))
