"""Programmatic dependent launch: kernels that start before the one in front of them has ended."""

from __future__ import annotations

from enum import IntEnum

import triton
import triton.language as tl
from triton.language.extra import cuda


class Pdl(IntEnum):
    """When a kernel starts, by programmatic dependent launch, relative to the one in front of it."""

    OFF = 0  # once that has ended
    WAIT_AT_ONCE = 1  # before it has ended, to wait for it before it reads anything
    WAIT_FIRST = 2  # the same, but reads what was there before the one in front was launched
    WAIT_LAST = 3  # the same, and does not need what it writes: one program waits for it last, so that both have ended


WAIT_AT_ONCE, WAIT_FIRST, WAIT_LAST = (tl.constexpr(int(pdl)) for pdl in [*Pdl][1:])  # as kernels know them


@triton.jit
def launch_dependents():  # type: ignore[no-untyped-def]
    """Let the next kernel start once all programs came here, if it is launched so (Triton's `launch_pdl`)."""
    cuda.gdc_launch_dependents()


@triton.jit
def grid_wait_and_launch_dependents():  # type: ignore[no-untyped-def]
    """Wait for the kernel in front, then let the next one start, in every program of a kernel that starts early.

    It waits first: so what the next one finds, before it waits itself, is all but what this one writes.
    """
    grid_wait()
    launch_dependents()


@triton.jit
def acquire_fence():  # type: ignore[no-untyped-def]
    """Read anew, from here on, what kernels in front of the one beside which this one runs have written."""
    tl.inline_asm_elementwise("fence.acq_rel.gpu; // dummy $0", "=r", [], tl.int32, is_pure=False, pack=1)


@triton.jit
def grid_wait():  # type: ignore[no-untyped-def]
    """Wait until all that the kernel in front writes is there, in every program of a kernel that starts early."""
    cuda.gdc_wait()
