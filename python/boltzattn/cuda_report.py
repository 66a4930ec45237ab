"""What the CUDA kernels take of a GPU, as ptxas said when the extension was built."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

RECORD = Path(__file__).parent / "_C_cuda.kernels"


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
    """The report, line by line."""
    if not record.exists():
        yield "CUDA kernels: not built"
        return
    yield "CUDA kernels, as compiled:"
    for line in record.read_text().splitlines():
        name, arch, registers, shared, stack = line.split()
        yield (
            f"  {readable(name):<44} {arch:<7} {registers:>3} registers, "
            f"{shared:>6} bytes shared, {stack} bytes of stack"
        )
