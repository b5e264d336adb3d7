"""Host time of one decode step's metadata: our numpy compiler against a plain builder that fills Python lists.

The plain builder does what list-based engines do: extend lists page by page, then make tensors of them. Both produce
query starts, lengths, CSR, dense page table and slot mapping of the same batch, and are checked to agree.

    python -m benchmarks host builder
"""

from __future__ import annotations

import numpy as np
import torch

from attn_backends import (
    AttentionSpec,
    CommonAttentionMetadata,
    KVCacheSpec,
    Limits,
    SequenceData,
    SequenceGroup,
    get_backend,
    plan_groups,
)
from benchmarks.lib.harness import alternate_ms, report

PAGE_SIZE = 16


def plain_build(page_lists: list[list[int]], seq_lens: list[int]) -> dict[str, torch.Tensor]:
    """Page lists to tensors, one Python list at a time."""
    indices: list[int] = []
    indptr, last_page_len, slots = [0], [], []
    for pages, seq_len in zip(page_lists, seq_lens, strict=True):
        used = -(-seq_len // PAGE_SIZE)
        indices.extend(pages[:used])
        indptr.append(indptr[-1] + used)
        last_page_len.append(seq_len % PAGE_SIZE or PAGE_SIZE)
        slots.append(pages[(seq_len - 1) // PAGE_SIZE] * PAGE_SIZE + (seq_len - 1) % PAGE_SIZE)
    widest = max(len(pages) for pages in page_lists)
    dense = [pages + [0] * (widest - len(pages)) for pages in page_lists]
    return {
        "query_start_loc": torch.arange(len(seq_lens) + 1, dtype=torch.int32),
        "seq_lens": torch.tensor(seq_lens, dtype=torch.int32),
        "paged_kv_indptr": torch.tensor(indptr, dtype=torch.int32),
        "paged_kv_indices": torch.tensor(indices, dtype=torch.int32),
        "paged_kv_last_page_len": torch.tensor(last_page_len, dtype=torch.int32),
        "page_table": torch.tensor(dense, dtype=torch.int32),
        "slot_mapping": torch.tensor(slots, dtype=torch.int64),
    }


def main() -> None:
    rows = []
    rng = np.random.default_rng(0)
    for num_requests in (1, 64, 256):
        for context in (1024, 4096, 16384):
            num_pages = num_requests * context // PAGE_SIZE
            pages = rng.permutation(num_pages).astype(np.int32).reshape(num_requests, -1)
            page_lists = pages.tolist()
            cache = KVCacheSpec(num_pages, PAGE_SIZE)
            limits = Limits(num_requests, num_requests, context)
            group = plan_groups({0: AttentionSpec(32, 8, 128)})[0]
            builder = get_backend("TORCH").get_builder_cls()(group, cache, limits, "cpu")

            def groups(pages: np.ndarray = pages, context: int = context) -> list[SequenceGroup]:
                return [SequenceGroup(str(i), (SequenceData(context - 1, 1, row),)) for i, row in enumerate(pages)]

            def compile_common(groups=groups) -> CommonAttentionMetadata:  # type: ignore[no-untyped-def]
                return CommonAttentionMetadata.from_sequence_groups(groups(), PAGE_SIZE)

            expected = plain_build(page_lists, [context] * num_requests)
            common = compile_common()
            for name, tensor in expected.items():
                assert torch.equal(getattr(common, name), tensor), name
            times = alternate_ms(
                {
                    "plain": lambda: plain_build(page_lists, [context] * num_requests),  # noqa: B023
                    "ours": compile_common,
                    "build": lambda: builder.build(0, compile_common()),  # noqa: B023
                }
            )
            rows.append(
                {
                    "requests": num_requests,
                    "context": context,
                    "lists ms": times["plain"],
                    "common ms": times["ours"],
                    "common + TORCH build ms": times["build"],
                    "lists / common": times["plain"] / times["ours"],
                    "lists / (common + build)": times["plain"] / times["build"],
                }
            )
    report("builder", "host time of one decode step's metadata", rows)


if __name__ == "__main__":
    main()
