"""Options that every backend of the family has."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from attn_backends.spec import Limits


class MLAOptions(BaseModel):
    """The `backend_options` of the family; a backend may add its own."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    context_workspace_tokens: Annotated[int, Field(ge=1)] = 8192
    """Cached tokens that are expanded to keys and values at once when a prompt's later part meets its earlier one. With
    DeepSeek-V3's 128 heads in bfloat16 a token takes 112 KiB while its chunk is attended."""


def workspace_tokens(options: MLAOptions | None, limits: Limits) -> int:
    """Tokens of a context chunk: the option, and no more than a step's rows can have cached."""
    most = limits.max_num_requests * limits.max_model_len
    return min((options or MLAOptions()).context_workspace_tokens, most)
