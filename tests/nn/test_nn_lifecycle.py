"""What every module must survive: saving, copying, casting, compiling, sharding, ..."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path

import processes
import pytest
import torch
from boltzattn.nn import FeedForward, LowRankAttention, OneLayerTransformer
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

DIM, N = 16, 20


class SelfAttention(nn.Module):
    """LowRankAttention as a function of one tensor."""

    def __init__(self, **options: object) -> None:
        super().__init__()
        self.attention = LowRankAttention(DIM, 4, batch_first=True, **options)

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        return self.attention(x, x, x, key_padding_mask)[0]


BUILDERS = {
    "attention": lambda **o: SelfAttention(**o),
    "attention, rank 3, temperature": lambda **o: SelfAttention(
        rank=3, head_dim=5, learnable_temperature=True, **o
    ),
    "attention, gaussian, alibi": lambda **o: SelfAttention(score="gaussian", alibi=True, **o),
    "attention, alibi, rank 2": lambda **o: SelfAttention(rank=2, alibi=True, **o),
    "feed forward": lambda **o: FeedForward(DIM, 32, **o),
    "paper": lambda **o: OneLayerTransformer(DIM, form="paper", num_heads=2, **o),
    "standard": lambda **o: OneLayerTransformer(
        DIM, num_heads=4, in_dim=DIM, out_dim=DIM, learnable_temperature=True, **o
    ),
}
every_module = pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS.keys())


def assert_equal_outputs(first: nn.Module, second: nn.Module, dtype: torch.dtype) -> None:
    x = torch.randn(2, N, DIM, dtype=dtype)
    torch.testing.assert_close(first(x), second(x), rtol=0, atol=0)


@every_module
def test_state_dict_round_trip(build) -> None:
    module, other = build(), build()
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)
    buffer.seek(0)
    other.load_state_dict(torch.load(buffer, weights_only=True), strict=True)
    assert_equal_outputs(module, other, torch.float32)


@every_module
def test_strict_loading_names_what_is_wrong(build) -> None:
    module = build()
    state = module.state_dict()
    missing = next(iter(state))
    del state[missing]
    with pytest.raises(RuntimeError, match=f'Missing key.*"{missing}"'):
        module.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"surplus"'):
        module.load_state_dict({**module.state_dict(), "surplus": torch.ones(1)})


def test_loading_a_multihead_state_of_other_widths_fails() -> None:
    state = nn.MultiheadAttention(DIM, 4).state_dict()
    with pytest.raises(RuntimeError, match=r"Unexpected key.*in_proj_weight"):
        LowRankAttention(DIM, 4, rank=1).load_state_dict(state)


def test_loading_a_multihead_state_leaves_it_intact() -> None:
    state = nn.MultiheadAttention(DIM, 4).state_dict()
    names = list(state)
    LowRankAttention(DIM, 4, rank=DIM // 4).load_state_dict(state)
    assert list(state) == names


@every_module
def test_deepcopy_and_pickle(build) -> None:
    module = build()
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert_equal_outputs(module, twin, torch.float32)
        with torch.no_grad():
            for p in twin.parameters():
                p.zero_()
        assert all(p.any() for p in module.parameters() if p.ndim == 2)


def test_the_conversion_report_travels_along() -> None:
    layer = LowRankAttention.from_multihead(nn.MultiheadAttention(DIM, 4), rank=1)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(twin.approximation.spectrum, layer.approximation.spectrum)


# Half results: a few roundings of values of order 1, at 2^-8 and 2^-11 each.
@pytest.mark.parametrize(("dtype", "atol"), [(torch.bfloat16, 0.06), (torch.float16, 0.008)])
@every_module
def test_half_precision(build, dtype: torch.dtype, atol: float) -> None:
    module = build(dtype=torch.float64)
    x = torch.randn(2, N, DIM, dtype=torch.float64)
    half = copy.deepcopy(module).to(dtype)
    out = half(x.to(dtype))
    assert out.dtype == dtype
    out.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in half.parameters())
    wanted = copy.deepcopy(half).double()(x.to(dtype).double())
    torch.testing.assert_close(
        out.double(), wanted, rtol=atol, atol=atol * float(wanted.detach().abs().max())
    )


@every_module
def test_to_double_and_back(build) -> None:
    module = build()
    x = torch.randn(2, N, DIM)
    wanted = module(x)
    assert module.double()(x.double()).dtype == torch.float64
    torch.testing.assert_close(module.float()(x), wanted, rtol=0, atol=0)


@every_module
def test_autocast(build) -> None:
    module = build()
    x = torch.randn(2, N, DIM)
    wanted = module(x)
    with torch.autocast("cpu", torch.bfloat16):
        out = module(x)
    out.float().square().sum().backward()
    assert all(
        p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in module.parameters()
    )
    # A few bf16 roundings (2^-8 each).
    torch.testing.assert_close(
        out.float(), wanted, rtol=0.06, atol=0.06 * float(wanted.detach().abs().max())
    )


def test_autocast_with_weights() -> None:
    module = LowRankAttention(DIM, 4, batch_first=True)
    x = torch.randn(2, N, DIM)
    wanted, wanted_weights = module(x, x, x, need_weights=True)
    with torch.autocast("cpu", torch.bfloat16):
        out, weights = module(x, x, x, need_weights=True)
    torch.testing.assert_close(weights.float(), wanted_weights, rtol=0.06, atol=0.01)
    torch.testing.assert_close(out.float(), wanted, rtol=0.06, atol=0.06)


def gradients(module: nn.Module, *args: Tensor) -> tuple[Tensor, list[Tensor]]:
    module.zero_grad()
    out = module(*args)
    out.square().sum().backward()
    return out.detach(), [p.grad.clone() for p in module.parameters()]


def assert_same_as_eager(module: nn.Module, changed: nn.Module, *args: Tensor) -> None:
    """Same function, other order of operations: fp32 rounding."""
    wanted, wanted_grads = gradients(module, *args)
    out, grads = gradients(changed, *args)
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)
    scale = max(float(g.abs().max()) for g in wanted_grads)
    for grad, wanted_grad in zip(grads, wanted_grads, strict=True):
        torch.testing.assert_close(grad, wanted_grad, rtol=1e-4, atol=1e-5 * scale)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.full)])
@every_module
def test_compile_fullgraph(build, backend: str) -> None:
    module = build()
    compiled = torch.compile(module, fullgraph=True, backend=backend)
    assert_same_as_eager(module, compiled, torch.randn(2, N, DIM))


@pytest.mark.parametrize("need_weights", [False, True])
def test_compile_with_masks(need_weights: bool) -> None:
    layer = LowRankAttention(DIM, 4, batch_first=True)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, N, DIM)
    call = {
        "attn_mask": torch.ones(N, N).bool().triu(1),
        "is_causal": True,
        "key_padding_mask": torch.arange(N) >= torch.tensor([[N], [N - 5]]),
        "need_weights": need_weights,
    }
    wanted, wanted_weights = layer(x, x, x, **call)
    out, weights = compiled(x, x, x, **call)
    torch.testing.assert_close(out, wanted)
    assert (weights is None) == (wanted_weights is None)
    if weights is not None:
        torch.testing.assert_close(weights, wanted_weights)


@every_module
def test_export_with_a_dynamic_length(build) -> None:
    module = build()
    n = torch.export.Dim("n", min=2, max=4096)
    example = torch.randn(2, N, DIM)
    program = torch.export.export(module, (example,), dynamic_shapes=({1: n},))
    longer = torch.randn(2, 3 * N, DIM)
    torch.testing.assert_close(program.module()(longer), module(longer))


@pytest.mark.parametrize("reentrant", [False, True])
@every_module
def test_gradient_checkpointing(build, reentrant: bool) -> None:
    module = build()

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=reentrant)

    x = torch.randn(2, N, DIM, requires_grad=True)
    assert_same_as_eager(module, Checkpointed(), x)


def test_checkpointing_repeats_the_dropout() -> None:
    layer = SelfAttention(dropout=0.5, method="direct", output_dropout=0.5)
    x = torch.randn(2, N, DIM, requires_grad=True)
    results = []
    for call in (layer, lambda x: checkpoint(layer, x, use_reentrant=False)):
        torch.manual_seed(7)
        layer.zero_grad()
        call(x).square().sum().backward()
        results.append([p.grad.clone() for p in layer.parameters()])
    for plain, again in zip(*results, strict=True):
        torch.testing.assert_close(again, plain)


class Halved(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2


@pytest.mark.parametrize("name", ["q_proj_weight", "k_proj_weight", "v_proj_weight"])
def test_parametrize(name: str) -> None:
    layer = SelfAttention()
    halved = copy.deepcopy(layer)
    with torch.no_grad():
        getattr(halved.attention, name).div_(2)
    parametrize.register_parametrization(layer.attention, name, Halved())
    assert_equal_outputs(layer, halved, torch.float32)
    layer(torch.randn(2, N, DIM)).square().sum().backward()
    assert layer.attention.parametrizations[name].original.grad.any()


def test_parametrize_the_output_projection() -> None:
    layer = SelfAttention()
    halved = copy.deepcopy(layer)
    with torch.no_grad():
        halved.attention.out_proj.weight.div_(2)
    parametrize.register_parametrization(layer.attention.out_proj, "weight", Halved())
    assert_equal_outputs(layer, halved, torch.float32)


@every_module
def test_meta_device(build) -> None:
    """Built without memory, filled later; the call gives shapes."""
    module = build(device="meta")
    assert all(p.is_meta for p in module.parameters())
    assert module(torch.empty(2, N, DIM, device="meta")).shape == (2, N, DIM)
    real = build()
    module.load_state_dict(real.state_dict(), assign=True)
    assert_equal_outputs(module, real, torch.float32)


def test_weights_on_the_meta_device() -> None:
    layer = LowRankAttention(DIM, 4, batch_first=True, device="meta")
    x = torch.empty(2, N, DIM, device="meta")
    out, weights = layer(x, x, x, need_weights=True)
    assert (out.shape, weights.shape) == ((2, N, DIM), (2, N, N))


def test_reset_parameters_after_meta() -> None:
    layer = LowRankAttention(DIM, 4, device="meta", learnable_temperature=True)
    layer.to_empty(device="cpu")
    with torch.no_grad():
        for p in layer.parameters():
            p.fill_(torch.nan)
    layer.reset_parameters()
    assert all(p.isfinite().all() for p in layer.parameters())
    assert not layer.in_proj_bias.any()
    gram = layer.k_proj_weight @ layer.k_proj_weight.T
    torch.testing.assert_close(gram, torch.eye(4), rtol=0, atol=1e-5)


def test_reset_lookup_options_after_meta() -> None:
    layer = LowRankAttention(DIM, 4, device="meta", score="gaussian", alibi=True)
    layer.to_empty(device="cpu")
    layer.alibi_slopes.fill_(torch.nan)
    layer.reset_parameters()
    fresh = LowRankAttention(DIM, 4, score="gaussian", alibi=True)
    assert torch.equal(layer.alibi_slopes, fresh.alibi_slopes)
    assert torch.equal(layer.log_bandwidth, fresh.log_bandwidth)


def test_reset_parameters_follows_the_seed() -> None:
    layer = LowRankAttention(DIM, 4)
    torch.manual_seed(3)
    layer.reset_parameters()
    first = copy.deepcopy(layer.state_dict())
    torch.manual_seed(3)
    layer.reset_parameters()
    assert all(torch.equal(first[name], p) for name, p in layer.state_dict().items())


def test_repr() -> None:
    assert repr(LowRankAttention(8, 2)).splitlines()[1].strip() == (
        "embed_dim=8, num_heads=2, rank=1, head_dim=4, batch_first=False"
    )
    special = LowRankAttention(
        8, 2, bias=False, kdim=3, rank=2, scale=1.0, learnable_temperature=True, method="direct"
    )
    assert repr(special).splitlines()[1].strip() == (
        "embed_dim=8, num_heads=2, rank=2, head_dim=4, batch_first=False, kdim=3, scale=1.0, "
        "method='direct', learnable_temperature=True, bias=False"
    )
    lookup = LowRankAttention(8, 2, score="gaussian", alibi=True)
    assert repr(lookup).splitlines()[1].strip() == (
        "embed_dim=8, num_heads=2, rank=1, head_dim=4, batch_first=False, score='gaussian', "
        "alibi=True"
    )
    assert "form='paper'" in repr(OneLayerTransformer(8, form="paper"))
    assert "activation='gelu'" in repr(FeedForward(8, 8, activation="gelu"))


def gradients_of_one_rank(rank: int, world: int) -> dict[str, Tensor]:
    """With its part of the batch, after the processes have exchanged theirs."""
    torch.manual_seed(rank)  # DDP must broadcast the weights of process 0
    module = BUILDERS["standard"]()
    parallel = nn.parallel.DistributedDataParallel(module)
    batch = torch.randn(4, N, DIM, generator=torch.Generator().manual_seed(5))
    parallel(batch.chunk(world)[rank]).square().mean().backward()
    torch.distributed.barrier()
    return {name: p.grad for name, p in module.named_parameters()}


def test_distributed_data_parallel(tmp_path: Path) -> None:
    """Two processes with half a batch each have the gradients of one with the whole."""
    both = processes.run(gradients_of_one_rank, 2, tmp_path)
    torch.manual_seed(0)
    module = BUILDERS["standard"]()
    batch = torch.randn(4, N, DIM, generator=torch.Generator().manual_seed(5))
    module(batch).square().mean().backward()
    for grads in both:
        for name, p in module.named_parameters():
            torch.testing.assert_close(grads[name], p.grad, rtol=1e-4, atol=1e-6)
