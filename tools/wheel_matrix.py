"""Installs one wheel into fresh environments and runs its self-test in each; prints a table.

    python tools/wheel_matrix.py dist/boltzattn-*.whl --python 3.10 3.13 --torch 2.10 2.13

An environment has a Python, a torch and the wheel, and no compiler. Environments stay in
build/matrix, so a second run takes seconds; only the wheel is installed anew. The libraries of
NVIDIA that a CUDA build of torch needs are several gigabytes and the same for every Python: they
are fetched once for each torch. A cell that cannot be had, because this Python is not installed
or torch has no build for it, is printed as "-".
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
MATRIX = ROOT / "build/matrix"
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
TORCHES = ("2.10", "2.11", "2.12", "2.13")
# What `import torch` needs besides the libraries of NVIDIA. No numpy: the package does without.
TORCH_NEEDS = ("filelock", "typing-extensions", "sympy", "networkx", "jinja2", "fsspec")
NVIDIA = re.compile(r"^Requires-Dist: ((?:nvidia|cuda)-[^;]+)", re.MULTILINE)
IMPORT_SECONDS = (
    "import time; a = time.perf_counter(); import torch; b = time.perf_counter();"
    "import boltzattn; print(time.perf_counter() - b)"
)


class Unavailable(Exception):
    """A Python or a torch that cannot be had here."""


@dataclass(frozen=True)
class Result:
    """Of one environment."""

    torch: str  # the version in full
    ok: bool
    install: float  # seconds of `pip install <wheel>`
    importing: float  # seconds of `import boltzattn` after `import torch`
    said: str  # the last line of the self-test


def interpreter(version: str) -> str:
    """The path of a Python. pyenv's stand-ins on PATH may lead to nothing, so each is tried."""
    home = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = [
        shutil.which(f"python{version}"),
        *sorted(home.glob(f"versions/{version}.*/bin/python")),
    ]
    for path in filter(None, map(str, filter(None, found))):
        if subprocess.run([path, "-c", ""], capture_output=True).returncode == 0:
            return path
    raise Unavailable(f"Python {version} is not installed")


def run(*command: object, **environment: str) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        cwd=MATRIX,
        env={**os.environ, **environment},
    )
    if done.returncode:
        raise RuntimeError(f"{command[0]} ended with {done.returncode}: {done.stdout}{done.stderr}")
    return done.stdout


def prepare(python: str, torch: str) -> Path:
    """The folder of a virtual environment with this torch."""
    folder = MATRIX / f"python{python}-torch{torch}"
    if (folder / "ready").exists():
        return folder
    base = interpreter(python)
    shutil.rmtree(folder, ignore_errors=True)
    run(base, "-m", "venv", folder)
    pip = (folder / "bin/python", "-m", "pip", "install", "--quiet", "--no-cache-dir")
    try:
        run(*pip, "--no-deps", f"torch=={torch}.*")
    except RuntimeError as error:
        shutil.rmtree(folder)
        if "No matching distribution" in str(error):
            raise Unavailable(f"torch {torch} has no build for Python {python}") from error
        raise
    run(*pip, *TORCH_NEEDS)
    (site,) = folder.glob("lib/python*/site-packages")
    (metadata,) = site.glob("torch-*.dist-info/METADATA")
    if wanted := NVIDIA.findall(metadata.read_text()):
        shared = MATRIX / f"nvidia-torch{torch}"
        if not (shared / "ready").exists():
            shutil.rmtree(shared, ignore_errors=True)
            run(*pip, "--target", shared, *(word.strip() for word in wanted))
            (shared / "ready").touch()
        (site / "nvidia").symlink_to(shared / "nvidia")
    (folder / "ready").touch()
    return folder


def test(folder: Path, wheel: Path) -> Result:
    """Install the wheel, time its import, run the self-test: no compiler is on PATH."""
    python = folder / "bin/python"
    bare = {"PATH": str(folder / "bin"), "CC": "none", "CXX": "none", "PYTHONPATH": ""}
    bare["OMP_NUM_THREADS"] = "1"  # threads that wait for others would slow them down
    pip = (python, "-m", "pip")
    run(*pip, "uninstall", "--quiet", "--yes", "boltzattn", **bare)
    start = time.perf_counter()
    # torch is there; of what else it wants, like Triton, not everything is.
    run(*pip, "install", "--quiet", "--no-deps", wheel.resolve(), **bare)
    seconds = time.perf_counter() - start
    importing = min(float(run(python, "-c", IMPORT_SECONDS, **bare)) for _ in range(3))
    version = run(python, "-c", "import torch; print(torch.__version__)", **bare).strip()
    told = json.loads(run(python, "-m", "boltzattn.info", "--json", **bare))
    try:
        said = run(python, "-m", "boltzattn.selftest", "--length", "128", **bare).splitlines()[-1]
        ok = "not usable" not in told["library"]  # else only `reference` was tested
    except RuntimeError as error:
        said, ok = str(error).splitlines()[-1], False
    return Result(version, ok, seconds, importing, said)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path, nargs="?", help="without one, prepare environments")
    parser.add_argument("--python", nargs="+", default=PYTHONS, metavar="3.x")
    parser.add_argument("--torch", nargs="+", default=TORCHES, metavar="2.x")
    parser.add_argument("--document", type=Path, help="a file with a place for the table")
    asked = parser.parse_args()
    MATRIX.mkdir(parents=True, exist_ok=True)
    cells: dict[tuple[str, str], Result | None] = {}
    for torch in asked.torch:
        for python in asked.python:
            try:
                folder = prepare(python, torch)
            except Unavailable as reason:
                print(f"- Python {python}, torch {torch}: {reason}", flush=True)
                cells[python, torch] = None
                continue
            if asked.wheel is None:
                print(f"prepared: Python {python}, torch {torch}", flush=True)
                continue
            result = cells[python, torch] = test(folder, asked.wheel)
            print(
                f"{'ok  ' if result.ok else 'FAIL'} Python {python}, torch {result.torch}: "
                f"installed in {result.install:.1f} s, import +{result.importing:.2f} s, "
                f"{result.said}",
                flush=True,
            )
    if asked.wheel is None:
        return 0
    table = matrix(asked.python, asked.torch, cells)
    print(f"\n{asked.wheel.name}\n{table}")
    if asked.document:
        commit = run("git", "-C", ROOT, "describe", "--always", "--dirty").strip()
        table += f"\n\nInstalled: `{asked.wheel.name}`, built at commit {commit}."
        text = asked.document.read_text()
        place = re.compile(r"(<!-- matrix:begin -->\n).*(\n<!-- matrix:end -->)", re.DOTALL)
        asked.document.write_text(place.sub(rf"\1{table}\2", text))
    tested = [result for result in cells.values() if result]
    return 0 if tested and all(result.ok for result in tested) else 1


def matrix(pythons: list[str], torches: list[str], cells: dict) -> str:
    """The table in Markdown: a column for each torch."""
    lines = [f"| Python | {' | '.join(f'torch {torch}' for torch in torches)} |"]
    lines.append("|---" * (len(torches) + 1) + "|")
    for python in pythons:
        words = [
            "-" if (result := cells[python, torch]) is None else "ok" if result.ok else "**fails**"
            for torch in torches
        ]
        lines.append(f"| {python} | {' | '.join(words)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
