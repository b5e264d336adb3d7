"""Which steps TORCH gives a compiler to trace without its kernels in C, and the one batch that they are."""

from __future__ import annotations

import torch

from attn_backends.backends.torch.metadata import DecodeBatch, TorchMetadata
from attn_backends.cache.kv_cache import has_padding
from attn_backends.spec import FP8_DTYPES, AttentionSpec


def traced_batch(
    metadata: TorchMetadata, spec: AttentionSpec, page_size: int, device: torch.device
) -> DecodeBatch | None:
    """A step of decode rows, all with keys, on a CPU, as one batch; None for any other step."""
    num_rows, batch, rows = metadata.num_decodes, metadata.decode_batch, metadata.decode_rows
    plain = not (metadata.for_graph or metadata.num_prefills or metadata.common_prefix_len)
    plain = plain and spec.cache_dtype not in FP8_DTYPES
    if not plain or metadata.num_new_kv != num_rows or device.type != "cpu":
        return None
    if has_padding(metadata.slot_mapping[:num_rows]):  # an operator that scatters has no nowhere
        return None
    if batch is not None and (rows or batch.owners is None):
        return None if rows else batch
    if batch is not None:  # the pieces of one row, side by side
        bias = None if batch.bias is None else batch.bias.permute(1, 2, 3, 0, 4).flatten(3)[None]
        return DecodeBatch(1, batch.slots, bias) if num_rows == 1 else None
    if num_rows != 1 or not rows or rows[0].pages is None:
        return None
    slots = (rows[0].pages.long()[:, None] * page_size + torch.arange(page_size)).view(-1)[rows[0].keys]
    return DecodeBatch(1, slots, rows[0].bias)
