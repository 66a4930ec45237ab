"""Which cases are known to be wrong, and what they wait for. They are run and counted apart.

This is the one place: without a reason here its cases count like all others.
"""

from __future__ import annotations

from fuzz.cases import Case


def waits_for(case: Case) -> str | None:
    """What the case waits for, or None."""
    return "scores" if _waits_for_exact_scores(case) else None


# Products with these keys are exact, or all are rounded alike, so that eager loses nothing.
EXACT_FAMILIES = ("two_point", "grid", "far_grid", "ladder")


def _waits_for_exact_scores(case: Case) -> bool:
    """`direct` of the CPU sums over the rank by fused operations.

    They tell apart what eager rounds to a tie.
    """
    exact = case.family in EXACT_FAMILIES or case.queries == "whole"
    exact = exact and case.method != "transform" and case.kind != "stream"
    return case.backend == "cpu" and exact and case.rank > 1
