"""`python -m boltzattn.info`: what is installed, what is usable, and why not the rest.

`--kernels` also prints the registers and the shared memory that each GPU kernel uses. For CUDA
kernels the build has recorded them; Triton kernels are compiled for the report. No GPU is needed.
"""

from __future__ import annotations

import argparse
import itertools
import platform

import torch

import boltzattn
from boltzattn import cuda_report
from boltzattn.dispatch import backends
from boltzattn.dispatch.extension import extension as load_extension


def report() -> str:
    """The installation in a few lines of text."""
    lines = [
        f"boltzattn {boltzattn.__version__}",
        f"torch {torch.__version__}, Python {platform.python_version()}, "
        f"{platform.system()} {platform.machine()}, {torch.get_num_threads()} threads",
    ]
    extension = load_extension()
    if isinstance(extension, str):
        lines.append(f"extension: {extension}")
    else:
        record = ", ".join(f"{name} {value}" for name, value in extension.build_record().items())
        isas = ", ".join(extension.supported_isas())
        lines.append(f"extension: built with {record}")
        lines.append(f"instruction sets: {isas} usable here, {extension.isa()} in use")
    lines.append("backends:")
    for backend in backends.BACKENDS.values():
        missing = backend.unavailable()
        where = " and ".join(backend.devices) if backend.devices else "any device"
        state = f"not usable: {missing}" if missing else "usable"
        lines.append(
            f"  {backend.name:<10} {backend.summary}, {where}; "
            f"methods {', '.join(backend.methods)}; {state}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m boltzattn.info")
    parser.add_argument("--kernels", action="store_true", help="compile and describe GPU kernels")
    asked = parser.parse_args()
    print(report())
    if asked.kernels:
        from boltzattn.triton_kernels.tools import report as triton_report

        for line in itertools.chain(cuda_report.lines(), triton_report.lines()):
            print(line, flush=True)


if __name__ == "__main__":
    main()
