"""Emulated and real MLA kernels on the same inputs agree: outputs, LSEs, sizes of schedules and refusals."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from attn_backends import KVCacheSpec, MLASpec
from attn_backends.backends.mla.flash_attn_mla.library import DecodeCall, DecodeTensors, VllmKernels
from attn_backends.backends.mla.flashmla.library import FilledSchedule, Kernels, MadeSchedule, load_kernels
from attn_backends.backends.mla.metadata import DecodeRows
from attn_backends.testing.harness import output_error
from tests.emulated import flash_attn_mla, flashinfer as emulated_flashinfer, flashmla, flashmla_older

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]

LENS = {"short": (33, 64, 8, 200), "idle rows": (20, 0, 300), "long": (2000, 9, 64, 65, 700)}
SIZES = [(1, 1), (3, 1), (16, 1), (16, 4), (128, 1), (128, 8)]  # heads, query tokens a row
SCALE = 0.05


class Case:
    """One batch, its tensors on the host."""

    def __init__(self, lens: str, heads: int, query_len: int, page_size: int) -> None:
        generator = torch.Generator().manual_seed(heads)
        self.lens = torch.tensor(LENS[lens], dtype=torch.int32)
        self.page_size, self.query_len = page_size, query_len
        width = -(-int(self.lens.max()) // page_size)
        pages = torch.randperm(len(self.lens) * width, generator=generator).int()
        self.table = pages.view(len(self.lens), width)
        self.query = torch.randn(len(self.lens), query_len, heads, 576, generator=generator).bfloat16()
        self.cache = torch.randn(len(pages), page_size, 576, generator=generator).bfloat16()

    def compare(self, run: Callable[[str], tuple[torch.Tensor, torch.Tensor]], empty_lse: float) -> None:
        """Outputs [tokens, heads, 512] and LSEs [tokens, heads] of the real kernels ("cuda") and the emulated."""
        (out, lse), (expected, expected_lse) = ([tensor.cpu() for tensor in run(device)] for device in ("cuda", "cpu"))
        live = (self.lens > 0).repeat_interleave(self.query_len)
        assert bool((out[~live] == 0).all())
        assert bool((lse[~live] == empty_lse).all())
        assert bool((expected_lse[~live] == empty_lse).all())
        assert output_error(out[live], expected[live].double()) < 2e-2
        torch.testing.assert_close(lse[live], expected_lse[live], atol=2e-2, rtol=2e-2)


# FlashMLA.


@pytest.fixture(scope="module")
def real_flashmla() -> Kernels:
    try:
        return load_kernels()
    except ModuleNotFoundError as error:
        pytest.skip(str(error))


def call(kernels: Kernels, case: Case, device: str) -> tuple[torch.Tensor, torch.Tensor, tuple[Any, Any]]:
    query, cache, table, lens = (tensor.to(device) for tensor in (case.query, case.cache, case.table, case.lens))
    rows = DecodeRows(len(lens), case.query_len, table, lens, case.lens, None)
    schedule = FilledSchedule(kernels, in_graph=False) if kernels.fills_schedules else MadeSchedule(kernels)
    schedule.plan(rows, query.shape[2])
    output = torch.full((*query.shape[:3], 512), math.nan, dtype=query.dtype, device=device)
    lse = kernels.run(query, cache, table, lens, schedule.of(None), SCALE, output)
    return output.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1), schedule.of(None)


def emulated_like(kernels: Kernels) -> Kernels:
    return Kernels(flashmla if kernels.fills_schedules else flashmla_older)


def shapes(schedule: tuple[Any, Any]) -> list[tuple[int, ...]]:
    meta, splits = schedule
    tensors = (meta, splits) if splits is not None else (meta.tile_scheduler_metadata, meta.num_splits)
    return [tuple(tensor.shape) for tensor in tensors]


@pytest.mark.parametrize("lens", LENS)
@pytest.mark.parametrize(("heads", "query_len"), SIZES)
def test_flashmla(real_flashmla: Kernels, lens: str, heads: int, query_len: int) -> None:
    case = Case(lens, heads, query_len, 64)
    by_device = {"cuda": real_flashmla, "cpu": emulated_like(real_flashmla)}
    found = {}

    def run(device: str) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse, schedule = call(by_device[device], case, device)
        found[device] = shapes(schedule)
        return out, lse

    case.compare(run, math.inf)
    if torch.cuda.get_device_properties(0).multi_processor_count == 132:
        assert found["cuda"] == found["cpu"]


def _other_pages(case: Case) -> None:
    case.cache = case.cache.view(-1, 32, 576)


def _other_dtype(case: Case) -> None:
    case.cache = case.cache.half()


def _other_width(case: Case) -> None:
    case.query = case.query[..., :320].contiguous()
    case.cache = case.cache[..., :320].contiguous()


def _wide_table(case: Case) -> None:
    case.table = case.table.long()


@pytest.mark.parametrize("wrong", [_other_pages, _other_dtype, _other_width, _wide_table])
def test_flashmla_refusals(real_flashmla: Kernels, wrong: Callable[[Case], None]) -> None:
    case, raised = Case("short", 16, 1, 64), []
    wrong(case)
    for kernels, device in ((real_flashmla, "cuda"), (emulated_like(real_flashmla), "cpu")):
        with pytest.raises(Exception) as caught:  # noqa: PT011 (which it is, is what is compared)
            call(kernels, case, device)
        raised.append(caught.type)
    assert raised[0] is raised[1]


# FlashInfer.


@pytest.fixture(scope="module")
def real_flashinfer() -> Any:
    return pytest.importorskip("flashinfer")


@pytest.mark.parametrize("kernels", ["fa2", "fa3"])
@pytest.mark.parametrize("lens", LENS)
@pytest.mark.parametrize(
    ("heads", "query_len", "page_size"), [(*size, 16) for size in SIZES] + [(16, 1, 1), (128, 2, 64)]
)
def test_flashinfer(real_flashinfer: Any, kernels: str, lens: str, heads: int, query_len: int, page_size: int) -> None:
    """Over views of one latent cache, and a page table as the list of pages."""
    if kernels == "fa3" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("fa3 runs on Hopper GPUs alone")
    case = Case(lens, heads, query_len, page_size)

    def run(device: str) -> tuple[torch.Tensor, torch.Tensor]:
        module = real_flashinfer if device == "cuda" else emulated_flashinfer
        workspace = torch.empty(128 << 20, dtype=torch.uint8, device=device)
        wrapper = module.mla.BatchMLAPagedAttentionWrapper(workspace, backend=kernels)
        counts = torch.arange(len(case.lens) + 1, dtype=torch.int32)
        wrapper.plan(
            counts * query_len, counts * case.table.shape[1], case.table.flatten().to(device), case.lens, heads, 512,
            64, page_size, query_len > 1, SCALE, torch.bfloat16, torch.bfloat16,
        )  # fmt: skip
        query, cache = case.query.flatten(0, 1).to(device), case.cache.to(device)
        out, lse = wrapper.run(
            query[..., :512], query[..., 512:], cache[..., :512], cache[..., 512:], return_lse=True,
            out=torch.full((*query.shape[:2], 512), math.nan, dtype=query.dtype, device=device),
        )  # fmt: skip
        return out, lse

    case.compare(run, -math.inf)


# FlashAttention.


@pytest.mark.parametrize("num_splits", [1, 8, 128])
@pytest.mark.parametrize("lens", LENS)
@pytest.mark.parametrize(("heads", "query_len"), SIZES)
def test_flash_attention_3(lens: str, heads: int, query_len: int, num_splits: int) -> None:
    """Rows without keys, whose queries nobody reads, come back as zeros too: no launch of ours writes them."""
    pytest.importorskip("vllm.vllm_flash_attn")
    from attn_backends.backends.mla.flash_attn_mla.library import load

    case = Case(lens, heads, query_len, 32)

    def run(device: str) -> tuple[torch.Tensor, torch.Tensor]:
        query, cache, table, lens = (of.to(device) for of in (case.query, case.cache, case.table, case.lens))
        kernels = load() if device == "cuda" else VllmKernels(flash_attn_mla)
        starts = torch.arange(len(lens) + 1, dtype=torch.int32, device=device) * query_len
        longest = table.shape[1] * case.page_size
        call = DecodeCall(kernels, starts, query_len, table, lens, longest, num_splits, schedule=starts)
        spec, pages = MLASpec(heads, dtype=torch.bfloat16), KVCacheSpec(len(cache), case.page_size)
        call = replace(call, schedule=kernels.schedule(call, spec, pages))
        q_nope, q_pe = query.flatten(0, 1).split([512, 64], dim=-1)
        latent, rope = cache.unsqueeze(2).split([512, 64], dim=-1)
        out = torch.full_like(q_nope, math.nan)
        sums = kernels.decode(DecodeTensors(q_pe, q_nope, rope, latent, out), SCALE, call)
        return out, sums.t()

    case.compare(run, -math.inf)
