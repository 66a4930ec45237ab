"""The one rule for errors; no test states a tolerance of its own.

Against an fp64 oracle a result may be off by at most

    2 x the error of eager PyTorch in the same dtype on the same inputs, or
    4 ulp of the largest magnitude involved (of `value` for the output, of the terms that
      gradients are sums of, of lse itself),

whichever is larger. Where the oracle is inf or NaN, so must the result be. A method that
approximates and certifies its error (every one but `direct`) is held to its certificate instead of
the 4 ulp: 1e-10 of that magnitude in fp64, 5e-6 in fp32.

The error of one eager run is a draw from the distribution of roundings, and on a small tensor
sometimes a very lucky one. So a result over the limit gets further eager runs, which differ by
nothing but their roundings (`oracle.eagers`), and fails if it is over the limit of all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from oracle import largest
from torch import Tensor

EAGER_FACTOR = 2.0
FLOOR_ULPS = 4.0
CERTIFIED = {torch.float64: 1e-10, torch.float32: 5e-6}  # narrower formats: the 4 ulp


def ulp(magnitude: float, dtype: torch.dtype) -> float:
    """The distance of neighbouring numbers of `dtype` at this magnitude."""
    info = torch.finfo(dtype)
    exponent = math.frexp(max(magnitude, info.smallest_normal))[1] - 1
    return math.ldexp(info.eps, exponent)


def error_of(x: Tensor, oracle: Tensor) -> float:
    """The largest deviation where the oracle is finite; inf if x is not finite there."""
    off = (x.detach().double() - oracle)[oracle.isfinite()].abs()
    return off.nan_to_num(nan=math.inf).max().item() if off.numel() else 0.0


def assert_accurate(
    actual: Mapping[str, Tensor],
    oracle: Mapping[str, Tensor],
    eagers: Iterable[Mapping[str, Tensor]],
    *,
    magnitudes: Mapping[str, float] | None = None,
    method: str = "direct",
) -> None:
    """Hold the named tensors to the rule; a magnitude that is not given is the oracle's own."""
    floor, worst = {}, dict.fromkeys(actual, 0.0)
    dtype = next(iter(actual.values())).dtype  # of the inputs; lse may be wider
    for name, x in actual.items():
        truth = oracle[name]
        assert x.shape == truth.shape, f"{name}: shape {x.shape}, not {truth.shape}"
        special = ~truth.isfinite()
        if special.any():
            torch.testing.assert_close(
                x.detach().double()[special],
                truth[special],
                rtol=0.0,
                atol=0.0,
                equal_nan=True,
                msg=lambda m, name=name: f"{name}: inf and NaN are not where the oracle's are. {m}",
            )
        magnitude = (magnitudes or {}).get(name, largest(truth))
        floor[name] = FLOOR_ULPS * ulp(magnitude, x.dtype)
        if method != "direct":
            floor[name] = max(floor[name], CERTIFIED.get(dtype, 0.0) * magnitude)

    error = {name: error_of(x, oracle[name]) for name, x in actual.items()}
    over = [name for name in error if error[name] > floor[name]]
    runs = iter(eagers)
    while over and (run := next(runs, None)) is not None:
        for name in over:
            eager_error = error_of(run[name], oracle[name])
            # Where eager itself overflows it is no yardstick.
            worst[name] = max(worst[name], eager_error if math.isfinite(eager_error) else 0.0)
        over = [name for name in over if error[name] > EAGER_FACTOR * worst[name]]
    assert not over, "; ".join(
        f"{name} ({actual[name].dtype}): error {error[name]:.3e}, but eager's is "
        f"{worst[name]:.3e} and the floor {floor[name]:.3e}"
        for name in over
    )
