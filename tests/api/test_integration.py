"""attention() inside PyTorch: autograd, compile, export, vmap, autocast and their likes."""

from __future__ import annotations

import io
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import boltzattn
import pytest
import torch
from boltzattn.reference import direct as reference
from check import run
from errors import assert_accurate
from oracle import EAGER_RUNS, dense, eagers, oracle
from servers import ANY_RANK, PLAIN, Server, facts, servers
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.func import grad, vmap
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

MASKED = servers(facts(rank=2, attn_mask=True))
CAUSAL = servers(facts(rank=2, is_causal=True))


def _tensors(
    *lead: int, n_q: int = 5, n_k: int = 6, rank: int = 2, dv: int = 3, dtype: Any = torch.float64
) -> list[Tensor]:
    """Query, key and value that want gradients."""
    shapes = ((*lead, n_q, rank), (*lead, n_k, rank), (*lead, n_k, dv))
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def _assert_same(first: Any, second: Any) -> None:
    """Bitwise equal: the same kernel on the same numbers."""
    torch.testing.assert_close(first, second, rtol=0.0, atol=0.0, equal_nan=True)


def _calls(lead: tuple[int, ...]) -> list[Any]:
    """Keywords that reach every branch of the derivatives."""
    return [
        pytest.param({}, id="plain"),
        pytest.param({"is_causal": True, "scale": 0.3}, id="causal"),
        pytest.param(
            {"attn_mask": torch.randn(*lead, 5, 6, dtype=torch.float64) > -0.8}, id="bool"
        ),
        pytest.param(
            {
                "attn_mask": torch.randn(5, 6, dtype=torch.float64),
                "key_padding_mask": torch.randn(*lead[:-1], 6, dtype=torch.float64),
            },
            id="additive",
        ),
        pytest.param({"key_padding_mask": torch.arange(6) > 2}, id="padding"),
        pytest.param({"key_padding_mask": torch.ones(6, dtype=torch.bool)}, id="nothing seen"),
    ]


# -- autograd --------------------------------------------------------------------------------------


@pytest.mark.parametrize("server", MASKED, ids=str)
@pytest.mark.parametrize("call", _calls((2, 2)))
def test_gradcheck(call: dict[str, Any], server: Server) -> None:
    def function(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = boltzattn.attention(*tensors, **call, **server.ask, return_lse=True)
        return out, lse.masked_fill(lse.isinf(), 0.0)  # differences of -inf are NaN

    assert torch.autograd.gradcheck(function, _tensors(2, 2))


@pytest.mark.parametrize("server", MASKED, ids=str)
@pytest.mark.parametrize("call", _calls(()))
def test_gradgradcheck(call: dict[str, Any], server: Server) -> None:
    def function(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = boltzattn.attention(*tensors, **call, **server.ask, return_lse=True)
        return out, lse.masked_fill(lse.isinf(), 0.0)

    assert torch.autograd.gradgradcheck(function, _tensors())


@pytest.mark.parametrize("server", CAUSAL, ids=str)
def test_gradgradcheck_in_blocks(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows of scores at a time and one in the last block."""
    monkeypatch.setattr(reference, "SCORES_PER_BLOCK", 2 * 6)

    def function(*tensors: Tensor) -> tuple[Tensor, ...]:
        return boltzattn.attention(*tensors, is_causal=True, **server.ask, return_lse=True)

    assert torch.autograd.gradgradcheck(function, _tensors())


@pytest.mark.parametrize("server", ANY_RANK, ids=str)
@pytest.mark.parametrize(("n_q", "n_k"), [(0, 6), (5, 0)])
def test_double_backward_of_nothing(n_q: int, n_k: int, server: Server) -> None:
    tensors = _tensors(n_q=n_q, n_k=n_k)
    out, lse = boltzattn.attention(*tensors, **server.ask, return_lse=True)
    out_sum = out.sum() + lse.masked_fill(lse.isinf(), 0.0).sum()
    grads = torch.autograd.grad(out_sum, tensors, create_graph=True)
    again = torch.autograd.grad(sum(g.square().sum() for g in grads), tensors)
    _assert_same(again, tuple(torch.zeros_like(x) for x in tensors))


@pytest.mark.parametrize("server", PLAIN, ids=str)
def test_gradcheck_at_rank_1(server: Server) -> None:
    tensors = _tensors(n_q=7, n_k=9, rank=1)
    ask = server.ask
    assert torch.autograd.gradcheck(lambda *x: boltzattn.attention(*x, **ask), tensors)
    assert torch.autograd.gradgradcheck(lambda *x: boltzattn.attention(*x, **ask), tensors)


@pytest.mark.parametrize("server", PLAIN, ids=str)
@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2), (1, 2)])
def test_only_the_gradients_that_are_wanted(wanted: tuple[int, ...], server: Server) -> None:
    tensors = [x.detach() for x in _tensors(2, rank=1)]
    everything = run(server, *tensors, torch.ones(2, 5, 3, dtype=torch.float64))[2:]
    some = [x.requires_grad_(i in wanted) for i, x in enumerate(tensors)]
    boltzattn.attention(*some, **server.ask).sum().backward()
    assert [x.grad is not None for x in some] == [i in wanted for i in range(3)]
    for i in wanted:
        _assert_same(some[i].grad, everything[i])


@pytest.mark.parametrize("server", PLAIN, ids=str)
def test_gradient_through_lse_alone(server: Server) -> None:
    tensors = _tensors(2, rank=1)
    _, lse = boltzattn.attention(*tensors, **server.ask, return_lse=True)
    lse.sum().backward()
    assert tensors[2].grad is None or not tensors[2].grad.any()
    given = (torch.zeros(2, 5, 3, dtype=torch.float64), torch.ones(2, 5, dtype=torch.float64))
    assert_accurate(
        {"grad_query": tensors[0].grad, "grad_key": tensors[1].grad},
        oracle(*tensors, *given)._asdict(),
        eagers(*tensors, *given),
        method=server.method,
    )


@pytest.mark.parametrize("server", ANY_RANK, ids=str)
def test_inference_mode_and_no_grad(server: Server) -> None:
    tensors = _tensors(2)
    expected = boltzattn.attention(*tensors, **server.ask)
    assert expected.requires_grad
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            out = boltzattn.attention(*tensors, **server.ask)
        assert not out.requires_grad
        _assert_same(out.clone(), expected.detach())


@pytest.mark.parametrize("server", ANY_RANK, ids=str)
def test_deterministic_algorithms_are_no_obstacle(server: Server) -> None:
    tensors = [x.detach() for x in _tensors(2)]
    expected = run(server, *tensors, torch.ones(2, 5, 3, dtype=torch.float64))
    torch.use_deterministic_algorithms(True)
    _assert_same(
        tuple(run(server, *tensors, torch.ones(2, 5, 3, dtype=torch.float64))), tuple(expected)
    )


@pytest.mark.parametrize("server", ANY_RANK, ids=str)
def test_autocast(server: Server) -> None:
    tensors = _tensors(2, dtype=torch.float32)
    half = [x.detach().bfloat16().requires_grad_() for x in tensors]
    with torch.autocast("cpu", torch.bfloat16):
        out, lse = boltzattn.attention(*tensors, **server.ask, return_lse=True)
        mixed = boltzattn.attention(tensors[0].bfloat16(), *tensors[1:], **server.ask)
    expected = boltzattn.attention(*half, **server.ask)
    assert lse.dtype == torch.float32
    _assert_same(out, expected)
    _assert_same(mixed, expected)
    out.float().sum().backward()
    expected.float().sum().backward()
    for x, y in zip(tensors, half, strict=True):
        assert x.grad.dtype == torch.float32
        _assert_same(x.grad, y.grad.float())


@pytest.mark.parametrize("server", ANY_RANK, ids=str)
def test_autocast_leaves_fp64_alone(server: Server) -> None:
    tensors = _tensors(2)
    with torch.autocast("cpu", torch.bfloat16):
        out = boltzattn.attention(*tensors, **server.ask)
        grads = torch.autograd.grad(out.sum(), tensors)
    assert {x.dtype for x in (out, *grads)} == {torch.float64}
    expected = boltzattn.attention(*tensors, **server.ask)
    _assert_same(out, expected)
    _assert_same(grads, torch.autograd.grad(expected.sum(), tensors))


@pytest.mark.parametrize("server", CAUSAL, ids=str)
@pytest.mark.parametrize(("n_q", "n_k"), [(5, 9), (9, 5), (1, 4), (4, 1)])
def test_causal_is_sdpas(n_q: int, n_k: int, server: Server) -> None:
    """Aligned at the top left: a query depends on the values on which it depends in SDPA."""
    tensors = _tensors(n_q=n_q, n_k=n_k)

    def seen(out: Tensor) -> list[list[bool]]:
        grads = (torch.autograd.grad(x.sum(), tensors[2], retain_graph=True)[0] for x in out)
        return [(x != 0).any(-1).tolist() for x in grads]

    ours = seen(boltzattn.attention(*tensors, is_causal=True, **server.ask))
    assert ours == seen(scaled_dot_product_attention(*tensors, is_causal=True))
    assert ours == [[key <= row for key in range(n_k)] for row in range(n_q)]


# -- operators -------------------------------------------------------------------------------------


def _operands(kind: str, server: Server) -> tuple[Any, ...]:
    """Arguments of boltzattn::attention: a problem and a choice."""
    n_k = 0 if kind == "empty" else 6
    tensors = [x.detach() for x in _tensors(2, 3, n_k=n_k, dtype=torch.float32)]
    if kind == "permuted":
        tensors = [x.mT.contiguous().mT for x in tensors]
    if kind == "expanded":
        tensors = [x[:, :1].expand(x.shape) for x in tensors]
    if kind == "requires_grad":
        tensors = [x.requires_grad_() for x in tensors]
    attn_mask = key_mask = None
    if kind == "masks":
        attn_mask = torch.randn(5, 6).expand(2, 3, 5, 6)
        key_mask = (torch.rand(6) < 0.3).expand(2, 3, 6)
    numbers = 0.7, 0.0, False, False
    return (*tensors, attn_mask, key_mask, None, None, *numbers, server.method, server.backend)


KINDS = ("contiguous", "permuted", "expanded", "empty", "requires_grad", "masks")


@pytest.mark.parametrize("server", MASKED, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_opcheck_forward(kind: str, server: Server) -> None:
    torch.library.opcheck(torch.ops.boltzattn.attention.default, _operands(kind, server))


@pytest.mark.parametrize("server", MASKED, ids=str)
@pytest.mark.parametrize(
    ("kind", "through_lse"), [("contiguous", False), *((kind, True) for kind in KINDS)]
)
def test_opcheck_backward(kind: str, through_lse: bool, server: Server) -> None:
    operands = _operands(kind, server)
    with torch.no_grad():
        out, lse = torch.ops.boltzattn.attention(*operands)
    grad_out = torch.randn_like(out)
    grad_lse = torch.randn_like(lse) if through_lse else None
    arguments = (grad_out, grad_lse, out, lse, *operands)
    torch.library.opcheck(torch.ops.boltzattn.attention_backward.default, arguments)


@pytest.mark.parametrize("server", ANY_RANK, ids=str)
def test_the_bare_operator_is_differentiable(server: Server) -> None:
    operands = _operands("requires_grad", server)
    out, lse = torch.ops.boltzattn.attention(*operands)
    grads = torch.autograd.grad((out, lse), operands[:3], (torch.ones_like(out), lse * 0 + 1))
    expected = run(
        server,
        *(x.detach() for x in operands[:3]),
        torch.ones_like(out),
        torch.ones(lse.shape),
        scale=0.7,
    )
    _assert_same(tuple(grads), tuple(expected[2:]))


# -- compile and export ----------------------------------------------------------------------------


def _layer(server: Server, **call: Any) -> Callable[..., Tensor]:
    """Something with work before and after the attention, and both of its outputs in use."""

    def layer(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out, lse = boltzattn.attention(
            query.sin(), key.cos(), value * 2, **call, **server.ask, return_lse=True
        )
        return out.square().sum(-1) + lse

    return layer


def _with_gradients(function: Callable[..., Tensor], tensors: list[Tensor]) -> tuple[Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = function(*leaves)
    return (out.detach(), *torch.autograd.grad(out.sum(), leaves))


@pytest.mark.parametrize("server", MASKED, ids=str)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_without_breaks_or_recompiling(dynamic: bool, server: Server) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    layer = _layer(server, is_causal=True)
    compiled = torch.compile(layer, backend=counter, fullgraph=True, dynamic=dynamic)
    sizes = [(70, 65), (33, 100), (100, 33)] if dynamic else [(70, 65), (70, 65)]
    compilations = []
    for n_q, n_k in sizes:
        tensors = _tensors(2, n_q=n_q, n_k=n_k, dtype=torch.float32)
        _assert_same(_with_gradients(compiled, tensors), _with_gradients(layer, tensors))
        compilations.append(counter.frame_count)
    assert compilations[0] > 0
    assert compilations == compilations[:1] * len(sizes)


@pytest.mark.parametrize("server", ANY_RANK, ids=str)
def test_sizes_become_dynamic_by_themselves(server: Server) -> None:
    """The default mode: static first, one recompilation for the second size, none for others."""
    counter = CompileCounterWithBackend("aot_eager")
    layer = _layer(server)
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    compilations = []
    for n in (70, 65, 33, 100, 17):
        tensors = _tensors(2, n_q=n, n_k=n, dtype=torch.float32)
        _assert_same(_with_gradients(compiled, tensors), _with_gradients(layer, tensors))
        compilations.append(counter.frame_count)
    assert compilations[1:] == compilations[1:2] * 4


def test_compile_with_inductor() -> None:
    """The real compiler, once: masks as inputs, forward and backward, dynamic sizes."""

    def layer(query: Tensor, key: Tensor, value: Tensor, padding: Tensor) -> Tensor:
        return boltzattn.attention(query, key, value * 2, key_padding_mask=padding) * 3

    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(layer, backend=counter, fullgraph=True, dynamic=True)
    compilations = []
    for n in (70, 33):
        tensors = _tensors(2, 2, n_q=n, n_k=n, dtype=torch.float32)
        padding = torch.rand(2, n) < 0.3
        _assert_same(
            _with_gradients(lambda *x, p=padding: compiled(*x, p), tensors),
            _with_gradients(lambda *x, p=padding: layer(*x, p), tensors),
        )
        compilations.append(counter.frame_count)
    assert compilations[0] == compilations[1] > 0


def test_compile_follows_use_backend_and_use_method() -> None:
    """What the context managers say at call time counts, also around a compiled function."""
    query, key, value = (x.detach() for x in _tensors(2, n_q=70, n_k=65, rank=1))
    taken = []
    compiled = torch.compile(boltzattn.attention, backend="aot_eager", fullgraph=True)
    for server in PLAIN:
        with boltzattn.use_backend(server.backend), boltzattn.use_method(server.method):
            inside = compiled(query, key, value)
        taken.append(inside)
        _assert_same(inside, boltzattn.attention(query, key, value, **server.ask))
    _assert_same(compiled(query, key, value), boltzattn.attention(query, key, value))
    # The test could not fail if all of them rounded alike.
    assert len(taken) == 1 or any(not torch.equal(taken[0], x) for x in taken[1:])


def test_use_backend_inside_a_compiled_function() -> None:
    query, key, value = (x.detach() for x in _tensors(2, n_q=70, n_k=65, rank=1))

    def function(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with boltzattn.use_backend("reference"), boltzattn.use_method("direct"):
            return boltzattn.attention(query, key, value)

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    expected = boltzattn.attention(query, key, value, backend="reference", method="direct")
    _assert_same(compiled(query, key, value), expected)


class _Module(torch.nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.function(query, key, value)


@pytest.mark.parametrize("server", ANY_RANK, ids=str)
@pytest.mark.parametrize("dynamic", [False, True])
def test_export_round_trip(dynamic: bool, server: Server) -> None:
    tensors = tuple(x.detach() for x in _tensors(2, n_q=70, n_k=65, dtype=torch.float32))
    layer = _layer(server)
    n_q, n_k = torch.export.Dim("n_q", min=2), torch.export.Dim("n_k", min=2)
    shapes = ({1: n_q}, {1: n_k}, {1: n_k}) if dynamic else None
    program = torch.export.export(_Module(layer), tensors, dynamic_shapes=shapes)
    # The operator itself is in the graph, not what it does for these sizes.
    targets = [node.target for node in program.graph.nodes]
    assert targets.count(torch.ops.boltzattn.attention.default) == 1
    stored = io.BytesIO()
    torch.export.save(program, stored)
    stored.seek(0)
    loaded = torch.export.load(stored).module()
    _assert_same(loaded(*tensors), layer(*tensors))
    if dynamic:
        others = tuple(x.detach() for x in _tensors(2, n_q=33, n_k=100, dtype=torch.float32))
        _assert_same(loaded(*others), layer(*others))


# -- torch.func ------------------------------------------------------------------------------------


class _CountCalls(TorchDispatchMode):
    """How often the package's operators are called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.calls += operator.namespace == "boltzattn"
        return operator(*args, **(kwargs or {}))


# A batched call is the call on the batch, so equality is bitwise.


@pytest.mark.parametrize("server", MASKED, ids=str)
@pytest.mark.parametrize("in_dims", [(0, 0, 0), (0, None, None), (None, 1, -1), (2, 0, None)])
def test_vmap_is_one_call(in_dims: tuple[int | None, ...], server: Server) -> None:
    mask = torch.randn(5, 6, dtype=torch.float64)

    def function(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return boltzattn.attention(query, key, value, mask, **server.ask, return_lse=True)

    batch = [
        x.detach() if dim is None else torch.stack([x.detach() + i for i in range(4)])
        for x, dim in zip(_tensors(2), in_dims, strict=True)
    ]
    moved = [x if dim is None else x.movedim(0, dim) for x, dim in zip(batch, in_dims, strict=True)]
    with _CountCalls() as count:
        together = vmap(function, in_dims)(*moved)
    assert count.calls == 1
    _assert_same(together, function(*batch))


@pytest.mark.parametrize("server", MASKED, ids=str)
def test_vmap_over_masks(server: Server) -> None:
    query, key, value = (x.detach() for x in _tensors(2, 2))
    masks, padding = torch.rand(4, 5, 6) < 0.7, torch.rand(4, 2, 6) < 0.3

    def function(mask: Tensor, padding: Tensor) -> Tensor:
        return boltzattn.attention(query, key, value, mask, key_padding_mask=padding, **server.ask)

    with _CountCalls() as count:
        together = vmap(function)(masks, padding)
    assert count.calls == 1
    query = query.expand(4, 2, 2, 5, 2)
    _assert_same(together, function(masks[:, None, None], padding))


@pytest.mark.parametrize("server", ANY_RANK, ids=str)
def test_vmap_of_vmap(server: Server) -> None:
    tensors = [x.detach() for x in _tensors(3, 4, 2)]

    def function(*x: Tensor) -> Tensor:
        return boltzattn.attention(*x, **server.ask)

    with _CountCalls() as count:
        together = vmap(vmap(function))(*tensors)
    assert count.calls == 1
    _assert_same(together, function(*tensors))


@pytest.mark.parametrize("server", ANY_RANK, ids=str)
def test_vmap_of_grad(server: Server) -> None:
    """Per-sample gradients, in one forward and one backward."""
    tensors = [x.detach() for x in _tensors(4, 2)]

    def loss(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out, lse = boltzattn.attention(query, key, value, **server.ask, return_lse=True)
        return out.square().sum() + lse.sum()

    with _CountCalls() as count:
        together = vmap(grad(loss, (0, 1, 2)))(*tensors)
    assert count.calls == 2
    _assert_same(together, grad(loss, (0, 1, 2))(*tensors))


@pytest.mark.parametrize("server", PLAIN, ids=str)
@pytest.mark.parametrize("scores_per_block", [reference.SCORES_PER_BLOCK, 3])
def test_hessian_by_torch_func(
    scores_per_block: int, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """grad of grad, and a Jacobian of it by vmap: reverse over reverse, in one block or a few."""
    monkeypatch.setattr(reference, "SCORES_PER_BLOCK", scores_per_block)
    tensors = [x.detach() for x in _tensors(n_q=2, n_k=3, rank=1, dtype=torch.float32)]

    def hessian(attend: Callable[..., Tensor], query: Tensor, *rest: Tensor) -> dict[str, Tensor]:
        def loss(query: Tensor) -> Tensor:
            return attend(query, *rest).square().sum()

        return {"hessian": torch.func.jacrev(torch.func.grad(loss))(query)}

    def ours(*x: Tensor) -> Tensor:
        return boltzattn.attention(*x, **server.ask)

    assert_accurate(
        hessian(ours, *tensors),
        hessian(lambda *x: dense(*x)[0], *(x.double() for x in tensors)),
        (hessian(lambda *x, i=i: dense(*x, order=i)[0], *tensors) for i in range(EAGER_RUNS)),
        method=server.method,
    )


@pytest.mark.parametrize("server", PLAIN, ids=str)
def test_a_third_derivative_raises(server: Server) -> None:
    """In autograd and in torch.func; a wrong number would be worse."""
    query, key, value = (x.detach() for x in _tensors(rank=1))

    def loss(query: Tensor) -> Tensor:
        return boltzattn.attention(query, key, value, **server.ask).square().sum()

    def slope(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return grad(lambda query: function(query).sum())

    with pytest.raises(RuntimeError, match="third"):
        slope(slope(slope(loss)))(query)

    query.requires_grad_()
    first = torch.autograd.grad(loss(query), query, create_graph=True)[0]
    second = torch.autograd.grad(first.square().sum(), query, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="third"):
        second.sum().backward()


def test_use_backend_is_a_matter_of_one_thread() -> None:
    query, key, value = (x.detach() for x in _tensors(2, n_q=70, n_k=65, rank=1))
    with boltzattn.use_backend("reference"), ThreadPoolExecutor(1) as pool:
        elsewhere = pool.submit(boltzattn.explain, query, key, value).result()
        here = boltzattn.explain(query, key, value)
    assert here.splitlines()[0].endswith("backend reference")
    assert elsewhere == boltzattn.explain(query, key, value)
