"""Self-attention with its projections applied at the nodes, against projecting first."""

import boltzattn
import errors
import pytest
import torch
from boltzattn.dispatch import plan
from boltzattn.problem import Choice


def problem(dtype, lead=(2,), n=300, d=24, heads=3, dv=8, d_out=20, biased=True, seed=0):
    g = torch.Generator().manual_seed(seed)

    def draw(*shape, size=1.0):
        return (size * torch.randn(*shape, generator=g, dtype=torch.float64)).to(dtype)

    tensors = {
        "x": draw(*lead, n, d),
        "w_q": draw(heads, d, size=d**-0.5),
        "w_k": draw(heads, d, size=2 * d**-0.5),
        "w_v": draw(heads * dv, d, size=d**-0.5),
        "w_o": draw(d_out, heads * dv, size=(heads * dv) ** -0.5),
    }
    if biased:
        tensors |= {"b_q": draw(heads), "b_k": draw(heads), "b_v": draw(heads * dv)}
        tensors |= {"b_o": draw(d_out)}
    return tensors


def request(**facts):
    """A layer on the CPU in fp32."""
    others = {"projects_out": True, "is_causal": False, "adds_mask": False, "training": False}
    return plan.LayerRequest("cpu", torch.float32, **{**others, **facts})


def at_nodes(monkeypatch, wanted):
    monkeypatch.setattr(plan, "choose_layer", lambda *_: "nodes" if wanted else "first")


def run(monkeypatch, nodes, tensors, heads, **options):
    """The output and the gradients of everything, by the wanted way."""
    at_nodes(monkeypatch, nodes)
    leaves = {name: t.detach().clone().requires_grad_() for name, t in tensors.items()}
    out = boltzattn.self_attention(**leaves, num_heads=heads, **options)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    (out * weights).sum().backward()
    return {"out": out.detach()} | {name: t.grad for name, t in leaves.items()}


# Relative to the largest entry: a gradient of a weight is a sum over all tokens, so single
# precision loses a little more there than in the output.
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 6e-3}


# Gradients that vanish by symmetry (a shift of all keys, one token) are sums of terms of this size.
THROUGH_LOGITS = ("x", "w_q", "w_k", "b_q", "b_k")


def assert_agrees(ours, exact, dtype):
    assert ours.keys() == exact.keys()
    size = {name: errors.largest(t.double()) for name, t in exact.items()}
    for name, wanted in exact.items():
        terms = max(size[k] for k in THROUGH_LOGITS if k in size)
        limit = TOLERANCE[dtype] * (terms if name in THROUGH_LOGITS else size[name])
        assert ours[name].dtype == dtype
        assert errors.largest(ours[name].double() - wanted.double()) <= limit, name


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("biased", [True, False])
def test_agrees_with_projecting_first(monkeypatch, dtype, biased):
    tensors = problem(dtype, biased=biased)
    exact = run(monkeypatch, False, {k: t.double() for k, t in tensors.items()}, 3)
    assert_agrees(run(monkeypatch, True, tensors, 3), exact, dtype)


@pytest.mark.parametrize("n", [1, 2, 63, 65, 257, 2100])
@pytest.mark.parametrize(("d", "dv", "d_out"), [(1, 1, 1), (7, 5, 3), (130, 16, 67)])
def test_awkward_sizes(monkeypatch, n, d, dv, d_out):
    tensors = problem(torch.float64, n=n, d=d, dv=dv, d_out=d_out)
    exact = run(monkeypatch, False, tensors, 3)
    assert_agrees(run(monkeypatch, True, tensors, 3), exact, torch.float64)


@pytest.mark.parametrize("lead", [(), (2, 3)])
def test_leading_dimensions_and_no_output_projection(monkeypatch, lead):
    tensors = problem(torch.float64, lead=lead, heads=1)
    del tensors["w_o"], tensors["b_o"]
    exact = run(monkeypatch, False, tensors, 1)
    assert_agrees(run(monkeypatch, True, tensors, 1), exact, torch.float64)


def test_masks(monkeypatch):
    tensors = problem(torch.float64)
    mask = torch.rand(2, 300, generator=torch.Generator().manual_seed(2)) < 0.4
    mask[1] = True  # no key at all: only the output's bias is left
    exact = run(monkeypatch, False, tensors, 3, key_padding_mask=mask)
    ours = run(monkeypatch, True, tensors, 3, key_padding_mask=mask)
    assert_agrees(ours, exact, torch.float64)
    assert torch.equal(ours["out"][1], tensors["b_o"].expand(300, -1))


def test_strided_input(monkeypatch):
    tensors = problem(torch.float32)
    at_nodes(monkeypatch, True)
    plain = boltzattn.self_attention(**tensors, num_heads=3)
    tensors["x"] = tensors["x"].mT.contiguous().mT
    assert torch.equal(boltzattn.self_attention(**tensors, num_heads=3), plain)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_not_a_number_goes_where_it_would(monkeypatch, poison):
    tensors = problem(torch.float64)
    tensors["x"][0, 5, 3] = poison
    exact = run(monkeypatch, False, tensors, 3)["out"]
    ours = run(monkeypatch, True, tensors, 3)["out"]
    assert torch.equal(ours.isnan(), exact.isnan())
    assert errors.largest(ours[1] - exact[1]) < 1e-11


def test_a_head_nobody_can_interpolate_is_projected_first(monkeypatch):
    tensors = problem(torch.float64)
    tensors["w_q"] = tensors["w_q"] * 1e9
    exact = run(monkeypatch, False, tensors, 3)
    ours = run(monkeypatch, True, tensors, 3)
    # Logits of 1e10 know softmax to 1e-6 only; gradients through them are not comparable at all.
    for name in ("out", "w_v", "w_o"):
        assert errors.largest(ours[name] - exact[name]) <= 1e-6 * errors.largest(exact[name])


def test_gradcheck_twice(monkeypatch):
    at_nodes(monkeypatch, True)
    tensors = problem(torch.float64, lead=(1,), n=5, d=3, heads=2, dv=2, d_out=2)
    names = list(tensors)

    def call(*values):
        return boltzattn.self_attention(**dict(zip(names, values, strict=True)), num_heads=2)

    leaves = [t.requires_grad_() for t in tensors.values()]
    assert torch.autograd.gradcheck(call, leaves)
    assert torch.autograd.gradgradcheck(call, leaves)


def test_bitwise_equal_over_threads(monkeypatch):
    tensors = problem(torch.float32, n=5000, d=70)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(run(monkeypatch, True, tensors, 3))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(results[0][name], other[name]) for name in other)


def test_compiles(monkeypatch):
    at_nodes(monkeypatch, True)
    tensors = problem(torch.float32, n=600)
    call = torch.compile(
        lambda **t: boltzattn.self_attention(**t, num_heads=3), fullgraph=True, backend="aot_eager"
    )
    expected = run(monkeypatch, True, tensors, 3)
    leaves = {name: t.requires_grad_() for name, t in tensors.items()}
    out = call(**leaves)
    torch.testing.assert_close(out, expected["out"])
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    (out * weights).sum().backward()
    for name, t in leaves.items():
        torch.testing.assert_close(t.grad, expected[name])


# At the nodes some of what is kept is not computed, so it cannot be compared.
@pytest.mark.parametrize(("keep", "nodes"), [(True, False), (False, False), (False, True)])
def test_operators_are_sound(monkeypatch, keep, nodes):
    at_nodes(monkeypatch, nodes)
    t = {k: x.requires_grad_() for k, x in problem(torch.float64, n=40).items()}
    b_in = torch.cat((t["b_q"], t["b_k"], t["b_v"])).detach().requires_grad_()
    weights = t["x"], t["w_q"], t["w_k"], t["w_v"], t["w_o"], b_in, t["b_o"]
    call = (*weights, None, 3, 1.0, False, "auto", "cpu", keep)
    torch.library.opcheck(torch.ops.boltzattn.self_attention.default, call)
    with torch.no_grad():
        out, *kept = torch.ops.boltzattn.self_attention(*call)
        torch.library.opcheck(
            torch.ops.boltzattn.self_attention_backward.default,
            (out, *kept, *call[:-1], True, False),
        )


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("n", [1, 63, 64, 65, 300])
@pytest.mark.parametrize("d", [1, 7, 64])
def test_projection_and_extents(dtype, n, d):
    g = torch.Generator().manual_seed(n + d)
    x, weight, bias = (torch.randn(*s, generator=g).to(dtype) for s in ((2, n, d), (3, d), (3,)))
    numbers, extents = torch.ops.boltzattn.cpu_project(x, weight, bias)
    exact = (x.double() @ weight.double().mT + bias.double()).mT
    assert errors.largest(numbers.double() - exact) <= TOLERANCE[dtype] * errors.largest(exact)
    low, high = numbers.double().amin(-1), numbers.double().amax(-1)
    assert torch.equal(extents[..., 0], low)
    assert torch.equal(extents[..., 1], high)
    assert torch.equal(numbers.gather(-1, extents[..., 2, None].long())[..., 0].double(), low)
    assert torch.equal(numbers.gather(-1, extents[..., 3, None].long())[..., 0].double(), high)
    assert (extents[..., 4] == n).all()
    assert (extents[..., 5] == 1).all()


def test_projection_marks_what_is_not_finite():
    x = torch.ones(1, 70, 2)
    x[0, 69, 0] = torch.nan
    weight = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    _, extents = torch.ops.boltzattn.cpu_project(x, weight, None)
    assert extents[0, :, 5].tolist() == [0.0, 0.0]


def test_it_is_taken_where_it_pays():
    def taken(n, d, dv, heads=1):
        sizes = {"batch": 1, "num_heads": heads, "n": n, "rank": 1, "d": d, "dv": dv, "d_out": d}
        return plan.choose_layer(request(**sizes), Choice("auto", "auto")) == "nodes"

    assert taken(65_536, 256, 256)
    assert taken(16_384, 512, 64, heads=8)
    assert not taken(64, 256, 256)
    assert not taken(65_536, 256, 2)


def test_double_backward_of_the_layer_is_that_of_projecting_first(monkeypatch):
    tensors = problem(torch.float64, n=80)

    def second(nodes):
        at_nodes(monkeypatch, nodes)
        leaves = {k: t.detach().clone().requires_grad_() for k, t in tensors.items()}
        out = boltzattn.self_attention(**leaves, num_heads=3)
        first = torch.autograd.grad(out.square().sum(), list(leaves.values()), create_graph=True)
        sum(g.square().sum() for g in first).backward()
        return {k: t.grad for k, t in leaves.items()}

    assert_agrees(second(True), second(False), torch.float64)


def test_a_third_derivative_is_refused(monkeypatch):
    at_nodes(monkeypatch, True)
    leaves = {k: t.requires_grad_() for k, t in problem(torch.float64, n=20).items()}
    out = boltzattn.self_attention(**leaves, num_heads=3).square().sum()
    (first,) = torch.autograd.grad(out, leaves["x"], create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), leaves["x"], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated twice"):
        torch.autograd.grad(second.sum(), leaves["x"])
