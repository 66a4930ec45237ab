"""The CUDA sources compile without a warning or a spilled register, and are built as documented."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from boltzattn.cuda_report import readable
from cuda_compile import ROOT, compile_cuda
from cuda_launch import SOURCES
from libraries import assert_stable_interface

import setup

LARGEST_STATIC_SHARED = 48 * 1024


@pytest.mark.nvcc
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(
    "architectures",
    ["8.0", pytest.param(setup.ARCHITECTURES, marks=pytest.mark.full, id="all architectures")],
)
def test_no_warnings_and_no_spills(source: str, architectures: str) -> None:
    """nvcc runs with -Werror all-warnings, ptxas with -warn-spills; both are errors."""
    resources = compile_cuda(source, architectures).resources
    assert len({arch for _, arch in resources}) == len(architectures.split())
    for kernel, used in resources.items():
        assert used.stack == 0, kernel
        assert used.registers <= 255
        assert used.shared <= LARGEST_STATIC_SHARED


@pytest.mark.nvcc
def test_the_report_has_every_kernel() -> None:
    """Names and shared memory; registers are up to the compiler's release."""
    _, table, _ = (ROOT / "docs/gpu-report-cuda.md").read_text().split("```")
    rows = [re.split(r"\s{2,}", line)[:2] for line in table.splitlines()[2:]]
    compiled = [item for source in SOURCES for item in compile_cuda(source).resources.items()]
    assert dict(rows) == {readable(name): str(used.shared) for (name, _), used in compiled}


def test_architectures() -> None:
    flags = setup.gencode_flags("8.0;9.0a 12.0+PTX")
    assert flags == ["-gencode=arch=compute_80,code=[sm_80,sm_90a,sm_120,compute_80]"]
    assert setup.gencode_flags("9.0") == ["-gencode=arch=compute_80,code=[sm_90]"]
    with pytest.raises(SystemExit, match="TORCH_CUDA_ARCH_LIST"):
        setup.gencode_flags("Ampere")
    with pytest.raises(SystemExit, match=r"8\.0 or later, got '7\.5'"):
        setup.gencode_flags("7.5 8.0")


def _toolkit(path: Path) -> Path:
    for name in ("bin/nvcc", "include/cuda_runtime.h"):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).touch(mode=0o755)
    return path


def test_the_toolkit_is_a_folder_with_compiler_and_headers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An nvcc on PATH may be a wrapper; a folder without headers is no toolkit."""
    whole = _toolkit(tmp_path / "whole")
    (tmp_path / "half/bin").mkdir(parents=True)
    (tmp_path / "half/bin/nvcc").touch(mode=0o755)
    monkeypatch.delenv("BOLTZATTN_CUDA", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "half/bin"))
    monkeypatch.setenv("CUDA_HOME", str(whole))
    assert setup.cuda_toolkit() == (whole, "")
    monkeypatch.setenv("BOLTZATTN_CUDA", "0")
    assert setup.cuda_toolkit() == (None, "BOLTZATTN_CUDA=0")
    monkeypatch.setenv("BOLTZATTN_CUDA", "yes")
    with pytest.raises(SystemExit, match="BOLTZATTN_CUDA must be 0, 1 or unset, got 'yes'"):
        setup.cuda_toolkit()


def test_a_missing_toolkit_is_an_error_only_on_demand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setattr(setup, "TOOLKITS", ())
    monkeypatch.setenv("BOLTZATTN_CUDA", "auto")
    home, reason = setup.cuda_toolkit()
    assert home is None
    assert str(tmp_path) in reason
    assert "CUDA_HOME" in reason
    monkeypatch.setenv("BOLTZATTN_CUDA", "1")
    with pytest.raises(SystemExit, match="BOLTZATTN_CUDA=1, but no CUDA toolkit"):
        setup.cuda_toolkit()


def test_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MAX_JOBS", raising=False)
    assert setup.parallel_compilers() >= 1
    monkeypatch.setenv("MAX_JOBS", "3")
    assert setup.parallel_compilers() == 3


def test_a_failing_nvcc_is_reported_with_its_command(tmp_path: Path) -> None:
    home = _toolkit(tmp_path / "broken")
    (home / "bin/nvcc").write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(subprocess.CalledProcessError, match="exit status 3"):
        setup.compile_cuda(home, ["csrc/cuda/direct.cu"], [], tmp_path / "objects")


def test_the_cuda_library_is_loaded_under_a_cuda_torch_only() -> None:
    """A CPU torch never touches it, even if it is there: its place in memory would show it."""
    program = (
        "import boltzattn, torch; boltzattn.attention(*[torch.randn(2, 5, 1)] * 3);"
        "loaded = '_C_cuda' in open('/proc/self/maps').read();"
        "missing = boltzattn.BACKENDS['cuda'].unavailable();"
        "assert loaded == (missing is None), missing;"
        "assert torch.version.cuda is not None or 'without CUDA' in missing"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT / "python")


@pytest.mark.parametrize("name", ["_C", "_C_cuda"])
def test_what_the_libraries_need(name: str) -> None:
    """As they lie in the checkout; `_C_cuda` is there where a toolkit was found."""
    found = list((ROOT / "python/boltzattn").glob(f"{name}.*.so"))
    if name == "_C":
        assert found
    for library in found:
        assert_stable_interface(library)
