"""The pool: allocated once, written by slot in every layout and dtype, copied and swapped by page."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from attn_backends.backends.mla.backend import MLABackend
from attn_backends.cache.kv_cache import (
    KVCache,
    KVCachePool,
    _has_kernel,
    allocate_kv_cache,
    copy_pages,
    dequantise,
    gather_pages,
    gather_slots,
    get_kv_cache_layout,
    page_bytes,
    quantise,
    swap_pages,
    write_kv,
    write_latent,
)
from attn_backends.interface import AttentionBackend
from attn_backends.spec import FP8_DTYPES, AttentionSpec, KVCacheSpec, Layout, MLASpec
from attn_backends.testing.cases.batches import stored as reference_stored
from tests.helpers.page_pairs import pairs_at_random

F32, F64 = torch.float32, torch.float64
DTYPES = (torch.float32, torch.float16, torch.bfloat16, *FP8_DTYPES)
LAYOUTS: tuple[Layout, ...] = ("NHD", "HND")
PAGES, PAGE_SIZE, HEADS, DIM, DIM_VO = 5, 4, 2, 8, 6


def make_pool(layout: Layout, cache_dtype: torch.dtype, num_layers: int = 1) -> KVCachePool[int]:
    spec = AttentionSpec(4, HEADS, DIM, DIM_VO, cache_dtype=cache_dtype)
    cache = KVCacheSpec(PAGES, PAGE_SIZE, layout)
    return allocate_kv_cache(AttentionBackend, dict.fromkeys(range(num_layers), spec), cache, "cpu")


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def randomise(cache: KVCache) -> None:
    for tensor in cache:
        tensor.copy_(torch.randn(tensor.shape).to(tensor.dtype))


each_cache = pytest.mark.parametrize(("layout", "dtype"), [(a, b) for a in LAYOUTS for b in DTYPES], ids=str)


@each_cache
def test_shapes_strides_and_bytes(layout: Layout, dtype: torch.dtype) -> None:
    pool = make_pool(layout, dtype, num_layers=3)
    one_page = PAGE_SIZE * HEADS * (DIM + DIM_VO) * dtype.itemsize
    assert pool.num_bytes == 3 * PAGES * one_page
    key, value = pool.layers[1]
    assert key.shape == (PAGES, PAGE_SIZE, HEADS, DIM)
    assert value.shape == (PAGES, PAGE_SIZE, HEADS, DIM_VO)
    row = (HEADS * DIM, DIM) if layout == "NHD" else (DIM, PAGE_SIZE * DIM)
    assert key.stride() == (PAGE_SIZE * HEADS * DIM, *row, 1)
    assert bool((pool.buffer == 0).all())
    assert all(
        t.untyped_storage().data_ptr() == pool.buffer.data_ptr() for layer in pool.layers.values() for t in layer
    )


def test_page_bytes_adds_layers_of_different_sizes() -> None:
    specs = {"a": AttentionSpec(4, 2, 8), "b": AttentionSpec(4, 1, 16, dtype=torch.bfloat16)}
    cache = KVCacheSpec(3, 4)
    assert page_bytes(AttentionBackend, specs, cache) == 4 * (2 * 8 * 2 * 4 + 1 * 16 * 2 * 2)
    pool = allocate_kv_cache(AttentionBackend, specs, cache, "cpu")
    assert pool.num_bytes == 3 * page_bytes(AttentionBackend, specs, cache)
    for index, layer in enumerate(pool.layers.values()):
        for offset, tensor in enumerate(layer):
            tensor.fill_(10 * index + offset)
    assert [[int(t.unique()) for t in layer] for layer in pool.layers.values()] == [[0, 1], [10, 11]]


def test_layers_of_narrow_dtypes_do_not_push_wide_ones_out_of_line() -> None:
    """Every tensor starts at a multiple of its own item size, wherever its layer stands."""
    narrow = AttentionSpec(1, 1, 5, cache_dtype=torch.float8_e4m3fn)
    specs = {0: narrow, 1: AttentionSpec(1, 1, 5), 2: AttentionSpec(1, 1, 5, dtype=torch.bfloat16)}
    pool = allocate_kv_cache(AttentionBackend, specs, KVCacheSpec(3, 1), "cpu")
    assert [*pool.layers] == [0, 1, 2]
    for layer, spec in specs.items():
        assert all(tensor.data_ptr() % spec.cache_dtype.itemsize == 0 for tensor in pool.layers[layer])


@each_cache
@given(data=st.data())
@settings(deadline=None)
def test_writes_go_to_their_slots_alone(layout: Layout, dtype: torch.dtype, data: st.DataObject) -> None:
    slots = data.draw(st.lists(st.integers(0, PAGES * PAGE_SIZE - 1), unique=True, max_size=8))
    padded = data.draw(st.lists(st.booleans(), min_size=len(slots), max_size=len(slots)))
    mapping = [-1 if pad else slot for slot, pad in zip(slots, padded, strict=True)]
    k_scale, v_scale = data.draw(st.sampled_from([(1.0, 1.0), (0.5, 3.0)]))
    cache = make_pool(layout, dtype).layers[0]
    randomise(cache)
    before = KVCache(*(tensor.clone() for tensor in cache))
    key, value = torch.randn(len(slots), HEADS, DIM), torch.randn(len(slots), HEADS, DIM_VO)
    behind = data.draw(st.lists(st.integers(-1, PAGES * PAGE_SIZE - 1), max_size=2))  # of no token
    write_kv(key, value, cache, torch.tensor(mapping + behind, dtype=torch.int64), k_scale, v_scale)
    for cached, old, new, scale in zip(cache, before, (key, value), (k_scale, v_scale), strict=True):
        expected = old.clone()
        for token, slot in enumerate(mapping):
            if slot >= 0:
                expected[slot // PAGE_SIZE, slot % PAGE_SIZE] = (new[token] / scale).to(dtype)
        assert torch.equal(as_bytes(cached), as_bytes(expected))


@pytest.mark.parametrize("write", [quantise, reference_stored], ids=["written", "reference"])
@pytest.mark.parametrize("dtypes", [(F64, torch.float32), (torch.float16, F64), (torch.bfloat16, F64)], ids=str)
def test_quotients_have_the_wider_dtype(
    dtypes: tuple[torch.dtype, torch.dtype], write: Callable[..., torch.Tensor]
) -> None:
    """Float64 on either side is divided in float64, by a scale that float32 does not hold."""
    of_layer, of_cache = dtypes
    real = torch.linspace(-3, 3, 1001, dtype=F64).to(of_layer)
    assert write(real, of_cache, 2.4538964212590586).equal((real.double() / 2.4538964212590586).to(of_cache))


def test_kernels_that_divide_in_float32_take_no_float64() -> None:
    pytest.importorskip("triton", reason="needs triton")
    with FakeTensorMode():
        for cached, new, has_kernel in ((F64, F64, False), (torch.bfloat16, F64, False), (torch.bfloat16, F32, True)):
            tensors = (torch.empty(1, dtype=dtype, device="cuda") for dtype in (cached, new))
            assert _has_kernel(*tensors) is has_kernel


def test_products_have_the_wider_dtype() -> None:
    """What a cache stores may be beyond the layer's dtype where its product with the scale is not."""
    assert dequantise(torch.tensor([1e5, 6.0]), torch.float16, 0.5).tolist() == [49984.0, 3.0]  # 5e4, rounded


@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=str)
def test_fp8_saturates_and_reads_back_scaled(dtype: torch.dtype) -> None:
    limit = torch.finfo(dtype).max
    real = torch.tensor([1e9, -1e9, 3.0, 0.0, limit])
    stored = quantise(real, dtype, 2.0)
    assert stored.float().tolist() == [limit, -limit, 1.5, 0.0, limit / 2]
    assert dequantise(stored, torch.float32, 2.0).tolist() == [2 * limit, -2 * limit, 3.0, 0.0, limit]
    assert dequantise(stored, torch.bfloat16, 2.0).dtype is torch.bfloat16


@each_cache
def test_copy_pages_within_each_layer(layout: Layout, dtype: torch.dtype) -> None:
    layers = list(make_pool(layout, dtype, num_layers=2).layers.values())
    for cache in layers:
        randomise(cache)
    before = [[tensor.clone() for tensor in cache] for cache in layers]
    copy_pages(layers, [(0, 3), (2, 1)])
    for cache, old in zip(layers, before, strict=True):
        for tensor, was in zip(cache, old, strict=True):
            expected = was[[0, 2, 2, 0, 4]] if dtype not in FP8_DTYPES else was.view(torch.uint8)[[0, 2, 2, 0, 4]]
            assert torch.equal(as_bytes(tensor), as_bytes(expected))


@each_cache
@pytest.mark.parametrize("seed", range(3))
def test_sources_are_read_before_any_page_is_written(layout: Layout, dtype: torch.dtype, seed: int) -> None:
    """Within a pool and between two, whatever the pairs."""
    random, layers, others = Random(seed), *([*make_pool(layout, dtype, 2).layers.values()] for _ in range(2))
    for _ in range(10):
        for cache in [*layers, *others]:
            randomise(cache)
        before = [as_bytes(tensor).clone() for cache in layers for tensor in cache]
        there = [as_bytes(tensor).clone() for cache in others for tensor in cache]
        pairs = pairs_at_random(random, PAGES)
        swap_pages(layers, others, pairs)
        copy_pages(layers, pairs)
        for caches, olds in ((layers, before), (others, there)):
            tensors = [as_bytes(tensor) for cache in caches for tensor in cache]
            for tensor, was, old in zip(tensors, before, olds, strict=True):
                expected = old.clone()
                for source, destination in pairs:
                    expected[destination] = was[source]
                assert torch.equal(tensor, expected), pairs


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([(0, 3), (2, 3)], "pages 0 and 2 are both copied to page 3: name each destination once"),
        ([(0, 3), (0, 3)], "pages 0 and 0 are both copied to page 3"),
        ([(0, 1), (-1, 3)], "copy of page -1 to 3: page -1 is not one of 0 to 4"),
        ([(0, 1), (1, -2)], "copy of page 1 to -2: page -2 is not one of 0 to 4"),
        ([(5, 1)], "copy of page 5 to 1: page 5 is not one of 0 to 4"),
        ([(1, 5)], "copy of page 1 to 5: page 5 is not one of 0 to 4"),
    ],
)
def test_pairs_that_are_refused(pairs: list[tuple[int, int]], message: str) -> None:
    caches = [make_pool("NHD", torch.float32).layers[0], latent_caches(torch.float32, 1)[0]]
    for cache in caches:
        randomise(cache)
        before = cache.key.clone()
        for refused in (lambda: copy_pages([cache], pairs), lambda: swap_pages([cache], [cache], pairs)):  # noqa: B023
            with pytest.raises(ValueError, match=message):
                refused()
        assert torch.equal(cache.key, before)


def test_pages_that_one_of_the_caches_lacks_are_refused() -> None:
    """Of caches of unequal numbers of pages, whichever comes first."""
    few, many = ([KVCache(*(torch.zeros(pages, 2, 1, 4) for _ in range(2)))] for pages in (3, 5))
    for caches in (few + many, many + few):
        with pytest.raises(ValueError, match="page 3 is not one of 0 to 2"):
            copy_pages(caches, [(0, 3)])
        for case in ((caches, many + many, [(3, 0)]), (many + many, caches, [(0, 3)])):
            with pytest.raises(ValueError, match="page 3 is not one of 0 to 2"):
                swap_pages(*case)
    swap_pages(few, many, [(2, 4)])
    swap_pages(many, few, [(4, 2)])


@pytest.mark.parametrize("other", [torch.zeros(3, 2, 2, 4), torch.zeros(3, 2, 1, 1), torch.zeros(3, 2, 1, 4).half()])
def test_pages_of_unlike_pools_are_not_swapped(other: torch.Tensor) -> None:
    one = torch.ones(3, 2, 1, 4)
    for pair in ((one, other), (other, one)):
        with pytest.raises(ValueError, match=r"pages of .* are copied to pages of .*: give the same layers"):
            swap_pages(*([KVCache(each, each)] for each in pair), [(0, 1)])
    assert one.min() == 1
    assert other.max() == 0


@each_cache
def test_swap_out_and_in_again(layout: Layout, dtype: torch.dtype) -> None:
    device, host = ([*make_pool(layout, dtype, 2).layers.values()] for _ in range(2))
    for cache in device:
        randomise(cache)
    before = [as_bytes(tensor).clone() for cache in device for tensor in cache]
    swap_pages(device, host, [(1, 4), (3, 0)])
    for cache in device:
        for tensor in cache:
            tensor[[1, 3]] = torch.zeros_like(tensor[[1, 3]]) if dtype not in FP8_DTYPES else tensor[[0, 0]]
    swap_pages(host, device, [(4, 1), (0, 3)])
    assert all(
        torch.equal(as_bytes(tensor), old)
        for tensor, old in zip([t for cache in device for t in cache], before, strict=True)
    )
    untouched = [as_bytes(tensor)[[1, 2, 3]] for cache in host for tensor in cache]
    assert not any(bool(tensor.any()) for tensor in untouched)


def test_no_pairs_is_no_work() -> None:
    cache = make_pool("NHD", torch.float32).layers[0]
    copy_pages([cache], [])
    swap_pages([cache], [cache], [])


@each_cache
def test_gathers(layout: Layout, dtype: torch.dtype) -> None:
    cache = make_pool(layout, dtype).layers[0]
    randomise(cache)
    pages, slots = torch.tensor([4, 1]), torch.tensor([7, 0, 19])
    tokens = as_bytes(cache.key).view(PAGES * PAGE_SIZE, -1)
    by_page = gather_pages(cache.key, pages)
    assert by_page.shape == (2 * PAGE_SIZE, HEADS, DIM)
    assert by_page.dtype is dtype
    assert torch.equal(as_bytes(by_page).view(8, -1), torch.cat([tokens[16:20], tokens[4:8]]))
    assert torch.equal(as_bytes(gather_slots(cache.key, slots)).view(3, -1), tokens[slots])
    scratch: Any = torch.empty(2 * PAGE_SIZE, HEADS, DIM, dtype=dtype)
    assert torch.equal(as_bytes(gather_pages(cache.key, pages, scratch)), as_bytes(by_page))
    few: Any = torch.empty(3, HEADS, DIM, dtype=dtype)
    assert torch.equal(as_bytes(gather_slots(cache.key, slots, few)).view(3, -1), tokens[slots])


@each_cache
@pytest.mark.parametrize("page", [-3, PAGES])
def test_gathers_of_pages_that_are_not_there_are_refused(layout: Layout, dtype: torch.dtype, page: int) -> None:
    """Also negative ones, which an index would count from the end."""
    cached = make_pool(layout, dtype).layers[0].key
    for index in (torch.int32, torch.int64):
        with pytest.raises(IndexError):
            gather_pages(cached, torch.tensor([1, page], dtype=index))
        with pytest.raises(IndexError):
            gather_slots(cached, torch.tensor([1, page * PAGE_SIZE + 1], dtype=index))


@pytest.mark.parametrize("layouts", [{"NHD"}, {"HND"}, {"HND", "NHD"}], ids=sorted)
def test_layout(layouts: set[Layout]) -> None:
    """A wish is used or refused; without one it is NHD if that is served."""
    assert get_kv_cache_layout(layouts) == ("NHD" if "NHD" in layouts else "HND")
    for wish in ("NHD", "HND"):
        if wish in layouts:
            assert get_kv_cache_layout(layouts, wish) == wish
        else:
            with pytest.raises(ValueError, match=f"layout is '{wish}'; served here: {next(iter(layouts))}. Set cache"):
                get_kv_cache_layout(layouts, wish)
    with pytest.raises(ValueError, match="served here: none"):
        get_kv_cache_layout(set())


RANK, ROPE = 6, 2


def latent_caches(dtype: torch.dtype, num_layers: int = 1) -> list[KVCache]:
    spec = MLASpec(4, head_dim=8, head_dim_vo=8, kv_lora_rank=RANK, qk_rope_head_dim=ROPE, cache_dtype=dtype)
    specs = dict.fromkeys(range(num_layers), spec)
    assert page_bytes(MLABackend, specs, KVCacheSpec(PAGES, PAGE_SIZE)) == num_layers * PAGE_SIZE * 8 * dtype.itemsize
    pool = allocate_kv_cache(MLABackend, specs, KVCacheSpec(PAGES, PAGE_SIZE), "cpu")
    for cache in pool.layers.values():
        randomise(cache)
    return list(pool.layers.values())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_latent_rows_go_to_their_slots_alone(dtype: torch.dtype) -> None:
    cached, empty = latent_caches(dtype)[0]
    assert (cached.shape, empty.shape) == ((PAGES, PAGE_SIZE, RANK + ROPE), (PAGES, PAGE_SIZE, 0))
    mapping = [7, -1, 0, 19, -1]
    scale = 0.5 if dtype in FP8_DTYPES else 1.0
    latent, rope_key = torch.randn(5, RANK), torch.randn(5, ROPE)
    latent[1] = torch.nan
    expected = cached.clone()
    for token, slot in enumerate(mapping):
        if slot >= 0:
            row = torch.cat([latent[token], rope_key[token]])
            expected[slot // PAGE_SIZE, slot % PAGE_SIZE] = quantise(row, dtype, scale)
    write_latent(latent, rope_key, cached, torch.tensor(mapping), scale)
    assert torch.equal(as_bytes(cached), as_bytes(expected))
    write_latent(latent[:2], rope_key[:2], cached, torch.tensor([-1, -1]), scale)
    assert torch.equal(as_bytes(cached), as_bytes(expected))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_latent_pages_are_copied_and_swapped(dtype: torch.dtype) -> None:
    device, host = latent_caches(dtype, 2), latent_caches(dtype, 2)
    before = [as_bytes(cache.key).clone() for cache in device]
    copy_pages(device, [(0, 3), (2, 1)])
    swap_pages(device, host, [(3, 4)])
    for cache, other, old in zip(device, host, before, strict=True):
        assert torch.equal(as_bytes(cache.key), old[[0, 2, 2, 0, 4]])
        assert torch.equal(as_bytes(other.key)[4], old[0])
