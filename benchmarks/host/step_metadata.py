"""Host time of one decode step's metadata: Python lists, numpy arrays compiled anew, and the persistent step table.

The lists and the compiler begin at page lists each step; the table is told of new lengths and new pages. All three
are checked to agree. Contexts end anywhere in a page, so at each step one row in 16 needs a page.

    python -m benchmarks host step_metadata
    python -m benchmarks host step_metadata --device cuda    # the table alone; it fails if a step waits for the GPU

A step on a GPU is timed on the host, from the call to the return, with the GPU's work queued behind it. Lengths and
sampled tokens are there already, so a decode step is an `advance`; the host adds pages for 16 steps at a time, which
the mean counts. A step whose lengths and tokens come from the host is timed besides.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from attn_backends import CommonAttentionMetadata, KVCacheSpec, Limits, SequenceData, SequenceGroup
from attn_backends.step.table import StepBatch, StepTable
from benchmarks.host.builder import PAGE_SIZE, plain_build
from benchmarks.lib.harness import alternate_ms, report

STEPS = 512  # that one table decodes here, at most
AHEAD = PAGE_SIZE  # steps on a GPU that rows are given pages for at a time


class Decoding:
    """Requests with contexts of about as many tokens, and a table that holds them."""

    def __init__(self, num_requests: int, num_tokens: int, device: str) -> None:
        rng = np.random.default_rng(0)
        width = (num_tokens + STEPS) // PAGE_SIZE
        self.num_used = num_tokens // PAGE_SIZE  # pages of a request at first
        self.pages = rng.permutation(num_requests * width).astype(np.int32).reshape(num_requests, width)
        self.context_lens = (num_tokens - rng.integers(1, PAGE_SIZE + 1, num_requests)).astype(np.int32)
        self.query_lens = np.ones(num_requests, np.int32)
        self.token_ids = rng.integers(0, 1000, num_requests)
        limits = Limits(num_requests, num_requests, width * PAGE_SIZE)
        self.table = StepTable(limits, KVCacheSpec(num_requests * width, PAGE_SIZE), device)
        for i, pages in enumerate(self.pages):
            self.table.enter(str(i), pages[: self.num_used])

    def groups(self) -> list[SequenceGroup]:
        lens = zip(self.context_lens.tolist(), self.pages[:, : self.num_used], strict=True)
        return [SequenceGroup(str(i), (SequenceData(c, 1, pages),)) for i, (c, pages) in enumerate(lens)]

    def step(self) -> StepBatch:
        """One step, its new pages included, and on to the next."""
        table, num_pages = self.table, self.table.num_pages[: len(self.pages)]
        full = np.flatnonzero(self.context_lens == num_pages * PAGE_SIZE)
        table.append(full, self.pages[full, num_pages[full]])
        batch = table.step(self.context_lens, self.query_lens, self.token_ids)
        self.context_lens += 1
        return batch

    def advance(self, batch: StepBatch) -> StepBatch:
        """The next step, with tokens that the device has sampled. Pages come for several steps at a time."""
        if batch.num_advanced % AHEAD == 0:
            num_pages = self.table.num_pages[: len(self.pages)]
            full = np.flatnonzero(self.context_lens + AHEAD > num_pages * PAGE_SIZE)
            self.table.append(full, self.pages[full, num_pages[full]])
        self.context_lens += 1
        return self.table.advance(batch)


def assert_follows(batch: StepBatch, work: Decoding) -> None:
    """The step's tensors are those of the plain builder, for the lengths that it stands at."""
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("default")
    seq_lens = work.context_lens.tolist()
    used = [pages[: -(-n // PAGE_SIZE)].tolist() for pages, n in zip(work.pages, seq_lens, strict=True)]
    assert_equal(batch.common, plain_build(used, seq_lens))
    torch.cuda.set_sync_debug_mode(mode)


def assert_equal(common: CommonAttentionMetadata, expected: dict[str, torch.Tensor]) -> None:
    for name, tensor in expected.items():
        got = getattr(common, name).cpu()
        if name == "page_table":  # as far as pages are used: behind them the persistent table holds what it will
            used = torch.arange(tensor.shape[1]) < expected["paged_kv_indptr"].diff()[:, None]
            got, tensor = got[:, : tensor.shape[1]][used], tensor[used]
        assert torch.equal(got, tensor), name


def on_cpu(num_requests: int, num_tokens: int) -> dict[str, Any]:
    work = Decoding(num_requests, num_tokens, "cpu")
    seq_lens, page_lists = (work.context_lens + 1).tolist(), work.pages[:, : work.num_used].tolist()
    groups = work.groups()

    def compile_anew() -> CommonAttentionMetadata:
        return CommonAttentionMetadata.from_sequence_groups(groups, PAGE_SIZE)

    def build_lists() -> dict[str, torch.Tensor]:
        return plain_build(page_lists, seq_lens)

    expected = build_lists()
    assert_equal(compile_anew(), expected)
    assert_equal(work.step().common, expected)
    times = alternate_ms({"lists": build_lists, "numpy": compile_anew})
    times["step"] = statistics.median(timed_us(work.step)) / 1e3
    return {
        "requests": num_requests,
        "tokens": num_tokens,
        "lists us": times["lists"] * 1e3,
        "numpy us": times["numpy"] * 1e3,
        "step us": times["step"] * 1e3,
        "step us / request": times["step"] * 1e3 / num_requests,
        "lists / step": times["lists"] / times["step"],
        "numpy / step": times["numpy"] / times["step"],
    }


def on_gpu(num_requests: int, num_tokens: int) -> dict[str, Any]:
    work = Decoding(num_requests, num_tokens, "cuda")
    expected = plain_build(work.pages[:, : work.num_used].tolist(), (work.context_lens + 1).tolist())
    assert_equal(work.step().common, expected)
    torch.cuda.set_sync_debug_mode("error")
    full_us = timed_us(work.step)
    batch = work.step()
    assert_follows(batch, work)

    def advance() -> None:
        nonlocal batch
        batch = work.advance(batch)

    step_us = timed_us(advance, AHEAD, 9 * AHEAD)
    torch.cuda.set_sync_debug_mode("default")
    assert_follows(batch, work)
    return {
        "requests": num_requests,
        "tokens": num_tokens,
        "step us": statistics.median(step_us),
        "step us / request": statistics.median(step_us) / num_requests,
        "mean step us": statistics.mean(step_us),
        "step with lengths from the host us": statistics.median(full_us),
    }


def timed_us(run: Callable[[], object], warmup: int = 20, repeats: int = 150) -> list[float]:
    """Wall time of each of `repeats` calls, in microseconds."""
    taken = []
    for _ in range(warmup + repeats):
        started = time.perf_counter()
        run()
        taken.append((time.perf_counter() - started) * 1e6)
    return taken[warmup:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    device = parser.parse_args().device
    measure = on_cpu if device == "cpu" else on_gpu
    rows = [measure(requests, tokens) for requests in (1, 64, 256, 1024) for tokens in (1024, 4096, 16384)]
    of = {(row["requests"], row["tokens"]): row["step us"] for row in rows}
    for row in rows:
        row["step / at 1k"] = row["step us"] / of[row["requests"], 1024]
    name = "step_metadata" if device == "cpu" else "step_metadata_cuda"
    report(name, f"host time of one decode step's metadata, for {device}", rows, ("torch", "numpy"))


if __name__ == "__main__":
    main()
