"""TORCH's options."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class TorchOptions(BaseModel):
    """The `backend_options` of TORCH."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    native_decode: bool = True
    """On a CPU, decode rows go to a kernel in C, compiled at first use by `$CC`, `cc` or `gcc` in under a second, and
    kept in the user's cache. With false, and in layers that it does not serve, they go as the next two say."""
    native_prefill: bool = True
    """On a CPU, all other rows of cached self-attention go to a kernel in C too, compiled in under two seconds. With
    false, and in layers that it does not serve, each is gathered and attended by torch."""
    gather_together_bytes: Annotated[int, Field(ge=0)] = 32 << 20
    """Decode rows are gathered together while their keys and values take at most this; more go in pieces on a CPU, and
    one row at a time elsewhere. benchmarks/rules/torch_decode.py shows both sides."""
    piece_bytes: Annotated[int, Field(ge=1)] = 1 << 20
    """Keys and values of a piece: what one core gathers and then attends, while it is still in its own cache. A
    piece holds one key at least."""
    graph_max_seq_len: Annotated[int, Field(ge=1)] = 1024
    """Keys that every row of a CUDA graph gathers, masked (fewer if the model or a window is shorter). A batch with a
    longer row runs eager."""
