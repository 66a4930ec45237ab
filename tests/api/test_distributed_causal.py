"""Causal context parallelism on gloo: uneven shards agree with attention over the whole."""

from __future__ import annotations

import math
import os
import re
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import boltzattn
import pytest
import torch
import torch.distributed as dist
from boltzattn import distributed
from errors import assert_accurate
from oracle import Result, eagers, magnitudes, oracle
from processes import run
from torch import Tensor

N = 401
# How the tokens are spread, by the number of processes.
SHARDS = {
    2: {"uneven": (137, 264), "first empty": (0, 401), "last empty": (401, 0)},
    3: {"uneven": (70, 1, 330), "first empty": (0, 257, 144), "middle empty": (201, 0, 200)},
}
BACKENDS = ("cpu", "reference")

# name: how the whole is drawn, and how it is spread and computed.
CASES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp32, with lse": {"with_lse": True},
    "fp64, masked, with lse": {"dtype": torch.float64, "masked": True, "with_lse": True},
    "bf16": {"dtype": torch.bfloat16, "with_lse": True},
    "fp16, masked": {"dtype": torch.float16, "masked": True},
    "first shard empty": {"shards": "first empty", "with_lse": True},
    "other shard empty": {"shards": "empty", "masked": True, "with_lse": True},
    "first keys masked": {"masked": "first", "with_lse": True},
    "all masked": {"masked": "all"},
    "grouped heads": {"grouped": True, "with_lse": True},
    "equal keys": {"keys": "equal", "with_lse": True},
    "keys 0 and 1": {"keys": "two", "scale": 40.0, "with_lse": True},
    "keys 0 and 1, fp64, cold": {"keys": "two", "scale": 1e5, "dtype": torch.float64},
    "ties of integers": {"keys": "integers", "scale": -30.0, "with_lse": True},
    "rising keys": {"keys": "rising", "scale": 300.0, "with_lse": True},
    "late needle": {"keys": "needle", "scale": 600.0, "with_lse": True},
    "late needle, fp64": {"keys": "needle", "scale": 6e4, "dtype": torch.float64},
    "keys far from 0": {"keys": "far", "with_lse": True},
    "logits of 1e10": {"scale": 1e10, "with_lse": True},
    "logits of 1e10, fp64": {"scale": 1e10, "dtype": torch.float64, "with_lse": True},
    "queries of 0": {"scale": 0.0, "with_lse": True},
    "wide values": {"dv": 300},
}
GATHERED: dict[str, dict[str, Any]] = {
    "floating mask": {"masked": "floating"},
    "mask with a bias": {"masked": "bias", "with_lse": True},
    "sums that could overflow": {"huge": True},
    "gathered": {"exchange": "gather", "masked": True, "with_lse": True},
    "rank 3": {"rank": 3, "exchange": "gather", "masked": True, "with_lse": True},
    "rank 3, in blocks": {
        "rank": 3,
        "exchange": "gather",
        "masked": True,
        "with_lse": True,
        "masked_rows": 100,
    },
    "rank 2, other shard empty": {"rank": 2, "exchange": "gather", "shards": "empty"},
    "rank 2, grouped, first empty": {
        "rank": 2,
        "exchange": "gather",
        "grouped": True,
        "shards": "first empty",
    },
}

NAN = {"nan": True, "with_lse": True}


def draw(
    rank: int = 1,
    dtype: torch.dtype = torch.float32,
    masked: bool | str = False,
    keys: str = "normal",
    nan: bool = False,
    huge: bool = False,
    grouped: bool = False,
    scale: float | None = None,
    with_lse: bool = False,
    dv: int = 5,
    **_: Any,
) -> tuple[list[Tensor | None], dict[str, Any]]:
    """(query, key, value, grad_out, grad_lse) of the whole sequence, and what goes with them."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)

    lead, of_keys = (2, 4 if grouped else 2), (2, 2)
    query, key, value = normal(*lead, N, rank), normal(*of_keys, N, rank), normal(*of_keys, N, dv)
    place = torch.arange(N, dtype=torch.float64).view(1, 1, N, 1)
    made = {
        "equal": lambda: torch.full_like(key, 0.75),
        "two": lambda: (key > 0).to(dtype),
        "integers": lambda: (3 * key).round(),
        "rising": lambda: (place / N + 0.001 * key.double()).to(dtype),
        "needle": lambda: torch.where(place == 399, 2.0, 0.01 * key),
        "far": lambda: key + 1000.0,
    }
    key = made[keys]() if keys != "normal" else key
    if nan:
        value[0, 1, 317] = math.nan
    if huge:
        value *= 2e36
    call: dict[str, Any] = {"scale": scale, "is_causal": True}
    if masked:
        mask = torch.rand(lead[0], N, generator=generator) < 0.3
        if masked == "first":
            mask[:, :300] = True
        mask |= masked == "all"
        if masked in ("floating", "bias"):
            mask = torch.zeros(mask.shape, dtype=dtype).masked_fill(mask, -math.inf)
        if masked == "bias":
            mask[:, 5] = 0.5
        call["key_padding_mask"] = mask
    grad_lse = normal(*lead, N).to(torch.float64 if dtype == torch.float64 else torch.float32)
    return [query, key, value, normal(*lead, N, dv), grad_lse if with_lse else None], call


def rows_of(rank: int, world: int, spread: str = "uneven") -> slice:
    spread = {2: "last empty", 3: "middle empty"}[world] if spread == "empty" else spread
    ends = list(accumulate(SHARDS[world][spread], initial=0))
    return [slice(a, b) for a, b in pairwise(ends)][rank]


def one_case(rank: int, world: int, case: dict[str, Any], backend: str) -> Result:
    """What one process gets."""
    tensors, call = draw(**case)
    rows = rows_of(rank, world, case.get("shards", "uneven"))
    local = [x[..., rows, :].detach().requires_grad_(i < 3) for i, x in enumerate(tensors[:4])]
    if "key_padding_mask" in call:
        call["key_padding_mask"] = call["key_padding_mask"][:, rows]
    distributed.MASKED_ROWS = case.get("masked_rows", 1024)
    out, lse = distributed.attention(
        *local[:3],
        **call,
        enable_gqa=case.get("grouped", False),
        exchange=case.get("exchange", "moments"),
        backend=backend,
        return_lse=True,
    )
    grads = [local[3]]
    if tensors[4] is not None:
        grads.append(tensors[4][..., rows])
    gradients = torch.autograd.grad((out, lse)[: len(grads)], local[:3], grads)
    return Result(out.detach(), lse.detach(), *gradients)


class Volume:
    """Counts what collectives are given, by their names, in bytes."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.all_reduce, self.all_gather = dist.all_reduce, dist.all_gather

    def __enter__(self) -> Volume:
        def all_reduce(x: Tensor, **options: Any) -> Any:
            self.calls.append(("all-reduce", x.numel() * x.itemsize))
            return self.all_reduce(x, **options)

        def all_gather(parts: list[Tensor], x: Tensor, **options: Any) -> Any:
            self.calls.append(("all-gather", x.numel() * x.itemsize))
            return self.all_gather(parts, x, **options)

        dist.all_reduce, dist.all_gather = all_reduce, all_gather
        return self

    def __exit__(self, *_: object) -> None:
        dist.all_reduce, dist.all_gather = self.all_reduce, self.all_gather


def volume(n: int, backend: str) -> tuple[list, list, list, str]:
    """Messages of inference, of forward and of backward, and what `explain` says."""
    query, key = (torch.linspace(-3.0, 3.0, n).view(1, n, 1).requires_grad_() for _ in range(2))
    value = (torch.sin(7.0 * key.detach()) + torch.zeros(8)).requires_grad_()
    call: dict[str, Any] = {"is_causal": True, "backend": backend}
    with Volume() as inference, torch.no_grad():
        distributed.attention(query, key, value, **call)
    with Volume() as forward:
        out = distributed.attention(query, key, value, **call)
    with Volume() as backward:
        out.sum().backward()
    words = boltzattn.explain(query, key, value, **call, group=dist.group.WORLD)
    return inference.calls, forward.calls, backward.calls, words


def gradients_of_one(rank: int, world: int, backend: str) -> list[Tensor | None]:
    """Forward where the first process alone has inputs that require gradients."""
    x = torch.randn(2, 9, 1, generator=torch.Generator().manual_seed(rank))
    x.requires_grad_(rank == 0)
    out = distributed.attention(x, x, x, is_causal=True, backend=backend)
    return [x.detach(), out.detach()]


def disagreements(rank: int, world: int) -> dict[str, str]:
    """What every process hears when the last one does something else, by what it should hear."""
    odd = rank == world - 1
    x = torch.randn(2, 10, 1)
    calls = {
        "is_causal differs between ranks: False and True; pass the same is_causal on all ranks": (
            (x, x, x),
            {"is_causal": odd},
        ),
        "value.shape[-1] differs between ranks: 1 and 2": ((x, x, torch.randn(2, 10, 1 + odd)), {}),
        "dtype differs between ranks: float64 and float32": (
            [x.double() if odd else x] * 3,
            {},
        ),
        "query.shape[-3] differs between ranks: 2 and 3": ([torch.randn(2 + odd, 10, 1)] * 3, {}),
        f"rank {world - 1} of the group cannot serve the call: query must have as many tokens as "
        "key on every rank with is_causal=True, got 9 and 10": ((x[:, odd:], x, x), {}),
    }
    heard = {}
    for expected, (tensors, options) in calls.items():
        for function in (distributed.attention, distributed.explain):
            with pytest.raises(ValueError, match="rank") as caught:
                function(*tensors, **{"is_causal": True, **options})
            heard[f"{expected}|{function.__name__}"] = str(caught.value)
    # The group is as good as before.
    assert distributed.attention(x, x, x, is_causal=True).isfinite().all()
    return heard


def layer(rank: int, world: int) -> dict[str, Tensor]:
    """A causal layer with process_group: local output, and the sum of all gradients."""
    torch.manual_seed(0)
    made = boltzattn.nn.LowRankAttention(
        8, 2, batch_first=True, dtype=torch.float64, process_group=dist.group.WORLD
    )
    x = torch.randn(2, N, 8, dtype=torch.float64)[:, rows_of(rank, world)]
    out, _ = made(x, x, x, is_causal=True)
    out.square().sum().backward()
    for p in made.parameters():
        dist.all_reduce(p.grad)
    with pytest.raises(ValueError, match="attn_mask must not be used together with process_group"):
        made(x, x, x, attn_mask=torch.zeros(x.shape[1], x.shape[1]), is_causal=True)
    return {"out": out.detach(), **{name: p.grad for name, p in made.named_parameters()}}


def sharded_tensors(rank: int, world: int) -> list[Tensor]:
    """DTensors in and out."""
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    tensors, _ = draw(dtype=torch.float64)
    parts = [distribute_tensor(x, mesh, [Shard(2)]).requires_grad_() for x in tensors[:3]]
    out = distributed.attention(*parts, is_causal=True)
    out.to_local().square().sum().backward()
    return [out.detach().full_tensor(), *(x.grad.full_tensor() for x in parts)]


def everything(rank: int, world: int) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for backend in BACKENDS:
        for name, case in (CASES | GATHERED).items():
            with Volume() as sent:
                found[name, backend] = one_case(rank, world, case, backend)
            found[name, backend, "sent"] = [kind for kind, _ in sent.calls]
        found["NaN", backend] = one_case(rank, world, NAN, backend)
        found["again", backend] = one_case(rank, world, CASES["fp32, with lse"], backend)
        found["volumes", backend] = [volume(n, backend) for n in (2**10, 2**12)]
        found["gradients of one", backend] = gradients_of_one(rank, world, backend)
    found["disagreements"] = disagreements(rank, world)
    found["layer"] = layer(rank, world)
    found["sharded"] = sharded_tensors(rank, world)
    return found


@pytest.fixture(scope="module", params=[2, 3], ids=["2 processes", "3 processes"])
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run(everything, request.param, tmp_path_factory.mktemp("group"))


def check(parts: list[Result], case: dict[str, Any], method: str) -> None:
    actual = {
        field: torch.cat([getattr(part, field) for part in parts], -1 if field == "lse" else -2)
        for field in Result._fields
    }
    tensors, call = draw(**case)
    query, key, value, *grads = tensors
    if case.get("grouped"):
        # The oracle repeats heads; a gradient is the sum over the repetitions.
        repeats = [x.repeat_interleave(2, -3) for x in (key, value)]
        for name in ("grad_key", "grad_value"):
            assert actual[name].shape[-3] == 2
        truth = oracle(query, *repeats, *grads, **call)._asdict()
        runs = [run | {} for run in eagers(query, *repeats, *grads, **call)]
        sizes = magnitudes(query, *repeats, *grads, **call)
        for one in (truth, *runs):
            for name in ("grad_key", "grad_value"):
                one[name] = one[name].unflatten(-3, (2, 2)).sum(-3)
    else:
        truth = oracle(*tensors, **call)._asdict()
        runs = eagers(*tensors, **call)
        sizes = magnitudes(*tensors, **call)
    assert_accurate(actual, truth, runs, magnitudes=sizes, method=method)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_equals_causal_attention_over_the_whole(
    results: list[dict[Any, Any]], name: str, backend: str
) -> None:
    check([process[name, backend] for process in results], CASES[name], "transform")
    for process in results:  # extents and tables; backward: tables over rows
        assert process[name, backend, "sent"] == ["all-reduce", "all-gather", "all-gather"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", GATHERED)
def test_gathered_keys_are_masked_by_their_place_in_the_whole(
    results: list[dict[Any, Any]], name: str, backend: str
) -> None:
    check([process[name, backend] for process in results], GATHERED[name], "direct")
    for process in results:  # keys and values; backward: their gradients
        sent = process[name, backend, "sent"]
        assert sent.count("all-gather") >= 2
        assert sent.count("all-reduce") == 3


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_before_a_nan_are_clean(results: list[dict[Any, Any]], backend: str) -> None:
    """The oracle multiplies what is hidden by 0, so one process is the measure."""
    (*inputs, grad_out, grad_lse), call = draw(**NAN)
    leaves = [x.requires_grad_() for x in inputs]
    wanted = boltzattn.attention(*leaves, **call, return_lse=True, method="direct")
    wanted = *wanted, *torch.autograd.grad(wanted, leaves, (grad_out, grad_lse))
    assert wanted[0][0, 1, :317].isfinite().all()
    for i, name in enumerate(Result._fields):
        parts = [process["NaN", backend][i] for process in results]
        together = torch.cat(parts, -1 if name == "lse" else -2)
        # Sums of fp32 in another order.
        torch.testing.assert_close(together, wanted[i], rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_results_are_reproducible(results: list[dict[Any, Any]], backend: str) -> None:
    for process in results:
        for a, b in zip(process["again", backend], process["fp32, with lse", backend], strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("backend", BACKENDS)
def test_volume_does_not_depend_on_the_length(results: list[dict[Any, Any]], backend: str) -> None:
    for process in results:
        short, long = process["volumes", backend]
        assert short == long
        inference, forward, backward, words = short
        assert [kind for kind, _ in inference] == ["all-reduce", "all-gather"]
        assert [kind for kind, _ in forward] == ["all-reduce", "all-gather"]
        assert [kind for kind, _ in backward] == ["all-gather"]
        # Slopes are sent if gradients are wanted.
        assert 0.45 * forward[1][1] < inference[1][1] < 0.6 * forward[1][1]
        told = list(map(int, re.findall(r"(\d+) bytes", words)))
        assert told == [size for _, size in forward + backward]
        assert words.startswith(f"exchange moments, causal, {len(results)} processes, 1 head")


@pytest.mark.parametrize("backend", BACKENDS)
def test_processes_may_differ_in_what_requires_gradients(
    results: list[dict[Any, Any]], backend: str
) -> None:
    x, out = (
        torch.cat(parts, -2)
        for parts in zip(
            *(process["gradients of one", backend] for process in results), strict=True
        )
    )
    wanted = boltzattn.attention(x, x, x, is_causal=True, method="direct")
    torch.testing.assert_close(out, wanted, rtol=0.0, atol=3e-5)  # the certificate of a transform


def test_disagreement_is_the_same_error_on_all_ranks(results: list[dict[Any, Any]]) -> None:
    for process in results:
        assert process["disagreements"] == results[0]["disagreements"]
        for expected, heard in process["disagreements"].items():
            assert heard.startswith(expected.partition("|")[0])


def test_causal_layer(results: list[dict[Any, Any]]) -> None:
    torch.manual_seed(0)
    whole = boltzattn.nn.LowRankAttention(8, 2, batch_first=True, dtype=torch.float64)
    x = torch.randn(2, N, 8, dtype=torch.float64)
    out, _ = whole(x, x, x, is_causal=True)
    out.square().sum().backward()
    together = torch.cat([process["layer"]["out"] for process in results], 1)
    # fp64 in another order.
    torch.testing.assert_close(together, out.detach(), rtol=1e-10, atol=1e-10)
    for name, p in whole.named_parameters():
        for process in results:
            torch.testing.assert_close(process["layer"][name], p.grad, rtol=1e-9, atol=1e-9)


def test_sharded_tensors(results: list[dict[Any, Any]]) -> None:
    tensors, _ = draw(dtype=torch.float64)
    leaves = [x.requires_grad_() for x in tensors[:3]]
    out = boltzattn.attention(*leaves, is_causal=True)
    out.square().sum().backward()
    for process in results:
        for actual, wanted in zip(
            process["sharded"], [out.detach(), *(x.grad for x in leaves)], strict=True
        ):
            # fp64 in another order.
            torch.testing.assert_close(actual, wanted, rtol=0.0, atol=1e-9)


def dies(rank: int, world: int, after: int) -> str:
    """Process 1 ends without a word before its all-gather number `after`."""
    calls = 0
    gather = dist.all_gather

    def all_gather(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if rank == 1 and calls > after:
            os._exit(3)
        return gather(*arguments, **options)

    dist.all_gather = all_gather
    query = torch.randn(1, 100, 1, requires_grad=True)
    try:
        distributed.attention(query, query, query, is_causal=True).sum().backward()
    except RuntimeError as error:
        return str(error)
    return "nothing was noticed"


@pytest.mark.parametrize(("after", "where"), [(0, "tables"), (1, "sums over queries")])
def test_a_dying_process_is_an_error_and_no_hang(tmp_path: Path, after: int, where: str) -> None:
    said, _ = run(dies, 2, tmp_path, after, dying=(1,))
    assert f"all-gather of {where} failed: another process of the group has died" in said
