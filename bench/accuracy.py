"""Whether a result is good enough to have a speed.

The rule is that of the tests. Against fp64 a result may be off by at most twice the error of eager
torch in the same dtype on the same inputs, or by 4 ulp of the terms it is a sum of, whichever is
larger; a method that certifies its error is held to its certificate instead of the 4 ulp. Eager's
error is a draw from the distribution of roundings, so a result over the limit gets further eager
runs that differ by their roundings alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from bench.problems import Named, Problem, Weights, make_problem

EAGER_FACTOR = 2.0
EAGER_RUNS = 6
FLOOR_ULPS = 4.0
CERTIFIED = {torch.float64: 1e-10, torch.float32: 5e-6}  # narrower formats: the 4 ulp


def ulp(magnitude: float, dtype: torch.dtype) -> float:
    """The distance of neighbouring numbers of `dtype` at this magnitude."""
    info = torch.finfo(dtype)
    return math.ldexp(info.eps, math.frexp(max(magnitude, info.smallest_normal))[1] - 1)


@dataclass(frozen=True)
class Accuracy:
    """Error of the tensor that comes nearest to its limit (or is farthest beyond it)."""

    tensor: str
    max_error: float
    rms_error: float
    allowed: float

    @property
    def passed(self) -> bool:
        return self.max_error <= self.allowed  # False for NaN too


class Judge:
    """Holds the fp64 truth of a problem and how far from it a result may be.

    Errors and limits are relative to `unit`: max|value| for the output, else max|gradient|.
    """

    def __init__(self, problem: Problem, weights: Weights | None = None) -> None:
        self.problem, self.dtype = problem, problem.bulk.dtype
        extra = {} if weights is None else {"weights": weights}
        self.dense = partial(problem.dense, **extra)
        self.exact = self.dense(torch.float64)
        self.unit = {name: problem.unit(name, x) or 1.0 for name, x in self.exact.items()}
        own = {name: x.abs().max().item() for name, x in self.exact.items()}
        self.magnitude = own | problem.magnitudes()
        self.runs = 0
        self.eager_error = dict.fromkeys(self.exact, 0.0)
        self._run_eager()

    def judge(self, result: Named, certified: bool = False) -> Accuracy:
        """`result`: the full output, and gradients for `dout` zero outside the sample."""
        errors = {name: self.error(name, x) for name, x in self.problem.picked(result).items()}
        while (worst := self._worst(errors, certified)).passed is False:
            if self.runs == EAGER_RUNS or math.isnan(worst.max_error):
                break
            self._run_eager()
        return worst

    def allowed(self, name: str, certified: bool = False) -> float:
        """The largest error that `name` may have."""
        magnitude, unit = self.magnitude[name], self.unit[name]
        floor = FLOOR_ULPS * ulp(magnitude, self.dtype)
        if certified:
            floor = max(floor, CERTIFIED.get(self.dtype, 0.0) * magnitude)
        return max(floor / unit, EAGER_FACTOR * self.eager_error[name])

    def error(self, name: str, x: Tensor) -> tuple[float, float]:
        """Largest and root mean square error."""
        difference = x.detach().double() - self.exact[name]
        unit = self.unit[name]
        return difference.abs().max().item() / unit, difference.square().mean().sqrt().item() / unit

    def _worst(self, errors: dict[str, tuple[float, float]], certified: bool) -> Accuracy:
        found = [Accuracy(name, *e, self.allowed(name, certified)) for name, e in errors.items()]
        return max(
            found,
            key=lambda a: math.inf if math.isnan(a.max_error) else a.max_error / a.allowed,
        )

    def _run_eager(self) -> None:
        order, self.runs = self.runs, self.runs + 1
        if self.dtype == torch.float64:
            errors = self._eager_error_in_double(order)
        else:
            eager = self.dense(self.dtype, order)
            errors = {name: self.error(name, x)[0] for name, x in eager.items()}
        for name, error in errors.items():
            if math.isfinite(error):  # where eager itself overflows it is no yardstick
                self.eager_error[name] = max(self.eager_error[name], error)

    def _eager_error_in_double(self, order: int) -> dict[str, float]:
        """What fp32 does to numbers of the same kind, scaled by the ratio of the ulps.

        Eager fp64 *is* the truth here, so its own error cannot be seen; rounding errors are
        proportional to the ulp. Half as much again, because the truth has that error as well.
        """
        if order == 0:
            self._single = Judge(make_problem(replace(self.problem.case, dtype="float32")))
        else:
            self._single._run_eager()
        ratio = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
        return {name: 1.5 * ratio * error for name, error in self._single.eager_error.items()}
