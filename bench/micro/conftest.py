"""Kernel microbenchmarks: `make micro`; compare saved runs with `pytest-benchmark compare`.

They time the operators, below autograd and validation, on fixed sizes that fit into the caches:
what one kernel change does, not what a user sees (that is `python -m bench`).
"""

from __future__ import annotations

import boltzattn
import pytest
import torch


@pytest.fixture(autouse=True)
def environment(benchmark) -> None:
    """The same numbers in every run, and in the saved file what they depend on."""
    torch.manual_seed(0)
    benchmark.extra_info["threads"] = torch.get_num_threads()
    benchmark.extra_info["plan"] = boltzattn.explain(*[torch.zeros(2, 1)] * 3).splitlines()[0]
