"""Small helpers to get PTX from nvcc and from Triton."""

import os
import shutil
import subprocess
import tempfile

from .machine import Module


def nvcc_name():
    """The nvcc of CUDA_HOME if that is set, or else the one on PATH."""
    home = os.environ.get("CUDA_HOME")
    return os.path.join(home, "bin", "nvcc") if home else "nvcc"


def nvcc_missing():
    """Why there is no nvcc, or None."""
    name = nvcc_name()
    if shutil.which(name):
        return None
    return f"{name} is not there; set CUDA_HOME to a toolkit or put nvcc on PATH"


def nvcc(source, arch="sm_80", flags=(), path=None):
    """Compile CUDA C++ text to PTX with nvcc and load it."""
    exe = path or nvcc_name()
    with tempfile.TemporaryDirectory() as d:
        cu, out = os.path.join(d, "k.cu"), os.path.join(d, "k.ptx")
        with open(cu, "w") as f:
            f.write(source)
        r = subprocess.run(
            [exe, "-ptx", f"-arch={arch}", *flags, cu, "-o", out], capture_output=True, text=True
        )
        if r.returncode:
            raise RuntimeError(f"nvcc failed:\n{r.stdout}{r.stderr}")
        with open(out) as f:
            return Module(f.read())


class TritonKernel:
    """A compiled Triton kernel; launch() fills block size, shared size and scratch pointers."""

    def __init__(self, compiled):
        md = compiled.metadata
        self.module = Module(compiled.asm["ptx"])
        self.kernel = self.module.kernel(md.name)
        self.num_warps, self.shared = md.num_warps, md.shared

    def launch(self, grid, args, **kw):
        params = self.kernel.prog.params
        args = list(args) + [None] * (
            len(params) - len(args) if 0 < len(params) - len(args) <= 2 else 0
        )
        kw.setdefault("smem", self.shared)
        return self.kernel.launch(grid=grid, block=(32 * self.num_warps, 1, 1), args=args, **kw)


def from_triton(compiled):
    """triton.compile(...) result -> TritonKernel."""
    return TritonKernel(compiled)
