"""TORCH decode of rows that share a prefix: the prefix attended once for all rows and merged, or with every row.

python -m benchmarks rules torch_cascade
"""

from __future__ import annotations

import torch

from attn_backends import AttentionSpec
from attn_backends.backends.torch import metadata
from attn_backends.backends.torch.backend import TorchBackend
from attn_backends.testing.cases.random_batch import random_batch
from attn_backends.testing.harness import assert_matches, make_layer
from benchmarks.lib.harness import alternate_ms, report

HEADS = [(9, 3, 64), (32, 8, 128)]  # query heads, KV heads, head dim
ROWS = (4, 16)
PREFIXES = (64, 256, 1024, 4096)
OWN = 100  # keys that a row has beside the prefix


@torch.inference_mode()
def measure(heads: tuple[int, int, int], dtype: torch.dtype, rows: int, prefix: int) -> dict[str, object]:
    """Times of one shape, after checking both against the reference."""
    spec = AttentionSpec(*heads, dtype=dtype)
    batch = random_batch(TorchBackend, spec, [prefix + OWN] * rows, [1] * rows, shared_prefix_len=prefix)
    layer = make_layer(TorchBackend, batch)
    steps = [layer.begin(batch), layer.begin(batch, prefix)]
    expected = batch.expected()
    for step in steps:
        assert_matches(layer.forward(batch, step), batch, expected=expected)
    query, key, value, pool = batch.query, batch.key, batch.value, batch.pool
    times = alternate_ms({
        "with every row ms": lambda: layer.impl.forward(query, key, value, pool, steps[0]),
        "once ms": lambda: layer.impl.forward(query, key, value, pool, steps[1]),
    })  # fmt: skip
    saved = prefix * (rows - 1) * 2 * heads[1] * heads[2] * dtype.itemsize
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "heads": "/".join(map(str, heads)),
        "rows": rows,
        "prefix": prefix,
        "saved MiB": saved / 2**20,
        **times,
        "gain": times["with every row ms"] / times["once ms"],
    }


def main() -> None:
    metadata.CASCADE_MIN_BYTES = 0
    rows = [
        measure(heads, dtype, count, prefix)
        for dtype in (torch.float32, torch.bfloat16)
        for heads in HEADS
        for count in ROWS
        for prefix in PREFIXES
    ]
    report("torch_cascade", "TORCH decode over a shared prefix", rows)


if __name__ == "__main__":
    main()
