"""The emulated FlashInfer's plans, as functions of the positional arguments that the real modules take.

A plan leaves what `run` needs at the start of the pinned buffer, and copies that to the int workspace: as int32,
`kv_lens [batch_size]` and `qo_indptr [batch_size + 1]`, the keys and queries that it knows of. Real plans leave work
lists; so does fa2 in graphs here.
"""

from __future__ import annotations

import torch

from tests.emulated.flashinfer_schedule import (
    WorkspaceAllocator,
    decode_schedule,
    fa2_schedule,
    fa2_tiles,
    fa3_schedule,
    planned_rows_size,
)
from tests.emulated.flashinfer_work import PlanInfo, Planned, work_list, write_work

# `DISPATCH_GQA_GROUP_SIZE` of the real `utils.cuh`, which tensor-core kernels do not go through.
GROUP_SIZES = (1, 2, 3, 4, 8)


def plan_decode(
    float_workspace: torch.Tensor,
    int_workspace: torch.Tensor,
    pinned: torch.Tensor,
    indptr: torch.Tensor,  # [batch_size + 1] i32
    batch_size: int,
    num_qo_heads: int,
    num_kv_heads: int,
    page_size: int,
    graph: bool,
    window_left: int,
    logits_soft_cap: float,
    head_dim_qk: int,
    head_dim_vo: int,
    empty_q: torch.Tensor,
    empty_kv: torch.Tensor,
) -> list[int]:
    """CUDA-core decode. It is not told how full the last pages are, so it covers all of them."""
    if head_dim_qk != head_dim_vo:
        raise RuntimeError(
            "CUDA cores template only supports equal head dim for QK and VO, please use tensor cores template for "
            "different head dim"
        )
    if num_qo_heads // num_kv_heads not in GROUP_SIZES:
        raise RuntimeError(f"Unsupported group_size: {num_qo_heads // num_kv_heads}")
    starts = _host_ints(indptr, "indptr", batch_size + 1)
    info = decode_schedule(
        starts.tolist(),
        num_qo_heads,
        num_kv_heads,
        page_size,
        head_dim_vo,
        graph,
        _allocator(float_workspace),
        _allocator(int_workspace),
    )
    kv_lens, qo_indptr = planned_rows(pinned, batch_size)
    torch.sub(starts[1:], starts[:-1], out=kv_lens).mul_(page_size)
    torch.arange(batch_size + 1, out=qo_indptr, device="cpu")
    _copy_plan(int_workspace, pinned, batch_size)
    return info


def plan_fa2(
    float_workspace: torch.Tensor,
    int_workspace: torch.Tensor,
    pinned: torch.Tensor,
    qo_indptr: torch.Tensor,  # [batch_size + 1] i32
    kv_indptr: torch.Tensor,  # [batch_size + 1] i32, in pages
    kv_lens: torch.Tensor,  # [batch_size] i32
    total_num_rows: int,
    batch_size: int,
    num_qo_heads: int,
    num_kv_heads: int,
    page_size: int,
    graph: bool,
    head_dim_qk: int,
    head_dim_vo: int,
    causal: bool,
    window_left: int,
    fixed_split_size: int,
    disable_split_kv: bool,
    num_colocated_ctas: int,
) -> list[int]:
    """fa2. The real one covers whole pages and chunks of them; this one no key beyond `kv_lens`."""
    _check_heads(num_qo_heads, num_kv_heads)
    queries = _host_ints(qo_indptr, "qo_indptr", batch_size + 1)
    rows = (
        queries.tolist(),
        _host_ints(kv_indptr, "kv_indptr", batch_size + 1).tolist(),
        total_num_rows,
        num_qo_heads,
        num_kv_heads,
        page_size,
        head_dim_vo,
        graph,
        window_left,
        fixed_split_size,
        disable_split_kv,
    )
    info = Planned(fa2_schedule(*rows, _allocator(float_workspace), _allocator(int_workspace)))
    lens = _host_ints(kv_lens, "kv_len_arr", batch_size)
    if graph:
        where = PlanInfo(*info)
        write_work(pinned, where, work_list(rows[0], fa2_tiles(*rows)), page_size)
        copied = slice(where.requests_at, where.stop)
        int_workspace.view(torch.uint8)[copied].copy_(pinned.view(torch.uint8)[copied], non_blocking=True)
    _leave(int_workspace, pinned, lens, queries)
    return info


def plan_fa3(
    float_workspace: torch.Tensor,
    int_workspace: torch.Tensor,
    pinned: torch.Tensor,
    qo_indptr: torch.Tensor,  # [batch_size + 1] i32
    kv_indptr: torch.Tensor,  # [batch_size + 1] i32, in pages
    kv_lens: torch.Tensor,  # [batch_size] i32
    total_num_rows: int,
    batch_size: int,
    num_qo_heads: int,
    num_kv_heads: int,
    page_size: int,
    graph: bool,
    head_dim_qk: int,
    head_dim_vo: int,
    causal: bool,
    window_left: int,
) -> list[int]:
    """fa3, which uses no float workspace."""
    _check_heads(num_qo_heads, num_kv_heads)
    _host_ints(kv_indptr, "kv_indptr", batch_size + 1)
    queries = _host_ints(qo_indptr, "qo_indptr", batch_size + 1)
    lens = _host_ints(kv_lens, "kv_len_arr", batch_size)
    ints = _allocator(int_workspace)
    info = fa3_schedule(queries.tolist(), total_num_rows, num_qo_heads, head_dim_vo, graph, ints)
    _leave(int_workspace, pinned, lens, queries)
    return info


def planned_rows(workspace: torch.Tensor, batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """kv_lens [batch_size] i32 and qo_indptr [batch_size + 1] i32, as views of a workspace's start."""
    numbers = workspace.view(torch.uint8)[: planned_rows_size(batch_size)].view(torch.int32)
    return numbers[:batch_size], numbers[batch_size:]


def _leave(int_workspace: torch.Tensor, pinned: torch.Tensor, kv_lens: torch.Tensor, qo_indptr: torch.Tensor) -> None:
    for place, values in zip(planned_rows(pinned, len(kv_lens)), (kv_lens, qo_indptr), strict=True):
        place.copy_(values)
    _copy_plan(int_workspace, pinned, len(kv_lens))


def _copy_plan(int_workspace: torch.Tensor, pinned: torch.Tensor, batch_size: int) -> None:
    num_bytes = planned_rows_size(batch_size)
    int_workspace.view(torch.uint8)[:num_bytes].copy_(pinned.view(torch.uint8)[:num_bytes], non_blocking=True)


def _check_heads(num_qo_heads: int, num_kv_heads: int) -> None:
    if num_qo_heads % num_kv_heads:
        raise RuntimeError(f"num_qo_heads {num_qo_heads} should be divisible by num_kv_heads {num_kv_heads}")


def _host_ints(tensor: torch.Tensor, name: str, length: int) -> torch.Tensor:
    """Its first `length` numbers. The real plan reads them by address, whatever they are: here that is refused."""
    if tensor.dtype is not torch.int32:
        raise RuntimeError(f"{name} should be torch.int32, got {tensor.dtype}")
    if tensor.dim() != 1 or not tensor.is_contiguous() or len(tensor) < length or tensor.device.type != "cpu":
        raise RuntimeError(
            f"{name} should be {length} numbers in a row on the host, got {list(tensor.shape)} on {tensor.device}"
        )
    return tensor[:length]


def _allocator(workspace: torch.Tensor) -> WorkspaceAllocator:
    return WorkspaceAllocator(workspace.shape[0] * workspace.element_size())
