"""Writes the layout that Hugging Face's kernel builder takes, from this source tree.

    python tools/hub_layout.py build/hub

The builder compiles build.toml's sources into one module with a name of its own, of which several
versions may be loaded at once. So the package imports itself by relative names, and finds the
namespace of its operators in the module `_ops` that the builder writes. What needs more than torch
and the standard library is left out.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LEFT_OUT = ("theory", "experiments", "cli.py", "__pycache__", "*.so*", "*.kernels")

NAMES = '''"""Where the operators and the compiled library are: the builder made them."""

from pathlib import Path

from .. import _ops

NAMESPACE = _ops.ops.name
CPU_LIBRARY = CUDA_LIBRARY = Path(getattr(_ops, NAMESPACE).__file__)
'''

BINDING = """// The module that Python imports; the operators register themselves.
#include "registration.h"

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
"""


def relative(text: str, depth: int) -> str:
    """A module `depth` folders below the package, with relative imports of the package."""
    dots = "." * (depth + 1)
    text = re.sub(
        r"^(\s*)from boltzattn(?:\.([\w.]+))? import",
        lambda match: f"{match[1]}from {dots}{match[2] or ''} import",
        text,
        flags=re.MULTILINE,
    )
    # `import boltzattn` binds the package itself, which the first dots name.
    here = f'boltzattn = sys.modules[__name__.rsplit(".", {depth + 1})[0]]'
    return re.sub(r"^(\s*)import boltzattn$", rf"\1import sys\n\1{here}", text, flags=re.MULTILINE)


def sources(*patterns: str) -> str:
    found = sorted(str(path.relative_to(ROOT)) for p in patterns for path in ROOT.glob(p))
    return "[\n" + "".join(f'  "{name}",\n' for name in found) + "]"


def build_toml() -> str:
    shared = ("csrc/*.h", "csrc/spec/*.h")
    flags = 'depends = ["torch"]\ninclude = ["csrc"]'
    return f"""[general]
name = "boltzattn"
version = 1
backends = ["cpu", "cuda"]

[torch]
minver = "2.10"
src = ["torch-ext/torch_binding.cpp"]

[kernel.boltzattn_cpu]
backend = "cpu"
{flags}
src = {sources("csrc/library.cpp", "csrc/cpu/**/*.cpp", "csrc/cpu/**/*.h", *shared)}

[kernel.boltzattn_cuda]
backend = "cuda"
{flags}
cuda-capabilities = ["8.0", "8.6", "8.9", "9.0", "10.0", "12.0"]
src = {sources("csrc/cuda/*.c*", "csrc/cuda/**/*.cuh", "csrc/cuda/**/*.h", *shared)}
"""


def write(target: Path) -> None:
    """The whole layout; what was in the folder is gone."""
    shutil.rmtree(target, ignore_errors=True)
    package = target / "torch-ext/boltzattn"
    ignore = shutil.ignore_patterns(*LEFT_OUT)
    shutil.copytree(ROOT / "python/boltzattn", package, ignore=ignore)
    shutil.copytree(ROOT / "triton_kernels", package / "triton_kernels", ignore=ignore)
    shutil.copytree(ROOT / "csrc", target / "csrc", ignore=shutil.ignore_patterns("module.cpp"))
    for file in package.rglob("*.py"):
        depth = len(file.relative_to(package).parts) - 1
        file.write_text(relative(file.read_text(), depth))
    (package / "dispatch/names.py").write_text(NAMES)
    (target / "torch-ext/torch_binding.cpp").write_text(BINDING)
    (target / "build.toml").write_text(build_toml())


if __name__ == "__main__":
    write(Path(sys.argv[1]))
