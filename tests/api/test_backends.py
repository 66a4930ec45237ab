"""The capability table: who says what about a call, and whether they keep their word."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import boltzattn
import pytest
import torch
from boltzattn.dispatch import backends, plan
from boltzattn.dispatch.backends import BACKENDS, METHODS, OPERATIONS, feature_table, operation_of
from boltzattn.dispatch.extension import extension
from boltzattn.problem import Choice
from servers import PLAIN, Server, facts

ALL = [Server(method, name) for method in METHODS for name in BACKENDS]
REQUESTS = {
    "plain": facts(),
    "rank 3": facts(rank=3),
    "rank 40": facts(rank=40),
    "half": facts(dtype=torch.float16),
    "double": facts(dtype=torch.float64),
    "causal": facts(is_causal=True),
    "attn_mask": facts(attn_mask=True),
    "dropout": facts(dropout=True),
    "long": facts(n_q=1 << 20, n_k=1 << 20),
    "empty": facts(n_q=0, n_k=0),
    "cuda": facts(device="cuda"),
    "xpu": facts(device="xpu"),
}


def _tensors(rank: int = 1, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    shapes = ((2, 8, rank), (2, 8, rank), (2, 8, 4))
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


def _reasons(request: backends.Request, server: Server) -> list[str]:
    operation = operation_of(server.method, request)
    return backends.why_not(request, operation, server.backend)


def test_the_extension_is_built() -> None:
    """Without it most of the tests would run on the reference alone, and pass."""
    assert not isinstance(extension(), str), extension()
    assert "cpu" in {server.backend for server in PLAIN}


def test_every_named_thing_is_in_the_table() -> None:
    assert list(BACKENDS) == [backend.name for backend in BACKENDS.values()]
    for backend in BACKENDS.values():
        assert backend.summary
        assert set(backend.methods) <= set(METHODS)
    for method in METHODS:
        assert any(method in backend.methods for backend in BACKENDS.values())


@pytest.mark.parametrize("name", REQUESTS)
def test_the_reference_serves_everything(name: str) -> None:
    """So that `auto` always finds somebody."""
    assert not _reasons(REQUESTS[name], Server("direct", "reference"))
    assert plan.choose(REQUESTS[name], Choice("auto", "auto")).method in METHODS


@pytest.mark.parametrize("name", REQUESTS)
def test_reasons_are_sentences(name: str) -> None:
    for server in ALL:
        reasons = _reasons(REQUESTS[name], server)
        assert all(isinstance(reason, str) and len(reason) > 10 for reason in reasons)
        assert len(set(reasons)) == len(reasons)


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("server", ALL, ids=str)
def test_the_named_is_taken_or_raises_every_reason(server: Server, name: str) -> None:
    request = REQUESTS[name]
    reasons = _reasons(request, server)
    if not reasons:
        taken = plan.choose(request, Choice(*server))
        assert (taken.method, taken.backend) == server
        return
    with pytest.raises(ValueError, match="cannot serve this call") as raised:
        plan.choose(request, Choice(*server))
    # Reasons of the method come first and are enough: no backend could help.
    operation = operation_of(server.method, request)
    expected = OPERATIONS[operation].why_not(request) or reasons
    for reason in expected:
        assert reason in str(raised.value)


def test_all_reasons_at_once() -> None:
    """A call that a backend cannot serve for two reasons is told both."""
    request = facts(device="xpu", dtype=torch.float64, rank=40)
    assert len(BACKENDS["triton"].why_not(request, "direct")) >= 3
    with pytest.raises(ValueError, match="backend 'triton' cannot serve") as raised:
        plan.choose(request, Choice("direct", "triton"))
    for words in ("runs on cuda tensors, got xpu", "got float64", "ranks up to 16, got 40"):
        assert words in str(raised.value)


def test_explicit_backend_refuses_through_the_front_door() -> None:
    query, key, value = _tensors()
    mask = torch.zeros(8, 8, requires_grad=True)
    with pytest.raises(ValueError, match="backend 'cpu' cannot serve this call") as raised:
        boltzattn.attention(query, key, value, mask, backend="cpu")
    assert "detach()" in str(raised.value)
    boltzattn.attention(query, key, value, mask.detach(), backend="cpu")
    boltzattn.attention(query, key, value, mask).sum().backward()
    assert mask.grad.shape == mask.shape


def test_preferences_nest_and_end() -> None:
    query, key, value = _tensors()

    def taken() -> str:
        return boltzattn.explain(query, key, value).splitlines()[0]

    first = taken()
    with boltzattn.use_backend("reference"):
        assert taken().endswith("backend reference")
        with boltzattn.use_backend("cpu"), boltzattn.use_method("direct"):
            assert taken() == "method direct, backend cpu"
        assert taken().endswith("backend reference")
        # An explicit argument wins.
        explicit = boltzattn.explain(query, key, value, method="direct", backend="cpu")
        assert explicit.startswith("method direct, backend cpu")
        with boltzattn.use_backend("auto"):
            assert taken() == first
    assert taken() == first
    with pytest.raises(KeyError), boltzattn.use_backend("reference"):
        raise KeyError
    assert taken() == first


def test_preference_that_cannot_serve_raises() -> None:
    query, key, value = _tensors()
    mask = torch.zeros(8, 8, requires_grad=True)
    with boltzattn.use_backend("cpu"), pytest.raises(ValueError, match="cannot serve"):
        boltzattn.attention(query, key, value, mask)


def test_explain_names_every_alternative() -> None:
    query, key, value = _tensors(rank=3)
    first, facts_line, not_taken, *others = boltzattn.explain(query, key, value).splitlines()
    assert first == "method direct, backend cpu"
    for words in ("2 heads", "n_q 8", "n_k 8", "rank 3", "dv 4", "float32 on cpu"):
        assert words in facts_line
    assert not_taken == "not taken:"
    *others, elsewhere = others
    assert elsewhere == "  cuda, triton: for tensors on other devices than this"
    assert len(others) == 3  # of two methods on cpu and reference
    request = facts(heads=2, rank=3)
    for line in others:
        names, reason = line.strip().split(": ", 1)
        method, backend = names.split(" on ")
        reasons = _reasons(request, Server(method, backend))
        same = "comes after cpu" if method == "direct" else "would be slower"
        assert reason == ("; ".join(reasons) or same)


def test_explain_does_not_call_slow_what_was_not_asked_for() -> None:
    x = torch.randn(1, 20_000, 1)
    said = boltzattn.explain(x, x, x, method="direct", backend="reference")
    assert "transform on cpu: method='direct' was asked for" in said
    assert "direct on cpu: backend='reference' was asked for" in said


def test_explain_knows_of_gradients_of_masks() -> None:
    query, key, value = _tensors()
    mask = torch.zeros(8, 8, requires_grad=True)
    assert boltzattn.explain(query, key, value, mask).startswith("method direct, backend reference")
    with pytest.raises(ValueError, match="computes no gradient for attn_mask"):
        boltzattn.attention(query, key, value, mask, method="transform")


def test_explain_runs_nothing() -> None:
    """Meta tensors have no data to run on."""
    query, key, value = (x.to("meta") for x in _tensors())
    assert boltzattn.explain(query, key, value).startswith("method direct, backend reference")


def test_fallback_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    request = facts(n_q=12_345, device="cuda")
    with caplog.at_level(logging.INFO, "boltzattn"):
        for _ in range(3):
            assert plan.choose(request, Choice("direct", "auto")).backend == "reference"
    messages = [record.getMessage() for record in caplog.records]
    mine = [message for message in messages if message.startswith("backend cuda not taken")]
    assert len(mine) == 1
    assert "CUDA" in mine[0] or "libboltzattn_cuda" in mine[0]


# -- without the extension -------------------------------------------------------------------------

WITHOUT_EXTENSION = """
import warnings
import torch
def load_library(path):
    raise OSError("undefined symbol: something of another torch")
torch.ops.load_library = load_library
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import boltzattn
    query = torch.randn(2, 5, 3, requires_grad=True)
    out = boltzattn.attention(query, query, query)
    out.sum().backward()
    boltzattn.attention(query, query, query)
    boltzattn.boltz(query)
ours = [w for w in caught if "boltzattn" in str(w.message)]
assert len(ours) == 1, [str(w.message) for w in ours]
assert ours[0].category is RuntimeWarning
for words in ("undefined symbol", "reference", "pip install"):
    assert words in str(ours[0].message), str(ours[0].message)
expected = (query @ query.mT / 3 ** 0.5).softmax(-1) @ query
assert out.shape == expected.shape and query.grad.isfinite().all()
assert boltzattn.explain(query, query, query).startswith("method direct, backend reference")
try:
    boltzattn.attention(query, query, query, backend="cpu")
except ValueError as error:
    assert "undefined symbol" in str(error) and "cpu" in str(error), error
else:
    raise AssertionError("backend='cpu' was served without its extension")
print(torch.equal(out, boltzattn.attention(query, query, query, backend="reference")))
"""


def _python(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **environment},
    )


def test_the_package_works_without_its_extension() -> None:
    """One warning, the reference backend, and a reason for whoever insists on the cpu."""
    done = _python(WITHOUT_EXTENSION)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "True"


def test_importing_is_quiet_and_does_not_load_triton() -> None:
    program = "import sys, boltzattn; print('triton' in sys.modules)"
    done = _python(program, PYTHONWARNINGS="error::RuntimeWarning")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.strip() == "False"


# -- the compiled library --------------------------------------------------------------------------


def test_build_record() -> None:
    record = extension().build_record()
    assert record["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert all(record.values())


def test_instruction_sets() -> None:
    compiled = extension()
    supported = compiled.supported_isas()
    assert compiled.isa() == supported[0]
    assert supported[-1] == "portable"
    with pytest.raises(ValueError, match="sse9"):
        compiled.force_isa("sse9")
    try:
        for name in supported:
            compiled.force_isa(name)
            assert compiled.isa() == name
    finally:
        compiled.force_isa(None)
    assert compiled.isa() == supported[0]


@pytest.mark.parametrize("name", BACKENDS)
def test_kernels_of_the_table_are_there(name: str) -> None:
    """Every cell of a usable backend loads; a cell that names no operation is a mistake."""
    assert set(BACKENDS[name].operations) <= set(OPERATIONS)
    if BACKENDS[name].unavailable():
        return
    for operation in BACKENDS[name].operations:
        kernels: Any = backends.kernels(name, operation)
        parts = kernels if isinstance(kernels, tuple) else (kernels,)
        assert all(callable(part) or isinstance(part, int) for part in parts), operation


def test_the_feature_table_in_the_docs_is_the_table() -> None:
    text = (Path(__file__).parents[2] / "docs/support.md").read_text()
    begin, end = "<!-- features:begin -->\n", "\n<!-- features:end -->"
    assert text[text.index(begin) + len(begin) : text.index(end)].strip() == feature_table()


# -- python -m boltzattn.info ----------------------------------------------------------------------


def test_info_names_everything() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "boltzattn.info"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    words = [boltzattn.__version__, torch.__version__, extension().isa(), *BACKENDS, *METHODS]
    for word in words:
        assert word in done.stdout
    for name in BACKENDS:
        line = next(x for x in done.stdout.splitlines() if x.strip().startswith(name))
        usable = any(server.backend == name for server in PLAIN)
        assert line.endswith("usable") == usable
