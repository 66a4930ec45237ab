"""Machine, commit and versions: what identifies a measurement."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import boltzattn
import torch
from boltzattn.dispatch.extension import extension

ROOT = Path(__file__).resolve().parent.parent
# Uncommitted changes of these files are part of the commit's name; results and docs are not.
SOURCES = ("python", "csrc", "triton_kernels", "setup.py", "bench/*.py")


@dataclass(frozen=True)
class Environment:
    """Stored in every row. Only rows of equal environments are compared."""

    machine: str
    cpu: str
    cores: int
    default_threads: int  # used by cases with threads=0
    memory_gb: int
    gpu: str
    isa: str  # instruction set of our CPU kernels
    commit: str
    python: str
    torch: str
    boltzattn: str

    def __str__(self) -> str:
        gpu = f", {self.gpu}" if self.gpu else ""
        return (
            f"{self.cpu}, {self.isa}, {self.cores} cores, {self.default_threads} threads, "
            f"{self.memory_gb} GB{gpu}; boltzattn {self.boltzattn} at {self.commit}, "
            f"torch {self.torch}, Python {self.python}"
        )


def detect() -> Environment:
    cpu, cores = _cpu_model(), len(_cores())
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    name = re.sub(r"[^a-z0-9]+", "-", f"{cpu} {cores}c {gpu}".lower()).strip("-")
    return Environment(
        machine=name,
        cpu=cpu,
        cores=cores,
        default_threads=torch.get_num_threads(),
        memory_gb=round(_meminfo("MemTotal") / 2**30),
        gpu=gpu,
        isa="none" if isinstance(compiled := extension(), str) else compiled.isa(),
        commit=_commit(),
        python=platform.python_version(),
        torch=torch.__version__,
        boltzattn=boltzattn.__version__,
    )


def available_memory() -> int:
    """Bytes that can be allocated without swapping."""
    return _meminfo("MemAvailable")


@lru_cache(maxsize=1)
def glibc_mallopt() -> Callable[[int, int], int] | None:
    """glibc's mallopt, which sets what happens to freed memory; None with another allocator."""
    try:
        libc = ctypes.CDLL(None)
    except (OSError, TypeError):  # Windows
        return None
    # Other C libraries may have a mallopt that does nothing.
    return libc.mallopt if hasattr(libc, "gnu_get_libc_version") else None


def _cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _cpu_model() -> str:
    path = Path("/proc/cpuinfo")
    if path.exists():
        facts = dict(re.findall(r"^([\w ]+?)\s*: (.+)$", path.read_text(), re.MULTILINE))
        if "model name" in facts:
            # On virtual machines the name may lack the model number.
            numbers = [f"{x} {facts[x]}" for x in ("cpu family", "model") if x in facts]
            return f"{facts['model name'].strip()} ({', '.join(numbers)})"
    return platform.processor() or platform.machine()


def _meminfo(field: str) -> int:
    path = Path("/proc/meminfo")
    if path.exists():
        match = re.search(rf"^{field}:\s*(\d+) kB", path.read_text(), re.MULTILINE)
        if match:
            return int(match[1]) * 1024
    # On macOS only the total is known; the caller halves it anyway.
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _commit() -> str:
    """Short hash, plus a hash of the uncommitted changes of the sources if there are any."""
    try:
        head = _git("rev-parse", "--short=9", "HEAD").strip()
        changes = _git("diff", "HEAD", "--", *SOURCES)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    if not changes:
        return head
    return f"{head}+{hashlib.sha1(changes.encode()).hexdigest()[:6]}"


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
