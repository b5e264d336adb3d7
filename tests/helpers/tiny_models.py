"""Tiny random Hugging Face models, one a family, with windows short enough to matter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
ALTERNATING = ["sliding_attention", "full_attention"] * 2

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "mistral": ("MistralConfig", {"sliding_window": 7, "head_dim": 16}),
    "phi3": ("Phi3Config", {}),
    "gemma2": (
        "Gemma2Config",
        {"sliding_window": 8, "head_dim": 16, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 24,
         "layer_types": ALTERNATING},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {"sliding_window": 8, "head_dim": 16, "query_pre_attn_scalar": 24, "layer_types": ALTERNATING},
    ),
    "gpt_oss": (
        "GptOssConfig",
        {"sliding_window": 8, "head_dim": 16, "layer_types": ALTERNATING, "num_local_experts": 4,
         "num_experts_per_tok": 2},
    ),
}  # fmt: skip

LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 12, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 2,
    "topk_group": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1,
        "original_max_position_embeddings": 64, "rope_theta": 10000.0}  # fmt: skip
LATENT_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {  # multi-head latent attention
    "deepseek_v2": ("DeepseekV2Config", LATENT),
    "deepseek_v2_lite": ("DeepseekV2Config", {**LATENT, "q_lora_rank": None}),
    "deepseek_v3": ("DeepseekV3Config", LATENT),
    "deepseek_v3_yarn": ("DeepseekV3Config", {**LATENT, "rope_parameters": YARN}),
    "deepseek_v3_halves": ("DeepseekV3Config", {**LATENT, "rope_interleave": False}),
}


def tiny_model(family: str, **changes: Any) -> transformers.PreTrainedModel:
    """A model of the family with random weights, large enough that attention shapes the logits."""
    name, own = (FAMILIES | LATENT_FAMILIES)[family]
    torch.manual_seed(0)
    config = getattr(transformers, name)(**COMMON | own | changes)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() > 1 or "sinks" in parameter_name:
                parameter.normal_(0, 0.15)
    return model.eval()


def save_tiny(folder: Path, family: str = "llama", **changes: Any) -> Path:
    """A tiny model as a Hugging Face folder, with a tokenizer of one token a byte (ids 0 to 2 are special)."""
    model = tiny_model(family, vocab_size=259, **changes)
    with torch.no_grad():  # far apart, or a greedy text would be one token over and over
        model.get_input_embeddings().weight.normal_(0, 2)
    model.save_pretrained(folder)
    specials = {"<pad>": 0, "<s>": 1, "</s>": 2}
    alphabet = {char: 3 + i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=specials | alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    ).save_pretrained(folder)
    return folder
