"""The claims the project holds itself to: ratios and limits over rows of the full grid."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from bench.cases import Case
from bench.providers import BASELINES
from bench.results import Records

DIRECT = "boltzattn direct (cpu)"
TRANSFORM = "boltzattn transform (cpu)"
SELF_ATTENTION = "boltzattn self_attention"
LOW_RANK = "boltzattn LowRankAttention"
MULTIHEAD = "nn.MultiheadAttention"
BASELINE = "baseline"  # the faster of those of the level


@dataclass(frozen=True)
class Term:
    """One number of the results."""

    case: Case
    provider: str
    column: str = "fastest_s"  # best of several: what disturbs a machine mostly adds

    @property
    def providers(self) -> tuple[str, ...]:
        return BASELINES[self.case.level] if self.provider == BASELINE else (self.provider,)

    def value(self, records: Records) -> float | None:
        """Only measured rows count, and our own only if they passed their accuracy check.

        A baseline that was not asked is no slower one: then there is no value.
        """
        asked = {r.row.provider for r in records if r.case == self.case}
        if not asked.issuperset(self.providers):
            return None
        found = [
            getattr(r.row, self.column)
            for r in records
            if r.case == self.case
            and r.row.provider in self.providers
            and (r.row.accurate if r.row.provider.startswith("boltzattn") else r.row.measured)
        ]
        return min((x for x in found if x is not None), default=None)


@dataclass(frozen=True)
class Target:
    """`numerator / denominator` (1 if None) of every pair lies on the right side of the bound."""

    claim: str
    pairs: tuple[tuple[Term, Term | None], ...]
    at_least: float | None = None
    at_most: float | None = None
    unit: str = "x"

    def worst(self, records: Records) -> float | None:
        values = []
        for numerator, denominator in self.pairs:
            top = numerator.value(records)
            bottom = 1.0 if denominator is None else denominator.value(records)
            if top is None or bottom is None:
                return None
            values.append(top / bottom)
        return min(values) if self.at_least is not None else max(values)

    def met(self, records: Records) -> bool | None:
        """None: not measured."""
        worst = self.worst(records)
        if worst is None:
            return None
        return worst >= self.at_least if self.at_least is not None else worst <= self.at_most

    @property
    def bound(self) -> str:
        if self.at_least is not None:
            return f">= {self.at_least:g}{self.unit}"
        return f"<= {self.at_most:g}{self.unit}"


def _faster(claim: str, case: Case, provider: str, at_least: float, than: str = BASELINE) -> Target:
    return Target(claim, ((Term(case, than), Term(case, provider)),), at_least=at_least)


def targets() -> Iterator[Target]:
    """Two threads, fp32, one head, dv = 64 unless said otherwise; baseline: the faster SDPA."""
    both = "both"
    yield _faster("direct, rank 8, n = 4,096, forward", Case(4096, 8), DIRECT, 1.7)
    yield _faster(
        "direct, rank 8, n = 4,096, forward + backward", Case(4096, 8, passes=both), DIRECT, 1.5
    )
    slower = [
        (Term(Case(n, rank), "naive"), Term(Case(n, rank), DIRECT))
        for n in (512, 4096)
        for rank in range(1, 17)
    ]
    yield Target("direct over naive, ranks 1..16, n = 512 and 4,096", tuple(slower), at_least=1.0)
    yield Target(
        "direct over naive, ranks 1, 2, 4, 8, 16, n = 512",
        tuple(slower[rank - 1] for rank in (1, 2, 4, 8, 16)),
        at_least=1.0,
    )
    yield Target(
        "direct, n = 16,384, forward + backward: extra memory",
        ((Term(Case(16_384, passes=both), DIRECT, "extra_mb"), None),),
        at_most=64,
        unit=" MB",
    )

    for n, bound in ((1024, 8), (16_384, 500)):
        yield _faster(f"transform, n = {n:,}, forward", Case(n), TRANSFORM, bound)
    yield _faster(
        "transform, 4 x 8 heads, n = 4,096, forward", Case(4096, batch=4, heads=8), TRANSFORM, 80
    )
    yield _faster(
        "transform, n = 16,384, forward + backward", Case(16_384, passes=both), TRANSFORM, 400
    )
    for passes, name, bound in (("forward", "forward", 1.3), (both, "forward + backward", 4.0)):
        million = Case(1_048_576, passes=passes)
        yield Target(
            f"transform, n = 1,048,576, {name}: extra memory",
            ((Term(million, TRANSFORM, "extra_mb"), None),),
            at_most=32,
            unit=" MB",
        )
        for fresh, pages in ((True, "fresh pages"), (False, "reused memory")):
            million = replace(million, fresh_pages=fresh)
            yield Target(
                f"transform, n = 1,048,576, {name}, {pages}: time over value.clone()",
                ((Term(million, TRANSFORM), Term(million, "clone")),),
                at_most=bound,
            )
            yield Target(
                f"transform, {name}, {pages}: time at 4n over time at n, from n = 65,536",
                tuple(
                    (
                        Term(replace(million, n=4 * n), TRANSFORM),
                        Term(replace(million, n=n), TRANSFORM),
                    )
                    for n in (65_536, 262_144)
                ),
                at_most=4.5,
            )
    for n, bound in ((16_384, 25), (65_536, 80)):
        yield _faster(
            f"transform, causal, n = {n:,}, forward", Case(n, causal=True), TRANSFORM, bound
        )

    layer = Case(65_536, dv=1024, dim=1024, level="layer")
    yield _faster(
        "whole layer, d = 1024, n = 65,536, over one Linear(1024, 1024)", layer, SELF_ATTENTION, 8
    )
    small = Case(4096, dv=32, heads=8, dim=256, level="module")
    yield Target(
        "LowRankAttention over bare self_attention, n = 4,096, d = 256",
        ((Term(small, LOW_RANK), Term(small, SELF_ATTENTION)),),
        at_most=1.05,
    )
    large = Case(16_384, dv=64, heads=8, dim=512, level="module", passes=both)
    yield _faster(
        "LowRankAttention over nn.MultiheadAttention, 8 heads, d = 512, n = 16,384, "
        "forward + backward",
        large,
        LOW_RANK,
        20,
    )
    yield Target(
        "the same: peak memory",
        ((Term(large, LOW_RANK, "peak_mb"), Term(large, MULTIHEAD, "peak_mb")),),
        at_most=0.5,
    )
