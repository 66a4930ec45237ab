"""Parser details and the command line."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ptxrun
from ptxrun.parser import number, tokenize

ROOT = Path(__file__).resolve().parents[2]  # holds the package
HEAD = ".version 8.0\n.target sm_80\n.address_size 64\n"


def test_numbers():
    assert number("0x1F") == 31
    assert number("17") == 17
    assert number("0x80000000U") == 2**31
    assert number("010") == 8
    assert number("0f3F800000") == ("f32", 0x3F800000)
    assert number("0d3FF0000000000000") == (
        "f64",
        0x3FF0000000000000,
    )


def test_tokens_and_comments():
    t = tokenize("add.s32 %r1, %r2, -1; // x\n/* a\nb */ .reg.b32 q;")
    assert [x[1] for x in t[:-1]] == [
        "add.s32",
        "%r1",
        ",",
        "%r2",
        ",",
        "-",
        "1",
        ";",
        ".reg",
        ".b32",
        "q",
        ";",
    ]
    assert t[8][2] == 3


def test_scopes_shadow_registers_and_labels():
    ptx = (
        HEAD
        + """.visible .entry k(.param .u64 p) {
 .reg .u64 a; .reg .u32 r, t; ld.param.u64 a, [p]; mov.u32 t, %tid.x; mad.wide.u32 a, t, 4, a; mov.u32 r, 1;
 { .reg .u32 r; .reg .pred q; mov.u32 r, 0; L: add.u32 r, r, 1; setp.lt.u32 q, r, t; @q bra L; st.global.u32 [a], r; }
 { .reg .u32 r; .reg .pred q; mov.u32 r, 5; setp.gt.u32 q, t, 3; @q bra L; add.u32 r, r, 10; L: ld.global.u32 t, [a]; add.u32 r, r, t; st.global.u32 [a], r; }
 ld.global.u32 t, [a]; add.u32 t, t, r; st.global.u32 [a], t;
}"""
    )
    x = np.zeros(8, np.uint32)
    ptxrun.load(ptx).kernel().launch(grid=1, block=8, args=[x])
    assert x.tolist() == [max(1, t) + (5 if t > 3 else 15) + 1 for t in range(8)]


def test_brx_and_initialised_tables():
    ptx = (
        HEAD
        + """.global .u32 one[2] = {10, 20};
.global .align 8 .u64 tab[2] = {one, generic(one)+4};
.visible .entry k(.param .u64 p) {
 .reg .u64 a, b; .reg .u32 r, t; ld.param.u64 a, [p]; mov.u32 t, %tid.x; mad.wide.u32 a, t, 4, a;
 T: .branchtargets X, Y, Z;
 and.b32 r, t, 1; mov.u64 b, tab; mad.wide.u32 b, r, 8, b; ld.global.u64 b, [b]; ld.global.u32 r, [b];
 rem.u32 t, t, 3; brx.idx t, T;
 X: add.u32 r, r, 1; bra E;
 Y: add.u32 r, r, 2; bra E;
 Z: add.u32 r, r, 3;
 E: st.global.u32 [a], r; ret;
}"""
    )
    x = np.zeros(12, np.uint32)
    ptxrun.load(ptx).kernel().launch(grid=1, block=12, args=[x])
    assert x.tolist() == [10 + 10 * (t & 1) + t % 3 + 1 for t in range(12)]


def test_errors_name_the_line():
    with pytest.raises(ptxrun.PtxParseError, match="line 4"):
        ptxrun.load(HEAD + ".bogus x;")
    m = ptxrun.load(HEAD + ".visible .entry k() {\n .reg .b32 r;\n frobnicate.b32 r, r;\n ret;\n}")
    with pytest.raises(ptxrun.UnsupportedError, match=r"PTX line 6.*frobnicate\.b32"):
        m.kernel().launch(grid=1, block=32)
    m = ptxrun.load(HEAD + ".visible .entry k() {\n .reg .f32 r;\n add.weird.f32 r, r, r;\n}")
    with pytest.raises(ptxrun.UnsupportedError, match=r"modifier \.weird"):
        m.kernel().launch(grid=1, block=32)


def test_determinism_and_cta_order():
    ptx = (
        HEAD
        + """.visible .entry k(.param .u64 p, .param .u64 c) {
 .reg .u64 a, b; .reg .u32 r, t; ld.param.u64 a, [p]; ld.param.u64 b, [c]; atom.global.add.u32 r, [b], 1; mov.u32 t, %ctaid.x; mad.wide.u32 a, t, 4, a;
 st.global.u32 [a], r; ret; }"""
    )
    k = ptxrun.load(ptx).kernel()

    def go(**kw):
        x, c = np.zeros(16, np.uint32), np.zeros(1, np.uint32)
        k.launch(grid=16, block=1, args=[x, c], **kw)
        return x.tolist()

    assert go(order="linear") == list(range(16))
    assert go(seed=1) == go(seed=1) != go(seed=2)
    assert sorted(go(seed=2)) == list(range(16))


def test_cli(tmp_path):
    f = tmp_path / "a.ptx"
    f.write_text(
        HEAD
        + ".visible .entry foo(.param .u64 .ptr .global .align 4 x, .param .f32 s) .reqntid 64 {\n .reg .b32 r<3>; .shared .align 4 .b8 sm[100];\n"
        " mov.u32 r0, sm; frob.b32 r1, r0;\n ret;\n}"
    )
    r = subprocess.run(
        [sys.executable, "-m", "ptxrun", str(f), "--list"], capture_output=True, text=True, cwd=ROOT
    )
    assert r.returncode == 1
    assert "kernel foo" in r.stdout
    assert "static shared 100 bytes" in r.stdout
    assert "param 1: .f32" in r.stdout
    assert "UNSUPPORTED PTX line 6" in r.stdout
    assert "frob.b32" in r.stdout
