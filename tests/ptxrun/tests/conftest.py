"""Fixtures of ptxrun's own tests."""

from pathlib import Path

import numpy as np
import pytest

from ptxrun.helpers import nvcc_missing

HERE = Path(__file__).parent
NEED_NVCC = {"test_bugs.py", "test_nvcc.py", "test_nvcc_attention.py", "test_nvcc_libs.py"}


def pytest_collection_modifyitems(items):
    """All tests of these files compile CUDA C++. Where there is no nvcc, they are skipped."""
    missing = nvcc_missing()
    if missing is None:
        return
    for item in items:
        if item.path.parent == HERE and item.path.name in NEED_NVCC:
            item.add_marker(pytest.mark.skip(reason=f"compiles CUDA C++: {missing}"))


@pytest.fixture
def rng():
    return np.random.default_rng(1234)
