"""Kernel smoothing and soft sorting: short functions over attention with Gaussian scores.

Points that are single numbers take near-linear time where a backend's transform has Gaussian
scores, and quadratic time with linear memory elsewhere; `boltzattn.explain` tells which. All
functions are differentiable in every tensor, any number of times, and batched over leading
dimensions. They compute in the dtype of their inputs, also under autocast: bfloat16 positions would
be coarser than most bandwidths.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from boltzattn.dispatch.torch_modes import without_autocast
from boltzattn.functional import attention
from boltzattn.validation import check_floating, check_number, shape_of

__all__ = ["kernel_density", "kernel_regression", "soft_rank", "soft_sort"]


def kernel_regression(
    x: Tensor,
    y: Tensor,
    at: Tensor | None = None,
    bandwidth: float | Tensor | None = None,
    *,
    coordinates: bool = False,
) -> Tensor:
    """The Nadaraya-Watson estimate: a mean of the y_j, weighted by `exp(-(t - x_j)^2 / (2 b^2))`.

    Args:
        x: `[..., n]`, the points; with `coordinates` `[..., n, d]`.
        y: `[..., n]` or `[..., n, c]`, what was observed there. It has the leading dimensions of x.
        at: `[..., m]` (`[..., m, d]`), where to estimate; default x itself. Leading dimensions
            broadcast.
        bandwidth: b, a number, or a tensor that broadcasts to the leading dimensions of x; with
            `coordinates` to `[..., d]`, one for each coordinate. Differentiable. Default:
            Silverman's rule of thumb, for every batch and coordinate,
            `std(x) * (n (d + 2) / 4) ** (-1 / (d + 4))`, without a gradient; it is 0, and the
            estimate NaN, where all points are equal.
        coordinates: the last dimension of x and `at` are the coordinates of a point. With two
            to four of them, time is linear in n while the points spread over few bandwidths, and
            quadratic otherwise.

    Returns:
        `[..., m]` or `[..., m, c]`. The estimate lies between the smallest and the largest y; far
        from all points it is the y of the nearest one.

    Example:
        >>> x = torch.linspace(0, 1, 101)
        >>> boltzattn.smoothing.kernel_regression(x, x**2, torch.tensor([0.5]), bandwidth=0.01)
        tensor([0.2501])
    """
    points = _points("x", x, coordinates)
    check_floating("y", y)
    columns = y.ndim - points.ndim + 1  # 0 for numbers, 1 for rows
    if columns not in (0, 1) or y.shape[: y.ndim - columns] != points.shape[:-1]:
        shape = list(points.shape[:-1])
        raise ValueError(
            f"y must have shape {shape} or {[*shape, 'c']} to fit x {shape_of(x)}, got "
            f"{shape_of(y)}; for points of several coordinates pass coordinates=True"
        )
    _check_like("y", y, x)
    targets = points if at is None else _other_points(at, x, points, coordinates)
    b = _bandwidth(bandwidth, points, coordinates)
    out = _gaussian_attention(targets, points, y if columns else y.unsqueeze(-1), b)[0]
    return out if columns else out.squeeze(-1)


def kernel_density(
    x: Tensor,
    at: Tensor,
    bandwidth: float | Tensor | None = None,
    *,
    coordinates: bool = False,
) -> Tensor:
    """The logarithm of the kernel density estimate, a mean of normal densities around the x_j.

    Args:
        x: `[..., n]`, the points; with `coordinates` `[..., n, d]`.
        at: `[..., m]` (`[..., m, d]`), where to estimate. Leading dimensions broadcast.
        bandwidth, coordinates: as in `kernel_regression`.

    Returns:
        `[..., m]`, log density, fp32 (fp64 for fp64 inputs). Far from all points it falls like a
        parabola, and does not underflow.

    Example:
        >>> boltzattn.smoothing.kernel_density(torch.zeros(1), torch.zeros(1), bandwidth=1.0).exp()
        tensor([0.3989])
    """
    points = _points("x", x, coordinates)
    targets = _other_points(at, x, points, coordinates)
    b = _bandwidth(bandwidth, points, coordinates)
    lse = _gaussian_attention(targets, points, points[..., :1].detach(), b)[1]
    n, d = points.shape[-2:]
    constant = math.log(n) + 0.5 * d * math.log(2 * math.pi)
    volume = torch.log(b.to(lse.dtype)).expand(*b.shape[:-1], d).sum(-1, keepdim=True)
    return lse - constant - volume


def soft_sort(
    x: Tensor,
    values: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    *,
    descending: bool = False,
) -> Tensor:
    """SoftSort: row i is a mean of the values with weights `exp(-(x_(i) - x_j)^2 / temperature)`.

    x_(i) is the i-th smallest score. For a temperature towards 0 the result tends to the values in
    the order of their scores, and values of equal scores to their mean; for a large temperature all
    rows tend to the mean of all values.

    Args:
        x: `[..., n]`, the scores.
        values: `[..., n]` or `[..., n, c]`, what to sort; default the scores themselves.
        temperature: a positive number, or a tensor that broadcasts to the leading dimensions of x.
            Differentiable. It has the unit of squared scores.
        descending: the largest score first.

    Returns:
        The shape of `values`.

    Example:
        >>> boltzattn.smoothing.soft_sort(torch.tensor([3.0, 1.0, 2.0]), temperature=0.01)
        tensor([1., 2., 3.])
    """
    scores = _points("x", x, coordinates=False)
    y = x if values is None else values
    check_floating("values", y)
    columns = y.ndim - x.ndim
    if columns not in (0, 1) or y.shape[: x.ndim] != x.shape:
        raise ValueError(
            f"values must have shape {shape_of(x)} or {[*x.shape, 'c']} to fit x, got {shape_of(y)}"
        )
    _check_like("values", y, x)
    b = _width_of_temperature(temperature, scores)
    ordered = torch.sort(scores, -2, descending=descending).values
    out = _gaussian_attention(ordered, scores, y if columns else y.unsqueeze(-1), b)[0]
    return out if columns else out.squeeze(-1)


def soft_rank(x: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
    """Ranks from 1 to n: a mean of positions with weights `exp(-(x_i - x_(j))^2 / temperature)`.

    The matrix is SoftSort's transposed, with rows that sum to 1: score x_i looks up its position j
    among the sorted scores x_(j). For a temperature towards 0 the result tends to the ranks, equal
    scores sharing the mean of theirs (as `scipy.stats.rankdata`); for a large temperature it tends
    to `(n + 1) / 2`. A larger score never has a smaller soft rank. The gradient moves scores, not
    positions.

    Args:
        x: `[..., n]`, the scores.
        temperature: as in `soft_sort`.

    Returns:
        `[..., n]` in the dtype of x.

    Example:
        >>> boltzattn.smoothing.soft_rank(torch.tensor([30.0, 10.0, 20.0, 20.0]))
        tensor([4.0000, 1.0000, 2.5000, 2.5000])
    """
    scores = _points("x", x, coordinates=False)
    b = _width_of_temperature(temperature, scores)
    ordered = torch.sort(scores, -2).values
    position = torch.arange(1, x.shape[-1] + 1, dtype=x.dtype, device=x.device)
    return _gaussian_attention(scores, ordered, position.unsqueeze(-1), b)[0].squeeze(-1)


def _gaussian_attention(
    at: Tensor, x: Tensor, y: Tensor, bandwidth: Tensor
) -> tuple[Tensor, Tensor]:
    """(out, lse) of queries `at` and keys x, both divided by a bandwidth [..., 1 or d]."""
    width = bandwidth.unsqueeze(-2)
    # Only differences count. Far from 0 the quotients would be rounded more than the differences.
    origin = x.detach().mean(-2, keepdim=True)
    query, key = (at - origin) / width, (x - origin) / width
    with without_autocast(x.device.type):
        return attention(query, key, y, score="gaussian", return_lse=True)


def _check_like(name: str, given: Tensor, x: Tensor) -> None:
    if given.dtype != x.dtype or given.device != x.device:
        raise ValueError(
            f"{name} must have the dtype and the device of x, {x.dtype} on {x.device}, got "
            f"{given.dtype} on {given.device}; convert it with {name}.to(x)"
        )


def _points(name: str, x: Tensor, coordinates: bool) -> Tensor:
    """[..., n, d] of an argument that has no d unless it has coordinates."""
    check_floating(name, x)
    wanted = "[..., n, d]" if coordinates else "[..., n]"
    if x.ndim < 1 + coordinates or 0 in x.shape:
        raise ValueError(f"{name} must be {wanted} without empty dimensions, got {shape_of(x)}")
    return x if coordinates else x.unsqueeze(-1)


def _other_points(at: Tensor, x: Tensor, points: Tensor, coordinates: bool) -> Tensor:
    targets = _points("at", at, coordinates)
    _check_like("at", at, x)
    if targets.shape[-1] != points.shape[-1]:
        raise ValueError(
            f"at must have points of as many coordinates as x, {points.shape[-1]}, got "
            f"{targets.shape[-1]} (at {shape_of(at)}, x {shape_of(x)})"
        )
    try:
        torch.broadcast_shapes(targets.shape[:-2], points.shape[:-2])
    except RuntimeError:
        raise ValueError(
            f"at must have leading dimensions that broadcast with those of x {shape_of(x)}, got "
            f"{shape_of(at)}"
        ) from None
    return targets


def _bandwidth(given: float | Tensor | None, points: Tensor, coordinates: bool) -> Tensor:
    """[..., 1] or [..., d]."""
    if given is not None:
        return _width("bandwidth", given, points, coordinates)
    *_, n, d = points.shape
    if n == 1:
        raise ValueError(
            "bandwidth must be given for n = 1: the rule of thumb needs the spread of two points; "
            "if the last dimension of x is a coordinate, pass coordinates=True"
        )
    return points.detach().std(-2) * (n * (d + 2) / 4) ** (-1 / (d + 4))


def _width_of_temperature(temperature: float | Tensor, scores: Tensor) -> Tensor:
    """The bandwidth [..., 1] at which Gaussian scores are -(q - k)^2 / temperature."""
    return torch.sqrt(_width("temperature", temperature, scores, False) / 2)


def _width(name: str, given: float | Tensor, points: Tensor, coordinates: bool) -> Tensor:
    """A positive number or a tensor of them as [..., 1] or [..., d]."""
    if not isinstance(given, Tensor):
        check_number(name, given)
        if not 0 < given < math.inf:
            raise ValueError(f"{name} must be positive and finite, got {given}")
        return points.new_full((1,), given)
    check_floating(name, given)
    _check_like(name, given, points)
    shape = (*points.shape[:-2], points.shape[-1]) if coordinates else points.shape[:-2]
    try:
        given.expand(shape)
    except RuntimeError:
        raise ValueError(f"{name} must broadcast to {list(shape)}, got {shape_of(given)}") from None
    return given.reshape(given.shape if coordinates and given.ndim else (*given.shape, 1))
