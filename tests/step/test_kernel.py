"""The fused kernel against the plain compiler: interpreted where there is no GPU, and compiled for one all the same."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch

from attn_backends.batch.common import CommonAttentionMetadata
from attn_backends.spec import KVCacheSpec, Limits
from attn_backends.step.device import DeviceCopy
from attn_backends.step.table import StepBatch, StepTable
from tests.helpers.edit_walk import EditWalk
from tests.helpers.interpreted import INTERPRETED, in_own_process, only_interpreted, run_interpreted
from tests.helpers.mutate import mutated_module
from tests.helpers.step_walk import CACHE, LIMITS, StepWalk, assert_both_sides_equal, assert_step, compiled

triton = pytest.importorskip("triton", reason="needs triton")


@in_own_process
def test_interpreted() -> None:
    run_interpreted(__file__)


def interpreted(
    limits: Limits, cache: KVCacheSpec, max_pages_a_copy: int = 5, module: ModuleType | None = None
) -> StepTable:
    """A table whose device's side is the kernel of a module, by default the real one."""
    from attn_backends.step import kernel as derive_triton

    derive = (module or derive_triton).TritonDerive
    return StepTable(
        limits, cache,
        make_side=lambda rows: DeviceCopy(rows, torch.device("cpu"), derive, max_pages_a_copy=max_pages_a_copy),
    )  # fmt: skip


@only_interpreted
def test_random_steps() -> None:
    walk = StepWalk([interpreted(LIMITS, CACHE)], seed=3)
    walk.run(60)
    assert {"advance", "chunk", "decode", "verify"} <= set(walk.seen)


@only_interpreted
@pytest.mark.parametrize("max_pages_a_copy", [5, 1000])
def test_any_order_of_edits_and_steps(max_pages_a_copy: int) -> None:
    walk = EditWalk([interpreted(LIMITS, CACHE, max_pages_a_copy)], seed=max_pages_a_copy)
    walk.run(80)
    assert {"advance", "append", "leave", "swap_rows"} <= set(walk.seen)


MUTATIONS = {  # what stands in the kernel, and what takes its place: nothing that leaves a tensor's memory
    "the first new page is read from the table": ("mask=live & (column >= first)", "mask=live & (column > first)"),
    "old pages are read from the copy": ("tl.where(column < first, old, new).to(tl.int64)", "new.to(tl.int64)"),
    "a run goes to the row before": ("other=-1) == row)", "other=-1) == row + 1)"),
    "padded rows move on": ("tl.where(lens > 0, num_advanced, 0)", "num_advanced"),
    "indices behind the last row stay": ("if row == num_reqs - 1:", "if row == num_reqs:"),
}  # fmt: skip


def check_kernel_of(module: ModuleType) -> None:
    EditWalk([interpreted(LIMITS, CACHE, module=module)], seed=5).run(80)
    check_lengths_that_only_the_device_knows(interpreted(LIMITS, CACHE, module=module))


@only_interpreted
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_kernel_with_a_fault_is_noticed(name: str, tmp_path: Path) -> None:
    from attn_backends.step import kernel as derive_triton

    module = mutated_module(derive_triton, tmp_path, *MUTATIONS[name])
    with pytest.raises(AssertionError):
        check_kernel_of(module)


LONG = Limits(3, 2600, 2600), KVCacheSpec(2700, 1)


def check_rows_longer_than_a_block(table: StepTable) -> None:
    """More pages, new pages and tokens than one program handles at once (1024), for one row of three."""
    table.enter("a", range(40))
    table.enter("b", range(2599, -1, -1))
    table.enter("c", range(5))
    for context, query in (([39, 0, 4], [1, 2590, 1]), ([30, 2588, 3], [2, 3, 2]), ([1, 1, 1], [1, 1, 1])):
        step = table.step(context, query, list(range(sum(query))))
        assert_step(step, compiled(table, context, query), list(range(sum(query))))
        assert_both_sides_equal(table)
    ends = [c + q for c, q in zip(context, query, strict=True)]
    assert_step(table.advance(step), compiled(table, ends, [1, 1, 1]))


@only_interpreted
def test_rows_longer_than_a_block() -> None:
    check_rows_longer_than_a_block(interpreted(*LONG, max_pages_a_copy=4000))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_rows_longer_than_a_block_on_a_gpu() -> None:
    check_rows_longer_than_a_block(StepTable(*LONG, "cuda"))


def check_lengths_that_only_the_device_knows(table: StepTable) -> None:
    table.enter("a", [3, 40, 5])
    table.enter("b", [9, 2])
    exact = torch.tensor([4, 1], dtype=torch.int32)
    step = table.step([10, 3], [1, 2], num_padded_reqs=1, context_lens_on_device=exact)
    assert_follows_from(step, compiled(table, [4, 1], [1, 2], 1))
    assert_follows_from(table.advance(step), compiled(table, [5, 3], [1, 1], 1))


@only_interpreted
def test_lengths_that_only_the_device_knows() -> None:
    check_lengths_that_only_the_device_knows(interpreted(LIMITS, CACHE))


def assert_follows_from(step: StepBatch, exact: CommonAttentionMetadata) -> None:
    """Lengths on the device are exact, those on the host are not: of the indices some are left over, and 0."""
    for name in ("seq_lens", "slot_mapping", "query_start_loc", "paged_kv_indptr", "paged_kv_last_page_len"):
        assert getattr(step.common, name).tolist() == getattr(exact, name).tolist(), name
    indices, used = step.common.paged_kv_indices.tolist(), exact.paged_kv_indices.tolist()
    assert len(indices) > len(used)
    assert indices == used + [0] * (len(indices) - len(used))


@pytest.mark.skipif(INTERPRETED, reason="nothing is compiled when interpreted")
@pytest.mark.parametrize("advance", [False, True])
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_it_compiles_without_a_gpu(capability: int, advance: bool) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from attn_backends.step.kernel import derive_step_kernel

    constants = {"CAPACITY": 1024, "PAGE_SIZE": 16, "MAX_ROWS": 256, "BLOCK": 1024, "ADVANCE": advance}
    is_wide = {"slot_mapping", "positions", "token_ids"}
    types = {
        name: "constexpr" if name in constants else "i32" if name.startswith("num_") else "*i64" if name in is_wide
        else "*i32"
        for name in derive_step_kernel.arg_names
    }  # fmt: skip
    source = ASTSource(derive_step_kernel, types, constants)
    assert triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"]
