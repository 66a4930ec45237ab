"""Tests here run Triton kernels in Triton's interpreter, in a process of their own.

The interpreter is chosen when triton is imported, for the whole process: `make test` starts a
second pytest with TRITON_INTERPRET=1 for this folder.
"""

import os

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]
