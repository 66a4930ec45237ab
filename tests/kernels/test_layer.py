"""Layers at the nodes and in one kernel, against projecting first."""

import boltzattn
import errors
import pytest
import torch
from boltzattn.dispatch import plan
from boltzattn.problem import Choice
from torch._dynamo.testing import AotEagerAndRecordGraphs


def problem(dtype, lead=(2,), n=300, d=24, heads=3, dv=8, d_out=20, biased=True, seed=0):
    g = torch.Generator().manual_seed(seed)

    def draw(*shape, size=1.0):
        return (size * torch.randn(*shape, generator=g, dtype=torch.float64)).to(dtype)

    tensors = {
        "x": draw(*lead, n, d),
        "w_q": draw(heads, d, size=max(d, 1) ** -0.5),
        "w_k": draw(heads, d, size=2 * max(d, 1) ** -0.5),
        "w_v": draw(heads * dv, d, size=max(d, 1) ** -0.5),
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


def take(monkeypatch, way):
    monkeypatch.setattr(plan, "choose_layer", lambda *_: way)


def run(monkeypatch, way, tensors, heads, **options):
    """The output and the gradients of everything, by the wanted way."""
    take(monkeypatch, way)
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


@pytest.mark.parametrize("way", ["nodes", "small"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("biased", [True, False])
def test_agrees_with_projecting_first(monkeypatch, way, dtype, biased):
    tensors = problem(dtype, biased=biased)
    exact = run(monkeypatch, "first", {k: t.double() for k, t in tensors.items()}, 3)
    assert_agrees(run(monkeypatch, way, tensors, 3), exact, dtype)


@pytest.mark.parametrize("way", ["nodes", "small"])
@pytest.mark.parametrize("n", [1, 2, 63, 65, 257, 2100])
@pytest.mark.parametrize(("d", "dv", "d_out"), [(1, 1, 1), (7, 5, 3), (130, 16, 67)])
def test_awkward_sizes(monkeypatch, way, n, d, dv, d_out):
    tensors = problem(torch.float64, n=n, d=d, dv=dv, d_out=d_out)
    exact = run(monkeypatch, "first", tensors, 3)
    assert_agrees(run(monkeypatch, way, tensors, 3), exact, torch.float64)


@pytest.mark.parametrize("way", ["nodes", "small"])
@pytest.mark.parametrize("lead", [(), (2, 3)])
def test_leading_dimensions_and_no_output_projection(monkeypatch, way, lead):
    tensors = problem(torch.float64, lead=lead, heads=1)
    del tensors["w_o"], tensors["b_o"]
    exact = run(monkeypatch, "first", tensors, 1)
    assert_agrees(run(monkeypatch, way, tensors, 1), exact, torch.float64)


@pytest.mark.parametrize("way", ["nodes", "small"])
def test_masks(monkeypatch, way):
    tensors = problem(torch.float64)
    mask = torch.rand(2, 300, generator=torch.Generator().manual_seed(2)) < 0.4
    mask[1] = True  # no key at all: only the output's bias is left
    exact = run(monkeypatch, "first", tensors, 3, key_padding_mask=mask)
    ours = run(monkeypatch, way, tensors, 3, key_padding_mask=mask)
    assert_agrees(ours, exact, torch.float64)
    assert torch.equal(ours["out"][1], tensors["b_o"].expand(300, -1))


@pytest.mark.parametrize("way", ["nodes", "small"])
def test_strided_input(monkeypatch, way):
    tensors = problem(torch.float32)
    take(monkeypatch, way)
    plain = boltzattn.self_attention(**tensors, num_heads=3)
    tensors["x"] = tensors["x"].mT.contiguous().mT
    assert torch.equal(boltzattn.self_attention(**tensors, num_heads=3), plain)


@pytest.mark.parametrize("way", ["nodes", "small"])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_not_a_number_goes_where_it_would(monkeypatch, way, poison):
    tensors = problem(torch.float64)
    tensors["x"][0, 5, 3] = poison
    exact = run(monkeypatch, "first", tensors, 3)["out"]
    ours = run(monkeypatch, way, tensors, 3)["out"]
    assert torch.equal(ours.isnan(), exact.isnan())
    assert errors.largest(ours[1] - exact[1]) < 1e-11


def test_a_head_nobody_can_interpolate_is_projected_first(monkeypatch):
    tensors = problem(torch.float64)
    tensors["w_q"] = tensors["w_q"] * 1e9
    exact = run(monkeypatch, "first", tensors, 3)
    ours = run(monkeypatch, "nodes", tensors, 3)
    # Logits of 1e10 know softmax to 1e-6 only; gradients through them are not comparable at all.
    for name in ("out", "w_v", "w_o"):
        assert errors.largest(ours[name] - exact[name]) <= 1e-6 * errors.largest(exact[name])


@pytest.mark.parametrize("way", ["nodes", "small"])
def test_gradcheck_twice(monkeypatch, way):
    take(monkeypatch, way)
    tensors = problem(torch.float64, lead=(1,), n=5, d=3, heads=2, dv=2, d_out=2)
    names = list(tensors)

    def call(*values):
        return boltzattn.self_attention(**dict(zip(names, values, strict=True)), num_heads=2)

    leaves = [t.requires_grad_() for t in tensors.values()]
    assert torch.autograd.gradcheck(call, leaves)
    assert torch.autograd.gradgradcheck(call, leaves)


@pytest.mark.parametrize("way", ["nodes", "small"])
def test_bitwise_equal_over_threads(monkeypatch, way):
    tensors = problem(torch.float32, n=5000, d=70)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(run(monkeypatch, way, tensors, 3))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(results[0][name], other[name]) for name in other)


@pytest.mark.parametrize("way", ["nodes", "small"])
def test_compiles(monkeypatch, way):
    take(monkeypatch, way)
    tensors = problem(torch.float32, n=600)
    call = torch.compile(
        lambda **t: boltzattn.self_attention(**t, num_heads=3), fullgraph=True, backend="aot_eager"
    )
    expected = run(monkeypatch, way, tensors, 3)
    leaves = {name: t.requires_grad_() for name, t in tensors.items()}
    out = call(**leaves)
    torch.testing.assert_close(out, expected["out"])
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    (out * weights).sum().backward()
    for name, t in leaves.items():
        torch.testing.assert_close(t.grad, expected[name])


# At the nodes some of what is kept is not computed, so it cannot be compared.
@pytest.mark.parametrize(
    ("keep", "way"),
    [(True, "first"), (False, "first"), (True, "small"), (False, "small"), (False, "nodes")],
)
def test_operators_are_sound(monkeypatch, keep, way):
    take(monkeypatch, way)
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


def test_few_tokens_take_one_kernel():
    def way(n, d, choice=("auto", "auto"), **facts):
        sizes = {"num_heads": 4, "n": n, "rank": 1, "d": d, "dv": d // 4, "d_out": d}
        return plan.choose_layer(request(**{"batch": 1, **sizes, **facts}), Choice(*choice))

    assert way(16, 64) == "small"
    assert way(16, 64, rank=3, is_causal=True, adds_mask=True, projects_out=False) == "small"
    assert way(64, 512, batch=8) == "small"
    assert way(16, 512) == "first"  # packing its weights would take longer than its products
    assert way(4000, 64, rank=5, is_causal=True) == "small"
    assert way(16, 64, ("auto", "reference")) == "first"
    assert way(16, 64, ("transform", "auto")) != "small"
    assert way(16, 64, batch=0) == "first"


def test_backward_makes_the_nodes_dearer():
    facts = {"batch": 1, "num_heads": 1, "n": 512, "rank": 1, "d": 512, "dv": 512, "d_out": 512}
    ways = [
        plan.choose_layer(request(**facts, training=training), Choice("auto", "auto"))
        for training in (False, True)
    ]
    assert ways == ["nodes", "first"]


@pytest.mark.parametrize("way", ["nodes", "small", "first"])
def test_double_backward_is_that_of_plain_torch(monkeypatch, way):
    tensors = problem(torch.float64, n=80)
    take(monkeypatch, way)

    def plain(x, w_q, w_k, w_v, w_o, b_q, b_k, b_v, b_o):
        pairs = (w_q, b_q), (w_k, b_k), (w_v, b_v)
        q, k, v = ((x @ w.mT + b).unflatten(-1, (3, -1)).transpose(1, 2) for w, b in pairs)
        return ((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2) @ w_o.mT + b_o

    def second(layer, **options):
        leaves = {k: t.detach().clone().requires_grad_() for k, t in tensors.items()}
        out = layer(**leaves, **options)
        first = torch.autograd.grad(out.square().sum(), list(leaves.values()), create_graph=True)
        sum(g.square().sum() for g in first).backward()
        return {k: t.grad for k, t in leaves.items()}

    assert_agrees(second(boltzattn.self_attention, num_heads=3), second(plain), torch.float64)


def test_a_weight_that_is_passed_twice_has_the_sum_of_both_gradients():
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    w = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: boltzattn.self_attention(x, w, w, w), (x, w))
    assert torch.autograd.gradgradcheck(lambda x, w: boltzattn.self_attention(x, w, w, w), (x, w))


@pytest.mark.parametrize("way", ["nodes", "small"])
def test_a_third_derivative_is_refused(monkeypatch, way):
    take(monkeypatch, way)
    leaves = {k: t.requires_grad_() for k, t in problem(torch.float64, n=20).items()}
    out = boltzattn.self_attention(**leaves, num_heads=3).square().sum()
    (first,) = torch.autograd.grad(out, leaves["x"], create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), leaves["x"], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated twice"):
        torch.autograd.grad(second.sum(), leaves["x"])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("projects_out", [True, False])
@pytest.mark.parametrize("call", ["plain", "causal", "padded", "biased keys"])
def test_one_kernel_for_every_rank_and_mask(monkeypatch, dtype, projects_out, call):
    g = torch.Generator().manual_seed(4)
    options = {
        "plain": {},
        "causal": {"is_causal": True},
        "padded": {"key_padding_mask": torch.rand(2, 61, generator=g) < 0.4},
        "biased keys": {"key_padding_mask": torch.randn(2, 61, generator=g, dtype=torch.float64)},
    }[call]
    tensors = problem(dtype, n=61, d=19, heads=3, dv=5)
    for name in ("w_q", "w_k"):
        tensors[name] = torch.cat((tensors[name], tensors[name].roll(1, 1)))
    for name in ("b_q", "b_k"):
        tensors[name] = torch.cat((tensors[name], -tensors[name]))
    if not projects_out:
        del tensors["w_o"], tensors["b_o"]
    exact = run(monkeypatch, "first", {k: t.double() for k, t in tensors.items()}, 3, **options)
    assert_agrees(run(monkeypatch, "small", tensors, 3, **options), exact, dtype)


@pytest.mark.parametrize("frozen", [["x"], ["w_q", "w_k", "w_v", "w_o"], ["w_o", "b_in"]])
@pytest.mark.parametrize("way", ["nodes", "small", "first"])
def test_only_what_is_asked_for_has_a_gradient(monkeypatch, way, frozen):
    tensors = problem(torch.float64, n=50)
    exact = run(monkeypatch, way, tensors, 3)
    leaves = {k: t.clone().requires_grad_(k not in frozen) for k, t in tensors.items()}
    out = boltzattn.self_attention(**leaves, num_heads=3)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    (out * weights).sum().backward()
    for name, leaf in leaves.items():
        assert (leaf.grad is None) == (name in frozen)
        if leaf.grad is not None:
            torch.testing.assert_close(leaf.grad, exact[name])


@pytest.mark.parametrize(
    "size",
    [{"lead": (0,)}, {"lead": (2, 0)}, {"n": 0}, {"d_out": 0}, {"d": 0}],
    ids=lambda size: str(*size),
)
def test_empty_layers(size):
    tensors = problem(torch.float32, **{"n": 4, "d": 6, "heads": 2, "dv": 3, "d_out": 5, **size})
    leaves = {k: t.requires_grad_() for k, t in tensors.items()}
    out = boltzattn.self_attention(**leaves, num_heads=2)
    assert out.shape == (*leaves["x"].shape[:-1], size.get("d_out", 5))
    out.sum().backward()
    if out.numel() == 0:
        assert all(not t.grad.any() for t in leaves.values())


def test_the_fallback_of_the_nodes_is_what_the_caller_chose(monkeypatch):
    """A head that the transform cannot serve is computed by the backend that was asked for."""
    tensors = problem(torch.float64)
    tensors["w_q"] = tensors["w_q"] * 1e9
    asked = []
    choose = plan.choose

    def watched(request, choice):
        asked.append(choice)
        return choose(request, choice)

    monkeypatch.setattr(plan, "choose", watched)
    run(monkeypatch, "nodes", tensors, 3, method="transform", backend="cpu")
    assert set(asked) == {Choice("transform", "cpu")}


def test_a_compiled_layer_is_one_node_for_every_length():
    """Also across the lengths at which the way changes, forward and backward."""
    layer = boltzattn.nn.LowRankAttention(64, 1, batch_first=True)
    counter = AotEagerAndRecordGraphs()
    compiled = torch.compile(layer, fullgraph=True, backend=counter, dynamic=True)
    taken, graphs = set(), []
    for n in (300, 17, 64, 2000, 5000):
        facts = {"batch": 2, "num_heads": 1, "n": n, "rank": 1, "d": 64, "dv": 64, "d_out": 64}
        taken.add(plan.choose_layer(request(**facts, training=True), Choice("auto", "auto")))
        x = torch.randn(2, n, 64, requires_grad=True)
        out = compiled(x, x, x)[0]
        torch.testing.assert_close(out, layer(x, x, x)[0], rtol=1e-4, atol=1e-5)
        (grad,) = torch.autograd.grad(out.square().sum(), x)
        (wanted,) = torch.autograd.grad(layer(x, x, x)[0].square().sum(), x)
        torch.testing.assert_close(grad, wanted, rtol=1e-3, atol=1e-4)
        graphs.append(len(counter.graphs))
    assert len(taken) > 1
    assert graphs == graphs[:1] * len(graphs)
    nodes = counter.graphs[-1].graph.nodes
    calls = [node.target for node in nodes if node.op == "call_function"]
    assert calls.count(torch.ops.boltzattn.self_attention.default) == 1


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("over", ["x", "weights"])
def test_vmap(over, compiled):
    layer = boltzattn.nn.LowRankAttention(16, 2, batch_first=True, dtype=torch.float64)
    names = [name for name, _ in layer.named_parameters()]
    x = torch.randn(3, 2, 7, 16, dtype=torch.float64, requires_grad=True)
    stacks = [torch.stack([p, 2 * p, -p]).detach() for p in layer.parameters()]

    def of_x(x):
        return layer(x, x, x)[0]

    def of_weights(*weights):
        call = dict(zip(names, weights, strict=True))
        return torch.func.functional_call(layer, call, (x[0],) * 3)[0]

    call, arguments = (of_x, [x]) if over == "x" else (of_weights, stacks)
    wanted = torch.stack([call(*sample) for sample in zip(*arguments, strict=True)])
    together = torch.vmap(call)
    if compiled:
        together = torch.compile(together, backend="aot_eager")
    found = together(*arguments)
    torch.testing.assert_close(found, wanted)
    grads = (torch.autograd.grad(out.square().sum(), x)[0] for out in (found, wanted))
    torch.testing.assert_close(*grads)
