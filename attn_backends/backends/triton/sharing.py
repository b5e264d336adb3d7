"""How prefills and decodes of one step share a GPU: the former make products while the latter read."""

from __future__ import annotations

import numpy as np

from attn_backends.backends.triton.launch import HOPPER_ROWS, in_sight, num_hopper_tiles
from attn_backends.page_table import IntArray
from attn_backends.spec import AttentionSpec

_PRODUCTS_A_BYTE = 30.0  # of numbers of a head: as many as are made for prefill while a byte is read for decode
_KEYS_BESIDE = 128  # what a tile takes beside its keys, in keys
# As measured (benchmarks/sharing.py). With half of the GPU prefills are so fast that decodes lose nothing by it, as
# they have all of it afterwards. Where prefills take most of the time decodes get what those leave at their end.
_LEAST, _MOST = 0.5, 0.75


def prefill_share(spec: AttentionSpec, query_lens: IntArray, seq_lens: IntArray, num_decodes: int) -> float:
    """Part of the multiprocessors for the rows behind the decodes: so that both take about as long, but half at least.

    Args:
        query_lens, seq_lens: [rows], or upper bounds of the latter; the first `num_decodes` are decodes.
    """
    read = int(in_sight(spec, seq_lens[:num_decodes]).sum(dtype=np.int64)) * spec.cache_dtype.itemsize
    tokens, keys = query_lens[num_decodes:], seq_lens[num_decodes:]
    seen = in_sight(spec, keys - tokens // 2 if spec.causal else keys) + _KEYS_BESIDE
    products = HOPPER_ROWS * int(num_hopper_tiles(spec, tokens).astype(np.int64) @ seen)
    even = products / (products + _PRODUCTS_A_BYTE * read)
    return 1.0 if even > _MOST else max(even, _LEAST)
