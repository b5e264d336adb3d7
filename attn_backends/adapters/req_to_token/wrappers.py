"""What pymllm's documentation says of FlashInfer's wrappers: who serves a step, and on which cores."""

from __future__ import annotations

import enum
import os
from dataclasses import dataclass
from typing import Any

import torch

from attn_backends.adapters.req_to_token.batch import ForwardBatch, ForwardMode, HostLens
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


def wrappers_of(planned: PlannedStep) -> tuple[list[Any], list[Any]]:
    """The wrappers that serve rows of one token, and those that serve longer ones: one a kind of layers."""
    steps: list[Any] = list({id(step): step for step in planned.steps.values()}.values())
    decodes, prefills = ([getattr(step, rows) for step in steps] for rows in ("decode", "prefill"))
    return [plan.wrapper for plan in decodes if plan], [plan.wrapper for plan in prefills if plan]


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
