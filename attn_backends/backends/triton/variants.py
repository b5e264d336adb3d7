"""Every compiled form of a kernel that steps within the limits can ask TRITON for.

Tiles follow from the number of rows and of query tokens by tables that are only looked at: all of those numbers are
walked, and each tile and cut that comes out is launched once in a listing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import torch

from attn_backends.backends.triton.launch import Kernels
from attn_backends.backends.triton.layer import make_kernels
from attn_backends.backends.triton.rules import can_upcast, decode_tokens, of_fresh_keys, split_tile
from attn_backends.backends.triton.schedule import Schedule, SplitPlan
from attn_backends.backends.triton.short_tiles import short_tiles
from attn_backends.backends.triton.tuning import DecodeTile, TritonOptions, decode_tile, upcast_heads
from attn_backends.cache.warm_up import list_writes
from attn_backends.kernels.examples import caches, distinct, empty, new_tokens, powers_of_two
from attn_backends.kernels.launch import Machine, num_multiprocessors, power_of_two, shared_memory
from attn_backends.kernels.pdl import Pdl
from attn_backends.kernels.prefill.launch import Rows, visible_range
from attn_backends.kernels.prefill.split_launch import TileList
from attn_backends.kernels.prefill.split_tiles import SplitTile, hopper_tile
from attn_backends.kernels.prefill.splits import PrefillSplits, most_tile_splits
from attn_backends.kernels.prefill.tiles import HopperTile, half_tile, tiles_of
from attn_backends.kernels.tiles import block_dims
from attn_backends.kernels.variants import Variant, listing
from attn_backends.spec import AttentionSpec, AttentionType, KVCacheSpec, Limits

_WIDTH = 2  # pages of a row: no kernel is compiled for it


def variants(
    specs: Sequence[AttentionSpec], cache: KVCacheSpec, limits: Limits, device: torch.device,
    options: TritonOptions | None, machine: Machine,
) -> list[Variant]:  # fmt: skip
    with listing(machine) as found:
        for spec in specs:
            _Layer(spec, cache, limits, device, options).launch_all()
    return list(found.variants.values())


class _Layer:
    """A layer's launches, of all steps that there can be."""

    def __init__(
        self, spec: AttentionSpec, cache: KVCacheSpec, limits: Limits, device: torch.device,
        options: TritonOptions | None,
    ) -> None:  # fmt: skip
        self.spec, self.cache, self.limits, self.device = spec, cache, limits, device
        self.options = options or TritonOptions()
        sinks = torch.zeros(spec.num_qo_heads, dtype=torch.float32, device=device) if spec.sinks else None
        self.kernels: Kernels = make_kernels(spec, cache, device, options, sinks)
        self.tokens = new_tokens(spec)
        self._short_tiles = {  # by whether keys are in pages
            is_paged: {*short_tiles(spec if is_paged else of_fresh_keys(spec), cache, options, device)}
            for is_paged in (True, False)
        }

    def launch_all(self) -> None:
        of_prefill = {Pdl.OFF, *self._prefill_tokens(), *self._prefill_pages()}
        starts = {max(pdl, self.kernels.pdl) for pdl in of_prefill}
        if self.spec.attention_type is AttentionType.ENCODER:  # no cache
            return
        starts |= {Pdl.WAIT_FIRST} if self.kernels.supports_pdl(1) else set()
        list_writes(self.spec, self.cache, sorted({pdl is Pdl.WAIT_FIRST for pdl in starts}))
        self._decode(sorted(starts))

    def _prefill_tokens(self) -> Iterator[Pdl]:
        """Rows that bring all of their keys."""
        lists = self._lists(is_paged=False)
        for new in self.tokens:
            yield from self._prefill(
                new.query, new.key, new.value, self._rows(None), empty(0, dtype=torch.uint8), lists
            )

    def _prefill_pages(self) -> Iterator[Pdl]:
        """Rows over the cache, as it is or made 16 bits."""
        upcast_kv = empty(self.options.upcast_bytes // 16 * 16, dtype=torch.uint8)
        table, lists = empty(1, _WIDTH, dtype=torch.int32), self._lists(is_paged=True)
        for (query, *_), cached in product(distinct(self.tokens), distinct(caches(self.spec, self.cache))):
            yield from self._prefill(query, *cached, self._rows(table), upcast_kv, lists)
            for num_rows, num_keys in self._upcast_sizes():
                rows = self._rows(table.expand(num_rows, -1), num_keys)
                yield from self._prefill(query, *cached, rows, upcast_kv, self._lists(is_paged=True, is_upcast=True))

    def _prefill(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rows: Rows, upcast_kv: torch.Tensor,
        lists: Sequence[tuple[HopperTile | None, TileList]],
    ) -> Iterator[Pdl]:  # fmt: skip
        tiles, output = empty(2, dtype=torch.int32), self._output(query)
        spec = self.spec if rows.page_table is not None else of_fresh_keys(self.spec)
        of_hopper = (None,) if rows.num_upcast else (None, *tiles_of(spec)[1:])
        for share, other in product((None, 1.0), of_hopper):  # of the GPU, beside decodes
            whole = rows._replace(hopper_tile=other)
            yield self.kernels.prefill(query, key, value, output, None, whole, tiles, upcast_kv, share)
        for tile in self._short_tiles[rows.page_table is not None] if not rows.num_upcast else ():
            short = rows._replace(short_tile=tile)
            yield self.kernels.prefill(query, key, value, output, None, short, tiles, upcast_kv, None)
        for other, splits in lists:
            listed = rows._replace(splits=splits, hopper_tile=other)
            yield self.kernels.prefill(query, key, value, output, None, listed, tiles, upcast_kv, None)

    def _lists(self, *, is_paged: bool, is_upcast: bool = False) -> list[tuple[HopperTile | None, TileList]]:
        """Lists of the tiles of the kernel that serves such keys: of the usual one, and of half the size."""
        given = (self.cache, self.options, self.device)
        spec = self.spec if is_paged else of_fresh_keys(self.spec)
        tile = split_tile(spec, *given, is_paged=is_paged, is_upcast=is_upcast)
        half = half_tile(spec) if tile.beside and not is_upcast else None
        lists: list[tuple[HopperTile | None, TileList]] = [(None, self._list(tile, is_paged and not is_upcast))]
        return lists if half is None else [*lists, (half, self._list(hopper_tile(spec, half), False))]

    def _list(self, tile: SplitTile, may_be_mixed: bool) -> TileList:
        """Args: may_be_mixed: a graph of mixed batches may have one of such tiles."""
        spec, ints, floats = self.spec, {"dtype": torch.int32}, {"dtype": torch.float32}
        target = max(spec.num_kv_heads, most_tile_splits(tile.num_programs(num_multiprocessors(self.device))))
        workspace = (
            empty(target * tile.rows * block_dims(spec)[1], **floats),
            empty(2 * target * tile.rows, **floats),
            empty(2, **ints),
        )
        of_mixed = (1, 0) if may_be_mixed else (0,)
        few_and_many = sorted({1, self.limits.max_num_requests})
        for by_length, num_tokens, num_rows in product((True, False), of_mixed, few_and_many):
            splits = PrefillSplits(0 if by_length else target, tile, by_length=by_length)
            made = TileList(splits, spec.num_kv_heads, visible_range(spec), 0, num_rows, 1, block_dims(spec)[1],
                            workspace, num_tokens=num_tokens)  # fmt: skip
            made.fill(empty(num_rows, **ints), empty(num_rows + 1, **ints))
        return made

    def _rows(self, table: torch.Tensor | None, num_keys: int = 0) -> Rows:
        num_rows = 1 if table is None else len(table)
        lens, starts = empty(num_rows, dtype=torch.int32), empty(num_rows + 1, dtype=torch.int32)
        return Rows(table, lens, starts, starts, 0, 1, num_keys, 1)

    def _upcast_sizes(self) -> Iterator[tuple[int, int]]:
        """Numbers of rows, and of keys by which so many KV heads are made 16 bits at a time: all powers of two, and all
        numbers of heads."""
        spec, num_bytes = self.spec, self.options.upcast_bytes
        if not can_upcast(spec, self.options, self.device):
            return
        most_keys = self.limits.max_num_requests * self.limits.max_model_len
        num_bytes_of = [num_bytes // (heads * (spec.head_dim + spec.head_dim_vo) * spec.dtype.itemsize)
                        for heads in range(1, spec.num_kv_heads + 1)]  # fmt: skip
        least = {upcast_heads(spec, keys, num_bytes): min(keys, most_keys) for keys in num_bytes_of if keys}
        for num_keys in least.values():
            for num_rows in powers_of_two(self.limits.max_num_requests):
                yield num_rows, num_keys

    def _decode(self, starts: Sequence[Pdl]) -> None:
        spec, ints = self.spec, {"dtype": torch.int32}
        workspace = (empty(0, dtype=torch.float32), empty(0, dtype=torch.float32), empty(0, dtype=torch.int32))
        given = [*product(distinct([(new.query,) for new in self.tokens]), distinct(caches(spec, self.cache)))]
        for num_rows, query_len, tile in self._plans():
            given_sizes = num_rows, query_len, num_multiprocessors(self.device), self.cache.page_size
            schedule = Schedule(spec, tile, *given_sizes, workspace[-1])
            table = empty(num_rows, _WIDTH, **ints)
            schedule.work_list.fill(empty(num_rows, **ints), empty(num_rows + 1, **ints), table)
            for ((query,), (key, value)), pdl in product(given, starts):
                output = self._output(query)
                self.kernels.decode(query, key, value, output, None, table, schedule, workspace, pdl)

    def _plans(self) -> Iterator[tuple[int, int, DecodeTile]]:
        """Numbers of rows and of query tokens, and their tile: of all that kernels are compiled alike for, one."""
        found: dict[tuple[Any, ...], tuple[int, int, DecodeTile]] = {}
        smem_bytes, limits, tiles = shared_memory(self.device), self.limits, {}
        longest = decode_tokens(self.spec, self.cache, self.options, self.device)
        for query_len in range(1, min(longest, limits.max_num_tokens) + 1):
            plan = SplitPlan.of(self.spec, query_len)
            for num_rows in range(1, limits.max_num_requests + 1):
                asked = (num_rows, plan.block_m)
                if asked not in tiles:
                    tiles[asked] = decode_tile(self.spec, self.cache, *asked, self.options, smem_bytes)
                kind = (plan, tiles[asked], power_of_two(num_rows))
                found.setdefault(kind, (num_rows, query_len, tiles[asked]))
        yield from found.values()

    def _output(self, query: torch.Tensor) -> torch.Tensor:
        return empty(query.shape[0], self.spec.num_qo_heads, self.spec.head_dim_vo, dtype=query.dtype)
