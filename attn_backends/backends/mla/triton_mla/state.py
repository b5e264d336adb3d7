"""What outlives a step of TRITON_MLA: how decode's work is cut, and where the parts of split rows meet."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch

from attn_backends.backends.mla.impl import LatentTensors
from attn_backends.backends.mla.metadata import DecodeRows, MLAMetadataBuilder
from attn_backends.backends.mla.state import MLAState
from attn_backends.backends.mla.triton_mla.impl import TritonMLAImpl
from attn_backends.backends.mla.triton_mla.launch import Split, Workspace, launch_decode, suits_hopper_kernel
from attn_backends.backends.mla.triton_mla.tuning import SplitPlan, decode_tile, decode_tiles
from attn_backends.kernels.cut_list import CutList, SplitSizes
from attn_backends.kernels.examples import empty
from attn_backends.kernels.launch import machine_of, num_multiprocessors, power_of_two, shared_memory
from attn_backends.kernels.split_kv import FAR
from attn_backends.kernels.variants import Variant, listing
from attn_backends.spec import MLASpec

_SPLITS = 128  # of eager steps that are kept, of tens of kilobytes each
_WIDTH = 2  # pages of a row: no kernel is compiled for it


class TritonMLAState(MLAState):
    """A workspace for the parts of split rows, sized by the multiprocessors and not by the context; one for all layers,
    which run one after the other.
    """

    backend_name = "TRITON_MLA"
    starts_early = TritonMLAImpl.starts_early

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._num_sms = num_multiprocessors(self.device)
        self._shared_memory = shared_memory(self.device)
        self._split = lru_cache(maxsize=_SPLITS)(self._make_split)  # eager steps repeat their shapes
        # Room for every launch within the limits: the need peaks between the ends of rows' numbers and query lengths.
        most_rows = self.limits.max_num_requests
        longest = min(MLAMetadataBuilder.decode_threshold, self.limits.max_num_tokens)
        needs = [
            SplitPlan(tile, most_rows, query_len * spec.num_qo_heads, self._num_sms).need(spec)
            for spec in self.specs.values()
            for query_len in range(1, longest + 1)
            for tile in decode_tiles(*self._asked(spec, most_rows, query_len))
        ]
        sizes = (max(sizes) for sizes in zip(*needs, strict=True))
        self.split_workspace = Workspace(
            *(torch.empty(size, dtype=torch.float32, device=self.device) for size in sizes)
        )

    def plan_decode(self, spec: MLASpec, rows: DecodeRows, held: Split | None) -> Split:
        if held is None:  # a graph's tensors are its own
            shape = spec, rows.num_rows, rows.query_len
            held = self._make_split(*shape) if rows.idle is not None else self._split(*shape).anew()
        held.work_list.fill(rows.seq_lens, held.query_starts)
        return held

    def variants(self) -> list[Variant]:
        """The compiled forms of kernels of ours that steps within the limits ask for."""
        with listing(machine_of(self.device)) as found:
            self.list_launches()
        return list(found.variants.values())

    def list_launches(self) -> None:
        super().list_launches()
        for spec in self.specs.values():
            for query_len, plan in self._plans(spec):
                for want_lse in (False, True):
                    self._list_decode(spec, plan, query_len, want_lse)

    def _plans(self, spec: MLASpec) -> Iterator[tuple[int, SplitPlan]]:
        """Query tokens of a row and cuts: of all that kernels are compiled alike for, one."""
        found: dict[tuple[object, ...], tuple[int, SplitPlan]] = {}
        for query_len in range(1, min(MLAMetadataBuilder.decode_threshold, self.limits.max_num_tokens) + 1):
            for num_rows in range(1, self.limits.max_num_requests + 1):
                plan = self._make_plan(spec, num_rows, query_len)
                found.setdefault((query_len, plan.tile, plan.tile_rows, power_of_two(num_rows)), (query_len, plan))
        yield from found.values()

    def _list_decode(self, spec: MLASpec, plan: SplitPlan, query_len: int, want_lse: bool) -> None:
        query = empty(plan.num_rows, query_len, spec.num_qo_heads, spec.latent_dim, dtype=spec.dtype)
        latents = empty(2, self.cache.page_size, spec.latent_dim, dtype=spec.cache_dtype)
        floats, starts = empty(0, dtype=torch.float32), empty(plan.num_rows + 1, dtype=torch.int32)
        counters = empty(0, dtype=torch.int32)
        split = Split(plan, starts, _work_list(plan, query_len, counters), Workspace(floats, floats))
        split.work_list.fill(empty(plan.num_rows, dtype=torch.int32), split.query_starts)
        lse = empty(plan.num_rows, query_len, spec.num_qo_heads, dtype=torch.float32) if want_lse else None
        table = empty(plan.num_rows, _WIDTH, dtype=torch.int32)
        launch_decode(spec, 1.0, LatentTensors(query, latents, query[..., : spec.kv_lora_rank], lse), table, split)

    def _make_split(self, spec: MLASpec, num_rows: int, query_len: int) -> Split:
        plan = self._make_plan(spec, num_rows, query_len)
        self.split_workspace.check(plan, spec)
        starts = torch.arange(num_rows + 1, dtype=torch.int32, device=self.device) * query_len
        return Split(plan, starts, _work_list(plan, query_len, starts.new_empty(0)), self.split_workspace)

    def _make_plan(self, spec: MLASpec, num_rows: int, query_len: int) -> SplitPlan:
        asked = self._asked(spec, num_rows, query_len)
        return SplitPlan(decode_tile(*asked), num_rows, query_len * spec.num_qo_heads, self._num_sms)

    def _asked(self, spec: MLASpec, num_rows: int, query_len: int) -> tuple[Any, ...]:
        """What decides a tile."""
        hopper = suits_hopper_kernel(spec, self.cache, self.device)
        queries = query_len * spec.num_qo_heads
        return spec, self.cache, num_rows, queries, self.options, self._shared_memory, hopper


def _work_list(plan: SplitPlan, query_len: int, counters: torch.Tensor) -> CutList:
    """The list of a batch's work; `counters` [0] i32: nothing is counted."""
    min_blocks = max(1, plan.tile.min_keys // plan.tile.keys)
    sizes = SplitSizes(plan.num_rows, plan.target, FAR.value, FAR.value, plan.tile.keys, min_blocks)
    return CutList(sizes, plan.filling, counters, query_len)
