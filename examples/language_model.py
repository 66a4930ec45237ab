"""Train a character-level decoder of rank-1 heads, and compare it with heads of full rank.

The text is the source of Python's standard library, or that of any folder. Both models have the
same number of parameters and ALiBi: what heads of rank 1 save goes into more heads and a wider
feed-forward network. The comparisons are

    context 512, equal steps;
    context 512, equal time: the low-rank model trains for as long as the other one took;
    context 16,384, equal time.

The full-rank heads run by torch's scaled_dot_product_attention. Printed are the bits per
character on files that the models have not seen, tokens per second and the peak memory. Then the
low-rank model writes some text, from a state of fixed size.

    pip install "boltzattn[examples]"
    python examples/language_model.py
    python examples/language_model.py --folder ~/notes --pattern "*.md"

Runs are saved in --out every half minute; the same command continues an interrupted run, and only
prints those that are done.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import random
import resource
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from boltzattn.nn import LowRankAttention
from torch import Tensor, nn
from tqdm import tqdm

VOCABULARY = 128  # ASCII; everything else is a question mark
STEP_TOKENS = 2048  # of a step, at least one sequence
RATE, WARM_UP, LAST_RATE = 2e-3, 0.05, 0.05  # the largest rate; shares of the run and of the rate
HELD_OUT, MEASURED = 0.05, 1 << 17  # share of the files; characters of them that are measured


@dataclass(frozen=True)
class Design:
    """The attention of a model; `rank=None` is full rank, by torch's SDPA."""

    rank: int | None = 1
    head_dim: int = 16
    score: str = "dot"
    alibi: bool = True
    token_shift: int = 0


def _designs() -> dict[str, Design]:
    designs = {
        "low-rank": Design(head_dim=8, token_shift=3),
        "full-shift": Design(rank=None, token_shift=3),
    }
    for name, alibi in (("", True), ("-no-alibi", False)):  # for docs/quality.md
        designs[f"full{name}"] = Design(rank=None, alibi=alibi)
        for rank in (1, 2, 3, 4, 8):
            for score in ("dot", "gaussian"):
                designs[f"rank-{rank}-{score}{name}"] = Design(rank, score=score, alibi=alibi)
    return designs


DESIGNS = _designs()


def read_text(folder: Path | None, pattern: str) -> tuple[Tensor, Tensor]:
    """(characters for training, characters of other files for measuring)."""
    root = folder or Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "test", "tests"} if folder is None else set()
    files = [f for f in root.rglob(pattern) if not skipped & set(f.relative_to(root).parts)]
    files = sorted(f for f in files if f.is_file())
    random.Random(0).shuffle(files)
    texts = [f.read_text(encoding="utf-8", errors="replace") for f in files]
    count = max(1, round(HELD_OUT * len(texts)))
    if len(texts) < 2:
        raise SystemExit(f"{root} must have at least two files {pattern}, has {len(texts)}")

    def characters(some: list[str]) -> Tensor:
        data = "".join(some).encode("ascii", "replace")
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)

    return characters(texts[count:]), characters(texts[:count])


class FullRankAttention(nn.Module):
    """Causal attention with ALiBi by scaled_dot_product_attention, in memory linear in n.

    The softmax does not change if `slope * (j - i)` is replaced by `slope * j`, which is one more
    coordinate of queries and keys. Values get one more, too: SDPA's fast kernel asks for equal
    widths. A mask would hold heads * n * n numbers.
    """

    def __init__(self, width: int, num_heads: int, *, alibi: bool, token_shift: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, width // num_heads
        self.in_proj, self.out_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.conv = None
        if token_shift:
            self.conv = nn.Conv1d(width, width, token_shift + 1, groups=width, bias=False)
            nn.init.zeros_(self.conv.weight)
            nn.init.ones_(self.conv.weight[..., -1])
        slopes = torch.exp2(-8 * torch.arange(1, num_heads + 1) / num_heads)
        self.register_buffer("slopes", slopes if alibi else torch.zeros(num_heads))
        nn.init.xavier_uniform_(self.in_proj.weight)
        nn.init.zeros_(self.in_proj.bias)
        nn.init.zeros_(self.out_proj.bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.conv is not None:
            past = self.conv.kernel_size[0] - 1
            x = self.conv(F.pad(x.transpose(1, 2), (past, 0))).transpose(1, 2)
        q, k, v = self.in_proj(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        scale = self.head_dim**-0.5
        place = torch.arange(x.shape[1]) * self.slopes[:, None] / scale
        k = torch.cat([k, place[..., None].expand(*k.shape[:-1], 1)], -1)
        q, v = F.pad(q, (0, 1), value=1.0), F.pad(v, (0, 1))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)[..., :-1]
        return self.out_proj(out.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """Attention and a feed-forward network, with a LayerNorm before each."""

    def __init__(self, width: int, hidden: int, design: Design) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attention: nn.Module
        heads = width // design.head_dim
        if design.rank is None:
            self.attention = FullRankAttention(
                width, heads, alibi=design.alibi, token_shift=design.token_shift
            )
        else:
            self.attention = LowRankAttention(
                width,
                heads,
                batch_first=True,
                rank=design.rank,
                score=design.score,
                alibi=design.alibi,
                token_shift=design.token_shift,
            )
        self.network = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, x: Tensor) -> Tensor:
        seen = self.norms[0](x)
        if isinstance(self.attention, LowRankAttention):
            x = x + self.attention(seen, seen, seen, is_causal=True)[0]
        else:
            x = x + self.attention(seen)
        return x + self.network(self.norms[1](x))

    def step(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        """The same for the next characters; `state` stands for all earlier ones."""
        found, state = self.attention.step(self.norms[0](x), state)
        x = x + found
        return x + self.network(self.norms[1](x)), state


class Decoder(nn.Module):
    """Logits of the next character at every place."""

    def __init__(self, width: int, layers: int, hidden: int, design: Design) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.blocks = nn.ModuleList([Block(width, hidden, design) for _ in range(layers)])
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, VOCABULARY))

    def forward(self, characters: Tensor) -> Tensor:
        x = self.embedding(characters)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def step(self, characters: Tensor, states: list[Any] | None) -> tuple[Tensor, list[Any]]:
        states = [None] * len(self.blocks) if states is None else states
        x = self.embedding(characters)
        for i, block in enumerate(self.blocks):
            x, states[i] = block.step(x, states[i])
        return self.head(x), states


def count_parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def build(design: Design, width: int, layers: int) -> Decoder:
    """The model with as many parameters as full rank and a network four times as wide as tokens.

    The hidden width of the networks makes up for what the attention has less or more.
    """
    make: Callable[[int, Design], Decoder] = functools.partial(Decoder, width, layers)
    wanted = count_parameters(make(4 * width, Design(rank=None)))
    one, two = (count_parameters(make(hidden, design)) for hidden in (1, 2))
    return make(1 + (wanted - one) // (two - one), design)


@torch.no_grad()
def bits(model: Decoder, text: Tensor, context: int) -> float:
    """Bits per character on the start of the text, cut into pieces of `context` characters."""
    count = max(1, min(MEASURED, len(text) - 1) // context)
    x = text[: count * context + 1].long()
    total = 0.0
    for some in torch.arange(count).split(max(1, 4 * STEP_TOKENS // context)):
        seen = torch.stack([x[i * context : (i + 1) * context + 1] for i in some.tolist()])
        logits = model(seen[:, :-1])
        total += float(F.cross_entropy(logits.flatten(0, 1), seen[:, 1:].flatten())) * len(some)
    return total / count / math.log(2)


def peak_memory(reset: bool = False) -> int:
    """The largest resident memory of this process in bytes, since the last reset (Linux)."""
    status, clear = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not status.exists():
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    if reset:
        clear.write_text("5")
    (line,) = (s for s in status.read_text().splitlines() if s.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


@dataclass(frozen=True)
class Run:
    """One training run: until `steps` steps or `seconds` seconds, whichever is given."""

    model: str
    context: int
    seed: int
    steps: int | None = None
    seconds: float | None = None

    @property
    def name(self) -> str:
        length = f"{self.steps}steps" if self.steps else f"{self.seconds:.0f}s"
        return f"{self.model}-{self.context}-{length}-seed{self.seed}"


def train(
    run: Run,
    text: Tensor,
    held_out: Tensor,
    *,
    width: int,
    layers: int,
    out: Path,
    clock: Callable[[], float] = time.perf_counter,
    show: bool = True,
) -> tuple[Decoder, dict[str, Any]]:
    """The trained model and what was measured; continues from `out` if a run was interrupted."""
    torch.manual_seed(run.seed)
    model = build(DESIGNS[run.model], width, layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.98), fused=True)
    generator = torch.Generator().manual_seed(run.seed)
    step, before = 0, 0.0
    path = out / f"{run.name}.pt"
    if path.exists():
        saved = torch.load(path, weights_only=True)
        model.load_state_dict(saved["model"])
        if "row" in saved:
            return model, json.loads(saved["row"])
        optimizer.load_state_dict(saved["optimizer"])
        generator.set_state(saved["generator"])
        step, before = saved["step"], saved["seconds"]

    def save(**more: Any) -> None:
        states = {"model": model.state_dict(), **more}
        torch.save(states, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)  # a cut-off leaves the old one

    batch = max(1, STEP_TOKENS // run.context)
    peak_memory(reset=True)
    bar = tqdm(total=100, desc=run.name, unit="%", disable=not show)
    start, last_saved, losses = clock(), time.monotonic(), []
    while True:
        past = before + clock() - start
        share = step / run.steps if run.steps else past / run.seconds
        bar.update(min(100, int(100 * share)) - bar.n)
        if share >= 1:
            break
        if time.monotonic() > last_saved + 30:
            saving, last_saved = clock(), time.monotonic()
            save(
                optimizer=optimizer.state_dict(),
                generator=generator.get_state(),
                step=step,
                seconds=past,
            )
            start += clock() - saving  # does not count
        cosine = (1 + math.cos(math.pi * share)) / 2
        for group in optimizer.param_groups:
            rate = RATE * (LAST_RATE + (1 - LAST_RATE) * cosine)
            group["lr"] = rate * min(1.0, (share + 1e-3) / WARM_UP)
        first = torch.randint(len(text) - run.context, (batch,), generator=generator)
        x = torch.stack([text[i : i + run.context + 1] for i in first.tolist()]).long()
        loss = F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        losses = [*losses[-19:], loss.item() / math.log(2)]
        bar.set_postfix(steps=step, bits=f"{sum(losses) / len(losses):.3f}", refresh=False)
    memory = peak_memory()
    row = {
        **asdict(run),
        "steps": step,
        "seconds": round(past, 3),
        "until": "steps" if run.steps else "seconds",
        "parameters": count_parameters(model),
        "bits": round(bits(model, held_out, run.context), 4),
        "tokens_per_second": round(step * batch * run.context / past) if past else None,
        "peak_memory": memory,
    }
    bar.close()
    save(row=json.dumps(row))
    with (out / "rows.jsonl").open("a") as rows:
        rows.write(json.dumps(row) + "\n")
    return model, row


def line(row: dict[str, Any]) -> str:
    return (
        f"{row['model']:24} {row['context']:7,} {row['seed']:4} {row['parameters']:10,}"
        f" {row['steps']:6,} {row['seconds']:7.0f} {row['bits']:9.3f}"
        f" {row['tokens_per_second']:9,} {row['peak_memory'] / 2**20:8.0f}"
    )


HEADER = (
    f"{'model':24} {'context':>7} {'seed':>4} {'parameters':>10} {'steps':>6} {'seconds':>7}"
    f" {'bits/char':>9} {'tokens/s':>9} {'peak MB':>8}"
)


@torch.no_grad()
def generate(model: Decoder, prompt: Tensor, count: int, seed: int = 0) -> tuple[str, list[Any]]:
    """`count` characters after the prompt, and the states of all layers after the last one."""
    generator = torch.Generator().manual_seed(seed)
    logits, states = model.step(prompt.long()[None], None)
    written = []
    for _ in range(count):
        chances = torch.softmax(logits[0, -1] / 0.7, -1)  # a temperature below 1: fewer typos
        character = torch.multinomial(chances, 1, generator=generator)
        written.append(chr(int(character)))
        logits, states = model.step(character[None], states)
    return "".join(written), states


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="default: Python's standard library")
    parser.add_argument("--pattern", default="*.py", help="names of the files in the folder")
    parser.add_argument(
        "--models",
        nargs="+",
        choices=DESIGNS,
        default=["full", "low-rank"],
        metavar="MODEL",
        help=f"the first is the one to compare with; of {', '.join(DESIGNS)}",
    )
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--steps", type=int, default=600, help="at --context; 0: none")
    parser.add_argument(
        "--equal-time",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="at --context, train the other models for the time of the first one, too",
    )
    parser.add_argument("--long-context", type=int, default=16384)
    parser.add_argument("--seconds", type=float, default=120, help="at --long-context; 0: none")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument(
        "--clock", choices=["wall", "cpu"], default="wall", help="cpu: busy machine"
    )
    parser.add_argument("--generate", type=int, default=400, help="characters to write")
    parser.add_argument(
        "--out", type=Path, default=Path("language-model-output"), help="one folder for each size"
    )
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    text, held_out = read_text(options.folder, options.pattern)
    print(f"{len(text):,} characters for training, {len(held_out):,} held out")
    if len(text) <= options.context or len(held_out) <= options.context:
        raise SystemExit("the text must be longer than the context")
    clock = time.process_time if options.clock == "cpu" else time.perf_counter
    common: dict[str, Any] = {"width": options.width, "layers": options.layers}
    common |= {"out": options.out, "clock": clock}
    print(HEADER)
    trained = None

    def compare(run: Run) -> dict[str, Any] | None:
        nonlocal trained
        try:
            model, row = train(run, text, held_out, **common)
        except (MemoryError, RuntimeError) as error:
            if "memory" not in str(error) and not isinstance(error, MemoryError):
                raise
            tqdm.write(f"{run.model:24} {run.context:7,} cannot run: out of memory")
            return None
        tqdm.write(line(row))
        if run.model == "low-rank":
            trained = model
        return row

    for seed in options.seeds:
        if options.steps:
            rows = [
                compare(Run(name, options.context, seed, steps=options.steps))
                for name in options.models
            ]
            if options.equal_time and rows[0]:
                for name in options.models[1:]:
                    compare(Run(name, options.context, seed, seconds=rows[0]["seconds"]))
        if options.seconds:
            if min(len(text), len(held_out)) <= options.long_context:
                print("the text is too short for --long-context")
                continue
            for name in options.models:
                compare(Run(name, options.long_context, seed, seconds=options.seconds))
    if trained is not None and options.generate:
        start = time.perf_counter()
        written, states = generate(trained, held_out[:1000], options.generate)
        seconds = time.perf_counter() - start
        size = sum(state.state_bytes() for state in states)
        print(f"\n{options.generate} characters in {seconds:.1f} s, state {size / 2**20:.1f} MB:\n")
        print(bytes(held_out[900:1000].tolist()).decode("ascii") + "|" + written)


if __name__ == "__main__":
    main()
