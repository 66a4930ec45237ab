"""Fixtures of ptxrun's own tests."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).parent
NEED_NVCC = {"test_bugs.py", "test_nvcc.py", "test_nvcc_attention.py", "test_nvcc_libs.py"}


def pytest_collection_modifyitems(items):
    """Tests that compile CUDA C++ need nvcc, which is not on PyPI: say so where it is missing."""
    if os.environ.get("CUDA_HOME") or shutil.which("nvcc"):
        return
    for item in items:
        if item.path.parent == HERE and item.path.name in NEED_NVCC:
            item.add_marker(pytest.mark.skip(reason="needs nvcc: set CUDA_HOME or put it on PATH"))


@pytest.fixture
def rng():
    return np.random.default_rng(1234)
