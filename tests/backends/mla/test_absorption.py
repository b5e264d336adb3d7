"""The products around decodes give what torch's do, at random sizes, wherever tensors lie, and write nothing else."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

from attn_backends import get_backend
from attn_backends.backends.mla import absorption
from attn_backends.spec import FP8_DTYPES, MLASpec
from attn_backends.testing.cases.random_batch import random_batch
from attn_backends.testing.harness import assert_matches, make_layer
from tests.helpers.interpreted import INTERPRETED, in_own_process, only_interpreted, run_interpreted
from tests.helpers.mutate import copied_module

kernels = pytest.importorskip("attn_backends.backends.mla.absorption_triton", reason="needs triton")
launching = pytest.importorskip("attn_backends.kernels.launch")
variants = pytest.importorskip("attn_backends.kernels.variants")

CPU = torch.device("cpu")
DEVICES = [  # and dtypes: the interpreter takes bfloat16 for something else
    pytest.param(
        ("cpu", torch.float16),
        marks=pytest.mark.skipif(not INTERPRETED, reason="run by test_interpreted, in a process of its own"),
        id="cpu",
    ),
    pytest.param(("cuda", torch.float16), marks=pytest.mark.gpu, id="cuda"),
    pytest.param(("cuda", torch.bfloat16), marks=pytest.mark.gpu, id="cuda_bfloat16"),
]
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1e-2}  # of the largest number
DIMS = ((128, 64, 512, 128), (192, 64, 512, 256), (64, 32, 256, 64), (16, 16, 48, 80))  # nope, rope, rank, values


@in_own_process
def test_interpreted() -> None:
    run_interpreted(__file__)


class Products(NamedTuple):
    """Tensors of one decode; memory around those that are written has NaN."""

    query: torch.Tensor
    w_uk: torch.Tensor
    absorbed: torch.Tensor
    attended: torch.Tensor
    w_uv: torch.Tensor
    output: torch.Tensor
    written: tuple[torch.Tensor, torch.Tensor]  # what `absorbed` and `output` are parts of


def draw(seed: int, device: str, dtype: torch.dtype) -> Products:
    numbers = Random(seed)
    torch.manual_seed(seed)
    nope, rope, rank, values = numbers.choice(DIMS)
    most = 70 if device == "cpu" else 600
    num_tokens = numbers.choice((1, numbers.randint(1, 20), numbers.randint(1, most)))
    heads = numbers.choice((1, 2, 3) if device == "cpu" else (1, 5, 16, 128))
    made: dict[str, Any] = {"device": device, "dtype": dtype}
    columns = rank + numbers.choice((0, 16, 3))  # of what weights are a part of
    weights = (torch.randn(heads, nope + values, columns, **made) / rank**0.5)[..., :rank]
    by_head, gap = numbers.random() < 0.3, numbers.choice((0, 16, 1))

    def model_tensor(dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Token by token or head by head, in rows with a gap between them; and all of the memory."""
        size = (heads, num_tokens + 1) if by_head else (num_tokens + 1, heads)
        whole = torch.full((*size, dim + gap), torch.nan, **made)
        return (whole.transpose(0, 1) if by_head else whole)[:num_tokens, :, :dim], whole

    query, _ = model_tensor(nope + rope)
    output, whole_output = model_tensor(values)
    whole_absorbed = torch.full((num_tokens + 1, heads, rank + rope), torch.nan, **made)
    query.normal_()
    return Products(
        query, weights[:, :nope], whole_absorbed[:num_tokens], torch.randn(num_tokens, heads, rank, **made),
        weights[:, nope:].mT, output, (whole_absorbed, whole_output),
    )  # fmt: skip


def check(seed: int, device: str, dtype: torch.dtype, launches: ModuleType) -> None:
    given = draw(seed, device, dtype)
    nope, rank = given.w_uk.shape[1:]
    absorbed = torch.einsum("thd,hdr->thr", given.query[..., :nope].double(), given.w_uk.double())
    expected = torch.cat([absorbed, given.query[..., nope:].double()], dim=-1)
    projected = torch.einsum("thr,hrd->thd", given.attended.double(), given.w_uv.double())
    launches.launch_absorb(given.query, given.w_uk, given.absorbed, starts_early=True)
    launches.launch_up_project(given.attended, given.w_uv, given.output, starts_early=True)
    for got, wanted, whole in zip((given.absorbed, given.output), (expected, projected), given.written, strict=True):
        assert (got - wanted).abs().max() <= TOLERANCE[dtype] * wanted.abs().max()
        assert int((~whole.isnan()).sum()) == got.numel()
    assert torch.equal(given.absorbed[..., rank:], given.query[..., nope:])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(24))
def test_random_products(seed: int, device: tuple[str, torch.dtype]) -> None:
    check(seed, *device, kernels)


FAULTS = {
    "absorbed tokens behind the last": (
        "absorbed.dtype.element_ty), mask=live",
        "tl.float16), mask=(token <= num_tokens)[:, None]",
    ),
    "no rope keys": ("if tl.program_id(0) == 0:", "if tl.program_id(0) < 0:"),
    "one part of a head's weight": ("part * BLOCK_NOPE * weight_row", "0 * part"),
    "heads of W_UK side by side": ("head * weight_head + nope", "head * NOPE * RANK + nope"),
    "rows of W_UV side by side": ("value[:, None] * weight_row", "value[:, None] * RANK"),
    "projected tokens behind the last": (
        "output.dtype.element_ty), mask=live",
        "tl.float16), mask=(token <= num_tokens)[:, None]",
    ),
}


@only_interpreted
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attn_backends.kernels.operators.INTERPRETED", False)  # torch has operators of these names
    wrong = copied_module(kernels, tmp_path, FAULTS[fault])
    with pytest.raises(AssertionError):
        all(check(seed, "cpu", torch.float16, wrong) is None for seed in range(24))


@only_interpreted
@pytest.mark.parametrize("cache_dtype", [torch.float16, FP8_DTYPES[0]], ids=str)
@pytest.mark.parametrize("query_len", [1, 3])
def test_layers(query_len: int, cache_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer with launches of ours around its decode, and with torch's where there are many tokens."""
    counts = dict.fromkeys(("launch_absorb", "launch_up_project"), 0)
    for name in counts:
        real = getattr(kernels, name)

        def counted(*given: Any, name: str = name, real: Any = real) -> None:
            assert given[-1] is True  # these and TRITON_MLA's kernels start early
            counts[name] += 1
            real(*given)

        monkeypatch.setattr(kernels, name, counted)
    monkeypatch.setattr("attn_backends.backends.mla.impl.suits_kernels", lambda *given: True)
    backend, spec = get_backend("TRITON_MLA"), MLASpec(2, dtype=torch.float16, cache_dtype=cache_dtype)
    batch = random_batch(backend, spec, [30, 5, 17], [query_len] * 3, page_size=16, poison=torch.nan)
    layer, expected = make_layer(backend, batch), batch.expected()
    for most_absorbed, most_projected in ((99, 99), (99, 1), (1, 1)):
        monkeypatch.setattr(absorption, "_MOST_ABSORBED", most_absorbed)
        monkeypatch.setattr(absorption, "_MOST_PROJECTED", most_projected)
        assert_matches(layer.forward(batch, layer.begin(batch)), batch, "TRITON_MLA", expected)
    assert counts == {"launch_absorb": 2, "launch_up_project": 1}


FAMILY = {
    "torch_mla": "TorchMLA",
    "triton_mla": "TritonMLA",
    "flashmla": "FlashMLA",
    "flashinfer_mla": "FlashInferMLA",
    "flash_attn_mla": "FlashAttnMLA",
}


@pytest.mark.parametrize("folder", FAMILY)
def test_only_kernels_of_ours_start_early(folder: str) -> None:
    """Layers came out wrong with FlashMLA's between kernels that started early."""
    for part in ("Impl", "State"):
        module = importlib.import_module(f"attn_backends.backends.mla.{folder}.{part.lower()}")
        assert getattr(module, FAMILY[folder] + part).starts_early == (folder == "triton_mla")


HOPPER, BLACKWELL = (132, 227 << 10, True, True, True), (148, 227 << 10, True, False, True)
AMPERE = (108, 163 << 10, False, False, False)  # see `launch.Machine`
DEEPSEEK = MLASpec(16, dtype=torch.bfloat16)


@pytest.mark.skipif(INTERPRETED, reason="interpreted kernels are not compiled")
@pytest.mark.parametrize(
    ("spec", "machine", "suits"),
    [
        (DEEPSEEK, HOPPER, True),
        (DEEPSEEK, BLACKWELL, True),
        (DEEPSEEK, AMPERE, False),
        (replace(DEEPSEEK, cache_dtype=FP8_DTYPES[0]), HOPPER, True),
        (replace(DEEPSEEK, dtype=torch.float32, cache_dtype=torch.float32), HOPPER, False),
        (replace(DEEPSEEK, head_dim=24 + 64), HOPPER, False),
        (replace(DEEPSEEK, head_dim=128 + 48, qk_rope_head_dim=48), HOPPER, False),
    ],
)
def test_which_layers_they_serve(spec: MLASpec, machine: tuple[Any, ...], suits: bool) -> None:
    rows = spec.num_qo_heads * (spec.qk_nope_head_dim + spec.head_dim_vo)
    weight = torch.empty(rows, spec.kv_lora_rank, dtype=spec.dtype, device="meta")
    assert not absorption.suits_kernels(spec, weight, CPU)
    with variants.listing(launching.Machine(*machine)):
        assert absorption.suits_kernels(spec, weight, CPU) == suits
        assert not absorption.suits_kernels(spec, weight.T.contiguous().T, CPU)
