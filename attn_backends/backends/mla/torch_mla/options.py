"""Options of TORCH_MLA."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from attn_backends.backends.mla.options import MLAOptions
from attn_backends.spec import Limits


class TorchMLAOptions(MLAOptions):
    """The `backend_options` of TORCH_MLA."""

    gather_together_bytes: Annotated[int, Field(ge=0)] = 32 << 20
    """Latent rows of decodes that are gathered and attended together; one request's always are."""
    graph_max_seq_len: Annotated[int, Field(ge=1)] = 1024
    """Keys that every row of a CUDA graph gathers, masked (fewer if the model is shorter). A batch with a longer row
    runs eager."""


def graph_max_seq_len(options: TorchMLAOptions | None, limits: Limits) -> int:
    return min((options or TorchMLAOptions()).graph_max_seq_len, limits.max_model_len)
