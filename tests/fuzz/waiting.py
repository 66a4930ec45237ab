"""Which cases are known to be wrong, and what they wait for. They are run and counted apart.

This is the one place: without a reason here its cases count like all others.
"""

from __future__ import annotations

from fuzz.cases import Case

# Below, the pieces of a causal call or a stream are merged by an lse that is exact enough.
LARGE = 100.0
FAR_FAMILIES = ("offset", "far_grid", "equal", "ties", "two_point", "denormal", "huge")


def waits_for(case: Case) -> str | None:
    """What the case waits for, or None."""
    if _waits_for_the_scan(case):
        return "scan"
    return None


def _waits_for_the_scan(case: Case) -> bool:
    """Causal calls by the transform and streams, where logits are large."""
    composed = case.kind == "stream" or (case.causal and case.method != "direct")
    return composed and (case.temperature > LARGE or case.family in FAR_FAMILIES)
