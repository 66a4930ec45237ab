"""Tests here run Triton kernels in Triton's interpreter, in a process of their own.

The interpreter is chosen when triton is imported, for the whole process: `make test` starts a
second pytest with TRITON_INTERPRET=1 for this folder.
"""

import os
import sys
from pathlib import Path

# They share the cases of the tests in these folders, which this process does not collect.
sys.path += [str(Path(__file__).parents[2] / folder) for folder in ("api", "kernels")]

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]
