"""examples/language_model.py in small: equal models, resumed runs, text from a fixed state."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

SMALL = {"width": 32, "layers": 2}


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    return importlib.import_module("language_model")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for i in range(20):
        text = f"def add_{i}(a, b):\n    return a + b + {i}  # é\n" * 20
        (tmp_path / f"file_{i}.py").write_text(text, encoding="utf-8")
    return tmp_path


def test_all_models_have_the_same_number_of_parameters(example: ModuleType) -> None:
    for width in (64, 128):
        counts = {
            name: example.count_parameters(example.build(design, width, 2))
            for name, design in example.DESIGNS.items()
        }
        assert max(counts.values()) - min(counts.values()) < 0.01 * counts["full"], counts


def test_full_rank_is_sdpa_with_alibi_as_a_mask(example: ModuleType) -> None:
    layer = example.FullRankAttention(32, 2, alibi=True, token_shift=0).double()
    x = torch.randn(2, 9, 32, dtype=torch.float64)
    q, k, v = (
        y.unflatten(-1, (2, -1)).transpose(1, 2)
        for y in F.linear(x, *layer.in_proj.parameters()).chunk(3, -1)
    )
    place = torch.arange(9)
    mask = layer.slopes[:, None, None] * (place - place[:, None])
    mask = mask.masked_fill(place > place[:, None], -torch.inf)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    wanted = layer.out_proj(out.transpose(1, 2).flatten(-2))
    torch.testing.assert_close(layer(x), wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["low-rank", "full", "full-shift"])
def test_no_character_sees_a_later_one(example: ModuleType, name: str) -> None:
    model = example.build(example.DESIGNS[name], **SMALL)
    x = torch.randint(128, (1, 40))
    changed = x.clone()
    changed[0, 30:] = 5
    with torch.no_grad():
        torch.testing.assert_close(model(x)[:, :30], model(changed)[:, :30])


def test_steps_give_the_logits_of_the_whole(example: ModuleType) -> None:
    torch.manual_seed(0)
    model = example.build(example.DESIGNS["low-rank"], **SMALL).double()
    x = torch.randint(128, (1, 60))
    with torch.no_grad():
        whole = model(x)
        parts, states = model.step(x[:, :40], None)
        for i in range(40, 60):
            logits, states = model.step(x[:, i : i + 1], states)
            parts = torch.cat([parts, logits], 1)
    # What the tables of two layers in fp64 are accurate to.
    torch.testing.assert_close(parts, whole, rtol=0.0, atol=1e-7)


def test_an_interrupted_run_continues(example: ModuleType, folder: Path, monkeypatch) -> None:
    text, held_out = example.read_text(folder, "*.py")
    run = example.Run("low-rank", 16, 0, steps=4)

    def train(out: str) -> dict:
        (folder / out).mkdir(exist_ok=True)
        found = example.train(run, text, held_out, **SMALL, out=folder / out, show=False)
        return found[0].state_dict()

    wanted = train("whole")
    clip, calls = torch.nn.utils.clip_grad_norm_, []
    now = iter(range(0, 10**6, 100))  # every step is late enough for a checkpoint
    monkeypatch.setattr(example.time, "monotonic", lambda: next(now))

    def interrupt(*args: object) -> object:
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return clip(*args)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", interrupt)
    with pytest.raises(KeyboardInterrupt):
        train("parts")
    found = train("parts")
    assert len(calls) == 3 + 2
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


def test_runs_and_is_not_run_again(example: ModuleType, folder: Path, monkeypatch, capsys) -> None:
    options = ["--folder", str(folder), "--width", "32", "--layers", "1", "--context", "32"]
    options += ["--steps", "2", "--long-context", "64", "--seconds", "0.05", "--generate", "5"]
    monkeypatch.setattr(sys, "argv", ["x", *options, "--out", str(folder / "out")])
    example.main()
    printed = capsys.readouterr().out
    rows = [line for line in printed.splitlines() if line.startswith(("full ", "low-rank "))]
    assert [line.split()[:2] for line in rows] == [
        ["full", "32"],
        ["low-rank", "32"],
        ["low-rank", "32"],  # equal time
        ["full", "64"],
        ["low-rank", "64"],
    ]
    assert "5 characters in" in printed
    monkeypatch.setattr(torch.Tensor, "backward", None)
    example.main()
    again = capsys.readouterr().out
    assert [line for line in again.splitlines() if line in rows] == rows
