"""FlashInfer's wrappers in pymllm's words: which of them serve a step, and whether a decode uses tensor cores."""

from __future__ import annotations

import enum
import os
from dataclasses import dataclass
from typing import Any

import torch

from attn_backends.adapters.req_to_token.batch import ForwardBatch, ForwardBatchLike, ForwardMode, HostLens
from attn_backends.adapters.req_to_token.plans import PlannedStep
from attn_backends.spec import FP8_DTYPES

TENSOR_CORES = "ATTN_BACKENDS_FLASHINFER_TENSOR_CORES"
_SAID = {"1": True, "on": True, "true": True, "0": False, "off": False, "false": False}


class WrapperDispatch(enum.Enum):
    """Why layers have different wrappers."""

    SLIDING_WINDOW = enum.auto()
    CROSS_ATTENTION = enum.auto()


@dataclass
class DecodeMetadata:
    """A planned step of one token a row: the wrappers that serve it, one a kind of layers, windowed ones first."""

    decode_wrappers: list[Any]


@dataclass
class PrefillMetadata:
    """A planned step of any other rows.

    Attributes:
        prefill_wrappers: those that serve it, windowed layers' first; rows of one token among others have one more.
        use_ragged: never: new keys are in the pool when they are read.
        extend_no_prefix: no row has tokens that were cached before.
    """

    prefill_wrappers: list[Any]
    use_ragged: bool
    extend_no_prefix: bool


def wrappers_of(planned: PlannedStep) -> tuple[list[Any], list[Any]]:
    """Wrappers that decode in a planned step, and those that prefill, windowed layers' first."""
    steps: list[Any] = list({id(step): step for step in planned.steps.values()}.values())
    decodes, prefills = ([getattr(step, rows) for step in steps] for rows in ("decode", "prefill"))
    return [plan.wrapper for plan in decodes if plan], [plan.wrapper for plan in prefills if plan]


def metadata_of(
    mode: ForwardMode, decodes: list[Any], prefills: list[Any], batch: ForwardBatchLike | None
) -> DecodeMetadata | PrefillMetadata:
    """A planned step by its wrappers; a graph's has no batch."""
    if mode in (ForwardMode.DECODE, ForwardMode.IDLE):
        return DecodeMetadata(decodes)
    prefixes = getattr(batch, "extend_prefix_lens_cpu", None)
    has_prefix = mode is ForwardMode.TARGET_VERIFY or (prefixes is not None and any(prefixes))
    return PrefillMetadata(prefills + decodes, use_ragged=False, extend_no_prefix=not has_prefix)


def should_use_tensor_core(kv_cache_dtype: torch.dtype, num_attention_heads: int, num_kv_heads: int) -> bool:
    """Whether FlashInfer's decode uses tensor cores: for fp8 always, for 16 bits from four query heads a KV head on.

    `ATTN_BACKENDS_FLASHINFER_TENSOR_CORES` (on or off) says otherwise; it is read at every call.

    Raises:
        ValueError: the variable holds anything else.
    """
    said = os.environ.get(TENSOR_CORES, "")
    if said:
        if said.lower() not in _SAID:
            raise ValueError(f"{TENSOR_CORES} is {said!r}; allowed: {', '.join(_SAID)}")
        return _SAID[said.lower()]
    if kv_cache_dtype in FP8_DTYPES:
        return True
    return kv_cache_dtype in (torch.float16, torch.bfloat16) and num_attention_heads // num_kv_heads >= 4


class IndicesUpdaterDecode:
    """Plans steps of one token a row from their tensors alone."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend

    def update(
        self, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor, seq_lens_cpu: HostLens | None, seq_lens_sum: int
    ) -> None:
        """Plan a decode step; `seq_lens_sum` is not read."""
        slots = torch.zeros_like(req_pool_indices)
        self.backend.init_forward_metadata(
            ForwardBatch(ForwardMode.DECODE, req_pool_indices, seq_lens, slots, seq_lens_cpu)
        )
