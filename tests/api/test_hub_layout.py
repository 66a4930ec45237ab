"""The layout for Hugging Face's kernel hub: it imports by relative names, beside the package."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# What the builder writes; no module was compiled here, so the reference backend serves.
OPS = """
import torch
class _boltzattn_test:
    __file__ = "not-compiled.so"
ops = torch.ops._boltzattn_test
"""
PROGRAM = """
import importlib.util, sys, warnings
sys.modules["numpy"] = sys.modules["boltzattn"] = None  # neither may be needed
warnings.simplefilter("ignore")
import torch
path = sys.argv[1] + "/torch-ext/boltzattn"
spec = importlib.util.spec_from_file_location(
    "kernel_1234", path + "/__init__.py", submodule_search_locations=[path]
)
kernel = sys.modules["kernel_1234"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernel)
torch.set_default_dtype(torch.float64)
q, k, v = (torch.randn(2, 40, width, requires_grad=True) for width in (1, 1, 3))
for method in kernel.METHODS:
    out = kernel.attention(q, k, v, method=method)
    torch.testing.assert_close(out, (q @ k.mT).softmax(-1) @ v)
    out.sum().backward()
assert "attention" in dir(torch.ops._boltzattn_test)
import kernel_1234.info
assert "not-compiled.so cannot be loaded" in kernel_1234.info.report()
"""


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = importlib.util.spec_from_file_location("hub_layout", ROOT / "tools/hub_layout.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    folder = tmp_path_factory.mktemp("hub")
    module.write(folder)
    return folder


def test_it_imports_under_another_name(layout: Path) -> None:
    (layout / "torch-ext/boltzattn/_ops.py").write_text(OPS)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(layout)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


def test_imports_are_relative(layout: Path) -> None:
    allowed = {*sys.stdlib_module_names, "torch", "triton"}  # triton: only if its backend is asked
    for file in (layout / "torch-ext/boltzattn").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            assert {name.partition(".")[0] for name in names} <= allowed, file


def test_build_toml_names_every_source(layout: Path) -> None:
    text = (layout / "build.toml").read_text()
    for file in (layout / "csrc").rglob("*"):
        name = file.relative_to(layout)
        if file.is_file() and name.parts[1] != "linux":  # the builder sees to old systems itself
            assert f'"{name}"' in text
    if sys.version_info >= (3, 11):
        import tomllib

        kernels = tomllib.loads(text)["kernel"]
        assert {kernel["backend"] for kernel in kernels.values()} == {"cpu", "cuda"}
        for kernel in kernels.values():
            assert all((layout / name).exists() for name in kernel["src"])
