"""The CUDA sources compile without a warning or a spilled register, and are built as documented."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from boltzattn.cuda_report import readable
from boltzattn.dispatch.extension import CPU_LIBRARY
from cuda_compile import ROOT, compile_cuda, toolkit
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


def test_a_failing_nvcc_is_reported_with_its_command(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    home = _toolkit(tmp_path / "broken")
    (home / "bin/nvcc").write_text("#!/bin/sh\necho no such architecture >&2\nexit 3\n")
    target = setup.cuda_target(Path(torch.__file__).parent, home)
    target.sources = [ROOT / "csrc/cuda/direct.cu"]
    with pytest.raises(subprocess.CalledProcessError):
        setup.build_target(target, tmp_path / "objects", tmp_path)
    printed = capfd.readouterr().out
    assert f"{home}/bin/nvcc" in printed
    assert "no such architecture" in printed


def test_the_cuda_library_is_loaded_under_a_cuda_torch_only() -> None:
    """A CPU torch never touches it, even if it is there: its place in memory would show it."""
    program = (
        "import boltzattn, torch; boltzattn.attention(*[torch.randn(2, 5, 1)] * 3);"
        "loaded = 'libboltzattn_cuda' in open('/proc/self/maps').read();"
        "missing = boltzattn.BACKENDS['cuda'].unavailable();"
        "assert loaded == (missing is None), missing;"
        "assert torch.version.cuda is not None or 'without CUDA' in missing"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT / "python")


def test_what_the_cpu_library_needs() -> None:
    assert_stable_interface(CPU_LIBRARY)


@pytest.mark.nvcc
def test_the_cuda_library_links(tmp_path: Path) -> None:
    """Its files that know torch, with the kernels that other tests have compiled."""
    home = toolkit()
    assert home is not None
    target = setup.cuda_target(Path(torch.__file__).parent, home)
    target.sources = [file for file in target.sources if file.suffix != ".cu"]
    target.flags += ["-O0", "-Werror"]
    target.link = [*(str(compile_cuda(name).object) for name in SOURCES), *target.link]
    library = setup.build_target(target, tmp_path / "objects", tmp_path)
    assert_stable_interface(library)


def test_a_cpu_torch_gets_no_cuda_kernels_unless_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = _toolkit(tmp_path / "toolkit")
    monkeypatch.setenv("CUDA_HOME", str(home))
    monkeypatch.delenv("BOLTZATTN_CUDA", raising=False)
    found, reason = setup.cuda_wanted("2.13.0+cpu", None)
    assert found is None
    assert "torch 2.13.0+cpu was built without CUDA" in reason
    assert "BOLTZATTN_CUDA=1" in reason
    assert setup.cuda_wanted("2.13.0", "13.0") == (home, "")
    monkeypatch.setenv("BOLTZATTN_CUDA", "1")
    assert setup.cuda_wanted("2.13.0+cpu", None) == (home, "")


def test_only_what_has_changed_is_compiled_again(tmp_path: Path) -> None:
    """A header is known from the compiler's own list, a flag from the description."""
    (tmp_path / "name with space.h").write_text("int one();")
    first, second = tmp_path / "first.cpp", tmp_path / "second.cpp"
    first.write_text('#include "name with space.h"\nint two() { return 2 * one(); }')
    second.write_text("int three() { return 3; }")
    target = setup.Target("lib.so", [first, second], ["-fPIC"], [])

    def compiled() -> set[str]:
        before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("objects/*.o")}
        setup.build_target(target, tmp_path / "objects", tmp_path)
        after = {path: path.stat().st_mtime_ns for path in tmp_path.glob("objects/*.o")}
        return {path.stem for path in after if after[path] != before.get(path)}

    assert compiled() == {"first", "second"}
    assert compiled() == set()
    (tmp_path / "name with space.h").write_text("long one();")
    assert compiled() == {"first"}
    target.flags.append("-O1")
    assert compiled() == {"first", "second"}
