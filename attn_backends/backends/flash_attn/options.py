"""The `backend_options` of FLASH_ATTN."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class FlashAttnOptions(BaseModel):
    """Who brings the kernels, and how they are used."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    provider: Literal["auto", "vllm_fa3", "flash_attn_interface", "flash_attn", "vllm_fa2", "flash_attn_4"] = "auto"
    """`flash_attn` and `flash_attn_4` are FlashAttention 2 and 4 from PyPI, `flash_attn_interface` FlashAttention 3 as
    its authors build it, and the others are as vLLM builds them. `auto`: the first of FlashAttention 3, then 2, then 4,
    that is here and serves the layers. A named one is used or refused."""
    split_keys: bool = True
    """Let several blocks of the GPU share a row's keys. Off, a row's result does not depend on what else is in the
    batch, and long rows of small batches are slow. `flash_attn_4` never does."""
