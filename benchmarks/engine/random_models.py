"""Models of known shapes with random weights, made on the device: for timing, where texts mean nothing."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models

from attn_backends import EngineConfig
from attn_backends.engine.models.hf import ATTENTION_NAME
from attn_backends.engine.models.load import STAGES, Stage, ready_model
from attn_backends.engine.models.loaded_model import LoadedModel

SHAPES: dict[str, dict[str, Any]] = {
    "SmolLM2-135M": {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True,
    },
    "Llama-8B": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
    },
    "DeepSeek-V2-Lite": {
        "family": "DeepseekV2", "hidden_size": 2048, "intermediate_size": 10944, "num_hidden_layers": 27,
        "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 102400, "tie_word_embeddings": False,
        "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1,
    },
}  # fmt: skip


def number_tokenizer(vocab_size: int) -> transformers.PreTrainedTokenizerFast:
    """One word a token: its number."""
    words = {str(number): number for number in range(vocab_size)}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="0")))


def random_model(shape: str, config: EngineConfig, stages: Collection[Stage] = STAGES) -> LoadedModel:
    """A model of a shape, in the config's dtype on its device: a Llama unless the shape names another family."""
    dtype, settings = getattr(torch, config.dtype), dict(SHAPES[shape])
    config_class = getattr(transformers, f"{settings.pop('family', 'Llama')}Config")
    hf_config = config_class(**settings, max_position_embeddings=8192)
    with torch.device(config.device):
        model = transformers.AutoModelForCausalLM.from_config(
            hf_config, dtype=dtype, attn_implementation=ATTENTION_NAME
        )
    return ready_model(model, number_tokenizer(hf_config.vocab_size), config.accelerate, stages=stages)
