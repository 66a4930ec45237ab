"""Building and installing: with and without torch, with and without a compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
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
        leave_out = shutil.ignore_patterns("*.so", "*.egg-info", "__pycache__")
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
    assert "NO C++ EXTENSION" in printed


def test_wheel_without_a_compiler_says_so(checkout: Path) -> None:
    wheel, printed = build(checkout, "wheel", CXX="no-such-compiler", CC="no-such-compiler")
    assert {"boltzattn/py.typed", "boltzattn/nn/attention.py"} <= names_in(wheel)
    assert not any(name.endswith(".so") for name in names_in(wheel))
    assert "FAILED TO BUILD" in printed


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
