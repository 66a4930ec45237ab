"""Settings of torch that users change: the default device, and the precision of fp32 products."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import boltzattn
import pytest
import torch
from boltzattn import selftest, theory
from boltzattn.dispatch.torch_modes import full_precision
from boltzattn.theory.approximation import add_positions, symmetrised
from torch import Tensor
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


# -- torch.set_default_device ----------------------------------------------------------------------


@pytest.fixture
def default_device_is_meta() -> Iterator[None]:
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


def draw(*shape: int) -> Tensor:
    """On the CPU, whatever the default is."""
    return torch.randn(shape, device="cpu", dtype=torch.float64).requires_grad_()


def attention(n: int, rank: int = 1, **options: Any) -> Callable[[], tuple[Tensor, ...]]:
    def call() -> tuple[Tensor, ...]:
        query, key, value = draw(2, 2, n, rank), draw(2, 2, n, rank), draw(2, 2, n, 3)
        with torch.device("cpu"):
            given = {name: x() if callable(x) else x for name, x in options.items()}
        out, lse = boltzattn.attention(query, key, value, return_lse=True, **given)
        grads = torch.autograd.grad((out.sum(), lse.sum()), (query, key, value), create_graph=True)
        return out, lse, *grads, *torch.autograd.grad(grads[0].sum(), (query, key, value))

    return call


def varlen() -> tuple[Tensor, ...]:
    query, key, value = draw(900, 2, 1), draw(900, 2, 1), draw(900, 2, 3)
    starts = torch.tensor([0, 30, 30, 900], device="cpu")
    found: list[Tensor] = []
    for options in ({}, {"is_causal": True}, {"backend": "reference"}):
        out = boltzattn.attention_varlen(query, key, value, starts, starts, **options)
        found += [out, *torch.autograd.grad(out.square().sum(), (query, key, value))]
    return tuple(found)


def layer() -> tuple[Tensor, ...]:
    x, w, w_v = draw(2, 3000, 16), draw(2, 16), draw(16, 16)
    out = boltzattn.self_attention(x, w, w, w_v, w_v, num_heads=2)
    return out, *torch.autograd.grad(out.sum(), (x, w, w_v))


def module() -> tuple[Tensor, ...]:
    made = boltzattn.nn.LowRankAttention(16, 2, batch_first=True, device="cpu")
    x = draw(2, 50, 16).float()
    padding = torch.zeros(2, 50, dtype=torch.bool, device="cpu")
    return made(x, x, x)[0], made(x, x, x, key_padding_mask=padding, is_causal=True)[0]


def forward_mode() -> tuple[Tensor, ...]:
    query, key, value = (x.detach() for x in (draw(2, 600, 1), draw(2, 600, 1), draw(2, 600, 3)))
    return torch.func.jvp(lambda q: boltzattn.attention(q, key, value), (query,), (query,))


def stream() -> tuple[Tensor, ...]:
    made = boltzattn.StreamingAttention(2, 3, query_bound=9.0, dtype=torch.float64)
    for _ in range(2):
        made.append(draw(2, 1500, 1).detach(), draw(2, 1500, 3).detach())
    made.load_state_dict(made.state_dict())
    return (made.query(draw(2, 4, 1).detach()),)


def merged() -> tuple[Tensor, ...]:
    query, key, value = draw(2, 5, 1), draw(2, 7, 1), draw(2, 7, 3)
    part = boltzattn.attention(query, key, value, return_lse=True)
    return tuple(boltzattn.merge(*part, *part))


def theory_of_a_few() -> tuple[Tensor, ...]:
    x = torch.rand(20, 3, 4, dtype=torch.float64, device="cpu")
    labels = torch.randint(5, (20, 3), device="cpu")
    model = theory.memorize(x, labels)
    pair = theory.hardmax_counterexample()
    gaps = theory.shared_gaps(pair, lambda z: z.softmax(0) @ z.mT @ z)
    assert theory.search_hardmax_weights(3).hardmax_max < 1e-12
    moved = add_positions(x)
    return model(x).detach(), gaps, theory.prouhet_pair(3).first, symmetrised(add_positions)(moved)


def words() -> tuple[Tensor, ...]:
    query = draw(2, 600, 1)
    assert "backend cpu" in boltzattn.explain(query, query, query)
    assert list(selftest.rows(64, (torch.float32,)))
    return ()


MASK = {"key_padding_mask": lambda: torch.rand(2, 600) > 0.8}
CALLS: dict[str, Callable[[], tuple[Tensor, ...]]] = {
    **{
        f"{method}, {backend}, {name}": attention(600, method=method, backend=backend, **options)
        for method in ("direct", "transform")
        for backend in ("cpu", "reference")
        for name, options in {"plain": {}, "causal": {"is_causal": True}, "masked": MASK}.items()
    },
    "rank 3, dropout": attention(60, 3, dropout_p=0.5),
    "attn_mask": attention(60, 3, attn_mask=lambda: torch.rand(60, 60)),
    "mask gradient": attention(60, 3, attn_mask=lambda: torch.rand(60, 60, requires_grad=True)),
    "grouped": attention(60, enable_gqa=True),
    "varlen": varlen,
    "layer": layer,
    "module": module,
    "forward mode": forward_mode,
    "stream": stream,
    "merged": merged,
    "boltz": lambda: (boltzattn.boltz(draw(2, 5)),),
    "theory": theory_of_a_few,
    "words": words,
}


@pytest.mark.usefixtures("default_device_is_meta")
@pytest.mark.parametrize("name", CALLS)
def test_the_default_device_plays_no_role(name: str) -> None:
    for x in CALLS[name]():
        assert x.device == CPU
        assert x.isfinite().all()


# -- TF32 ------------------------------------------------------------------------------------------

SETTINGS: dict[str, Any] = {
    "cuda": torch.backends.cuda.matmul,
    "cpu": torch.backends.mkldnn.matmul,  # type: ignore[attr-defined]
}


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    # torch.testing._internal, which other tests import, forbids such settings from then on.
    allowed = torch.backends.flags.__wrapped__.__globals__["__allow_nonbracketed_mutation"]
    with allowed():
        yield
        torch.backends.fp32_precision = "none"
        torch.set_float32_matmul_precision("highest")
        for setting in SETTINGS.values():
            setting.fp32_precision = "none"


@pytest.mark.parametrize("device", SETTINGS)
@pytest.mark.parametrize("precision", ["high", "medium"])
def test_products_are_not_shortened(device: str, precision: str) -> None:
    setting = SETTINGS[device]
    torch.set_float32_matmul_precision(precision)
    before = setting.fp32_precision
    assert before in ("tf32", "bf16")
    with full_precision(device):
        assert setting.fp32_precision == "ieee"
        with full_precision(device):
            assert setting.fp32_precision == "ieee"
        assert setting.fp32_precision == "ieee"
    assert setting.fp32_precision == before
    assert torch.get_float32_matmul_precision() == precision  # raises if the two do not agree
    with pytest.raises(KeyError), full_precision(device):
        raise KeyError
    assert setting.fp32_precision == before


def test_an_inherited_setting_stays_inherited() -> None:
    torch.backends.fp32_precision = "tf32"
    setting = SETTINGS["cuda"]
    assert setting.fp32_precision == "tf32"
    with full_precision("cuda"):
        assert setting.fp32_precision == "ieee"
    assert setting.fp32_precision == "tf32"
    torch.backends.fp32_precision = "none"
    assert setting.fp32_precision != "tf32"


def test_the_last_thread_that_leaves_restores_the_setting() -> None:
    torch.set_float32_matmul_precision("high")
    setting, inside, leave = SETTINGS["cuda"], threading.Event(), threading.Event()

    def other() -> None:
        with full_precision("cuda"):
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=other)
    with full_precision("cuda"):
        thread.start()
        inside.wait(60)
    assert setting.fp32_precision == "ieee"
    leave.set()
    thread.join()
    assert setting.fp32_precision == "tf32"


class Products(TorchFunctionMode):
    """The precision that torch would multiply fp32 matrices of the CPU in, at every product."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.matmul, Tensor.__matmul__, torch.matmul):
            self.seen.append(SETTINGS["cpu"].fp32_precision)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("masked", [False, True], ids=["plain", "mask gradient"])
def test_the_reference_multiplies_in_full(masked: bool) -> None:
    """Forward, backward, double backward and tangents; a mask's gradient is left to autograd."""
    torch.set_float32_matmul_precision("high")
    query, key, value = (torch.randn(2, 5, 3, requires_grad=True) for _ in range(3))
    mask = torch.randn(5, 5, requires_grad=True) if masked else None

    def call(query: Tensor) -> Tensor:
        return boltzattn.attention(query, key, value, mask, method="direct", backend="reference")

    with Products() as products:
        out = call(query)
        if not masked:
            (grad,) = torch.autograd.grad(out.sum(), query, create_graph=True)
            torch.autograd.grad(grad.sum(), (query, key, value))
            torch.func.jvp(call, (query.detach(),), (query.detach(),))
    assert len(products.seen) > 1
    assert set(products.seen) == {"ieee"}


def test_tangents_under_autocast_are_summed_in_fp32() -> None:
    query, key, value, to_query = (torch.randn(2, 64, 16).bfloat16() for _ in range(4))

    def tangent() -> Tensor:
        def call(query: Tensor) -> Tensor:
            return boltzattn.attention(query, key, value, method="direct")

        return torch.func.jvp(call, (query,), (to_query,))[1]

    alone = tangent()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(tangent(), alone)


def test_a_mask_gradient_compiles() -> None:
    query, mask = torch.randn(2, 5, 3), torch.randn(5, 5, requires_grad=True)

    def call(mask: Tensor) -> Tensor:
        return boltzattn.attention(query, query, query, mask)

    compiled = torch.compile(call, backend="aot_eager")
    torch.testing.assert_close(compiled(mask), call(mask))
