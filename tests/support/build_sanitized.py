"""Builds the CPU library with AddressSanitizer into a folder: python build_sanitized.py folder

-O1 keeps the compiler's time at 20 s a file.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
import setup

target = setup.cpu_target(Path(torch.__file__).parent)
target.flags += ["-O1", "-g1", "-fno-omit-frame-pointer", "-fsanitize=address"]
target.link += ["-fsanitize=address"]
folder = Path(sys.argv[1])
setup.build_target(target, folder / "objects", folder)
