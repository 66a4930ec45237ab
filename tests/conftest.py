"""Settings that hold for every test."""

from __future__ import annotations

import os
from collections.abc import Iterator

import hypothesis
import pytest
import torch

import setup

# Which method a call takes must not depend on what `boltzattn tune` has found on this machine.
os.environ["BOLTZATTN_COSTS"] = ""

_NO_NVCC = pytest.StashKey[str]()

# Reproducible everywhere: examples follow from the test, not from a clock or a local database.
hypothesis.settings.register_profile(
    "boltzattn", derandomize=True, deadline=None, database=None, print_blob=True
)
hypothesis.settings.load_profile("boltzattn")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of CUDA kernels need nvcc. Without it they are left out, and the summary says so."""
    toolkit, reason = setup.cuda_toolkit()
    needing = [item for item in items if item.get_closest_marker("nvcc")]
    if toolkit is not None or not needing:
        return
    items[:] = [item for item in items if item not in needing]
    config.hook.pytest_deselected(items=needing)
    config.stash[_NO_NVCC] = f"{len(needing)} tests of CUDA kernels were NOT RUN: {reason}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    # Workers of xdist collect for themselves; who prints asks again.
    message = terminalreporter.config.stash.get(_NO_NVCC, None)
    if message is None and setup.cuda_toolkit()[0] is None:
        message = f"tests of CUDA kernels were NOT RUN: {setup.cuda_toolkit()[1]}"
    if message:
        terminalreporter.write_line(message, yellow=True)


@pytest.fixture(autouse=True)
def _same_start() -> Iterator[None]:
    """Every test starts from the same random numbers and leaves global torch state as it was."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)
    torch._dynamo.reset()
