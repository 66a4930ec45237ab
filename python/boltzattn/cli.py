"""The command `boltzattn`: `boltzattn info`, `boltzattn selftest` and so on.

Each is the main function of a module, which `python -m` runs as well.
"""

from __future__ import annotations

import argparse
import importlib
import sys

import boltzattn

# By name: the module, the extra that installs what it needs, and what it does.
COMMANDS = {
    "info": ("boltzattn.info", None, "what is installed, what is usable, and why not the rest"),
    "selftest": (
        "boltzattn.selftest",
        None,
        "check every backend on this machine against fp64; exit status 1 if one is wrong",
    ),
    "bench": (
        "boltzattn.bench",
        None,
        "time attention on this machine against scaled_dot_product_attention",
    ),
    "tune": (
        "boltzattn.tune",
        None,
        "measure what method='auto' chooses by, and keep it for this machine",
    ),
    "theory": ("boltzattn.theory.__main__", "theory", "the theorems, with tables and figures"),
    "experiments": (
        "boltzattn.experiments.__main__",
        "experiments",
        "run one of the experiments, or all of them",
    ),
}


def main(arguments: list[str] | None = None) -> int:
    """Run a command; its exit status: 0 if all is well, 1 if not, 2 if it was called wrongly."""
    words = sys.argv[1:] if arguments is None else arguments
    if words and words[0] in COMMANDS:
        return _run(words[0], words[1:])
    listed = "\n".join(f"  {name:<12} {about}" for name, (_, _, about) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="boltzattn",
        usage="boltzattn COMMAND [options]",
        description=f"Exact softmax attention for low-rank heads.\n\ncommands:\n{listed}",
        epilog="`boltzattn COMMAND --help` describes the options of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=boltzattn.__version__)
    parser.add_argument("command", choices=COMMANDS, help=argparse.SUPPRESS)
    parser.parse_args(words)  # prints and exits, since no command comes first
    raise AssertionError(words)


def _run(name: str, arguments: list[str]) -> int:
    module, extra, _ = COMMANDS[name]
    try:
        run = importlib.import_module(module).main
    except ModuleNotFoundError as error:
        if extra is None or (error.name or "").startswith("boltzattn"):
            raise
        print(
            f"boltzattn {name} needs {error.name}; to install it: pip install 'boltzattn[{extra}]'",
            file=sys.stderr,
        )
        return 2
    return run(arguments, prog=f"boltzattn {name}") or 0


if __name__ == "__main__":
    sys.exit(main())
