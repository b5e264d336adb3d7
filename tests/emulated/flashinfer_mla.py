"""FlashInfer 0.6.12's MLA wrapper played on a CPU: fa2 and fa3, with its plans, checks and traps.

    from tests.emulated import flashinfer
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(torch.empty(2**27, dtype=torch.uint8))

As with the real one, kernels read a batch's lengths and the starts of its rows from the int workspace, where the plan
has left them, and of the tensors that the wrapper was given the pages alone. The size of a cluster, which a launch has
baked in, must be that of the last plan: else all is NaN, where the real one leaves tiles out. Causal tiles that end
within a token lose that token's own key where the real ones do (`_without_own_key`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from tests.emulated.flashinfer_checks import check_shape, lse_for
from tests.emulated.flashinfer_kernel import EMPTY_LSE, Rows, Rules, attend, gather_pages, place
from tests.emulated.flashinfer_modules import FA2, FA3, HALF_DTYPES
from tests.emulated.flashinfer_schedule import NUM_SMS, WorkspaceAllocator
from tests.emulated.flashinfer_wrapper import INT_WORKSPACE_BYTES, pinned_like

TILE_ROWS, MAX_WORKS = 64, 16384
BLOCK_KEYS = 64
HEAD_DIMS = (512, 64)
_PER_WORK = ("q_indptr", "kv_indptr", "partial_indptr")
_PER_SM = ("merge_packed_offset_start", "merge_packed_offset_end", "merge_partial_packed_offset_start",
           "merge_partial_packed_offset_end", "merge_partial_stride")  # fmt: skip
_PER_WORK_TOO = ("q_len", "kv_len", "q_start", "kv_start", "kv_end", "work_indptr")


@dataclass(frozen=True)
class MLAModule:
    """What the real package compiles for one dtype."""

    dtype: torch.dtype

    def plan(
        self,
        float_workspace: torch.Tensor,
        int_workspace: torch.Tensor,
        pinned: torch.Tensor,
        qo_indptr: torch.Tensor,  # [batch_size + 1] i32
        kv_indptr: torch.Tensor,  # [batch_size + 1] i32, in pages; where a row ends is not read
        kv_lens: torch.Tensor,  # [batch_size] i32
        num_heads: int,
        head_dim_o: int,
        causal: bool,
    ) -> list[int]:
        """Schedule a batch: the 18 numbers of `MLAPlanInfo`, of which a graph bakes in all, and the batch size.

        Raises:
            RuntimeError: a workspace is too small; a tensor is not int32 on the host; `qo_indptr` decreases; there are
                more tiles than a schedule has room for, which the real one writes beyond.
        """
        batch_size = len(kv_lens)
        for name, tensor, length in (
            ("qo_indptr", qo_indptr, batch_size + 1), ("kv_indptr", kv_indptr, batch_size + 1),
            ("kv_len", kv_lens, batch_size),
        ):  # fmt: skip
            if tensor.dtype is not torch.int32 or tensor.device.type != "cpu" or not tensor.is_contiguous():
                raise RuntimeError(f"{name} should be torch.int32 in a row on the host, got {tensor.dtype}")
            if len(tensor) < length:
                raise RuntimeError(f"{name} should have {length} numbers, got {len(tensor)}")
        packed = [(stop - start) * num_heads for start, stop in pairwise(qo_indptr.tolist())]
        if min(packed) < 0:
            raise RuntimeError("qo_indptr should be non-decreasing")
        cluster = 2 if sum(packed) // batch_size > TILE_ROWS else 1
        num_works = sum(-(-n // (cluster * TILE_ROWS)) for n in packed) + NUM_SMS // cluster
        if num_works > MAX_WORKS:
            raise RuntimeError(f"{num_works} tiles and splits are more than the {MAX_WORKS} of a schedule")
        info = self._allocate(float_workspace, int_workspace, cluster, head_dim_o)
        numbers = pinned.view(torch.uint8)[: 4 * (3 * batch_size + 2)].view(torch.int32)
        for part, values in zip(planned(numbers, batch_size), (kv_lens, kv_indptr, qo_indptr), strict=False):
            part.copy_(values[: len(part)])
        numbers[-1] = cluster
        int_workspace.view(torch.uint8)[: numbers.numel() * 4].view(torch.int32).copy_(numbers, non_blocking=True)
        return [*info, batch_size]

    def _allocate(self, floats: torch.Tensor, ints: torch.Tensor, cluster: int, head_dim_o: int) -> list[int]:
        int_room = WorkspaceAllocator(ints.numel() * ints.element_size())
        float_room = WorkspaceAllocator(floats.numel() * floats.element_size())
        sizes = [(name, MAX_WORKS) for name in _PER_WORK] + [(name, NUM_SMS) for name in _PER_SM]
        sizes += [(name, MAX_WORKS) for name in _PER_WORK_TOO]
        offsets = [int_room.take(4 * count, f"mla_{name}") for name, count in sizes]
        rows = 2 * (NUM_SMS // cluster) * cluster * TILE_ROWS
        partial_o = float_room.take(rows * 2 * head_dim_o, "mla_partial_o")
        return [cluster, NUM_SMS // cluster, *offsets, partial_o, float_room.take(rows * 4, "mla_partial_lse")]

    def run(
        self,
        float_workspace: torch.Tensor,
        int_workspace: torch.Tensor,
        plan_info: list[int],
        q_nope: torch.Tensor,  # [num_tokens, num_heads, 512], any strides
        q_pe: torch.Tensor,  # [num_tokens, num_heads, 64]
        ckv_cache: torch.Tensor,  # [num_pages, page_size, 512], any strides
        kpe_cache: torch.Tensor,  # [num_pages, page_size, 64]
        kv_indices: torch.Tensor,  # [num_indices] i32
        out: torch.Tensor,
        lse: torch.Tensor | None,
        causal: bool,
        num_heads: int,
        page_size: int,
        scale: float,
    ) -> None:
        """Fill `out` and `lse`: zeros and -inf for a token that sees no key.

        Raises:
            RuntimeError: other widths, heads or dtypes than planned; the real one reads what is there as if it were so.
        """
        for name, tensor in (("q_nope", q_nope), ("q_pe", q_pe), ("ckv", ckv_cache), ("kpe", kpe_cache)):
            if tensor.dtype is not self.dtype or tensor.stride(-1) != 1:
                raise RuntimeError(f"{name} should be {self.dtype} with its last dimension contiguous")
        if (q_nope.shape[1], q_pe.shape[1]) != (num_heads, num_heads):
            raise RuntimeError(f"q_nope and q_pe should have {num_heads} heads")
        dims = (q_nope.shape[2], q_pe.shape[2])
        if dims != HEAD_DIMS or (ckv_cache.shape[2], kpe_cache.shape[2]) != HEAD_DIMS:
            raise RuntimeError(f"head dims {dims} are not {HEAD_DIMS}")
        if kv_indices.dtype is not torch.int32:
            raise RuntimeError(f"kv_indices should be torch.int32, got {kv_indices.dtype}")
        batch_size = plan_info[-1]
        numbers = int_workspace.view(torch.uint8)[: 4 * (3 * batch_size + 2)].view(torch.int32)
        kv_lens, kv_starts, qo_indptr = planned(numbers, batch_size)
        lens, starts = kv_lens.long(), kv_starts.long()
        ends = torch.cat([starts, starts.new_full((1,), len(kv_indices))])
        rows = Rows(qo_indptr.long(), ends * page_size, lens, lens, (qo_indptr[1:] - qo_indptr[:-1]).long())
        ckv, kpe = (gather_pages(part[:, :, None], kv_indices, ends, lens) for part in (ckv_cache, kpe_cache))
        query, keys = torch.cat([q_nope, q_pe], -1), torch.cat([ckv, kpe], -1)
        rules = Rules(scale, causal, -1, 0.0, "products")
        made, sums, _ = attend(query, keys, ckv, rows, rules)
        tile = plan_info[0] * TILE_ROWS
        if causal and tile % num_heads:
            lost = _without_own_key(len(query), num_heads, tile, rows)
            others, other_sums, _ = attend(query, keys, ckv, rows, replace(rules, hidden=1))
            made, sums = torch.where(lost[..., None], others, made), torch.where(lost, other_sums, sums)
        fits = numbers[-1] == plan_info[0]
        out.copy_(torch.where(fits, made, math.nan))
        if lse is not None:
            lse.copy_(torch.where(fits, sums.masked_fill(sums == EMPTY_LSE, -math.inf), math.nan))


def _without_own_key(num_tokens: int, num_heads: int, tile: int, rows: Rows) -> torch.Tensor:
    """[num_tokens, num_heads] bool: heads in a tile, but a row's last, that ends within their token, where the keys in
    front of the token's own are whole blocks."""
    row, index, _ = place(num_tokens, rows.qo_indptr, rows.planned_qo_lens)
    lens = rows.planned_qo_lens[row][:, None]
    packed = index[:, None] * num_heads + torch.arange(num_heads, device=index.device)
    end = (packed // tile + 1) * tile  # of the tile
    counted = rows.kv_lens[row][:, None] - lens + end // num_heads
    return (end < lens * num_heads) & (end // num_heads == index[:, None]) & (counted % BLOCK_KEYS == 0)


def planned(numbers: torch.Tensor, batch_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """kv_lens [batch_size], starts of pages [batch_size], qo_indptr [batch_size + 1], as a plan leaves them: i32."""
    return numbers[:batch_size], numbers[batch_size : 2 * batch_size], numbers[2 * batch_size : -1]


class BatchMLAPagedAttentionWrapper:
    """As the real one, but for backend="cutlass" and profiling."""

    _cached_module: MLAModule  # set by plan alone: a run before it fails as the real one does
    _plan_info: list[int]
    _kv_indices_buf: Any

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        kv_len_arr: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        if backend not in ("auto", FA2, FA3):
            raise NotImplementedError(f"the emulation has the backends auto, fa2 and fa3, not {backend!r}")
        self._float_workspace_buffer = float_workspace_buffer
        self.device = float_workspace_buffer.device
        self._int_workspace_buffer = torch.empty(INT_WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)
        self._pin_memory_int_workspace_buffer: Any = pinned_like(self._int_workspace_buffer)
        self._use_cuda_graph = use_cuda_graph
        self._buffers: tuple[Any, ...] = (qo_indptr, kv_indptr, kv_len_arr)
        self._kv_indices_buf = kv_indices
        self._backend = FA3 if backend == "auto" else backend

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        """Compile, bring what is on the host to the device, and schedule."""
        if (head_dim_ckv, head_dim_kpe) != HEAD_DIMS or q_data_type not in HALF_DTYPES:
            raise RuntimeError(f"no kernel compiles for {head_dim_ckv} + {head_dim_kpe} of {q_data_type}")
        if kv_data_type is not q_data_type:
            raise RuntimeError(f"no kernel compiles for {q_data_type} over {kv_data_type}")
        self._cached_module = MLAModule(q_data_type)
        host = qo_indptr.to("cpu"), kv_indptr.to("cpu"), kv_len_arr.to("cpu")
        if self._use_cuda_graph:
            for buffer, given in zip(self._buffers, (qo_indptr, kv_indptr, kv_len_arr), strict=True):
                buffer.copy_(given, non_blocking=True)
            self._kv_indices_buf[: len(kv_indices)].copy_(kv_indices, non_blocking=True)
        else:
            self._kv_indices_buf = kv_indices.to(self.device, non_blocking=True)
        self._causal = causal
        self._page_size = page_size
        self._sm_scale = sm_scale
        self._plan_info = self._cached_module.plan(
            self._float_workspace_buffer, self._int_workspace_buffer, self._pin_memory_int_workspace_buffer, *host,
            num_heads, head_dim_ckv, causal,
        )  # fmt: skip

    def run(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        ckv_cache: torch.Tensor,
        kpe_cache: torch.Tensor,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attend. The LSE is base 2."""
        if out is None:
            out = torch.empty_like(q_nope)
        else:
            check_shape(out, tuple(q_nope.shape), q_nope.dtype, q_nope, "out")
        lse = lse_for(q_nope, lse, return_lse)
        self._cached_module.run(
            self._float_workspace_buffer, self._int_workspace_buffer, self._plan_info, q_nope, q_pe, ckv_cache,
            kpe_cache, self._kv_indices_buf, out, lse, self._causal, q_nope.shape[1], self._page_size, self._sm_scale,
        )  # fmt: skip
        return (out, lse) if return_lse and lse is not None else out
