"""TORCH_MLA: multi-head latent attention in plain torch, on any device. The one of the family to read first.

Decode rows are gathered in parts of bounded size: the state names the slots of a part and what hides the keys that a
token must not see, shared by all layers; the impl gathers and attends. Prefill is the family's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from pydantic import Field

from attn_backends.backends.mla.attend import attend
from attn_backends.backends.mla.backend import MLABackend
from attn_backends.backends.mla.impl import MLAImpl
from attn_backends.backends.mla.metadata import DecodeRows, MLAMetadataBuilder
from attn_backends.backends.mla.options import MLAOptions
from attn_backends.backends.mla.state import MLAState, MLAStep
from attn_backends.batch.common import CommonAttentionMetadata
from attn_backends.interface.capabilities import Capabilities, CudaGraphSupport
from attn_backends.spec import FP8_DTYPES, Limits, MLASpec

_FLOATS = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})


class TorchMLAOptions(MLAOptions):
    """The `backend_options` of TORCH_MLA."""

    gather_together_bytes: Annotated[int, Field(ge=0)] = 32 << 20
    """Latent rows of decodes that are gathered and attended together; one request's always are."""
    graph_max_seq_len: Annotated[int, Field(ge=1)] = 1024
    """In a CUDA graph every row gathers this many keys, masked (fewer if the model is shorter). A batch with a longer
    row runs eager."""


class TorchMLABackend(MLABackend):
    """Any dtype, page size, rank and number of heads."""

    @staticmethod
    def get_name() -> str:
        return "TORCH_MLA"

    @staticmethod
    def get_impl_cls() -> type[TorchMLAImpl]:
        return TorchMLAImpl

    @staticmethod
    def get_builder_cls() -> type[TorchMLAMetadataBuilder]:
        return TorchMLAMetadataBuilder

    @staticmethod
    def get_state_cls() -> type[TorchMLAState]:
        return TorchMLAState

    @staticmethod
    def capabilities() -> Capabilities:
        return Capabilities(
            devices=frozenset({"cpu", "cuda"}),
            dtypes=_FLOATS,
            cache_dtypes=_FLOATS | frozenset(FP8_DTYPES),
            unequal_head_dims=True,
            lse=True,
            cuda_graph=CudaGraphSupport.UNIFORM_BATCH,
            mla=True,
        )


def _graph_max_seq_len(options: TorchMLAOptions | None, limits: Limits) -> int:
    return min((options or TorchMLAOptions()).graph_max_seq_len, limits.max_model_len)


class TorchMLAMetadataBuilder(MLAMetadataBuilder):
    def can_run_in_cudagraph(self, common_attn_metadata: CommonAttentionMetadata) -> bool:
        """Decodes alone, with no row longer than graphs gather."""
        fits = common_attn_metadata.max_seq_len <= _graph_max_seq_len(self.options, self.limits)
        return fits and super().can_run_in_cudagraph(common_attn_metadata)


@dataclass(frozen=True)
class Part:
    """Decode rows that are gathered together, each with as many keys as the longest."""

    rows: slice
    slots: torch.Tensor  # [num_rows * num_keys] i64; a row with fewer keys repeats its last, which the bias hides
    bias: torch.Tensor  # [num_rows, query_len, 1, num_keys]: 0, or -inf for a key that the token does not see


class TorchMLAState(MLAState):
    backend_name = "TORCH_MLA"

    def plan_decode(self, spec: MLASpec, rows: DecodeRows, held: Any) -> tuple[Part, ...]:
        pieces = tuple(self._parts(spec, rows))
        for part, old in zip(pieces, held or (), strict=held is not None):
            old.slots.copy_(part.slots)
            old.bias.copy_(part.bias)
        return held or pieces

    def _parts(self, spec: MLASpec, rows: DecodeRows) -> Iterator[Part]:
        """In a graph their shapes follow from the limits alone."""
        options = self.options or TorchMLAOptions()
        in_graph = rows.idle is not None
        longest = _graph_max_seq_len(options, self.limits) if in_graph else int(rows.seq_lens_cpu.max())
        key_bytes = spec.latent_dim * spec.dtype.itemsize
        at_once = max(1, options.gather_together_bytes // (longest * key_bytes))
        for first in range(0, rows.num_rows, at_once):
            part = slice(first, min(first + at_once, rows.num_rows))
            num_keys = longest if in_graph else int(rows.seq_lens_cpu[part].max())
            yield self._part(spec, rows, part, num_keys)

    def _part(self, spec: MLASpec, rows: DecodeRows, part: slice, num_keys: int) -> Part:
        page_size, seq_lens = self.cache.page_size, rows.seq_lens[part, None].long()
        keys = torch.arange(num_keys, device=self.device)
        positions = torch.minimum(keys, seq_lens - 1).clamp_(min=0)  # [rows, num_keys]
        slots = rows.page_table[part].gather(1, positions // page_size).long() * page_size + positions % page_size
        last_seen = seq_lens - rows.query_len + torch.arange(rows.query_len, device=self.device)  # [rows, query_len]
        hidden = keys > last_seen[:, :, None, None]  # [rows, query_len, 1, num_keys]
        bias = torch.zeros(hidden.shape, dtype=spec.dtype, device=self.device)
        return Part(part, slots.view(-1), bias.masked_fill_(hidden, float("-inf")))


class TorchMLAImpl(MLAImpl):
    backend_name = "TORCH_MLA"

    def _decode(
        self,
        query: torch.Tensor,
        latent_cache: torch.Tensor,
        step: MLAStep,
        output: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        """Query heads stand where queries of one head would: all of a token's read the same rows."""
        for part in step.plan:
            queries = query[part.rows]  # [rows, query_len, num_qo_heads, latent_dim]
            latents = self._gather(latent_cache, part.slots, None).view(len(queries), 1, -1, query.shape[-1])
            keys = latents.expand(-1, queries.shape[1], -1, -1)
            out, piece_lse = attend(queries, keys, keys, self.spec.scale, bias=part.bias)
            output[part.rows] = out[..., : self.spec.kv_lora_rank]
            if lse is not None:
                lse[part.rows] = piece_lse
