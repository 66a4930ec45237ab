"""The problems that are measured, as data: the quick grid and the full grid."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

LEVELS = ("attention", "layer", "module")
PASS_NAMES = {"forward": "forward", "backward": "backward", "both": "forward + backward"}
SHORT_DTYPE = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True)
class Case:
    """One problem. Everything that changes the work or its result is a field.

    Example:
        >>> Case(n=4096, rank=8, passes="both").label
        'attention forward + backward n=4096 rank=8 dv=64 fp32'
    """

    n: int
    rank: int = 1
    dv: int = 64
    heads: int = 1
    batch: int = 1
    dtype: str = "float32"
    passes: str = "forward"
    causal: bool = False
    sharpness: float = 1.0  # factor on the logits: 1 is standard normal queries and keys
    level: str = "attention"
    dim: int = 0  # embedding width; 0 at the attention level
    threads: int = 0  # 0: torch's default
    fresh_pages: bool = False  # large results are allocated in pages that the kernel has to zero
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise ValueError(f"level must be one of {LEVELS}, got {self.level!r}")
        if self.passes not in PASS_NAMES:
            raise ValueError(f"passes must be one of {tuple(PASS_NAMES)}, got {self.passes!r}")
        if (self.level == "attention") != (self.dim == 0):
            raise ValueError(f"dim is for layers and modules, got {self.dim} at {self.level}")

    @property
    def label(self) -> str:
        """One line that names the case, without the fields that have their default value."""
        words = [self.level, PASS_NAMES[self.passes], f"n={self.n}", f"rank={self.rank}"]
        words += [f"dv={self.dv}", SHORT_DTYPE[self.dtype]]
        default = {f.name: f.default for f in fields(self)}
        for name in ("batch", "heads", "dim", "sharpness", "threads"):
            if getattr(self, name) != default[name]:
                words.append(f"{name}={getattr(self, name):g}")
        if self.causal:
            words.append("causal")
        if self.fresh_pages:
            words.append("fresh pages")
        if self.device != "cpu":
            words.append(self.device)
        return " ".join(words)

    @property
    def backward(self) -> bool:
        return self.passes != "forward"


@dataclass(frozen=True)
class Entry:
    """A case and the providers to run on it.

    Providers are given by name or by a common prefix of several names; an empty tuple means all.
    """

    case: Case
    providers: tuple[str, ...] = ()
    longest_factor: float = 1.0  # multiplies the longest call that is still measured


BASIC = ("clone", "naive", "sdpa", "sdpa padded", "boltzattn")  # without other packages
LINEAR = ("clone", "sdpa", "sdpa padded", "boltzattn transform")
DIRECT = ("naive", "sdpa", "sdpa padded", "boltzattn direct")
COPY = ("clone", "boltzattn transform")  # a copy of the values, for comparison


def quick() -> Iterator[Entry]:
    """What `make bench` measures: how naive attention, SDPA and boltzattn scale with n."""
    # At 16,384, where a call takes seconds, only the SDPA that was faster in the full run.
    faster = {"forward": "sdpa padded", "both": "sdpa"}
    for passes in ("forward", "both"):
        for n in (16, 512, 1024, 4096):  # 16 shows the overhead of a call
            yield Entry(Case(n=n, passes=passes), BASIC)
        yield Entry(Case(n=16_384, passes=passes), ("clone", faster[passes], "boltzattn"))
        for n in (65_536, 1_048_576):
            yield Entry(Case(n=n, passes=passes), BASIC)
        for n in (512, 1024, 4096):
            yield Entry(Case(n=n, rank=8, passes=passes), BASIC)
    for rank in (2, 4, 16):
        yield Entry(Case(n=512, rank=rank), ("naive", "boltzattn direct"))


def full() -> Iterator[Entry]:
    """The whole grid: a few central cases with one field varied at a time, each case once."""
    seen = set()
    for entry in _axes():
        if entry.case not in seen:
            seen.add(entry.case)
            yield entry


def _axes() -> Iterator[Entry]:
    centre = Case(n=4096)

    # Length. 16 shows the overhead of a call. Other packages run at a few lengths only, because
    # some of them compile for every shape.
    for passes in ("forward", "both"):
        for n in (16, 256, 512, 1024, 2048, 4096, 8192, 16_384, 65_536, 262_144, 1_048_576):
            peers = n in (1024, 4096, 16_384, 65_536, 1_048_576)
            yield Entry(replace(centre, n=n, passes=passes), () if peers else BASIC)
        for n in (512, 1024, 4096, 16_384):
            yield Entry(replace(centre, n=n, rank=8, passes=passes), () if n == 4096 else BASIC)
    for n in (4096, 16_384, 1_048_576):
        yield Entry(replace(centre, n=n, passes="backward"), LINEAR)

    # Rank, for small and for large matrix products.
    for n in (512, 4096):
        for rank in range(1, 17):
            yield Entry(replace(centre, n=n, rank=rank), DIRECT)
    for rank in (2, 4, 16):
        yield Entry(replace(centre, rank=rank, passes="both"), BASIC)

    # Width of the values.
    for dv in (8, 16, 32, 128, 256):
        for passes in ("forward", "both"):
            yield Entry(replace(centre, dv=dv, passes=passes), BASIC)
        yield Entry(replace(centre, n=65_536, dv=dv), COPY)

    # Batch and heads.
    for batch, heads in ((1, 8), (4, 8)):
        for passes in ("forward", "both"):
            many = replace(centre, batch=batch, heads=heads, passes=passes)
            yield Entry(many, ("clone", "sdpa", "sdpa padded", "boltzattn"), longest_factor=2.0)

    # Number format.
    for dtype in ("float64", "bfloat16", "float16"):
        for rank in (1, 8):
            for passes in ("forward", "both"):
                yield Entry(replace(centre, rank=rank, dtype=dtype, passes=passes), BASIC)
        yield Entry(replace(centre, n=65_536, dtype=dtype), COPY)

    # Causal.
    for n in (1024, 4096, 16_384, 65_536):
        # The longest is part of a target, so SDPA has to finish.
        yield Entry(replace(centre, n=n, causal=True), LINEAR, longest_factor=4.0)
    for n in (4096, 16_384):
        yield Entry(replace(centre, n=n, causal=True, passes="both"), BASIC)
    yield Entry(replace(centre, rank=8, causal=True), BASIC)

    # Temperature.
    for sharpness in (0.1, 10.0, 100.0, 1000.0):
        for passes in ("forward", "both"):
            yield Entry(replace(centre, sharpness=sharpness, passes=passes), BASIC)

    # Threads.
    for passes in ("forward", "both"):
        yield Entry(replace(centre, threads=1, rank=8, passes=passes), BASIC)
        yield Entry(replace(centre, threads=1, passes=passes), BASIC)
        yield Entry(replace(centre, n=65_536, threads=1, passes=passes), LINEAR)

    # Large results in pages that the kernel has to zero first, the default of glibc's allocator.
    for passes in ("forward", "both"):
        yield Entry(replace(centre, fresh_pages=True, passes=passes), BASIC)
        for n in (65_536, 262_144, 1_048_576):
            yield Entry(replace(centre, n=n, fresh_pages=True, passes=passes), COPY)

    # Whole layers: projections and attention, against one linear map of the same width.
    for passes in ("forward", "both"):
        yield Entry(Case(n=65_536, rank=1, dv=1024, dim=1024, level="layer", passes=passes))
        yield Entry(Case(n=4096, dv=32, heads=8, dim=256, level="layer", passes=passes))

    # Modules: nn.MultiheadAttention, its replacement, and the function that the replacement calls.
    yield Entry(Case(n=4096, dv=32, heads=8, dim=256, level="module"))
    yield Entry(
        Case(n=16_384, dv=64, heads=8, dim=512, level="module", passes="both"), longest_factor=12.0
    )
