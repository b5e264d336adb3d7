"""Options of FLASH_ATTN_MLA."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from attn_backends.backends.mla.options import MLAOptions


class FlashAttnMLAOptions(MLAOptions):
    """The `backend_options` of FLASH_ATTN_MLA."""

    split_bytes: Annotated[int, Field(ge=1)] = 512 << 20
    """What the library may allocate for the parts of rows whose keys it splits: it takes kv_lora_rank + 1 float32 a
    query and split. Fewer splits leave a GPU idle where one row is much longer than all others."""
