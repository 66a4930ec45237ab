"""Memory grows with n, not with n squared: peak of a process of its own, above its inputs."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from servers import Server, facts, servers

N = 16_384
SCORES = N * N * 4  # bytes of one n x n matrix in fp32: 1 GiB
MEGABYTE = 1 << 20

# {body} computes with query, key and value; the number printed is what it needed in bytes.
PROGRAM = """
import resource, sys
import torch, boltzattn

def peak():
    # VmHWM is of this program alone; ru_maxrss would include what the parent was before exec.
    try:
        status = open("/proc/self/status").read()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    except FileNotFoundError:
        bytes_per_unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * bytes_per_unit

def compute(n):
    torch.manual_seed(0)
    query, key = (torch.randn(n, {rank}, requires_grad=True) for _ in range(2))
    value = torch.randn(n, {dv}, requires_grad=True)
    ask = dict(method={method!r}, backend={backend!r})
    {body}

torch.set_num_threads(1)
compute(64)
before = peak()
compute({n})
print(peak() - before)
"""

BACKWARD = "boltzattn.attention(query, key, value, **ask).sum().backward()"
DOUBLE_BACKWARD = """
    out = boltzattn.attention(query, key, value, **ask)
    grads = torch.autograd.grad(out.square().sum(), (query, key, value), create_graph=True)
    sum(g.square().sum() for g in grads).backward()
"""
EAGER = "((query @ key.T).softmax(-1) @ value).sum().backward()"


def peak_of(body: str, server: Server, rank: int, dv: int, n: int = N) -> int:
    """Bytes that the body needs at its peak, beyond an idle process."""
    program = PROGRAM.format(
        body=body.strip(), rank=rank, dv=dv, n=n, method=server.method, backend=server.backend
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_the_measurement_sees_a_matrix_of_scores() -> None:
    """Eager attention at a smaller n: what the other tests must not show."""
    n = 4096
    assert peak_of(EAGER, Server("auto", "auto"), rank=1, dv=1, n=n) > n * n * 4


def _first_now_others_in_full(candidates: list[Server]) -> list[Any]:
    """The pair that `auto` would ask first; the others cost minutes and share most of the code."""
    return [
        pytest.param(server, id=str(server), marks=[pytest.mark.full] if i else [])
        for i, server in enumerate(candidates)
    ]


@pytest.mark.parametrize(
    "server", _first_now_others_in_full(servers(facts(n_q=N, n_k=N, rank=1, dv=4)))
)
def test_double_backward_holds_no_scores(server: Server) -> None:
    """A quarter of one score matrix, of which plain double backward holds about ten.

    Blocks of scores, a dozen at once, are 50 MB of it, and what the allocator keeps as much again.
    """
    assert peak_of(DOUBLE_BACKWARD, server, rank=1, dv=4) < SCORES // 4


@pytest.mark.parametrize(
    "server",
    [s for s in servers(facts(n_q=N, n_k=N, rank=8, dv=64)) if s.backend != "reference"],
    ids=str,
)
def test_forward_and_backward_stay_small(server: Server) -> None:
    """Inputs, output and gradients are 20 MB of this; a kernel's own needs must be small."""
    assert peak_of(BACKWARD, server, rank=8, dv=64) < 64 * MEGABYTE


@pytest.mark.full
@pytest.mark.parametrize("server", servers(facts(n_q=N, n_k=N, rank=8, dv=4)), ids=str)
def test_forward_and_backward_hold_no_scores(server: Server) -> None:
    assert peak_of(BACKWARD, server, rank=8, dv=4) < SCORES


# Prints by how many bytes the resident memory has grown over {calls} calls, after a tenth as many.
MANY_CALLS = """
import random
import torch, boltzattn

def resident():
    return int(open("/proc/self/status").read().split("VmRSS:")[1].split()[0]) * 1024

def call():
    n_q, n_k, dv = (draw.randint(1, 40) for _ in range(3))
    rank = draw.choice([1, 1, 2])
    query, key = (torch.rand(n, rank, requires_grad=True) for n in (n_q, n_k))
    value = torch.rand(n_k, dv, requires_grad=True)
    options = dict(is_causal=draw.random() < 0.3)
    if rank == 1:
        options["method"] = draw.choice(["direct", "transform"])
    if draw.random() < 0.2:
        options["key_padding_mask"] = torch.rand(n_k) < 0.5
    boltzattn.attention(query, key, value, **options).sum().backward()

torch.set_num_threads({threads})
draw = random.Random(0)
for _ in range({calls} // 10):
    call()
before = resident()
for _ in range({calls}):
    call()
print(resident() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("calls", [3_000, pytest.param(200_000, marks=pytest.mark.full)])
def test_many_small_calls_leave_memory_flat(calls: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", MANY_CALLS.format(calls=calls, threads=2)],
        capture_output=True,
        text=True,
        timeout=3600,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 5 * MEGABYTE
