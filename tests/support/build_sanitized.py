"""Builds the extension with AddressSanitizer into a folder: python build_sanitized.py folder

-O1 keeps the compiler's time at 20 s a file.
"""

from __future__ import annotations

import sys
from pathlib import Path

import setuptools

sys.path.insert(0, str(Path(__file__).parents[2]))
import setup

extensions, commands = setup.extensions_and_commands()
extension = next(one for one in extensions if one.name == "boltzattn._C")
extension.extra_compile_args += ["-O1", "-g1", "-fno-omit-frame-pointer", "-fsanitize=address"]
extension.extra_link_args = ["-fsanitize=address"]
folder = sys.argv[1]
setuptools.setup(
    script_args=["--quiet", "build_ext", "--build-lib", folder, "--build-temp", folder],
    packages=[],
    package_dir={"": "python"},  # where the version is
    ext_modules=[extension],
    cmdclass=commands,
)
