"""The `backend_options` of FLASHINFER."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class FlashInferOptions(BaseModel):
    """How FlashInfer's kernels are chosen, and what they may use."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    tensor_cores: Literal["auto", "on", "off"] = "auto"
    """Decode on tensor cores (the fa2 prefill kernel) or on CUDA cores. `auto`: what benchmarks/attention/attention.py
    found faster: CUDA cores for one query head a KV head, tensor cores for more."""
    prefill_kernels: Literal["auto", "fa2", "fa3"] = "auto"
    """Kernels of rows with several query tokens. `auto`: fa3 where it can serve (Hopper, a 16-bit cache) and rows are
    long, else fa2."""
    fixed_split_size: Annotated[int, Field(ge=1)] | None = None
    """Pages that a split of a row's keys holds, whatever the batch: results then do not depend on what else is in the
    batch. fa2 kernels alone, and no CUDA graphs. None: FlashInfer balances its splits."""
    workspace_bytes: Annotated[int, Field(ge=1)] | None = None
    """Bytes for partial results of split rows. None: the largest need of all layers within the limits."""
