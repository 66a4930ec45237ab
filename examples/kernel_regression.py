"""Smooth noisy points by kernel regression, and learn the bandwidth by gradient descent.

The points follow a sine whose frequency grows along the axis, with noise. Silverman's rule of thumb
knows the spread of the points alone and smooths the fast end away. The bandwidth is an argument
that can be differentiated: half of the points predict the other half, and gradient descent lowers
the squared error. Prints the errors of both bandwidths against the truth, and draws both estimates.

    python examples/kernel_regression.py
    python examples/kernel_regression.py --points 1000000 --out docs/smoothing-regression.png
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import boltzattn
import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import torch
from boltzattn.smoothing import kernel_regression
from torch import Tensor
from tqdm import trange

NOISE = 0.5


def truth(x: Tensor) -> Tensor:
    """A sine of 6 waves on [0, 1], each shorter than the one before."""
    return torch.sin(2 * math.pi * 6 * x**2)


def draw_points(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.rand(count, generator=generator)
    return x, truth(x) + NOISE * torch.randn(count, generator=generator)


def rule_of_thumb(x: Tensor) -> float:
    return float(x.std()) * (0.75 * len(x)) ** -0.2


def learn_bandwidth(x: Tensor, y: Tensor, steps: int, show: bool = True) -> float:
    """The bandwidth with which the points of even number predict those of odd number best."""
    log_bandwidth = torch.tensor(math.log(rule_of_thumb(x)), requires_grad=True)
    # One number: the sign of its derivative is enough, and steps shrink where it changes.
    optimizer = torch.optim.Rprop([log_bandwidth], lr=0.3, step_sizes=(1e-4, 0.5))
    bar = trange(steps, desc="bandwidth", disable=not show)
    for _ in bar:
        predicted = kernel_regression(x[::2], y[::2], x[1::2], log_bandwidth.exp())
        loss = (predicted - y[1::2]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        bar.set_postfix(bandwidth=f"{log_bandwidth.exp().item():.2g}", loss=f"{loss.item():.4f}")
    return log_bandwidth.exp().item()


def draw(x: Tensor, y: Tensor, estimates: dict[str, float], to: Path) -> dict[str, float]:
    """The picture; returns the root mean squared error of every estimate on a grid."""
    at = torch.linspace(0, 1, 1001)
    figure, axes = plt.subplots(figsize=(9, 4), layout="constrained")
    shown = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[:4000]
    axes.plot(x[shown], y[shown], ".", color="#bbbbbb", ms=2, label=f"{len(shown):,} of the points")
    axes.plot(at, truth(at), color="black", lw=1, label="truth")
    errors = {}
    styles = {"color": "#D55E00", "ls": "--"}, {"color": "#0072B2", "ls": "-"}
    for (name, bandwidth), style in zip(estimates.items(), styles, strict=True):
        curve = kernel_regression(x, y, at, bandwidth)
        errors[name] = float((curve - truth(at)).square().mean().sqrt())
        axes.plot(at, curve, lw=1.8, label=f"{name}: bandwidth {bandwidth:.2g}", **style)
    axes.set(xlim=(0, 1), ylim=(-2.4, 2.9), title=f"kernel regression of {len(x):,} points")
    axes.legend(ncols=4, loc="upper center", frameon=False, fontsize=9)
    figure.savefig(to, dpi=160)
    plt.close(figure)
    return errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=4000)
    parser.add_argument("--steps", type=int, default=20, help="of gradient descent")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--method", default="auto", help="method of boltzattn.attention")
    parser.add_argument("--out", type=Path, default=Path("kernel-regression.png"))
    options = parser.parse_args()
    if options.points < 4:
        parser.error("--points must be at least 4")
    x, y = draw_points(options.points, torch.Generator().manual_seed(options.seed))
    with boltzattn.use_method(options.method):
        start = time.perf_counter()
        learnt = learn_bandwidth(x, y, options.steps)
        seconds = time.perf_counter() - start
        errors = draw(x, y, {"rule of thumb": rule_of_thumb(x), "learnt": learnt}, options.out)
    for name, error in errors.items():
        print(f"{name}: error {error:.4f}")
    print(f"{options.points:,} points, {options.steps} steps in {seconds:.1f} s: {options.out}")


if __name__ == "__main__":
    main()
