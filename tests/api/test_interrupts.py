"""Calls that end early: Ctrl-C, and no memory left."""

from __future__ import annotations

import subprocess
import sys

import pytest

INTERRUPTED = """
import os, signal, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
import torch, boltzattn

torch.set_num_threads({threads})
n = 150_000
query, key, value = (torch.randn(n, width) for width in (1, 1, 16))
boltzattn.attention(query[:8], key[:8], value[:8])
from boltzattn.dispatch import native
from boltzattn.problem import OutputGradients, Problem, Saved
grad, lse = torch.ones(n, 16), torch.zeros(n, dtype=torch.float64)
problem = Problem(query, key, value, None, None, None, None, 1.0, 0.0, False, False)
sent = []

def interrupt():
    time.sleep(0.5)
    sent.append(time.monotonic())
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt).start()
try:
    {call}
except KeyboardInterrupt:
    print(time.monotonic() - sent[0])
out = boltzattn.attention(query[:800], key[:800], value[:800], method="direct", backend="cpu")
assert out.isfinite().all()
"""
FORWARD = "boltzattn.attention(query, key, value, method='direct', backend='cpu')"
BACKWARD = """native.attention("cpu", "direct").backward(
        OutputGradients(grad, None), Saved(grad, lse), problem
    )"""


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("call", [FORWARD, BACKWARD], ids=["forward", "backward"])
def test_ctrl_c_arrives_within_a_second(call: str, threads: int) -> None:
    """Both calls take a minute; afterwards the package works as before."""
    program = INTERRUPTED.format(call=call, threads=threads)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1.0


# Prints what is kept after a call with huge rows in MB, and what a call raises that has no memory.
HUGE = """
import resource
import torch, boltzattn

def status(name):
    return int(open("/proc/self/status").read().split(name + ":")[1].split()[0]) << 10

def compute(dv):
    query, key, value = (torch.randn(8, width) for width in (1, 1, dv))
    return boltzattn.attention(query, key, value, method="direct", backend="cpu")

torch.set_num_threads({threads})
compute(16)
before = status("VmRSS")
compute(200_000)
print((status("VmRSS") - before) >> 20)
limit = status("VmSize") + (300 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    compute(400_000)
except MemoryError as error:
    print(error)
compute(16)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("threads", [1, 2])
def test_scratch_is_given_back_and_its_lack_is_a_memory_error(threads: int) -> None:
    """Rows of 200,000 columns take more than 200 MB to work in."""
    done = subprocess.run(
        [sys.executable, "-c", HUGE.format(threads=threads)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    kept, message = done.stdout.splitlines()
    assert int(kept) < 64
    assert "cannot allocate" in message
    assert int(message.split("cannot allocate ")[1].split()[0]) > 400_000_000
