"""The batches of vLLM's own tests of attention backends, through the adapter's classes and through vLLM's attention for
CPUs, against float64.

The numbers are those of BATCH_SPECS in vLLM's tests/v1/attention/test_attention_backends.py but the encoder-only ones.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends import cpu_attn
from vllm.v1.kv_cache_interface import FullAttentionSpec

from attn_backends import AttentionSpec
from attn_backends.adapters.vllm import served
from attn_backends.testing.reference import reference_attention

SPECS: dict[str, tuple[list[int], list[int]]] = {  # lengths, and how many of each are new
    "small_decode": ([32, 40], [1, 1]),
    "small_prefill": ([32, 40], [8, 8]),
    "mixed_small": ([32, 40, 48, 56], [1, 1, 5, 5]),
    "medium_decode": ([128, 256, 512, 1024] * 2, [1] * 8),
    "medium_prefill": ([256, 512, 1024, 2048], [16] * 4),
    "mixed_medium": ([512, 1024, 2048] * 2, [1, 1, 1, 7, 7, 7]),
    "large_decode": ([2048] * 32, [1] * 32),
    "large_prefill": ([4096] * 8, [32] * 8),
    "mixed_large": ([1024, 2048, 4096] * 2, [1, 1, 1, 32, 32, 32]),
    "single_decode": ([1024], [1]),
    "single_prefill": ([1024], [64]),
}
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

    def expected(self) -> torch.Tensor:
        spec = AttentionSpec(HEADS, KV_HEADS, DIM)
        return torch.cat([reference_attention(*row, spec)[0] for row in self.rows])


def run(backend: Any, batch: Batch, layout: str) -> torch.Tensor:
    """A layer's output, by the classes that vLLM takes from a backend."""
    layer = SimpleNamespace(
        layer_name="layer", dtype=torch.float32, head_size_v=DIM, _k_scale_float=1.0, _v_scale_float=1.0
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
    layer.impl = backend.get_impl_cls()(HEADS, DIM, DIM**-0.5, KV_HEADS, None, None, "auto")
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


@pytest.mark.parametrize("layout", ["LBNHC", "LBHNC"])
@pytest.mark.parametrize("name", SPECS)
def test_ours_matches_float64(name: str, layout: str) -> None:
    batch = Batch(*SPECS[name], layout)
    assert (run(served.CPU_ATTN__TORCH, batch, layout) - batch.expected()).abs().max() < 1e-5


@pytest.mark.parametrize("name", SPECS)
def test_ours_is_as_near_to_float64_as_vllms_own(name: str) -> None:
    batch = Batch(*SPECS[name], "LBHNC")
    expected = batch.expected()
    ours, theirs = (
        (run(backend, batch, "LBHNC") - expected).abs().max().item()
        for backend in (served.CPU_ATTN__TORCH, cpu_attn.CPUAttentionBackend)
    )
    assert theirs < 1e-5
    assert ours < 2 * theirs + 1e-6
