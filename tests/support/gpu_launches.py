"""Launches of Triton kernels without a GPU: ptxrun runs their compiled PTX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ptxrun
from boltzattn.triton_kernels.launch import launching_by
from boltzattn.triton_kernels.tools.compilation import Launch, compile_for, specialisation


class PtxRun:
    """Launches kernels on CPU tensors by interpreting their sm_80 PTX, and counts their bytes."""

    def __init__(self, **checks: Any) -> None:
        self.checks = {"uninit": "report", **checks}
        self.results: list[tuple[str, ptxrun.Result]] = []

    def __call__(self, *launch: Any) -> None:
        started = Launch(*launch)
        kernel = _loaded(specialisation(started), started)
        result = kernel.launch(started.grid, started.pointers_and_numbers(), **self.checks)
        self.results.append((started.name, result))

    def run(self, function: Callable, *args: Any) -> Any:
        with launching_by(self):
            return function(*args)

    def bytes_moved(self, without: tuple[str, ...] = ()) -> int:
        """Bytes of global memory of all launches, except those of some kernels; needs profile=True.

        In sectors of 32 bytes, which is what memory moves: lanes of a warp that read the same
        numbers share them, and a single number costs a whole sector.
        """
        return sum(
            32 * sum(result.sectors.values())
            for name, result in self.results
            if name not in without
        )


_kernels: dict[str, Any] = {}


def _loaded(key: str, launch: Launch) -> Any:
    if key not in _kernels:
        _kernels[key] = ptxrun.from_triton(compile_for(launch, "sm_80"))
    return _kernels[key]
