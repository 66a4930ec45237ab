"""Building and installing: with and without torch, with and without a compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import torch
from libraries import assert_old_symbols, assert_stable_interface

ROOT = Path(__file__).parents[2]
SOURCES = ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE")
FOLDERS = ("csrc", "python", "triton_kernels")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What a build needs, and nothing that an earlier build has left behind."""
    copy = tmp_path / "checkout"
    copy.mkdir()
    for name in SOURCES:
        shutil.copy(ROOT / name, copy)
    for name in FOLDERS:
        leave_out = shutil.ignore_patterns(
            "*.so", "*.kernels", "*.record", "*.egg-info", "__pycache__"
        )
        shutil.copytree(ROOT / name, copy / name, ignore=leave_out)
    return copy


@pytest.fixture
def no_torch(tmp_path: Path) -> dict[str, str]:
    """An environment in which torch does not import."""
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "torch.py").write_text("raise ImportError('no torch')")
    return {"PYTHONPATH": str(tmp_path / "broken")}


def build(checkout: Path, what: str, **environment: str) -> tuple[Path, str]:
    """(the archive, what was printed) of a build by setuptools, as pip asks for it."""
    program = f"import setuptools.build_meta as b; b.build_{what}('dist')"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=checkout,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr
    (archive,) = (checkout / "dist").iterdir()
    return archive, done.stderr


def names_in(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def test_sdist_without_torch_has_all_sources(checkout: Path, no_torch: dict[str, str]) -> None:
    archive, _ = build(checkout, "sdist", **no_torch)
    with tarfile.open(archive) as files:
        packed = {name.partition("/")[2] for name in files.getnames()}
    for folder in FOLDERS:
        for file in (checkout / folder).rglob("*.*"):
            if file.suffix in (".py", ".h", ".cpp", ".typed"):
                assert str(file.relative_to(checkout)) in packed
    assert {*SOURCES} <= packed


def test_wheel_without_torch_is_pure_and_says_so(checkout: Path, no_torch: dict[str, str]) -> None:
    wheel, printed = build(checkout, "wheel", **no_torch)
    assert wheel.name.endswith("-py3-none-any.whl")
    assert {"boltzattn/py.typed", "boltzattn/nn/attention.py"} <= names_in(wheel)
    assert "NO C++ LIBRARY" in printed


def test_wheel_without_a_compiler_says_so(checkout: Path) -> None:
    wheel, printed = build(checkout, "wheel", CXX="no-such-compiler", CC="no-such-compiler")
    assert {"boltzattn/py.typed", "boltzattn/nn/attention.py"} <= names_in(wheel)
    assert not any(name.endswith(".so") for name in names_in(wheel))
    assert "FAILED TO BUILD" in printed


def test_nothing_strays_into_the_wheel(checkout: Path, no_torch: dict[str, str]) -> None:
    """Every module of the package, and no `triton_kernels`, `tests` or `csrc` beside it."""
    wheel, _ = build(checkout, "wheel", **no_torch)
    names = names_in(wheel)
    (record,) = {name.partition("/")[0] for name in names} - {"boltzattn"}
    assert record.endswith(".dist-info")
    assert zipfile.ZipFile(wheel).read(f"{record}/top_level.txt").split() == [b"boltzattn"]
    expected = {
        f"boltzattn/{prefix}{file.relative_to(checkout / folder).as_posix()}"
        for folder, prefix in (("python/boltzattn", ""), ("triton_kernels", "triton_kernels/"))
        for file in (checkout / folder).rglob("*")
        if file.suffix in (".py", ".typed")
    }
    assert {name for name in names if name.startswith("boltzattn/")} == expected


@pytest.mark.full  # compiles everything
@pytest.mark.nvcc
def test_the_whole_wheel(checkout: Path, tmp_path: Path) -> None:
    """With torch, compiler and toolkit: two libraries, what they need, what they ask of torch."""
    environment = {"BOLTZATTN_CUDA": "1", "TORCH_CUDA_ARCH_LIST": "8.0", "MAX_JOBS": "1"}
    wheel, _ = build(checkout, "wheel", **environment)
    binaries = {name for name in names_in(wheel) if name.endswith((".so", ".kernels"))}
    libraries = {f"boltzattn/{name}" for name in ("libboltzattn.so", "libboltzattn_cuda.so")}
    assert binaries == {*libraries, "boltzattn/libboltzattn_cuda.kernels"}
    assert {f"{name}.record" for name in libraries} <= names_in(wheel)
    assert "-py3-none-linux" in wheel.name
    zipfile.ZipFile(wheel).extractall(tmp_path / "unpacked")
    for library in (tmp_path / "unpacked/boltzattn").glob("*.so"):
        assert_stable_interface(library)


@pytest.mark.skipif(sys.platform != "linux", reason="a rule of Linux")
def test_the_library_loads_on_older_systems() -> None:
    assert_old_symbols(ROOT / "python/boltzattn/libboltzattn.so")


@pytest.mark.full  # pip fetches setuptools
@pytest.mark.parametrize("compiler", [True, False])
@pytest.mark.parametrize("torch_there", [True, False])
def test_an_sdist_installs_into_a_clean_venv(
    checkout: Path, tmp_path: Path, torch_there: bool, compiler: bool
) -> None:
    archive, _ = build(checkout, "sdist")
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv/bin/python"
    (site,) = (tmp_path / "venv/lib").glob("python*/site-packages")
    if torch_there:
        for package in Path(torch.__file__).parents[1].iterdir():  # not fetched again: linked
            if "boltzattn" not in package.name and not (site / package.name).exists():
                (site / package.name).symlink_to(package)
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "CXX", "CC")}
    environment["BOLTZATTN_CUDA"] = "0"
    if not compiler:
        environment.update(CXX="no-such-compiler", CC="no-such-compiler")

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [python, *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=3600,
        )

    done = run("-m", "pip", "install", "-v", "--no-deps", str(archive))
    assert done.returncode == 0, done.stderr
    built = torch_there and compiler
    assert bool([*site.glob("boltzattn/libboltzattn.so")]) == built
    loud = "NO C++ LIBRARY IS BUILT" if not torch_there else "FAILED TO BUILD"
    assert (loud in done.stdout + done.stderr) == (not built)
    done = run("-m", "boltzattn.info")
    if torch_there:
        assert done.returncode == 0, done.stderr
        assert ("instruction sets:" in done.stdout) == built
    else:
        assert "No module named 'torch'" in done.stderr


@pytest.mark.full  # compiles the whole extension, and pip fetches setuptools
def test_plain_pip_install_builds_the_extension(checkout: Path, tmp_path: Path) -> None:
    """Though pip builds in isolation, where there is no torch."""
    target = tmp_path / "installed"
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", str(target), "."]
    done = subprocess.run(pip, cwd=checkout, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    program = (
        "import boltzattn, torch; q = torch.ones(5, 2); print(boltzattn.__file__); "
        "print(boltzattn.explain(q, q, q, backend='cpu').splitlines()[0])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(target)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    file, plan = done.stdout.splitlines()
    assert Path(file).is_relative_to(target)
    assert plan == "method direct, backend cpu"
