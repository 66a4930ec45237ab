"""What a built library asks of the system and of torch."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

# Of torch: its C interface. Any C++ function of torch's or c10's, whose mangled name starts like
# this, would tie the library to one release.
UNSTABLE = re.compile(r"_ZN?K?(2at|3c10|5torch|6caffe2)")
STABLE = re.compile(r"(aoti_)?torch_\w+")
SYSTEM = re.compile(r"lib(torch_cpu|stdc\+\+|gcc_s|c|m|dl|rt|pthread|gomp)\.so(\.\d+)?|ld-linux.*")


def _readelf(library: Path, flag: str) -> list[str]:
    return subprocess.run(
        ["readelf", "-W", flag, str(library)], capture_output=True, text=True, check=True
    ).stdout.splitlines()


def assert_stable_interface(library: Path) -> None:
    """No CUDA library is needed, of torch only libtorch_cpu and its stable interface in C."""
    needed = [match[1] for line in _readelf(library, "-d") if (match := _NEEDED.search(line))]
    assert needed
    assert not [name for name in needed if not SYSTEM.fullmatch(name)], needed
    symbols = [
        line.split()[7].partition("@")[0]
        for line in _readelf(library, "--dyn-syms")
        if " UND " in line and len(line.split()) > 7
    ]
    assert not [name for name in symbols if UNSTABLE.match(name)]
    assert any(STABLE.fullmatch(name) for name in symbols)  # else this would have looked at nothing


def assert_old_symbols(library: Path) -> None:
    """No symbol is newer than those of manylinux_2_28, whatever glibc the library was built on."""
    newest = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 25), "CXXABI": (1, 3, 11)}
    wanted = re.findall(
        r" UND (\S+)@(GLIBC|GLIBCXX|CXXABI)_([\d.]+)", "\n".join(_readelf(library, "--dyn-syms"))
    )
    assert wanted
    assert not [
        name
        for name, family, version in wanted
        if tuple(map(int, version.split("."))) > newest[family]
    ]


_NEEDED = re.compile(r"\(NEEDED\).*\[(.+)\]")
