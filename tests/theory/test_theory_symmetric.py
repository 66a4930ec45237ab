"""Column-symmetric polynomials: errors below their bound, for sets of every size."""

from __future__ import annotations

import pytest
import torch
from boltzattn.theory import DomainError, evaluate_polynomial, symmetric_polynomial

POLYNOMIALS = {
    "mean": (1, {((1,),): 3.0}),
    "variance": (1, {((2,),): 1.0, ((1,), (1,)): -1.0}),
    "cube of the mean": (1, {((1,), (1,), (1,)): 1.0}),
    "mixed": (2, {((2, 1), (0, 1)): 1.5, ((1, 0), (0, 3)): -2.0, ((1, 1),): 0.5}),
    "wide": (3, {((1, 1, 1),): 1.0, ((0, 0, 2), (1, 0, 0), (0, 1, 0)): -1.0}),
}


@pytest.mark.parametrize("name", POLYNOMIALS)
@pytest.mark.parametrize("depth", [2, 6, 16])
def test_error_is_below_its_bound(name, depth):
    d, polynomial = POLYNOMIALS[name]
    model = symmetric_polynomial(polynomial, d, depth)
    x = torch.rand(50, 7, d, dtype=torch.float64)
    x[:5] = x[:5].round()  # corners
    with torch.no_grad():
        out = model(x)
    wanted = evaluate_polynomial(polynomial, x)
    assert out.shape == (50, 7, 1)
    assert float((out[..., 0] - wanted[:, None]).abs().max()) <= model.report.error_bound


def test_the_same_module_serves_every_size():
    d, polynomial = POLYNOMIALS["mixed"]
    model = symmetric_polynomial(polynomial, d)
    for n in (1, 10, 1000, 50_000):
        x = torch.rand(n, d, dtype=torch.float64)
        with torch.no_grad():
            error = (model(x)[:, 0] - evaluate_polynomial(polynomial, x)).abs().max()
        assert float(error) <= model.report.error_bound


def test_deeper_networks_are_more_exact():
    d, polynomial = POLYNOMIALS["variance"]
    x = torch.rand(100, 5, d, dtype=torch.float64)
    wanted = evaluate_polynomial(polynomial, x)
    errors = []
    for depth in (3, 5, 7):
        model = symmetric_polynomial(polynomial, d, depth)
        with torch.no_grad():
            errors.append(float((model(x)[:, 0, 0] - wanted).abs().max()))
    # Two tent maps are a factor of 16 in the bound; measured errors scatter around it.
    assert errors[0] > 6 * errors[1] > 36 * errors[2]


def test_order_and_gradients():
    d, polynomial = POLYNOMIALS["mixed"]
    model = symmetric_polynomial(polynomial, d)
    x = torch.rand(6, d, dtype=torch.float64, requires_grad=True)
    out = model(x)
    torch.testing.assert_close(model(x[torch.randperm(6)]), out, rtol=0, atol=1e-12)
    out[0, 0].backward()
    assert x.grad is not None
    wanted = x.detach().requires_grad_()
    evaluate_polynomial(polynomial, wanted).backward()
    # The derivative of the piecewise linear square differs by up to 2^-L from that of the square.
    torch.testing.assert_close(x.grad, wanted.grad, rtol=0, atol=2.0**-8)


def test_repeated_terms_add_up():
    one = symmetric_polynomial({((1, 0), (0, 1)): 1.0, ((0, 1), (1, 0)): 2.0}, 2)
    x = torch.rand(5, 2, dtype=torch.float64)
    product = 3 * x[:, 0].mean() * x[:, 1].mean()
    assert float((one(x)[0, 0] - product).detach().abs()) < one.report.error_bound


def test_tokens_outside_the_cube_are_refused():
    model = symmetric_polynomial({((2,),): 1.0}, 1)
    for wrong in (1.5, -0.25):
        with pytest.raises(DomainError, match=r"tokens must be in \[0, 1\]\^d, got numbers from"):
            model(torch.full((3, 1), wrong, dtype=torch.float64))


@pytest.mark.parametrize(
    ("polynomial", "d", "depth", "message"),
    [
        ({}, 1, 5, "at least one term"),
        ({((1, 2),): 1.0}, 1, 5, "each 1 exponents"),
        ({((0,),): 1.0}, 1, 5, "not all 0"),
        ({(): 1.0}, 1, 5, "a term must be"),
        ({((1,),): 1.0}, 0, 5, "d must be at least 1"),
        ({((1,),): 1.0}, 1, 25, "depth must be from 1 to 24"),
    ],
)
def test_arguments_are_checked(polynomial, d, depth, message):
    with pytest.raises(ValueError, match=message):
        symmetric_polynomial(polynomial, d, depth)
