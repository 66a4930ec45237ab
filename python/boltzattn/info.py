"""What is installed, what is usable, and why not the rest.

`--json` prints the same for programs. `--kernels` also prints the registers and the shared memory
that each GPU kernel uses: for CUDA kernels the build has recorded them; Triton kernels are compiled
for the report. No GPU is needed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import sys
from typing import Any

import torch

import boltzattn
from boltzattn import cuda_report
from boltzattn.dispatch import backends, costs
from boltzattn.dispatch.extension import extension


def facts() -> dict[str, Any]:
    """The installation as `--json` prints it."""
    library = extension()
    return {
        "boltzattn": boltzattn.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "threads": torch.get_num_threads(),
        "library": {"not usable": library}
        if isinstance(library, str)
        else {
            "built with": library.build_record(),
            "instruction sets": library.supported_isas(),
            "instruction set in use": library.isa(),
        },
        "costs": costs.of_cpu()[1],
        "backends": {
            backend.name: {
                "language": backend.summary,
                "devices": list(backend.devices or ["any device"]),
                "methods": list(backend.methods),
                "not usable": backend.unavailable(),
            }
            for backend in backends.BACKENDS.values()
        },
    }


def report() -> str:
    """The installation in a few lines of text."""
    known = facts()
    lines = [
        f"boltzattn {known['boltzattn']}",
        f"torch {known['torch']}, Python {known['python']}, {known['system']}, "
        f"{known['threads']} threads",
    ]
    library = known["library"]
    if "not usable" in library:
        lines.append(f"library: {library['not usable']}")
    else:
        record = ", ".join(f"{name} {value}" for name, value in library["built with"].items())
        lines.append(f"library: built with {record or 'nothing that was recorded'}")
        lines.append(
            f"instruction sets: {', '.join(library['instruction sets'])} usable here, "
            f"{library['instruction set in use']} in use"
        )
    lines.append(f"costs, by which a method is chosen: {known['costs']}")
    lines.append("backends:")
    for name, backend in known["backends"].items():
        state = f"not usable: {backend['not usable']}" if backend["not usable"] else "usable"
        lines.append(
            f"  {name:<10} {backend['language']}, {' and '.join(backend['devices'])}; "
            f"methods {', '.join(backend['methods'])}; {state}"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None, prog: str = "python -m boltzattn.info") -> int:
    parser = argparse.ArgumentParser(prog=prog, description=(__doc__ or "").partition("\n")[0])
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object")
    form.add_argument("--kernels", action="store_true", help="compile and describe GPU kernels")
    asked = parser.parse_args(arguments)
    print(json.dumps(facts(), indent=2) if asked.json else report())
    if asked.kernels:
        from boltzattn.triton_kernels.tools import report as triton_report

        for line in itertools.chain(cuda_report.lines(), triton_report.lines()):
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
