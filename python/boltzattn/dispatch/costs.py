"""What the kernels cost: constants of this file, or those that `boltzattn tune` measured here."""

from __future__ import annotations

import json
import math
import os
import platform
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from boltzattn._version import __version__
from boltzattn.dispatch.extension import extension


class Costs(NamedTuple):
    """Nanoseconds on one device. Only their ratios decide."""

    direct_pair: float  # a query and a key: score, exponential, sums
    direct_pair_column: float  # each of the rank + dv multiply-adds of a pair
    transform_call: float
    transform_head: float  # the core, at ordinary temperatures
    transform_head_column: float
    transform_token: float  # a query or a key
    transform_token_column: float
    lookup_head: float  # with a bias per key: the layout
    lookup_token: float
    lookup_token_column: float
    scan_token: float  # a query and a key
    scan_token_column: float
    layer_token_column: float  # at the nodes: a column of a token, of x or of the output
    product: float  # a multiply-add of torch's matrix products
    core_product: float  # a multiply-add of the core, in fp64


# One core of an AMD EPYC, fp32, fitted to the medians that `make micro` prints (Zen 3; the last
# three, which only layers use, Zen 4).
CPU = Costs(
    direct_pair=0.75,
    direct_pair_column=0.022,
    transform_call=0.0,
    transform_head=45_000.0,
    transform_head_column=330.0,
    transform_token=16.0,
    transform_token_column=0.32,
    lookup_head=140_000.0,
    lookup_token=55.0,
    lookup_token_column=0.85,
    scan_token=100.0,
    scan_token_column=3.2,
    layer_token_column=0.85,
    product=0.025,
    core_product=0.045,
)
# An A100 by its data sheet: modelled, not measured. A pair takes about 30 fp32 operations (19.5e12
# a second), a column of it 3 tf32 products (156e12); a token moves 59 bytes and a column of it,
# bf16, 2 (2.04e12); the core of 200 x 150 nodes is fp64 (19.5e12 with matrix units); a call is 10
# launches of 5 us that have little to do.
GPU = Costs(
    direct_pair=1.5e-3,
    direct_pair_column=4e-5,
    transform_call=5e4,
    transform_head=20.0,
    transform_head_column=3.0,
    transform_token=0.03,
    transform_token_column=1e-3,
    lookup_head=math.inf,  # no kernel yet
    lookup_token=math.inf,
    lookup_token_column=math.inf,
    scan_token=math.inf,  # no kernel yet
    scan_token_column=math.inf,
    layer_token_column=1e-3,
    product=1.3e-5,
    core_product=1e-4,
)


def path() -> Path | None:
    """The file of measured costs. BOLTZATTN_COSTS names another one, or none if it is empty."""
    named = os.environ.get("BOLTZATTN_COSTS")
    if named is not None:
        return Path(named) if named else None
    try:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:  # a user without a home
        return None
    return Path(cache) / "boltzattn/costs.json"


def machine() -> dict[str, str]:
    """What costs depend on: a file that was written elsewhere does not count."""
    processor = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next(x.partition(": ")[2] for x in lines if x.startswith("model name"))
    except (OSError, StopIteration):
        pass
    library = extension()
    isa = "none" if isinstance(library, str) else library.supported_isas()[0]
    return {"boltzattn": __version__, "processor": processor, "instruction set": isa}


def read(file: Path) -> Costs:
    """Raises ValueError, with the reason, if the costs are not those of this machine."""
    try:
        found = json.loads(file.read_text())
        costs = CPU._replace(**{name: float(cost) for name, cost in found.pop("costs").items()})
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise ValueError(f"it is damaged ({error})") from error
    for name, here in machine().items():
        if found.get(name) != here:
            raise ValueError(f"{name} was {found.get(name)}, and is {here}")
    if not all(0 <= cost < math.inf for cost in costs):
        raise ValueError("it is damaged (costs must be finite and not negative)")
    return costs


def write(file: Path, costs: Costs) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**machine(), "costs": costs._asdict()}, indent=2)
    partial = file.with_name(f"{file.name}.{os.getpid()}")
    partial.write_text(text + "\n")
    partial.replace(file)  # whole or not at all, for processes that read


@lru_cache(maxsize=1)
def of_cpu() -> tuple[Costs, str]:
    """The costs of the CPU and where they come from. The file is read once in a process."""
    file = path()
    try:
        if file is None or not file.exists():
            return CPU, "built in"
        return read(file), f"measured here, {file}"
    except (OSError, ValueError) as reason:  # a bad file must not end a call
        return CPU, f"built in; {file} is not used: {reason}; run boltzattn tune again"
