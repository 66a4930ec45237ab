"""Builds boltzattn. What it knows: compilers, flags and the ABI; everything else is pyproject.toml.

Where torch is installed the C++ extension is built against its stable ABI. Without torch or without
a compiler the Python package is installed alone and says so (pip shows it with -v); it then runs on
the reference backend.
"""

import importlib.util
import site
import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup

ROOT = Path(__file__).parent
STABLE_ABI = "0x020a000000000000"  # torch 2.10: the oldest release the extension loads under


def shout(message: str) -> None:
    print(f"\n*** boltzattn: {message} ***\n", file=sys.stderr, flush=True)


def look_beyond_isolation() -> None:
    """Let a plain `pip install .` find the torch of the environment that it installs into.

    pip builds in an environment of its own; to require torch there would fetch it a second time,
    and perhaps another one.
    """
    if importlib.util.find_spec("torch") is None:
        sys.path += [*site.getsitepackages(), site.getusersitepackages()]


def extension_and_command() -> tuple[list[Extension], dict]:
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

    class BuildOrShout(BuildExtension):
        """A failed compile must not take the Python package down with it."""

        def run(self) -> None:
            try:
                super().run()
            except Exception as error:
                self.extensions = []
                shout(
                    f"the C++ extension FAILED TO BUILD ({error}); only the slow reference "
                    "backend is installed"
                )

        def copy_extensions_to_source(self) -> None:
            if self.extensions:
                super().copy_extensions_to_source()

    try:
        import pybind11

        pybind_include = [pybind11.get_include()]
    except ImportError:
        pybind_include = []  # torch carries a copy of its headers
    library = Path(torch.__file__).parent / "lib"
    extension = Extension(
        "boltzattn._C",
        sources=sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("csrc/**/*.cpp")),
        depends=sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("csrc/**/*.h")),
        include_dirs=[str(ROOT / "csrc"), *pybind_include, *include_paths()],
        library_dirs=[str(library)],
        libraries=["torch_cpu"],
        extra_compile_args=[
            "-std=c++17",
            "-O3",
            "-fno-math-errno",
            "-fvisibility=hidden",
            "-Wall",
            "-Wextra",
            "-Wno-unused-parameter",
            "-Wno-psabi",
            f"-DTORCH_TARGET_VERSION={STABLE_ABI}",
            f'-DBOLTZATTN_TORCH_VERSION="{torch.__version__}"',
        ],
        language="c++",
    )
    return [extension], {"build_ext": BuildOrShout}


extensions, commands = extension_and_command()
setup(
    packages=[*find_packages("python"), "boltzattn.triton_kernels"],
    package_dir={"": "python", "boltzattn.triton_kernels": "triton_kernels"},
    package_data={"boltzattn": ["py.typed"]},
    ext_modules=extensions,
    cmdclass=commands,
)
