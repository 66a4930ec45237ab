"""A ReLU network that reads labels out of packed bits, exact in fp64.

It maps M numbers (ids) to labels with about sqrt(M) parameters, not one breakpoint per id:

1. Binary digits of the id, one after another, round it to an integer key. This is the only step in
   which rounding matters: no id may lie close to a border of its cell.
2. A step function of the key with one step per group of g neighbouring ids gives the words of the
   group: integers whose bits are the memory.
3. The doubling map `x -> 2x mod p`, started at the key, gives the binary digits of key / p, a
   different bit stream for every id. The label is the parity of those bits of the words that the
   stream selects. The words solve a linear system over GF(2), one equation per id; g equations have
   a solution in little more than g bits, since streams behave like random bits.

Keys need not be stored: a word has one bit per label, and one step of the doubling map and of the
word takes two layers of a few neurons. So M = G g labels take O(G) + O(g) parameters and M bits in
words. With words of any length that is O(sqrt(M)). A mantissa holds 53 bits, which adds M / 50.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from boltzattn.theory.contextual import SAFETY
from boltzattn.theory.relu_network import BIAS, Neuron, ReluLayer, ReluNetwork, relu_layer
from boltzattn.theory.separation import ResolutionError

# The doubling map computes 4x - 2p with x < p.
_MODULUS_BITS = 49
# A random system of g equations in g + e unknowns has no solution with probability 2^-e at most, so
# G groups need e of about log2(G). That many moduli are tried for each e.
_MODULI = 4
_MOST_SPARE = 40
_SPARE = 8  # what is usual, for choosing the size of groups
# Cells of the smallest gap, and up to this much smaller.
_CELLS = np.linspace(1.0, 2.0, 33)


@dataclass(frozen=True)
class PackedCode:
    """How `packed_network` stores its labels.

    Attributes:
        ids: number of ids, M.
        groups: number of groups of neighbouring ids, G.
        group_size: ids in a group, g (the last one may have fewer).
        label_bits: bits of a label.
        word_bits: bits of a word.
        words: words per group and bit of a label.
        steps: bits of a group's memory for each bit of a label; the length of the walk.
        key_bits: bits of a key.
        margin: smallest distance of an id from a border of its cell, divided by the range of ids.
        noise: rounding noise of the ids, divided by their range.
    """

    ids: int
    groups: int
    group_size: int
    label_bits: int
    word_bits: int
    words: int
    steps: int
    key_bits: int
    margin: float
    noise: float


def packed_network(
    positions: np.ndarray,
    labels: np.ndarray,
    read: np.ndarray,
    noise: float,
    *,
    tied: bool = False,
    seed: int = 0,
) -> tuple[ReluNetwork, PackedCode]:
    """A network that maps `z` with `read . z = positions[j]` to `labels[j]` in its coordinate 0.

    Args:
        positions: `[M]`, increasing.
        labels: `[M]`, integers from 0.
        read: `[d]`, the direction onto which `z` is projected.
        noise: how far a position may be from its value.
        tied: use the same weights in all steps of the walk; then it is a loop.
        seed: seed of the search for the modulus of the doubling map.

    Returns:
        The network `[.., d] -> [.., d]`, and how it stores the labels.

    Raises:
        ResolutionError: if an id is closer to the border of its cell than ten times the noise.

    Example:
        >>> code = np.array([3, 1, 2, 0, 2])
        >>> network, _ = packed_network(np.arange(5.0), code, np.ones(1), noise=1e-12)
        >>> network(torch.arange(5.0).double()[:, None]).flatten().tolist()
        [3.0, 1.0, 2.0, 0.0, 2.0]
    """
    cells = _cells(positions, noise)
    keys = np.floor((positions - cells.start) / cells.width).astype(np.int64)
    label_bits = max(1, int(labels.max()).bit_length())
    size = group_size(len(keys), label_bits, tied)
    starts = np.arange(0, len(keys), size)
    word_bits = 52 - max(1, math.ceil(math.log2(len(starts) + 1)))
    modulus, words, steps = _solve(keys, labels, label_bits, starts, size, word_bits, seed)

    layers = [
        *_key_layers(read, cells),
        *_word_layers(keys[starts[1:]], words),
        *_walk_layers(modulus, words.shape[1:], steps, word_bits, tied),
        *_parity_layers(label_bits, _queue(*words.shape[1:]) if tied else [], steps, len(read)),
    ]
    code = PackedCode(
        ids=len(keys),
        groups=len(starts),
        group_size=size,
        label_bits=label_bits,
        word_bits=word_bits,
        words=words.shape[2],
        steps=steps,
        key_bits=cells.bits,
        margin=cells.margin,
        noise=noise / (float(np.ptp(positions)) or 1.0),
    )
    return ReluNetwork(*layers), code


def group_size(ids: int, label_bits: int, tied: bool) -> int:
    """The number of ids in a group that makes the network smallest.

    A group takes 4 parameters and its words. A step of the walk takes 10 and 12 per bit of a label,
    unless weights are tied, and passes on the words that are not yet read.

    Example:
        >>> group_size(100, 1, tied=False) < group_size(10_000, 1, tied=False)
        True
    """

    def parameters(size: int) -> float:
        groups = math.ceil(ids / size)
        words = label_bits * (size + _SPARE) / (52 - math.log2(groups + 1))
        walk = 5 * words if tied else (size + _SPARE) * (10 + 12 * label_bits + words)
        return groups * (4 + words) + walk

    sizes = sorted({max(1, min(ids, round(s))) for s in np.geomspace(1, 4096, 200)})
    return min(sizes, key=parameters)


@dataclass(frozen=True)
class _Cells:
    """Cells of equal width; `slack` is the distance of ids from borders, in widths."""

    start: float
    width: float
    bits: int
    slack: float
    margin: float


def _cells(positions: np.ndarray, noise: float) -> _Cells:
    """Cells with at most one id each, whose borders are as far from the ids as possible.

    The first cell is empty, because the bit stream of the key 0 is 0.
    """
    extent = float(positions[-1] - positions[0]) or 1.0
    gap = float(np.diff(positions).min()) if len(positions) > 1 else extent
    best, choice = -1.0, (0.0, 1.0)
    if gap > 0:
        for finer in _CELLS.tolist():
            width = gap / finer
            inside = np.sort((positions - positions[0]) / width % 1.0)
            free = np.diff(inside, append=inside[0] + 1.0)
            widest = int(free.argmax())
            if (margin := float(free[widest]) / 2 * width) > best:
                border = (inside[widest] + free[widest] / 2) % 1.0
                best, choice = margin, (positions[0] + (border - 2.0) * width, width)
    start, width = choice
    bits = max(1, int((positions[-1] - start) / width).bit_length()) if best > 0 else 0
    if best <= SAFETY * noise or bits + 3 > _MODULUS_BITS:
        raise ResolutionError(
            f"the bits of {len(positions)} ids cannot be read in fp64: the closest ids are "
            f"{gap:.3g} apart (relative {gap / extent:.3g}), and the best cells of that width have "
            f"a border {max(best, 0.0):.3g} from an id, not above {SAFETY:g} times the noise of "
            f"{noise:.2g}. For M random ids this distance falls as log(M) / M^3; use fewer "
            "sequences, tokens further apart, or memorize(), which only needs the gap"
        )
    return _Cells(start, width, bits, best / width, best / extent)


def _solve(
    keys: np.ndarray,
    labels: np.ndarray,
    label_bits: int,
    starts: np.ndarray,
    size: int,
    word_bits: int,
    seed: int,
) -> tuple[int, np.ndarray, int]:
    """A modulus, the words `[groups, label bits, words]` and the length of the streams.

    Bits of a label are unknowns of separate systems with the same equations.
    """
    rng = np.random.default_rng(seed)
    # Above twice every key; far above, the streams of small keys would start with many zeros.
    low = 2 * int(keys.max()) + 3
    spare = len(starts).bit_length() - 1
    for attempt in range(_MODULI * _MOST_SPARE):
        modulus = int(rng.integers(low, 2 * low + 64)) | 1
        steps = size + spare + attempt // _MODULI
        memory = []
        for start in starts.tolist():
            group = slice(start, start + size)
            wanted = labels[group, None] >> np.arange(label_bits) & 1
            bits = solve_parity(digits(keys[group], modulus, steps), wanted.astype(bool))
            if bits is None:
                break
            memory.append(bits)
        else:
            return modulus, _pack(np.stack(memory), word_bits), steps
    raise ResolutionError(
        f"no modulus near {low} gives {len(keys)} keys independent bit streams in "
        f"{_MODULI * _MOST_SPARE} attempts; pass another seed"
    )


def digits(keys: np.ndarray, modulus: int, steps: int) -> np.ndarray:
    """Binary digits 2, 3, .. of `keys / modulus` as booleans `[keys, steps]`: the bit streams.

    Example:
        >>> digits(np.array([1, 2]), 7, 4).astype(int)  # 1/7 = 0.001001.., 2/7 = 0.010010..
        array([[0, 1, 0, 0],
               [1, 0, 0, 1]])
    """
    x, found = 2 * keys, []
    for _ in range(steps):
        found.append(2 * x > modulus)
        x = 2 * x - modulus * found[-1]
    return np.stack(found, 1)


def solve_parity(streams: np.ndarray, wanted: np.ndarray) -> np.ndarray | None:
    """Bits `[steps, k]` with `streams @ bits = wanted` modulo 2, or None if there are none.

    Example:
        >>> streams = np.array([[True, True, False], [False, True, True]])
        >>> bits = solve_parity(streams, np.array([[True], [False]]))
        >>> (streams @ bits.astype(int) % 2).tolist()
        [[1], [0]]
    """
    steps, planes = streams.shape[1], wanted.shape[1]
    # A row is an integer: the bits of the stream, and below them those of the label.
    packed = np.packbits(np.concatenate([streams, wanted], 1), axis=1)
    unused = 8 * packed.shape[1] - steps - planes
    pivots: dict[int, int] = {}  # rows by their highest bit
    for row in (int.from_bytes(line.tobytes(), "big") >> unused for line in packed):
        while row >> planes and (lead := row.bit_length()) in pivots:
            row ^= pivots[lead]
        if row >> planes:
            pivots[row.bit_length()] = row
        elif row:
            return None
    found = [0] * planes
    for lead, row in sorted(pivots.items()):  # bits that lead no row are 0
        for i in range(planes):
            label = row >> (planes - 1 - i) & 1
            parity = ((row >> planes) & found[i]).bit_count() & 1
            found[i] |= (label ^ parity) << (lead - 1 - planes)
    text = [f"{bits:0{steps}b}" for bits in found]
    return np.array([[digit == "1" for digit in line] for line in text]).T


def _pack(memory: np.ndarray, word_bits: int) -> np.ndarray:
    """Bits `[groups, steps, label bits]` as integers `[groups, label bits, words]`."""
    groups, steps, label_bits = memory.shape
    words = math.ceil(steps / word_bits)
    padded = np.zeros((groups, words * word_bits, label_bits), dtype=np.int64)
    padded[:, :steps] = memory
    places = 1 << np.arange(word_bits)[::-1]
    return np.einsum("gwbl,b->glw", padded.reshape(groups, words, word_bits, label_bits), places)


def _key_layers(read: np.ndarray, cells: _Cells) -> Iterator[ReluLayer]:
    """From a token to its key: the integer part of `(read . z - start) / width`."""
    tokens = [f"z{i}" for i in range(len(read))]
    weights = dict(zip(tokens, (read / cells.width).tolist(), strict=True))
    yield relu_layer(tokens, {"rest": {**weights, BIAS: -cells.start / cells.width}})
    # The step at a border rises within half of the distance to the next id.
    steep = 2.0 ** math.ceil(math.log2(2 / cells.slack))
    names: Sequence[str] = ["rest"]
    above = 0.0
    for place in (2.0 ** np.arange(cells.bits)[::-1]).tolist():
        rest: Neuron = {"rest": 1, "bit": -above} if above else {"rest": 1}
        key: Neuron = {"key": 1, "bit": above} if "key" in names else {"bit": above}
        under = {name: -steep * weight for name, weight in rest.items()}
        neurons = {"under": {**under, BIAS: steep * place}, "rest": rest}
        if above:
            neurons["key"] = key
        yield relu_layer(names, neurons)
        kept: dict[str, Neuron] = {"bit": {BIAS: 1, "under": -1}, "rest": {"rest": 1}}
        if above:
            kept["key"] = {"key": 1}
        yield relu_layer(list(neurons), kept)
        names, above = list(kept), place
    last: Neuron = {"key": 1, "bit": above} if "key" in names else {"bit": above}
    yield relu_layer(names, {"key": last})


def _queue(label_bits: int, words: int) -> list[str]:
    """Names of the words that wait to be read."""
    return [f"word {j} of {i}" for j in range(words) for i in range(label_bits)]


def _state(label_bits: int) -> list[str]:
    """Names of the numbers between two steps of the walk: `bit` and `both` are 0 or 1."""
    each = [f"{name} {i}" for i in range(label_bits) for name in ("word", "bit", "both", "count")]
    return ["x", "digit", *each]


def _word_layers(borders: np.ndarray, words: np.ndarray) -> Iterator[ReluLayer]:
    """From a key to the state of the walk and all words of the key's group."""
    groups, label_bits, count = words.shape
    steps = [f"step {i}" for i in range(groups - 1)]
    below = {
        f"below {i}": {BIAS: border, "key": -1.0}
        for i, border in enumerate(borders.astype(float).tolist())
    }
    yield relu_layer(["key"], {"x": {"key": 1}, **below})
    reached = {s: {BIAS: 1.0, b: -1.0} for s, b in zip(steps, below, strict=True)}
    yield relu_layer(["x", *below], {"x": {"x": 1}, **reached})
    neurons: dict[str, Neuron] = {name: {} for name in _state(label_bits)}
    neurons["x"] = {"x": 1}
    for name in _queue(label_bits, count):
        j, i = (int(part) for part in name.removeprefix("word ").split(" of "))
        # Half of the word: the first step doubles it.
        column = words[:, i, j] / 2
        jumps = zip(steps, np.diff(column).tolist(), strict=True)
        neurons[name] = {BIAS: float(column[0]), **dict(jumps)}
    yield relu_layer(["x", *steps], neurons)


def _walk_layers(
    modulus: int, shape: tuple[int, ...], steps: int, word_bits: int, tied: bool
) -> Iterator[ReluLayer]:
    """One step per bit of memory: count the bits that the stream selects."""
    label_bits, words = shape
    every = range(label_bits)
    made: dict[str, ReluLayer] = {}

    def layer(kind: str, names: list[str], neurons: dict[str, Neuron]) -> ReluLayer:
        new = relu_layer(names, neurons)
        return made.setdefault(kind, new) if tied else new

    queue = _queue(label_bits, words)
    for step in range(steps):
        x: Neuron = {"x": 2, "digit": -modulus}
        neurons: dict[str, Neuron] = {"x": x, "x under": _minus(x, modulus, 2)}
        load = step % word_bits == 0
        waiting = queue
        for i in every:
            word: Neuron = {f"word {i}": 2, f"bit {i}": -(2.0**word_bits)}
            if load:
                word = {queue[i]: 2}
            neurons[f"word {i}"] = word
            neurons[f"word under {i}"] = _minus(word, 2.0 ** (word_bits - 1))
            neurons[f"count {i}"] = {f"count {i}": 1, f"both {i}": 1}
        if load and tied:  # a loop passes on as many numbers in every round
            moved: list[Neuron] = [{name: 1} for name in queue[label_bits:]]
            neurons |= dict(zip(queue, [*moved, *({} for _ in every)], strict=True))
        else:
            queue = queue[label_bits:] if load else queue
            neurons |= {name: {name: 1} for name in queue}
        yield layer("load" if load else "double", [*_state(label_bits), *waiting], neurons)

        seen: dict[str, Neuron] = {"x": {"x": 1}, "digit": {BIAS: 1, "x under": -1}}
        for i in every:
            seen[f"word {i}"] = {f"word {i}": 1}
            seen[f"bit {i}"] = {BIAS: 1, f"word under {i}": -1}
            seen[f"both {i}"] = {BIAS: 1, "x under": -1, f"word under {i}": -1}
            seen[f"count {i}"] = {f"count {i}": 1}
        seen |= {name: {name: 1} for name in queue}
        yield layer("bits", list(neurons), seen)


def _minus(neuron: Neuron, constant: float, times: float = 1) -> Neuron:
    return {BIAS: constant, **{name: -times * weight for name, weight in neuron.items()}}


def _parity_layers(label_bits: int, left: list[str], steps: int, width: int) -> Iterator[ReluLayer]:
    """From the counts to the label: subtract powers of two from a count while it is at least 2."""
    every = range(label_bits)
    names = [*_state(label_bits), *left]
    rest: dict[int, Neuron] = {i: {f"count {i}": 1, f"both {i}": 1} for i in every}
    for place in (2.0 ** np.arange(1, steps.bit_length())[::-1]).tolist():
        neurons: dict[str, Neuron] = {f"count {i}": rest[i] for i in every}
        neurons |= {f"under {i}": _minus(rest[i], place) for i in every}
        yield relu_layer(names, neurons)
        kept: dict[str, Neuron] = {f"count {i}": {f"count {i}": 1} for i in every}
        kept |= {f"bit {i}": {BIAS: 1, f"under {i}": -1} for i in every}
        yield relu_layer(list(neurons), kept)
        names = list(kept)
        rest = {i: {f"count {i}": 1, f"bit {i}": -place} for i in every}
    label: dict[str, float] = {}
    for i in every:
        label |= {name: 2.0**i * weight for name, weight in rest[i].items()}
    yield relu_layer(names, {f"z{i}": label if i == 0 else {} for i in range(width)})
