"""The first message of a distributed call: what all processes must have in common.

Processes that call with different shapes or dtypes would send messages of different sizes, and the
communication library would abort one of them. So the first message has the same size for every call
of a group. It carries a number for each fact of the call, and all processes find out from it which
fact differs. The extents of the first heads and the numbers of keys travel with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from boltzattn.dispatch.backends import BACKENDS, METHODS
from boltzattn.problem import DTYPES, SCORES

EXCHANGES = ("moments", "gather")

# Numbers that travel with the facts: 7 for each of 64 heads, and one for the call. More need a
# second message.
ROOM = 7 * 64 + 1
LONGEST_ERROR = 2048  # bytes

_NEUTRAL = math.inf  # of a minimum


class Fact(NamedTuple):
    """A property that every process must have alike, sent as a number."""

    name: str
    remedy: str
    names: tuple[str, ...] = ()  # of the numbers, where they are indices

    def show(self, number: float) -> str:
        if self.names:
            return self.names[int(number)]
        return str(int(number)) if number == int(number) else repr(number)


_DTYPE_NAMES = tuple(str(dtype).removeprefix("torch.") for dtype in DTYPES)
_MASK_NAMES = ("None", "bool", *_DTYPE_NAMES)
_NO_OR_YES = ("False", "True")
LEADING = (-3, -4, -5, -6)


def _shape_facts(name: str) -> list[Fact]:
    same = f"shards of {name} must have the same shape on all ranks but for dimension -2"
    return [
        Fact(f"{name}.ndim", same),
        *(Fact(f"{name}.shape[{dim}]", same) for dim in LEADING),
        Fact(f"{name}.shape[-1]", same),
    ]


FACTS = [
    Fact("exchange", "pass the same exchange on all ranks", EXCHANGES),
    Fact("dtype", "convert query, key and value to the same dtype on all ranks", _DTYPE_NAMES),
    Fact("key.dtype", "convert key to the same dtype on all ranks", _DTYPE_NAMES),
    Fact("value.dtype", "convert value to the same dtype on all ranks", _DTYPE_NAMES),
    *(fact for name in ("query", "key", "value") for fact in _shape_facts(name)),
    Fact("scale", "pass the same scale on all ranks"),
    Fact("is_causal", "pass the same is_causal on all ranks", _NO_OR_YES),
    Fact("enable_gqa", "pass the same enable_gqa on all ranks", _NO_OR_YES),
    Fact(
        "key_padding_mask",
        "pass a mask of the same dtype on all ranks, or none; False or 0 masks no key",
        _MASK_NAMES,
    ),
    Fact("key_bias", "pass a bias of the same dtype on all ranks, or none", _MASK_NAMES),
    Fact("score", "pass the same score on all ranks", SCORES),
    Fact("alibi_slopes", "pass slopes of the same dtype on all ranks, or none", _MASK_NAMES),
    Fact("method", "enter the same use_method on all ranks", ("auto", *METHODS)),
    Fact(
        "backend",
        "pass the same backend, and enter the same use_backend, on all ranks",
        ("auto", *BACKENDS),
    ),
    Fact(
        "backend in use",
        "pass backend='reference' on all ranks, or install the extension on all of them",
        tuple(BACKENDS),
    ),
]


def dtype_number(dtype: torch.dtype) -> float:
    return DTYPES.index(dtype)


def mask_number(mask: Tensor | None) -> float:
    if mask is None:
        return 0
    return 1 if mask.dtype == torch.bool else 2 + DTYPES.index(mask.dtype)


def shape_numbers(name: str, x: Tensor) -> dict[str, float]:
    leading = {dim: x.shape[dim] if x.ndim >= -dim else 1 for dim in LEADING}
    # Dimensions beyond the named ones count with the last of them.
    leading[LEADING[-1]] *= math.prod(x.shape[: LEADING[-1]])
    return {
        f"{name}.ndim": x.ndim,
        **{f"{name}.shape[{dim}]": size for dim, size in leading.items()},
        f"{name}.shape[-1]": x.shape[-1],
    }


class Agreement(NamedTuple):
    """What all processes know after the first message."""

    keys: list[int]  # of every process
    numbers: Tensor  # the least of every number
    sent: int  # bytes


def agree(
    facts: dict[str, float],
    keys: int,
    numbers: Tensor,
    error: Exception | None,
    group: dist.ProcessGroup | None,
) -> Agreement:
    """Compare the facts of all processes, and take the least of their `numbers`. Collective.

    `error` says why this process cannot serve the call, if it cannot; facts it could not find out
    may be missing. If facts differ, or a process has an error, all processes raise.
    """
    world, me = dist.get_world_size(group), dist.get_rank(group)
    assert facts.keys() <= {fact.name for fact in FACTS}, "a fact that would not be sent"
    mine = [facts.get(fact.name, _NEUTRAL) for fact in FACTS]
    opposite = [_NEUTRAL if x == _NEUTRAL else -x for x in mine]
    failed = [_NEUTRAL if error is None else me, 0.0 if error is None else 1.0]
    lengths = [keys if process == me else _NEUTRAL for process in range(world)]
    head = [*mine, *opposite, *failed, *lengths]
    first = numbers.new_full((len(head) + ROOM,), _NEUTRAL)
    first[: len(head)] = torch.tensor(head, dtype=first.dtype, device=first.device)
    here, rest = numbers[:ROOM], numbers[ROOM:].clone()
    first[len(head) : len(head) + len(here)] = here
    reduce(first, dist.ReduceOp.MIN, group, "all-reduce of extents")

    told = iter(first[: len(head)].tolist())
    least, most = [next(told) for _ in FACTS], [-next(told) for _ in FACTS]
    for fact, low, high in zip(FACTS, least, most, strict=True):
        if low < high:
            raise ValueError(
                f"{fact.name} differs between ranks: {fact.show(low)} and {fact.show(high)}; "
                f"{fact.remedy}"
            )
    first_failed, all_failed = next(told), next(told)
    if first_failed != _NEUTRAL:
        _raise_for_all(int(first_failed), bool(all_failed), error, numbers.device, group)
    if len(rest):
        reduce(rest, dist.ReduceOp.MIN, group, "all-reduce of the extents of further heads")
    found = torch.cat([first[len(head) : len(head) + len(here)], rest])
    sent = (first.numel() + rest.numel()) * first.itemsize
    return Agreement([int(n) for n in told], found, sent)


def _raise_for_all(
    failed: int,
    all_failed: bool,
    error: Exception | None,
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> None:
    """Raise what rank `failed` cannot do, with the same message on all ranks."""
    if all_failed and error is not None:
        raise error
    text = torch.zeros(LONGEST_ERROR, dtype=torch.uint8, device=device)
    if dist.get_rank(group) == failed:
        raw = str(error).encode()[:LONGEST_ERROR]
        text[: len(raw)] = torch.tensor(list(raw), dtype=torch.uint8, device=device)
    collective(lambda: dist.broadcast(text, group=group, group_src=failed), "broadcast of an error")
    said = bytes(text.tolist()).rstrip(b"\0").decode(errors="replace")
    raise ValueError(f"rank {failed} of the group cannot serve the call: {said}") from error


def reduce(x: Tensor, op: Any, group: dist.ProcessGroup | None, what: str) -> None:
    collective(lambda: dist.all_reduce(x, op=op, group=group), what)


def collective(call: Callable[[], Any], what: str) -> None:
    try:
        call()
    except RuntimeError as error:
        raise RuntimeError(
            f"boltzattn.distributed: {what} failed: another process of the group has died, left or "
            f"made another call ({error})"
        ) from error
