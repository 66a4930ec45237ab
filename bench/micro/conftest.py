"""Kernel microbenchmarks: `make micro`; compare saved runs with `pytest-benchmark compare`.

They time the operators, without autograd and validation, at sizes that fit into the caches. They
show the effect of a change to a kernel; `python -m bench` shows what a user sees.
"""

from __future__ import annotations

import boltzattn
import pytest
import torch


@pytest.fixture(autouse=True)
def environment(benchmark) -> None:
    """The same inputs in every run; saves what the times depend on."""
    torch.manual_seed(0)
    benchmark.extra_info["threads"] = torch.get_num_threads()
    benchmark.extra_info["plan"] = boltzattn.explain(*[torch.zeros(2, 1)] * 3).splitlines()[0]
