"""Kernels of random shapes compiled before any is timed: by several processes, into Triton's cache on the disk.

Every head shape, dtype and page size has kernels of its own, each some seconds of one core.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from multiprocessing import get_context

import torch

from benchmarks.attention.attention import all_made
from benchmarks.attention.contest import CACHE_DTYPES
from benchmarks.attention.plain_read import make_read
from benchmarks.attention.sampled_problem import Pool, sampled_problem
from benchmarks.attention.shape_draws import LARGEST_PAGE, READS, Drawn
from benchmarks.lib.gpu_harness import free_memory, reason

SHARE = 0.4  # of a run's time, at most
MOST_PROCESSES = 14
SMALLEST_POOL = 64 << 20


def processes_to_compile() -> int:
    """How many processes compile at the same time on this machine."""
    return max(1, min(MOST_PROCESSES, (os.cpu_count() or 1) - 2))


def compile_all(
    shapes: Sequence[Drawn], names: Sequence[str], num_processes: int | None, until: float, device: str
) -> None:
    """Compile what the backends need for these shapes, the first ones first, until a time by `time.monotonic`."""
    started = time.monotonic()
    num_processes = num_processes or processes_to_compile()
    seconds = max(0.0, until - started)
    parts = [(shapes[i::num_processes], tuple(names), time.time() + seconds, device) for i in range(num_processes)]
    with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as pool:
        done = sum(map(_count, as_completed([pool.submit(compile_part, *part) for part in parts])))
    print(f"kernels of {done} of {len(shapes)} shapes compiled in {time.monotonic() - started:.0f} s", flush=True)


def _count(part: Future[int]) -> int:
    """How many shapes a process ran; none if a kernel has ended it: the run compiles what is left itself."""
    try:
        return part.result()
    except Exception as error:  # BrokenProcessPool, or the device's context is dead
        print(f"not all is compiled ahead: {reason(error)}", flush=True)
        return 0


@torch.inference_mode()
def compile_part(shapes: Sequence[Drawn], names: Sequence[str], until: float, device: str) -> int:
    """Run each shape once over one copy of memory that holds anything. Returns how many were run before the time."""
    for count, each in enumerate(shapes):
        if time.time() > until:
            return count
        try:
            compile_one(each, names, torch.device(device))
        except Exception as error:  # out of memory, beside the others: the run itself compiles it then
            print(f"not compiled ahead: {each.shape.name}: {reason(error)[:100]}", flush=True)
        free_memory(torch.device(device))
    return len(shapes)


def compile_one(each: Drawn, names: Sequence[str], device: torch.device) -> None:
    """Run the backends, and the kernel that only reads, once at one shape."""
    pool = Pool(pool_bytes(each), device, fill=False)
    problem = sampled_problem(each.shape, CACHE_DTYPES[each.dtype], each.page_size, pool, each.id, num_copies=1)
    all_made(problem, names, {}, bare=False, plain=True)
    if each.kind in READS:
        make_read(problem)


def pool_bytes(each: Drawn) -> int:
    """Room for one copy in pages of any size."""
    slots = sum(-(-seq_len // LARGEST_PAGE) * LARGEST_PAGE for seq_len in each.shape.seq_lens) + each.page_size
    return max(SMALLEST_POOL, 2 * slots * each.shape.heads[1] * each.shape.heads[2] * CACHE_DTYPES[each.dtype].itemsize)
