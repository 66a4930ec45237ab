"""Builds boltzattn. What it knows: compilers, flags and the ABI; everything else is pyproject.toml.

Where torch is installed, shared libraries are built against its stable ABI: `libboltzattn.so`, the
CPU kernels, and `libboltzattn_cuda.so` for a torch with CUDA where a toolkit is found. They are two
because one linked to CUDA would not load under a CPU torch, and neither knows of Python, so a wheel
serves every version of it. An editable install also builds `_C`, a Python module for the tests.
Without torch or without a compiler the Python package is installed alone and says so (pip shows it
with -v); it then runs on the reference backend.

ninja compiles, and again only what has changed: objects are kept in build/objects.

Environment: BOLTZATTN_CUDA=1 builds the CUDA kernels under any torch and makes it an error if that
fails, =0 skips them; TORCH_CUDA_ARCH_LIST names the architectures; CUDA_HOME the toolkit; MAX_JOBS
limits the compilers that run at once; CXX, CXXFLAGS and LDFLAGS are what they always are.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import site
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass, field
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
OBJECTS = ROOT / "build/objects"
STABLE_ABI = "0x020a000000000000"  # torch 2.10: the oldest release the libraries load under
ARCHITECTURES = "8.0 8.6 8.9 9.0 10.0 12.0+PTX"
# All machine code is made from PTX for this one, which is the PTX that the tests execute; and the
# larger half of nvcc's work is done once instead of for every architecture.
PTX_ARCHITECTURE = "80"
TOOLKITS = ("/usr/local/cuda", "/opt/cuda")  # where they are, unless CUDA_HOME or PATH says so
GIGABYTES_PER_COMPILER = 2
CPU_LIBRARY, CUDA_LIBRARY = "libboltzattn.so", "libboltzattn_cuda.so"
KERNEL_RECORD = "libboltzattn_cuda.kernels"  # beside it: what each kernel takes of a GPU
WARNINGS = ("-Wall", "-Wextra", "-Wno-unused-parameter", "-Wno-psabi")


def shout(message: str) -> None:
    print(f"\n*** boltzattn: {message} ***\n", file=sys.stderr, flush=True)


def say(message: str) -> None:
    print(f"boltzattn: {message}", file=sys.stderr, flush=True)


def look_beyond_isolation() -> None:
    """Let a plain `pip install .` find the torch of the environment that it installs into.

    pip builds in an environment of its own; to require torch there would fetch it a second time,
    and perhaps another one.
    """
    if importlib.util.find_spec("torch") is None:
        sys.path += [*site.getsitepackages(), site.getusersitepackages()]


def sources(*patterns: str) -> list[Path]:
    return sorted(path for pattern in patterns for path in ROOT.glob(pattern))


# -- what the machine has --------------------------------------------------------------------------


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


def cuda_wanted(torch_version: str, torch_cuda: str | None) -> tuple[Path | None, str]:
    """The toolkit to build CUDA kernels with, or None and why not."""
    toolkit, reason = cuda_toolkit()
    if toolkit and torch_cuda is None and os.environ.get("BOLTZATTN_CUDA") != "1":
        return None, (
            f"torch {torch_version} was built without CUDA and could not load them; "
            "BOLTZATTN_CUDA=1 builds them all the same"
        )
    return toolkit, reason


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
    return max(1, min(os.cpu_count() or 1, int(memory / GIGABYTES_PER_COMPILER)))


def cxx() -> list[str]:
    return shlex.split(os.environ.get("CXX", "g++" if shutil.which("g++") else "c++"))


# -- what is built ---------------------------------------------------------------------------------


@dataclass
class Target:
    """One shared library."""

    file: str
    sources: list[Path]
    flags: list[str]  # of the C++ compiler
    link: list[str]
    nvcc: list[str] = field(default_factory=list)  # the command for .cu files, without file names


def cpp_flags(torch: Path) -> list[str]:
    """How the files that know torch are compiled, and the CPU kernels with them."""
    flags = ["-std=c++17", "-O3", "-g0", "-DNDEBUG", "-fPIC", "-fno-math-errno"]
    flags += [
        "-fvisibility=hidden",
        *WARNINGS,
        f"-I{ROOT / 'csrc'}",
        f"-isystem{torch / 'include'}",
    ]
    flags += [f"-DTORCH_TARGET_VERSION={STABLE_ABI}"]
    if sys.platform == "linux":  # glibc 2.28 has all that the libraries ask for
        flags += [f"-I{ROOT / 'csrc/linux'}", "-include", str(ROOT / "csrc/linux/old_symbols.h")]
    return flags


def cpu_target(torch: Path) -> Target:
    return Target(
        CPU_LIBRARY,
        sources("csrc/library.cpp", "csrc/linux/*.cpp", "csrc/cpu/**/*.cpp"),
        cpp_flags(torch),
        [f"-L{torch / 'lib'}", "-ltorch_cpu"],
    )


def cuda_target(torch: Path, toolkit: Path) -> Target:
    """Its .cu files know nothing of torch. The runtime is linked in, so the library loads, and says
    what is wrong, without a driver."""
    nvcc = [str(toolkit / "bin/nvcc"), "-std=c++17", "-O3", "-I", str(ROOT / "csrc")]
    nvcc += ["-Xcompiler", "-fPIC,-fvisibility=hidden", "-Xptxas", "-v"]
    nvcc += gencode_flags(os.environ.get("TORCH_CUDA_ARCH_LIST") or ARCHITECTURES)
    folders = [toolkit / name for name in ("lib64", "lib") if (toolkit / name).exists()]
    return Target(
        CUDA_LIBRARY,
        sources("csrc/linux/*.cpp", "csrc/cuda/*.cpp", "csrc/cuda/*.cu"),
        [*cpp_flags(torch), f"-isystem{toolkit / 'include'}"],
        [
            *(f"-L{folder}" for folder in (torch / "lib", *folders)),
            *("-ltorch_cpu", "-lcudart_static", "-ldl", "-lrt", "-lpthread"),
        ],
        nvcc,
    )


def development_target() -> Target:
    """The Python module `_C`, which shows csrc/spec to the tests."""
    import pybind11

    includes = [ROOT / "csrc", pybind11.get_include(), sysconfig.get_path("include")]
    return Target(
        f"_C{sysconfig.get_config_var('EXT_SUFFIX')}",
        sources("csrc/module.cpp"),
        ["-std=c++17", "-O1", "-g0", "-fPIC", "-fvisibility=hidden", *WARNINGS]
        + [f"-I{path}" for path in includes],
        ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else [],
    )


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


def write_build_record(library: Path, version: str, torch: str) -> None:
    """Beside the library: its size and hash, by which a damaged copy is told, and its makers."""
    content = library.read_bytes()
    compiler = subprocess.run([*cxx(), "--version"], capture_output=True, text=True, check=True)
    record = {
        "version": version,
        "size": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
        "torch": torch,
        "compiler": compiler.stdout.splitlines()[0],
    }
    library.with_name(f"{library.name}.record").write_text(json.dumps(record))


# -- ninja -----------------------------------------------------------------------------------------

# ptxas' report comes on nvcc's stderr, and is kept: kernel_resources reads it.
NINJA_RULES = """\
rule cxx
  command = $cxx -MMD -MF $out.d $flags -c $in -o $out
  depfile = $out.d
  deps = gcc
rule nvcc
  command = $nvcc -MD -MF $out.d -c $in -o $out 2> $out.log || { cat $out.log >&2; exit 1; }
  depfile = $out.d
  deps = gcc
rule link
  command = $cxx -shared $in -o $out $link
"""


def ninja_file(target: Target) -> str:
    """The build of one target in the folder where ninja runs."""

    def path(name: str | Path) -> str:
        return re.sub(r"([$ :])", r"$\1", str(name))

    def words(*command: str) -> str:
        return shlex.join(command).replace("$", "$$")

    extra = {name: shlex.split(os.environ.get(name, "")) for name in ("CXXFLAGS", "LDFLAGS")}
    lines = [
        f"cxx = {words(*cxx())}",
        f"flags = {words(*target.flags, *extra['CXXFLAGS'])}",
        f"link = {words(*target.link, *extra['LDFLAGS'])}",
        f"nvcc = {words(*target.nvcc)}",
        NINJA_RULES,
    ]
    objects = []
    for source in target.sources:
        inside = source.is_relative_to(ROOT / "csrc")
        name = "_".join(source.relative_to(ROOT / "csrc").parts) if inside else source.name
        name = name.removesuffix(".cpp") + ".o"
        rule = "nvcc" if source.suffix == ".cu" else "cxx"
        lines.append(f"build {path(name)}: {rule} {path(source)}")
        objects.append(path(name))
    lines.append(f"build {path(target.file)}: link {' '.join(objects)}\n")
    return "\n".join(lines)


def build_target(target: Target, folder: Path, destination: Path) -> Path:
    """Compile what is not up to date in `folder`; the library is then copied to `destination`."""
    folder.mkdir(parents=True, exist_ok=True)
    destination.mkdir(parents=True, exist_ok=True)
    description = ninja_file(target)
    file = folder / "build.ninja"
    if not file.exists() or file.read_text() != description:
        file.write_text(description)
    try:
        import ninja

        program = str(Path(ninja.BIN_DIR) / "ninja")
    except ImportError:
        program = "ninja"
    subprocess.run([program, "-C", str(folder), "-j", str(parallel_compilers())], check=True)
    library = destination / target.file
    library.unlink(missing_ok=True)  # a process may have it mapped: never write into it
    shutil.copy(folder / target.file, library)
    return library


# -- setuptools' commands --------------------------------------------------------------------------


class Build(build_ext):
    """Builds the targets. A failed compile must not take the Python package down with it."""

    def run(self) -> None:
        import torch

        start = time.monotonic()
        inside = self.inplace or self.editable_mode
        self.destination = (
            ROOT / "python/boltzattn" if inside else Path(self.build_lib) / "boltzattn"
        )
        for pattern in ("_C*.so*", "lib*.so*", "*.kernels"):  # of an earlier build
            for old in self.destination.glob(pattern):
                old.unlink()
        self.strip = [] if inside or sys.platform != "linux" else ["-s"]
        headers, self.torch = Path(torch.__file__).parent, torch.__version__
        built = []
        try:
            self.build(cpu_target(headers))
            built.append("CPU kernels")
            if inside:
                self.build(development_target())
                built.append("the development module")
        except SystemExit:
            raise
        except Exception as error:
            shout(
                f"the C++ library FAILED TO BUILD ({error}); only the slow reference backend is "
                "installed"
            )
            return
        toolkit, reason = cuda_wanted(self.torch, torch.version.cuda)
        if toolkit is None:
            say(f"no CUDA kernels: {reason}")
        elif self.build_cuda(headers, toolkit):
            names = os.environ.get("TORCH_CUDA_ARCH_LIST") or ARCHITECTURES
            built.append(f"CUDA kernels for {names}")
        say(f"built {', '.join(built)} in {time.monotonic() - start:.0f} s")

    def build(self, target: Target) -> None:
        target.link += self.strip
        folder = OBJECTS / target.file.partition(".")[0]
        library = build_target(target, folder, self.destination)
        if target.file in (CPU_LIBRARY, CUDA_LIBRARY):
            # Without the part that tells a wheel with CUDA kernels from one without (+cu130).
            version = self.distribution.get_version().partition("+")[0]
            write_build_record(library, version, self.torch)

    def build_cuda(self, headers: Path, toolkit: Path) -> bool:
        try:
            self.build(cuda_target(headers, toolkit))
        except Exception as error:
            if os.environ.get("BOLTZATTN_CUDA") == "1":
                raise SystemExit(f"BOLTZATTN_CUDA=1, but the CUDA build failed: {error}") from error
            shout(f"the CUDA library FAILED TO BUILD ({error}); the CPU kernels are installed")
            return False
        logs = sorted((OBJECTS / Path(CUDA_LIBRARY).stem).glob("*.log"))
        report = "".join(kernel_resources(log.read_text()) for log in logs)
        (self.destination / KERNEL_RECORD).write_text(report)
        return True

    def get_outputs(self) -> list[str]:
        found = [*self.destination.glob("*.so*"), *self.destination.glob("*.kernels")]
        return [str(path) for path in found]

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class Wheel(bdist_wheel):
    """The libraries depend on the platform, and on no version of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        _, _, platform = super().get_tag()
        return "py3", "none", platform


def extensions() -> list[Extension]:
    """What makes setuptools call Build, if there is a torch to build for."""
    look_beyond_isolation()
    try:
        import torch  # noqa: F401
    except ImportError:
        shout(
            "torch is not importable, so NO C++ LIBRARY IS BUILT and attention will be slow; "
            "install torch first, then this package again"
        )
        return []
    return [Extension("boltzattn.libboltzattn", sources=[])]


if __name__ == "__main__":  # tests import this file for its knowledge of compilers
    setup(
        packages=[
            *find_packages("python"),
            "boltzattn.triton_kernels",
            "boltzattn.triton_kernels.tools",
        ],
        package_dir={"": "python", "boltzattn.triton_kernels": "triton_kernels"},
        package_data={"boltzattn": ["py.typed"]},
        ext_modules=extensions(),
        cmdclass={"build_ext": Build, "bdist_wheel": Wheel},
    )
