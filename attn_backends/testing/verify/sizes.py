"""How large a case is: what one takes a moment on a GPU, on a CPU, and where kernels are interpreted."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

from attn_backends.spec import AttentionSpec


@dataclass(frozen=True)
class Size:
    """Limits of what is drawn for one step of one layer."""

    name: str
    max_rows: int
    max_context: int  # keys in the cache before the step
    max_chunk: int  # new tokens of a row
    numbers: int  # of the keys and values of all rows
    logits: int  # query tokens times query heads times keys, over all rows
    visits: int  # blocks of 64 keys times tiles of 64 queries times KV heads: what an interpreter runs one by one
    num_episodes: int
    max_layers: int
    spread: float  # most cases are smaller, by up to this power of two
    siblings: int  # seeds in a row whose layers are alike: kernels that were compiled for one serve the others

    def scaled(self, factor: float) -> Size:
        """With other limits of a whole step."""
        limits: dict[str, Any] = {
            name: max(1, int(factor * getattr(self, name))) for name in ("numbers", "logits", "visits")
        }
        return replace(self, **limits)


SIZES = {
    "large": Size("large", 256, 16384, 2048, 1 << 27, 1 << 29, 1 << 21, 3, 3, 7, 64),
    "medium": Size("medium", 32, 2048, 256, 1 << 19, 1 << 22, 1 << 14, 3, 3, 2, 1),
    "small": Size("small", 8, 4096, 64, 1 << 20, 1 << 19, 64, 2, 2, 2, 1),
}


def default_size(device: str) -> str:
    """Large on an accelerator, small where Triton interprets its kernels, medium on a CPU else."""
    if not device.startswith("cpu"):
        return "large"
    return "small" if interprets_triton() else "medium"


def interprets_triton() -> bool:
    """Whether Triton's kernels run in its interpreter, as it decides when it is first imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def fits(size: Size, spec: AttentionSpec, query_lens: tuple[int, ...], seq_lens: tuple[int, ...]) -> bool:
    """Whether a step of such rows is within the limits."""
    numbers = sum(seq_lens) * spec.num_kv_heads * (spec.head_dim + spec.head_dim_vo)
    logits = sum(q * k for q, k in zip(query_lens, seq_lens, strict=True)) * spec.num_qo_heads
    visits = sum(
        -(-q * spec.group_size // 64) * -(-k // 64) for q, k in zip(query_lens, seq_lens, strict=True)
    ) * spec.num_kv_heads  # fmt: skip
    return numbers <= size.numbers and logits <= size.logits and visits <= size.visits
