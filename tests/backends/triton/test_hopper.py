"""TRITON's prefill kernel for Hopper against the reference: what it serves, and what it leaves to the portable one."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch

from attn_backends import AttentionSpec, AttentionType, get_backend
from attn_backends.testing.cases.batches import Batch
from attn_backends.testing.cases.random_batch import random_batch
from attn_backends.testing.graphs.harness import CapturedStep, make_recorder
from attn_backends.testing.harness import Result, assert_matches, assert_pool, make_layer, run_backend
from tests.helpers.placed_caches import PLACES, placed

launch = pytest.importorskip("attn_backends.kernels.prefill.launch", reason="needs triton")
hopper_tiles = pytest.importorskip("attn_backends.kernels.prefill.tiles").hopper_tiles
PrefillSplits = pytest.importorskip("attn_backends.kernels.prefill.splits").PrefillSplits
most_tile_splits = pytest.importorskip("attn_backends.kernels.prefill.splits").most_tile_splits
metadata = pytest.importorskip("attn_backends.backends.triton.metadata")
plans = pytest.importorskip("attn_backends.backends.triton.plans")
tuning = pytest.importorskip("attn_backends.backends.triton.tuning")

pytestmark = pytest.mark.gpu
# Chunks of longer rows: tiles that are not full, rows that end within a page and a block, and a decode.
SEQ_LENS, QUERY_LENS = [700, 131, 300, 64, 1500], [1, 17, 290, 64, 33]


@pytest.fixture(autouse=True)
def _however_few_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "short_tile", lambda *_: None)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """A launch each: whether it read pages."""
    launches: list[bool] = []
    made = launch.prefill_on_hopper

    def prefill(*given: Any) -> None:
        launches.append(given[5] is not None)
        made(*given)

    monkeypatch.setattr(launch, "prefill_on_hopper", prefill)
    return launches


def a_batch(spec: AttentionSpec, seq_lens: list[int] = SEQ_LENS, query_lens: list[int] = QUERY_LENS,
            **more: Any) -> Batch:  # fmt: skip
    given = {"page_size": 16, "poison": float("nan"), "device": "cuda", **more}
    return random_batch(get_backend("TRITON"), spec, seq_lens, query_lens, **given)


def spec_of(dims: tuple[int, int] = (128, 128), heads: tuple[int, int] = (8, 2), **more: Any) -> AttentionSpec:
    return AttentionSpec(*heads, dims[0], head_dim_vo=dims[1], **{"dtype": torch.bfloat16, **more})


def check(batch: Batch) -> None:
    result = run_backend(get_backend("TRITON"), batch, num_padded_reqs=3, want_lse=True)
    assert_matches(result, batch)
    if batch.pool is not None:
        assert_pool(result.kv_cache, batch.pool_after())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dims", launch.HOPPER_DIMS, ids=str)
@pytest.mark.parametrize("page_size", [16, 48, 64, 128])
def test_pages(page_size: int, dims: tuple[int, int], dtype: torch.dtype, served: list[bool]) -> None:
    check(a_batch(spec_of(dims, dtype=dtype), page_size=page_size))
    assert served == [True]


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("heads", [(4, 4), (9, 3), (24, 3), (128, 1)], ids=str)
def test_heads(heads: tuple[int, int], layout: Any, served: list[bool]) -> None:
    check(a_batch(spec_of(heads=heads), layout=layout))
    assert served == [True]


@pytest.mark.parametrize("seed", range(30))
def test_tiles_that_end_within_a_token(seed: int) -> None:
    """Of groups that are no power of two, at random, by whichever tiles and lists are taken for them."""
    dice = Random(f"within a token {seed}")
    group, heads = dice.choice([3, 5, 6, 7, 9, 10, 11, 12, 13, 14, 15, 24, 48, 71]), dice.choice([1, 2, 3])
    dtype = dice.choice([torch.bfloat16, torch.float16])
    seen: dict[str, Any] = dice.choice([{}, {}, {}, {"window_left": dice.randrange(900)}, {"causal": False},
                                        {"chunk_size": dice.randint(1, 900)}, {"sinks": True}])  # fmt: skip
    cached = dice.choice([dtype, dtype, torch.float8_e4m3fn])
    dims = launch.HOPPER_DIMS[seed % len(launch.HOPPER_DIMS)]
    spec = spec_of(dims, (heads * group, heads), dtype=dtype, cache_dtype=cached, **seen)
    longest = dice.choice([40, 400, 1500])
    query_lens = [longest, *(dice.randint(1, longest) for _ in range(dice.randint(0, 5)))]
    seq_lens = [new + dice.randrange(dice.choice([1, 700, 9000])) for new in query_lens]
    check(a_batch(spec, seq_lens, query_lens, page_size=dice.choice([16, 64])))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dim", [80, 112, 192])
def test_where_a_cache_lies(dim: int, place: str, layout: Any, served: list[bool]) -> None:
    """NaN behind each head's columns, and values among keys, are not read."""
    batch = a_batch(spec_of((dim, dim), (9, 3)), layout=layout)
    layer = make_layer(get_backend("TRITON"), batch)
    cache = placed(batch.fresh_pool(), place)
    assert_matches(layer.forward(batch, layer.begin(batch), kv_cache=cache), batch)
    assert served == [True]


@pytest.mark.parametrize(
    "feature",
    [{"window_left": 0}, {"window_left": 90}, {"window_left": 600}, {"chunk_size": 100}, {"causal": False},
     {"causal": False, "window_left": 40}, {"sinks": True}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("dims", [(128, 128), (256, 256)], ids=str)
def test_what_a_query_sees(feature: dict[str, Any], dims: tuple[int, int], served: list[bool]) -> None:
    check(a_batch(spec_of(dims, **feature)))
    assert served == [True]


@pytest.mark.parametrize(
    "changes", [{}, {"window_left": 5000}, {"sinks": True}, {"causal": False}, {"cache_dtype": torch.float8_e4m3fn}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("dims", launch.HOPPER_DIMS, ids=str)
def test_short_chunks_behind_long_prefixes(dims: tuple[int, int], changes: dict[str, Any], served: list[bool]) -> None:
    """Keys are split, those of one row in many parts and those of another in few, beside a row that is whole and behind
    a decode; several times in a row, as each launch leaves the workspace to the next."""
    batch = a_batch(spec_of(dims, (4, 2), **changes), [900, 30_000, 300, 9000], [1, 60, 40, 100])
    layer, expected = make_layer(get_backend("TRITON"), batch), batch.expected()
    for _ in range(3):
        step = layer.begin(batch)
        assert int(step.splits.work_items[:, 5].max()) > 2
        assert_matches(layer.forward(batch, step, want_lse=True), batch, "splits", expected)
    assert served == [True] * 3


@pytest.mark.parametrize("cached", [{}, {"cache_dtype": torch.float8_e4m3fn}], ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)], ids=str)
def test_graphs_of_verified_tokens(dims: tuple[int, int], cached: dict[str, Any], served: list[bool]) -> None:
    """14 tokens of 5 heads for each KV head are prefilled: one capture, and replays of other lengths."""
    lens, backend = ((9000, 17, 330, 90), (30,), (14, 20_000)), get_backend("TRITON")
    spec = spec_of(dims, (10, 2), **cached)
    batches = [a_batch(spec, list(each), [14] * len(each), num_pages=2000, seed=i) for i, each in enumerate(lens)]
    layer = make_layer(backend, *batches, num_padded_reqs=4 * 14)
    with layer.state.graph_capture(4):
        clone = layer.state.graph_clone(4, 14)
        captured = CapturedStep([layer], clone, batches[:1], 4, 14, make_recorder("cuda"))
    assert all(step.schedule is None for step in clone.steps.values())
    assert served
    for batch in (*batches, batches[0]):
        captured.fill([batch])
        (result,) = captured.replay()
        assert_matches(result, batch, f"replay of {[row.data.seq_len for row in batch.rows]}")


@pytest.mark.parametrize("changes", [{}, {"window_left": 90}, {"dims": (256, 256)}, {"dims": (64, 64)}], ids=str)
def test_programs_go_from_tile_to_tile(
    changes: dict[str, Any], served: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three programs for all tiles, in pages and of prompts; every launch leaves the counters as it found them."""
    monkeypatch.setattr(launch, "num_multiprocessors", lambda device: 3)
    for given in ([SEQ_LENS, QUERY_LENS], [[90, 333, 128], [90, 333, 128]]):
        batch = a_batch(spec_of(**changes), *given)
        layer, expected = make_layer(get_backend("TRITON"), batch), batch.expected()
        for _ in range(3):
            assert_matches(layer.forward(batch, layer.begin(batch)), batch, "few programs", expected)
    assert served == [True] * 3 + [False] * 3


def test_queries_that_do_not_come_in_lines(served: list[bool]) -> None:
    batch = a_batch(spec_of())
    layer = make_layer(get_backend("TRITON"), batch)
    query = batch.query
    apart = query.new_empty(*query.shape[:2], query.shape[2] + 8)[..., : query.shape[2]].copy_(query)
    pool = batch.fresh_pool()
    output = layer.impl.forward(apart, batch.key, batch.value, pool, layer.begin(batch))
    assert_matches(Result(output, None, pool), batch)
    assert not served


@pytest.mark.parametrize("dims", launch.HOPPER_DIMS, ids=str)
def test_prompts(dims: tuple[int, int], served: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a decode, which they do not take along; NaN lies behind the step's last key."""
    monkeypatch.setattr(metadata, "are_faster_together", lambda *_: False)
    check(a_batch(spec_of(dims), [70, 90, 333, 128], [1, 90, 333, 128]))
    assert served == [False]


def test_an_encoder(served: list[bool]) -> None:
    spec = spec_of((64, 64), attention_type=AttentionType.ENCODER, causal=False)
    check(a_batch(spec, [300, 17, 128], [300, 17, 128]))
    assert served == [False]


def test_cross_attention(served: list[bool]) -> None:
    """One encoder's answer is empty: nothing is seen."""
    spec = spec_of((64, 64), attention_type=AttentionType.CROSS, causal=False)
    check(a_batch(spec, [300, 0, 130], [40, 20, 150]))
    assert served == [True]


@pytest.mark.parametrize("lacking", ["soft_cap", "alibi", "dim", "page", "dtype", "tile"])
def test_what_is_left_to_the_portable_kernel(lacking: str, served: list[bool]) -> None:
    changes: dict[str, dict[str, Any]] = {
        "soft_cap": {"logits_soft_cap": 30.0}, "alibi": {"alibi_slopes": (0.5,) * 8}, "dim": {"dims": (72, 72)},
        "dtype": {"dtype": torch.float32},
    }  # fmt: skip
    batch = a_batch(spec_of(**changes.get(lacking, {})), page_size=8 if lacking == "page" else 16)
    tile = {"rows": 64, "keys": 32, "warps": 4, "stages": 2}
    options = tuning.TritonOptions(prefill_tile=tile) if lacking == "tile" else None
    layer = make_layer(get_backend("TRITON"), batch, options=options)
    assert_matches(layer.forward(batch, layer.begin(batch)), batch)
    assert not served


# Over a cache of 8 bits.
CACHED = {"cache_dtype": torch.float8_e4m3fn}
SCALES = {"k_scale": 0.5, "v_scale": 2.0}


@pytest.fixture
def widening(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is not faster too."""
    monkeypatch.setattr(metadata, "is_faster_upcast", lambda *_: True)


@pytest.mark.usefixtures("widening")
@pytest.mark.parametrize(
    ("changes", "layout"),
    [({"window_left": 600}, "NHD"), ({"causal": False}, "NHD"), ({"sinks": True}, "HND"), ({"heads": (64, 4)}, "HND")],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("heads_at_once", [1, 2, 4])
def test_widened_keys_by_some_heads(
    heads_at_once: int, changes: dict[str, Any], layout: Any, served: list[bool]
) -> None:
    """Of 1995 keys; two heads, or four."""
    batch = a_batch(spec_of(**CACHED, **changes), layout=layout, **SCALES)
    room = tuning.TritonOptions(upcast_bytes=1995 * heads_at_once * 2 * 128 * 2)
    layer = make_layer(get_backend("TRITON"), batch, options=room)
    assert_matches(layer.forward(batch, layer.begin(batch), want_lse=True), batch)
    assert served == [False] * max(1, batch.spec.num_kv_heads // heads_at_once)


@pytest.mark.usefixtures("widening")
def test_widened_keys_by_some_rows(served: list[bool]) -> None:
    """Of 1995 keys, which have no room for one head: 878 fit in for both."""
    batch = a_batch(spec_of(**CACHED), **SCALES)
    layer = make_layer(get_backend("TRITON"), batch, options=tuning.TritonOptions(upcast_bytes=900_000))
    assert_matches(layer.forward(batch, layer.begin(batch), want_lse=True), batch)
    assert served == [False] * 3


@pytest.mark.usefixtures("widening")
@pytest.mark.parametrize("why", ["no room", "slower", "tile"])
def test_keys_that_are_not_widened(why: str, served: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    tile = {"rows": 64, "keys": 32, "warps": 4, "stages": 2}
    options = {"no room": {"upcast_bytes": 200_000}, "slower": {}, "tile": {"prompt_tile": tile}}[why]
    if why == "slower":
        monkeypatch.setattr(metadata, "is_faster_upcast", lambda *_: False)
    batch = a_batch(spec_of(**CACHED), **SCALES)
    layer = make_layer(get_backend("TRITON"), batch, options=tuning.TritonOptions(**options))
    assert_matches(layer.forward(batch, layer.begin(batch)), batch)
    assert served == [True]


@pytest.fixture
def as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of 8 bits is read as it is."""
    monkeypatch.setattr(metadata, "is_faster_upcast", lambda *_: False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("dims", launch.HOPPER_DIMS, ids=str)
@pytest.mark.parametrize(
    ("how", "page_size"), [("widening", 5), ("widening", 64), ("as_it_is", 16), ("as_it_is", 48), ("as_it_is", 128)]
)
def test_pages_of_8_bits(
    how: str, page_size: int, dims: tuple[int, int], cache_dtype: torch.dtype, dtype: torch.dtype, served: list[bool],
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    """Keys that are widened are read as they came, others from their pages."""
    request.getfixturevalue(how)
    check(a_batch(spec_of(dims, dtype=dtype, cache_dtype=cache_dtype), page_size=page_size, **SCALES))
    assert served == [how == "as_it_is"]


@pytest.mark.usefixtures("as_it_is")
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dim", [80, 112, 128, 192])
def test_where_a_cache_of_8_bits_lies(dim: int, place: str, layout: Any, served: list[bool]) -> None:
    batch = a_batch(spec_of((dim, dim), (9, 3), **CACHED), layout=layout, **SCALES)
    layer = make_layer(get_backend("TRITON"), batch)
    cache = placed(batch.fresh_pool(), place)
    assert_matches(layer.forward(batch, layer.begin(batch), kv_cache=cache), batch)
    assert served == [True]


@pytest.mark.parametrize("seed", range(72))
def test_random_rows_by_each_tile(seed: int, served: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """From pages and of prompts, by more tiles than programs and by fewer, of half the size listed and split too; every
    launch leaves the counters as it found them. From seed 48 on over 8 bits, which are read as they are."""
    numbers, is_8_bit = Random(seed), seed >= 48
    monkeypatch.setattr(metadata, "is_faster_upcast", lambda *_: False)
    dims = numbers.choice([dims for dims in launch.HOPPER_DIMS if len(hopper_tiles(*dims, is_8_bit)) > 1])
    changes = numbers.choice([{}, {}, {"window_left": numbers.randint(0, 400)}, {"causal": False}, {"sinks": True},
                              {"chunk_size": numbers.randint(1, 400)}])  # fmt: skip
    kv_heads = numbers.choice([1, 2, 5])
    cached = {"cache_dtype": (torch.float8_e4m3fn, torch.float8_e5m2)[seed % 2]} if is_8_bit else {}
    spec = spec_of(dims, (kv_heads * numbers.choice([1, 3, 7, 16, 60]), kv_heads), **changes, **cached)
    nth = numbers.randrange(1, len(hopper_tiles(*dims, is_8_bit)))
    tile, splits = hopper_tiles(*dims, is_8_bit)[nth], None
    if tile.groups == 1 and spec.group_size <= tile.rows and seed % 4:
        listed = launch.hopper_tile(spec, tile)
        most = most_tile_splits(listed.num_programs(launch.num_multiprocessors(torch.device("cuda"))))
        blocks = Random(f"by length {seed}").choice((0, 0, 1, 3))
        splits = PrefillSplits((0, most // 2, most)[seed % 4 - 1], listed, by_length=blocks > 0, split_blocks=blocks)
    monkeypatch.setattr(metadata, "prefill_plan", lambda *_: plans.TilePlan(tile, splits))
    monkeypatch.setattr(metadata, "are_faster_together", lambda *_: False)
    query_lens = [numbers.randint(20, numbers.choice([40, 300])) for _ in range(numbers.choice([1, 5, 40]))]
    contexts = [numbers.choice([0, numbers.randint(1, 500)]) if seed % 3 else 0 for _ in query_lens]
    seq_lens = [new + old for new, old in zip(query_lens, contexts, strict=True)]
    batch = a_batch(spec, seq_lens, query_lens, page_size=numbers.choice([16, 48, 64]), seed=seed)
    layer, expected = make_layer(get_backend("TRITON"), batch), batch.expected()
    for _ in range(2):
        assert_matches(layer.forward(batch, layer.begin(batch), want_lse=True), batch, "each tile", expected)
    assert served == [is_8_bit or any(contexts)] * 2
