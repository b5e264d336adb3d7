"""The emulated FlashInfer's compiled modules: one for each backend and set of constants, with `plan` and its runs.

A plan takes the positional arguments of the real one, writes what it decides into the pinned buffer, copies that to the
int workspace, and returns a list of ints. A run reads the plan from those two alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tests.emulated.flashinfer_kernel import Rows, Rules, attend, gather_pages
from tests.emulated.flashinfer_plan import plan_decode, plan_fa2, plan_fa3, planned_rows
from tests.emulated.flashinfer_work import PlanInfo, Planned, Reach, follow

DECODE, FA2, FA3 = "decode", "fa2", "fa3"
NUM_PLAN_ARGUMENTS = {DECODE: 15, FA2: 19, FA3: 16}
_PLANS: dict[str, Callable[..., list[int]]] = {DECODE: plan_decode, FA2: plan_fa2, FA3: plan_fa3}
HEAD_DIMS = {
    DECODE: {(64, 64), (128, 128), (256, 256), (512, 512)},
    FA2: {(64, 64), (128, 128), (256, 256), (192, 128)},
    FA3: {(64, 64), (128, 128), (256, 256), (192, 128)},
}
HALF_DTYPES = (torch.float16, torch.bfloat16)
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
_SPLIT = {DECODE: (9, 1, 2), FA2: (14, 10, 11)}  # where a plan info has split_kv, v_offset, s_offset; fa3 has none


@dataclass(frozen=True)
class AttentionModule:
    """What the real package compiles for one set of constants. Runs honour these, and nothing set later."""

    kind: str
    head_dim_qk: int
    head_dim_vo: int
    use_sliding_window: bool
    use_logits_soft_cap: bool
    pos_encoding_mode: str = "NONE"

    def plan(self, *args: object) -> list[int]:
        """Schedule a batch.

        Args:
            args: as the real module takes them: 15 for CUDA-core decode, 19 for fa2, 16 for fa3. Tensors of integers
                are int32, on the host.

        Returns:
            10, 15 or 9 ints, of which a graph bakes in all.

        Raises:
            TypeError: another number of arguments.
            RuntimeError: a workspace is too small; a tensor is not int32; a group size or indptr is not possible.
        """
        if len(args) != NUM_PLAN_ARGUMENTS[self.kind]:
            expected = NUM_PLAN_ARGUMENTS[self.kind]
            raise TypeError(f"Mismatched number of arguments when calling plan: expected {expected}, got {len(args)}")
        return _PLANS[self.kind](*args)

    def paged_run(
        self,
        float_workspace: torch.Tensor,
        int_workspace: torch.Tensor,
        plan_info: list[int],
        query: torch.Tensor,  # [num_tokens, num_qo_heads, head_dim_qk]
        key_cache: torch.Tensor,  # [num_pages, page_size, num_kv_heads, head_dim_qk], any strides
        value_cache: torch.Tensor,  # [num_pages, page_size, num_kv_heads, head_dim_vo], the strides of key_cache
        qo_indptr: torch.Tensor | None,  # [batch_size + 1] i32; None: one query a row
        indptr: torch.Tensor,  # [batch_size + 1] i32
        indices: torch.Tensor,  # [num_indices] i32
        last_page_len: torch.Tensor,  # [batch_size] i32
        out: torch.Tensor,
        lse: torch.Tensor | None,
        rules: Rules,
    ) -> None:
        """Fill `out` and `lse` for the tokens that the plan covers, and leave them elsewhere as they are."""
        if key_cache.stride() != value_cache.stride():
            raise RuntimeError(f"k/v strides differs: {key_cache.stride()} and {value_cache.stride()}")
        for name, buffer in (("indptr", indptr), ("indices", indices), ("last_page_len", last_page_len)):
            if buffer.dtype is not torch.int32:
                raise RuntimeError(f"paged_kv_{name} should be torch.int32, got {buffer.dtype}")
        page_size = key_cache.shape[1]
        starts = indptr.long()
        num_pages = starts[1:] - starts[:-1]
        kv_lens = ((num_pages - 1) * page_size + last_page_len).masked_fill(num_pages == 0, 0)
        queries = torch.arange(len(indptr), device=indptr.device) if qo_indptr is None else qo_indptr.long()
        rows = self._rows(int_workspace, plan_info, queries, starts * page_size, kv_lens)
        key, value = gather_pages(key_cache, indices, starts), gather_pages(value_cache, indices, starts)
        self._run(float_workspace, int_workspace, plan_info, query, key, value, rows, out, lse, rules)

    def ragged_run(
        self,
        float_workspace: torch.Tensor,
        int_workspace: torch.Tensor,
        plan_info: list[int],
        query: torch.Tensor,  # [num_tokens, num_qo_heads, head_dim_qk]
        key: torch.Tensor,  # [num_keys, num_kv_heads, head_dim_qk]
        value: torch.Tensor,  # [num_keys, num_kv_heads, head_dim_vo]
        qo_indptr: torch.Tensor,  # [batch_size + 1] i32
        kv_indptr: torch.Tensor,  # [batch_size + 1] i32
        out: torch.Tensor,
        lse: torch.Tensor | None,
        rules: Rules,
    ) -> None:
        """As `paged_run`, over keys that lie one after the other."""
        starts = kv_indptr.long()
        rows = self._rows(int_workspace, plan_info, qo_indptr.long(), starts, starts[1:] - starts[:-1])
        self._run(float_workspace, int_workspace, plan_info, query, key.float(), value.float(), rows, out, lse, rules)

    def _rows(
        self,
        int_workspace: torch.Tensor,
        plan_info: list[int],
        qo_indptr: torch.Tensor,
        key_indptr: torch.Tensor,
        kv_lens: torch.Tensor,
    ) -> Rows:
        if self.kind == FA2 and not isinstance(plan_info, Planned):  # of a work list alone, which others wrote
            return Rows(qo_indptr, key_indptr, kv_lens, kv_lens, qo_indptr[1:] - qo_indptr[:-1])
        planned_lens, planned_indptr = planned_rows(int_workspace, len(kv_lens))
        planned = planned_lens.long(), (planned_indptr[1:] - planned_indptr[:-1]).long()
        return Rows(qo_indptr, key_indptr, kv_lens, *planned)

    def _run(
        self,
        float_workspace: torch.Tensor,
        int_workspace: torch.Tensor,
        plan_info: list[int],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rows: Rows,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        rules: Rules,
    ) -> None:
        if (query.shape[2], key.shape[2], value.shape[2]) != (self.head_dim_qk, self.head_dim_qk, self.head_dim_vo):
            raise RuntimeError(
                f"head dims of q, k, v {query.shape[2], key.shape[2], value.shape[2]} are not those of the plan: "
                f"{self.head_dim_qk}, and {self.head_dim_vo} of v"
            )
        baked = Rules(
            rules.scale,
            rules.causal,
            rules.window_left if self.use_sliding_window else -1,
            rules.soft_cap if self.use_logits_soft_cap else 0.0,
            "logits" if self.kind == DECODE else "products",
            rules.rope if self.pos_encoding_mode == "ROPE_LLAMA" else None,
            rules.alibi if self.pos_encoding_mode == "ALIBI" else None,
        )
        reach: Reach | None = None
        if self.kind == FA2 and PlanInfo(*plan_info).graph:
            reach = follow(
                int_workspace, PlanInfo(*plan_info), rows, query, key.shape, self.head_dim_vo, baked.window_left
            )
        made, made_lse, covered = attend(query, key, value, rows, baked, None if reach is None else reach.keys)
        if reach is not None:  # what lies in the workspace where no tile has written may be anything
            covered = covered & reach.merged
            made = made.masked_fill(reach.broken[:, None, None], torch.nan)
            made_lse = made_lse.masked_fill(reach.broken[:, None], torch.nan)
        split, v_offset, s_offset = (plan_info[i] for i in _SPLIT[self.kind]) if self.kind in _SPLIT else (0, 0, 0)
        if split:  # partial results pass through the workspace
            made = _through(float_workspace, v_offset, made)
            made_lse = _through(float_workspace, s_offset, made_lse)
        out.copy_(torch.where(covered[:, None, None], made.to(out.dtype), out))
        if lse is not None:
            lse.copy_(torch.where(covered[:, None], made_lse, lse))


@functools.cache
def compiled(
    kind: str,
    q_dtype: torch.dtype,
    kv_dtype: torch.dtype,
    o_dtype: torch.dtype,
    head_dim_qk: int,
    head_dim_vo: int,
    use_sliding_window: bool,
    use_logits_soft_cap: bool,
    pos_encoding_mode: str = "NONE",
) -> AttentionModule:
    """The module for these constants, the same one each time.

    Raises:
        RuntimeError: no kernel of the real package compiles for them.
    """
    if (head_dim_qk, head_dim_vo) not in HEAD_DIMS[kind]:
        raise RuntimeError(
            f"Unsupported head_dim: {head_dim_qk} of q and k, {head_dim_vo} of v; {kind} has {sorted(HEAD_DIMS[kind])}"
        )
    if q_dtype not in HALF_DTYPES or o_dtype not in HALF_DTYPES:
        raise RuntimeError(f"Unsupported data type: q {q_dtype}, o {o_dtype}; there are float16 and bfloat16")
    if kv_dtype is not q_dtype and (kind == FA3 or kv_dtype not in FP8_DTYPES):
        raise RuntimeError(f"Unsupported data type: kv {kv_dtype} with q {q_dtype} in {kind}")
    if pos_encoding_mode not in ("NONE", "ROPE_LLAMA", "ALIBI"):
        raise KeyError(f"Invalid pos_encoding_mode {pos_encoding_mode}")
    rotates_fp8 = kind == FA2 and pos_encoding_mode == "ROPE_LLAMA" and kv_dtype in FP8_DTYPES
    if rotates_fp8 or (kind == FA3 and pos_encoding_mode != "NONE"):
        raise RuntimeError(f"Invalid configuration: {pos_encoding_mode} over {kv_dtype} in {kind}")  # IsInvalid()
    if pos_encoding_mode == "ALIBI" and use_logits_soft_cap:
        raise NotImplementedError("ALIBI with a soft cap, which the real one scales twice, is not emulated")
    return AttentionModule(kind, head_dim_qk, head_dim_vo, use_sliding_window, use_logits_soft_cap, pos_encoding_mode)


def _through(float_workspace: torch.Tensor, offset: int, values: torch.Tensor) -> torch.Tensor:
    """Values as they read back from a place in the workspace."""
    stop = offset + values.numel() * values.element_size()
    place = float_workspace.view(torch.uint8)[offset:stop].view(values.dtype).view(values.shape)
    return place.copy_(values)
