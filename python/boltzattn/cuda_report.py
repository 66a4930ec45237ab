"""`python -m boltzattn.cuda_report`: what the CUDA kernels take of a GPU, as ptxas said.

Nothing is compiled: setup.py has recorded it when the library was built.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

RECORD = Path(__file__).parent / "libboltzattn_cuda.kernels"


def readable(mangled: str) -> str:
    """The name of a kernel: `direct_forward<float, 64>`.

    Example:
        >>> readable("_ZN9boltzattn4cuda14direct_forwardIfLi64EEEvNS0_4CallE")
        'direct_forward<float, 64>'
    """
    match = re.match(r"_ZN9boltzattn4cuda(\d+)(.*)", mangled)
    if match is None:
        return mangled
    length = int(match[1])
    name, rest = match[2][:length], match[2][length:]
    kinds = {"f": "float", "d": "double", "13__nv_bfloat16": "bfloat16", "6__half": "half"}
    arguments = re.match(r"I(?:(f|d|13__nv_bfloat16|6__half))?((?:L[ib]\d+E)*)E", rest)
    if arguments is None:
        return name
    words = [kinds[arguments[1]]] if arguments[1] else []
    for kind, number in re.findall(r"L([ib])(\d+)E", arguments[2]):
        words.append(number if kind == "i" else str(number == "1").lower())
    return f"{name}<{', '.join(words)}>"


def lines(record: Path = RECORD) -> Iterator[str]:
    """The report, line by line: what setup.py has recorded of every kernel and architecture."""
    if not record.exists():
        yield "CUDA kernels: not built"
        return
    found: dict[str, dict[str, str]] = {}  # by kernel and architecture
    for line in record.read_text().splitlines():
        name, arch, registers, shared, stack = line.split()
        cells = found.setdefault(readable(name), {"shared": shared})
        # What is on the stack was meant for registers.
        cells[arch] = registers if stack == "0" else f"{registers}+{stack}"
    columns = list(dict.fromkeys(name for cells in found.values() for name in cells))
    yield "CUDA kernels as compiled: bytes of shared memory, registers on every architecture"
    yield f"  {'':<40}" + "".join(f"{name:>8}" for name in columns)
    for kernel, cells in sorted(found.items()):
        yield f"  {kernel:<40}" + "".join(f"{cells.get(name, ''):>8}" for name in columns)


if __name__ == "__main__":
    for line in lines():
        print(line)
