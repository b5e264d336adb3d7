"""What is served: vLLM's settings and prompts by name. Read by the tests, and by the processes that they start."""

from __future__ import annotations

from typing import Any

SMOLLM2 = "smollm2"
COMMON: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 512, "max_num_batched_tokens": 64, "max_num_seqs": 8, "block_size": 32,
    "enable_prefix_caching": True, "enforce_eager": True, "seed": 1,
}  # fmt: skip
LORA, LORA_RANK = "lora", 8
FOLDER = "{folder}"  # in a setting: where the models are
DRAFT = {"method": "draft_model", "model": f"{FOLDER}/{SMOLLM2}", "num_speculative_tokens": 3, "max_model_len": 512}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
MTP = {"method": "mtp", "num_speculative_tokens": 2, "attention_backend": "CPU_MLA"}
ANY_CPU = {"attention_config": {"backend": "CPU_MLA"}}  # where a CPU has AMX vLLM takes AMX_MLA, for bfloat16 alone
LATENT = ANY_CPU | {  # vLLM cuts no prompt of these
    "random": True, "block_size": 16, "enable_prefix_caching": False, "max_num_batched_tokens": 512,
}  # fmt: skip
CHUNKS = ANY_CPU | {  # unless its platform does not forbid it, as with AMX_MLA
    "random": True, "block_size": 16, "kept": {
        "scheduler_config.enable_chunked_prefill": True, "cache_config.enable_prefix_caching": True,
        "scheduler_config.max_num_batched_tokens": 64,
    },
}  # fmt: skip
ASYNCHRONOUS = {"streams": True, "kept": {"scheduler_config.async_scheduling": True}}

# `env` belongs to the process: scenarios with one have their own. `kept` are settings that vLLM's platform of CPUs
# changes, and with `streams` the runner asks for CUDA's.
SERVED: dict[str, dict[str, Any]] = {
    "eager": {},  # prompts longer than a step: chunks, mixed steps, and a second round that hits the prefix cache
    "ngram": {"speculative_config": NGRAM},
    "compiled": {"enforce_eager": False},
    "heads first": {"env": {"VLLM_KV_CACHE_LAYOUT": "HND"}},
    "spawned": {"env": {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}},
    "three ranks": {
        "tensor_parallel_size": 3, "distributed_executor_backend": "mp",
        "env": {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"},
    },  # SmolLM2 has 9 query heads, and 3 of keys
    "gemma": {"model": "gemma", "random": True},
    "one group": {"model": "gemma", "random": True, "disable_hybrid_kv_cache_manager": True},
    "gpt-oss": {"model": "gpt-oss", "random": True},
    "shared": {"model": "gemma3n", "random": True},  # its last layers read what earlier ones have cached
    "deepseek": {"model": "deepseek", **LATENT},
    "deepseek in chunks": {"model": "deepseek", **CHUNKS},
    "amx": {"model": "deepseek", "random": True, "dtype": "bfloat16"},  # pages of 32, chunks, and cached prefixes
    # Every draft is taken, as SmolLM2 drafts for itself.
    "draft": {"speculative_config": DRAFT},
    # Hardly any draft is taken: the layer that drafts has random weights. Its own attention is of the MLA family too.
    "mtp": {"model": "deepseek-mtp", "speculative_config": MTP, **LATENT},
    "mtp in chunks": {"model": "deepseek-mtp", "speculative_config": MTP, **CHUNKS},
    "asynchronous": {"speculative_config": NGRAM | {"method": "ngram_gpu"}, **ASYNCHRONOUS},
    "asynchronous drafts": {"speculative_config": DRAFT, **ASYNCHRONOUS},
    "fp8": {"model": "fp8", "random": True, "kv_cache_dtype": "fp8"},  # each layer has scales of its own
    "lora": {"enable_lora": True, "max_lora_rank": LORA_RANK, "max_loras": 1, "lora": True},
}  # fmt: skip

_PLAIN = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 1000,
    "max_position_embeddings": 1024, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "initializer_range": 0.1, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "torch_dtype": "float32",
}  # fmt: skip
TINY: dict[str, dict[str, Any]] = {
    "gemma": _PLAIN | {
        "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "head_dim": 32, "query_pre_attn_scalar": 24,
        "sliding_window": 40, "attn_logit_softcapping": 4.0, "final_logit_softcapping": 10.0,
        "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gpt-oss": _PLAIN | {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "head_dim": 32, "sliding_window": 40,
        "num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": ["sliding_attention", "full_attention"] * 2,
        "swiglu_limit": 7.0, "hidden_act": "silu",
    },
    "fp8": _PLAIN | {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "head_dim": 32, "hidden_act": "silu",
        "quantization_config": {
            "quant_method": "compressed-tensors", "format": "dense", "config_groups": {}, "ignore": [],
            "kv_cache_scheme": {
                "num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True,
            },
        },
    },
    "gemma3n": _PLAIN | {
        "architectures": ["Gemma3nForCausalLM"], "model_type": "gemma3n_text", "head_dim": 32, "sliding_window": 40,
        "num_hidden_layers": 6, "num_kv_shared_layers": 2, "intermediate_size": [128] * 6,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 1000, "laurel_rank": 8,
        "activation_sparsity_pattern": [0.0] * 6, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
    },
    "deepseek": _PLAIN | {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "num_key_value_heads": 4,
        "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32,
        "first_k_dense_replace": 4, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
        "moe_intermediate_size": 64, "hidden_act": "silu", "n_group": 1, "topk_group": 1,
    },
    "deepseek-mtp": _PLAIN | {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_key_value_heads": 4,
        "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32,
        "first_k_dense_replace": 8, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
        "moe_intermediate_size": 64, "hidden_act": "silu", "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 1,
    },
}  # fmt: skip

_STORY = "The history of the city begins with a small harbour on the river, where traders from many lands met. " * 3
PROMPTS = [
    "The capital of France is", "Water boils at", _STORY + "In the year", _STORY + "The first mayor was",
    _STORY[:150] + " Why?", "Write a long story about a fox and a hound who", "1 2 3 4 5 6 7", "1 2 1 2 1 2 1 2 1",
]  # fmt: skip
AGAIN = [_STORY + "In the year", _STORY + "Another"]
RANDOM_LENGTHS = (5, 40, 130, 200, 260)
NEW_TOKENS = 24


def random_prompts() -> list[list[int]]:
    """Prompts of the models with random weights."""
    return [[(7 * i * (k + 3) + k) % 990 + 5 for i in range(n)] for k, n in enumerate(RANDOM_LENGTHS)]


def random_rounds() -> list[list[list[int]]]:
    """What is served one round after the other: the second finds prefixes in the cache."""
    return [random_prompts(), random_prompts()[2:4]]
