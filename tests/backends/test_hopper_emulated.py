"""Kernels for Hopper on a CPU, by an emulator of Gluon, against the reference. Launches beside them are interpreted."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import pytest
import torch

from attn_backends import AttentionSpec, AttentionType, MLASpec, get_backend
from attn_backends.kernels.prefill.launch import HOPPER_DIMS
from attn_backends.kernels.prefill.tiles import hopper_tiles, tiles_of
from attn_backends.machine import pretend_multiprocessors
from attn_backends.spec import FP8_DTYPES
from attn_backends.testing.cases.batches import Batch
from attn_backends.testing.cases.random_batch import random_batch
from attn_backends.testing.conformance import BackendConformance, MLAConformance
from attn_backends.testing.harness import assert_matches, make_layer
from tests.backends.mla.test_triton_mla import SHARED
from tests.backends.triton.test_triton import SMALL
from tests.helpers.interpreted import SAMPLE, in_own_process, interpreted, only_interpreted, run_interpreted
from tests.helpers.mutate import copied_module

split_kv = pytest.importorskip("attn_backends.kernels.split_kv", reason="needs triton")

KERNELS = {"triton": "prefill_hopper_kernel", "mla": "mla_hopper_kernel"}  # by their packages
MODULES = {"triton": "kernels.prefill.hopper_kernel", "mla": "backends.mla.triton_mla.decode_hopper_kernel"}

test_interpreted, test_more_interpreted = interpreted(__file__, "not TestOf or matches and small")


@pytest.mark.rest
@in_own_process
def test_the_latent_kit_interpreted() -> None:
    run_interpreted(__file__, f"MLA and not ({SHARED})")


@pytest.mark.rest
@in_own_process
def test_the_kit_interpreted() -> None:
    """Of the kit what prefills by the kernel: rows decode by one that is not for Hopper, in graphs too."""
    chosen = "features or random or matches or head or page_sizes or scales_over or cached or chunk"
    run_interpreted(__file__, f"TestOfTriton and not (Short or MLA or replays) and ({chosen}) and {SMALL}")


@pytest.mark.rest
@in_own_process
def test_the_kit_with_short_tiles_interpreted() -> None:
    """A quarter of what prefills, and that rows are of one block."""
    chosen = "features or random or matches or head or page_sizes or cached or chunk or one_block"
    keyword = f"WithShort and not replays and ({chosen}) and {SMALL}"
    run_interpreted(__file__, keyword, *SAMPLE)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of emulated kernels: so many programs each. Keys of 8 bits are made 16 bits however few queries see them, and
    few keys are no reason for another kernel."""
    from attn_backends.backends.mla.triton_mla import launch as mla_launch
    from attn_backends.backends.triton import metadata
    from attn_backends.kernels.prefill import launch
    from tests.helpers.gluon_emulator import Emulated

    made: list[int] = []
    monkeypatch.setattr(metadata, "is_faster_upcast", lambda *_: True)
    monkeypatch.setattr(metadata, "short_tile", lambda *_: None)
    for where in (launch, mla_launch):
        monkeypatch.setattr(where, "has_hopper_kernels", lambda device: True)
    for package, name in KERNELS.items():
        module = of_package(package)
        monkeypatch.setattr(module, name, Emulated(getattr(module, name), made.append))
    return made


def of_package(package: str) -> ModuleType:
    return importlib.import_module(f"attn_backends.{MODULES[package]}")


def check(name: str, batch: Batch, launches: list[int], options: Any = None, times: int = 2) -> None:
    """Layers of a step: a launch leaves behind what the next one wants."""
    layer, expected = make_layer(get_backend(name), batch, options=options), batch.expected()
    step = layer.begin(batch)
    for nth in range(times):
        assert_matches(layer.forward(batch, step, want_lse=nth % 2 == 1), batch, name, expected)
    assert len(launches) == times


# TRITON's prefill: a full tile, tiles that are not, and rows that end within a page and a block.
LENS = ([250, 131, 70], [20, 131, 33])


def as_they_come(*_: Any) -> Any:
    """Whole tiles of the usual size, that programs look up."""
    from attn_backends.backends.triton.plans import TilePlan

    return TilePlan(None, None)


def prefill(spec: AttentionSpec, page_size: int, lens: tuple[list[int], list[int]]) -> Batch:
    return random_batch(get_backend("TRITON"), spec, *lens, page_size=page_size, poison=float("nan"))


def spec_of(dims: tuple[int, int] = (64, 64), heads: tuple[int, int] = (4, 2), **more: Any) -> AttentionSpec:
    return AttentionSpec(*heads, dims[0], head_dim_vo=dims[1], **{"dtype": torch.float16, **more})


@only_interpreted
@pytest.mark.parametrize("page_size", [16, 48, 64])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
def test_prefill_from_pages(dims: tuple[int, int], page_size: int, launches: list[int]) -> None:
    check("TRITON", prefill(spec_of(dims), page_size, LENS), launches)


@only_interpreted
@pytest.mark.parametrize(
    "changes",
    [{"window_left": 90}, {"chunk_size": 100}, {"causal": False}, {"sinks": True}, {"heads": (9, 3)}],
    ids=str,
)
def test_what_a_query_sees(changes: dict[str, Any], launches: list[int]) -> None:
    check("TRITON", prefill(spec_of(**changes), 16, LENS), launches)


@only_interpreted
@pytest.mark.parametrize(
    "changes",
    [{"window_left": 250}, {"chunk_size": 300}, {"causal": False, "window_left": 250},
     {"causal": False, "chunk_size": 300}],
    ids=str,
)  # fmt: skip
def test_whole_blocks_between_those_with_a_mask(changes: dict[str, Any], launches: list[int]) -> None:
    """Of 64 keys."""
    check("TRITON", prefill(spec_of((256, 256), **changes), 16, ([860, 460], [290, 33])), launches)


@only_interpreted
def test_prefill_of_prompts(launches: list[int]) -> None:
    """Behind a decode."""
    check("TRITON", prefill(spec_of((128, 128)), 16, ([70, 90, 133], [1, 90, 133])), launches)


@only_interpreted
@pytest.mark.parametrize("heads", [(2, 2), (8, 1)], ids=str)
def test_prefill_of_many_rows(heads: tuple[int, int], launches: list[int]) -> None:
    """More than a warp has lanes, behind a decode, with lengths beside a tile's 128 and 16 tokens."""
    longest = 129 if heads == (2, 2) else 49
    query_lens = [1, *(17, longest, 30, 18, longest - 1, 33, 32, 17, 40) * 4]
    seq_lens = [length + 3 * (row % 5) for row, length in enumerate(query_lens)]
    check("TRITON", prefill(spec_of(heads=heads), 16, (seq_lens, query_lens)), launches)


@pytest.fixture
def nth(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole prefills by the nth tile that such heads have."""
    from attn_backends.backends.triton import metadata
    from attn_backends.backends.triton.plans import TilePlan

    monkeypatch.setattr(metadata, "prefill_plan", lambda spec, *_: TilePlan(tiles_of(spec)[request.param], None))


@only_interpreted
@pytest.mark.usefixtures("nth")
@pytest.mark.parametrize("page_size", [16, 48])
@pytest.mark.parametrize(
    ("dims", "nth"), [((64, 64), 1), ((64, 64), 2), ((96, 64), 0), ((96, 64), 1), ((128, 128), 0), ((128, 128), 1),
                      ((192, 128), 1), ((256, 256), 1)],
    ids=str,
    indirect=["nth"],
)  # fmt: skip
def test_prefill_by_one_tile(dims: tuple[int, int], page_size: int, launches: list[int]) -> None:
    check("TRITON", prefill(spec_of(dims), page_size, LENS), launches)


@only_interpreted
@pytest.mark.usefixtures("nth")
@pytest.mark.parametrize(
    "changes",
    [{"window_left": 30}, {"window_left": 90}, {"window_left": 250}, {"chunk_size": 50}, {"chunk_size": 100},
     {"causal": False, "window_left": 130}, {"sinks": True}, {"heads": (9, 3)}, {"heads": (48, 2)}, {"heads": (9, 9)}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize(
    ("dims", "nth"), [((64, 64), 2), ((128, 128), 1)], ids=["of_64", "of_128"], indirect=["nth"]
)  # fmt: skip
def test_what_a_query_sees_by_the_other_tile(
    dims: tuple[int, int], changes: dict[str, Any], launches: list[int]
) -> None:
    check("TRITON", prefill(spec_of(dims, **changes), 16, ([860, 131, 70], [60, 131, 3])), launches)


@only_interpreted
@pytest.mark.parametrize("seed", range(16))
def test_windows_and_chunks_around_a_block(seed: int, launches: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of random widths: where a tile's queries all see some block whole, and where they just do not."""
    from attn_backends.backends.triton import metadata
    from attn_backends.backends.triton.plans import TilePlan

    numbers = Random(seed)
    dims, group_size = numbers.choice([(64, 64), (128, 128)]), numbers.choice([1, 2, 4, 8])
    tiles = hopper_tiles(*dims)
    tile = tiles[seed % len(tiles)]
    width = tile.keys + numbers.choice([0, tile.tokens(group_size)]) + numbers.randint(-tile.keys // 2, 9)
    spec = spec_of(dims, (2 * group_size, 2), causal=numbers.random() < 0.8,
                   **{numbers.choice(["window_left", "window_left", "chunk_size"]): width})  # fmt: skip
    monkeypatch.setattr(metadata, "prefill_plan", lambda *_: TilePlan(tile, None))
    query_lens = [numbers.randint(1, 150) for _ in range(3)]
    check("TRITON", prefill(spec, 16, ([new + numbers.randint(0, 500) for new in query_lens], query_lens)), launches)


@only_interpreted
@pytest.mark.parametrize("seed", range(32))
def test_tiles_that_end_within_a_token(seed: int, launches: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of groups that are no power of two: whole ones that programs look up, by their own lengths, or split, by these
    too."""
    from attn_backends.backends.triton import metadata
    from attn_backends.backends.triton.plans import TilePlan
    from attn_backends.kernels.prefill.split_tiles import hopper_tile
    from attn_backends.kernels.prefill.splits import PrefillSplits

    dice = Random(f"within a token {seed}")
    group, heads = dice.choice([3, 5, 6, 7, 9, 10, 11, 12, 13, 14, 15, 24, 48]), dice.choice([1, 2])
    seen: dict[str, Any] = dice.choice([{}, {}, {"window_left": dice.randrange(200)}, {"causal": False},
                                        {"chunk_size": dice.randint(1, 200)}, {"sinks": True}])  # fmt: skip
    spec = spec_of(heads=(heads * group, heads), **seen)
    of_tile = tiles_of(spec)[seed % 2]
    kind = ("looked up", "by length", "split", "split by length")[seed // 2 % 4]
    num_sms = 16 if kind == "split by length" else 4
    splits = PrefillSplits(2 * num_sms * ("split" in kind), hopper_tile(spec, of_tile), by_length="by length" in kind,
                           split_blocks=int(kind == "split by length"))  # fmt: skip
    monkeypatch.setattr(metadata, "prefill_plan", lambda *_: TilePlan(of_tile, None if kind == "looked up" else splits))
    query_lens = [dice.randint(1, 2 + 300 // group) for _ in range(3)]
    seq_lens = [new + dice.randrange(dice.choice([1, 400])) for new in query_lens]
    with pretend_multiprocessors(num_sms):
        check("TRITON", prefill(spec, 16, (seq_lens, query_lens)), launches)


@only_interpreted
@pytest.mark.usefixtures("nth")
@pytest.mark.parametrize("nth", [1, 2], indirect=True)
def test_prompts_by_the_other_tile(launches: list[int]) -> None:
    """Behind a decode."""
    check("TRITON", prefill(spec_of((64, 64)), 16, ([70, 90, 133], [1, 90, 133])), launches)


@only_interpreted
@pytest.mark.parametrize("num_sms", [4, 7])
@pytest.mark.parametrize("heads_at_a_time", [1, 2, 3])
def test_sections_of_heads_and_more_tiles_than_programs(
    heads_at_a_time: int, num_sms: int, launches: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No tile of any head is left out, or attended twice, where the L2 holds the keys of some heads alone."""
    spec = spec_of(heads=(6, 3))
    monkeypatch.setattr("attn_backends.backends.triton.metadata.prefill_plan", as_they_come)
    of_a_head = max(LENS[0]) * (spec.head_dim + spec.head_dim_vo) * spec.dtype.itemsize
    monkeypatch.setattr("attn_backends.kernels.prefill.tiles._L2_BYTES", heads_at_a_time * of_a_head)
    with pretend_multiprocessors(num_sms):
        check("TRITON", prefill(spec, 16, LENS), launches)
    assert set(launches) == {num_sms}, "for 15 tiles"


@only_interpreted
def test_rows_without_queries_end(launches: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """And write nothing, whatever the host took them for, where no list was made of their tiles."""
    monkeypatch.setattr("attn_backends.backends.triton.metadata.prefill_plan", as_they_come)
    batch = prefill(spec_of(), 16, ([70, 50], [20, 33]))
    layer = make_layer(get_backend("TRITON"), batch)
    step, output = layer.begin(batch), torch.full_like(batch.query, 7.0)
    step.metadata.query_start_loc.zero_()
    layer.impl.forward(batch.query, None, None, batch.fresh_pool(), step, output)
    assert len(launches) == 1
    assert torch.equal(output, torch.full_like(output, 7.0))


def with_outliers(batch: Batch) -> Batch:
    """Queries of several sizes, of which a few columns are most."""
    for row, size in zip(batch.rows, (1e-6, 1e-3, 8.0), strict=True):
        row.query.mul_(size)
        row.query[..., :-8] *= 1e-6
    return batch


def from_8_bits(
    dims: tuple[int, int], page_size: int, cache_dtype: torch.dtype, lens: tuple[list[int], list[int]] = LENS,
    **changes: Any,
) -> Batch:  # fmt: skip
    spec = spec_of(dims, cache_dtype=cache_dtype, **changes)
    given = {"page_size": page_size, "poison": float("nan"), "k_scale": 0.5, "v_scale": 2.0}
    return random_batch(get_backend("TRITON"), spec, *lens, **given)


@pytest.fixture
def as_it_is(monkeypatch: pytest.MonkeyPatch, launches: list[int]) -> None:
    """A cache of 8 bits is read as it is."""
    monkeypatch.setattr("attn_backends.backends.triton.metadata.is_faster_upcast", lambda *_: False)


@only_interpreted
@pytest.mark.usefixtures("as_it_is")
@pytest.mark.parametrize("page_size", [16, 48, 64])
@pytest.mark.parametrize("dims", HOPPER_DIMS, ids=str)
def test_prefill_from_pages_of_8_bits(dims: tuple[int, int], page_size: int, launches: list[int]) -> None:
    check("TRITON", from_8_bits(dims, page_size, FP8_DTYPES[page_size % 3 == 0]), launches)


@only_interpreted
@pytest.mark.usefixtures("as_it_is")
@pytest.mark.parametrize("cache_dtype", FP8_DTYPES, ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
def test_bfloat16_over_8_bits(dims: tuple[int, int], cache_dtype: torch.dtype, launches: list[int]) -> None:
    """Queries of any size become float16 as keys do: each is divided by its largest element."""
    check("TRITON", with_outliers(from_8_bits(dims, 16, cache_dtype, dtype=torch.bfloat16)), launches)


@only_interpreted
@pytest.mark.usefixtures("as_it_is")
@pytest.mark.parametrize(
    "changes",
    [{"window_left": 30}, {"window_left": 250}, {"chunk_size": 100}, {"causal": False}, {"sinks": True},
     {"heads": (9, 3)}, {"heads": (14, 2)}],
    ids=str,
)  # fmt: skip
def test_what_a_query_sees_of_8_bits(changes: dict[str, Any], launches: list[int]) -> None:
    lens = [860, 131, 70], [60, 131, 33]
    check("TRITON", from_8_bits((128, 128), 16, FP8_DTYPES[0], lens, **changes), launches)


@only_interpreted
@pytest.mark.parametrize(
    ("changes", "heads_at_once"),
    [({}, 2), ({"window_left": 90}, 2), ({"causal": False}, 2), ({"sinks": True}, 1), ({"heads": (9, 3)}, 2)],
    ids=str,
)
@pytest.mark.parametrize("cache_dtype", FP8_DTYPES, ids=str)
def test_prefill_of_widened_keys(
    cache_dtype: torch.dtype, changes: dict[str, Any], heads_at_once: int, launches: list[int]
) -> None:
    """From pages of any size, behind a decode, for some KV heads at a time."""
    from attn_backends.backends.triton.tuning import TritonOptions

    spec = spec_of(cache_dtype=cache_dtype, **changes)
    lens = [70, 250, 131, 70], [1, 20, 131, 33]
    given = {"page_size": 5, "poison": float("nan"), "k_scale": 0.5, "v_scale": 2.0}
    batch = random_batch(get_backend("TRITON"), spec, *lens, **given)
    room = TritonOptions(upcast_bytes=451 * heads_at_once * 2 * 64 * 2 + 1)
    layer = make_layer(get_backend("TRITON"), batch, num_padded_reqs=2, options=room)
    step = layer.begin(batch, num_padded_reqs=2)
    assert_matches(layer.forward(batch, step, num_padded_reqs=2, want_lse=True), batch)
    at_once = max(n for n in range(1, heads_at_once + 1) if spec.num_kv_heads % n == 0)  # all launches are alike
    assert len(launches) == spec.num_kv_heads // at_once


@only_interpreted
@pytest.mark.parametrize(("num_keys", "parts", "num_launches"), [(100, 5, 9), (140, 5, 5), (260, 4, 4), (270, 3, 3)])
def test_rows_widened_in_turn(num_keys: int, parts: int, num_launches: int, launches: list[int]) -> None:
    """As many as there is room for at a time, behind a decode, with padding behind the last; of a row that is too long
    for that one head at a time."""
    from attn_backends.backends.triton.tuning import TritonOptions

    spec = spec_of(cache_dtype=torch.float8_e4m3fn)
    lens = [70, 130, 131, 70, 131, 135], [1, 60, 131, 33, 20, 70]
    batch = random_batch(get_backend("TRITON"), spec, *lens, page_size=5, poison=float("nan"), k_scale=0.5)
    room = TritonOptions(upcast_bytes=num_keys * 2 * 2 * 64 * 2)
    layer = make_layer(get_backend("TRITON"), batch, num_padded_reqs=2, options=room)
    step = layer.begin(batch, num_padded_reqs=2)
    assert_matches(layer.forward(batch, step, num_padded_reqs=2, want_lse=True), batch)
    assert len(step.metadata.upcast_rows) == parts
    prefills = step.metadata.prefill_metadata
    assert prefills is not None
    assert (prefills.num_upcast_keys, prefills.upcast_rows) == (0, ())
    assert len(launches) == num_launches


@only_interpreted
def test_an_encoder(launches: list[int]) -> None:
    spec = spec_of(attention_type=AttentionType.ENCODER, causal=False)
    check("TRITON", prefill(spec, 16, ([130, 17], [130, 17])), launches)


def latent(
    heads: int, query_len: int, page_size: int, k_scale: float = 1.0, lens: Sequence[int] = (700, 5, 130), **more: Any
) -> Batch:  # fmt: skip
    spec = MLASpec(heads, **{"dtype": torch.float16, **more})
    backend, query_lens = get_backend("TRITON_MLA"), [query_len] * len(lens)
    return random_batch(backend, spec, [*lens], query_lens, page_size=page_size, poison=float("nan"), k_scale=k_scale)


SEVERAL_ROWS = (1700, 300, 700, 200)  # of four programs a tile two have a part of one row, and another
SHORT_ROWS = (885, 132, 23, 492, 762, 353)  # of five programs one has a row of one block, and another row behind it
MULTIPROCESSORS = {"mla of several rows": 8, "mla of short rows": 5}


def on_multiprocessors(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRITON_MLA's decodes are cut for so many."""
    monkeypatch.setattr("attn_backends.backends.mla.triton_mla.state.num_multiprocessors", lambda device: count)


@only_interpreted
@pytest.mark.parametrize("page_size", [16, 48, 64])
@pytest.mark.parametrize(("heads", "query_len"), [(1, 1), (40, 2)])
def test_latent_decode(heads: int, query_len: int, page_size: int, launches: list[int]) -> None:
    """Tiles of 64 queries that are not full, one and two a row."""
    check("TRITON_MLA", latent(heads, query_len, page_size), launches)


@only_interpreted
@pytest.mark.parametrize("cache_dtype", FP8_DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "query_len", "page_size"), [(16, 1, 64), (40, 2, 16), (128, 1, 48)])
def test_latent_rows_of_8_bits(
    heads: int, query_len: int, page_size: int, cache_dtype: torch.dtype, launches: list[int]
) -> None:
    batch = latent(heads, query_len, page_size, 0.5, cache_dtype=cache_dtype, dtype=torch.bfloat16)
    check("TRITON_MLA", batch, launches, for_hopper())


@only_interpreted
@pytest.mark.parametrize("cache_dtype", [torch.float16, FP8_DTYPES[0]], ids=str)
def test_latent_programs_of_several_rows(
    cache_dtype: torch.dtype, launches: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_multiprocessors(8, monkeypatch)
    batch = latent(40, 2, 16, lens=SEVERAL_ROWS, cache_dtype=cache_dtype)
    layer, expected = make_layer(get_backend("TRITON_MLA"), batch, options=for_hopper()), batch.expected()
    step = layer.begin(batch)
    more = step.plan.work_list.more_items
    assert (more[:, 1] - more[:, 0]).tolist() == [0, 0, 1, 1, -1]
    for _ in range(2):
        assert_matches(layer.forward(batch, step), batch, "TRITON_MLA", expected)
    assert len(launches) == 2


@only_interpreted
def test_latent_work_items_of_one_block(launches: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Partitions run in any order, but for the first time: nobody waits for what the next item's may have overtaken."""
    on_multiprocessors(MULTIPROCESSORS["mla of short rows"], monkeypatch)
    batch = latent(1, 1, 64, lens=SHORT_ROWS)
    layer = make_layer(get_backend("TRITON_MLA"), batch, options=for_hopper())
    work_list = layer.begin(batch).plan.work_list
    (begin, end), first = work_list.more_items[2].tolist(), work_list.work_items[2].tolist()
    assert (first[1:3], end - begin) == ([0, 23], 1)
    check("TRITON_MLA", batch, launches, for_hopper(), 30)


@only_interpreted
@pytest.mark.parametrize(("heads", "query_len"), [(3, 1), (40, 2)])
@pytest.mark.parametrize(
    ("num_sms", "keys", "num_splits"), [(2, 1020, 2), (4, 1020, 3), (16, 2043, 16), (70, 8955, 70)]
)
def test_latent_rows_of_many_splits(
    num_sms: int, keys: int, num_splits: int, heads: int, query_len: int, launches: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Of two tiles there are as many splits as of one."""
    tiles = -(-heads * query_len // 64)
    on_multiprocessors(tiles * num_sms, monkeypatch)
    batch = latent(heads, query_len, 16, lens=[keys])
    layer, expected = make_layer(get_backend("TRITON_MLA"), batch, options=for_hopper()), batch.expected()
    step = layer.begin(batch)
    work_list = step.plan.work_list
    assert int(work_list.work_items[0, 4]) // int(split_kv.MAX_SPLITS.value) == num_splits
    for _ in range(2):
        assert_matches(layer.forward(batch, step, want_lse=True), batch, "TRITON_MLA", expected)
    assert len(launches) == 2


def for_hopper() -> Any:
    """Options that choose the kernel for Hopper, where none is in the table."""
    from attn_backends.backends.mla.triton_mla.tuning import HOPPER_TILE, LatentTile, TritonMLAOptions

    return TritonMLAOptions(decode_tile=LatentTile(*HOPPER_TILE, programs=1, min_keys=128, hopper=True))


# The conformance kit, as far as these kernels serve.


@only_interpreted
@pytest.mark.usefixtures("launches")
class TestOfTriton(BackendConformance):
    backend_name = "TRITON"
    dtypes = (torch.float16,)
    num_random_layers = 2

    def make_spec(self, **changes: Any) -> AttentionSpec:
        return super().make_spec(**{"head_dim": 64, **changes})


@only_interpreted
class TestOfTritonWithShortTiles(TestOfTriton):
    """Few keys are a reason for the portable kernel, most of whose blocks then hold all of a row."""

    @pytest.fixture(autouse=True)
    def _short_tiles(self, launches: list[int], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        from attn_backends.backends.triton import metadata, short_tiles

        monkeypatch.setattr(metadata, "short_tile", short_tiles.short_tile)
        monkeypatch.setattr(metadata, "is_faster_upcast", lambda *_: False)
        monkeypatch.setattr(metadata, "decode_tokens", lambda *_: 1)  # rows of several are prefilled
        with pretend_multiprocessors(132):
            yield

    @pytest.mark.parametrize("nth", range(8))
    def test_rows_are_of_one_block(self, nth: int) -> None:
        batch = self.make_batch(self.make_spec(cache_dtype=(torch.float16, *FP8_DTYPES)[nth % 3]), "small_prefill")
        step = make_layer(get_backend("TRITON"), batch).begin(batch)
        assert step.metadata.short_tile.is_one_block


@only_interpreted
@pytest.mark.usefixtures("launches")
class TestOfTritonMLA(MLAConformance):
    backend_name = "TRITON_MLA"
    dtypes = (torch.float16,)

    def make_spec(self, **changes: Any) -> MLASpec:
        return MLASpec(**{"num_qo_heads": 4, "dtype": self.dtype, **changes})


# What the emulator finds: faults in how warps wait for each other, and what these come to.
WRONG = r"is off by|not zero|more arrive than"
STUCK = r"all partitions wait"
FAULTS = {
    "keys that nobody waits for": (
        "triton",
        "    mbarrier.wait(full.index(stage), block // STAGES & 1)\n",
        "",
        WRONG,
    ),
    "the last keys of a tile that ends within a token": (
        "triton of 7 heads a group",
        "context + (first + (TILE - 1)) // GROUP",
        "context + first // GROUP + (TILE // GROUP - 1)",
        WRONG,
    ),
    "tiles that begin within a token": (
        "triton of 7 heads a group",
        "(first + lane) // GROUP, (first + lane) % GROUP",
        "(first + lane) // GROUP, lane % GROUP",
        "a result is written twice",
    ),
    "turns that a group without queries keeps": (
        "triton of 128 dims",
        "        take_turn(TURN)\n        pass_turn(TURN)\n",
        "",
        STUCK,
    ),
    "a tile's first turn that is not passed": (
        "triton of 128 dims",
        "done, LOGITS, TURN, BLOCK_N, DIM)\n        pass_turn(TURN)\n",
        "done, LOGITS, TURN, BLOCK_N, DIM)\n",
        STUCK,
    ),
    "a last turn that nobody takes": (
        "triton of 128 dims",
        "        take_turn(TURN)  # which the other group has passed last\n",
        "        pass\n",
        "turns are left over",
    ),
    "8 bits that are never let go": (
        "triton of 8 bits",
        "    mbarrier.arrive(raw_empty.index(raw_stage))\n",
        "",
        STUCK,
    ),
    "the other half of 8 bits": (
        "triton of 8 bits",
        "of_tile.slice(column_tile % 2 * TMA_COLS, TMA_COLS, 1)",
        "of_tile.slice(0, TMA_COLS, 1)",
        WRONG,
    ),
    "the largest of some columns": (
        "triton of 8 bits",
        "for i in gl.static_range(1, column_tiles(DIM)):\n            q_scale",
        "for i in gl.static_range(1, 1):\n            q_scale",
        WRONG,
    ),
    "queries that nobody waits for": ("triton", "        async_copy.wait_group(0)\n", "", WRONG),
    "keys that are overwritten": (
        "triton of 128 dims",
        "        mbarrier.wait(empty[0].index(k_stage), block // K_STAGES & 1 ^ 1)\n",
        "",
        WRONG,
    ),
    "values in the keys' stages": (
        "triton of 128 dims",
        "k_stage, v_stage = block % K_STAGES, block % V_STAGES",
        "k_stage, v_stage = block % K_STAGES, block % K_STAGES",
        WRONG + "|" + STUCK,
    ),
    "values that wait as keys do": (
        "triton of 128 dims",
        "mbarrier.wait(empty[1].index(v_stage), block // V_STAGES & 1 ^ 1)",
        "mbarrier.wait(empty[1].index(v_stage), block // K_STAGES & 1 ^ 1)",
        WRONG + "|" + STUCK,
    ),
    "values that are let go too early": (
        "triton of 128 dims",
        "        acc = _wait_for_values(acc_pending, DIM_VO)\n        barrier()\n"
        "        mbarrier.arrive(empty[1].index(before % V_STAGES))\n",
        "        mbarrier.arrive(empty[1].index(before % V_STAGES))\n"
        "        acc = _wait_for_values(acc_pending, DIM_VO)\n",
        WRONG,
    ),
    "values that are never let go": (
        "triton",
        "        barrier()\n        mbarrier.arrive(empty[1].index(stage))\n    else",
        "    else",
        STUCK,
    ),
    "a tile that is attended again": (
        "triton",
        'tile = gl.atomic_add(counters, 1, sem="relaxed") + num_programs\n',
        'tile = gl.atomic_add(counters, 1, sem="relaxed") + num_programs - 1\n',
        "a result is written twice",
    ),
    "a tile that the loader does not give back": (
        "triton of 128 dims",
        "    if num_blocks < LEAD:\n",
        "    if num_blocks < 0:\n",
        STUCK,
    ),
    "tiles that nobody waits for": (
        "triton",
        "    mbarrier.wait(info_full.index(0), nth & 1)\n",
        "",
        rf"{WRONG}|{STUCK}",
    ),
    "tiles that are published too early": (
        "triton",
        "        mbarrier.wait(info_empty.index(0), nth & 1)\n",
        "",
        rf"{WRONG}|{STUCK}",
    ),
    "counters that stay": ("triton", "        gl.store(counters, 0)\n", "", WRONG),
    "queries beyond the last": (
        "triton",
        "at + column_tile * TMA_COLS, mask=mask)",
        "at + column_tile * TMA_COLS)",
        r"elements \[",
    ),
    "latent rows that nobody waits for": (
        "mla",
        "        mbarrier.wait(full[piece].index(block), phase)\n",
        "",
        WRONG,
    ),
    "queries of latents that nobody waits for": (
        "mla",
        "        mbarrier.wait(q_full.index(0), nth & 1)\n",
        "        pass\n",
        WRONG,
    ),
    "queries of latents that are overwritten": (
        "mla of several rows",
        "        mbarrier.wait(rope_empty.index(block), (done[block] & 1) ^ 1)\n",
        "        pass\n",
        WRONG,
    ),
    "weights that nobody waits for": (
        "mla",
        "    mbarrier.wait(p_full.index(block), phase)\n",
        "",
        rf"{WRONG}|{STUCK}",
    ),
    "halves that are overwritten": (
        "mla",
        "                    mbarrier.wait(empty[piece * WIDTH // HALF].index(block), phase ^ 1)\n",
        "                    pass\n",
        WRONG,
    ),
    "other halves of 8 bits that are overwritten": (
        "mla of 8 bits",
        "        mbarrier.wait(empty[0].index(block), phase ^ 1)\n",
        "",
        WRONG,
    ),
    "halves of 8 bits that are overwritten": (
        "mla of 8 bits",
        "        mbarrier.wait(empty[1].index(block), phase ^ 1)\n",
        "",
        WRONG,
    ),
    "NaN behind the last key": ("mla", "(num_live % LAST_ROWS > 0)", "(num_live < 0)", WRONG),
    "NaN behind the last rows": ("mla", "        row = gl.where(key < stop, row, NOWHERE)\n", "", WRONG),
    "queries that another work item's overtake": (
        "mla of short rows",
        "    elif num_blocks > warp_group:",
        "    elif num_blocks > 0:",
        STUCK,
    ),
    "a block beside the last": ("mla", "2 * pair + 1 < num_blocks ", "2 * pair + 1 <= num_blocks ", STUCK),
    "places that a last block was not in": (
        "mla of several rows",
        "    return done_0 + (num_blocks + 1) // 2, done_1 + num_blocks // 2\n",
        "    return done_0 + (num_blocks + 1) // 2, done_1 + (num_blocks + 1) // 2\n",
        STUCK,
    ),
}


@only_interpreted
@pytest.mark.rest
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault: str, launches: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.helpers.gluon_emulator import Emulated

    of, old, new, told = FAULTS[fault]
    package = of.split()[0]
    module = of_package(package)
    wrong = copied_module(module, tmp_path, (old, new))
    monkeypatch.setattr(module, KERNELS[package], Emulated(getattr(wrong, KERNELS[package]), launches.append))
    monkeypatch.setattr("attn_backends.backends.triton.metadata.prefill_plan", as_they_come)
    monkeypatch.setattr("attn_backends.backends.triton.metadata.is_faster_upcast", lambda *_: False)
    given: dict[str, tuple[str, Batch, Any]] = {
        "triton": ("TRITON", prefill(spec_of(), 16, LENS), None),
        "triton of 128 dims": ("TRITON", prefill(spec_of((128, 128)), 16, LENS), None),
        "triton of 7 heads a group": ("TRITON", prefill(spec_of(heads=(14, 2)), 16, ([150, 70], [40, 33])), None),
        "triton of 8 bits": (
            "TRITON",
            with_outliers(from_8_bits((128, 128), 16, FP8_DTYPES[0], dtype=torch.bfloat16)),
            None,
        ),
        "mla": ("TRITON_MLA", latent(40, 2, 16), None),
        "mla of several rows": ("TRITON_MLA", latent(40, 2, 16, lens=SEVERAL_ROWS), for_hopper()),
        "mla of short rows": ("TRITON_MLA", latent(1, 1, 64, lens=SHORT_ROWS), for_hopper()),
        "mla of 8 bits": ("TRITON_MLA", latent(40, 2, 16, cache_dtype=torch.float8_e4m3fn), for_hopper()),
    }
    if of in MULTIPROCESSORS:
        on_multiprocessors(MULTIPROCESSORS[of], monkeypatch)
    name, batch, options = given[of]
    with pytest.raises((AssertionError, RuntimeError, IndexError), match=told):
        check(name, batch, launches, options, 60 if of == "mla of short rows" else 2)
