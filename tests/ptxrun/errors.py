"""Exceptions and hazard records."""

from dataclasses import dataclass


class PtxError(Exception):
    """Base class of every error raised by ptxrun."""


class PtxParseError(PtxError):
    pass


class UnsupportedError(PtxError):
    """An instruction, modifier or directive that ptxrun does not model."""


class MemoryFault(PtxError):
    """Out-of-bounds, misaligned or otherwise invalid memory access."""


class DeadlockError(PtxError):
    pass


class HazardError(PtxError):
    """Raised at the end of a launch when hazards were found and on_hazard='raise'."""

    def __init__(self, msg, result=None):
        super().__init__(msg)
        self.result = result


@dataclass
class Hazard:
    kind: str  # 'RAW', 'WAR', 'WAW', 'uninit', 'inflight', 'divergent-barrier'
    scope: str  # 'inter-warp', 'intra-warp' or ''
    kernel: str
    cta: tuple
    line: int  # PTX line of the access that exposed the hazard
    text: str
    other_line: int  # PTX line of the earlier access (0 if none)
    other_text: str
    thread: int  # flat thread id inside the CTA
    other_thread: int  # -1 unknown / several
    address: int  # shared-memory byte offset
    count: int = 1
    src: str = ""  # source position (from .loc), if any
    other_src: str = ""

    def __str__(self):
        s = f"{self.kind}{' ' + self.scope if self.scope else ''} hazard in {self.kernel} CTA {self.cta}: "
        s += f"thread {self.thread} at PTX line {self.line} `{self.text}`{f' ({self.src})' if self.src else ''}"
        if self.other_line:
            who = f"thread {self.other_thread}" if self.other_thread >= 0 else "several threads"
            s += f" conflicts with {who} at PTX line {self.other_line} `{self.other_text}`"
            s += f" ({self.other_src})" if self.other_src else ""
        if self.address >= 0:
            s += f" on {'global' if self.scope == 'inter-CTA' else 'shared'} address 0x{self.address:x}"
        if self.count > 1:
            s += f" ({self.count} times)"
        return s
