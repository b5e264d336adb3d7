"""Prompts with a cached beginning, by FlashInfer's wrappers alone: one paged pass over everything, against two passes.

    python -m benchmarks rules prefill_prefix

The two passes are a ragged one over the new tokens, which reads their keys as they came, and a paged one over the
prefix, merged by LSE. FLASHINFER takes the ragged pass where there is no prefix, and the paged one elsewhere.
"""

from __future__ import annotations

import torch

from benchmarks.lib.gpu_harness import capture, in_turns_us, installed
from benchmarks.lib.harness import report

HEADS, KV_HEADS, DIM, PAGE_SIZE = 32, 8, 128, 16
DTYPE, DEVICE = torch.bfloat16, torch.device("cuda")
CASES = [(rows, new, prefix) for rows, new in ((1, 2048), (8, 2048), (8, 512)) for prefix in (0, 256, 1024, 4096)]


def starts(length: int, rows: int) -> torch.Tensor:
    return torch.arange(rows + 1, dtype=torch.int32) * length


@torch.inference_mode()
def measure(rows: int, new: int, prefix: int) -> dict[str, object]:
    import flashinfer

    workspace = torch.zeros(512 << 20, dtype=torch.uint8, device=DEVICE)
    made = {"dtype": DTYPE, "device": DEVICE}
    num_pages = rows * (prefix + new) // PAGE_SIZE
    cache = tuple(torch.randn(num_pages, PAGE_SIZE, KV_HEADS, DIM, **made) for _ in "kv")
    pages = torch.randperm(num_pages).int().view(rows, -1)
    query = torch.randn(rows * new, HEADS, DIM, **made)
    fresh = [t[pages.to(DEVICE).long()].flatten(1, 2)[:, prefix:].reshape(-1, KV_HEADS, DIM) for t in cache]
    types = {"q_data_type": DTYPE, "kv_data_type": DTYPE}
    shape = (HEADS, KV_HEADS, DIM)
    full = torch.full((rows,), PAGE_SIZE, dtype=torch.int32)
    paged, ahead = (flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa3") for _ in range(2))
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend="fa3")
    queries, before = starts(new, rows), prefix // PAGE_SIZE
    paged.plan(queries, starts(pages.shape[1], rows), pages.flatten(), full, *shape, PAGE_SIZE, causal=True, **types)
    ragged.plan(queries, queries, *shape, causal=True, **types)
    if prefix:
        ahead.plan(queries, starts(before, rows), pages[:, :before].flatten().contiguous(), full, *shape, PAGE_SIZE,
                   causal=False, **types)  # fmt: skip
    out, other = torch.empty_like(query), torch.empty_like(query)
    lse, other_lse = (torch.empty(rows * new, HEADS, device=DEVICE) for _ in range(2))

    def one_pass() -> torch.Tensor:
        return paged.run(query, cache, out=out)

    def two_passes() -> torch.Tensor:
        if not prefix:
            return ragged.run(query, *fresh, out=out)
        ragged.run(query, *fresh, out=out, lse=lse, return_lse=True)
        ahead.run(query, cache, out=other, lse=other_lse, return_lse=True)
        flashinfer.merge_state_in_place(out, lse, other, other_lse)
        return out

    expected = one_pass().clone()
    error = float((two_passes() - expected).float().norm() / expected.float().norm())
    assert error < 1e-2, (rows, new, prefix, error)
    us = in_turns_us({"one": capture(one_pass, DEVICE), "two": capture(two_passes, DEVICE)}, 15, DEVICE)
    return {"requests": rows, "new tokens": new, "prefix": prefix, "one paged pass us": us["one"],
            "ragged and paged us": us["two"], "two / one": us["two"] / us["one"]}  # fmt: skip


if __name__ == "__main__":
    results = [measure(*case) for case in CASES]
    report("prefill_prefix", "prompts with a cached prefix, fa3, bf16, 32/8 x 128", results,
           installed("torch", "flashinfer-python"))  # fmt: skip
