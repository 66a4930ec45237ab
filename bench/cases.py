"""What is measured: problems as data, the quick grid and the full grid."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

LEVELS = ("attention", "layer", "module")
PASSES = ("forward", "backward", "both")
SHORT_DTYPE = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True)
class Case:
    """One problem. Everything that changes the work or its result is a field.

    Example:
        >>> Case(n=4096, rank=8, passes="both").label
        'attention forward+backward n=4096 rank=8 dv=64 fp32'
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
    threads: int = 0  # 0: as many as torch takes by itself
    fresh_pages: bool = False  # large results come in pages the system zeroes first
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise ValueError(f"level must be one of {LEVELS}, got {self.level!r}")
        if self.passes not in PASSES:
            raise ValueError(f"passes must be one of {PASSES}, got {self.passes!r}")
        if (self.level == "attention") != (self.dim == 0):
            raise ValueError(f"dim belongs to layers and modules, got {self.dim} at {self.level}")

    @property
    def label(self) -> str:
        """One line that names the case; fields at their usual value are left out."""
        passes = "forward+backward" if self.passes == "both" else self.passes
        words = [self.level, passes, f"n={self.n}", f"rank={self.rank}", f"dv={self.dv}"]
        words.append(SHORT_DTYPE[self.dtype])
        usual = {f.name: f.default for f in fields(self)}
        for name in ("batch", "heads", "dim", "sharpness", "threads"):
            if getattr(self, name) != usual[name]:
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
    """A case, who takes part and how long they may.

    Providers are given by name, or by how several names begin; none: all.
    """

    case: Case
    providers: tuple[str, ...] = ()
    longest_factor: float = 1.0  # on the longest call that is still measured


BASIC = ("clone", "naive", "sdpa", "sdpa padded", "boltzattn")  # without the peers
LINEAR = ("clone", "sdpa", "sdpa padded", "boltzattn transform")
DIRECT = ("naive", "sdpa", "sdpa padded", "boltzattn direct")
COPY = ("clone", "boltzattn transform")  # what moving the bytes costs, and what we cost


def quick() -> Iterator[Entry]:
    """What `make bench` measures: the scaling with n of naive, SDPA and boltzattn."""
    # Of the two SDPAs at 16,384 the one that was faster in the full run: each takes seconds. So the
    # targets there, which are over the faster of both, are left to the full run.
    faster = {"forward": "sdpa padded", "both": "sdpa"}
    for passes in ("forward", "both"):
        for n in (16, 512, 1024, 4096):  # 16 shows the fixed cost of a call
            yield Entry(Case(n=n, passes=passes), BASIC)
        yield Entry(Case(n=16_384, passes=passes), ("clone", faster[passes], "boltzattn"))
        for n in (65_536, 1_048_576):
            yield Entry(Case(n=n, passes=passes), BASIC)
        for n in (512, 1024, 4096):
            yield Entry(Case(n=n, rank=8, passes=passes), BASIC)
    for rank in (2, 4, 16):
        yield Entry(Case(n=512, rank=rank), ("naive", "boltzattn direct"))


def full() -> Iterator[Entry]:
    """The whole grid: one axis varied at a time around a few centres, each case once."""
    seen = set()
    for entry in _axes():
        if entry.case not in seen:
            seen.add(entry.case)
            yield entry


def _axes() -> Iterator[Entry]:
    centre = Case(n=4096)

    # Length. 16 shows the fixed cost of a call. Peers join where a curve needs its points: some
    # compile for every shape.
    for passes in ("forward", "both"):
        for n in (16, 256, 512, 1024, 2048, 4096, 8192, 16_384, 65_536, 262_144, 1_048_576):
            peers = n in (1024, 4096, 16_384, 65_536, 1_048_576)
            yield Entry(replace(centre, n=n, passes=passes), () if peers else BASIC)
        for n in (512, 1024, 4096, 16_384):
            yield Entry(replace(centre, n=n, rank=8, passes=passes), () if n == 4096 else BASIC)
    for n in (4096, 16_384, 1_048_576):
        yield Entry(replace(centre, n=n, passes="backward"), LINEAR)

    # Rank, where the matrix products are small and where they are not.
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
        # The longest is a target, so SDPA has to be waited for.
        yield Entry(replace(centre, n=n, causal=True), LINEAR, longest_factor=4.0)
    for n in (4096, 16_384):
        yield Entry(replace(centre, n=n, causal=True, passes="both"), BASIC)
    yield Entry(replace(centre, rank=8, causal=True), BASIC)

    # Temperature: sharper logits are harder for everybody.
    for sharpness in (0.1, 10.0, 100.0, 1000.0):
        for passes in ("forward", "both"):
            yield Entry(replace(centre, sharpness=sharpness, passes=passes), BASIC)

    # Threads.
    for passes in ("forward", "both"):
        yield Entry(replace(centre, threads=1, rank=8, passes=passes), BASIC)
        yield Entry(replace(centre, threads=1, passes=passes), BASIC)
        yield Entry(replace(centre, n=65_536, threads=1, passes=passes), LINEAR)

    # Large results in pages that the system has to zero first, as glibc's allocator hands them out.
    for passes in ("forward", "both"):
        yield Entry(replace(centre, fresh_pages=True, passes=passes), BASIC)
        for n in (65_536, 262_144, 1_048_576):
            yield Entry(replace(centre, n=n, fresh_pages=True, passes=passes), COPY)

    # Whole layers: projections and attention, against one linear map of the same width.
    for passes in ("forward", "both"):
        yield Entry(Case(n=65_536, rank=1, dv=1024, dim=1024, level="layer", passes=passes))
        yield Entry(Case(n=4096, dv=32, heads=8, dim=256, level="layer", passes=passes))

    # Modules: nn.MultiheadAttention, its replacement, and the bare function inside it.
    yield Entry(Case(n=4096, dv=32, heads=8, dim=256, level="module"))
    yield Entry(
        Case(n=16_384, dv=64, heads=8, dim=512, level="module", passes="both"), longest_factor=12.0
    )
