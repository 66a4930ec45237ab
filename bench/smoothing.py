"""`boltzattn.smoothing` beside the packages that people smooth with, on the same data, in one run.

    python -m bench.smoothing

Times are the best of a few calls, in seconds. A time marked ~ is extrapolated from fewer points, or
fewer places to estimate at, because the whole would take minutes or hours. Errors are the largest
at 200 places against sums over all points in float64: relative to the largest estimate for
regression and density. Packages that are not installed are listed as such
(`pip install -r bench/requirements.txt`).
"""

from __future__ import annotations

import argparse
import math
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from boltzattn import smoothing

CHECKED = 200  # places at which errors are measured


class Row(NamedTuple):
    name: str
    seconds: float
    is_extrapolated: bool
    error: float | None  # None: another estimate, timed only

    def __str__(self) -> str:
        mark = "~" if self.is_extrapolated else " "
        error = "timed only" if self.error is None else f"{self.error:.0e}"
        return f"  {self.name:<46} {mark}{self.seconds:>12.4g} s   error {error}"


def timed(run: Callable[[], Any], seconds: float = 1.0) -> tuple[float, Any]:
    """The fastest of the calls that fit into the time, and the result."""
    fastest, end = math.inf, time.perf_counter() + seconds
    while True:
        start = time.perf_counter()
        result = run()
        now = time.perf_counter()
        fastest = min(fastest, now - start)
        if now > end:
            return fastest, result


def error_of(found: Any, truth: np.ndarray) -> float:
    return float(np.abs(np.asarray(found, dtype=np.float64) - truth).max() / np.abs(truth).max())


def show(title: str, makers: dict[str, Callable[[], Row]]) -> None:
    print(title)
    for name, make in makers.items():
        try:
            print(make(), flush=True)
        except ImportError as missing:
            print(f"  {name:<46}  not measured: {missing}", flush=True)


def regression(n: int) -> None:
    rng = np.random.default_rng(0)
    x = rng.random(n)
    y = np.sin(20 * x) + 0.3 * rng.standard_normal(n)
    bandwidth = 0.01
    places = x[:CHECKED]
    weights = np.exp(-0.5 * ((places[:, None] - x) / bandwidth) ** 2)
    truth = weights @ y / weights.sum(1)

    def ours() -> Row:
        points, values = (torch.from_numpy(a).float() for a in (x, y))
        seconds, out = timed(
            lambda: smoothing.kernel_regression(points, values, bandwidth=bandwidth)
        )
        return Row("boltzattn.smoothing.kernel_regression, fp32", seconds, False, error(out))

    def ours_double() -> Row:
        points, values = torch.from_numpy(x), torch.from_numpy(y)
        seconds, out = timed(
            lambda: smoothing.kernel_regression(points, values, bandwidth=bandwidth)
        )
        return Row("boltzattn.smoothing.kernel_regression, fp64", seconds, False, error(out))

    def statsmodels() -> Row:
        from statsmodels.nonparametric.kernel_regression import KernelReg

        some = 100  # places; each takes a sum over all points
        model = KernelReg(y, x, "c", reg_type="lc", bw=[bandwidth])
        seconds, out = timed(lambda: model.fit(x[:some])[0], 0.0)
        return Row("statsmodels KernelReg", seconds * n / some, True, error_of(out, truth[:some]))

    def pykeops() -> Row:
        from pykeops.torch import LazyTensor

        points, values = (torch.from_numpy(a).float() for a in (x, y))
        some = min(n, 20_000)

        def run() -> Any:
            t = LazyTensor(points[:some, None, None] / bandwidth)
            s = LazyTensor(points[None, :, None] / bandwidth)
            weight = (-((t - s) ** 2).sum(-1) / 2).exp()
            return (weight @ values[:, None] / weight.sum(1))[:, 0]

        run()  # compiles
        seconds, out = timed(run)
        return Row("PyKeOps, fp32", seconds * n / some, some < n, error(out))

    def error(out: Any) -> float:
        return error_of(out[:CHECKED], truth)

    show(
        f"regression of {n:,} points at themselves, bandwidth 1/100 of the range",
        {
            "ours": ours,
            "ours, fp64": ours_double,
            "statsmodels KernelReg": statsmodels,
            "PyKeOps": pykeops,
        },
    )


def density(n: int) -> None:
    rng = np.random.default_rng(1)
    x = np.where(rng.random(n) < 0.3, rng.normal(-2, 0.3, n), rng.normal(1, 1, n))
    at = rng.uniform(x.min(), x.max(), n)
    bandwidth = float(0.9 * x.std() * n**-0.2)
    places = at[:CHECKED]
    weights = np.exp(-0.5 * ((places[:, None] - x) / bandwidth) ** 2)
    truth = weights.sum(1) / (n * bandwidth * math.sqrt(2 * math.pi))

    def ours() -> Row:
        points, targets = (torch.from_numpy(a).float() for a in (x, at))
        seconds, out = timed(lambda: smoothing.kernel_density(points, targets, bandwidth))
        name = "boltzattn.smoothing.kernel_density, fp32"
        return Row(name, seconds, False, error_of(out[:CHECKED].exp(), truth))

    def ours_double() -> Row:
        points, targets = torch.from_numpy(x), torch.from_numpy(at)
        seconds, out = timed(lambda: smoothing.kernel_density(points, targets, bandwidth))
        name = "boltzattn.smoothing.kernel_density, fp64"
        return Row(name, seconds, False, error_of(out[:CHECKED].exp(), truth))

    def tree(tolerance: float) -> Callable[[], Row]:
        def row() -> Row:
            from sklearn.neighbors import KernelDensity

            some = CHECKED
            model = KernelDensity(bandwidth=bandwidth, rtol=tolerance).fit(x[:, None])
            seconds, out = timed(lambda: model.score_samples(at[:some, None]), 0.0)
            name = f"scikit-learn KernelDensity, rtol {tolerance:g}"
            return Row(name, seconds * n / some, True, error_of(np.exp(out), truth))

        return row

    def scipy() -> Row:
        from scipy.stats import gaussian_kde

        some = CHECKED
        model = gaussian_kde(x, bw_method=bandwidth / x.std(ddof=1))
        seconds, out = timed(lambda: model(at[:some]), 0.0)
        return Row("scipy gaussian_kde", seconds * n / some, True, error_of(out, truth))

    def statsmodels() -> Row:
        from statsmodels.nonparametric.kde import KDEUnivariate

        def run() -> np.ndarray:
            model = KDEUnivariate(x)
            model.fit(bw=bandwidth, fft=True)
            return np.interp(at, model.support, model.density)

        seconds, out = timed(run)
        name = "statsmodels KDEUnivariate (fft), interpolated"
        return Row(name, seconds, False, error_of(out[:CHECKED], truth))

    def kdepy() -> Row:
        from KDEpy import FFTKDE

        def run() -> np.ndarray:
            grid, found = FFTKDE(bw=bandwidth).fit(x).evaluate(2**14)
            return np.interp(at, grid, found)

        seconds, out = timed(run)
        name = "KDEpy FFTKDE (2^14), interpolated"
        return Row(name, seconds, False, error_of(out[:CHECKED], truth))

    show(
        f"density of {n:,} points at {n:,} places, bandwidth by the rule of thumb",
        {
            "ours": ours,
            "ours, fp64": ours_double,
            "scikit-learn": tree(1e-6),
            "scikit-learn, coarse": tree(1e-3),
            "scipy gaussian_kde": scipy,
            "statsmodels KDEUnivariate": statsmodels,
            "KDEpy": kdepy,
        },
    )


def sorting(n: int) -> None:
    scores = torch.from_numpy(np.random.default_rng(2).standard_normal(n)).float()
    temperature = 1e-4

    def matrix(some: int) -> torch.Tensor:
        """SoftSort as its formula says."""
        x = scores[:some]
        gap = x.sort().values[:, None] - x
        weights: torch.Tensor = torch.softmax(-gap.square() / temperature, -1)
        return weights @ x

    def ours() -> Row:
        seconds, out = timed(lambda: smoothing.soft_sort(scores, temperature=temperature))
        wide = scores.double()
        gap = wide.sort().values[:: n // CHECKED, None] - wide
        truth = torch.softmax(-gap.square() / temperature, -1) @ wide
        found = out[:: n // CHECKED]
        return Row("boltzattn.smoothing.soft_sort", seconds, False, error_of(found, truth.numpy()))

    def dense() -> Row:
        some = min(n, 5_000)
        seconds, _ = timed(lambda: matrix(some))
        return Row("SoftSort's matrix in torch", seconds * (n / some) ** 2, some < n, None)

    def torchsort() -> Row:
        import torchsort as peer

        seconds, _ = timed(lambda: peer.soft_sort(scores[None], regularization_strength=0.01))
        return Row("torchsort.soft_sort (another operator)", seconds, False, None)

    show(
        f"soft sort of {n:,} scores",
        {"ours": ours, "matrix": dense, "torchsort": torchsort},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--points", type=int, default=100_000, help="of regression and sorting")
    parser.add_argument("--density", type=int, default=1_000_000)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    regression(arguments.points)
    density(arguments.density)
    sorting(arguments.points)


if __name__ == "__main__":
    main()
