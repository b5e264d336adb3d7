"""The emulated FlashInfer against the float64 reference: every wrapper, every variant that it honours."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
import torch

from attn_backends.spec import AttentionSpec
from attn_backends.testing.reference import reference_attention
from tests.emulated import flashinfer
from tests.emulated.flashinfer_kernel import EMPTY_LSE

PAGE_SIZE, HEAD_DIM = 16, 64
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass
class Pages:
    """Rows of keys in shuffled pages of a pool that is NaN wherever nothing is cached."""

    kv_lens: list[int]
    qo_lens: list[int]
    num_qo_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = HEAD_DIM
    dtype: torch.dtype = torch.bfloat16
    cache_dtype: torch.dtype = torch.bfloat16
    num_pages: int = 40
    seed: int = 0
    keys: list[tuple[torch.Tensor, torch.Tensor]] = field(init=False)

    def __post_init__(self) -> None:
        make = torch.Generator().manual_seed(self.seed)
        shape = (self.num_pages, PAGE_SIZE, self.num_kv_heads, self.head_dim)
        pools = [torch.full(shape, math.nan).to(self.cache_dtype) for _ in range(2)]
        counts = [-(-n // PAGE_SIZE) for n in self.kv_lens]
        self.indptr = starts(counts)
        self.indices = torch.randperm(self.num_pages, generator=make, dtype=torch.int32)[: sum(counts)].clone()
        self.last_page_len = torch.tensor([(n - 1) % PAGE_SIZE + 1 if n else 0 for n in self.kv_lens]).int()
        self.qo_indptr = starts(self.qo_lens)
        self.keys = []
        for first, num_keys in zip(self.indptr.tolist(), self.kv_lens, strict=False):
            shape = (2, num_keys, self.num_kv_heads, self.head_dim)
            stored = torch.randn(shape, generator=make).to(self.cache_dtype)
            slots = torch.arange(num_keys)
            pages = self.indices[first + slots // PAGE_SIZE].long()
            for pool, values in zip(pools, stored, strict=True):
                bits(pool)[pages, slots % PAGE_SIZE] = bits(values)
            self.keys.append((stored[0], stored[1]))
        self.cache = (pools[0], pools[1])
        shape = (sum(self.qo_lens), self.num_qo_heads, self.head_dim)
        self.query = torch.randn(shape, generator=make).to(self.dtype)

    @property
    def hnd_cache(self) -> tuple[torch.Tensor, torch.Tensor]:
        key, value = (pool.transpose(1, 2).contiguous() for pool in self.cache)
        return key, value

    @property
    def table(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.indptr, self.indices, self.last_page_len

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        return self.num_qo_heads, self.num_kv_heads, self.head_dim, PAGE_SIZE

    def dtypes(self) -> dict[str, Any]:
        return {"q_data_type": self.dtype, "kv_data_type": self.cache_dtype}

    def expected(self, spec: AttentionSpec, k_scale: float = 1.0, v_scale: float = 1.0) -> tuple[Any, Any]:
        """Reference outputs, and LSEs in log2, of all tokens."""
        parts = [
            reference_attention(self.query[first:stop], key.double() * k_scale, value.double() * v_scale, spec)
            for (first, stop), (key, value) in zip(pairwise(self.qo_indptr.tolist()), self.keys, strict=True)
        ]
        lse = torch.cat([lse for _, lse in parts]) / math.log(2)
        return torch.cat([out for out, _ in parts]), lse.clamp(min=EMPTY_LSE)

    def spec(self, **more: Any) -> AttentionSpec:
        return AttentionSpec(self.num_qo_heads, self.num_kv_heads, self.head_dim, **more)


def starts(lens: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lens]).cumsum(0).int()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.dtype in FP8 else tensor


def workspace(num_bytes: int = 2**26) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8)


def assert_as_reference(got: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    assert got[1].dtype is torch.float32
    torch.testing.assert_close(got[0].double(), expected[0], rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(got[1].double(), expected[1], rtol=1e-5, atol=1e-4)


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window_left": 5},
    "itself": {"window_left": 0},
    "cap": {"logits_soft_cap": 3.0},
    "all": {"window_left": 20, "logits_soft_cap": 2.0, "sm_scale": 0.3},
}


def spec_of(pages: Pages, variant: dict[str, Any], causal: bool) -> AttentionSpec:
    more = {"scale" if name == "sm_scale" else name: value for name, value in variant.items()}
    return pages.spec(causal=causal, **more)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("tensor_cores", [False, True], ids=["cuda_cores", "tensor_cores"])
def test_decode(variant: str, tensor_cores: bool) -> None:
    pages = Pages([1, 16, 17, 100, 33], [1] * 5)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(), use_tensor_cores=tensor_cores)
    wrapper.plan(*pages.table, *pages.sizes, **pages.dtypes(), **VARIANTS[variant])
    got = wrapper.run(pages.query, pages.cache, return_lse=True)
    assert_as_reference(got, pages.expected(spec_of(pages, VARIANTS[variant], True)))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("backend", ["fa2", "fa3"])
def test_paged_prefill(variant: str, causal: bool, backend: str) -> None:
    pages = Pages([1, 16, 40, 70, 9], [1, 3, 17, 20, 9])
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(), backend=backend)
    wrapper.plan(pages.qo_indptr, *pages.table, *pages.sizes, causal=causal, **pages.dtypes(), **VARIANTS[variant])
    got = wrapper.run(pages.query, pages.cache, return_lse=True)
    assert_as_reference(got, pages.expected(spec_of(pages, VARIANTS[variant], causal)))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_ragged_prefill(causal: bool, layout: str) -> None:
    pages = Pages([5, 16, 40], [5, 3, 17])
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(), layout)
    sizes = pages.sizes[:3]
    wrapper.plan(pages.qo_indptr, starts(pages.kv_lens), *sizes, causal=causal, **pages.dtypes(), **VARIANTS["all"])
    key, value = (torch.cat(parts) for parts in zip(*pages.keys, strict=True))
    if layout == "HND":
        key, value = key.transpose(0, 1).contiguous(), value.transpose(0, 1).contiguous()
    got = wrapper.run(pages.query, key, value, return_lse=True)
    assert_as_reference(got, pages.expected(spec_of(pages, VARIANTS["all"], causal)))


@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (8, 1)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_head_groups_and_dtypes(heads: tuple[int, int], dtype: torch.dtype) -> None:
    pages = Pages([20, 3], [1, 1], *heads, dtype=dtype, cache_dtype=dtype)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace())
    wrapper.plan(*pages.table, *pages.sizes, q_data_type=dtype)
    assert_as_reference(wrapper.run(pages.query, pages.cache, return_lse=True), pages.expected(pages.spec()))


@pytest.mark.parametrize("cache_dtype", FP8)
@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_fp8_cache_and_its_scales(cache_dtype: torch.dtype, kind: str) -> None:
    pages = Pages([20, 33], [1, 1] if kind == "decode" else [4, 9], cache_dtype=cache_dtype)
    out = torch.empty(sum(pages.qo_lens), 4, HEAD_DIM, dtype=torch.bfloat16)
    scales = {"k_scale": 0.5, "v_scale": 2.0}
    if kind == "decode":
        decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace())
        decode.plan(*pages.table, *pages.sizes, **pages.dtypes())
        got = decode.run(pages.query, pages.cache, out=out, return_lse=True, **scales)
    else:
        prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace())
        prefill.plan(pages.qo_indptr, *pages.table, *pages.sizes, causal=True, **pages.dtypes())
        assert prefill._backend == "fa2"
        got = prefill.run(pages.query, pages.cache, out=out, return_lse=True, **scales)
    assert got[0] is out
    expected = pages.expected(pages.spec(), 0.5, 2.0)
    torch.testing.assert_close(got[0].double(), expected[0], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(got[1].double(), expected[1], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("contiguous", [True, False], ids=["stored so", "a view of NHD"])
def test_hnd_cache(contiguous: bool) -> None:
    pages = Pages([20, 33], [4, 9])
    cache = pages.hnd_cache if contiguous else (pages.cache[0].transpose(1, 2), pages.cache[1].transpose(1, 2))
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(), "HND")
    wrapper.plan(pages.qo_indptr, *pages.table, *pages.sizes, causal=True, **pages.dtypes())
    assert_as_reference(wrapper.run(pages.query, cache, return_lse=True), pages.expected(pages.spec()))


def test_keys_and_values_in_one_tensor() -> None:
    pages = Pages([20, 33], [1, 1])
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace())
    wrapper.plan(*pages.table, *pages.sizes, **pages.dtypes())
    torch.testing.assert_close(
        wrapper.run(pages.query, torch.stack(pages.cache, 1)), wrapper.run(pages.query, pages.cache)
    )


def test_a_split_passes_through_the_float_workspace() -> None:
    """Long rows are split without a graph too: what is written is the output, in float32."""
    pages = Pages([600], [1], num_pages=40)
    scratch = workspace().zero_()
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(scratch)
    wrapper.plan(*pages.table, *pages.sizes, **pages.dtypes())
    got = wrapper.run(pages.query, pages.cache, return_lse=True)
    assert_as_reference(got, pages.expected(pages.spec()))
    torch.testing.assert_close(scratch[: 4 * 4 * HEAD_DIM].view(torch.float32).bfloat16(), got[0].flatten())


def test_an_lse_that_is_given_is_filled_though_not_returned() -> None:
    pages = Pages([20, 33], [1, 1])
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace())
    wrapper.plan(*pages.table, *pages.sizes, **pages.dtypes())
    lse = torch.zeros(2, 4)
    out = wrapper.run(pages.query, pages.cache, lse=lse)
    assert_as_reference((out, lse), pages.expected(pages.spec()))


def test_rows_without_keys_give_zeros_and_a_finite_lse() -> None:
    """FlashInfer's infinity is 5e4."""
    pages = Pages([0, 7, 0], [1, 1, 1])
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace())
    wrapper.plan(*pages.table, *pages.sizes, **pages.dtypes())
    out, lse = wrapper.run(pages.query, pages.cache, return_lse=True)
    assert out[[0, 2]].count_nonzero() == 0
    assert lse[[0, 2]].unique().tolist() == [EMPTY_LSE]
    assert_as_reference((out, lse), pages.expected(pages.spec()))


def test_a_batch_without_any_key() -> None:
    pages = Pages([0, 0], [1, 1])
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace())
    wrapper.plan(*pages.table, *pages.sizes, **pages.dtypes())
    assert wrapper.run(pages.query, pages.cache).count_nonzero() == 0


def test_queries_before_the_first_key() -> None:
    """More queries than keys, causal: the first ones see nothing."""
    pages = Pages([3], [5])
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace())
    wrapper.plan(pages.qo_indptr, *pages.table, *pages.sizes, causal=True, **pages.dtypes())
    out, lse = wrapper.run(pages.query, pages.cache, return_lse=True)
    assert_as_reference((out, lse), pages.expected(pages.spec()))
    assert lse[:2].unique().tolist() == [EMPTY_LSE]


@pytest.mark.parametrize("which", [0, 1], ids=["key", "value"])
def test_nan_reaches_those_who_see_it_and_no_other(which: int) -> None:
    """Key 4 of the second row: later than query 2 of it, outside of the window of query 7, not of the first row."""
    pages = Pages([8, 8], [8, 8])
    pages.cache[which][pages.indices[1], 4] = math.nan
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace())
    wrapper.plan(pages.qo_indptr, *pages.table, *pages.sizes, causal=True, window_left=2, **pages.dtypes())
    out = wrapper.run(pages.query, pages.cache)
    assert out.isnan().flatten(1).any(1).tolist() == [False] * 8 + [False] * 4 + [True] * 3 + [False]


@pytest.mark.parametrize("seed", range(8))
def test_random_batches(seed: int) -> None:
    make = torch.Generator().manual_seed(seed)
    num_rows = int(torch.randint(1, 7, (), generator=make))
    qo_lens = torch.randint(0, 12, (num_rows,), generator=make).tolist()
    kv_lens = [n + int(torch.randint(0, 60, (), generator=make)) for n in qo_lens]
    pages = Pages(kv_lens, qo_lens, seed=seed)
    causal, variant = bool(seed % 2), VARIANTS[list(VARIANTS)[seed % len(VARIANTS)]]
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(), backend=("fa2", "fa3")[seed // 2 % 2])
    wrapper.plan(pages.qo_indptr, *pages.table, *pages.sizes, causal=causal, **pages.dtypes(), **variant)
    got = wrapper.run(pages.query, pages.cache, return_lse=True)
    assert_as_reference(got, pages.expected(spec_of(pages, variant, causal)))


def test_sinks_are_dropped_without_a_word() -> None:
    pages = Pages([20, 33], [1, 1])
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace())
    wrapper.plan(*pages.table, *pages.sizes, **pages.dtypes())
    with_sinks = wrapper.run(pages.query, pages.cache, sinks=torch.full((4,), 9.0))
    torch.testing.assert_close(with_sinks, wrapper.run(pages.query, pages.cache), rtol=0, atol=0)


def test_what_is_set_after_the_plan_does_nothing() -> None:
    """The kernel was compiled without a cap and without a window."""
    pages = Pages([40], [1])
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace())
    wrapper.plan(*pages.table, *pages.sizes, **pages.dtypes())
    before = wrapper.run(pages.query, pages.cache)
    wrapper._logits_soft_cap, wrapper._window_left = 1.0, 3
    torch.testing.assert_close(wrapper.run(pages.query, pages.cache), before, rtol=0, atol=0)


def halves(pages: Pages) -> tuple[Pages, Pages]:
    """The same queries over the first two pages of each row, and over the rest."""
    first, second = Pages(pages.kv_lens, pages.qo_lens), Pages(pages.kv_lens, pages.qo_lens)
    ranges = list(pairwise(pages.indptr.tolist()))
    first.indices = torch.cat([pages.indices[start : start + 2] for start, _ in ranges])
    second.indices = torch.cat([pages.indices[start + 2 : stop] for start, stop in ranges])
    first.indptr = starts([2] * len(ranges))
    second.indptr = starts([stop - start - 2 for start, stop in ranges])
    first.last_page_len = torch.full_like(pages.last_page_len, PAGE_SIZE)
    return first, second


@pytest.mark.parametrize("how", ["merge_state", "merge_state_in_place", "merge_states"])
def test_merged_halves_are_the_whole(how: str) -> None:
    pages = Pages([40, 70], [1, 1])
    states = []
    for half in halves(pages):
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace())
        wrapper.plan(*half.table, *half.sizes, **half.dtypes())
        states.append(wrapper.run(pages.query, pages.cache, return_lse=True))
    (out, lse), (other, other_lse) = states
    if how == "merge_state":
        out, lse = flashinfer.merge_state(out, lse, other, other_lse)
    elif how == "merge_states":
        out, lse = flashinfer.merge_states(torch.stack([out, other], 1), torch.stack([lse, other_lse], 1))
    else:
        assert flashinfer.cascade.merge_state_in_place(out, lse, other, other_lse) is None
    assert_as_reference((out, lse), pages.expected(pages.spec()))


def test_merge_under_a_mask_and_of_empty_states() -> None:
    out, other = torch.ones(3, 2, 64).half(), torch.full((3, 2, 64), 3.0).half()
    lse, other_lse = torch.zeros(3, 2), torch.zeros(3, 2)
    lse[2] = other_lse[2] = EMPTY_LSE
    out[2] = other[2] = 0
    flashinfer.merge_state_in_place(out, lse, other, other_lse, torch.tensor([True, False, True]))
    assert out[:, 0, 0].tolist() == [2.0, 1.0, 0.0]
    assert lse[:, 0].tolist() == [1.0, 0.0, EMPTY_LSE + 1]
    infinite = torch.full((3, 2), -math.inf)
    assert flashinfer.merge_state(out, infinite, other, infinite)[0].isnan().all(), "as in the real kernel"


def test_cascade_of_a_shared_prefix() -> None:
    """Two rows that begin with the same two pages: level 0 is one row of all tokens, level 1 each row's own pages."""
    pages = Pages([40, 50], [3, 4])
    key, value = pages.keys[0]
    for (k, v), first in zip(pages.keys, pages.indptr.tolist(), strict=False):
        k[:32], v[:32] = key[:32], value[:32]
        for pool, values in zip(pages.cache, (k, v), strict=True):
            pool[pages.indices[first : first + 2].long()] = values[:32].view(2, PAGE_SIZE, 2, HEAD_DIM)
    own = halves(pages)[1]
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace())
    wrapper.plan(
        [starts([7]), pages.qo_indptr],
        [starts([2]), own.indptr],
        [pages.indices[:2], own.indices],
        [torch.tensor([PAGE_SIZE]).int(), own.last_page_len],
        *pages.sizes,
        causal=True,
        q_data_type=torch.bfloat16,
    )
    out = wrapper.run(pages.query, pages.cache)
    torch.testing.assert_close(out.double(), pages.expected(pages.spec())[0], rtol=1e-2, atol=1e-2)


def test_names_are_where_the_real_package_has_them() -> None:
    assert flashinfer.__version__ == "0.6.12"
    assert flashinfer.decode.fast_decode_plan is flashinfer.fast_decode_plan
    for name in ("BatchPrefillWithPagedKVCacheWrapper", "BatchPrefillWithRaggedKVCacheWrapper"):
        assert getattr(flashinfer.prefill, name) is getattr(flashinfer, name)
    for name in ("merge_state", "merge_states", "merge_state_in_place", "MultiLevelCascadeAttentionWrapper"):
        assert getattr(flashinfer.cascade, name) is getattr(flashinfer, name)


@pytest.mark.parametrize("kind", ["cuda_cores", "tensor_cores", "prefill"])
@pytest.mark.parametrize(("product", "scale", "drowned"), [
    (-8192.0, 8.0, {"cuda_cores"}), (-65536.0, 0.125, {"tensor_cores", "prefill"}), (-16384.0, 1.0, set()),
    (-65536.0, 1.0, {"cuda_cores", "tensor_cores", "prefill"}), (65536.0, 1.0, set()),
])  # fmt: skip
def test_queries_all_of_whose_logits_are_very_low(kind: str, product: float, scale: float, drowned: set[str]) -> None:
    """They come back as without keys; what is compared is q·k, but on CUDA cores the logit of base 2."""
    pages = Pages([20, 33], [1, 1])
    pages.query.fill_(2.0)
    pages.cache[0].fill_(product / (2 * pages.query.shape[-1]))
    how = {"sm_scale": scale, **pages.dtypes()}
    if kind == "prefill":
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace())
        wrapper.plan(pages.qo_indptr, *pages.table, *pages.sizes, causal=True, **how)
    else:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(), use_tensor_cores=kind == "tensor_cores")
        wrapper.plan(*pages.table, *pages.sizes, **how)
    out, lse = wrapper.run(pages.query, pages.cache, return_lse=True)
    assert (out.count_nonzero() == 0) == (kind in drowned)
    expected = product * scale / math.log(2)
    assert torch.allclose(lse, torch.full_like(lse, EMPTY_LSE if kind in drowned else expected), rtol=1e-3)
