"""Emulated and real FlashAttention on the same inputs agree: outputs, LSEs, schedules' sizes and refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from attn_backends.testing.harness import output_error
from tests.emulated import flash_attn as emulated_fa2, vllm_flash_attn as emulated_vllm

pytestmark = pytest.mark.gpu

HEADS, KV_HEADS, DIM = 8, 2, 64
LENS = {  # query lengths, and lengths of keys
    "decode": ((1, 1, 1, 1), (33, 256, 1, 900)),
    "verify": ((4, 4, 4), (33, 300, 4)),
    "chunks": ((5, 1, 17, 40), (33, 16, 17, 600)),
    "long": ((130, 290), (130, 700)),
    "idle rows": ((1, 1, 1), (20, 0, 7)),
    "idle chunks": ((3, 3, 3), (20, 0, 7)),
    "chunks that are lent a key": ((3, 3, 3), (20, 1, 7)),
}
RULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "non-causal": {"causal": False},
    "scale": {"softmax_scale": 0.3},
    "window": {"window_size": (15, 0)},
    "non-causal window": {"window_size": (15, -1), "causal": False},
    "soft cap": {"softcap": 1.5},
    "alibi": {"alibi_slopes": tuple(2.0**-h for h in range(HEADS))},
    "alibi and window": {"alibi_slopes": tuple(2.0**-h for h in range(HEADS)), "window_size": (40, 0)},
    "sinks": {"s_aux": tuple(0.5 * h - 1 for h in range(HEADS))},
}
Outputs = tuple[torch.Tensor, torch.Tensor]  # [num_tokens, heads, dim], and the LSE [num_tokens, heads]


@dataclass(frozen=True)
class Library:
    """One build, real or emulated, and where it runs."""

    module: Any
    device: str


class Case:
    """One batch, given to either side."""

    def __init__(self, lens: str, page_size: int, dtype: torch.dtype = torch.bfloat16) -> None:
        self.query_lens, self.kv_lens = LENS[lens]
        generator = torch.Generator().manual_seed(len(lens))
        used = [-(-n // page_size) for n in self.kv_lens]
        num_pages = sum(used) + 4
        shuffled = torch.randperm(num_pages, generator=generator).int()
        self.table = torch.zeros(len(used), max(used), dtype=torch.int32)
        for row, (count, start) in enumerate(zip(used, torch.tensor([0, *used]).cumsum(0).tolist(), strict=False)):
            self.table[row, :count] = shuffled[start : start + count]
        self.starts = torch.tensor([0, *self.query_lens]).cumsum(0).int()
        self.lens = torch.tensor(self.kv_lens).int()
        self.query = torch.randn(sum(self.query_lens), HEADS, DIM, generator=generator).to(dtype)
        shape = (num_pages, page_size, KV_HEADS, DIM)
        self.key, self.value = (torch.randn(shape, generator=generator).to(dtype) for _ in "kv")
        self.page_size = page_size

    def of(self, device: str, rules: dict[str, Any]) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
        tensors = (self.query, self.key, self.value, self.starts, self.lens, self.table)
        given: dict[str, Any] = {"softmax_scale": DIM**-0.5, "causal": True, **rules}
        for name, dtype in (("alibi_slopes", torch.float32), ("s_aux", torch.bfloat16)):
            if name in given:
                given[name] = torch.tensor(given[name], dtype=dtype, device=device)
        return tuple(tensor.to(device) for tensor in tensors), given


def uniform_fa2(library: Library, case: Case, rules: dict[str, Any]) -> Outputs:
    (query, key, value, _, lens, table), given = case.of(library.device, rules)
    rows = query.unflatten(0, (len(lens), case.query_lens[0]))
    out, lse = library.module.flash_attn_with_kvcache(
        rows, key, value, cache_seqlens=lens, block_table=table, return_softmax_lse=True, **given
    )
    return out.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)


def extension_fa2(library: Library, case: Case, rules: dict[str, Any]) -> Outputs:
    """Below the package's functions, as FLASH_ATTN calls it: the output in place."""
    (query, key, value, starts, lens, table), given = case.of(library.device, rules)
    left, right = given.get("window_size", (-1, -1))
    out = torch.empty_like(query)
    _, lse, *_ = library.module.varlen_fwd(
        query, key, value, out, starts, starts, lens, None, table, given.get("alibi_slopes"),
        max(2, *case.query_lens), max(case.kv_lens), 0.0, given["softmax_scale"], False, given["causal"], left, right,
        given.get("softcap", 0.0), False, None,
    )  # fmt: skip
    return out, lse.t()


def vllm_fa3(library: Library, case: Case, rules: dict[str, Any], scheduled: bool = True) -> Outputs:
    (query, key, value, starts, lens, table), given = case.of(library.device, rules)
    sizes = {"max_seqlen_q": max(case.query_lens), "max_seqlen_k": max(case.kv_lens)}
    schedule = make_schedule(library, case, rules) if scheduled else None
    out = torch.empty_like(query)
    _, lse = library.module.flash_attn_varlen_func(
        query, key, value, **sizes, cu_seqlens_q=starts, seqused_k=lens, block_table=table, return_softmax_lse=True,
        out=out, scheduler_metadata=schedule, fa_version=3, **given,
    )  # fmt: skip
    return out, lse.t()


def make_schedule(library: Library, case: Case, rules: dict[str, Any]) -> torch.Tensor:
    (_, _, _, starts, lens, _), given = case.of(library.device, rules)
    made: torch.Tensor = library.module.get_scheduler_metadata(
        batch_size=len(case.kv_lens), max_seqlen_q=max(case.query_lens), max_seqlen_k=max(case.kv_lens),
        num_heads_q=HEADS, num_heads_kv=KV_HEADS, headdim=DIM, cache_seqlens=lens, qkv_dtype=case.query.dtype,
        cu_seqlens_q=starts, page_size=case.page_size, causal=given["causal"],
        window_size=given.get("window_size", (-1, -1)), has_softcap="softcap" in given,
    )  # fmt: skip
    return made


@pytest.fixture(scope="module")
def fa2() -> tuple[Library, Library]:
    return Library(pytest.importorskip("flash_attn"), "cuda"), Library(emulated_fa2, "cpu")


@pytest.fixture(scope="module")
def fa2_extension() -> tuple[Library, Library]:
    pytest.importorskip("flash_attn")
    return Library(pytest.importorskip("flash_attn_2_cuda"), "cuda"), Library(emulated_fa2, "cpu")


@pytest.fixture(scope="module")
def fa3() -> tuple[Library, Library]:
    real = pytest.importorskip("vllm.vllm_flash_attn.flash_attn_interface")
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("FlashAttention 3 is for Hopper GPUs")
    return Library(real, "cuda"), Library(emulated_vllm, "cpu")


def compare(
    run: Callable[[Library, Case, dict[str, Any]], Outputs], pair: tuple[Library, Library], case: Case, rules: str
) -> None:
    (out, lse), (expected, expected_lse) = (run(library, case, RULES[rules]) for library in pair)
    out, lse = out.cpu(), lse.cpu()
    if bool(expected_lse.isnan().all()):  # the kernel leaves it undefined
        assert output_error(out, expected.double()) < 2e-2
        return
    assert torch.equal(lse.isinf(), expected_lse.isinf()), "they differ in which tokens have keys"
    assert torch.equal(lse[lse.isinf()], expected_lse[lse.isinf()]), "infinities of another sign"
    live = ~expected_lse.isinf()
    assert bool((out[~live.any(-1)] == 0).all())
    rows = live.any(-1)
    assert output_error(out[rows], expected[rows].double()) < 2e-2
    torch.testing.assert_close(lse[live], expected_lse[live], atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("rules", [name for name in RULES if name != "sinks"])
@pytest.mark.parametrize("lens", ["decode", "verify", "idle rows", "idle chunks"])
def test_flash_attention_2_on_rows_of_one_length(fa2: tuple[Library, Library], lens: str, rules: str) -> None:
    compare(uniform_fa2, fa2, Case(lens, 256), rules)


@pytest.mark.parametrize("rules", [name for name in RULES if name != "sinks"])
@pytest.mark.parametrize("lens", ["verify", "chunks", "long", "chunks that are lent a key"])
def test_flash_attention_2_on_any_rows(fa2_extension: tuple[Library, Library], lens: str, rules: str) -> None:
    """Never rows without keys, whose LSEs it writes beyond its tensor: FLASH_ATTN lends them a key."""
    compare(extension_fa2, fa2_extension, Case(lens, 256), rules)


@pytest.mark.parametrize("scheduled", [True, False])
@pytest.mark.parametrize("rules", [name for name in RULES if "alibi" not in name])
@pytest.mark.parametrize("lens", [name for name in LENS if name != "chunks that are lent a key"])
def test_flash_attention_3(fa3: tuple[Library, Library], lens: str, rules: str, scheduled: bool) -> None:
    compare(lambda *given: vllm_fa3(*given, scheduled=scheduled), fa3, Case(lens, 16), rules)


@pytest.mark.parametrize("rules", [name for name in RULES if "alibi" not in name and name != "sinks"])
@pytest.mark.parametrize("lens", [name for name in LENS if name != "chunks"])
def test_schedules_have_the_same_size(fa3: tuple[Library, Library], lens: str, rules: str) -> None:
    """Whether keys may be split is a guess of the emulation's: where it guesses otherwise, a vector is missing."""
    real, ours = (make_schedule(library, Case(lens, 16), RULES[rules]) for library in fa3)
    rounded = -(-len(LENS[lens][0]) // 4) * 4
    assert real.dtype is ours.dtype is torch.int32
    assert (len(real) - len(ours)) in (-rounded, 0, rounded)


@pytest.mark.parametrize("page_size", [16, 32, 48])
@pytest.mark.parametrize("lens", ["chunks", "long"])
def test_flash_attention_3_does_not_spread_nan(fa3: tuple[Library, Library], lens: str, page_size: int) -> None:
    """What lies past a row's length in its last page, in pages of the sizes that we declare."""
    case = Case(lens, page_size)
    for cached in (case.key, case.value):
        keep = cached.clone()
        cached.fill_(torch.nan)
        for row, length in enumerate(case.kv_lens):
            for page, first in zip(case.table[row].tolist(), range(0, length, page_size), strict=False):
                count = min(page_size, length - first)
                cached[page, :count] = keep[page, :count]
    compare(vllm_fa3, fa3, case, "plain")


def _wrong_table(case: Case) -> None:
    case.table = case.table.long()


def _wrong_lens(case: Case) -> None:
    case.lens = case.lens[:-1]


def _wrong_key(case: Case) -> None:
    case.key = case.key.half()


def _wrong_heads(case: Case) -> None:
    case.query = case.query[:, :3]


WRONG = [_wrong_table, _wrong_lens, _wrong_key, _wrong_heads]


def refusals(
    run: Callable[..., Outputs], pair: tuple[Library, Library], wrong: Callable[[Case], None], page_size: int
) -> None:
    raised = []
    for library in pair:
        case = Case("decode", page_size)
        wrong(case)
        with pytest.raises(Exception) as caught:  # noqa: PT011 (which it is, is what is compared)
            run(library, case, {})
        raised.append(caught.type)
    assert raised[0] is raised[1]


@pytest.mark.parametrize("wrong", WRONG)
def test_refusals_of_flash_attention_2(fa2: tuple[Library, Library], wrong: Callable[[Case], None]) -> None:
    refusals(uniform_fa2, fa2, wrong, 256)


def test_page_size_of_flash_attention_2(fa2: tuple[Library, Library]) -> None:
    refusals(uniform_fa2, fa2, lambda case: None, 16)


@pytest.mark.parametrize("wrong", WRONG)
def test_refusals_of_flash_attention_3(fa3: tuple[Library, Library], wrong: Callable[[Case], None]) -> None:
    refusals(lambda *given: vllm_fa3(*given, scheduled=False), fa3, wrong, 16)
