"""PTX tokenizer and parser.

A module is scanned once for declarations; function bodies are kept as token ranges and
parsed on demand by `parse_kernel`, which inlines every direct call (so one flat
instruction list with unique register numbers is what the interpreter sees).
"""

import re
import struct
from dataclasses import dataclass, field

from .errors import PtxParseError, UnsupportedError

_TOK = re.compile(
    r"""
    (?P<ws>[ \t\r\f]+|//[^\n]*) | (?P<nl>\n) | (?P<cm>/\*.*?\*/)
  | (?P<str>"(?:[^"\\]|\\.)*")
  | (?P<num>0[fF][0-9a-fA-F]{8}(?![0-9a-fA-F])|0[dD][0-9a-fA-F]{16}|0[xX][0-9a-fA-F]+U?|0[bB][01]+U?
      |\d+\.\d*(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+|\d+U?)
  | (?P<word>[.%$_A-Za-z](?:[\w$.]|::)*)
  | (?P<p>[\[\]{}()<>,;:@!|+\-=*&~?/^])
""",
    re.X | re.S,
)

SIZES = {
    "pred": 0,
    "b8": 1,
    "u8": 1,
    "s8": 1,
    "b16": 2,
    "u16": 2,
    "s16": 2,
    "f16": 2,
    "bf16": 2,
    "b32": 4,
    "u32": 4,
    "s32": 4,
    "f32": 4,
    "tf32": 4,
    "f16x2": 4,
    "bf16x2": 4,
    "b64": 8,
    "u64": 8,
    "s64": 8,
    "f64": 8,
    "b128": 16,
}
SPACES = ("global", "shared", "local", "param", "const")


@dataclass(frozen=True)
class Reg:
    idx: int
    type: str
    name: str


@dataclass(frozen=True)
class Imm:
    value: object  # int, or ('f32', bits) / ('f64', bits)


@dataclass(frozen=True)
class Special:
    name: str


@dataclass
class Var:
    name: str
    space: str  # global const shared local param
    type: str
    align: int
    size: int  # bytes; 0 for extern arrays
    extern: bool = False
    init: object = None
    addr: int = None  # assigned later
    is_array: bool = False
    ptr: bool = False
    fixups: list = field(default_factory=list)  # (byte offset, symbol, addend) in init


@dataclass(frozen=True)
class Sym:
    var: Var
    off: int = 0


@dataclass(frozen=True)
class Mem:
    base: object  # Reg, Sym, None
    off: int


@dataclass(frozen=True)
class Vec:
    items: tuple


@dataclass(frozen=True)
class Pair:  # d|p
    a: object
    b: object


@dataclass(frozen=True)
class Not:
    a: object


@dataclass(frozen=True)
class Label:
    name: str


SINK = Label("_")


@dataclass
class Instr:
    op: str
    mods: tuple
    args: list
    guard: object  # None or (Reg, negated)
    line: int
    text: str
    target: object = None  # branch target pc(s)
    pc: int = -1
    src: str = ""  # source position from .loc, 'file:line'
    caller: str = ""  # where the function was called that `src` is in, if it was inlined

    @property
    def opcode(self):
        return ".".join((self.op, *self.mods))


@dataclass
class FuncDecl:
    name: str
    entry: bool
    params: list
    rets: list
    body: tuple = None  # token range
    directives: dict = field(default_factory=dict)


@dataclass
class Program:
    """A kernel with every call inlined."""

    name: str
    instrs: list
    regs: list  # register types by index
    params: list
    shared: list
    local_size: int


def tokenize(text):
    toks, line, pos, n = [], 1, 0, len(text)
    match = _TOK.match
    while pos < n:
        m = match(text, pos)
        if not m:
            raise PtxParseError(f"line {line}: cannot tokenize {text[pos : pos + 30]!r}")
        k = m.lastgroup
        pos = m.end()
        if k == "ws":
            continue
        if k == "nl":
            line += 1
        elif k == "cm":
            line += m.group().count("\n")
        else:
            v = m.group()
            if v[0] == "." and "." in v[1:]:  # `.reg.b32` is two directives
                toks.extend(("word", "." + x, line) for x in v.split(".")[1:])
                continue
            toks.append((k, v, line))
            if k == "str":
                line += v.count("\n")
    toks.append(("eof", "", line))
    return toks


def number(v):
    """Immediate token -> int or (type, bits)."""
    if v[:2] in ("0f", "0F"):
        return ("f32", int(v[2:], 16))
    if v[:2] in ("0d", "0D"):
        return ("f64", int(v[2:], 16))
    if "." in v or (("e" in v or "E" in v) and v[:2].lower() != "0x"):
        return ("f64", struct.unpack("<Q", struct.pack("<d", float(v)))[0])
    v = v.rstrip("U")
    if v[:2].lower() == "0x":
        return int(v, 16)
    if v[:2].lower() == "0b":
        return int(v, 2)
    if len(v) > 1 and v[0] == "0":
        return int(v, 8)
    return int(v)


class Module:
    """Result of parsing: module-scope variables and functions."""

    def __init__(self, text):
        self.lines = text.split("\n")
        self.toks = tokenize(text)
        self.vars = {}
        self.funcs = {}
        self.target = ""
        self.version = ""
        self.files = {}  # .file directives
        self._scan()

    # ---- token helpers -------------------------------------------------
    def err(self, i, msg):
        _k, v, line = self.toks[i]
        src = self.lines[line - 1].strip() if line <= len(self.lines) else ""
        raise PtxParseError(f"PTX line {line}: {msg} (at {v!r}) in `{src}`")

    def expect(self, i, v):
        if self.toks[i][1] != v:
            self.err(i, f"expected {v!r}")
        return i + 1

    def skip_line(self, i):
        line = self.toks[i][2]
        while self.toks[i][2] == line and self.toks[i][0] != "eof":
            i += 1
        return i

    def match_brace(self, i):
        """i at '{' -> index just after the matching '}'."""
        d = 0
        while True:
            v = self.toks[i][1]
            if v == "{":
                d += 1
            elif v == "}":
                d -= 1
                if d == 0:
                    return i + 1
            elif self.toks[i][0] == "eof":
                self.err(i, "unbalanced braces")
            i += 1

    # ---- module scope --------------------------------------------------
    def _scan(self):
        t, i = self.toks, 0
        while t[i][0] != "eof":
            v = t[i][1]
            if v == ".version":
                self.version = t[i + 1][1]
                i = self.skip_line(i)
            elif v == ".target":
                self.target = t[i + 1][1]
                i = self.skip_line(i)
            elif v == ".file":
                self.files[number(t[i + 1][1])] = t[i + 2][1].strip('"').rsplit("/", 1)[-1]
                i = self.skip_line(i)
            elif v in (".address_size", ".loc"):
                i = self.skip_line(i)
            elif v == ".section":
                while t[i][1] != "{":
                    i += 1
                i = self.match_brace(i)
            elif v == ".pragma":
                while t[i][1] != ";":
                    i += 1
                i += 1
            elif v in (".visible", ".weak", ".extern", ".common"):
                j = i
                while t[j][1] in (".visible", ".weak", ".extern", ".common"):
                    j += 1
                if t[j][1] in (".entry", ".func"):
                    i = self._func(j)
                else:
                    i = self._var_stmt(j, self.vars, extern=".extern" in [x[1] for x in t[i:j]])
            elif v in (".entry", ".func"):
                i = self._func(i)
            elif v in (".global", ".const", ".shared"):
                i = self._var_stmt(i, self.vars)
            elif v == ".alias":
                while t[i][1] != ";":
                    i += 1
                i += 1
            elif v == ";":
                i += 1
            else:
                self.err(i, "unknown module-scope directive")

    def _func(self, i):
        t = self.toks
        entry = t[i][1] == ".entry"
        i += 1
        while t[i][1] in (".noreturn",) or t[i][1].startswith(".attribute"):
            i += 1
        rets = []
        if t[i][1] == "(":
            i, rets = self._params(i)
        name = t[i][1]
        i += 1
        params = []
        if t[i][1] == "(":
            i, params = self._params(i)
        d = {}
        while t[i][1] not in ("{", ";"):
            if t[i][0] == "word" and t[i][1].startswith("."):
                key, vals = t[i][1][1:], []
                i += 1
                while t[i][0] == "num" or t[i][1] == ",":
                    if t[i][0] == "num":
                        vals.append(number(t[i][1]))
                    i += 1
                d[key] = vals
            else:
                i += 1
        f = FuncDecl(name, entry, params, rets, None, d)
        if t[i][1] == "{":
            e = self.match_brace(i)
            f.body = (i, e)
            i = e
        else:
            i += 1
        old = self.funcs.get(name)
        if old is None or old.body is None:
            self.funcs[name] = f
        return i

    def _params(self, i):
        t, out = self.toks, []
        i = self.expect(i, "(")
        while t[i][1] != ")":
            space = t[i][1][1:]
            if space not in ("param", "reg"):
                self.err(i, "expected .param")
            i, v = self._decl(i + 1, space)
            out.append(v[0])
            if t[i][1] == ",":
                i += 1
        return i + 1, out

    def _decl(self, i, space, extern=False):
        """After the space keyword: [.align n] [.vN] .type [.ptr ...] name[dims] [= init] {, name...}"""
        t = self.toks
        align, typ, vec, ptr = None, None, 1, False
        while t[i][0] == "word" and t[i][1].startswith("."):
            w = t[i][1][1:]
            if w == "align":
                a = number(t[i + 1][1])
                if not ptr:
                    align = a
                i += 2
                continue
            if w in ("v2", "v4"):
                vec = int(w[1])
            elif w == "ptr":
                ptr = True
            elif w in SIZES:
                typ = w
            elif w in SPACES or w.startswith("shared") or w in ("managed", "unified", "attribute"):
                pass
            else:
                self.err(i, f"unknown declaration qualifier .{w}")
            i += 1
        out = []
        esz = SIZES[typ] * vec
        while True:
            if t[i][0] != "word":
                self.err(i, "expected a name")
            name = t[i][1]
            i += 1
            if t[i][1] == "<":
                cnt = number(t[i + 1][1])
                i = self.expect(i + 2, ">")
                out.append((name, cnt, typ))
            else:
                count, arr = 1, False
                while t[i][1] == "[":
                    arr = True
                    if t[i + 1][1] == "]":
                        count, i = 0, i + 2
                    else:
                        count *= number(t[i + 1][1])
                        i = self.expect(i + 2, "]")
                v = Var(
                    name,
                    space,
                    typ,
                    align or max(esz, 1),
                    esz * count,
                    extern=extern or (arr and count == 0),
                    is_array=arr,
                    ptr=ptr,
                )
                if t[i][1] == "=":
                    i, v.init, v.fixups = self._init(i + 1, esz, typ)
                    if v.size == 0:
                        v.size, v.extern = len(v.init), False
                out.append(v)
            # a comma continues the list except inside a parameter list (next token is .param/.reg)
            if t[i][1] == "," and not t[i + 1][1].startswith("."):
                i += 1
                continue
            return i, out

    def _init(self, i, esz, typ):
        t, vals = self.toks, []
        depth = 0
        while True:
            k, v, _ = t[i]
            if v == "{":
                depth += 1
            elif v == "}":
                depth -= 1
            elif k == "num":
                x = number(v)
                vals.append(-x if t[i - 1][1] == "-" and isinstance(x, int) else x)
            elif (
                v == "+"
                and vals
                and isinstance(vals[-1], tuple)
                and vals[-1][0] == "sym"
                and t[i + 1][0] == "num"
            ):
                vals[-1] = ("sym", vals[-1][1], vals[-1][2] + number(t[i + 1][1]))
                i += 1
            elif v in (",", "-", "(", ")") or v == "generic":
                pass
            elif k == "word":
                vals.append(("sym", v, 0))
            else:
                self.err(i, "unsupported initializer")
            i += 1
            if depth == 0 and t[i][1] in (";", ","):
                break
        out, fix = bytearray(), []
        for x in vals:
            if isinstance(x, tuple):
                if x[0] == "sym":
                    if esz != 8:
                        raise UnsupportedError(
                            f"PTX line {t[i][2]}: {esz}-byte symbol address `{x[1]}` in an initializer"
                        )
                    fix.append((len(out), x[1], x[2]))
                    out += bytes(8)
                    continue
                bits = x[1]
                if x[0] == "f64" and typ == "f32":
                    bits = struct.unpack(
                        "<I", struct.pack("<f", struct.unpack("<d", struct.pack("<Q", bits))[0])
                    )[0]
            else:
                bits = x
            out += (bits & ((1 << (8 * esz)) - 1)).to_bytes(esz, "little")
        return i, bytes(out), fix

    def _var_stmt(self, i, table, extern=False):
        space = self.toks[i][1][1:]
        i, vs = self._decl(i + 1, space, extern)
        for v in vs:
            old = table.get(v.name)
            if old is None or old.extern:
                table[v.name] = v
        return self.expect(i, ";")

    # ---- kernels -------------------------------------------------------
    def entries(self):
        return [f for f in self.funcs.values() if f.entry and f.body]

    def parse_kernel(self, name):
        return _Body(self, self.funcs[name]).run()


class _Body:
    def __init__(self, mod, func):
        self.m, self.f = mod, func
        self.instrs, self.regs = [], []
        self.shared, self.local = [], 0
        self.fshared = {}  # (function, name) -> Var
        self.shared_seen = set()
        self.uid = 0
        self.loc = self.caller = ""
        self.labels = {}
        self.tables = {}

    def run(self):
        top = {}
        off = 0
        for p in self.f.params:
            p.space = "param"
            off = -(-off // p.align) * p.align
            p.addr = off
            off += p.size
            top[p.name] = ("sym", p)
        self.scopes = [top]
        self.body(self.f, None)
        self.emit(Instr("exit", (), [], None, self.m.toks[self.f.body[1] - 1][2], "}"))
        self.resolve()
        return Program(
            self.f.name,
            self.instrs,
            self.regs,
            self.f.params,
            self.shared,
            -(-self.local // 16) * 16,
        )

    def emit(self, ins):
        ins.src, ins.caller = self.loc, self.caller
        self.instrs.append(ins)

    def new_reg(self, typ, name):
        self.regs.append(typ)
        return Reg(len(self.regs) - 1, typ, name)

    def resolve(self):
        for ins in self.instrs:
            if ins.op == "bra":
                lab = ins.args[0].name
                if lab not in self.labels:
                    raise PtxParseError(f"PTX line {ins.line}: undefined label {lab}")
                ins.target = self.labels[lab]
            elif ins.op == "brx":
                ins.target = [self.labels[x] for x in self.tables[ins.args[1].name]]

    def lookup(self, name):
        for s in reversed(self.scopes):
            e = s.get(name)
            if e is not None:
                return e
            pool = s.get("\0pools")
            if pool:
                j = len(name)
                while j > 0 and name[j - 1].isdigit():
                    j -= 1
                # parameterised names: %r<55> declares %r0..%r54
                for cut in range(j, len(name)):
                    pr = pool.get(name[:cut])
                    if pr and int(name[cut:]) < pr[0]:
                        e = ("reg", self.new_reg(pr[1], name))
                        s[name] = e
                        return e
        return None

    def alloc_local(self, v):
        self.local = -(-self.local // v.align) * v.align
        v.addr = self.local
        self.local += max(v.size, 1)

    def declare(self, i, func):
        t = self.m.toks
        space = t[i][1][1:]
        i, items = self.m._decl(i + 1, space)
        sc = self.scopes[-1]
        for v in items:
            if isinstance(v, tuple):
                sc.setdefault("\0pools", {})[v[0]] = (v[1], v[2])
            elif space == "reg":
                sc[v.name] = ("reg", self.new_reg(v.type, v.name))
            elif space == "shared":
                key = (func.name, v.name, t[i][2])
                if key not in self.fshared:
                    self.fshared[key] = v
                    self.shared.append(v)
                sc[v.name] = ("sym", self.fshared[key])
            elif space in ("local", "param"):
                v.space = "local"
                self.alloc_local(v)
                sc[v.name] = ("sym", v)
            else:  # .global / .const inside a function: module lifetime
                key = f"{func.name}::{v.name}"
                self.m.vars.setdefault(key, v)
                sc[v.name] = ("sym", self.m.vars[key])
        return self.m.expect(i, ";")

    def body(self, func, ret_label, depth=0):
        if depth > 32:
            raise UnsupportedError(f"recursive call of {func.name}")
        m, t = self.m, self.m.toks
        i, end = func.body
        self.uid += 1
        prefix = f"{self.uid}:"
        base_depth = len(self.scopes)
        label_scopes = []
        while i < end:
            k, v, _line = t[i]
            if v == "{":
                self.scopes.append({})
                label_scopes.append(prefix)
                i += 1
            elif v == "}":
                self.scopes.pop()
                label_scopes.pop()
                i += 1
            elif v == ";":
                i += 1
            elif v in (".loc", ".file"):
                if v == ".loc":
                    f = number(t[i + 1][1])
                    self.loc = f"{m.files.get(f, f)}:{t[i + 2][1]}"
                after = m.skip_line(i)
                words = [word for _, word, *_ in t[i:after]]
                if v == ".loc":
                    self.caller = ""
                    if "inlined_at" in words:
                        f, line = words[words.index("inlined_at") + 1 :][:2]
                        self.caller = f"{m.files.get(number(f), f)}:{line}"
                i = after
            elif v == ".pragma":
                while t[i][1] != ";":
                    i += 1
                i += 1
            elif v in (".reg", ".local", ".shared", ".param", ".global", ".const"):
                i = self.declare(i, func)
            elif k == "word" and t[i + 1][1] == ":":
                # labels live in their brace scope: an inner scope may reuse a name
                key = self.label_key(prefix, v, define=True)
                i += 2
                if t[i][1] in (".branchtargets", ".calltargets", ".callprototype"):
                    kind = t[i][1]
                    i += 1
                    names = []
                    while t[i][1] != ";":
                        if t[i][0] == "word":
                            names.append(t[i][1])
                        i += 1
                    if kind == ".branchtargets":
                        self.tables[key] = [prefix + x for x in names]
                else:
                    self.labels[key] = len(self.instrs)
            elif k == "word" and v[0] == ".":
                m.err(i, "unknown directive in a function body")
            elif k in ("word", "p"):
                i = self.instr(i, func, prefix, ret_label, depth)
            else:
                m.err(i, "unexpected token in a function body")
        if len(self.scopes) != base_depth:
            m.err(i - 1, "unbalanced scopes")

    def label_key(self, prefix, name, define=False):
        """Labels declared in nested scopes are unique per scope instance."""
        if define and len(self.scopes) > 2:
            self.uid += 1
            key = f"{prefix}{name}#{self.uid}"
            pend = self.scopes[-1].setdefault("\0lab", {})
            pend[name] = key
            for ins in self.scopes[-1].get("\0pend", {}).pop(name, []):
                ins.args[-1] = Label(key)
            self.labels[prefix + name] = len(self.instrs)
            return key
        if not define:
            for s in reversed(self.scopes):
                d = s.get("\0lab")
                if d and name in d:
                    return d[name]
        return prefix + name

    def instr(self, i, func, prefix, ret_label, depth):
        m, t = self.m, self.m.toks
        line = t[i][2]
        guard = None
        if t[i][1] == "@":
            neg = t[i + 1][1] == "!"
            i += 2 if neg else 1
            e = self.lookup(t[i][1])
            if not e:
                m.err(i, "unknown predicate")
            guard = (e[1], neg)
            i += 1
        if t[i][0] != "word":
            m.err(i, "expected an opcode")
        parts = t[i][1].split(".")
        op, mods = parts[0], tuple(parts[1:])
        i += 1
        if op == "call":
            return self.call(i, guard, line, func, prefix, depth)
        args = []
        isbr = op in ("bra", "brx")
        while t[i][1] != ";":
            if t[i][1] == ",":
                i += 1
                continue
            if isbr and t[i][0] == "word" and self.lookup(t[i][1]) is None:
                a = Label(self.label_key(prefix, t[i][1]))
                raw = t[i][1]
                i += 1
            else:
                i, a = self.operand(i)
            args.append(a)
        text = m.lines[line - 1].strip() if line <= len(m.lines) else op
        ins = Instr(op, mods, args, guard, line, text.split("//")[0].strip()[:160])
        if op == "ret" and ret_label is not None:
            ins = Instr("bra", (), [Label(ret_label)], guard, line, ins.text)
        elif op == "ret":
            ins = Instr("exit", (), [], guard, line, ins.text)
        elif op == "bra" and len(self.scopes) > 2:
            # the label may be defined later in this same inner scope
            self.scopes[-1].setdefault("\0pend", {}).setdefault(raw, []).append(ins)
        self.emit(ins)
        return i + 1

    def operand(self, i):
        m, t = self.m, self.m.toks
        k, v, line = t[i]
        if v == "{":
            items = []
            i += 1
            while t[i][1] != "}":
                if t[i][1] == ",":
                    i += 1
                    continue
                i, a = self.operand(i)
                items.append(a)
            return i + 1, Vec(tuple(items))
        if v == "[":
            i += 1
            base, off, sign = None, 0, 1
            while t[i][1] != "]":
                k, v, _ = t[i]
                if v == "+":
                    pass
                elif v == "-":
                    sign = -sign
                elif k == "num":
                    x = number(v)
                    off += sign * x
                    sign = 1
                elif k == "word":
                    j, a = self.atom(i)
                    base, i = a, j
                    continue
                else:
                    raise UnsupportedError(
                        f"PTX line {line}: address expression `{m.lines[line - 1].strip()}`"
                    )
                i += 1
            return i + 1, Mem(base, off)
        if v == "!":
            i, a = self.operand(i + 1)
            return i, Not(a)
        if v == "-":
            x = number(t[i + 1][1])
            if isinstance(x, tuple):
                bit = 31 if x[0] == "f32" else 63
                x = (x[0], x[1] ^ (1 << bit))
            else:
                x = -x
            return i + 2, Imm(x)
        if k == "num":
            return i + 1, Imm(number(v))
        if k == "word":
            i, a = self.atom(i)
            if t[i][1] == "|":
                i, b = self.operand(i + 1)
                return i, Pair(a, b)
            if isinstance(a, Sym) and t[i][1] in "+-" and t[i + 1][0] == "num":
                d = number(t[i + 1][1])
                return i + 2, Sym(a.var, a.off + (d if t[i][1] == "+" else -d))
            return i, a
        m.err(i, "cannot parse operand")

    def atom(self, i):
        m, t = self.m, self.m.toks
        v = t[i][1]
        if v == "_":
            return i + 1, SINK
        e = self.lookup(v)
        if e:
            return i + 1, (e[1] if e[0] == "reg" else Sym(e[1]))
        if v.startswith("%"):
            return i + 1, Special(v)
        if v in m.vars:
            var = m.vars[v]
            if var.space == "shared" and var.name not in self.shared_seen:
                self.shared_seen.add(var.name)
                self.shared.append(var)
            return i + 1, Sym(var)
        if v == "WARP_SZ":
            return i + 1, Imm(32)
        if v in m.funcs:
            return i + 1, Label("&" + v)
        return i + 1, Label(v)

    # ---- calls are inlined ----------------------------------------------
    def call(self, i, guard, line, func, prefix, depth):
        m, t = self.m, self.m.toks
        groups, cur, callee = [], None, None
        while t[i][1] != ";":
            v = t[i][1]
            if v == "(":
                cur = []
                i += 1
            elif v == ")":
                groups.append((callee is None, cur))
                cur = None
                i += 1
            elif v == ",":
                i += 1
            elif cur is None:
                if callee is None:
                    callee = v
                i += 1
            else:
                i, a = self.operand(i)
                cur.append(a)
        rets = next((g for before, g in groups if before), [])
        args = next((g for before, g in groups if not before), [])
        text = f"call {callee}"
        f = m.funcs.get(callee)
        if f is None or f.body is None:
            ins = Instr("call", (callee,), rets + args, guard, line, text)
            self.emit(ins)
            return i + 1
        self.uid += 1
        ret_label = f"ret{self.uid}"
        if guard is not None:
            self.emit(Instr("bra", (), [Label(ret_label)], (guard[0], not guard[1]), line, text))
        scope = {}
        for formal, actual in list(zip(f.rets, rets, strict=False)) + list(
            zip(f.params, args, strict=False)
        ):
            if isinstance(actual, Sym):
                scope[formal.name] = ("sym", actual.var)
            elif isinstance(actual, Reg):
                if formal.space == "reg":
                    scope[formal.name] = ("reg", actual)
                else:
                    v = Var(formal.name, "local", formal.type, formal.align, formal.size)
                    self.alloc_local(v)
                    scope[formal.name] = ("sym", v)
                    if formal in f.params:
                        self.emit(
                            Instr(
                                "st",
                                ("local", "b%d" % (8 * formal.size)),
                                [Mem(Sym(v), 0), actual],
                                None,
                                line,
                                text,
                            )
                        )
            else:
                raise UnsupportedError(f"PTX line {line}: call argument {actual}")
        saved = self.scopes
        self.scopes = [scope]
        self.body(f, ret_label, depth + 1)
        self.scopes = saved
        self.labels[ret_label] = len(self.instrs)
        return i + 1
