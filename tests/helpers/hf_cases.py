"""Random tiny models, batches and prompts for the transformers adapter, all drawn from a seed; and what eager makes of
them."""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers

# What a family may be, beside the common draws: values to choose from.
FAMILIES: dict[str, tuple[str, dict[str, list[Any]]]] = {
    "llama": ("LlamaConfig", {"attention_bias": [False, True]}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {}),
    "mistral": ("MistralConfig", {"sliding_window": [None, 1, 2, 3, 5, 8, 13]}),
    "phi3": ("Phi3Config", {}),
    "gemma": ("GemmaConfig", {}),
    "gemma2": ("Gemma2Config", {"sliding_window": [1, 2, 3, 6, 9, 14], "attn_logit_softcapping": [1.0, 5.0, 50.0],
                                "query_pre_attn_scalar": [7, 24, 256]}),
    "gemma3": ("Gemma3TextConfig", {"sliding_window": [1, 2, 3, 6, 9, 14], "query_pre_attn_scalar": [7, 24]}),
    "gpt_oss": ("GptOssConfig", {"sliding_window": [1, 2, 3, 6, 9, 14], "num_local_experts": [2],
                                 "num_experts_per_tok": [1]}),
    "cohere2": ("Cohere2Config", {"sliding_window": [2, 3, 6, 9]}),
    "granite": ("GraniteConfig", {"attention_multiplier": [0.03, 0.1, 0.3]}),
    "smollm3": ("SmolLM3Config", {}),
    "olmo2": ("Olmo2Config", {}),
    "starcoder2": ("Starcoder2Config", {"sliding_window": [None, 2, 5, 9]}),
    "glm4": ("Glm4Config", {}),
    "deepseek_v2": ("DeepseekV2Config", {}),
    "deepseek_v3": ("DeepseekV3Config", {"rope_interleave": [False, True]}),
}  # fmt: skip
LATENT: dict[str, list[Any]] = {
    "q_lora_rank": [24], "kv_lora_rank": [16, 32], "qk_nope_head_dim": [8, 16], "qk_rope_head_dim": [8, 16],
    "v_head_dim": [8, 12, 24], "n_routed_experts": [4], "num_experts_per_tok": [2], "n_shared_experts": [1],
    "n_group": [2], "topk_group": [1], "moe_intermediate_size": [32], "first_k_dense_replace": [1],
}  # fmt: skip
IN_BATCHES = sorted(set(FAMILIES) - {"deepseek_v2", "deepseek_v3"})  # continuous batching has no cache for latents


@dataclass(repr=False)
class Case:
    """A model, and a left-padded batch for it."""

    family: str
    eager: Any
    ids: torch.Tensor  # [batch, tokens]
    mask: torch.Tensor  # [batch, tokens] i64, padding 0
    rng: np.random.Generator
    _wide: Any = None

    @property
    def prompts(self) -> list[list[int]]:
        return [row[keep.bool()].tolist() for row, keep in zip(self.ids, self.mask, strict=True)]

    def under(self, name: str) -> Any:
        """The same model with another attention."""
        config = copy.deepcopy(self.eager.config)
        config._attn_implementation = name
        model = type(self.eager)(config).eval()
        model.load_state_dict(self.eager.state_dict())
        return model

    def log_probs(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Eager's in float64, each row by itself in one forward without padding: [batch, tokens, vocab], padding 0."""
        if self._wide is None:
            self._wide = self.under("eager").double()
            self._wide.set_experts_implementation("eager")  # the grouped one knows no float64
        out = torch.zeros(*ids.shape, 97, dtype=torch.float64)
        with torch.no_grad():
            for row, tokens, keep in zip(out, ids, mask.bool(), strict=True):
                row[keep] = self._wide(input_ids=tokens[keep][None], use_cache=False).logits[0].log_softmax(-1)
        return out

    def __repr__(self) -> str:
        config = self.eager.config
        shown = {name: getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads",
                 "head_dim", "sliding_window", "layer_types")}  # fmt: skip
        return f"{self.family} {shown} lengths {self.mask.sum(1).tolist()} of {self.mask.shape[1]}"


def draw_case(seed: int, family: str | None = None, *, most_rows: int = 4, most_tokens: int = 40) -> Case:
    """A model and a batch, of which nothing is chosen but the family, if that."""
    rng = np.random.default_rng(seed)
    name = family or str(rng.choice(sorted(FAMILIES)))
    config_class, own = FAMILIES[name]
    kv_heads, group, head_dim = (int(rng.choice(values)) for values in ([1, 2, 3], [1, 2, 4, 5], [8, 16, 32]))
    settings: dict[str, Any] = {
        "vocab_size": 97, "hidden_size": kv_heads * group * 12, "intermediate_size": 64,
        "num_hidden_layers": int(rng.choice([1, 2, 3])),
        "num_attention_heads": kv_heads * group, "num_key_value_heads": kv_heads, "head_dim": head_dim,
        "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    if name.startswith("deepseek"):
        settings["num_key_value_heads"] = settings["num_attention_heads"]
        del settings["head_dim"]
        own = own | LATENT
    if name in ("phi3", "starcoder2", "olmo2", "smollm3", "cohere2", "qwen2", "granite", "mistral", "llama"):
        del settings["head_dim"]  # some have none
        settings["hidden_size"] = kv_heads * group * head_dim
    settings |= {key: values[rng.integers(len(values))] for key, values in own.items()}
    if name in ("gemma2", "gemma3", "gpt_oss", "cohere2"):
        kinds = ["sliding_attention", "full_attention"]
        settings["layer_types"] = [kinds[rng.integers(2)] for _ in range(settings["num_hidden_layers"])]
    torch.manual_seed(seed)
    config = getattr(transformers, config_class)(**settings)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():  # of unit size whatever the width, so that attention is neither flat nor a single key
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() > 1 or "sinks" in parameter_name:
                parameter.normal_(0, 1 if "sinks" in parameter_name else parameter.shape[-1] ** -0.5)
    ids, mask = draw_batch(rng, most_rows, most_tokens)
    return Case(name, model.eval(), ids, mask, rng)


def draw_batch(rng: np.random.Generator, most_rows: int, most_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[batch, tokens] ids and mask, padded on the left."""
    lens = rng.integers(1, most_tokens + 1, rng.integers(1, most_rows + 1))
    ids = torch.from_numpy(rng.integers(3, 97, (len(lens), lens.max())))
    mask = (torch.arange(lens.max())[None] >= torch.from_numpy(lens.max() - lens)[:, None]).long()
    return ids, mask


def batching_config_class() -> Any:
    """`ContinuousBatchingConfig`, which 5.17 does not export."""
    from transformers.generation import configuration_utils

    return configuration_utils.ContinuousBatchingConfig


def generate_batch(model: Any, prompts: list[list[int]], max_new_tokens: int, **settings: Any) -> list[Any]:
    """transformers' continuous batching, greedy: each prompt's output, with log-probabilities."""
    config_class = batching_config_class()
    if "page_size" not in inspect.signature(config_class).parameters:  # 5.17
        settings["block_size"] = settings.pop("page_size")
    greedy = transformers.GenerationConfig(
        max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    outputs = model.generate_batch(
        inputs=prompts, generation_config=greedy, progress_bar=False,
        continuous_batching_config=config_class(return_logprobs=True, **settings),
    )  # fmt: skip
    return [outputs[key] for key in sorted(outputs, key=lambda key: int(key.split("_")[-1]))]
