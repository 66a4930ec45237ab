"""`python -m boltzattn.theory` from end to end."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest


@pytest.mark.full
def test_walk_prints_tables_and_draws_figures(tmp_path):
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "boltzattn.theory", "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    # Under a minute on an idle machine; twice that leaves room for a busy one.
    assert time.monotonic() - start < 120
    figures = {p.stem for p in tmp_path.glob("*.png")}
    first = {"boltzmann", "contextual", "hardmax", "memorization", "approximation"}
    assert figures == first | {"packed", "next-token", "loops", "polynomials", "rank"}
    assert all(p.stat().st_size > 10_000 for p in tmp_path.iterdir())
    names = ("Boltzmann", "Rank-1", "Hardmax", "Memorization", "Universal", "sqrt(N)")
    for number, name in enumerate((*names, "Next tokens", "Looped", "polynomial", "Rank")):
        assert f"\n{number + 1}. " in "\n" + done.stdout
        assert name in done.stdout
    assert "n=16 |V|=60 N=1000 d=16  16000" in done.stdout
