"""Builds boltzattn. What it knows: compilers, flags and the ABI; everything else is pyproject.toml.

Where torch is installed two extensions are built against its stable ABI: `_C`, the CPU kernels,
and, where a CUDA toolkit is found, `_C_cuda`. They are two because one linked to CUDA would not
load under a CPU torch. Whether a GPU is present plays no role. Without torch or without a compiler
the Python package is installed alone and says so (pip shows it with -v); it then runs on the
reference backend.

Environment: BOLTZATTN_CUDA=1 makes a missing toolkit or a failed CUDA build an error, =0 skips it;
TORCH_CUDA_ARCH_LIST names the architectures; CUDA_HOME the toolkit; MAX_JOBS limits the compilers
that run at once.
"""

import hashlib
import importlib.util
import json
import os
import re
import shutil
import site
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, find_packages, setup

ROOT = Path(__file__).parent
STABLE_ABI = "0x020a000000000000"  # torch 2.10: the oldest release the extension loads under
ARCHITECTURES = "8.0 8.6 8.9 9.0 10.0 12.0+PTX"
# All machine code is made from PTX for this one, which is the PTX that the tests execute; and the
# larger half of nvcc's work is done once instead of for every architecture.
PTX_ARCHITECTURE = "80"
TOOLKITS = ("/usr/local/cuda", "/opt/cuda")  # where they are, unless CUDA_HOME or PATH says so
GIGABYTES_PER_NVCC = 2
KERNEL_RECORD = "_C_cuda.kernels"  # beside the library: what each kernel takes of a GPU


def shout(message: str) -> None:
    print(f"\n*** boltzattn: {message} ***\n", file=sys.stderr, flush=True)


def look_beyond_isolation() -> None:
    """Let a plain `pip install .` find the torch of the environment that it installs into.

    pip builds in an environment of its own; to require torch there would fetch it a second time,
    and perhaps another one.
    """
    if importlib.util.find_spec("torch") is None:
        sys.path += [*site.getsitepackages(), site.getusersitepackages()]


def sources(*patterns: str) -> list[str]:
    return sorted(str(p.relative_to(ROOT)) for pattern in patterns for p in ROOT.glob(pattern))


def cuda_toolkit() -> tuple[Path | None, str]:
    """The toolkit's folder, or None and why not. `nvcc` on PATH may be a mere wrapper script."""
    wanted = os.environ.get("BOLTZATTN_CUDA", "auto")
    if wanted not in ("auto", "0", "1"):
        raise SystemExit(f"BOLTZATTN_CUDA must be 0, 1 or unset, got {wanted!r}")
    if wanted == "0":
        return None, "BOLTZATTN_CUDA=0"
    candidates = [
        Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ
    ]
    if nvcc := shutil.which("nvcc"):
        candidates.append(Path(nvcc).resolve().parent.parent)
    candidates += map(Path, TOOLKITS)
    for home in candidates:
        if (home / "bin/nvcc").exists() and (home / "include/cuda_runtime.h").exists():
            return home, ""
    reason = f"no CUDA toolkit in {', '.join(map(str, candidates))}; set CUDA_HOME"
    if wanted == "1":
        raise SystemExit(f"BOLTZATTN_CUDA=1, but {reason}")
    return None, reason


def gencode_flags(architectures: str) -> list[str]:
    """nvcc's flags for a list like "8.0 9.0+PTX"."""
    codes = []
    for entry in re.split(r"[ ;,]+", architectures.strip()):
        match = re.fullmatch(r"(\d+)\.(\d+)(a|f)?(\+PTX)?", entry)
        if match is None:
            raise SystemExit(
                f"TORCH_CUDA_ARCH_LIST must be numbers like {ARCHITECTURES!r}, got {entry!r}"
            )
        if int(match[1]) < 8:
            raise SystemExit(f"TORCH_CUDA_ARCH_LIST must name 8.0 or later, got {entry!r}")
        number = f"{match[1]}{match[2]}{match[3] or ''}"
        codes.append(f"sm_{number}")
        if match[4] and f"compute_{PTX_ARCHITECTURE}" not in codes:
            codes.append(f"compute_{PTX_ARCHITECTURE}")
    return [f"-gencode=arch=compute_{PTX_ARCHITECTURE},code=[{','.join(codes)}]"]


def parallel_compilers() -> int:
    if "MAX_JOBS" in os.environ:
        return max(1, int(os.environ["MAX_JOBS"]))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return max(1, min(os.cpu_count() or 1, int(memory / GIGABYTES_PER_NVCC)))


def kernel_resources(log: str) -> str:
    """What ptxas says of every kernel: "name architecture registers shared stack" a line."""
    pattern = (
        r"Compiling entry function '(\w+)' for '(\w+)'.*?(\d+) bytes stack frame.*?"
        r"Used (\d+) registers([^\n]*)"
    )
    lines = []
    for name, arch, stack, registers, rest in re.findall(pattern, log, re.DOTALL):
        shared = re.search(r"(\d+) bytes smem", rest)
        lines.append(f"{name} {arch} {registers} {shared[1] if shared else 0} {stack}\n")
    return "".join(lines)


def write_build_record(library: Path, version: str) -> None:
    """Beside the library: its size and hash, by which a damaged copy is told."""
    content = library.read_bytes()
    record = {
        "version": version,
        "size": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    library.with_name(f"{library.name}.record").write_text(json.dumps(record))


def compile_cuda(toolkit: Path, sources: list[str], depends: list[str], folder: Path) -> list[str]:
    """Object files of the .cu files. They know nothing of torch: nvcc alone compiles them."""
    flags = [
        *("-std=c++17", "-O3", "-Xcompiler", "-fPIC,-fvisibility=hidden", "-I", str(ROOT / "csrc")),
        *("-Xptxas", "-v"),
        *gencode_flags(os.environ.get("TORCH_CUDA_ARCH_LIST") or ARCHITECTURES),
    ]
    folder.mkdir(parents=True, exist_ok=True)
    stamp = " ".join(flags)
    changed = max((ROOT / name).stat().st_mtime for name in [*sources, *depends, "setup.py"])

    def compile_one(source: str) -> str:
        target = folder / (Path(source).stem + ".o")
        record = target.with_suffix(".flags")
        fresh = target.exists() and target.stat().st_mtime > changed
        if not (fresh and record.exists() and record.read_text() == stamp):
            command = [str(toolkit / "bin/nvcc"), *flags, "-c", str(ROOT / source), "-o"]
            print(" ".join([*command, str(target)]), flush=True)
            done = subprocess.run([*command, str(target)], stderr=subprocess.PIPE, text=True)
            if done.returncode:
                print(done.stderr, file=sys.stderr, flush=True)
                done.check_returncode()
            target.with_suffix(".kernels").write_text(kernel_resources(done.stderr))
            record.write_text(stamp)
        return str(target)

    with ThreadPoolExecutor(parallel_compilers()) as pool:
        return list(pool.map(compile_one, sources))


def extensions_and_commands() -> tuple[list[Extension], dict]:
    look_beyond_isolation()
    try:
        import torch
        from torch.utils.cpp_extension import BuildExtension, include_paths
    except ImportError:
        shout(
            "torch is not importable, so NO C++ EXTENSION IS BUILT and attention will be slow; "
            "install torch first, then this package again"
        )
        return [], {}

    toolkit, no_toolkit = cuda_toolkit()

    class BuildOrShout(BuildExtension):
        """A failed compile must not take the Python package down with it."""

        def run(self) -> None:
            if self.editable_mode:
                # Not pip's temporary folder, so that ninja compiles again only what has changed.
                self.build_temp = str(ROOT / "build/objects")
            try:
                super().run()
            except SystemExit:
                raise
            except Exception as error:
                self.extensions = []
                shout(
                    f"the C++ extension FAILED TO BUILD ({error}); only the slow reference "
                    "backend is installed"
                )

        def build_extension(self, ext: Extension) -> None:
            if ext.name != "boltzattn._C_cuda":
                return self.build_and_record(ext)
            try:
                folder = Path(self.build_temp).resolve() / "cuda"
                ext.extra_objects = compile_cuda(toolkit, cuda_sources, cuda_headers, folder)
                self.build_and_record(ext)
                found = [Path(name).with_suffix(".kernels") for name in ext.extra_objects]
                record = Path(self.get_ext_fullpath(ext.name)).with_name(KERNEL_RECORD)
                record.write_text("".join(path.read_text() for path in found))
            except Exception as error:
                if os.environ.get("BOLTZATTN_CUDA") == "1":
                    raise SystemExit(
                        f"BOLTZATTN_CUDA=1, but the CUDA build failed: {error}"
                    ) from error
                self.extensions = [kept for kept in self.extensions if kept is not ext]
                shout(
                    f"the CUDA extension FAILED TO BUILD ({error}); the CPU kernels are installed"
                )

        def build_and_record(self, ext: Extension) -> None:
            """Build, and record what the library is like; dispatch/extension.py compares it."""
            super().build_extension(ext)
            library = Path(self.get_ext_fullpath(ext.name))
            write_build_record(library, self.distribution.get_version())

        def copy_extensions_to_source(self) -> None:
            if self.extensions:
                super().copy_extensions_to_source()
            built = Path(self.build_lib) / "boltzattn"
            for record in (built / KERNEL_RECORD, *built.glob("*.so.record")):
                if record.exists():
                    shutil.copy(record, ROOT / "python/boltzattn")

    try:
        import pybind11

        pybind_include = [pybind11.get_include()]
    except ImportError:
        pybind_include = []  # torch carries a copy of its headers
    common = {
        "library_dirs": [str(Path(torch.__file__).parent / "lib")],
        "extra_compile_args": [
            "-std=c++17",
            "-O3",
            "-g0",  # Python was often built with -g, which makes the library six times as large
            "-fno-math-errno",
            "-fvisibility=hidden",
            "-Wall",
            "-Wextra",
            "-Wno-unused-parameter",
            "-Wno-psabi",
            f"-DTORCH_TARGET_VERSION={STABLE_ABI}",
            f'-DBOLTZATTN_TORCH_VERSION="{torch.__version__}"',
        ],
        "language": "c++",
    }
    extensions = [
        Extension(
            "boltzattn._C",
            sources=sources("csrc/*.cpp", "csrc/cpu/**/*.cpp"),
            depends=sources("csrc/*.h", "csrc/spec/*.h", "csrc/cpu/**/*.h"),
            include_dirs=[str(ROOT / "csrc"), *pybind_include, *include_paths()],
            libraries=["torch_cpu"],
            **common,
        )
    ]
    if toolkit is None:
        print(f"boltzattn: no CUDA kernels: {no_toolkit}", file=sys.stderr, flush=True)
        return extensions, {"build_ext": BuildOrShout}
    cuda_sources = sources("csrc/cuda/*.cu")
    cuda_headers = sources("csrc/*.h", "csrc/spec/*.h", "csrc/cuda/**/*.h", "csrc/cuda/**/*.cuh")
    # The runtime is linked in, so the library loads, and says what is wrong, without a driver.
    toolkit_libraries = [folder for folder in ("lib64", "lib") if (toolkit / folder).exists()]
    common["library_dirs"] = [
        *common["library_dirs"],
        *(str(toolkit / x) for x in toolkit_libraries),
    ]
    extensions.append(
        Extension(
            "boltzattn._C_cuda",
            sources=sources("csrc/cuda/*.cpp"),
            depends=[*cuda_sources, *cuda_headers],
            include_dirs=[str(ROOT / "csrc"), str(toolkit / "include"), *include_paths()],
            libraries=["torch_cpu", "cudart_static", "dl", "rt", "pthread"],
            **common,
        )
    )
    return extensions, {"build_ext": BuildOrShout}


if __name__ == "__main__":  # tests import this file for its knowledge of compilers
    extensions, commands = extensions_and_commands()
    setup(
        packages=[
            *find_packages("python"),
            "boltzattn.triton_kernels",
            "boltzattn.triton_kernels.tools",
        ],
        package_dir={"": "python", "boltzattn.triton_kernels": "triton_kernels"},
        package_data={"boltzattn": ["py.typed", "*.kernels"]},
        ext_modules=extensions,
        cmdclass=commands,
    )
