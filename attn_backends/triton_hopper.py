"""What kernels of ours for Hopper share, in Triton's Gluon. Not every Triton has what this imports: see
`triton_split.has_hopper_kernels`."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

BLOCK_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)

barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # as older versions call it


@gluon.jit  # type: ignore[untyped-decorator]
def barriers(STAGES: gl.constexpr, COUNT: gl.constexpr):  # type: ignore[no-untyped-def]
    """[STAGES] that COUNT threads arrive at. An allocation of their own: Triton synchronises uses of one allocation."""
    made = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(made.index(stage), COUNT)
    return made


@gluon.jit
def clear_rows(block, num_live):  # type: ignore[no-untyped-def]
    """Zeros for rows from `num_live` on of a block [rows, columns] in shared memory. What lies behind the last key may
    be NaN, which no weight of zero undoes."""
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    live = gl.arange(0, block.shape[0], gl.SliceLayout(1, LINES)) < num_live
    held = block.load(LINES)
    block.store(gl.where(live[:, None], held, gl.zeros_like(held)))


@gluon.jit
def write_rows(rows, sums, share, live):  # type: ignore[no-untyped-def]
    """Weighted values [rows, columns] to where `rows` point, each row times its share."""
    ROW: gl.constexpr = gl.SliceLayout(1, sums.type.layout)
    rows = gl.convert_layout(rows, ROW, assert_trivial=True)
    share = gl.convert_layout(share, ROW, assert_trivial=True)
    live = gl.convert_layout(live, ROW, assert_trivial=True)
    to = rows[:, None] + gl.arange(0, sums.shape[1], gl.SliceLayout(0, sums.type.layout))[None]
    gl.store(to, (sums * share[:, None]).to(rows.dtype.element_ty), mask=live[:, None])
