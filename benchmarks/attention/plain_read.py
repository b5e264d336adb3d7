"""Keys and values read by a kernel that does nothing else: what attention takes where all of its work is hidden."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from benchmarks.attention.paged_problem import Problem
from benchmarks.lib.gpu_harness import Run, capture

PROGRAMS, WARPS, BLOCK = 2, 16, 8192  # a multiprocessor; of a program; elements at a time


@triton.jit  # type: ignore[untyped-decorator]
def read_kernel(keys, values, output, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Args: keys, values: [count] i32; output: [programs] i32, so that something comes of it."""
    seen = tl.zeros([BLOCK], tl.int32)
    for start in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        seen |= tl.load(keys + at, mask=at < count, other=0) | tl.load(values + at, mask=at < count, other=0)
    tl.store(output + tl.program_id(0), tl.max(seen, 0))


def make_read(problem: Problem) -> Run:
    """A graph that reads as many keys and values of every copy as there are, as often as a contender attends to it."""
    device = problem.device
    used = sum(problem.shape.seq_lens)
    caches = [[tensor.flatten(0, 1)[:used].flatten().view(torch.int32) for tensor in cached]
              for cached in problem.caches]  # fmt: skip
    if device.type == "cpu":
        return lambda: [tensor.amax() for cached in caches for tensor in cached]
    num_programs = PROGRAMS * torch.cuda.get_device_properties(device).multi_processor_count
    output = torch.empty(num_programs, dtype=torch.int32, device=device)

    def run() -> torch.Tensor:
        for _ in range(problem.passes):
            for keys, values in caches:
                read_kernel[num_programs,](keys, values, output, len(keys), BLOCK, num_warps=WARPS)
        return output

    return capture(run, device)
