"""Bad input to self_attention(): errors name the argument, what it got and what it accepts."""

from __future__ import annotations

import math
from typing import Any

import boltzattn
import pytest
import torch
from boltzattn.dispatch import plan
from boltzattn.problem import Choice, SelfAttentionProblem

HEADS, D, RANK, DV, D_OUT = 4, 16, 2, 3, 5


def _good() -> dict[str, Any]:
    return {
        "x": torch.randn(2, 7, D),
        "w_q": torch.randn(HEADS * RANK, D),
        "w_k": torch.randn(HEADS * RANK, D),
        "w_v": torch.randn(HEADS * DV, D),
        "w_o": torch.randn(D_OUT, HEADS * DV),
        "b_q": torch.randn(HEADS * RANK),
        "b_k": torch.randn(HEADS * RANK),
        "b_v": torch.randn(HEADS * DV),
        "b_o": torch.randn(D_OUT),
        "num_heads": HEADS,
    }


def _long() -> dict[str, Any]:
    """A call that is projected at the nodes: it goes another way from the very beginning."""
    n, d = 20_000, 64
    good = {
        "x": torch.randn(2, n, d),
        "w_q": torch.randn(1, d),
        "w_k": torch.randn(1, d),
        "w_v": torch.randn(d, d),
        "w_o": torch.randn(8, d),
        "num_heads": 1,
    }
    problem = SelfAttentionProblem(*list(good.values())[:5], None, None, None, 1, 1.0, False)
    request = plan.LayerRequest.of(problem, training=False)
    assert plan.choose_layer(request, Choice("auto", "auto")) == "nodes"
    return good


def _words(error: BaseException, *words: str) -> None:
    for word in words:
        assert word in str(error), f"{word!r} is not in: {error}"


def test_the_good_call_is_good() -> None:
    assert boltzattn.self_attention(**_good()).shape == (2, 7, D_OUT)


WEIGHTS = ("w_q", "w_k", "w_v", "w_o")
BIASES = ("b_q", "b_k", "b_v", "b_o")


# -- not tensors, not floating point, not alike ----------------------------------------------------


@pytest.mark.parametrize("name", ["x", *WEIGHTS, *BIASES])
def test_not_a_tensor(name: str) -> None:
    call = {**_good(), name: [1.0, 2.0]}
    with pytest.raises(TypeError) as caught:
        boltzattn.self_attention(**call)
    _words(caught.value, f"{name} must be a tensor", "list")


@pytest.mark.parametrize("name", ["x", "w_q", "w_k", "w_v"])
def test_missing(name: str) -> None:
    call = {**_good(), name: None}
    with pytest.raises(TypeError) as caught:
        boltzattn.self_attention(**call)
    _words(caught.value, f"{name} must be a tensor", "NoneType")


@pytest.mark.parametrize("name", ["x", *WEIGHTS, *BIASES])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_not_floating_point(dtype: torch.dtype, name: str) -> None:
    good = _good()
    with pytest.raises(TypeError) as caught:
        boltzattn.self_attention(**{**good, name: good[name].to(dtype)})
    _words(caught.value, name, "float32", str(dtype), f"{name}.to(")


@pytest.mark.parametrize("name", [*WEIGHTS, *BIASES])
def test_dtype_of_x(name: str) -> None:
    good = _good()
    with pytest.raises(TypeError) as caught:
        boltzattn.self_attention(**{**good, name: good[name].double()})
    _words(caught.value, f"{name} must have the dtype of x", "float32", "float64", f"{name}.to(")


@pytest.mark.parametrize("name", [*WEIGHTS, *BIASES])
def test_device_of_x(name: str) -> None:
    good = _good()
    with pytest.raises(ValueError, match="device") as caught:
        boltzattn.self_attention(**{**good, name: good[name].to("meta")})
    _words(caught.value, f"{name} must be on the device of x", "cpu", "meta", f"{name}.to(")


# -- shapes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (D,)])
def test_shape_of_x(shape: tuple[int, ...]) -> None:
    call = {**_good(), "x": torch.randn(shape)}
    with pytest.raises(ValueError, match=r"^x must") as caught:
        boltzattn.self_attention(**call)
    _words(caught.value, "[..., n, d]", str(list(shape)))


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param((HEADS * RANK,), id="vector"),
        pytest.param((HEADS, RANK, D), id="heads apart"),
        pytest.param((HEADS * RANK, D + 1), id="other d"),
        pytest.param((D, HEADS * RANK), id="transposed"),
        pytest.param((HEADS * RANK + 1, D), id="rows that heads do not divide"),
        pytest.param((0, D), id="no rows"),
    ],
)
@pytest.mark.parametrize("name", ["w_q", "w_k", "w_v"])
def test_shape_of_weights(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=rf"^{name} must have shape") as caught:
        boltzattn.self_attention(**{**_good(), name: torch.randn(shape)})
    _words(caught.value, f"num_heads = {HEADS}", f"d = {D}", str(list(shape)))


def test_rank_of_keys() -> None:
    wide = torch.randn(HEADS * (RANK + 1), D)
    with pytest.raises(ValueError, match=r"^w_k must have the shape of w_q") as caught:
        boltzattn.self_attention(**{**_good(), "w_k": wide, "b_k": None})
    _words(caught.value, str([HEADS * RANK, D]), str([HEADS * (RANK + 1), D]), "rank")


@pytest.mark.parametrize("shape", [(HEADS * DV,), (D_OUT, HEADS * DV + 1), (HEADS * DV, D_OUT)])
def test_shape_of_the_output_projection(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"^w_o must have shape") as caught:
        boltzattn.self_attention(**{**_good(), "w_o": torch.randn(shape), "b_o": None})
    _words(caught.value, "num_heads * dv", str(HEADS * DV), str(list(shape)))


@pytest.mark.parametrize("name", BIASES)
@pytest.mark.parametrize("shape", [(), (1,), (1, HEADS * RANK)])
def test_shape_of_biases(shape: tuple[int, ...], name: str) -> None:
    """Also those that would broadcast: nn.Linear takes one number per row and nothing else."""
    good = _good()
    with pytest.raises(ValueError, match=rf"^{name} must have shape") as caught:
        boltzattn.self_attention(**{**good, name: torch.randn(shape)})
    rows = good[f"w{name[1:]}"].shape[0]
    _words(caught.value, str([rows]), f"w{name[1:]}", str(list(shape)))


def test_output_bias_without_output_projection() -> None:
    with pytest.raises(ValueError, match=r"^b_o must be None") as caught:
        boltzattn.self_attention(**{**_good(), "w_o": None})
    _words(caught.value, "w_o")


@pytest.mark.parametrize("num_heads", [0, -1, 2.0, "4", None])
def test_number_of_heads(num_heads: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"^num_heads must") as caught:
        boltzattn.self_attention(**{**_good(), "num_heads": num_heads})
    _words(caught.value, "at least 1", repr(num_heads))


# -- what is passed on to attention(), whichever way the call goes ---------------------------------


@pytest.mark.parametrize("good", [_good, _long])
@pytest.mark.parametrize(
    ("name", "value", "kind", "words"),
    [
        pytest.param("scale", math.nan, ValueError, ["nan"], id="NaN scale"),
        pytest.param("scale", math.inf, ValueError, ["inf"], id="infinite scale"),
        pytest.param("dropout_p", 1.5, ValueError, ["between 0 and 1", "1.5"], id="dropout"),
        pytest.param("method", "fast", ValueError, ["'fast'", "'direct'"], id="method"),
        pytest.param("backend", "gpu", ValueError, ["'gpu'", "'reference'"], id="backend"),
        pytest.param("key_padding_mask", [True], TypeError, ["tensor", "list"], id="mask's type"),
        pytest.param(
            "key_padding_mask",
            torch.zeros(2, 3, dtype=torch.bool),
            ValueError,
            ["broadcast", "[2, 3]"],
            id="mask's shape",
        ),
        pytest.param(
            "key_padding_mask",
            torch.zeros(2, 1, dtype=torch.int64),
            TypeError,
            ["bool", "int64"],
            id="mask's dtype",
        ),
    ],
)
def test_arguments_of_attention(
    name: str, value: Any, kind: type[Exception], words: list[str], good: Any
) -> None:
    with pytest.raises(kind, match=rf"^{name} must") as caught:
        boltzattn.self_attention(**{**good(), name: value})
    _words(caught.value, *words)
