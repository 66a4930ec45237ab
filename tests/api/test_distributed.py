"""Context parallelism on gloo: processes that this file starts agree with one process."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
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

# name: how the whole is drawn, and the exchange.
CASES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp64, masked, with lse": {"dtype": torch.float64, "masked": True, "with_lse": True},
    "bf16": {"dtype": torch.bfloat16},
    "cold": {"keys": "needle", "scale": 600.0},
    "equal keys": {"keys": "equal"},
    "negative scale": {"scale": -3.0},
    "all masked": {"masked": "all"},
    "one process has it all": {"uneven": True, "with_lse": True},
    "NaN goes the long way": {"nan": True},
    "rank 3": {"rank": 3, "exchange": "gather", "masked": True, "uneven": True},
    "rank 2, by moments": {"rank": 2, "masked": True, "with_lse": True},
    "rank 2, fp64": {"rank": 2, "dtype": torch.float64, "with_lse": True, "scale": -2.0},
    "rank 2, bf16, uneven": {"rank": 2, "dtype": torch.bfloat16, "uneven": True},
    "rank 2, all masked": {"rank": 2, "masked": "all"},
    "rank 2, equal keys": {"rank": 2, "keys": "equal"},
    "rank 2, NaN": {"rank": 2, "nan": True},
    "rank 3, by moments": {"rank": 3, "masked": True, "uneven": True},
    "plain torch": {"backend": "reference", "masked": True, "with_lse": True},
    "plain torch, fp64, cold": {
        "backend": "reference",
        "dtype": torch.float64,
        "keys": "needle",
        "scale": 600.0,
        "with_lse": True,
    },
    "plain torch, bf16, uneven": {
        "backend": "reference",
        "dtype": torch.bfloat16,
        "uneven": True,
        "scale": -3.0,
    },
    "plain torch, equal keys": {"backend": "reference", "keys": "equal"},
    "plain torch, all masked": {"backend": "reference", "masked": "all"},
    "plain torch, NaN": {"backend": "reference", "nan": True},
}
METHOD = {
    name: "direct"
    for name in ("rank 3", "NaN goes the long way", "plain torch, NaN", "rank 2, NaN")
}


def draw(
    rank: int = 1,
    dtype: torch.dtype = torch.float32,
    masked: bool | str = False,
    keys: str = "normal",
    nan: bool = False,
    scale: float | None = None,
    with_lse: bool = False,
    **_: Any,
) -> tuple[list[Tensor | None], dict[str, Any]]:
    """(query, key, value, grad_out, grad_lse) of the whole sequence, and what goes with them."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)

    lead, n_q, n_k, dv = (2, 2), 300, 330, 5
    query, key, value = normal(*lead, n_q, rank), normal(*lead, n_k, rank), normal(*lead, n_k, dv)
    if keys == "equal":
        key = torch.full_like(key, 0.75)
    if keys == "needle":
        key = key * 0.01
        key[..., 100, :] = 2.0
    if nan:
        value[0, 1, 17] = math.nan
    call: dict[str, Any] = {"scale": scale}
    if masked:
        mask = torch.rand(lead[0], n_k, generator=generator) < 0.3
        call["key_padding_mask"] = mask | (masked == "all")
    grad_lse = normal(*lead, n_q).to(torch.float64 if dtype == torch.float64 else torch.float32)
    return [query, key, value, normal(*lead, n_q, dv), grad_lse if with_lse else None], call


def shard(n: int, rank: int, world: int, uneven: bool) -> slice:
    """The rows of a process; uneven: the last process has all of them."""
    sizes = (
        [0] * (world - 1) + [n] if uneven else [n // world + (r < n % world) for r in range(world)]
    )
    return list(map(slice, *zip(*pairwise(accumulate(sizes, initial=0)), strict=True)))[rank]


def one_case(rank: int, world: int, case: dict[str, Any]) -> Result:
    """What one process gets."""
    tensors, call = draw(**case)
    uneven = case.get("uneven", False)
    rows_q, rows_k = (shard(x.shape[-2], rank, world, uneven) for x in tensors[:2])
    rows = rows_q, rows_k, rows_k, rows_q
    local = [x[..., r, :] for x, r in zip(tensors[:4], rows, strict=True)]
    local = [x.detach().requires_grad_(i < 3) for i, x in enumerate(local)]
    if "key_padding_mask" in call:
        call["key_padding_mask"] = call["key_padding_mask"][:, rows_k]
    out, lse = distributed.attention(
        *local[:3],
        **call,
        exchange=case.get("exchange", "moments"),
        backend=case.get("backend", "auto"),
        return_lse=True,
    )
    grads = [local[3]]
    if tensors[4] is not None:
        grads.append(tensors[4][..., rows_q])
    gradients = torch.autograd.grad((out, lse)[: len(grads)], local[:3], grads)
    return Result(out.detach(), lse.detach(), *gradients)


class Volume:
    """Counts what all_reduce and all_gather are given, in bytes."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.all_reduce, self.all_gather = dist.all_reduce, dist.all_gather

    def __enter__(self) -> Volume:
        def all_reduce(x: Tensor, **options: Any) -> Any:
            self.calls.append(x.numel() * x.itemsize)
            return self.all_reduce(x, **options)

        def all_gather(parts: list[Tensor], x: Tensor, **options: Any) -> Any:
            self.calls.append(x.numel() * x.itemsize)
            return self.all_gather(parts, x, **options)

        dist.all_reduce, dist.all_gather = all_reduce, all_gather
        return self

    def __exit__(self, *_: object) -> None:
        dist.all_reduce, dist.all_gather = self.all_reduce, self.all_gather


def volume(n: int, exchange: str, backend: str = "auto") -> tuple[list[int], list[int], str]:
    """Bytes of forward, of backward, and what `explain` says; same range for every n."""
    query, key = (torch.linspace(-3.0, 3.0, n).view(1, n, 1).requires_grad_() for _ in range(2))
    value = (torch.sin(7.0 * key.detach()) + torch.zeros(8)).requires_grad_()
    with Volume() as forward:
        out = distributed.attention(query, key, value, exchange=exchange, backend=backend)
    with Volume() as backward:
        out.sum().backward()
    words = distributed.explain(query, key, value, exchange=exchange, backend=backend)
    return forward.calls, backward.calls, words


WRAPPED = (("DDP", 1), ("DDP", 2), ("FSDP2", 1))  # and the rank of the QK product


def modules(rank: int, world: int) -> dict[str, Tensor]:
    """A layer with process_group under DDP or FSDP2: local output, gradients of all processes."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, init_device_mesh

    found = {}
    for wrapper, qk_rank in WRAPPED:
        torch.manual_seed(0)
        layer = boltzattn.nn.LowRankAttention(
            8,
            2,
            rank=qk_rank,
            batch_first=True,
            dtype=torch.float64,
            process_group=dist.group.WORLD,
            exchange="moments" if qk_rank == 1 else "gather",
        )
        parallel: Any = layer
        if wrapper == "DDP":
            parallel = torch.nn.parallel.DistributedDataParallel(layer)
        else:
            fully_shard(layer, mesh=init_device_mesh("cpu", (world,)))
        x = torch.randn(2, 60, 8, dtype=torch.float64)[:, shard(60, rank, world, False)]
        out, _ = parallel(x, x, x)
        out.square().sum().backward()
        found[f"out {wrapper} {qk_rank}"] = out.detach()
        for name, p in layer.named_parameters():
            grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            found[f"{name} {wrapper} {qk_rank}"] = grad
        with pytest.raises(ValueError, match="attn_mask must not be used together"):
            layer(x, x, x, attn_mask=torch.zeros(x.shape[1], x.shape[1]))
    return found


def sharded_tensors(rank: int, world: int) -> list[Tensor]:
    """DTensors in and out, in shards of different lengths: all of the output and gradients."""
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    tensors, _ = odd_lengths()
    parts = [distribute_tensor(x, mesh, [Shard(2)]).requires_grad_() for x in tensors]
    assert all(x.shape[2] % world for x in parts)
    assert distributed.explain(*parts).startswith(f"exchange moments, {world} processes, 4 heads")
    out = distributed.attention(*parts)
    out.to_local().square().sum().backward()
    return [out.detach().full_tensor(), *(x.grad.full_tensor() for x in parts)]


def odd_lengths() -> tuple[list[Tensor], dict[str, Any]]:
    """Query, key and value that neither two nor three processes share evenly."""
    tensors, call = draw(dtype=torch.float64)
    query, key, value = tensors[:3]
    return [query[..., :-1, :], key[..., :-1, :], value[..., :-1, :]], call


def errors(rank: int, world: int) -> list[str]:
    """What is said to wrong calls; every process must hear it."""
    x = torch.randn(2, 10, 1)
    said = []
    for call in (
        lambda: distributed.attention(x.expand(2, 10, 5), x.expand(2, 10, 5), x),
        lambda: distributed.attention(x, x, x, exchange="smoke"),
        lambda: distributed.attention(x, x, x, backend="triton"),
        lambda: boltzattn.explain(x, x, x, dropout_p=0.5, group=dist.group.WORLD),
        lambda: boltzattn.nn.LowRankAttention(
            8, 2, rank=5, process_group=dist.group.WORLD, batch_first=True
        )(*[torch.randn(1, 5, 8)] * 3),
    ):
        with pytest.raises(ValueError, match="must") as caught:
            call()
        said.append(str(caught.value))
    return said


def odd_one_out(rank: int, world: int, attend: Callable[..., Any]) -> dict[str, Callable[[], Any]]:
    """Calls in which the last process does something else, by what the error must say."""
    odd = rank == world - 1
    heads = 3 if odd else 2
    dtype = torch.float64 if odd else torch.float32
    x = torch.randn(2, 10, 1)
    mask = torch.zeros(10, dtype=torch.bool)

    def with_method() -> Any:
        with boltzattn.use_method("direct" if odd else "auto"):
            return attend(x, x, x)

    return {
        "query.shape[-3] differs between ranks: 2 and 3; shards of query must have the same shape "
        "on all ranks but for dimension -2": lambda: attend(*[torch.randn(heads, 10, 1)] * 3),
        "query.shape[-4] differs between ranks: 2 and 3": lambda: attend(
            *[torch.randn(heads, 100, 10, 1)] * 3
        ),
        "key.shape[-3] differs between ranks: 1 and 2": lambda: attend(x, x[: 2 - odd], x),
        "value.ndim differs between ranks: 2 and 3": lambda: attend(x, x, x[0] if odd else x),
        "value.shape[-1] differs between ranks: 1 and 2": lambda: attend(
            x, x, torch.randn(2, 10, 1 + odd)
        ),
        "query.shape[-1] differs between ranks: 1 and 3": lambda: attend(
            *[torch.randn(2, 10, 1 + 2 * odd)] * 3
        ),
        "dtype differs between ranks: float64 and float32; convert query, key and value to the "
        "same dtype on all ranks": lambda: attend(*[x.to(dtype)] * 3),
        "scale differs between ranks: 1 and 1.5; pass the same scale": lambda: attend(
            x, x, x, scale=1.5 if odd else None
        ),
        "enable_gqa differs between ranks: False and True": lambda: attend(x, x, x, enable_gqa=odd),
        "key_padding_mask differs between ranks: None and bool; pass a mask": lambda: attend(
            x, x, x, key_padding_mask=mask if odd else None
        ),
        "key_padding_mask differs between ranks: bool and float32": lambda: attend(
            x, x, x, key_padding_mask=torch.zeros(10) if odd else mask
        ),
        "method differs between ranks: auto and direct; enter the same use_method": with_method,
        "backend differs between ranks: cpu and reference; pass the same backend": lambda: attend(
            x, x, x, backend="reference" if odd else "cpu"
        ),
        "exchange differs between ranks: moments and gather; pass the same": lambda: attend(
            x, x, x, exchange="gather" if odd else "moments"
        ),
        f"rank {world - 1} of the group cannot serve the call: query must be float64, float32, "
        "bfloat16 or float16, got torch.int64": lambda: attend(*[x.long() if odd else x] * 3),
        f"rank {world - 1} of the group cannot serve the call: query must be a tensor": (
            lambda: attend(None if odd else x, x, x)
        ),
        f"rank {world - 1} of the group cannot serve the call: exchange must be 'moments' or "
        "'gather', got 'smoke'": lambda: attend(x, x, x, exchange="smoke" if odd else "moments"),
    }


def disagreements(rank: int, world: int) -> dict[tuple[str, str], str]:
    """What every process hears, by what it should hear."""
    heard = {}
    for function in (distributed.attention, distributed.explain):
        for expected, call in odd_one_out(rank, world, function).items():
            with pytest.raises(ValueError, match="rank") as caught:
                call()
            heard[function.__name__, expected] = str(caught.value)
    # The group is as good as before.
    x = torch.randn(2, 10, 1)
    assert distributed.attention(x, x, x).isfinite().all()
    return heard


def many_heads_and_masks(rank: int, world: int) -> list[Any]:
    """More heads than fit into the first message; masks broadcast in different ways."""
    whole = torch.randn(3, 70, 20 * world, 1, generator=torch.Generator().manual_seed(3))
    x = whole[:, :, 20 * rank : 20 * rank + 20]
    mask = torch.zeros(3, 20, dtype=torch.bool)
    mask = mask if rank else mask[0]
    with Volume() as sent:
        out = distributed.attention(x, x, x, scale=2.0)
    gathered = distributed.attention(
        x, x, x, scale=2.0, key_padding_mask=mask, exchange="gather", enable_gqa=True
    )
    return [out, gathered, len(sent.calls)]


def other_default_device(rank: int, world: int) -> list[Tensor]:
    """Calls on CPU tensors while torch makes new tensors elsewhere."""
    x = torch.randn(2, 40, 1, requires_grad=True)
    torch.set_default_device("meta")
    try:
        found = []
        for options in ({}, {"backend": "reference"}, {"exchange": "gather"}):
            out = distributed.attention(x, x, x, **options)
            found += [out.detach(), *torch.autograd.grad(out.sum(), x)]
        return found
    finally:
        torch.set_default_device(None)


def falls_back(rank: int, world: int, backend: str) -> str:
    """The backend that a call with NaN ends in."""
    x = torch.randn(2, 10, 1)
    x[0, 3] = math.nan
    asked = []
    attend = boltzattn.functional.attention

    def spy(*arguments: Any, **options: Any) -> Any:
        asked.append(options["backend"])
        return attend(*arguments, **options)

    boltzattn.functional.attention = spy
    try:
        distributed.attention(x, x, x, backend=backend)
    finally:
        boltzattn.functional.attention = attend
    return asked[0]


def everything(rank: int, world: int) -> dict[str, Any]:
    found: dict[str, Any] = {name: one_case(rank, world, case) for name, case in CASES.items()}
    with Volume() as long_way:
        one_case(rank, world, CASES["NaN goes the long way"])
    found["long way"] = long_way.calls
    found["modules"] = modules(rank, world)
    found["errors"] = errors(rank, world)
    found["disagreements"] = disagreements(rank, world)
    found["many heads"] = many_heads_and_masks(rank, world)
    found["other device"] = other_default_device(rank, world)
    found["fallback"] = [falls_back(rank, world, backend) for backend in ("cpu", "reference")]
    if world == 2:
        found["volumes"] = {
            "short": volume(2**14, "moments"),
            "long": volume(2**20, "moments"),
            "short, plain torch": volume(2**12, "moments", "reference"),
            "long, plain torch": volume(2**15, "moments", "reference"),
            "short, gathered": volume(2**12, "gather"),
            "long, gathered": volume(2**13, "gather"),
        }
        x = torch.linspace(-3.0, 3.0, 2**14).view(1, -1, 1)
        found["explained"] = (
            boltzattn.explain(x, x, x, group=dist.group.WORLD),
            distributed.explain(x, x, x),
            distributed.explain(x, x, 1e9 * x, scale=1e9),
            boltzattn.explain(*[torch.randn(1, 5, 3)] * 3, group=dist.group.WORLD),
        )
    found["sharded"] = sharded_tensors(rank, world)
    return found


@pytest.fixture(scope="module", params=[2, 3], ids=["2 processes", "3 processes"])
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run(everything, request.param, tmp_path_factory.mktemp("group"))


@pytest.mark.parametrize("name", CASES)
def test_equals_attention_over_the_whole(results: list[dict[str, Any]], name: str) -> None:
    parts = [process[name] for process in results]
    actual = {
        field: torch.cat([getattr(part, field) for part in parts], -1 if field == "lse" else -2)
        for field in Result._fields
    }
    tensors, call = draw(**CASES[name])
    assert_accurate(
        actual,
        oracle(*tensors, **call)._asdict(),
        eagers(*tensors, **call),
        magnitudes=magnitudes(*tensors, **call),
        method=METHOD.get(name, "transform"),
    )


def test_nan_takes_the_fallback(results: list[dict[str, Any]]) -> None:
    """Extents, moments, keys, values; backward: gradients of values and keys."""
    for process in results:
        assert len(process["long way"]) == 6


def test_the_fallback_keeps_the_backend(results: list[dict[str, Any]]) -> None:
    for process in results:
        assert process["fallback"] == ["cpu", "reference"]


def test_the_default_device_plays_no_role(results: list[dict[str, Any]]) -> None:
    for process in results:
        assert all(x.device.type == "cpu" and x.isfinite().all() for x in process["other device"])


def test_disagreement_is_the_same_error_on_all_ranks(results: list[dict[str, Any]]) -> None:
    for process in results:
        assert process["disagreements"] == results[0]["disagreements"]
        for (_, expected), heard in process["disagreements"].items():
            assert heard.startswith(expected)


def test_many_heads_take_a_second_message(results: list[dict[str, Any]]) -> None:
    world = len(results)
    whole = torch.randn(3, 70, 20 * world, 1, generator=torch.Generator().manual_seed(3))
    truth = boltzattn.attention(whole, whole, whole, scale=2.0, method="direct")
    for rank, process in enumerate(results):
        out, gathered, messages = process["many heads"]
        assert messages == 3
        wanted = truth[:, :, 20 * rank : 20 * rank + 20]
        # The certificate of the transform.
        torch.testing.assert_close(out, wanted, rtol=0.0, atol=3e-5)
        torch.testing.assert_close(gathered, wanted, rtol=0.0, atol=3e-5)


def test_module_under_ddp_and_fsdp(results: list[dict[str, Any]]) -> None:
    world = len(results)
    for wrapper, qk_rank in WRAPPED:
        torch.manual_seed(0)
        layer = boltzattn.nn.LowRankAttention(
            8, 2, rank=qk_rank, batch_first=True, dtype=torch.float64
        )
        x = torch.randn(2, 60, 8, dtype=torch.float64)
        out, _ = layer(x, x, x)
        # Both take the mean over the processes.
        (out.square().sum() / world).backward()
        together = torch.cat(
            [process["modules"][f"out {wrapper} {qk_rank}"] for process in results], 1
        )
        # fp64 in another order, and the certificate of the transform.
        torch.testing.assert_close(together, out.detach(), rtol=1e-10, atol=1e-10)
        for name, p in layer.named_parameters():
            for process in results:
                actual = process["modules"][f"{name} {wrapper} {qk_rank}"]
                torch.testing.assert_close(actual, p.grad, rtol=1e-9, atol=1e-9)


def test_wrong_calls_are_refused_by_all(results: list[dict[str, Any]]) -> None:
    for process in results:
        rank, exchange, backend, dropout, module = process["errors"]
        assert "exchange='gather' takes any rank" in rank
        assert "exchange must be 'moments' or 'gather', got 'smoke'" in exchange
        assert "backend must be one of 'cpu', 'reference' for exchange='moments'" in backend
        assert "dropout_p must not be given here: distributed.attention" in dropout
        assert module == rank


def test_volume_does_not_depend_on_the_length(results: list[dict[str, Any]]) -> None:
    for process in results:
        if "volumes" not in process:
            continue
        volumes = process["volumes"]
        for kind in ("", ", plain torch"):
            forward, backward, words = volumes["short" + kind]
            assert volumes["long" + kind] == (forward, backward, words)
            assert len(forward) == 2  # extents, moments
            assert len(backward) == 1
            assert f"extents {forward[0]} bytes, of moments {forward[1]} bytes" in words
            assert f"queries {backward[0]} bytes" in words
            assert sum(forward) < 100_000
        # The counter sees what grows.
        forward, backward, words = volumes["short, gathered"]
        assert (
            f"lengths {forward[0]} bytes, all-gather of keys {forward[1]} bytes, of values" in words
        )
        assert f"of values {forward[2]} bytes" in words
        assert sorted(map(int, re.findall(r"(\d+) bytes", words.partition("backward")[2]))) == (
            sorted(backward)
        )
        assert sum(volumes["long, gathered"][0]) > 1.9 * sum(forward)


def test_explain_tells_what_is_sent(results: list[dict[str, Any]]) -> None:
    for process in results:
        if "explained" not in process:
            continue
        whole, moments, too_large, rank_3 = process["explained"]
        assert whole == moments
        assert moments.startswith("exchange moments, 2 processes, 1 head, backend cpu")
        assert too_large.startswith("exchange gather (the transform does not serve these logits)")
        assert rank_3.startswith("exchange moments, 2 processes, 1 head, backend reference")


def test_sharded_tensors(results: list[dict[str, Any]]) -> None:
    tensors, _ = odd_lengths()
    leaves = [x.requires_grad_() for x in tensors]
    out = boltzattn.attention(*leaves)
    out.square().sum().backward()
    for process in results:
        # Two certified results.
        assert torch.equal(process["sharded"][0], results[0]["sharded"][0])
        for actual, wanted in zip(
            process["sharded"], [out.detach(), *(x.grad for x in leaves)], strict=True
        ):
            torch.testing.assert_close(actual, wanted, rtol=0.0, atol=1e-8)


@pytest.mark.full
@pytest.mark.parametrize("options", [[], ["--causal"]], ids=["", "causal"])
def test_torchrun_example(tmp_path: Path, options: list[str]) -> None:
    """Two processes learn the largest of all tokens, or of those so far."""
    example = Path(__file__).parents[2] / "examples" / "context_parallel.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--standalone", str(example), "--tokens", "4000", "--steps", "31", *options]
    said = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=True
    ).stdout
    assert said.startswith("exchange moments")
    assert "2 processes" in said.splitlines()[0]
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", said)]
    assert len(losses) == 7
    assert losses[-1] < 0.3 * losses[0]


def dies(rank: int, world: int, after: int) -> str:
    """Process 1 ends without a word before its collective number `after`."""
    calls = 0
    reduce = dist.all_reduce

    def all_reduce(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if rank == 1 and calls > after:
            os._exit(3)
        return reduce(*arguments, **options)

    dist.all_reduce = all_reduce
    query = torch.randn(1, 100, 1, requires_grad=True)
    try:
        distributed.attention(query, query, query).sum().backward()
    except RuntimeError as error:
        return str(error)
    return "nothing was noticed"


@pytest.mark.parametrize(
    ("after", "where"),
    [(1, "moments"), pytest.param(2, "sums over queries", marks=pytest.mark.full)],
)
def test_a_dying_process_is_an_error_and_no_hang(tmp_path: Path, after: int, where: str) -> None:
    said, _ = run(dies, 2, tmp_path, after, dying=(1,))
    assert f"all-reduce of {where} failed: another process of the group has died" in said


def test_needs_a_group() -> None:
    x = torch.randn(1, 10, 1)
    with pytest.raises(ValueError, match="init_process_group first"):
        distributed.attention(x, x, x)
