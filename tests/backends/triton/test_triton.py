"""TRITON passes the conformance kit: interpreted on a CPU, in a process of its own, and compiled on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

from attn_backends import AttentionSpec, Unsupported, get_backend, select_backend
from attn_backends.batch.views import without_new_keys
from attn_backends.testing.cases.features import plain_cache, plain_spec
from attn_backends.testing.cases.random_batch import random_batch
from attn_backends.testing.conformance import BackendConformance
from attn_backends.testing.harness import assert_matches, make_layer, run_backend
from tests.helpers.interpreted import interpreted, only_interpreted
from tests.helpers.large_cache import check_large_cache
from tests.interface.test_call_checks import CALLS, check_refused

triton = pytest.importorskip("triton", reason="needs triton")
tuning = pytest.importorskip("attn_backends.backends.triton.tuning")
launch = pytest.importorskip("attn_backends.backends.triton.launch")
prefill_launch = pytest.importorskip("attn_backends.kernels.prefill.launch")
split_tiles = pytest.importorskip("attn_backends.kernels.prefill.split_tiles")
impl = pytest.importorskip("attn_backends.backends.triton.impl")
rows_of = pytest.importorskip("attn_backends.kernels.tile_kernels").rows_of
metadata = pytest.importorskip("attn_backends.backends.triton.metadata")
widening = pytest.importorskip("attn_backends.backends.triton.rules")
short_tiles = pytest.importorskip("attn_backends.backends.triton.short_tiles")
Pdl = pytest.importorskip("attn_backends.kernels.pdl").Pdl

# The interpreter takes milliseconds a program. These are left to the GPU; the others take every road of the kernels.
LEFT_OUT = (
    "_long_ or medium",  # many programs
    "window_edges and not 16",  # windows and chunks are numbers at run time, one as good as another
    "chunk_edges and not 24",
    "test_features and (window_1] or window_16 or window_300 or chunks])",
    "test_features and (gpt_oss or soft_cap_and_sinks or alibi_and_window)",  # either one is in others
    "replays_equal and not ([plain] or [chunks_24] or [gpt_oss] or [alibi_and_soft_cap])",  # of the eager kernels
    "replays and (every_dtype or table[window)",
    "shared_prefix and not plain",  # it is attended like any other keys
    "nan and (float8 or soft_cap or sinks or alibi)",  # what keeps it out is the same for all
    "chunked_prefill_equals_whole[ and not (plain or window)",
    "scales_over and not (plain or sinks] or soft_cap] or alibi] or cross)",  # constants, which all features share
    "interleaved and HND",
    "far_from_zero and 0.125",  # the product of queries and keys is any other number
    "padded_rows and 1]",  # five, not one
    "layouts and HND and not 16",  # layouts are strides
    "(writes_its_slots or cache_dtypes) and HND and (bfloat16 or e5m2)",
    "writes_its_slots and NHD and e5m2",
    "rows_and_tokens_of_padding and window",  # what is no row's is no row's with a window too
    "behind_a_row and not (plain or window_15])",  # the page table is read alike for all
    "engines_tensors and not plain",
)
SMALL = f"not ({' or '.join(f'({cases})' for cases in LEFT_OUT)})"

test_interpreted, test_more_interpreted = interpreted(__file__, SMALL)


@only_interpreted
class TestTritonInterpreted(BackendConformance):
    backend_name = "TRITON"
    dtypes = (torch.float32,)  # the interpreter is slow: the others are for a GPU
    num_random_layers = 1

    @pytest.fixture(autouse=True)
    def _large_blocks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of 64 keys where keys are split: float32 would have 32, for which the interpreter takes as long."""
        nearest = tuning._nearest

        def larger(kind: str, *asked: Any) -> dict[str, int]:
            return nearest(kind, *asked) | ({"keys": 64} if kind == "decode" else {})

        monkeypatch.setattr(tuning, "_nearest", larger)


@only_interpreted
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", ["TRITON", "TRITON_MLA"])
def test_other_tensors_are_refused_by_name(name: str, call: str) -> None:
    check_refused(name, call)


@only_interpreted
@pytest.mark.parametrize("name", ["TRITON", "TRITON_MLA"])
def test_interpreted_queries_are_not_bfloat16(name: str) -> None:
    """The interpreter multiplies it as integers: refused at selection, with that reason. Caches of it are served."""
    backend = get_backend(name)
    assert backend.capabilities().dtypes == {torch.float32, torch.float16}
    plain, cache = plain_spec(backend.capabilities()), plain_cache(backend.capabilities())
    with pytest.raises(Unsupported, match=r"got bfloat16; supported: float16, float32. Triton's interpreter does not"):
        select_backend(name, [replace(plain, dtype=torch.bfloat16, cache_dtype=torch.bfloat16)], cache, "cpu")
    with pytest.raises(Unsupported, match=r"got float64; supported: float16, float32. Load the model in one of these"):
        select_backend(name, [replace(plain, dtype=torch.float64, cache_dtype=torch.float32)], cache, "cpu")
    for dtype in (torch.float16, torch.float32):
        spec = replace(plain, dtype=dtype, cache_dtype=torch.bfloat16)
        select_backend(name, [spec], cache, "cpu")
        for query_lens in ([1, 1, 1], [1, 5, 40]):
            batch = random_batch(backend, spec, [90, 33, 40], query_lens, page_size=16, k_scale=0.5)
            assert_matches(run_backend(backend, batch, want_lse=True), batch, f"{dtype}, {query_lens}")


@only_interpreted
@pytest.mark.parametrize(
    "changes",
    [{"window_left": 90}, {"chunk_size": 100}, {"causal": False, "window_left": 90},
     {"causal": False, "chunk_size": 100}],
    ids=str,
)  # fmt: skip
def test_whole_blocks_between_those_with_a_mask(changes: dict[str, Any]) -> None:
    """Of 32 keys; tiles of 32 tokens, of which some begin in one chunk and end in another."""
    backend, spec = get_backend("TRITON"), AttentionSpec(4, 2, 32, **changes)
    for page_size in (16, 32):
        batch = random_batch(backend, spec, [300, 130], [160, 33], page_size=page_size, poison=float("nan"))
        assert_matches(run_backend(backend, batch), batch, str(changes))


@only_interpreted
@pytest.mark.parametrize("query_len", [2, 5])
def test_last_whole_blocks_of_verified_rows(query_len: int) -> None:
    """Rows whose first token sees all of a block, and rows whose first token sees all but one or two keys of it."""
    for spec in (AttentionSpec(4, 2, 32), AttentionSpec(1, 1, 32, dtype=torch.float16)):
        seq_lens = [96 + query_len + more for more in (-3, -2, -1, 0)]
        batch = random_batch(get_backend("TRITON"), spec, seq_lens, [query_len] * 4, poison=float("nan"))
        assert_matches(run_backend(get_backend("TRITON"), batch), batch, str(spec))


@only_interpreted
@pytest.mark.parametrize("scale", [0.0, -0.3], ids=str)
def test_a_scale_that_is_not_positive(scale: float) -> None:
    """The highest logit is not that of the highest product of a query and a key; with 0 all keys weigh as much."""
    spec = AttentionSpec(4, 2, 32, scale=scale)
    batch = random_batch(get_backend("TRITON"), spec, [300, 70, 9], [1, 40, 9], page_size=16, poison=float("nan"))
    assert_matches(run_backend(get_backend("TRITON"), batch), batch, f"scale {scale}")


@only_interpreted
def test_graphs_of_rows_that_see_few_keys_take_the_portable_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a window hides the others, on Hopper. The builder and the graph agree, whatever lengths the rows have."""
    monkeypatch.setattr(widening, "suits_hopper_kernel", lambda *_: True)
    backend = get_backend("TRITON")
    spec = AttentionSpec(16, 1, 64, dtype=torch.float16, window_left=40)
    batch = random_batch(backend, spec, [400, 90, 30], [4, 4, 4], page_size=16)
    layer = make_layer(backend, batch)
    with layer.state.graph_capture(3):
        clone = layer.state.graph_clone(3, 4)
        built = layer.builder.build(0, replace(batch.common(0), for_graph=True))
        step = clone.begin_forward(built)
    assert built.short_tile in short_tiles.SHORT_TILES
    assert step.metadata.short_tile == built.short_tile
    assert step.schedule is step.splits is None


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, object]]:
    """What an impl launches on a GPU that starts kernels early, of six multiprocessors; nothing is run."""
    made: list[tuple[str, object]] = []
    for where in (prefill_launch, widening, short_tiles):
        monkeypatch.setattr(where, "num_multiprocessors", lambda device: 6)
    for name in ("supports_pdl", "has_hopper_kernels", "has_tensor_engine"):
        monkeypatch.setattr(prefill_launch, name, lambda device: True)

    def prefill(*arguments: Any) -> None:
        made.append(("prefill", (arguments[-1], bool(arguments[-2][-1]))))  # programs, and whether it lets

    monkeypatch.setattr(prefill_launch, "prefill_on_hopper", prefill)
    monkeypatch.setattr(prefill_launch, "_prefill", lambda *arguments: made.append(("portable prefill", None)))
    monkeypatch.setattr(launch, "_upcast", lambda *arguments: made.append(("upcast", None)))
    monkeypatch.setattr(launch, "_decode", lambda *arguments: made.append(("decode", Pdl(arguments[-3][-1]))))
    monkeypatch.setattr(impl, "write_kv", lambda *arguments, next_waits: made.append(("write", next_waits)))
    monkeypatch.setattr(metadata, "is_faster_upcast", lambda *_: True)
    return made


def launch_step(query_lens: Sequence[int], writes: bool = True, **changes: Any) -> None:
    """A step of rows of 80 keys."""
    backend, spec = get_backend("TRITON"), AttentionSpec(4, 2, 64, **{"dtype": torch.float16, **changes})
    batch = random_batch(backend, spec, [80] * len(query_lens), list(query_lens))
    layer, common = make_layer(backend, batch), batch.common()
    step = layer.state.begin_forward(layer.builder.build(0, common if writes else without_new_keys(common)))
    new = (batch.key, batch.value) if writes else (None, None)
    layer.impl.forward(batch.query, *new, batch.fresh_pool(), step)


@only_interpreted
@pytest.mark.parametrize(("query_lens", "early"), [((1, 1), True), ((1, 5), True), ((1, 6), False)], ids=str)
def test_decode_starts_early_behind_a_small_write(
    query_lens: tuple[int, ...], early: bool, launches: list[tuple[str, object]]
) -> None:
    """Of no more tokens than there are multiprocessors. The write lets nothing else start: it may not wait."""
    launch_step(query_lens)
    assert launches == [("write", early), ("decode", Pdl.WAIT_FIRST if early else Pdl.WAIT_AT_ONCE)]


@only_interpreted
def test_decode_without_a_write_waits_for_whatever_is_in_front(launches: list[tuple[str, object]]) -> None:
    """Which may have made the list of its work."""
    launch_step((1, 1), writes=False)
    assert launches == [("decode", Pdl.WAIT_AT_ONCE)]


@only_interpreted
@pytest.mark.parametrize("writes", [True, False])
def test_decodes_and_prefills_run_side_by_side(
    writes: bool, launches: list[tuple[str, object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The latter first, with as many programs as they need to take as long, or half of the GPU's."""
    monkeypatch.setattr(metadata, "short_tile", lambda *_: None)
    for num_decodes, programs in ((1, 12), (3, 8), (10, 6)):  # two of half the size on each multiprocessor
        launches.clear()
        launch_step((*[1] * num_decodes, 40), writes)
        assert launches[:-2] == [("write", False)] * writes
        assert launches[-2:] == [("prefill", (programs, True)), ("decode", Pdl.WAIT_LAST)]


@only_interpreted
@pytest.mark.parametrize(
    ("changes", "prefill"),
    [({"logits_soft_cap": 30.0}, "portable prefill"), ({"cache_dtype": torch.float8_e4m3fn}, "prefill")],
    ids=str,
)
def test_decodes_wait_for_other_prefills(
    changes: dict[str, Any], prefill: str, launches: list[tuple[str, object]]
) -> None:
    """The portable kernel lets nothing start, nor the one for Hopper where it takes several launches."""
    launch_step((1, 1, 40), **changes)
    assert launches[-1] == ("decode", Pdl.WAIT_AT_ONCE)
    assert prefill in [name for name, _ in launches]
    assert ("prefill", (6, False)) in launches or prefill != "prefill"


@only_interpreted
@pytest.mark.parametrize("decode_sms", [None, 1])
def test_decodes_are_cut_for_what_prefills_leave(decode_sms: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter counts two multiprocessors."""
    monkeypatch.setattr(metadata, "short_tile", lambda *_: None)
    monkeypatch.setattr(metadata.TritonMetadataBuilder, "_prefill_share", lambda *_: 0.5)
    monkeypatch.setattr(metadata.TritonMetadataBuilder, "_decode_sms", lambda *_: decode_sms)
    batch = random_batch(get_backend("TRITON"), AttentionSpec(4, 2, 64, dtype=torch.float16), [900, 70, 40], [1, 1, 40])
    layer = make_layer(get_backend("TRITON"), batch)
    step = layer.begin(batch)
    assert step.schedule.work_list._numbers.num_sms == (decode_sms or 2)
    assert_matches(layer.forward(batch, step), batch)


@only_interpreted
@pytest.mark.parametrize(
    ("changes", "shares"),
    [({}, True), ({"logits_soft_cap": 30.0}, False), ({"cache_dtype": torch.float8_e4m3fn}, True)],
    ids=str,
)
def test_only_prefills_that_let_decodes_start_have_a_share(
    changes: dict[str, Any], shares: bool, launches: list[tuple[str, object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "short_tile", lambda *_: None)
    spec = AttentionSpec(4, 2, 64, **{"dtype": torch.float16, **changes})
    batch = random_batch(get_backend("TRITON"), spec, [100] * 3, [1, 1, 40])
    built = make_layer(get_backend("TRITON"), batch).builder.build(0, batch.common())
    assert (built.prefill_share is not None) == shares


@only_interpreted
def test_prefills_alone_take_the_whole_gpu(launches: list[tuple[str, object]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "short_tile", lambda *_: None)
    launch_step((40, 20))
    assert launches == [("write", False), ("prefill", (12, True))]  # two on each multiprocessor, of a list


@only_interpreted
def test_prefills_that_see_few_keys_go_to_the_portable_kernel(launches: list[tuple[str, object]]) -> None:
    """With rows of few tokens, which are no decodes then; unless true decodes can run beside them, and there are too
    many tiles for one block each to be faster."""
    for query_lens in ((40, 20), (16, 17, 16), (3, 5, 60), (1, 40, 20)):
        launches.clear()
        launch_step(query_lens)
        assert launches == [("write", False), ("portable prefill", None)]
    launches.clear()
    launch_step((1, 1, 80, 80, 80))
    assert [name for name, _ in launches] == ["write", "prefill", "decode"]


@triton.jit
def tiles_kernel(  # type: ignore[no-untyped-def]
    query_start_loc,
    rows,
    firsts,
    first_row,
    num_rows,
    GROUP: triton.language.constexpr,
    TILE: triton.language.constexpr,
):
    """What each program's tile is."""
    tile = triton.language.program_id(0)
    row, _first_token, query_len, first = rows_of(tile, query_start_loc, first_row, num_rows, GROUP, TILE)
    triton.language.store(rows + tile, row)
    triton.language.store(firsts + tile, triton.language.where(first < query_len * GROUP, first, -1))


MANY_ROWS = pytest.param(tuple(Random("rows").choices((1, 2, 15, 16, 17, 40), k=150)), id="many rows")


@only_interpreted
@pytest.mark.parametrize(
    "query_lens", [(33,), (64,), (1, 16, 17), (32, 32, 32, 32), (1, 1, 50, 1, 15), MANY_ROWS], ids=str
)
@pytest.mark.parametrize("first_row", [0, 2])
@pytest.mark.parametrize("group", [1, 3, 20])
def test_every_query_is_in_one_tile(group: int, first_row: int, query_lens: tuple[int, ...]) -> None:
    """Behind some rows that are left alone. One row, such as a chunk of a prompt, has no tile too many."""
    tile_queries = 16
    starts = torch.tensor([0, *(5,) * first_row, *query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    num_tiles = split_tiles.most_tiles(group * sum(query_lens), len(query_lens), tile_queries)
    rows, firsts = torch.empty(2, num_tiles, dtype=torch.int32)
    tiles_kernel[num_tiles,](starts, rows, firsts, first_row, len(query_lens), group, tile_queries)
    found = [tile for tile in zip(rows.tolist(), firsts.tolist(), strict=True) if tile[1] >= 0]
    wanted = [(row, first) for row, length in enumerate(query_lens, first_row)
              for first in range(0, group * length, tile_queries)]  # fmt: skip
    assert found == wanted
    assert len(query_lens) > 1 or num_tiles == len(wanted)


@pytest.mark.gpu
class TestTriton(BackendConformance):
    backend_name = "TRITON"
    device = "cuda"


@pytest.mark.gpu
class TestTritonOnHopper(BackendConformance):
    """The kit's plain layer has 16 dims, which kernels for Hopper do not serve: this one's are served. Keys of 8 bits
    are made 16 bits for them, however few queries see them, and few keys are no reason for another kernel."""

    backend_name = "TRITON"
    device = "cuda"
    dtypes = (torch.bfloat16,)

    @pytest.fixture(autouse=True)
    def _widening(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(metadata, "is_faster_upcast", lambda *_: True)
        monkeypatch.setattr(metadata, "short_tile", lambda *_: None)

    def make_spec(self, **changes: Any) -> AttentionSpec:
        return super().make_spec(**{"head_dim": 128, **changes})


@pytest.mark.gpu
@pytest.mark.parametrize("kit", [TestTriton, TestTritonOnHopper])
def test_large_caches(kit: type[BackendConformance]) -> None:
    check_large_cache(kit())
