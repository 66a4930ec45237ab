"""A fixed minute of `make fuzz`, and the fuzzer itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fuzz import judge, run
from fuzz.calls import eagers, results_of
from fuzz.cases import Case, build, draw
from fuzz.oracle import Found, Softmax, truth

SEEDS_PER_TEST = 250


@pytest.mark.parametrize("first", range(0, 24 * SEEDS_PER_TEST, SEEDS_PER_TEST))
def test_seeds(first: int) -> None:
    torch.set_num_threads(1)
    wrong = []
    for seed in range(first, first + SEEDS_PER_TEST):
        case = draw(seed)
        if (message := run.failure(case)) is not None:
            wrong.append(run.as_test(case, message))
    assert not wrong, "\n".join(wrong)


# What `make fuzz` found in other seeds, and why it was wrong.
FOUND = {
    "lse slopes were measured from an end key, far from all keys with weight": Case(
        seed=2000853,
        method="transform",
        lead=(4,),
        n_k=149,
        family="heavy",
        values="tiny",
        temperature=2.36,
        grad_lse=True,
    ),
    "fused products told tied keys apart": draw(2062459),
    "the weights of a row were one running sum": Case(
        seed=2003618,
        dtype="fp64",
        lead=(3,),
        n_q=28,
        n_k=257,
        dv=3,
        family="needle",
        queries="spread",
        values="one_hot",
        temperature=816.0,
        isa="portable",
    ),
    "the inverse of the extent of denormal keys overflowed at rank 2": Case(
        seed=9001211,
        method="transform",
        backend="reference",
        dtype="fp64",
        n_k=2,
        rank=2,
        family="denormal",
        temperature=10.0,
        digits=1,
    ),
    "a scan counted keys that no row sees": Case(
        seed=3000253,
        method="transform",
        n_q=38,
        n_k=55,
        dv=2,
        family="ladder",
        temperature=50.0,
        causal=True,
        mask="padding",
        grad_lse=True,
        digits=1,
    ),
    "logit gradients times keys overflowed before they were scaled": Case(
        seed=3014035, n_k=2, family="huge", values="large", temperature=0.3, scale=0.0, digits=1
    ),
    "keys past the last one were read from scratch memory": draw(2942),
    "weights were rebuilt from the logarithm of their sum": draw(3065592),
    "the judge did not know of weights that are left out": draw(4001906),
    "a biased scan took logits whose lse is rounded by more than its tolerance": draw(5046328),
}


@pytest.mark.parametrize("case", FOUND.values(), ids=FOUND)
def test_found(case: Case) -> None:
    judge.check(case)


def test_a_case_is_a_function_of_its_seed() -> None:
    for seed in range(50):
        case = draw(seed)
        assert case == draw(seed)
        assert eval(repr(case)) == case
        for one, other in zip(*(build(case).tensors.values() for _ in range(2)), strict=True):
            assert torch.equal(one, other)
            assert one.stride() == other.stride()


def test_oracle_agrees_with_autograd_where_fp64_is_enough() -> None:
    """Gaussian numbers at a low temperature: eager fp64 is within a few eps of the terms."""
    plain = {"dtype": "fp64", "temperature": 3.0, "family": "gaussian", "queries": "gaussian"}
    seen = set()
    for seed in range(200):
        case = replace(draw(seed), **plain, values="gaussian", amplitude=1.0)
        case = replace(case, n_q=min(case.n_q, 40), n_k=min(case.n_k, 40), compiled=False)
        if case.kind == "layer":
            case = replace(case, n_q=case.n_k)
        inputs = build(case)
        exact, sizes, _ = truth(case, inputs)
        for name, x in next(eagers(case, inputs)).items():
            finite = exact[name].isfinite()
            off = (x - exact[name])[finite].abs()
            assert torch.equal(x[~finite], exact[name][~finite]), (case, name)
            assert off.numel() == 0 or off.max() <= 4e-15 * max(sizes[name], 1e-300), (case, name)
            seen.add((case.kind, name))
    assert len(seen) > 30


def test_by_logits_is_the_most_that_moved_logits_do() -> None:
    """Against finite differences: never more, and nearly as much."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, n, width)) for n, width in ((6, 3), (9, 3), (9, 4)))
    g, h, step = rng.standard_normal((1, 6, 4)), rng.standard_normal((1, 6)), 1e-6

    def derive(bias: np.ndarray) -> dict[str, Found]:
        softmax = Softmax(3 * q, k, v, bias, 1.0)
        return softmax.forward() | softmax.vjp(g, h)

    at = derive(np.zeros((6, 9)))
    logits = 3 * q[0] @ k[0].T
    most: dict[str, float] = {}
    for _ in range(500):
        moved = derive(rng.choice([-step, step], logits.shape) * logits)
        for name, (exact, _, by_logits) in at.items():
            if by_logits is not None:
                ratio = np.abs(moved[name].exact - exact) / (step * by_logits)
                most[name] = max(most.get(name, 0.0), float(ratio.max()))
    inputs = ("query", "key", "value", "key_bias", "alibi_slopes")
    assert most.keys() == {"out", *(f"grad_{name}" for name in inputs)}
    assert all(ratio < 1.001 for ratio in most.values()), most
    del most["grad_alibi_slopes"]  # signs of all pairs at once do not come up by chance
    assert all(ratio > 0.6 for ratio in most.values()), most


def test_a_wrong_kernel_is_found_and_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A method that forgets the last key of more than four."""

    def forgetful(case: Case, inputs: run.Any) -> dict[str, torch.Tensor]:
        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple:
            if k.shape[-2] > 4:
                k, v = k[..., :-1, :], v[..., :-1, :]
            weights = (q @ k.mT).softmax(-1)
            return weights @ v, (q @ k.mT).logsumexp(-1)

        return results_of(case, inputs, attend)

    monkeypatch.setattr(judge, "ours", forgetful)
    case = Case(
        seed=3,
        dtype="fp64",
        lead=(2,),
        n_q=17,
        n_k=33,
        dv=5,
        strides="sliced",
        threads=7,
        scale=1.0,
    )
    message = run.failure(case)
    assert message is not None
    small, message = run.shrink(case, message)
    assert (small.n_q, small.n_k, small.dv) == (1, 5, 1)
    assert replace(small, seed=0, digits=0, n_k=1) == Case()
    assert "judge.check(Case(seed=3, n_k=5" in run.as_test(small, message)


def test_counts_add_up_over_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "failure", lambda case: None if case.seed % 10 else "wrong")
    file = tmp_path / "counts.json"
    found = 0
    for seeds in (range(0, 40), range(30, 60), range(100, 110)):
        found += run.run(run.Counts(file), iter(seeds), 60.0, most_shown=0)
    counts = run.Counts(file)
    assert sum(last - first for first, last in counts.ranges) == 70
    assert counts.next_seed() == 110
    cells = {name: sum(x.values()) for name, x in counts.cells.items()}
    assert sum(n for name, n in cells.items() if name.startswith("cell: ")) == 70
    assert cells["backend: reference"] == sum(
        draw(s).backend == "reference" for s in [*range(60), *range(100, 110)]
    )
    assert len(counts.wrong) == found == 7  # 0, 10, ..., 50 and 100
