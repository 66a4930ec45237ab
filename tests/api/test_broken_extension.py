"""A damaged or foreign extension: one warning and the reference backend, never a crash."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import boltzattn
import pytest
import torch
from boltzattn.dispatch import native
from boltzattn.dispatch.extension import check_file, extension

PROGRAM = """
import sys, warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torch, boltzattn
    assert boltzattn.__file__.startswith(sys.argv[1]), boltzattn.__file__
    query = torch.randn(2, 5, 1, requires_grad=True)
    out = boltzattn.attention(query, query, query)
    out.sum().backward()
    boltzattn.attention(query, query, query)
    boltzattn.explain(query, query, query)
(ours,) = [w for w in caught if "boltzattn" in str(w.message)]
assert ours.category is RuntimeWarning
assert "reference" in str(ours.message) and "pip install" in str(ours.message)
assert torch.equal(out, boltzattn.attention(query, query, query, backend="reference"))
try:
    boltzattn.attention(query, query, query, backend="cpu")
except ValueError as error:
    print(error)
else:
    raise AssertionError("backend='cpu' was served by a broken extension")
"""

# A library that lacks a symbol, and one that is no kernel library at all.
LACKS_A_SYMBOL = """
extern int of_another_torch;
int *needed = &of_another_torch;
"""
HAS_NO_OPERATORS = "int nothing;"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The package, with its library, in a folder of its own."""
    target = tmp_path / "boltzattn"
    leave_out = shutil.ignore_patterns("__pycache__", "experiments", "theory", "_C*", "*_cuda*")
    shutil.copytree(Path(boltzattn.__file__).parent, target, ignore=leave_out)
    return target


def library_of(package: Path) -> Path:
    return package / "libboltzattn.so"


def truncate(length: int) -> Callable[[Path], None]:
    def damage(package: Path) -> None:
        os.truncate(library_of(package), length)

    return damage


def lose_the_end(package: Path) -> None:
    os.truncate(library_of(package), library_of(package).stat().st_size - 1)


def lose_the_middle(package: Path) -> None:
    """As when a download is interrupted whose size was reserved before."""
    library = library_of(package)
    half = library.stat().st_size // 2
    with library.open("r+b") as file:
        file.seek(half)
        file.write(bytes(half // 2))


def write_over_the_record(package: Path) -> None:
    library_of(package).with_suffix(".so.record").write_text('{"version": "0.1')


def come_from_another_version(package: Path) -> None:
    (package / "_version.py").write_text('__version__ = "99.0"\n')


def compile_instead(source: str) -> Callable[[Path], None]:
    """Put another library in the place of ours; nobody recorded it."""

    def damage(package: Path) -> None:
        library = library_of(package)
        library.with_suffix(".so.record").unlink()
        file = package / "other.c"
        file.write_text(source)
        compiler = os.environ.get("CC", "cc")
        command = [compiler, "-shared", "-fPIC", str(file), "-o", str(library)]
        subprocess.run(command, check=True)

    return damage


def newer_sources(package: Path) -> None:
    """A field of `Problem` that the library does not know."""
    file = package / "problem.py"
    text = file.read_text()
    field = "    is_gaussian: bool  # logits are -scale / 2 |q - k|^2, not scale q . k\n"
    assert text.index("class Problem") < text.index(field)  # the first one is its
    file.write_text(text.replace(field, f"{field}    new: float = 0\n", 1))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (truncate(0), "is damaged: it has 0 bytes"),
        (truncate(4096), "is damaged: it has 4096 bytes"),
        (truncate(1_000_000), "is damaged: it has 1000000 bytes"),
        (lose_the_end, "is damaged"),
        (lose_the_middle, "is damaged"),
        (write_over_the_record, "the build record"),
        (
            come_from_another_version,
            f"was built for boltzattn {boltzattn.__version__}, but this is 99.0",
        ),
        (compile_instead(LACKS_A_SYMBOL), "undefined symbol: of_another_torch"),
        (compile_instead(HAS_NO_OPERATORS), "lacks the operator cpu_direct_forward"),
        (newer_sources, "has other arguments for the operator cpu_direct_forward"),
    ],
    ids=[
        *("empty", "first page", "first megabyte", "without its last byte", "zeros", "record"),
        *("version", "lacks a symbol", "no operators", "newer sources"),
    ],
)
def test_falls_back_to_reference(copy: Path, damage: Callable[[Path], None], said: str) -> None:
    damage(copy)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(copy.parent)],
        cwd=copy.parent,
        env={**os.environ, "PYTHONPATH": str(copy.parent)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert said in done.stdout


def test_the_library_has_its_record() -> None:
    library = extension().path
    assert library.with_suffix(".so.record").exists()
    check_file(library)


def test_every_operator_is_asked_for() -> None:
    """A new operator belongs into the table, or a library without it would not be noticed."""
    extension()
    names = [schema.name for schema in torch._C._jit_get_all_schemas()]
    compiled = {name.removeprefix("boltzattn::") for name in names if "boltzattn::cpu_" in name}
    assert compiled == set(native.OPERATORS["cpu"])
