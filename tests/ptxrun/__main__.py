"""python -m ptxrun file.ptx --list"""

import argparse
import sys

from . import load


def describe(mod):
    out = [f"target {mod.ast.target}, PTX {mod.ast.version}"]
    for name, v in mod.ast.vars.items():
        out.append(
            f"  .{v.space} {name}: {'dynamic' if v.extern and not v.size else str(v.size) + ' bytes'}"
        )
    bad = 0
    for name in mod.kernels():
        k = mod.kernel(name)
        p = k.prog
        regs = {}
        for t in p.regs:
            regs[t] = regs.get(t, 0) + 1
        out.append(
            f"kernel {name}: {len(p.instrs)} instructions, static shared {k.static_shared} bytes"
            f"{' + dynamic' if k.has_dynamic else ''}, local {p.local_size} bytes"
            + "".join(f", {d} {v}" for d, v in k.decl.directives.items())
        )
        for i, q in enumerate(p.params):
            out.append(
                f"    param {i}: .{q.type}{'[%d]' % q.size if q.is_array else ''}{' pointer' if q.ptr else ''}  {q.name}"
            )
        out.append(
            "    virtual registers: " + ", ".join(f"{c} .{t}" for t, c in sorted(regs.items()))
        )
        un = k.unsupported()
        bad += len(un)
        for _line, msg in un:
            out.append(f"    UNSUPPORTED {msg}")
    return "\n".join(out), bad


def main(argv=None):
    ap = argparse.ArgumentParser(
        prog="ptxrun", description="Inspect a PTX file for the ptxrun interpreter."
    )
    ap.add_argument("file")
    ap.add_argument(
        "--list",
        action="store_true",
        help="list kernels, parameters, registers, shared size, unsupported opcodes",
    )
    a = ap.parse_args(argv)
    with open(a.file) as f:
        text, bad = describe(load(f.read()))
    print(text)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
