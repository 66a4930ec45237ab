"""Rows to text: a table, what was not measured and why, and the targets."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from bench.cases import Case
from bench.extrapolation import best_baseline, estimate
from bench.results import TOO_SLOW, Record, Records, Row
from bench.targets import targets

HEADINGS = ("n", "provider", "time", "±", "speed-up", "tokens/s", "of clone", "extra MB")
HEADINGS += ("max err", "rms err")
LEGEND = """\
time      median of the samples; a sample is the fastest call within 10 ms
          (the faster of two longer calls, or one very long call)
±         interquartile range of the samples / median
speed-up  over the faster of `sdpa` and `sdpa padded` (layers: one linear map; modules:
          nn.MultiheadAttention) in the same run; only for rows that pass the accuracy check
of clone  bytes that must be moved / time, as a share of the bandwidth of value.clone()
extra MB  peak memory of a call beyond its inputs and results, in a separate process
max err   largest error against fp64, relative to max|value| (gradients: max|gradient|),
          on a sample of the queries if n is large; ! marks an error above the limit
~         extrapolated, not measured"""


def table(records: Records) -> str:
    """A section for all cases that differ only in n, in the order of the records."""
    sections: dict[Case, Records] = defaultdict(list)
    for record in records:
        sections[replace(record.case, n=0)].append(record)
    blocks = []
    for section in sections.values():
        lines = [_cells(records, r) for r in sorted(section, key=lambda r: r.case.n) if _shown(r)]
        if lines:
            blocks.append(_title(section[0].case) + "\n" + aligned(HEADINGS, lines))
    return "\n\n".join([*blocks, *_not_measured(records), LEGEND])


def target_table(records: Records, judge: bool = True) -> str:
    """The targets with their bounds and verdicts, or only the values that were measured.

    The bounds are for the machine of the committed results, so only a full run is judged.
    """
    lines = []
    for target in targets():
        worst = target.worst(records)
        value = "-" if worst is None else f"{worst:.3g}{target.unit}"
        if judge:
            verdict = {True: "met", False: "missed", None: ""}[target.met(records)]
            lines.append((target.claim, value, target.bound, verdict))
        elif worst is not None:
            lines.append((target.claim, value))
    headings = ("summary", "value", "bound", "")
    return aligned(headings if judge else headings[:2], lines)


def aligned(headings: tuple[str, ...], lines: Sequence[tuple[str, ...]]) -> str:
    """Columns padded to equal width: words to the left, numbers to the right.

    Example:
        >>> print(aligned(("a", "b"), [("x", "1")]))
        a  b
        x  1
    """
    widths = [max(len(line[i]) for line in [headings, *lines]) for i in range(len(headings))]
    left = {"provider", "summary", ""}
    out = []
    for line in [headings, *lines]:
        cells = [
            cell.ljust(width) if heading in left else cell.rjust(width)
            for cell, width, heading in zip(line, widths, headings, strict=True)
        ]
        out.append("  ".join(cells).rstrip())
    return "\n".join(out)


def seconds(value: float) -> str:
    """Three significant digits and a unit.

    Example:
        >>> seconds(0.00123), seconds(2200.0)
        ('1.23 ms', '2,200 s')
    """
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if value * factor >= 1 or unit == "µs":
            return f"{three_digits(value * factor)} {unit}"
    raise AssertionError("unreachable")


def three_digits(value: float) -> str:
    if value >= 1000:
        return f"{float(f'{value:.3g}'):,.0f}"
    return f"{value:#.3g}".rstrip(".")


def speedup(records: Records, record: Record) -> str:
    """`3.1x`, `~310x` over an estimated baseline, `-` if the row failed the accuracy check."""
    row = record.row
    if row.kind == "approximate":
        return "approx."
    if not row.accurate:
        return "" if row.kind == "yardstick" else "-"
    if row.speedup is not None:
        return f"{three_digits(row.speedup)}x"
    baseline = best_baseline(records, record.case)
    if baseline is None:
        return ""
    base_seconds, is_estimate = baseline
    return f"{'~' if is_estimate else ''}{three_digits(base_seconds / row.seconds)}x"


def _shown(record: Record) -> bool:
    return record.row.measured or record.row.status == TOO_SLOW


def _cells(records: Records, record: Record) -> tuple[str, ...]:
    row, n = record.row, f"{record.case.n:,}"
    if not row.measured:
        guess = estimate(records, record)
        return (n, row.provider, f"~{seconds(guess)}" if guess else "too slow", *[""] * 7)
    return (
        n,
        row.provider,
        seconds(row.seconds),
        f"{row.spread:.0%}",
        speedup(records, record),
        _short(row.tokens_per_s),
        "" if row.clone_fraction is None else f"{row.clone_fraction:.1%}",
        "" if row.extra_mb is None else f"{row.extra_mb:,.0f}",
        _error(row),
        "" if row.rms_error is None else f"{row.rms_error:.0e}",
    )


def _error(row: Row) -> str:
    if row.max_error is None:
        return ""
    mark = "" if row.accurate or row.kind != "exact" else "!"
    return f"{mark}{row.max_error:.1e}"


def _short(value: float) -> str:
    for unit, factor in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= factor:
            return f"{three_digits(value / factor)} {unit}"
    return three_digits(value)


def _title(case: Case) -> str:
    words = [w for w in case.label.split() if not w.startswith("n=")]
    return "== " + " ".join(words) + " =="


def _not_measured(records: Records) -> list[str]:
    """`naive: does not fit into memory (n = 65,536)`, a line for each provider and reason."""
    where: dict[tuple[str, str], set[int]] = defaultdict(set)
    for record in records:
        if not record.row.measured:
            where[record.row.provider, record.row.reason].add(record.case.n)
    lines = []
    for (provider, reason), lengths in where.items():
        everywhere = {r.case.n for r in records if r.row.provider == provider}
        at = (
            ""
            if lengths == everywhere
            else f" (n = {', '.join(f'{n:,}' for n in sorted(lengths))})"
        )
        lines.append(f"  {provider}: {reason}{at}")
    return ["\n".join(["not measured", *lines])] if lines else []
