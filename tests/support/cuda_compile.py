"""Compiles csrc/cuda as setup.py does, for tests: objects, PTX and what ptxas says of each kernel.

Results are kept in build/ under a hash of the sources, so an unchanged kernel is compiled once.
"""

from __future__ import annotations

import fcntl
import hashlib
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import setup as build

ROOT = Path(build.__file__).parent
CSRC = ROOT / "csrc"


@dataclass(frozen=True)
class Resources:
    """What a kernel takes of a multiprocessor."""

    registers: int
    stack: int  # bytes; spilled registers live there
    shared: int  # bytes


@dataclass(frozen=True)
class Compiled:
    """One .cu file for some architectures."""

    object: Path
    ptx: Path
    resources: dict[tuple[str, str], Resources]  # by mangled name and architecture


def toolkit() -> Path | None:
    return build.cuda_toolkit()[0]


def _includes(path: Path, seen: set[Path]) -> set[Path]:
    """The file and all of ours that it includes."""
    if path not in seen:
        seen.add(path)
        for name in re.findall(r'#include "(.+)"', path.read_text()):
            _includes(CSRC / name, seen)
    return seen


def _hash(source: Path, *parts: str) -> str:
    digest = hashlib.sha256()
    for path in sorted(_includes(source, set())):
        digest.update(path.read_bytes())
    for part in parts:
        digest.update(part.encode())
    return digest.hexdigest()[:16]


def compile_cuda(name: str, architectures: str = "8.0") -> Compiled:
    """csrc/cuda/<name>.cu with every warning an error, and spilled registers too."""
    home = toolkit()
    assert home is not None
    command = [
        *(str(home / "bin/nvcc"), "-std=c++17", "-O3", "-Xcompiler", "-fPIC", "-I", str(CSRC)),
        *(
            "-Werror",
            "all-warnings",
            "-Xptxas",
            "-v,-warn-spills",
            *build.gencode_flags(architectures),
        ),
        "-lineinfo",  # says where in the sources an instruction comes from, and changes no code
    ]
    version = subprocess.run([command[0], "--version"], capture_output=True, text=True).stdout
    source = CSRC / f"cuda/{name}.cu"
    folder = ROOT / "build/cuda-test" / f"{name}-{_hash(source, version, *command)}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # pytest's workers share the folder
        if not (folder / "log").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            run = subprocess.run(
                [
                    *command,
                    *("--keep", "--keep-dir", str(folder), "-c", str(source)),
                    *("-o", str(folder / f"{name}.o")),
                ],
                capture_output=True,
                text=True,
            )
            assert run.returncode == 0, run.stderr
            for path in folder.iterdir():
                if path.suffix not in (".o", ".ptx"):
                    path.unlink()  # what else nvcc keeps is large
            (folder / "log").write_text(run.stderr)
    ptx = list(folder.glob("*.ptx"))
    assert len(ptx) == 1, ptx
    return Compiled(folder / f"{name}.o", ptx[0], _resources((folder / "log").read_text()))


def _resources(log: str) -> dict[tuple[str, str], Resources]:
    lines = map(str.split, build.kernel_resources(log).splitlines())
    return {
        (name, arch): Resources(int(registers), int(stack), int(shared))
        for name, arch, registers, shared, stack in lines
    }
