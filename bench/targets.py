"""The performance claims of the project: ratios and limits over rows of the full grid."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from bench.cases import PASS_NAMES, Case
from bench.providers import BASELINES
from bench.results import Records

DIRECT = "boltzattn direct (cpu)"
TRANSFORM = "boltzattn transform (cpu)"
SELF_ATTENTION = "boltzattn self_attention"
LOW_RANK = "boltzattn LowRankAttention"
MULTIHEAD = "nn.MultiheadAttention"
BASELINE = "baseline"  # the fastest baseline of the level


@dataclass(frozen=True)
class Term:
    """One number in the results."""

    case: Case
    provider: str
    column: str = "fastest_s"  # other load on the machine can only add time

    @property
    def providers(self) -> tuple[str, ...]:
        return BASELINES[self.case.level] if self.provider == BASELINE else (self.provider,)

    def value(self, records: Records) -> float | None:
        """The smallest value of the providers; our own rows must have passed the accuracy check.

        None if one of the providers was left out of the run: it might have been the fastest.
        """
        present = {r.row.provider for r in records if r.case == self.case}
        if not present.issuperset(self.providers):
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
    """`numerator / denominator` (1 if None) of every pair, and the bound it must satisfy.

    A target without a bound is reported and not judged.
    """

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
        return max(values) if self.at_most is not None else min(values)

    def met(self, records: Records) -> bool | None:
        """None: not measured, or not judged."""
        worst = self.worst(records)
        if worst is None or not self.bound:
            return None
        return worst <= self.at_most if self.at_most is not None else worst >= self.at_least

    @property
    def bound(self) -> str:
        if self.at_least is not None:
            return f">= {self.at_least:g}{self.unit}"
        return "" if self.at_most is None else f"<= {self.at_most:g}{self.unit}"


def _faster(claim: str, case: Case, provider: str, at_least: float, than: str = "SDPA") -> Target:
    pair = Term(case, BASELINE), Term(case, provider)
    return Target(f"{claim}: speed-up over {than}", (pair,), at_least=at_least)


def _extra_memory(claim: str, case: Case, provider: str, at_most: float) -> Target:
    term = Term(case, provider, "extra_mb")
    return Target(f"{claim}: extra memory", ((term, None),), at_most=at_most, unit=" MB")


def targets() -> Iterator[Target]:
    """Default threads, fp32, one head, dv = 64 unless the claim says otherwise.

    "SDPA" is the faster of SDPA as is and SDPA with q and k padded to dv.
    """
    for passes, bound in (("forward", 1.7), ("both", 1.5)):
        claim = f"direct, rank 8, n = 4,096, {PASS_NAMES[passes]}"
        yield _faster(claim, Case(4096, 8, passes=passes), DIRECT, bound)
    naive = {
        (n, rank): (Term(Case(n, rank), "naive"), Term(Case(n, rank), DIRECT))
        for n in (512, 4096)
        for rank in range(1, 17)
    }
    yield Target(
        "direct, ranks 1 to 16, n = 512 and 4,096, forward: speed-up over naive",
        tuple(naive.values()),
        at_least=1.0,
    )
    yield Target(
        "direct, ranks 1, 2, 4, 8, 16, n = 512, forward: speed-up over naive",
        tuple(naive[512, rank] for rank in (1, 2, 4, 8, 16)),
        at_least=1.0,
    )
    both = Case(16_384, passes="both")
    yield _extra_memory("direct, n = 16,384, forward + backward", both, DIRECT, 64)

    for n, bound in ((1024, 8), (16_384, 500)):
        yield _faster(f"transform, n = {n:,}, forward", Case(n), TRANSFORM, bound)
    many = Case(4096, batch=4, heads=8)
    yield _faster("transform, 4 x 8 heads, n = 4,096, forward", many, TRANSFORM, 80)
    yield _faster("transform, n = 16,384, forward + backward", both, TRANSFORM, 400)
    for n, bound in ((16_384, 25), (65_536, 80)):
        claim = f"transform, causal, n = {n:,}, forward"
        yield _faster(claim, Case(n, causal=True), TRANSFORM, bound)
    for passes, clones in (("forward", 1.3), ("both", 4.0)):
        million = Case(1_048_576, passes=passes)
        claim = f"transform, n = 1,048,576, {PASS_NAMES[passes]}"
        yield _extra_memory(claim, million, TRANSFORM, 32)
        # The physical limit: inputs read once and outputs written once, at the speed of a copy.
        yield Target(
            f"{claim}: share of the copy bandwidth",
            ((Term(million, TRANSFORM, "clone_fraction"), None),),
            unit="",
        )
        fresh = replace(million, fresh_pages=True)
        yield Target(
            f"{claim}, fresh pages: time over value.clone()",
            ((Term(fresh, TRANSFORM), Term(fresh, "clone")),),
            at_most=clones,
        )
        for case, pages in ((million, ""), (fresh, ", fresh pages")):
            # Below 262,144 tokens values and outputs still fit into the third-level cache.
            quarter = Term(replace(case, n=262_144), TRANSFORM)
            yield Target(
                f"{claim}{pages}: time over that of n = 262,144",
                ((Term(case, TRANSFORM), quarter),),
                at_most=4.5,
            )

    layer = Case(65_536, dv=1024, dim=1024, level="layer")
    claim = "self_attention, d = 1024, n = 65,536, forward"
    yield _faster(claim, layer, SELF_ATTENTION, 8, "one Linear(1024, 1024)")
    small = Case(4096, dv=32, heads=8, dim=256, level="module")
    yield Target(
        "LowRankAttention, n = 4,096, d = 256, forward: time over bare self_attention",
        ((Term(small, LOW_RANK), Term(small, SELF_ATTENTION)),),
        at_most=1.05,
    )
    large = Case(16_384, dv=64, heads=8, dim=512, level="module", passes="both")
    claim = "LowRankAttention, 8 heads, d = 512, n = 16,384, forward + backward"
    yield _faster(claim, large, LOW_RANK, 20, MULTIHEAD)
    yield Target(
        f"{claim}: peak memory over {MULTIHEAD}",
        ((Term(large, LOW_RANK, "peak_mb"), Term(large, MULTIHEAD, "peak_mb")),),
        at_most=0.5,
    )
