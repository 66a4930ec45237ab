"""`python -m boltzattn.info`: what is installed, what is usable, and why not the rest."""

from __future__ import annotations

import platform

import torch

import boltzattn
from boltzattn import backends


def report() -> str:
    """The installation in a few lines of text."""
    lines = [
        f"boltzattn {boltzattn.__version__}",
        f"torch {torch.__version__}, Python {platform.python_version()}, "
        f"{platform.system()} {platform.machine()}, {torch.get_num_threads()} threads",
    ]
    extension = backends.extension()
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


if __name__ == "__main__":
    print(report())
