"""How does the error of the constructed approximator decrease with the grid?

The construction rounds tokens to a grid, identifies each (grid point, context), and looks up f at
the centre of the cell. For a Lipschitz f the error is that of the grid, of order 1/D for D cells. A
discontinuity costs the root of the share of cells that it cuts, D^-1/2. For a function that depends
on the order of the tokens, the error cannot go below its distance from its symmetrisation unless
the tokens carry positions.
"""

from __future__ import annotations

from typing import Any

from boltzattn.experiments.experiment import Experiment, Finding, Row, select, slope, values
from boltzattn.theory import TARGETS, approximate
from boltzattn.theory.presentation import GREY, STYLES, Table

LIPSCHITZ = ("product", "wave", "smoothing")


def measure(
    target: str,
    d: int,
    n: int,
    grid: int,
    seed: int,
    samples: int,
    repeats: bool = True,
    positions: bool = False,
    ramp: float = 1e-6,
) -> list[Row]:
    report = approximate(
        TARGETS[target],
        d,
        n,
        grid,
        repeats=repeats,
        positions=positions,
        ramp=ramp,
        samples=samples,
        seed=seed,
    ).report
    return [
        {
            "ids": report.ids,
            "beta": report.attention.beta,
            "error": report.error,
            "grid_error": report.grid_error,
            "asymmetry": report.asymmetry,
            "ramp_share": report.ramp_share,
            "repeat_share": report.repeat_share,
        }
    ]


def judge(rows: list[Row]) -> list[Finding]:
    curves = _curves(rows)
    smooth = {name: some for name, some in curves.items() if some[0]["target"] in LIPSCHITZ}
    whole = {name: some for name, some in smooth.items() if some[0]["repeats"]}
    slopes = {name: _last_slope(some) for name, some in whole.items()}
    excess = max(row["error"] / row["grid_error"] for some in whole.values() for row in some)
    findings = [
        # Between the last two grids: coarse grids do not resolve f.
        Finding(
            "errors of Lipschitz functions decrease as 1/D",
            all(abs(s + 1) < 0.2 for s in slopes.values()),
            ", ".join(f"{s:.2f} ({name})" for name, s in slopes.items()),
        ),
        Finding(
            "the transformer adds nothing to the error of its grid",
            excess < 1.02,
            f"at most {100 * (excess - 1):.2g}% more, with up to {max(r['ids'] for r in rows)} ids",
        ),
    ]
    for name, some in curves.items():
        last = some[-1]
        if last["target"] == "rank":
            findings.append(
                Finding(
                    "the L2 error of a discontinuous function decreases as D^-1/2",
                    abs(_last_slope(some) + 0.5) < 0.2,
                    f"slope {_last_slope(some):.2f}, error {last['error']:.3f}",
                )
            )
        elif last["target"] == "position" and not last["positions"]:
            floor = last["asymmetry"]
            findings.append(
                Finding(
                    "a function that is not equivariant stops at its distance from its "
                    "symmetrisation",
                    min(row["error"] for row in some) > 0.98 * floor
                    and last["error"] < 1.05 * floor,
                    f"error {last['error']:.4f} at {last['grid']} cells, distance {floor:.4f}",
                )
            )
        elif last["target"] == "position":
            findings.append(
                Finding(
                    "with positions, the error of the same function decreases as 1/D",
                    abs(_last_slope(some) + 1) < 0.2,
                    f"slope {_last_slope(some):.2f}, error {last['error']:.4f}",
                )
            )
        elif not last["repeats"]:
            with_repeats = curves[name.removesuffix(", repeats dropped")][-1]
            findings.append(
                Finding(
                    "dropping contexts with a repeated cell, as the paper does, costs accuracy",
                    last["error"] > 1.05 * with_repeats["error"],
                    f"error {last['error']:.3f} instead of {with_repeats['error']:.3f} at "
                    f"{last['grid']} cells, where {100 * last['repeat_share']:.0f}% of the points "
                    "have two tokens in one cell",
                )
            )
    ramps = sorted(_ramps(rows), key=lambda row: row["ramp"])
    if ramps:
        thin, wide = ramps[0], ramps[-1]
        findings.append(
            Finding(
                "wide ramps in the rounding network increase the error",
                wide["error"] > 1.05 * thin["error"],
                f"error {wide['error']:.3f} at {wide['ramp']:g} of a cell, {thin['error']:.3f} at "
                f"{thin['ramp']:g}",
            )
        )
    return findings


def _curves(rows: list[Row]) -> dict[str, list[Row]]:
    """Rows with the default ramp by function, in the order of the grids."""
    curves: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row["grid"]):
        if row["ramp"] == 1e-6:
            name = f"{row['target']}, d={row['d']} n={row['n']}"
            name += "" if row["repeats"] else ", repeats dropped"
            name += ", positions" if row["positions"] else ""
            curves.setdefault(name, []).append(row)
    return {name: some for name, some in sorted(curves.items()) if len(some) > 1}


def _ramps(rows: list[Row]) -> list[Row]:
    widths = {row["ramp"] for row in rows} - {1e-6}
    if not widths:
        return []
    varied = next(row for row in rows if row["ramp"] in widths)
    return [
        row
        for row in select(rows, target=varied["target"], d=varied["d"], n=varied["n"])
        if row["grid"] == varied["grid"] and row["repeats"] and not row["positions"]
    ]


def _last_slope(some: list[Row]) -> float:
    return slope([row["grid"] for row in some[-2:]], [row["error"] for row in some[-2:]])


def table(rows: list[Row]) -> Table:
    grids = sorted(values(rows, "grid"))
    lines: list[tuple[object, ...]] = []
    for name, some in _curves(rows).items():
        errors = {row["grid"]: f"{row['error']:.3f}" for row in some}
        lines.append(
            (
                name,
                some[-1]["ids"],
                *(errors.get(grid, "") for grid in grids),
                f"{_last_slope(some):.2f}",
            )
        )
    for row in sorted(_ramps(rows), key=lambda row: row["ramp"]):
        errors = {row["grid"]: f"{row['error']:.3f}"}
        name = f"{row['target']}, d={row['d']} n={row['n']}, ramp {row['ramp']:g}"
        lines.append((name, row["ids"], *(errors.get(grid, "") for grid in grids), ""))
    return ("f", "ids", *(f"D={grid}" for grid in grids), "last slope"), lines


def draw(rows: list[Row], figure: Any) -> None:
    left, right = figure.subplots(1, 2, sharey=True)
    curves = _curves(rows)
    first = [name for name, some in curves.items() if some[0]["target"] in LIPSCHITZ]
    others = [name for name in curves if name not in first]
    # The left panel shows one function only; the curves of the others coincide.
    first = [name for name in first if name.startswith("wave")]
    for axis, names in ((left, first), (right, others)):
        for name, style in zip(names, STYLES, strict=False):
            some = curves[name]
            axis.loglog(
                [row["grid"] for row in some],
                [row["error"] for row in some],
                **style,
                base=2,
                label=name,
            )
            if some[0]["asymmetry"]:
                floor = some[-1]["asymmetry"]
                axis.axhline(floor, color=GREY, linewidth=1)
                axis.text(
                    some[-1]["grid"],
                    1.1 * floor,
                    "distance from symmetrisation",
                    color=GREY,
                    ha="right",
                )
        axis.set_xticks(values(rows, "grid"), values(rows, "grid"))
        axis.set(xlabel="cells per coordinate")
        axis.legend(loc="lower left")
    left.set(ylabel="$L_2$ error", title="A Lipschitz function: slope -1")
    right.set(title="Controls")
    ticks = (0.02, 0.05, 0.1, 0.2, 0.5)
    left.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    left.set_yticks([], minor=True)


def _cases(curves: list[tuple[Any, ...]], samples: int) -> list[dict[str, Any]]:
    return [
        {
            "target": target,
            "d": d,
            "n": n,
            "grid": grid,
            "repeats": repeats,
            "positions": positions,
            "ramp": 1e-6,
            "samples": samples,
        }
        for target, d, n, grids, repeats, positions in curves
        for grid in grids
    ]


_QUICK = [
    ("product", 1, 2, (4, 8, 16, 32), True, False),
    ("product", 2, 2, (2, 4, 8), True, False),
    ("wave", 1, 2, (4, 8, 16, 32), True, False),
    ("wave", 1, 3, (4, 8, 16), True, False),
    ("wave", 1, 3, (4, 8, 16), False, False),
    ("wave", 2, 2, (2, 4, 8), True, False),
    ("smoothing", 1, 2, (4, 8, 16, 32), True, False),
    ("smoothing", 2, 2, (2, 4, 8), True, False),
    ("rank", 1, 2, (4, 8, 16, 32), True, False),
    ("position", 1, 2, (4, 8, 16, 32), True, False),
    ("position", 1, 2, (4, 8, 16), True, True),
]
_TINY = [
    ("product", 1, 2, (4, 8), True, False),
    ("wave", 1, 3, (4, 8), True, False),
    ("wave", 1, 3, (4, 8), False, False),
    ("rank", 1, 2, (8, 16), True, False),
    ("position", 1, 2, (8, 16), True, False),
    ("position", 1, 2, (4, 8), True, True),
]


def _with_ramps(cases: list[dict[str, Any]], widths: tuple[float, ...]) -> list[dict[str, Any]]:
    chosen = next(c for c in cases if c["target"] == "wave" and c["n"] == 3 and c["grid"] == 8)
    return cases + [{**chosen, "ramp": width} for width in widths]


EXPERIMENT = Experiment(
    name="approximate",
    question="How does the error of the constructed approximator decrease with the grid?",
    refuted_if="the error of a Lipschitz function does not decrease as 1/D or exceeds that of the "
    "grid, or a function that is not equivariant is approximated without positions",
    cases={
        "tiny": _with_ramps(_cases(_TINY, 4000), (1e-1,)),
        "quick": _with_ramps(_cases(_QUICK, 10_000), (1e-1, 1e-2, 1e-4)),
    },
    measure=measure,
    judge=judge,
    table=table,
    draw=draw,
)
