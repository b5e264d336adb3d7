"""FlashAttention 3's functions as FLASH_ATTN_MLA calls them, from either build."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from attn_backends.backends.mla.metadata import ExpandedTensors, RaggedRows
from attn_backends.spec import KVCacheSpec, MLASpec


@dataclass(frozen=True)
class DecodeCall:
    """What the functions are told of decode rows, the same for all layers of a step."""

    kernels: Kernels
    query_starts: torch.Tensor  # [num_rows + 1] i32
    query_len: int
    page_table: torch.Tensor  # [num_rows, max_pages] i32
    seq_lens: torch.Tensor  # [num_rows] i32
    max_seq_len: int  # an upper bound
    num_splits: int  # that keys of a row may be cut into
    schedule: torch.Tensor  # i32, of the library


class DecodeTensors(NamedTuple):
    """What the functions read of a layer's decode rows, and where they write."""

    q_pe: torch.Tensor  # [num_tokens, num_qo_heads, qk_rope_head_dim]
    q_nope: torch.Tensor  # [num_tokens, num_qo_heads, kv_lora_rank]
    rope: torch.Tensor  # [num_pages, page_size, 1, qk_rope_head_dim]
    latent: torch.Tensor  # [num_pages, page_size, 1, kv_lora_rank]
    output: torch.Tensor  # like q_nope, written in place


class Kernels(ABC):
    """One build. Logits are `q_nope` over `latent` plus `q_pe` over `rope`, values are `latent`."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def max_seq_len(self, call: DecodeCall, page_size: int) -> int:
        """The longest row as the kernels are told it; a schedule must be told the same."""
        return call.max_seq_len

    def schedule(self, call: DecodeCall, spec: MLASpec, cache: KVCacheSpec) -> torch.Tensor:
        """Tiles and splits of each row, and a counter that every call leaves at 0: i32, made on the device."""
        made: torch.Tensor = self.module.get_scheduler_metadata(
            batch_size=len(call.seq_lens),
            max_seqlen_q=call.query_len,
            max_seqlen_k=self.max_seq_len(call, cache.page_size),
            num_heads_q=spec.num_qo_heads,
            num_heads_kv=1,
            headdim=spec.qk_rope_head_dim,
            headdim_v=spec.kv_lora_rank,
            cache_seqlens=call.seq_lens,
            qkv_dtype=spec.cache_dtype,
            cu_seqlens_q=call.query_starts,
            page_size=cache.page_size,
            causal=True,
            num_splits=call.num_splits,
        )
        return made

    @abstractmethod
    def decode(self, given: DecodeTensors, scale: float, call: DecodeCall) -> torch.Tensor:
        """Returns the LSE, natural, [num_qo_heads, num_tokens] f32."""

    @abstractmethod
    def prefill(self, given: ExpandedTensors, scale: float, rows: RaggedRows) -> torch.Tensor:
        """Expanded keys and values of ragged rows. Returns the LSE as `decode`."""


@dataclass(frozen=True)
class PrefillCall:
    """Ragged rows of a step, and the functions that attend them."""

    kernels: Kernels
    scale: float
    rows: RaggedRows

    def attend(self, given: ExpandedTensors) -> None:
        """Attend for a layer."""
        lse = self.kernels.prefill(given, self.scale, self.rows)
        if given.lse is not None:
            given.lse.copy_(lse.t())


class VllmKernels(Kernels):
    """vLLM's build, which writes where it is told."""

    def decode(self, given: DecodeTensors, scale: float, call: DecodeCall) -> torch.Tensor:
        q_pe, q_nope, rope, latent, output = given
        _, lse = self.module.flash_attn_varlen_func(
            q_pe, rope, latent, call.query_len, call.query_starts, call.max_seq_len, q_v=q_nope,
            seqused_k=call.seq_lens, block_table=call.page_table, softmax_scale=scale, causal=True, out=output,
            return_softmax_lse=True, scheduler_metadata=call.schedule, num_splits=call.num_splits, fa_version=3,
        )  # fmt: skip
        return lse  # type: ignore[no-any-return]

    def prefill(self, given: ExpandedTensors, scale: float, rows: RaggedRows) -> torch.Tensor:
        _, lse = self.module.flash_attn_varlen_func(
            *given[:3], rows.max_query_len, rows.query_starts, rows.max_key_len, cu_seqlens_k=rows.key_starts,
            softmax_scale=scale, causal=rows.causal, out=given.output, return_softmax_lse=True, fa_version=3,
        )  # fmt: skip
        return lse  # type: ignore[no-any-return]


class InterfaceKernels(Kernels):
    """The authors' build, which allocates what it returns. Nothing here has run it: it is held against its source."""

    def max_seq_len(self, call: DecodeCall, page_size: int) -> int:
        """All that the page table can hold: its function is told nothing else."""
        return call.page_table.shape[1] * page_size

    def decode(self, given: DecodeTensors, scale: float, call: DecodeCall) -> torch.Tensor:
        q_pe, q_nope, rope, latent, output = given
        out, lse, *_ = self.module.flash_attn_with_kvcache(
            q_pe, rope, latent, qv=q_nope, cache_seqlens=call.seq_lens, page_table=call.page_table,
            cu_seqlens_q=call.query_starts, max_seqlen_q=call.query_len, softmax_scale=scale, causal=True,
            scheduler_metadata=call.schedule, num_splits=call.num_splits, return_softmax_lse=True,
        )  # fmt: skip
        output.copy_(out)
        return lse  # type: ignore[no-any-return]

    def prefill(self, given: ExpandedTensors, scale: float, rows: RaggedRows) -> torch.Tensor:
        out, lse, *_ = self.module.flash_attn_varlen_func(
            *given[:3], rows.query_starts, rows.key_starts, rows.max_query_len, rows.max_key_len,
            softmax_scale=scale, causal=rows.causal, return_attn_probs=True,
        )  # fmt: skip
        given.output.copy_(out)
        return lse  # type: ignore[no-any-return]


BUILDS: dict[str, type[Kernels]] = {
    "vllm.vllm_flash_attn.flash_attn_interface": VllmKernels,
    "flash_attn_interface": InterfaceKernels,
}


def load() -> Kernels:
    """The first build that is here.

    Raises:
        ModuleNotFoundError: none is.
    """
    for name, build in BUILDS.items():
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        if getattr(module, "FA3_AVAILABLE", True):
            return build(module)
    raise ModuleNotFoundError(f"FlashAttention 3 is in none of {', '.join(BUILDS)}")
