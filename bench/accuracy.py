"""The accuracy check that a result must pass to get a speed-up.

The rule is that of the tests. The error against fp64 may be twice the error of eager torch in the
same dtype on the same inputs, or 4 ulp of the terms that are summed, whichever is larger; a method
with a certificate may err by its certificate instead of the 4 ulp. The error of eager torch is
random, so a result above the limit is compared with more eager runs that only round differently.
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
    """The distance between neighbouring numbers of `dtype` at this magnitude."""
    info = torch.finfo(dtype)
    return math.ldexp(info.eps, math.frexp(max(magnitude, info.smallest_normal))[1] - 1)


@dataclass(frozen=True)
class Accuracy:
    """The error of the tensor with the largest ratio of error to limit."""

    tensor: str
    max_error: float
    rms_error: float
    allowed: float

    @property
    def passed(self) -> bool:
        return self.max_error <= self.allowed  # False for NaN too


class Judge:
    """The fp64 result of a problem, and how far a result may be from it.

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
        """`result`: the full output, and gradients for a `dout` that is zero outside the sample."""
        errors = {name: self.error(name, x) for name, x in self.problem.picked(result).items()}
        while (worst := self._worst(errors, certified)).passed is False:
            if self.runs == EAGER_RUNS or math.isnan(worst.max_error):
                break
            self._run_eager()
        return worst

    def allowed(self, name: str, certified: bool = False) -> float:
        """The largest error allowed for `name`."""
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
            if math.isfinite(error):  # if eager torch overflows, it says nothing about the limit
                self.eager_error[name] = max(self.eager_error[name], error)

    def _eager_error_in_double(self, order: int) -> dict[str, float]:
        """The error of eager fp32 on the same problem, scaled by the ratio of the ulps.

        The truth is eager fp64 itself, so the error of eager fp64 cannot be measured. The factor
        1.5 accounts for the error of the truth.
        """
        if order == 0:
            self._single = Judge(make_problem(replace(self.problem.case, dtype="float32")))
        else:
            self._single._run_eager()
        ratio = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
        return {name: 1.5 * ratio * error for name, error in self._single.eager_error.items()}
