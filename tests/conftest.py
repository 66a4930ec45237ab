"""Settings that hold for every test."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis
import pytest
import torch

# Reproducible everywhere: examples follow from the test, not from a clock or a local database.
hypothesis.settings.register_profile(
    "boltzattn", derandomize=True, deadline=None, database=None, print_blob=True
)
hypothesis.settings.load_profile("boltzattn")


@pytest.fixture(autouse=True)
def _same_start() -> Iterator[None]:
    """Every test starts from the same random numbers and leaves global torch state as it was."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)
    torch._dynamo.reset()
