"""Column-symmetric polynomials: a transformer whose size does not depend on the size of the set.

Takeshita & Imaizumi (arXiv 2502.11467) prove that transformers approximate polynomials of the
tokens of a set that do not depend on their order, with a number of parameters that is independent
of the number of tokens. Such a polynomial is a polynomial in the mean powers of the tokens,

    f(X) = sum_j c_j  prod_i  mean_k x_k^(alpha_ij),

so three steps are enough: a token-wise network computes monomials of the token, attention with all
scores 0 (rank 1 suffices) averages them, and a token-wise network multiplies the averages.

Networks multiply by squaring: `a b = 2 ((a + b) / 2)^2 - a^2 / 2 - b^2 / 2`, and on [0, 1] `y^2` is
`y - sum_l T_l(y) / 4^l`, where `T_l` is the tent map applied l times. After L terms the error is at
most 4^-(L+1), since the sum is the linear interpolation of the square at multiples of 2^-L.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from boltzattn.nn import OneLayerTransformer
from boltzattn.theory.relu_network import (
    BIAS,
    Neuron,
    ReluLayer,
    ReluNetwork,
    count_nonzero,
    relu_layer,
)
from boltzattn.theory.separation import DomainError

# The exponents of a monomial of a token, one per coordinate.
Powers = tuple[int, ...]
# From the monomials whose means are multiplied to the coefficient of the product.
Polynomial = Mapping[tuple[Powers, ...], float]


@dataclass(frozen=True)
class PolynomialReport:
    """What `symmetric_polynomial` built.

    Attributes:
        degree: largest total degree of a term.
        monomials: number of mean powers that attention computes.
        layers: number of ReLU layers before and after attention.
        parameters: number of nonzero weights of the module; no set size enters it.
        error_bound: bound on the error in exact arithmetic, for tokens in the unit cube.
    """

    degree: int
    monomials: int
    layers: int
    parameters: int
    error_bound: float


class InUnitCube(nn.Module):
    """Passes on tokens in [0, 1]^d and raises for others, where squares are not approximated."""

    def forward(self, x: Tensor) -> Tensor:
        if x.numel():
            low, high = (float(end) for end in x.detach().aminmax())
            if not 0 <= low <= high <= 1:
                raise DomainError(
                    f"tokens must be in [0, 1]^d, got numbers from {low:.4g} to {high:.4g}; "
                    "rescale them and the polynomial"
                )
        return x


def symmetric_polynomial(polynomial: Polynomial, d: int, depth: int = 12) -> OneLayerTransformer:
    """A transformer that computes a column-symmetric polynomial of sets of any size.

    Args:
        polynomial: the coefficient of each product of mean powers; for instance
            `{((1, 0), (1, 0)): 2.0, ((1, 1),): -1.0}` is `2 mean(x_1)^2 - mean(x_1 x_2)`.
        d: width of a token; tokens are in [0, 1]^d.
        depth: L, the tent maps per multiplication; every one halves two more bits of the error.

    Returns:
        The module `[.., n, d] -> [.., n, 1]` in fp64, with the value of the polynomial at every
        token. Its `report` is a `PolynomialReport`.

    Raises:
        DomainError: for tokens outside the unit cube, when the module is called.

    Example:
        >>> variance = {((2,),): 1.0, ((1,), (1,)): -1.0}
        >>> model = symmetric_polynomial(variance, d=1)
        >>> x = torch.rand(1000, 1).double()
        >>> bool((model(x) - x.var(correction=0)).abs().max() < model.report.error_bound)
        True
    """
    _check(polynomial, d, depth)
    wanted = sorted({powers for term in polynomial for powers in term}, key=lambda p: (sum(p), p))
    before = list(_monomial_layers(wanted, d, depth))
    after = list(_term_layers(polynomial, wanted, depth))

    # Attention copies the means of the monomials into coordinates of their own.
    count = len(wanted)
    nothing = torch.zeros(1, 2 * count, dtype=torch.float64, device="cpu")
    copy = torch.eye(count, 2 * count, dtype=torch.float64, device="cpu")
    model = OneLayerTransformer.from_weights(
        nothing,
        nothing,
        copy,
        copy.roll(count, 1).T,
        ff1=nn.Sequential(InUnitCube(), ReluNetwork(*before)),
        ff2=ReluNetwork(*after),
    )
    degrees = {term: sum(map(sum, term)) for term in polynomial}
    unit = 2 * 4.0 ** -(depth + 1)
    model.report = PolynomialReport(
        degree=max(degrees.values()),
        monomials=count,
        layers=len(before) + len(after),
        parameters=count_nonzero(model),
        # A product adds its own error to those of its factors, which are at most 1.
        error_bound=sum(abs(c) * (degrees[t] - 1) * unit for t, c in polynomial.items()) + 1e-14,
    )
    return model


def evaluate_polynomial(polynomial: Polynomial, x: Tensor) -> Tensor:
    """The polynomial of sets `[.., n, d]`, computed directly: `[..]`.

    Example:
        >>> evaluate_polynomial({((1,), (2,)): 3.0}, torch.tensor([[1.0], [2.0]]))
        tensor(11.2500)
    """
    total = x.new_zeros(x.shape[:-2])
    for term, coefficient in polynomial.items():
        product = torch.full_like(total, coefficient)
        for powers in term:
            exponents = torch.tensor(powers, dtype=x.dtype, device=x.device)
            product = product * (x**exponents).prod(-1).mean(-1)
        total = total + product
    return total


def _check(polynomial: Polynomial, d: int, depth: int) -> None:
    if d < 1:
        raise ValueError(f"d must be at least 1, got {d}")
    if not 1 <= depth <= 24:
        raise ValueError(f"depth must be from 1 to 24 (fp64 ends there), got {depth}")
    if not polynomial:
        raise ValueError("polynomial must have at least one term, got none")
    for term in polynomial:
        if not term or any(len(p) != d or min(p) < 0 or sum(p) < 1 for p in term):
            raise ValueError(
                f"a term must be a tuple of monomials, each {d} exponents that are not all 0, got "
                f"{term}"
            )


def _monomial_layers(wanted: Sequence[Powers], d: int, depth: int) -> Iterator[ReluLayer]:
    """From a token to all wanted monomials, followed by as many zeros."""

    def name(powers: Powers) -> str:
        return f"x^{powers}"

    def shorter(powers: Powers) -> tuple[Powers, Powers]:
        """A monomial of one degree less, and the coordinate that is missing."""
        i = next(i for i, exponent in enumerate(powers) if exponent)
        one = tuple(int(j == i) for j in range(d))
        return tuple(p - q for p, q in zip(powers, one, strict=True)), one

    needed = set(wanted)
    for degree in range(max(map(sum, wanted)), 1, -1):
        needed |= {part for p in needed if sum(p) == degree for part in shorter(p)}
    names = [name(tuple(int(j == i) for j in range(d))) for i in range(d)]
    for degree in range(2, max(map(sum, needed)) + 1):
        new = sorted(p for p in needed if sum(p) == degree)
        products = {name(p): tuple(map(name, shorter(p))) for p in new}
        yield from _product_layers(names, products, depth)
        names = [*names, *products]
    outputs: dict[str, Neuron] = {name(p): {name(p): 1} for p in wanted}
    yield relu_layer(names, {**outputs, **{f"mean of {name(p)}": {} for p in wanted}})


def _term_layers(
    polynomial: Polynomial, wanted: Sequence[Powers], depth: int
) -> Iterator[ReluLayer]:
    """From the means to the polynomial: products of 2, 3, .. means, then a sum."""
    names = [str((p,)) for p in wanted]
    terms = {tuple(sorted(term)): 0.0 for term in polynomial}
    for term, coefficient in polynomial.items():
        terms[tuple(sorted(term))] += coefficient
    # The attention layer left the monomials of the token before the means.
    yield relu_layer([*(f"token {name}" for name in names), *names], _keep(names))
    for length in range(2, max(map(len, terms)) + 1):
        new = sorted({term[:length] for term in terms if len(term) >= length})
        products = {str(t): (str(t[:-1]), str(t[-1:])) for t in new}
        yield from _product_layers(names, products, depth)
        names = [*names, *products]
    total = {str(term): coefficient for term, coefficient in terms.items()}
    yield relu_layer(names, {"value": total}, affine=True)


def _product_layers(
    names: Sequence[str], products: Mapping[str, tuple[str, ...]], depth: int
) -> Iterator[ReluLayer]:
    """Layers that keep `names` and add products of two of them, all numbers being in [0, 1]."""
    # The squares that are needed, as linear forms of the names.
    squares: dict[str, Neuron] = {}
    for a, b in products.values():
        squares[a] = {a: 1}
        if b != a:
            squares[b] = {b: 1}
            squares[f"{a} and {b}"] = {a: 0.5, b: 0.5}
    neurons: dict[str, Neuron] = _keep(names)
    for y, form in squares.items():
        neurons |= {
            f"tent {y}": form,
            f"fold {y}": {**form, BIAS: -0.5},
            f"square {y}": form,
        }
    yield relu_layer(names, neurons)
    for level in range(1, depth + 1):
        before, neurons = list(neurons), _keep(names)
        for y in squares:
            tent = {f"tent {y}": 2.0, f"fold {y}": -4.0}
            less = {name: -weight / 4.0**level for name, weight in tent.items()}
            neurons |= {
                f"tent {y}": tent,
                f"fold {y}": {**tent, BIAS: -0.5},
                f"square {y}": {f"square {y}": 1, **less},
            }
        yield relu_layer(before, neurons)
    found: dict[str, Neuron] = {}
    for product, (a, b) in products.items():
        found[product] = (
            {f"square {a}": 1}
            if a == b
            else {f"square {a} and {b}": 2, f"square {a}": -0.5, f"square {b}": -0.5}
        )
    yield relu_layer(list(neurons), {**_keep(names), **found})


def _keep(names: Sequence[str]) -> dict[str, Neuron]:
    return {name: {name: 1} for name in names}
