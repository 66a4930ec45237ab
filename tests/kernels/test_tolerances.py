"""One table of tolerances: Python's, and the one the compiled kernels use."""

from __future__ import annotations

import pytest
from boltzattn import _C
from boltzattn.transform import tolerances

COMPILED = _C.tolerances()


@pytest.mark.parametrize(
    "name",
    ["largest_product", "largest_sum", "least_nodes", "most_nodes", "node_step", "levels"],
)
def test_limits_are_equal(name: str) -> None:
    assert getattr(tolerances, name.upper()) == COMPILED[name]


@pytest.mark.parametrize("name", ["tolerance", "precision"])
def test_tables_by_dtype_are_equal(name: str) -> None:
    ours = getattr(tolerances, name.upper())
    assert len(ours) == len(COMPILED[name])
    for dtype, number in ours.items():
        compiled = COMPILED[name][str(dtype).removeprefix("torch.")]
        # Of the levels of precision the first; the others are 1000 times tighter each.
        assert number == (compiled[0] if name == "precision" else compiled)
