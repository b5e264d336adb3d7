"""Batches as vLLM's model runner makes them, and a layer over them, by the classes that vLLM takes from a backend."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends import cpu_attn
from vllm.v1.kv_cache_interface import FullAttentionSpec

from attn_backends import AttentionSpec
from attn_backends.testing.reference import reference_attention

HEADS, KV_HEADS, DIM, BLOCK = 8, 2, 64, 32
DEVICE = torch.device("cpu")


class Batch:
    """Random queries, keys and values of some rows, the cache with their contexts, and vLLM's metadata of them."""

    def __init__(self, seq_lens: list[int], query_lens: list[int], layout: str) -> None:
        generator = torch.Generator().manual_seed(len(seq_lens) * 1000 + sum(query_lens))
        self.rows = [
            tuple(torch.randn(count, heads, DIM, generator=generator)
                  for count, heads in ((new, HEADS), (length, KV_HEADS), (length, KV_HEADS)))
            for length, new in zip(seq_lens, query_lens, strict=True)
        ]  # fmt: skip
        self.query = torch.cat([query for query, _, _ in self.rows])
        self.key, self.value = (
            torch.cat([row[i][-new:] for row, new in zip(self.rows, query_lens, strict=True)]) for i in (1, 2)
        )
        width = -(-max(seq_lens) // BLOCK)
        pages = torch.randperm(len(seq_lens) * width, generator=generator).int() + 1  # page 0 is vLLM's for padding
        table = pages.view(len(seq_lens), width)
        shape = (
            (len(pages) + 1, BLOCK, KV_HEADS, 2 * DIM)
            if layout == "LBNHC"
            else (len(pages) + 1, KV_HEADS, BLOCK, 2 * DIM)
        )
        packed = torch.zeros(shape)
        self.kv_cache = packed.transpose(1, 2) if layout == "LBNHC" else packed  # [blocks, heads, block_size, 2 * dim]
        slots, self.context_slots = [], []
        for row, (length, new) in enumerate(zip(seq_lens, query_lens, strict=True)):
            at = torch.arange(length)
            page, offset = table[row, at // BLOCK].long(), at % BLOCK
            old = slice(0, length - new)
            self.kv_cache[page[old], :, offset[old], :DIM] = self.rows[row][1][old]
            self.kv_cache[page[old], :, offset[old], DIM:] = self.rows[row][2][old]
            slots.append(page[length - new :] * BLOCK + offset[length - new :])
            self.context_slots.append(page[old] * BLOCK + offset[old])
        starts = torch.tensor([0, *query_lens]).cumsum(0).int()
        self.metadata = CommonAttentionMetadata(
            query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            num_reqs=len(seq_lens), num_actual_tokens=len(self.query), max_query_len=max(query_lens),
            max_seq_len=max(seq_lens), block_table_tensor=table, slot_mapping=torch.cat(slots),
        )  # fmt: skip

    def expected(self, sinks: torch.Tensor | None = None, **asked: Any) -> torch.Tensor:
        """Float64's output of a layer that asks for this."""
        spec = AttentionSpec(HEADS, KV_HEADS, DIM, sinks=sinks is not None, **asked)
        return torch.cat([reference_attention(*row, spec, sinks=sinks)[0] for row in self.rows])


def run(
    backend: Any, batch: Batch, layout: str, *, scales: tuple[float, float] = (1.0, 1.0), **asked: Any
) -> torch.Tensor:
    """The output of one layer, which is made with what it asks in vLLM's words."""
    layer = SimpleNamespace(
        layer_name="layer", dtype=torch.float32, head_size_v=DIM, _k_scale_float=scales[0],
        _v_scale_float=scales[1],
    )  # fmt: skip
    model = SimpleNamespace(dtype=torch.float32, max_model_len=4096, get_num_attention_heads=lambda _: HEADS)
    ours = backend is not cpu_attn.CPUAttentionBackend
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context={"layer": layer} if ours else {}),
        cache_config=SimpleNamespace(
            cache_dtype="auto", get_resolved_kv_cache_layout=lambda: SimpleNamespace(name=layout)
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=64, max_num_batched_tokens=512, async_scheduling=False),
        model_config=model, parallel_config=None, speculative_config=None, additional_config={},
    )  # fmt: skip
    cpu_attn.get_current_vllm_config = lambda: config  # its impl asks for one
    layer.impl = backend.get_impl_cls()(
        HEADS, DIM, DIM**-0.5, KV_HEADS, asked.pop("alibi_slopes", None), asked.pop("sliding_window", None),
        asked.pop("kv_cache_dtype", "auto"), **asked,
    )  # fmt: skip
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=KV_HEADS, head_size=DIM, dtype=torch.float32)
    builder = backend.get_builder_cls()(spec, ["layer"], config, DEVICE)
    layer.isa = getattr(builder, "isa", None)  # vLLM's tells its layers
    metadata = builder.build(0, batch.metadata)
    output = torch.empty_like(batch.query)
    if not ours:  # it writes by itself, in an order of its own
        written = [(batch.key, batch.value, batch.metadata.slot_mapping)]
        for (_, key, value), slots in zip(batch.rows, batch.context_slots, strict=True):
            written.append((key[: len(slots)], value[: len(slots)], slots))
        for key, value, slots in written:
            layer.impl.do_kv_cache_update(layer, key, value, batch.kv_cache, slots)
    layer.impl.forward(layer, batch.query, batch.key, batch.value, batch.kv_cache, metadata, output)
    return output
