"""Windows of vLLM's FlashAttention 3: calls that would see keys ahead are told to mask every block, and no others."""

from __future__ import annotations

import functools
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attn_backends import AttentionSpec, KVCacheSpec
from attn_backends.backends.flash_attn import fa3_window
from attn_backends.backends.flash_attn.call import HostLens, Rows
from attn_backends.backends.flash_attn.fa3 import VllmFa3
from attn_backends.backends.flash_attn.fa3_window import BEYOND_ALL, TILES, Tile
from attn_backends.testing.cases.cases import BatchShape
from attn_backends.testing.conformance import BackendConformance
from attn_backends.testing.graphs.harness import graph_batch
from attn_backends.testing.harness import make_layer, output_error
from tests.emulated import vllm_flash_attn
from tests.emulated.flash_attn_blocks import Blocks
from tests.helpers.flash_attn_backends import emulated
from tests.helpers.mutate import mutate

FA3 = "FLASH_ATTN_VLLM_FA3_EMULATED"
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
EVERY_TILE = sorted({tile for tiles in TILES.values() for tile in tiles})
NUM_CASES = 4000


class Kit(BackendConformance):
    __test__ = False
    backend_name = FA3
    dtypes = (BF16,)


# The rule, against the model of the main loop.


def rows_of(*lens: tuple[int, int], exact: bool = True) -> Rows:
    """Rows of these numbers of queries and keys."""
    queries, keys = zip(*lens, strict=True)
    starts = torch.tensor([0, *queries]).cumsum(0).int()
    seq_lens = torch.tensor(keys).int()
    on_host = HostLens(starts, seq_lens, exact)
    table = torch.zeros(len(lens), 1, dtype=torch.int32)
    return Rows(len(lens), sum(queries), max(queries), max(keys), starts, seq_lens, table, on_host=on_host)


def sees_others(tile: Tile, group_size: int, window: int, query_len: int, seq_len: int) -> bool:
    """Whether a query at an edge of a tile is shown keys beyond its window; each edge has the most of them."""
    edges = [slot // group_size for slot in range(0, query_len * group_size, tile.block_m)]
    index = torch.tensor(sorted({*edges, *(max(0, edge - 1) for edge in edges), query_len - 1}))
    key, one = torch.arange(seq_len), torch.zeros_like(index)
    blocks = Blocks(*tile, window, None)
    shown = blocks.shown(one, index, torch.tensor([query_len]), torch.tensor([seq_len]), key, group_size)
    position = (index + seq_len - query_len)[:, None]
    return bool((shown & ((key > position) | (key < position - window))[:, None]).any())


def random_case(random: Random) -> tuple[Tile, int, int, int, int]:
    tile, group_size = random.choice(EVERY_TILE), random.choice((1, 1, 2, 3, 4, 5, 8))
    """Windows that reach into another block by 2 tokens to a hundred, among others."""
    window = random.choice((random.randint(1, 5) * tile.block_n - random.randint(1, 60), random.randint(1, 900)))
    query_len = random.choice((1, 3, 8, random.randint(1, 100), random.randint(100, 400)))
    return tile, group_size, window, query_len, query_len + random.randint(0, 2 * window + 300)


@functools.cache
def cases() -> list[tuple[tuple[Tile, int, int, int, int], bool]]:
    """Random rows, and whether the model has them wrong."""
    random = Random("windows")
    drawn = [random_case(random) for _ in range(NUM_CASES)]
    return [(case, sees_others(*case)) for case in drawn]


def check_the_rule() -> None:
    num_told = num_wrong = 0
    for case, is_wrong in cases():
        tile, group_size, window, query_len, seq_len = case
        is_told = fa3_window.may_see_ahead(tile, group_size, window, rows_of((query_len, seq_len)))
        assert is_told or not is_wrong, f"wrong, and not told: {case}"
        num_told, num_wrong = num_told + is_told, num_wrong + is_wrong
    assert num_wrong > NUM_CASES / 30
    assert num_told < 1.5 * num_wrong, f"{num_told} rows are told, and {num_wrong} are wrong"


def test_the_rule_misses_no_row_and_tells_few_others() -> None:
    check_the_rule()


@pytest.mark.parametrize(
    ("function", "before", "after"),
    [
        ("may_see_ahead", "tile.block_n + 2", "2 * tile.block_n + 2"),
        ("may_see_ahead", "// tile.block_n) - 2", "// tile.block_n) - 3"),
        ("may_see_ahead", "// tile.block_n) - 2", "// tile.block_n) - 1"),
        ("may_see_ahead", "(window + 1) %", "window %"),
        ("_has_such_rows", "seq_lens >= window + 2 * needed", "seq_lens >= 2 * window + 2 * needed"),
        ("_has_such_rows", "<= window + most_offset", "<= window + most_offset - 128"),
        ("_most_tokens", "+ 2", ""),
    ],
)
def test_another_rule_is_found(monkeypatch: pytest.MonkeyPatch, function: str, before: str, after: str) -> None:
    mutate(monkeypatch, fa3_window, function, before, after)
    with pytest.raises(AssertionError):
        check_the_rule()


@pytest.mark.parametrize(
    "case",
    [
        (Tile(24, 12), 5, 33, 8, 40),  # not a key fewer
        (Tile(24, 8), 3, 17, 8, 33),  # not a key further
        (Tile(16, 4), 5, 9, 21, 25),  # a tile that has some heads of two more tokens than it holds
    ],
)
def test_rows_at_the_edges_of_the_rule_are_told(case: tuple[Tile, int, int, int, int]) -> None:
    tile, group_size, window, query_len, seq_len = case
    assert sees_others(*case)
    assert fa3_window.may_see_ahead(tile, group_size, window, rows_of((query_len, seq_len)))


def may_see_ahead(head_dim: int, group_size: int, window: int, rows: Rows, element_size: int = 2) -> bool:
    return any(fa3_window.may_see_ahead(tile, group_size, window, rows) for tile in TILES[element_size, head_dim])


@pytest.mark.parametrize("element_size", [1, 2])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_common_calls_are_as_quick_as_they_were(head_dim: int, element_size: int) -> None:
    """Decodes, rows within the window, and chunks far behind it, whatever the tile."""
    for window in (100, 500, 1023, 2000, 4095):
        for rows in (
            rows_of((1, 300), (1, 1 << 20)),
            rows_of((window + 1, window + 1), (64, window)),
            rows_of((512, 2 * window + 512), (512, 4 * window + 512)),
            rows_of((1, 1 << 20))._replace(on_host=None),
        ):
            assert not may_see_ahead(head_dim, 1, window, rows, element_size)


def test_windows_of_most_models_are_right_in_16_bits() -> None:
    """Windows of whole blocks, the query's own key included, reach into another block by whole tiles alone."""
    rows = rows_of((6000, 6000), (512, 1024), (8, 1100))
    assert not may_see_ahead(128, 4, 4095, rows)
    assert not may_see_ahead(64, 8, 127, rows)
    assert not may_see_ahead(256, 2, 1023, rows)
    assert may_see_ahead(256, 1, 1023, rows)
    assert may_see_ahead(128, 4, 500, rows)


def test_lengths_that_are_upper_bounds_may_be_shorter() -> None:
    far = rows_of((128, 2000))
    assert not may_see_ahead(128, 1, 500, far)
    assert may_see_ahead(128, 1, 500, rows_of((128, 2000), exact=False))
    assert may_see_ahead(128, 1, 500, far._replace(on_host=None))
    assert not may_see_ahead(128, 1, 500, rows_of((128, 501), exact=False))


# What calls are given.


def told(seq_len: int, query_len: int, for_graph: bool = False, **changes: Any) -> torch.Tensor | None:
    """What the one call of a batch of two rows is given."""
    kit: Any = Kit()
    changes = {"num_qo_heads": 1, "num_kv_heads": 1, "head_dim": 128, "window_left": 500, **changes}
    spec = kit.make_spec(**changes)
    batch = kit.make_batch(spec, BatchShape(seq_lens=(seq_len, query_len), query_lens=(query_len, query_len)))
    layer = make_layer(kit.backend, batch)
    (call,) = layer.begin(batch).calls
    given: torch.Tensor | None = call.tot_seq_lens
    return given


def test_calls_that_may_be_wrong_are_told_and_others_not() -> None:
    given = told(828, 128)
    assert given is not None
    assert given.tolist() == [BEYOND_ALL, BEYOND_ALL]
    assert given.dtype is torch.int32
    assert told(828, 1) is None
    assert told(450, 450) is None
    assert told(2000, 128) is None
    assert told(828, 128, window_left=-1) is None
    assert told(828, 128, causal=False) is None
    assert told(828, 128, head_dim=64) is None
    assert told(828, 128, cache_dtype=FP8) is not None
    assert told(828, 128, cache_dtype=FP8, head_dim=256) is None  # over pages


def test_steps_without_a_cache_read_keys_of_the_layers_own_dtype() -> None:
    spec = AttentionSpec(1, 1, 256, dtype=BF16, cache_dtype=FP8, window_left=500)
    rows = rows_of((700, 700))
    provider = emulated(VllmFa3)
    assert provider.tot_seq_lens(spec, rows, causal=True) is None
    assert provider.tot_seq_lens(spec, rows._replace(page_table=None), causal=True) is not None


@pytest.mark.parametrize(("query_len", "is_told"), [(1, False), (5, False), (6, True), (8, True)])
def test_graphs_are_told_where_any_lengths_may_be_wrong(query_len: int, is_told: bool) -> None:
    """A window of 251 keys before the query's own reaches into another block of 128 by 6 tokens."""
    kit: Any = Kit()
    spec = kit.make_spec(window_left=251, num_qo_heads=1, num_kv_heads=1, head_dim=128)
    shapes = [BatchShape(seq_lens=(n, 300, query_len, n + 7), query_lens=(query_len,) * 4) for n in (330, 290, 400)]
    batches = [kit.make_batch(spec, shape, num_pages=100, seed=seed) for seed, shape in enumerate(shapes)]
    layer = make_layer(kit.backend, *batches, num_padded_reqs=4 * query_len)
    captured = kit.capture([layer], batches[:1], query_len)
    kit.check_replays(captured, [[batch] for batch in batches], "a window in a graph")
    with layer.state.graph_capture(4):
        clone = layer.state.graph_clone(4, query_len)
        metadata = layer.builder.build(0, graph_batch(batches[0], 4, query_len))
        (call,) = clone.begin_forward(metadata).calls
    assert (call.tot_seq_lens is not None) is is_told


def without_the_argument() -> Any:
    """vLLM's module before `cp_tot_seqused_k`."""
    real = vllm_flash_attn.flash_attn_varlen_func

    def attend(*given: Any, s_aux: Any = None, **named: Any) -> Any:
        return real(*given, s_aux=s_aux, **named)

    values = {name: getattr(vllm_flash_attn, name) for name in dir(vllm_flash_attn) if not name.startswith("__")}
    return SimpleNamespace(**{**values, "flash_attn_varlen_func": attend})


def test_a_library_that_cannot_be_told_serves_no_windows() -> None:
    class Older(VllmFa3):
        def declared(self) -> Any:
            return replace(super().declared(), devices=frozenset({"cpu"}))

    older, device = Older({VllmFa3.module_names[0]: without_the_argument()}), torch.device("cpu")
    plain, cache = AttentionSpec(4, 2, 128, dtype=BF16), KVCacheSpec(4, 16)
    windowed = replace(plain, window_left=500)
    (found,) = older.reject(windowed, cache, device)
    assert found.code == "window"
    assert "cp_tot_seqused_k" in found.got
    assert "keys ahead" in found.hint
    assert older.reject(plain, cache, device) == []
    assert older.reject(replace(windowed, causal=False), cache, device) == []
    assert emulated(VllmFa3).reject(windowed, cache, device) == []


def test_windows_over_fp8_caches_are_served() -> None:
    for window in (0, 948):
        spec = AttentionSpec(32, 4, 128, dtype=BF16, cache_dtype=FP8, window_left=window)
        assert emulated(VllmFa3).reject(spec, KVCacheSpec(4, 16), torch.device("cpu")) == []


# The kit finds a provider that does otherwise.


def told_never(provider: VllmFa3, spec: AttentionSpec, rows: Rows, *, causal: bool) -> None:
    return None


def told_always(provider: VllmFa3, spec: AttentionSpec, rows: Rows, *, causal: bool) -> torch.Tensor | None:
    windowed = spec.window_left >= 0 and causal
    return torch.full((rows.num_rows,), BEYOND_ALL, dtype=torch.int32) if windowed else None


@pytest.mark.parametrize(
    ("change", "cache_dtype"),
    [(told_never, None), (told_never, FP8), (told_always, None)],
)
def test_the_kit_fails_on(monkeypatch: pytest.MonkeyPatch, change: Any, cache_dtype: torch.dtype | None) -> None:
    kit: Any = Kit()
    kit.test_windows_over_several_tiles(cache_dtype, BF16)
    monkeypatch.setattr(VllmFa3, "tot_seq_lens", change)
    with pytest.raises(AssertionError):
        kit.test_windows_over_several_tiles(cache_dtype, BF16)


def test_the_kit_fails_on_a_rule_that_is_off_by_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    kit: Any = Kit()
    mutate(monkeypatch, fa3_window, "may_see_ahead", "tile.block_n + 2", "2 * tile.block_n + 2")
    monkeypatch.setattr("attn_backends.backends.flash_attn.fa3.may_see_ahead", fa3_window.may_see_ahead)
    with pytest.raises(AssertionError):
        kit.test_windows_over_several_tiles(None, BF16)


# On a GPU, against the emulation.

WINDOWS = (127, 500, 948, 2000)
LENS = ((1, 900), (8, 1300), (64, 1550), (128, 828), (129, 1300), (256, 1900), (700, 700), (300, 4000))


class Windowed:
    """Rows over pages of 16, the same for the real library and the emulated one."""

    def __init__(self, window: int, dtype: torch.dtype, head_dim: int, heads: int = 4) -> None:
        self.window, self.dtype, self.heads = window, dtype, heads
        generator = torch.Generator().manual_seed(window)
        self.rows = rows_of(*LENS)
        pages = -(-self.rows.max_seq_len // 16)
        self.table = torch.randperm(pages, generator=generator).int().expand(len(LENS), -1).contiguous()
        shape = (pages, 16, 1, head_dim)
        self.key, self.value = (torch.randn(shape, generator=generator).to(dtype) for _ in "kv")
        query = 1.5 * torch.randn(self.rows.num_tokens, heads, head_dim, generator=generator)
        self.query = query.to(dtype)

    def run(self, module: Any, device: str, rows: Rows, query: torch.Tensor, is_told: bool) -> torch.Tensor:
        table, more = self.table[: rows.num_rows, : -(-rows.max_seq_len // 16)], {}
        if is_told:
            more["cp_tot_seqused_k"] = torch.full((rows.num_rows,), BEYOND_ALL, dtype=torch.int32, device=device)
        out = module.flash_attn_varlen_func(
            query.to(device), self.key.to(device), self.value.to(device), rows.max_query_len,
            rows.query_start_loc.to(device), self.rows.max_seq_len, seqused_k=rows.seq_lens.to(device), causal=True,
            window_size=(self.window, 0), block_table=table.to(device), num_splits=1, fa_version=3, **more,
        )  # fmt: skip
        return torch.as_tensor(out).cpu()

    def really(self, module: Any, is_told: bool) -> torch.Tensor:
        return self.run(module, "cuda", self.rows, self.query, is_told)

    def emulated(self, is_told: bool) -> torch.Tensor:
        """Row by row: there every query meets the keys of all rows of a call."""
        parts = zip(LENS, self.query.split([query_len for query_len, _ in LENS]), strict=True)
        return torch.cat([self.run(vllm_flash_attn, "cpu", rows_of(lens), part, is_told) for lens, part in parts])

    def differ(self, one: torch.Tensor, other: torch.Tensor) -> set[int]:
        """Rows whose outputs differ by more than rounding does."""
        lens = self.rows.query_start_loc.diff().tolist()
        pairs = enumerate(zip(one.split(lens), other.split(lens), strict=True))
        limit = 8e-2 if self.dtype is FP8 else 2e-2
        return {row for row, (a, b) in pairs if output_error(a, b.double()) > limit}


CASES = [(dtype, dim, window) for dtype in (BF16, FP8) for dim in (64, 128, 256) for window in WINDOWS]


@functools.cache
def outputs_here(dtype: torch.dtype, dim: int, window: int, is_told: bool) -> torch.Tensor:
    return Windowed(window, dtype, dim).emulated(is_told)


@pytest.mark.parametrize("dtype", [BF16, FP8], ids=str)
def test_the_emulation_is_wrong_where_the_rule_tells(dtype: torch.dtype) -> None:
    case = Windowed(500, dtype, 128, heads=1)
    plain, mended = (case.emulated(is_told) for is_told in (False, True))
    spec = AttentionSpec(1, 1, 128, dtype=BF16, cache_dtype=dtype, window_left=500)
    wrong = case.differ(plain, mended)
    assert {3} <= wrong
    for row, lens in enumerate(LENS):
        given = emulated(VllmFa3).tot_seq_lens(spec, rows_of(lens), causal=True)
        assert given is not None or row not in wrong


@pytest.fixture(scope="module")
def real() -> Any:
    found = pytest.importorskip("vllm.vllm_flash_attn.flash_attn_interface")
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("FlashAttention 3 is for Hopper GPUs")
    return found


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "dim", "window"), CASES)
def test_told_to_mask_every_block_the_kernel_is_right(real: Any, dtype: torch.dtype, dim: int, window: int) -> None:
    case = Windowed(window, dtype, dim)
    assert case.differ(case.really(real, True), outputs_here(dtype, dim, window, True)) == set()


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "dim", "window"), CASES)
def test_the_kernel_is_wrong_where_the_emulation_is(real: Any, dtype: torch.dtype, dim: int, window: int) -> None:
    """Not told, it sees the keys ahead that the model says, and is right elsewhere."""
    case = Windowed(window, dtype, dim)
    plain, mended = case.really(real, False), outputs_here(dtype, dim, window, True)
    predicted = case.differ(outputs_here(dtype, dim, window, False), mended)
    found = case.differ(plain, mended)
    assert found <= predicted, (
        f"rows {sorted(found - predicted)} of {LENS} are wrong, and the rule may not know of them"
    )
    assert found == predicted, (
        f"rows {sorted(predicted - found)} of {LENS} are right now. If this vLLM mends the kernel, let "
        "VllmFa3.tot_seq_lens give None from its version on, take the fault out of "
        "tests/emulated/flash_attn_blocks.py, and delete this test"
    )
    assert case.differ(plain, outputs_here(dtype, dim, window, False)) == set()
