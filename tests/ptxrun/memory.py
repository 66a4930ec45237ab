"""Address spaces, bounds checking and the shared-memory race detector."""

import ctypes

import numpy as np

from .errors import MemoryFault, PtxError

WINDOW_SIZE = 1 << 40
# generic address = window base + offset in the space; global and const are identity mapped
WINDOW = {"shared": 1 << 40, "local": 2 << 40, "param": 3 << 40}
GLOBAL_BASE = 0x7F00_0000_0000
GUARD = 256
UINT = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def _raw(ptr, nbytes):
    return (
        np.frombuffer((ctypes.c_uint8 * nbytes).from_address(ptr), np.uint8)
        if nbytes
        else np.zeros(0, np.uint8)
    )


class Buffer:
    """A host array seen as raw memory: [ptr, ptr + nbytes) plus the exact bytes its elements cover."""

    def __init__(self, obj, label):
        self.obj, self.label = obj, label
        if hasattr(obj, "data_ptr"):  # torch tensor
            if obj.device.type != "cpu":
                raise PtxError(f"argument {label}: tensor must be on the CPU")
            isz = obj.element_size()
            self.shape, self.strides = tuple(obj.shape), tuple(s * isz for s in obj.stride())
            self.ptr, self.isz = obj.data_ptr(), isz
            self.root = self.ptr - obj.storage_offset() * isz
            self.writable = True
        else:
            self.shape, self.strides, self.isz = obj.shape, obj.strides, obj.itemsize
            self.ptr = obj.__array_interface__["data"][0]
            base = obj
            while isinstance(base.base, np.ndarray):
                base = base.base
            self.root = base.__array_interface__["data"][0]
            self.writable = obj.flags.writeable
        empty = 0 in self.shape
        lo = (
            sum(min(0, (n - 1) * st) for n, st in zip(self.shape, self.strides, strict=False))
            if not empty
            else 0
        )
        hi = (
            sum(max(0, (n - 1) * st) for n, st in zip(self.shape, self.strides, strict=False))
            + self.isz
            if not empty
            else 0
        )
        self.lo, self.hi = self.ptr + lo, self.ptr + hi

    def mark(self, valid, off):
        """Set valid[...] for every byte of every element; off is the arena offset of self.ptr."""
        if 0 in self.shape:
            return
        contiguous, want = True, self.isz
        for n, st in zip(reversed(self.shape), reversed(self.strides), strict=False):
            if n != 1 and st != want:
                contiguous = False
            want *= n
        if contiguous:
            valid[off : off + want] = 1
            return
        v = np.lib.stride_tricks.as_strided(
            valid[off:], (*self.shape, self.isz), (*self.strides, 1)
        )
        v[...] = 1


class Arena:
    """All global/const memory of a launch in one byte array, with a validity byte per byte."""

    def __init__(self, module_vars, buffers):
        self.segs = []  # (start, end, label) arena offsets
        self.copy = []
        pos = GUARD
        for v, store in module_vars:
            pos = -(-pos // max(v.align, 16)) * max(v.align, 16)
            assert GLOBAL_BASE + pos == v.addr
            self.segs.append((pos, pos + v.size, f"{v.space} variable {v.name}"))
            self.copy.append((pos, store))
            pos += v.size + GUARD
        groups = []  # merge overlapping host ranges (aliased views)
        for b in sorted(buffers, key=lambda b: b.lo):
            if groups and b.lo < groups[-1][1]:
                groups[-1][1] = max(groups[-1][1], b.hi)
                groups[-1][2].append(b)
            else:
                groups.append([b.lo, b.hi, [b]])
        self.addr = {}
        marks = []
        for lo, hi, bs in groups:
            # keep the alignment the view has relative to its root allocation (assumed 256-aligned)
            pos = -(-pos // 256) * 256 + (lo - bs[0].root) % 256
            for b in bs:
                self.addr[id(b)] = GLOBAL_BASE + pos + (b.ptr - lo)
                marks.append((b, pos + (b.ptr - lo)))
            self.segs.append((pos, pos + (hi - lo), " / ".join(b.label for b in bs)))
            self.copy.append((pos, (_raw(lo, hi - lo), bs)))
            pos += hi - lo + GUARD
        size = -(-(pos + GUARD) // 256) * 256
        self.size = size
        self.data = np.zeros(size, np.uint8)
        self.valid = np.zeros(size, np.uint8)
        for a, b, _ in self.segs[: len(module_vars)]:
            self.valid[a:b] = 1
        for b, off in marks:
            b.mark(self.valid, off)
        for off, st in self.copy:
            raw = st[0] if isinstance(st, tuple) else st
            self.data[off : off + len(raw)] = raw
        self.views = {k: self.data.view(UINT[k]) for k in UINT}

    def write_back(self):
        for off, st in self.copy:
            if isinstance(st, tuple):
                raw, bs = st
                new = self.data[off : off + len(raw)]
                if all(b.writable for b in bs):
                    raw[...] = new
                elif not np.array_equal(raw, new):
                    raise PtxError(f"kernel wrote to read-only array {bs[0].label}")
            else:
                st[...] = self.data[off : off + len(st)]

    def where(self, addr):
        off = addr - GLOBAL_BASE
        if addr < 4096:
            return "null pointer"
        best = min(self.segs, key=lambda s: max(s[0] - off, off - s[1] + 1), default=None)
        if best is None:
            return "no buffer"
        a, b, lab = best
        if a <= off < b:
            return f"inside {lab} at byte {off - a} of {b - a}, but not on one of its elements"
        d = f"{off - b} bytes past the end of" if off >= b else f"{a - off} bytes before"
        return f"{d} {lab} ({b - a} bytes)"


def fault(s, ins, lanes, addr, bad, nbytes, space, why):
    k = int(np.flatnonzero(bad)[0])
    t = int(lanes[k])
    a = int(addr[k])
    bx, by, _ = s.block
    tid = (t % bx, t // bx % by, t // (bx * by))
    raise MemoryFault(
        f"{s.name}: {why} {nbytes}-byte {space} access at PTX line {ins.line} `{ins.text}`"
        f"{f' ({ins.src})' if ins.src else ''}: "
        f"CTA {s.cta}, thread {tid}, address 0x{a:x}"
        + (
            f" ({s.arena.where(a)})"
            if space == "global"
            else f" ({space} size {s.space_size(space)} bytes)"
        )
        + f"; {int(bad.sum())} thread(s) affected"
    )


def global_off(s, ins, lanes, addr, nb):
    off = addr - np.uint64(GLOBAL_BASE)
    bad = off >= np.uint64(s.arena.size - 64)
    if np.count_nonzero(bad):
        fault(s, ins, lanes, addr, bad, nb, "global", "out-of-bounds")
    off = off.view(np.int64)
    if nb > 1 and np.count_nonzero(off & (nb - 1)):
        fault(s, ins, lanes, addr, (off & (nb - 1)) != 0, nb, "global", "misaligned")
    v = s.arena.valid
    ok = v[off] & v[off + (nb - 1)]
    if np.count_nonzero(ok) != len(ok):
        fault(s, ins, lanes, addr, ok == 0, nb, "global", "out-of-bounds")
    return off


def shared_off(s, ins, lanes, addr, nb):
    off = addr.astype(np.int64)
    bad = (off < 0) | (off > s.smem_size - nb)
    if np.count_nonzero(bad):
        fault(s, ins, lanes, addr, bad, nb, "shared", "out-of-bounds")
    if nb > 1 and np.count_nonzero(off & (nb - 1)):
        fault(s, ins, lanes, addr, (off & (nb - 1)) != 0, nb, "shared", "misaligned")
    if s.smem_valid is not None:
        ok = s.smem_valid[off] & s.smem_valid[off + (nb - 1)]
        if np.count_nonzero(ok) != len(ok):
            fault(s, ins, lanes, addr, ~ok, nb, "shared", "out-of-bounds")
    return off


def local_off(s, ins, lanes, addr, nb):
    off = addr.astype(np.int64)
    bad = (off < 0) | (off > s.local_size - nb)
    if np.count_nonzero(bad):
        fault(s, ins, lanes, addr, bad, nb, "local", "out-of-bounds")
    if nb > 1 and np.count_nonzero(off & (nb - 1)):
        fault(s, ins, lanes, addr, (off & (nb - 1)) != 0, nb, "local", "misaligned")
    return off + lanes * s.local_size


class Race:
    """Happens-before race detector for shared memory.

    One vector clock per warp, advanced by CTA barriers; a per-warp epoch advanced by every warp-level
    `*.sync` (or by barriers alone) orders accesses of different lanes of one warp. State is kept per granule (the narrowest
    shared access of the kernel, at most 4 bytes).
    """

    def __init__(self, nbytes, gran, nwarps, state, intra, uninit):
        n = nbytes // gran + 1
        self.g, self.nw, self.s, self.intra, self.uninit = gran, nwarps, state, intra, uninit
        self.vc = np.zeros((nwarps, nwarps + 1), np.int32)  # last column: thread -1 (never)
        self.vc[np.arange(nwarps), np.arange(nwarps)] = 1
        self.ep = np.zeros(nwarps, np.int32)
        self.wclk = np.zeros(n, np.int32)
        self.wthr = np.full(n, -1, np.int32)
        self.wep = np.zeros(n, np.int32)
        self.wpc = np.zeros(n, np.int32)
        self.watom = np.zeros(n, bool)
        self.rclk = np.zeros((nwarps, n), np.int32)
        self.rthr = np.full((nwarps, n), -1, np.int32)
        self.rep = np.zeros((nwarps, n), np.int32)
        self.rpc = np.zeros((nwarps, n), np.int32)
        self.init = np.zeros(n, bool)
        self.flight = np.full(n, -1, np.int32)  # pc of a cp.async still in flight
        self.pos = np.zeros(n, np.int64)

    def barrier(self, warps):
        v = self.vc[warps].max(0)
        self.vc[warps] = v
        self.vc[warps, warps] += 1
        self.ep[warps] += 1

    def warp_sync(self, warps):
        self.ep[warps] += 1

    def granules(self, off, nb, lanes):
        k = max(nb // self.g, 1)
        idx = (off // self.g)[:, None] + np.arange(k)
        return idx.reshape(-1), np.repeat(lanes, k)

    def read(self, off, nb, lanes, pc, atomic=False):
        idx, ln = self.granules(off, nb, lanes)
        wp = ln >> 5
        wt = self.wthr[idx]
        ww = wt >> 5
        wc = self.wclk[idx]
        other = ww != wp
        haz = other & (wc > self.vc[wp, ww])
        if atomic:
            haz &= ~self.watom[idx]
        if np.count_nonzero(haz):
            self.report("RAW", "inter-warp", pc, self.wpc[idx], ln, wt, idx, haz)
        if self.intra:
            haz = ~other & (wt != ln) & (self.wep[idx] == self.ep[wp])
            if atomic:
                haz &= ~self.watom[idx]
            if np.count_nonzero(haz):
                self.report("RAW", "intra-warp", pc, self.wpc[idx], ln, wt, idx, haz)
        fl = self.flight[idx]
        if np.count_nonzero(fl >= 0):
            self.report("inflight", "", pc, fl, ln, wt, idx, fl >= 0)
        if self.uninit:
            un = ~self.init[idx]
            if np.count_nonzero(un):
                self.report("uninit", "", pc, None, ln, wt, idx, un)
        if atomic:
            return
        same = (self.rep[wp, idx] == self.ep[wp]) & (self.rclk[wp, idx] > 0)
        self.rthr[wp, idx] = np.where(same & (self.rthr[wp, idx] != ln), -2, ln)
        self.rclk[wp, idx] = self.vc[wp, wp]
        self.rep[wp, idx] = self.ep[wp]
        self.rpc[wp, idx] = pc
        # several lanes of one warp reading the same granule in this instruction
        if self.intra:
            lost = (self.rthr[wp, idx] != ln) & (self.rthr[wp, idx] >= 0)
            if np.count_nonzero(lost):
                self.rthr[wp[lost], idx[lost]] = -2

    def write(self, off, nb, lanes, pc, vals=None, old=None, atomic=False, flight=False):
        """vals/old: new and current contents (any unsigned dtype, same layout); equal values are benign."""
        idx, ln = self.granules(off, nb, lanes)
        wp = ln >> 5
        wt = self.wthr[idx]
        ww = wt >> 5
        other = ww != wp
        gd = UINT[self.g]
        haz = other & (self.wclk[idx] > self.vc[wp, ww])
        if self.intra:
            hin = ~other & (wt != ln) & (self.wep[idx] == self.ep[wp])
        if atomic:
            haz &= ~self.watom[idx]
            if self.intra:
                hin &= ~self.watom[idx]
        nv = vals.reshape(-1).view(gd) if vals is not None else None
        if np.count_nonzero(haz) or (self.intra and np.count_nonzero(hin)):
            if nv is not None and old is not None:
                diff = nv != old().reshape(-1).view(gd)
                haz = haz & diff
                if self.intra:
                    hin = hin & diff
            if np.count_nonzero(haz):
                self.report("WAW", "inter-warp", pc, self.wpc[idx], ln, wt, idx, haz)
            if self.intra and np.count_nonzero(hin):
                self.report("WAW", "intra-warp", pc, self.wpc[idx], ln, wt, idx, hin)
        rc = self.rclk[:, idx]  # [nw, k]
        haz = rc > self.vc[wp, : self.nw].T
        haz[wp, np.arange(len(idx))] = False
        if np.count_nonzero(haz):
            w, _j = (x[0] for x in np.nonzero(haz))
            self.report(
                "WAR", "inter-warp", pc, self.rpc[w, idx], ln, self.rthr[w, idx], idx, haz[w]
            )
        if self.intra:
            rt = self.rthr[wp, idx]
            haz = (
                (rc[wp, np.arange(len(idx))] > 0)
                & (self.rep[wp, idx] == self.ep[wp])
                & (rt != ln)
                & (rt != -1)
            )
            if np.count_nonzero(haz):
                self.report("WAR", "intra-warp", pc, self.rpc[wp, idx], ln, rt, idx, haz)
        fl = self.flight[idx]
        if not flight and np.count_nonzero(fl >= 0):
            self.report("inflight", "", pc, fl, ln, wt, idx, fl >= 0)
        # two lanes writing the same granule in this very instruction
        if not atomic and not flight and len(idx) > 1:
            k = np.arange(len(idx))
            self.pos[idx] = k
            win = self.pos[idx]
            dup = win != k
            if np.count_nonzero(dup):
                if nv is not None:
                    dup &= nv[win] != nv
                inter = dup & (wp[win] != wp)
                if np.count_nonzero(inter):
                    self.report(
                        "WAW", "inter-warp", pc, np.full(len(idx), pc), ln, ln[win], idx, inter
                    )
                if self.intra:
                    ins_ = dup & (wp[win] == wp)
                    if np.count_nonzero(ins_):
                        self.report(
                            "WAW", "intra-warp", pc, np.full(len(idx), pc), ln, ln[win], idx, ins_
                        )
        self.wthr[idx] = ln
        self.wclk[idx] = self.vc[wp, wp]
        self.wep[idx] = self.ep[wp]
        self.wpc[idx] = pc
        self.watom[idx] = atomic
        self.init[idx] = True
        if flight:
            self.flight[idx] = pc

    def landed(self, off, nb, lanes):
        idx, _ = self.granules(off, nb, lanes)
        self.flight[idx] = -1

    def report(self, kind, scope, pc, opc, ln, oth, idx, haz):
        j = np.flatnonzero(haz)
        k = int(j[0])
        o = int(opc[k]) if opc is not None else -1
        self.s.hazard(kind, scope, pc, o, int(ln[k]), int(oth[k]), int(idx[k]) * self.g, len(j))


class GlobalRace:
    """Conflicts on global memory between different CTAs of one launch (nothing orders CTAs here, so
    lock- or flag-protected sharing is reported too: this check is opt-in)."""

    def __init__(self, nbytes, gran, launch):
        n = nbytes // gran + 1
        self.g, self.s = gran, launch
        self.w = np.full(n, -1, np.int32)  # last writing CTA
        self.r = np.full(n, -1, np.int32)  # reading CTA, -2 several
        self.wpc, self.rpc = np.zeros(n, np.int32), np.zeros(n, np.int32)
        self.atom = np.zeros(n, bool)

    def _idx(self, off, nb):
        return ((off // self.g)[:, None] + np.arange(max(nb // self.g, 1))).reshape(-1)

    def _report(self, kind, pc, opc, idx, haz, lanes, nb):
        j = np.flatnonzero(haz)
        k = int(j[0])
        t = int(np.repeat(lanes, max(nb // self.g, 1))[k])
        self.s.hazard(
            kind, "inter-CTA", pc, int(opc[k]), t, -1, int(idx[k]) * self.g + GLOBAL_BASE, len(j)
        )

    def read(self, off, nb, lanes, pc):
        idx, me = self._idx(off, nb), self.s.cta_no
        w = self.w[idx]
        haz = (w >= 0) & (w != me)
        if np.count_nonzero(haz):
            self._report("RAW", pc, self.wpc[idx], idx, haz, lanes, nb)
        r = self.r[idx]
        self.r[idx] = np.where((r == -1) | (r == me), me, -2)
        self.rpc[idx] = pc

    def write(self, off, nb, lanes, pc, vals=None, old=None, atomic=False):
        idx, me = self._idx(off, nb), self.s.cta_no
        w, r = self.w[idx], self.r[idx]
        haz = (w >= 0) & (w != me)
        if atomic:
            haz &= ~self.atom[idx]
        if np.count_nonzero(haz) and vals is not None:  # same value: benign
            gd = UINT[self.g]
            haz &= np.ascontiguousarray(vals).reshape(-1).view(gd) != np.ascontiguousarray(
                old()
            ).reshape(-1).view(gd)
        if np.count_nonzero(haz):
            self._report("WAW", pc, self.wpc[idx], idx, haz, lanes, nb)
        haz = (r != -1) & (r != me)
        if np.count_nonzero(haz):
            self._report("WAR", pc, self.rpc[idx], idx, haz, lanes, nb)
        self.w[idx], self.wpc[idx], self.atom[idx] = me, pc, atomic


def wavefronts(off, nb, lanes):
    """(actual, conflict-free) shared-memory wavefronts of one CTA-wide access."""
    per = 32 if nb <= 4 else 128 // nb
    k = max(nb // 4, 1)
    word = ((off // 4)[:, None] + np.arange(k)).reshape(-1)
    phase = np.repeat(lanes // per, k)
    u = np.unique(phase << 32 | word)
    hits = np.zeros((int(lanes[-1]) // per + 1, 32), np.int64)
    np.add.at(hits, (u >> 32, u & 31), 1)
    m = hits.max(1)
    return int(m.sum()), int(np.count_nonzero(m))


def sectors(off, nb, lanes):
    """32-byte global-memory sectors touched, summed over warps."""
    a = (lanes >> 5) << 40 | off >> 5
    b = (lanes >> 5) << 40 | (off + nb - 1) >> 5
    return len(np.unique(np.concatenate([a, b])))
