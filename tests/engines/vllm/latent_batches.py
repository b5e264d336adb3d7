"""vLLM's own layer of multi-head latent attention, with its weights and a batch of latent rows, on one backend."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import MLAAttentionSpec

from attn_backends import AttentionSpec
from attn_backends.testing.reference import reference_attention
from tests.engines.vllm.scenarios import TINY

HEADS, NOPE, ROPE, RANK, V_DIM, BLOCK = 8, 128, 64, 512, 128, 16  # DeepSeek-R1's at 16 ranks
SCALE = (NOPE + ROPE) ** -0.5
DEVICE = torch.device("cpu")


class Weights(torch.nn.Module):
    """`kv_b_proj`: keys and values of all heads from a latent row."""

    quant_method = None

    def __init__(self) -> None:
        super().__init__()
        weight = torch.randn(HEADS * (NOPE + V_DIM), RANK, generator=torch.Generator().manual_seed(7)) / RANK**0.5
        self.weight = torch.nn.Parameter(weight, requires_grad=False)

    def forward(self, latent: torch.Tensor) -> tuple[torch.Tensor, None]:
        return latent @ self.weight.T, None


class LatentBatch:
    """Random queries and latent rows of some requests, the cache with their contexts, and vLLM's metadata of them."""

    def __init__(self, seq_lens: Sequence[int], query_lens: Sequence[int]) -> None:
        generator = torch.Generator().manual_seed(len(seq_lens) * 1000 + sum(query_lens))
        self.query_lens = query_lens
        self.queries = [torch.randn(new, HEADS, NOPE + ROPE, generator=generator) for new in query_lens]
        self.latents = [torch.randn(length, RANK + ROPE, generator=generator) for length in seq_lens]
        width = -(-max(seq_lens) // BLOCK)
        pages = torch.randperm(len(seq_lens) * width, generator=generator).int() + 1  # page 0 is vLLM's for padding
        table = pages.view(len(seq_lens), width)
        self.kv_cache = torch.zeros(len(pages) + 1, BLOCK, RANK + ROPE)
        slots = []
        for row, (length, new) in enumerate(zip(seq_lens, query_lens, strict=True)):
            at = torch.arange(length)
            slot = table[row, at // BLOCK].long() * BLOCK + at % BLOCK
            self.kv_cache.view(-1, RANK + ROPE)[slot[: length - new]] = self.latents[row][: length - new]
            slots.append(slot[length - new :])
        starts = torch.tensor([0, *query_lens]).cumsum(0).int()
        lengths = torch.tensor(seq_lens, dtype=torch.int32)
        self.metadata = CommonAttentionMetadata(
            query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=lengths, seq_lens_cpu_upper_bound=lengths,
            num_reqs=len(seq_lens), num_actual_tokens=sum(query_lens), max_query_len=max(query_lens),
            max_seq_len=max(seq_lens), block_table_tensor=table, slot_mapping=torch.cat(slots),
        )  # fmt: skip

    def expected(self, weights: Weights) -> torch.Tensor:
        """[num_tokens, HEADS * V_DIM] f64: attention over the keys and values that the latent rows stand for."""
        spec = AttentionSpec(HEADS, HEADS, NOPE + ROPE, V_DIM, SCALE)
        rows = []
        for query, latent in zip(self.queries, self.latents, strict=True):
            expanded = latent[:, :RANK].double() @ weights.weight.double().T
            key, value = expanded.view(-1, HEADS, NOPE + V_DIM).split([NOPE, V_DIM], -1)
            rope = latent[:, None, RANK:].double().expand(-1, HEADS, -1)
            rows.append(reference_attention(query, torch.cat([key, rope], -1), value, spec)[0].flatten(1))
        return torch.cat(rows)


def config_of(folder: Path) -> VllmConfig:
    """vLLM's configuration of a model with such layers, made as its engine makes it. `folder` gets the model's."""
    sizes = {
        "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "kv_lora_rank": RANK, "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE, "v_head_dim": V_DIM, "max_position_embeddings": 4096,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(TINY["deepseek"] | sizes))
    args = EngineArgs(
        str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=4096, max_num_seqs=64, enforce_eager=True
    )
    config = args.create_engine_config()
    config.cache_config.kv_cache_layout = "LBNHC"  # which the engine settles; a latent row has one head
    return config


def run(backend: Any, batch: LatentBatch, config: VllmConfig) -> torch.Tensor:
    """[num_tokens, HEADS * V_DIM]: the output of vLLM's layer on a backend of vLLM's or ours."""
    context = config.compilation_config.static_forward_context
    context.clear()
    with set_current_vllm_config(config):
        layer = MLAAttention(
            HEADS, SCALE, NOPE, ROPE, V_DIM, None, RANK, Weights(), cache_config=config.cache_config, prefix="layer",
            attn_backend=backend,
        )  # fmt: skip
        layer.process_weights_after_loading(torch.float32)
        spec = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=RANK + ROPE, dtype=torch.float32)
        metadata = backend.get_builder_cls()(spec, ["layer"], config, DEVICE).build(0, batch.metadata)
        query = torch.cat(batch.queries)
        new = torch.cat([row[-count:] for row, count in zip(batch.latents, batch.query_lens, strict=True)])
        latent, rope = new[:, :RANK].contiguous(), new[:, None, RANK:].contiguous()
        cache, slots = batch.kv_cache.clone(), batch.metadata.slot_mapping
        layer.update_kv_cache(latent, rope, cache, slots, metadata, layer.kv_cache_dtype, layer._k_scale)
        output = torch.empty(len(query), HEADS * V_DIM)
        return layer.forward_impl(query, latent, rope, cache, metadata, output)  # type: ignore[no-any-return]
