"""Page copies, merges and CSRs in one launch, interpreted, against the plain road."""

from __future__ import annotations

from random import Random

import pytest
import torch

from attn_backends.cache import kv_cache
from attn_backends.cache.kv_cache import KVCache, copy_pages
from attn_backends.kernels.merge_state import merge
from tests.helpers.interpreted import in_own_process, only_interpreted, run_interpreted
from tests.helpers.mutate import mutate
from tests.helpers.page_pairs import pairs_at_random
from tests.helpers.placed_caches import far_apart

DTYPES = [torch.float32, torch.float16, torch.float8_e4m3fn]


@in_own_process
def test_interpreted() -> None:
    run_interpreted(__file__)


def pool(dtype: torch.dtype, hnd: bool) -> list[KVCache]:
    """Three layers: keys and values of unequal dims in one buffer, so that pages lie apart, and latent rows."""
    layers = []
    for dim, dim_vo in ((8, 8), (24, 12)):
        shapes = [(3, 4, d) if hnd else (4, 3, d) for d in (dim, dim_vo)]
        size = sum(torch.Size(shape).numel() for shape in shapes)
        pages, start, made = torch.randn(6, size).to(dtype), 0, []
        for shape in shapes:
            part = pages[:, start : start + torch.Size(shape).numel()].unflatten(1, shape)
            made.append(part.transpose(1, 2) if hnd else part)
            start += torch.Size(shape).numel()
        layers.append(KVCache(*made))
    return [*layers, KVCache(torch.randn(6, 4, 40).to(dtype), torch.empty(6, 4, 0, dtype=dtype))]


@only_interpreted
@pytest.mark.parametrize("hnd", [False, True], ids=["NHD", "HND"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pages(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, hnd: bool) -> None:
    page_copy = pytest.importorskip("attn_backends.cache.kernels")
    layers = pool(dtype, hnd)
    plain = [KVCache(*(tensor.clone() for tensor in layer)) for layer in layers]
    pairs = [(0, 3), (5, 1), (0, 4)]
    copy_pages(plain, pairs)
    launches: list[int] = []
    monkeypatch.setattr(kv_cache, "_has_kernel", lambda *tensors: True)
    copied = page_copy.launch_copy_pages
    monkeypatch.setattr(page_copy, "launch_copy_pages", lambda *given: (launches.append(1), copied(*given)))
    copy_pages(layers, pairs)
    assert launches
    for got, want in zip(layers, plain, strict=True):
        for one, other in zip(got, want, strict=True):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@only_interpreted
def test_pages_of_several_blocks() -> None:
    """Of more words than a program copies at a time, and not of a multiple of them; nothing beside them changes."""
    page_copy = pytest.importorskip("attn_backends.cache.kernels")
    pages = torch.randn(5, 3000)
    before, tensor = pages.clone(), pages[:, 100:2600].unflatten(1, (50, 1, 50))
    page_copy.launch_copy_pages([tensor], [(1, 3)])
    before[3, 100:2600] = before[1, 100:2600]
    assert pages.equal(before)


@only_interpreted
def test_pages_beyond_31_bits() -> None:
    """Pages of a large cache begin at words that 31 bits cannot count."""
    page_copy = pytest.importorskip("attn_backends.cache.kernels")
    tensor = far_apart(torch.randn(5, 4, 2, 8))
    before = tensor.contiguous()
    page_copy.launch_copy_pages([tensor], [(0, 4), (3, 1)])
    assert tensor.equal(before[[0, 3, 2, 3, 0]])


@only_interpreted
@pytest.mark.parametrize("seed", range(4))
def test_pages_at_random(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Pairs of any kind: those whose order does not count go in one launch, and all give what was there before."""
    page_copy = pytest.importorskip("attn_backends.cache.kernels")
    random, launches, copied = Random(seed), [], page_copy.launch_copy_pages
    monkeypatch.setattr(kv_cache, "_has_kernel", lambda *tensors: True)
    monkeypatch.setattr(page_copy, "launch_copy_pages", lambda *given: (launches.append(1), copied(*given)))
    for _ in range(12):
        layers = pool(DTYPES[random.randrange(3)], random.random() < 0.5)
        before = [tensor.clone() for layer in layers for tensor in layer]
        pairs = pairs_at_random(random, random.choice([2, 6]))
        copy_pages(layers, pairs)
        for tensor, was in zip([tensor for layer in layers for tensor in layer], before, strict=True):
            for source, destination in pairs:
                assert torch.equal(tensor[destination].view(torch.uint8), was[source].view(torch.uint8)), pairs
            others = sorted({*range(6)} - {destination for _, destination in pairs})
            assert all(torch.equal(tensor[i].view(torch.uint8), was[i].view(torch.uint8)) for i in others)
    assert 0 < len(launches) < 12


@only_interpreted
def test_one_launch_for_pages_whose_order_counts_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch, kv_cache, "copy_pages", "set(sources).isdisjoint(destinations)", "True")
    monkeypatch.setattr(f"{__name__}.copy_pages", kv_cache.copy_pages)
    with pytest.raises(AssertionError):
        test_pages_at_random(monkeypatch, 0)


@only_interpreted
@pytest.mark.parametrize("pairs", [[(0, 1), (1, 2)], [(0, 1), (1, 0)], [(3, 3)]], ids=["chain", "circle", "itself"])
def test_pages_whose_order_counts_take_the_plain_road(
    monkeypatch: pytest.MonkeyPatch, pairs: list[tuple[int, int]]
) -> None:
    layers = pool(torch.float32, False)
    before = layers[0].key.clone()
    monkeypatch.setattr(kv_cache, "_has_kernel", lambda *tensors: True)
    monkeypatch.setattr("attn_backends.cache.kernels.launch_copy_pages", lambda *given: pytest.fail("one launch"))
    copy_pages(layers, pairs)
    source, destination = pairs[-1]
    assert layers[0].key[destination].equal(before[source])


def test_pages_with_gaps_are_no_runs() -> None:
    page_copy = pytest.importorskip("attn_backends.cache.kernels")
    assert page_copy.can_copy(torch.zeros(4, 4, 2, 8))
    assert page_copy.can_copy(torch.zeros(4, 2, 4, 8).transpose(1, 2))
    assert page_copy.can_copy(torch.zeros(4, 2, 4, 2, 8)[:, 0])
    assert not page_copy.can_copy(torch.zeros(4, 4, 2, 16)[..., :8])
    assert not page_copy.can_copy(torch.zeros(4, 1, 1, 2, dtype=torch.uint8))


def test_pages_out_of_line_with_words_are_no_runs() -> None:
    """By where the first of them begins, by how far apart they lie, by how much they hold."""
    can_copy = pytest.importorskip("attn_backends.cache.kernels").can_copy
    some = torch.zeros(200, dtype=torch.uint8)
    assert can_copy(some[4:].as_strided((4, 2, 1, 4), (12, 4, 4, 1)))
    assert not can_copy(some[1:33].view(4, 2, 1, 4))
    assert not can_copy(some.as_strided((4, 2, 1, 4), (10, 4, 4, 1)))
    assert not can_copy(some.as_strided((4, 2, 1, 3), (12, 3, 3, 1)))
    assert can_copy(some.as_strided((4, 1, 2, 4), (12, 99, 4, 1)))  # nobody steps from a single slot to the next


def test_one_layer_with_gaps_takes_all_down_the_plain_road(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("attn_backends.cache.kernels")
    whole, gaps = torch.arange(32.0).view(4, 2, 1, 4), torch.arange(64.0).view(4, 2, 1, 8)[..., :4]
    monkeypatch.setattr(kv_cache, "_has_kernel", lambda *tensors: True)
    monkeypatch.setattr("attn_backends.cache.kernels.launch_copy_pages", lambda *given: pytest.fail("one launch"))
    copy_pages([KVCache(whole, whole.clone()), KVCache(whole.clone(), gaps)], [(0, 3)])
    assert whole[3].equal(whole[0])
    assert gaps[3].equal(gaps[0])


def parts(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Two results for 5 tokens of 3 heads: rows without keys in either, both and none; strided, as models have them.
    Outputs of rows without keys are NaN."""
    output, more = torch.randn(5, 2, 3, 12).to(dtype)[:, 0], torch.randn(5, 3, 20).to(dtype)[..., :12]
    lse, more_lse = torch.randn(3, 5).t(), torch.randn(5, 3)
    lse[0], more_lse[1] = -torch.inf, -torch.inf
    lse[2, 1] = more_lse[2, 1] = -torch.inf
    output[0], more[1], output[2, 1], more[2, 1] = [torch.nan] * 4
    lse[3] += 80
    return output, lse, more, more_lse


def reference(output: torch.Tensor, lse: torch.Tensor, more: torch.Tensor, more_lse: torch.Tensor) -> torch.Tensor:
    total = lse.double().exp() + more_lse.double().exp()
    joined = output.double().nan_to_num() * lse.double().exp()[..., None]
    joined += more.double().nan_to_num() * more_lse.double().exp()[..., None]
    return (joined / total[..., None]).nan_to_num()


def check_merged(given: tuple[torch.Tensor, ...], expected: torch.Tensor, total: torch.Tensor) -> None:
    output, lse, *_ = given
    tolerance = 2e-3 if output.dtype is torch.float16 else 1e-6
    torch.testing.assert_close(output.double(), expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.double(), total.double(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_merge(dtype: torch.dtype) -> None:
    given = parts(dtype)
    expected, total = reference(*given), torch.logaddexp(given[1], given[3])
    merge(*given)
    check_merged(given, expected, total)


@only_interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_merge_in_one_launch(dtype: torch.dtype) -> None:
    given = parts(dtype)
    expected, total = reference(*given), torch.logaddexp(given[1], given[3])
    pytest.importorskip("attn_backends.kernels.merge_state_triton").merge(*given)
    check_merged(given, expected, total)


@only_interpreted
def test_merge_of_tokens_beyond_31_bits() -> None:
    given = tuple(far_apart(each.contiguous()) for each in parts(torch.float32))
    expected, total = reference(*given), torch.logaddexp(given[1], given[3])
    pytest.importorskip("attn_backends.kernels.merge_state_triton").merge(*given)
    check_merged(given, expected, total)


@pytest.mark.parametrize(
    "module", ["batch.csr", pytest.param("backends.flashinfer.csr_kernel", marks=only_interpreted)]
)
def test_leading_pages_are_left_out_of_rows_that_have_them(module: str) -> None:
    """Rows without keys, as padding is, have fewer pages than are left out, and take no places of the rows behind."""
    csr_of = pytest.importorskip(f"attn_backends.{module}").csr_of
    table, ints = torch.arange(1, 31, dtype=torch.int32).view(5, 6), {"dtype": torch.int32}
    lens, first = torch.tensor([9, 0, 4, 24, 0], **ints), torch.tensor([1, 2, 1, 2, 2], **ints)
    csr = csr_of(table, lens, 4, 8, first)
    assert csr.indptr.tolist() == [0, 2, 2, 2, 6, 6]
    assert csr.indices.tolist() == [2, 3, 21, 22, 23, 24, 0, 0]
    assert csr.last_page_len.tolist() == [1, 0, 4, 4, 0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_on_a_gpu(dtype: torch.dtype) -> None:
    given = parts(dtype)
    expected, total = reference(*given), torch.logaddexp(given[1], given[3])
    moved = tuple(tensor.cuda() for tensor in given)
    merge(*moved)
    check_merged(tuple(tensor.cpu() for tensor in moved), expected, total)
    layers = pool(dtype, True)
    on_gpu = [KVCache(*(tensor.cuda() for tensor in layer)) for layer in layers]
    random = Random(0)
    for pairs in ([(0, 3), (5, 1)], *(pairs_at_random(random, 6) for _ in range(30))):
        for caches in (layers, on_gpu):
            copy_pages(caches, pairs)
        for got, want in zip(on_gpu, layers, strict=True):
            assert got.key.cpu().equal(want.key), pairs
            assert got.value.cpu().equal(want.value), pairs
