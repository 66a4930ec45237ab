"""`python -m boltzattn.selftest`: it reports what is so, and faults too."""

from __future__ import annotations

from pathlib import Path

import boltzattn
import pytest
import torch
from boltzattn import cuda_report, selftest


def test_every_server_has_a_line() -> None:
    rows = list(selftest.rows(64, (torch.float32,)))
    assert all(row.startswith("ok") for row in rows if " cpu " in row), rows
    for backend in ("cpu", "reference"):
        for method in boltzattn.METHODS:
            assert any(f"{method:<10} {backend:<10}" in row for row in rows)


def test_faults_are_seen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(selftest, "CASES", (selftest.Case(8),))
    monkeypatch.setattr(selftest, "TOLERANCE", dict.fromkeys(selftest.TOLERANCE, 0.0))
    assert selftest.main(["--length", "40"]) == 1
    assert "FAIL" in capsys.readouterr().out

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(boltzattn, "attention", broken)
    assert selftest.main(["--length", "40"]) == 1
    assert "RuntimeError: no such kernel" in capsys.readouterr().out


def test_names_of_kernels() -> None:
    assert cuda_report.readable("_ZN9boltzattn4cuda14transform_scanENS0_4WorkE") == "transform_scan"
    mangled = "_ZN9boltzattn4cuda21direct_logit_gradientI13__nv_bfloat16Lb1EEEvNS0_8GradientE"
    assert cuda_report.readable(mangled) == "direct_logit_gradient<bfloat16, true>"


def test_report_of_cuda_kernels(tmp_path: Path) -> None:
    record = tmp_path / "kernels"
    assert list(cuda_report.lines(record)) == ["CUDA kernels: not built"]
    scan = "_ZN9boltzattn4cuda14transform_scanENS0_4WorkE"
    record.write_text(f"{scan} sm_80 40 4096 0\n{scan} sm_90 32 4096 16\n")
    _, header, line = cuda_report.lines(record)
    assert header.split() == ["shared", "sm_80", "sm_90"]
    assert line.split() == ["transform_scan", "4096", "40", "32+16"]
