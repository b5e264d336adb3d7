"""Prefill by one launch for all rows, over expanded keys and values, which lie one row behind the other."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import torch

from attn_backends.backends.mla.metadata import ExpandedTensors, RaggedRows
from attn_backends.kernels.examples import distinct, empty, new_tokens
from attn_backends.kernels.launch import runs_kernels, shared_memory
from attn_backends.kernels.prefill.arguments import BlockDims
from attn_backends.kernels.prefill.faster_tile import faster_hopper_tile
from attn_backends.kernels.prefill.launch import PrefillKernels, Rows, suits_hopper_kernel
from attn_backends.kernels.prefill.tiles import tiles_of, varlen_tile
from attn_backends.kernels.tiles import block_dims
from attn_backends.spec import MLASpec

_WIDEST = {torch.float32: 128, torch.float16: 256, torch.bfloat16: 256}  # blocks that a program's registers hold


def suits_varlen_kernel(spec: MLASpec, device: torch.device) -> bool:
    """Whether our kernels serve a layer's expanded keys and values on a device."""
    widest = _WIDEST.get(spec.dtype, 0)
    return runs_kernels(device) and max(block_dims(spec)) <= widest


@dataclass(frozen=True)
class VarlenPlan:
    """Ragged rows as the kernels take them, and the layer's launches for them."""

    kernels: PrefillKernels
    rows: Rows
    tiles: torch.Tensor  # [2] i32, zeros between launches

    def attend(self, given: ExpandedTensors) -> None:
        """Attend for a layer."""
        self.kernels.attend(*given, self.rows, self.tiles, 0, False, None)


class VarlenPrefill:
    """The launches of layers with one spec: over the new tokens, where attention is causal, and over context."""

    def __init__(self, spec: MLASpec, device: torch.device) -> None:
        self.spec = spec
        self._kernels = {causal: _kernels(spec, causal, device) for causal in (True, False)}
        self._tiles = torch.zeros(2, dtype=torch.int32, device=device)  # where programs count what they take

    def clear(self) -> None:
        """What a launch that did not end has left."""
        self._tiles.zero_()

    def plan(self, rows: RaggedRows) -> VarlenPlan:
        """Nothing is read back from the device: lengths of keys are made there."""
        kernels = self._kernels[rows.causal]
        query_lens, key_lens = np.diff(rows.query_starts_cpu.numpy()), np.diff(rows.key_starts_cpu.numpy())
        given = Rows(
            page_table=None,
            seq_lens=rows.key_starts.diff(),
            query_start_loc=rows.query_starts,
            key_start_loc=rows.key_starts,
            first_row=0,
            num_tokens=int(rows.query_starts_cpu[-1]),
            num_upcast=0,
            max_seq_len=rows.max_key_len,
            hopper_tile=faster_hopper_tile(kernels.spec, query_lens, key_lens, rows.query_starts.device),
        )
        return VarlenPlan(kernels, given, self._tiles)

    def list_launches(self) -> None:
        """Launch, in a listing, what steps can: queries and outputs begin at any token of a step's."""
        spec, ints = self.spec, {"dtype": torch.int32}
        key = empty(2, spec.num_qo_heads, spec.head_dim, dtype=spec.dtype)
        expanded = empty(2, spec.num_qo_heads, spec.qk_nope_head_dim + spec.head_dim_vo, dtype=spec.dtype)
        output = empty(2, spec.num_qo_heads, spec.head_dim_vo, dtype=spec.dtype)
        tiles = (None, *tiles_of(spec)[1:])
        rows = [Rows(None, empty(1, **ints), empty(2, **ints), empty(2, **ints), 0, 1, 0, 1, hopper_tile=tile)
                for tile in tiles]  # fmt: skip
        queries = [part for new in new_tokens(spec) for part in (new.query, new.query[-1:])]
        alike = distinct((query,) for query in queries)
        for (query,), first, kernels, each in product(alike, (0, 1), self._kernels.values(), rows):
            plan = VarlenPlan(kernels, each, empty(2, **ints))
            plan.attend(ExpandedTensors(query, key, expanded[..., spec.qk_nope_head_dim :], output[first:], None))


def _kernels(spec: MLASpec, causal: bool, device: torch.device) -> PrefillKernels:
    expanded = replace(spec, causal=causal, cache_dtype=spec.dtype)  # whatever the latent rows are cached in
    dims = BlockDims(spec.head_dim, spec.head_dim_vo, *block_dims(expanded))
    tiles, by_hopper = varlen_tile(expanded, shared_memory(device)), suits_hopper_kernel(expanded, device)
    return PrefillKernels(expanded, dims, {False: tiles}, {False: by_hopper}, None, None, 1.0, 1.0, device)
