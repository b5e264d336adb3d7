"""Caches of 2^32 elements, keys and values apart: half of their pages begin beyond what 31 bits can count."""

from __future__ import annotations

from attn_backends.testing.cases.cases import BatchShape
from attn_backends.testing.conformance import BackendConformance
from attn_backends.testing.harness import assert_matches, run_backend

CHUNKS = BatchShape(seq_lens=(700, 300), query_lens=(64, 40))


def check_large_cache(kit: BackendConformance) -> None:
    spec = kit.make_spec()
    page_elements = kit.page_size * spec.num_kv_heads * spec.head_dim
    for shape in ("medium_decode", CHUNKS):
        batch = kit.make_batch(spec, shape, num_pages=2**32 // page_elements)
        pages = [int(page) for row in batch.rows for page in row.data.pages or ()]
        assert max(pages) * page_elements > 2**31
        assert_matches(run_backend(kit.backend, batch, kv_cache=batch.pool), batch, f"{shape} in 2^32 elements")
        del batch
