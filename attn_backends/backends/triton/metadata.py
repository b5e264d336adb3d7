"""A batch as TRITON's kernels take it: the page table and lengths on the device, and shapes on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from attn_backends.backends.triton.launches import NO_PREFILL, Launches, Lens, mixed_launches
from attn_backends.backends.triton.plans import TilePlan, are_faster_together, prefill_plan, split_plan
from attn_backends.backends.triton.rules import (
    can_upcast,
    decode_sms,
    decode_tokens,
    of_fresh_keys,
    prefill_share,
    reads_pages_on_hopper,
    split_tile,
)
from attn_backends.backends.triton.short_tiles import short_tile, short_tiles
from attn_backends.backends.triton.tuning import TritonOptions
from attn_backends.backends.triton.upcasting import (
    UpcastRows,
    is_faster_upcast,
    rows_in_turn,
    upcast_sections,
    upcast_splits,
)
from attn_backends.backends.triton.workspace import DECODE_TOKENS
from attn_backends.batch.common import CommonAttentionMetadata
from attn_backends.batch.order import SwappableRows, reorder_batch_to_split_decodes_and_prefills
from attn_backends.interface import AttentionMetadata, AttentionMetadataBuilder
from attn_backends.kernels.launch import num_multiprocessors
from attn_backends.kernels.prefill.faster_tile import faster_hopper_tile
from attn_backends.kernels.prefill.launch import suits_hopper_kernel
from attn_backends.kernels.prefill.split_tiles import hopper_tile
from attn_backends.kernels.prefill.splits import PrefillSplits
from attn_backends.kernels.prefill.tiles import HopperTile, ShortTile
from attn_backends.spec import AttentionType, KVCacheSpec, Limits, PlanGroup

_MANY_TOKENS = 4  # of decodes in the mean, from which on they are as prompts are


@dataclass(frozen=True)
class TritonMetadata(AttentionMetadata):
    """One step's tensors, all on the device, and what launches need to know of them."""

    num_rows: int  # R, padding included
    num_decode_rows: int  # those in front that the decode kernel serves: if it serves all, padding too
    num_decode_row_tokens: int  # their query tokens
    max_decode_len: int  # most query tokens of a decode row; if `is_mixed` of any row that the decode kernel serves
    max_seq_len: int  # or an upper bound of it
    num_upcast_keys: int  # to make 16 bits for rows behind the decodes, or an upper bound; 0: none, which is faster
    upcast_rows: tuple[UpcastRows, ...]  # those rows in turn, where there is no room for all of their keys
    prefill_share: float | None  # of the GPU, for rows behind decodes that run beside them; None: none do
    decode_sms: int | None  # multiprocessors that these leave free, for as many of which decodes are cut; None: for all
    prefill_splits: PrefillSplits | None  # of the keys of rows behind the decodes; None: they are whole, rows as given
    short_tile: ShortTile | None  # of the portable kernel, where it serves rows that see few keys, and no decodes
    hopper_tile: HopperTile | None  # of the kernel for Hopper, where it serves with another than the usual one
    prefills_are_prompts: bool  # the step brings all keys that rows behind the decodes see: they are read as they come
    query_start_loc: torch.Tensor  # [R + 1] i32
    seq_lens: torch.Tensor  # [R] i32; 0 for padding
    page_table: torch.Tensor | None  # [R, max_pages] i32; None: keys are this step's own
    key_start_loc: torch.Tensor  # [R + 1] i32, which of them are whose

    def decode_fields(self) -> dict[str, Any]:
        rows = self.num_decodes
        return {
            "num_rows": rows,
            "num_decode_rows": min(rows, self.num_decode_rows),
            "num_decode_row_tokens": min(self.num_decode_tokens, self.num_decode_row_tokens),
            "num_upcast_keys": 0,
            "upcast_rows": (),
            "prefill_share": None,
            "decode_sms": None,
            "prefill_splits": self.prefill_splits if self.is_mixed else None,  # where all rows count as decodes
            "query_start_loc": self.query_start_loc[: rows + 1],
            "key_start_loc": self.key_start_loc[: rows + 1],
            "seq_lens": self.seq_lens[:rows],
            "page_table": None if self.page_table is None else self.page_table[:rows],
        }

    def prefill_fields(self) -> dict[str, Any]:
        first, last = self.num_decodes, self.num_decodes + self.num_prefills  # without padding
        return {
            "num_rows": self.num_prefills,
            "num_decode_rows": 0,
            "num_decode_row_tokens": 0,
            "num_upcast_keys": 0 if self.upcast_rows else self.num_upcast_keys,  # numbers of rows are this step's
            "upcast_rows": (),
            "prefill_share": None,
            "decode_sms": None,
            "query_start_loc": self.query_start_loc[first : last + 1] - self.num_decode_tokens,
            "key_start_loc": self.key_start_loc[first : last + 1] - self.num_decode_new_kv,
            "seq_lens": self.seq_lens[first:last],
            "page_table": None if self.page_table is None else self.page_table[first:last],
        }


class TritonMetadataBuilder(AttentionMetadataBuilder[TritonMetadata]):
    """Names tensors that the batch has already, and makes none. Lengths on the host may be upper bounds."""

    decode_threshold = DECODE_TOKENS  # at most: a builder has what its layers' kernels take

    def __init__(
        self, group: PlanGroup[Any], cache: KVCacheSpec, limits: Limits, device: torch.device | str, *,
        options: TritonOptions | None = None,
    ) -> None:  # fmt: skip
        super().__init__(group, cache, limits, device, options=options)
        self.decode_threshold = decode_tokens(group.spec, cache, options, self.device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> TritonMetadata:
        common = common_attn_metadata
        self.check_batch(common)
        attention_type = self.group.spec.attention_type
        use_cache = not common.is_profile_run and attention_type is not AttentionType.ENCODER
        key_start_loc = common.query_start_loc
        if not use_cache and attention_type is AttentionType.CROSS:  # only there keys are not the queries' own
            key_start_loc = common.new_kv_start_loc_cpu.to(self.device, non_blocking=True)
        launches = self._launches(common, use_cache)
        num_decodes, num_decode_rows, prefill = launches.num_decodes, launches.num_decode_rows, launches.prefill
        own: dict[str, Any] = {
            "num_rows": common.num_reqs,
            "num_decode_rows": num_decode_rows,
            "num_decode_row_tokens": int(common.query_start_loc_cpu[num_decode_rows]),
            "max_decode_len": launches.max_decode_len,
            "max_seq_len": common.max_seq_len,
            **prefill,
            "query_start_loc": common.query_start_loc,
            "seq_lens": common.seq_lens,
            "page_table": common.page_table if use_cache else None,
            "key_start_loc": key_start_loc,
            "planned_for": self.group.spec,
        }
        if common.for_graph:
            if not self.can_run_in_cudagraph(common):
                raise ValueError(
                    f"graphs of TRITON serve attention over cached keys, of up to {DECODE_TOKENS} query tokens a row "
                    "but in those of mixed batches: run this batch eager"
                )
            given = self.group.index, common.slot_mapping, common.num_reqs, common.num_tokens
            return TritonMetadata.of_graph(*given, is_mixed=common.is_mixed, **own)
        all_decode = num_decodes == common.num_actual_reqs
        tokens = common.num_actual_tokens if all_decode else int(common.query_start_loc_cpu[num_decodes])
        return TritonMetadata.of_batch(common, self.group.index, num_decodes, num_decode_tokens=tokens, **own)

    def _launches(self, common: CommonAttentionMetadata, use_cache: bool) -> Launches:
        if common.is_mixed:
            return mixed_launches(self.group.spec, self.cache, self.options, self.device, common.num_tokens)
        num_decodes, num_decode_rows, max_decode_len = self._decodes(common) if use_cache else (0, 0, 0)
        if num_decode_rows >= common.num_actual_reqs:
            return Launches(num_decodes, num_decode_rows, max_decode_len, NO_PREFILL)
        lens = Lens.of(common)
        bounds = lens.longest(self.limits.max_model_len) if common.for_graph else lens
        num_upcast_keys, upcast_rows = self._keys_to_upcast(common, lens, num_decode_rows) if use_cache else (0, ())
        tile = None if num_upcast_keys else self._short_tile(common, bounds, num_decode_rows, use_cache)
        if tile is not None:
            num_decode_rows = max_decode_len = 0
        are_prompts = use_cache and not common.for_graph and self._are_prompts(common, num_decode_rows)
        is_paged = use_cache and not are_prompts
        is_upcast, splits, other_tile = num_upcast_keys > 0, None, None
        if tile is None and not upcast_rows:
            alone = self._plan(common, lens, bounds, num_decode_rows, is_paged, is_upcast)
            if not is_upcast and self._can_take_decodes_along(common, num_decode_rows, alone):
                together = split_plan(self.group.spec, *lens, self.device)
                if are_faster_together(self.group.spec, alone, together, *lens, num_decode_rows, self.device):
                    num_decode_rows = max_decode_len = 0
                    are_prompts, alone = False, together
            other_tile, splits = alone.tile, alone.splits
        share = None if tile or (splits and splits.target) else self._prefill_share(lens, num_decode_rows)
        cut_for = None
        if share is not None and not (is_upcast or common.for_graph):
            cut_for = self._decode_sms(lens, num_decode_rows, other_tile, share, is_paged)
        prefill = {
            "num_upcast_keys": num_upcast_keys,
            "upcast_rows": upcast_rows,
            "prefill_share": share,
            "decode_sms": cut_for,
            "prefill_splits": splits,
            "short_tile": tile,
            "hopper_tile": other_tile,
            "prefills_are_prompts": are_prompts,
        }
        return Launches(num_decodes, num_decode_rows, max_decode_len, prefill)

    def reorder_batch(self, batch: SwappableRows, query_lens: Sequence[int]) -> bool:
        """Decodes first: their keys are split."""
        return reorder_batch_to_split_decodes_and_prefills(batch, query_lens, self.decode_threshold)

    def can_run_in_cudagraph(self, common_attn_metadata: CommonAttentionMetadata) -> bool:
        """Attention over cached keys, of rows of any lengths or of equal ones whose keys can be split."""
        common = common_attn_metadata
        return self.reads_cached_keys(common) and (common.is_mixed or common.max_query_len <= DECODE_TOKENS)

    @cached_property
    def _upcast_bytes(self) -> int:
        """Room for keys that are made 16 bits; 0 where none may be."""
        options = self.options or TritonOptions()
        return options.upcast_bytes if can_upcast(self.group.spec, options, self.device) else 0

    def _keys_to_upcast(
        self, common: CommonAttentionMetadata, lens: Lens, first: int
    ) -> tuple[int, tuple[UpcastRows, ...]]:
        """All keys of rows from `first` on, if that saves time, and rows in turn where they do not fit; else 0, as in
        graphs, which have no room for them."""
        if common.for_graph or not self._upcast_bytes:
            return 0, ()
        query_lens, seq_lens = lens.rows_from(first)
        spec, room = self.group.spec, self._upcast_bytes
        sections = upcast_sections(spec, seq_lens, room)
        if not is_faster_upcast(spec, self.cache, query_lens, seq_lens, sections, self.device):
            return 0, ()
        tile = split_tile(spec, self.cache, self.options, self.device, is_paged=True, is_upcast=True)
        return int(seq_lens.sum()), rows_in_turn(spec, tile, query_lens, seq_lens, sections, first, room, self.device)

    @cached_property
    def _can_run_beside(self) -> bool:
        """Whether decodes can run beside prefills: those by the kernel for Hopper let them."""
        return suits_hopper_kernel(self.group.spec, self.device)

    @cached_property
    def _reads_pages_on_hopper(self) -> bool:
        return reads_pages_on_hopper(self.group.spec, self.cache, self.options, self.device)

    def _can_take_decodes_along(self, common: CommonAttentionMetadata, num_decodes: int, alone: TilePlan) -> bool:
        """Whether the kernel for Hopper, which serves prefills, can serve decodes too: where it splits the former, or
        where these are few."""
        has_other = self.options is not None and self.options.prompt_tile is not None
        if common.for_graph or has_other or not (num_decodes and self._reads_pages_on_hopper):
            return False
        is_split = alone.splits is not None and alone.splits.is_of_all
        return is_split or num_decodes * self.group.spec.num_kv_heads <= num_multiprocessors(self.device)

    def _prefill_share(self, lens: Lens, num_decodes: int) -> float | None:
        if not (num_decodes and self._can_run_beside):
            return None
        return prefill_share(self.group.spec, *lens, num_decodes)

    def _decode_sms(
        self, lens: Lens, num_decodes: int, tile: HopperTile | None, share: float, is_paged: bool
    ) -> int | None:  # fmt: skip
        spec = self.group.spec
        usual = split_tile(spec, self.cache, self.options, self.device, is_paged=is_paged, is_upcast=False)
        if not usual.beside:  # the portable kernel lets none run beside it
            return None
        return decode_sms(spec, hopper_tile(spec, tile), *lens, num_decodes, share, self.device)

    def _plan(
        self, common: CommonAttentionMetadata, lens: Lens, bounds: Lens, num_decodes: int, is_paged: bool,
        is_upcast: bool,
    ) -> TilePlan:  # fmt: skip
        for_graph = common.for_graph
        spec = self.group.spec if is_paged else of_fresh_keys(self.group.spec)
        tile = split_tile(spec, self.cache, self.options, self.device, is_paged=is_paged, is_upcast=is_upcast)
        if is_upcast:
            return TilePlan(None, upcast_splits(spec, tile, *bounds, num_decodes, self._upcast_bytes, self.device))
        has_others = not for_graph and tile.beside > 0
        other = faster_hopper_tile(spec, *lens.rows_from(num_decodes), self.device) if has_others else None
        return prefill_plan(spec, tile, other, *bounds, num_decodes, self.device, for_graph, is_paged)

    @cached_property
    def _short_tiles(self) -> tuple[ShortTile, ...]:
        return short_tiles(self.group.spec, self.cache, self.options, self.device)

    def _short_tile(
        self, common: CommonAttentionMetadata, bounds: Lens, num_decodes: int, use_cache: bool
    ) -> ShortTile | None:
        """The portable kernel's tile where it serves all rows."""
        if not self._short_tiles:
            return None
        has_decodes = int(common.query_start_loc_cpu[num_decodes]) < _MANY_TOKENS * num_decodes
        spec = self.group.spec if use_cache else of_fresh_keys(self.group.spec)
        return short_tile(spec, self._short_tiles, *bounds, self.device, has_decodes, common.for_graph)

    def _are_prompts(self, common: CommonAttentionMetadata, first: int) -> bool:
        """Whether rows from `first` on bring all of their keys, in the cache's dtype: pages have nothing to add."""
        spec, last = self.group.spec, common.num_actual_reqs
        if spec.attention_type is not AttentionType.DECODER or spec.cache_dtype is not spec.dtype:
            return False
        # Lengths on the host are never below those on the device.
        contexts = common.context_lens_cpu.numpy()[first:last]
        return common.num_new_kv == common.num_actual_tokens and not contexts.any()

    def _decodes(self, common: CommonAttentionMetadata) -> tuple[int, int, int]:
        """Rows that count as decodes, those that the decode kernel serves and what padding goes with them, and their
        longest query."""
        if common.max_query_len <= self.decode_threshold:
            return common.num_actual_reqs, common.num_reqs, common.max_query_len
        query_lens = common.query_lens_cpu.numpy()[: common.num_actual_reqs]
        is_longer = query_lens > self.decode_threshold
        count = int(is_longer.argmax()) if is_longer.any() else common.num_actual_reqs
        return count, count, int(query_lens[:count].max(initial=0))
